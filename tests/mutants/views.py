"""Members that come and go: what a flush decides, and what a member does before and after."""

from mutants.seed import Mutant

TESTS = ["tests/property/test_protocol.py::test_schedules[0]"]

_FROM_2500 = ("tests/property/test_protocol.py::test_schedules[10]",)
_FROM_3250 = ("tests/property/test_protocol.py::test_schedules[13]",)
_AGAIN = ("tests/property/test_protocol.py::test_a_process_that_connects_again_is_not_lost_unless_it_was_a_member",)

_STATE = ("tests/unit/test_round_state.py",)

MUTANTS = [
    Mutant(
        "steps made during a flush count at once",
        "link/net/protocol.py",
        "        if not self.is_flushing:\n            self._step = max(self._step, step)\n",
        "        self._step = max(self._step, step)\n",
        tests=("tests/property/test_protocol.py::test_steps_made_during_a_flush_count_after_it",),
    ),
    Mutant(
        "a process that was lost before it became a member stays lost",
        "link/net/flush.py",
        "            self.lost.discard(process)\n",
        "            pass\n",
        tests=_AGAIN,
    ),
    Mutant(
        "a lost member that connects again counts as never lost",
        "link/net/flush.py",
        "        if not self.view.has(process):\n            self.lost.discard(process)\n",
        "        self.lost.discard(process)\n",
        tests=_AGAIN,
    ),
    Mutant(
        "a lost member is no longer due in rounds that it owed",
        "link/net/views.py",
        "        replace(era, owing=tuple(member for member in era.owing if view.has(member)))  # for rounds nobody knows of yet\n",
        "        replace(\n"
        "            era,\n"
        "            owing=tuple(member for member in era.owing if view.has(member)),\n"
        "            due=frozenset(member.seat for member in era.owing if view.has(member)),\n"
        "        )\n",
    ),
    Mutant(
        "a lost member still counts by what it sends late",
        "link/net/protocol.py",
        "        elif self.view.has(sender):\n",
        "        else:\n",
    ),
    Mutant(
        "rounds are completed during a flush",
        "link/net/flush.py",
        "        return self.is_under_way or any(map(self.view.has, self.lost))\n",
        "        return any(map(self.view.has, self.lost))\n",
    ),
    Mutant(
        "rounds are completed in spite of a loss",
        "link/net/flush.py",
        "        return self.is_under_way or any(map(self.view.has, self.lost))\n",
        "        return self.is_under_way\n",
    ),
    Mutant(
        "a joiner does not note what is decided while it waits",
        "link/net/protocol.py",
        "round_id.step > self._applied.of(self.me):",
        "round_id.step > (decision.boundary if self._applied.own is None else self._applied.own):",
        tests=_FROM_2500,
    ),
    Mutant(
        "a member that lacks rounds which nobody keeps goes on",
        "link/net/protocol.py",
        "            self.flush.lost |= decision.stranded\n",
        "",
        tests=_FROM_2500,
    ),
    Mutant(
        "a follower proposes those that train away",
        "link/net/protocol.py",
        "            gone &= self.view.following\n",
        "            pass\n",
    ),
    Mutant(
        "a follower leaves the only members of a round behind",
        "link/net/protocol.py",
        "        if self.me not in known.attempt.members:\n            return []\n",
        "",
        tests=_FROM_3250,
    ),
    Mutant(
        "the step of a joiner's admission counts although a later view admits it earlier",
        "link/net/applied_steps.py",
        "        self._admitted = dict(decision.applied)\n",
        "        self._said |= {m: max(s, self._said.get(m, s)) for m, s in decision.applied.items() if m != self._me}\n",
        tests=_FROM_3250,
    ),
    Mutant(
        "members that are gone are remembered",
        "link/net/applied_steps.py",
        "        self._said = {member: step for member, step in self._said.items() if view.has(member)}\n",
        "",
    ),
    Mutant(
        "a round that somebody has completed is made again",
        "link/net/views.py",
        "    if done:\n        return done[0]\n",
        "",
    ),
    Mutant(
        "parts of two attempts are mixed",
        "link/net/views.py",
        "return newest if counted == newest.members else Attempt(view.number, counted)",
        "return Attempt(newest.view, counted)",
    ),
    Mutant(
        "the boundary is where the slowest is",
        "link/net/views.py",
        "    boundary = max(one.step for one in told.values())\n",
        "    boundary = min(one.step for one in told.values())\n",
    ),
    Mutant(
        "nothing is passed on after a loss",
        "link/net/protocol.py",
        "            if relay.holder == self.me:\n",
        "            if False:\n",
    ),
    Mutant(
        "rounds are opened during a flush",
        "link/net/protocol.py",
        "        if self.is_flushing:\n            return\n        waiting",
        "        waiting",
    ),
    Mutant(
        "a round is forgotten as soon as it is applied here",
        "link/net/protocol.py",
        "        applied = min(map(self._applied.of, self.view.members), default=-1)\n",
        "        applied = self._applied.of(self.me)\n",
    ),
    Mutant(
        "a joiner is thought to be up to date",
        "link/net/views.py",
        "admitted if one.applied is None else one.applied",
        "boundary if one.applied is None else one.applied",
    ),
    Mutant(
        "the oldest knowledge decides",
        "link/net/views.py",
        "    basis = max(told.values()",
        "    basis = min(told.values()",
    ),
    Mutant(
        "parts are not sent again after a loss",
        "link/net/protocol.py",
        "                if before.in_parts and before != known.attempt:\n",
        "                if False:\n",
    ),
    Mutant(
        "rounds that nobody knows of yet wait for the lost",
        "link/net/views.py",
        "tuple(member for member in era.owing if view.has(member))",
        "era.owing",
    ),
    Mutant(
        "who is excluded goes on",
        "link/net/protocol.py",
        "            self._actions.append(Exclude(view))\n            return",
        "            return",
    ),
    Mutant(
        "a result that came during a flush is not told",
        "link/net/round_state.py",
        "self.done or self.result is not None)",
        "self.done)",
        tests=("tests/property/test_protocol.py::test_a_result_that_comes_during_a_flush_is_told_in_the_next",),
    ),
    Mutant(
        "the lost are proposed away once only",
        "link/net/protocol.py",
        "        self._send(self._others(), told)\n        self._propose_without_lost()\n",
        "        self._send(self._others(), told)\n",
    ),
    Mutant(
        "a lost member's payload counts nowhere",
        "link/net/views.py",
        "            return not newest.in_parts and member in held\n",
        "            return False\n",
    ),
    Mutant(
        "a member is late for what it has sent",
        "link/net/views.py",
        "        return member in held or view.late",
        "        return view.late",
    ),
    Mutant(
        "a message of a newer view is taken at once",
        "link/net/protocol.py",
        "        if view > self.adopted:\n",
        "        if False:\n",
    ),
    Mutant(
        "messages of views that never come are kept for ever",
        "link/net/protocol.py",
        "        self.flush.forget_early(step)\n",
        "",
        tests=("tests/property/test_protocol.py::test_messages_of_a_view_that_never_comes_go_with_their_rounds",),
    ),
    Mutant(
        "a process that is no member adopts a view",
        "link/net/flush.py",
        "if not self.view.has(self._me) or not told.keys()",
        "if not told.keys()",
        tests=("tests/property/test_protocol.py::test_a_process_that_is_no_member_adopts_nothing",),
    ),
    Mutant(
        "a payload that nobody holds is passed on",
        "link/net/views.py",
        "if holders and (lacking := receiving - holders):",
        "if lacking := receiving - holders:",
        tests=("tests/property/test_protocol.py::test_a_round_that_names_a_member_nobody_knows_does_not_stop_a_flush",),
    ),
    Mutant(
        "any means complete a round",
        "link/net/round_state.py",
        "if any(key not in self.means for key in keys):",
        "if len(self.means) < len(keys):",
        tests=_STATE,
    ),
    Mutant(
        "a part from outside holds a round up",
        "link/net/round_state.py",
        "not here.keys() >= {*self.attempt.members}",
        "here.keys() != {*self.attempt.members}",
        tests=_STATE,
    ),
    Mutant(
        "a result changes a round of whole payloads",
        "link/net/round_state.py",
        "elif not self.done and message.attempt.in_parts:",
        "elif not self.done:",
        tests=_STATE,
    ),
    Mutant(
        "rounds are told without eras",
        "link/net/messages.py",
        "if (header.adopted or rounds) and not eras:",
        "if header.adopted and not eras:",
        tests=("tests/unit/test_messages.py",),
    ),
    Mutant(
        "messages of a fragment that is never opened are kept for ever",
        "link/net/round_table.py",
        "[one for one in kept if one[1].round_id.step > applied]",
        "kept",
        tests=("tests/unit/test_round_table.py",),
    ),
    Mutant(
        "members that are too few go on",
        "link/net/protocol.py",
        "or self.is_held_up or self._is_paused(round_id) or",
        "or self.is_held_up or",
    ),
    Mutant(
        "what is told of an older view is kept",
        "link/net/flush.py",
        "        if told.view < self.view.number:\n            return False\n",
        "",
    ),
    Mutant(
        "what was told of older views is kept",
        "link/net/flush.py",
        "        self._told = {number: known for number, known in self._told.items() if number >= view.number}\n",
        "",
    ),
    Mutant(
        "a view is adopted before all have told",
        "link/net/flush.py",
        "        if not self.is_under_way or len(told) < len(self.view.members):",
        "        if not self.is_under_way:",
        also=(
            "link/net/flush.py",
            "        if not self.view.has(self._me) or not told.keys() >= set(self.view.members):\n            return None\n"
            "        return decide(self.view, {member: told[member] for member in self.view.members})\n",
            "        return decide(self.view, {member: told[member] for member in self.view.members if member in told})\n",
        ),
    ),
    Mutant(
        "messages that waited for a view are kept",
        "link/net/flush.py",
        "        early, self._early = self._early, []\n",
        "        early = list(self._early)\n",
    ),
    Mutant(
        "a part is reduced again and again",
        "link/net/round_state.py",
        "        self.reducing.add(key)\n",
        "",
    ),
    Mutant(
        "a round in two shots is complete without all means",
        "link/net/round_state.py",
        "            if any(key not in self.means for key in keys):\n",
        "            if all(key not in self.means for key in keys):\n",
    ),
    Mutant(
        "a part of the first attempt counts in a later one",
        "link/net/round_state.py",
        "        key = self.attempt.view, part\n        here = self.parts.get(key, {})\n",
        "        key = self.attempt.view, part\n        here = self.parts.get(min((k for k in self.parts if k[1] == part), default=key), {})\n",
    ),
    Mutant(
        "what a member said earlier counts again",
        "link/net/applied_steps.py",
        "        self._said[member] = max(step, self.said(member))\n",
        "        self._said[member] = step\n",
    ),
]
