"""Members over a real network: states given too early, runs started by the wrong ones, losses that go unnoticed."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_member.py"]
TABLE, DONOR, ENTRANCE, ADMISSION, MEMBERSHIP, MEMBER, ELASTIC, DEPARTURE, LOOP, ADDRESS = (
    f"link/net/{name}.py"
    for name in (
        "round_table",
        "donor",
        "entrance",
        "admission",
        "membership",
        "member",
        "elastic_link",
        "departure",
        "event_loop",
        "own_address",
    )
)
_DONOR = ("tests/unit/test_donor.py",)


def _in(file: str, test: str) -> tuple[str]:
    return (f"tests/unit/test_{file}.py::{test}",)


_CRASH = _in("entrance", "test_after_a_crash_most_or_the_furthest_start_and_the_rest_joins")
_ALL = _in("entrance", "test_all_that_are_present_start_in_the_first_view")
_LATE = _in("entrance", "test_enough_workers_start_late")
_OTHER_DONOR = _in("member", "test_another_donor_gives_what_a_lost_one_has_not")
_PROMOTED = _in("member", "test_a_joiner_that_is_promoted_owes_payloads_from_the_boundary_on")
_NONSENSE = _in("member", "test_the_others_go_on_without_a_member_that_sends_nonsense")

MUTANTS = [
    Mutant(
        "a process learns late that another has its seat",
        "link/net/membership.py",
        "if own is not None and own.life != self._me.life:",
        "if False:",
        tests=("tests/unit/test_membership.py::test_it_learns_so_at_once",),
    ),
    Mutant(
        "workers are started again after the end",
        "cli/launch_elastic.py",
        "        self._is_over |= ended.status == 0\n",
        "",
        tests=("tests/unit/test_launch_elastic.py::test_nobody_is_started_again_after_a_worker_has_finished",),
    ),
    Mutant(
        "a state of fewer ranks is taken",
        "link/elastic_shards.py",
        "        if any(one.keys() != some[0].keys() for some in (counts, vectors) for one in some):\n",
        "        if False:\n",
        tests=("tests/unit/test_elastic_rank_links.py",),
    ),
    Mutant(
        "a round that has failed is completed",
        "link/net/open_round.py",
        "        if not self._completed.done():\n            self._completed.set_result(",
        "        if True:\n            self._completed.set_result(",
        tests=_in("member", "test_one_that_cannot_go_on_blames_nobody"),
    ),
    Mutant(
        "one that cannot go on proposes others away",
        MEMBER,
        "                if self.error is None:  # one that cannot go on does not decide about others\n",
        "                if True:\n",
        tests=_in("member", "test_one_that_cannot_go_on_blames_nobody"),
    ),
    Mutant(
        "a process that is gone is dialled for ever",
        MEMBER,
        "            if not self.membership.is_present(peer) and not view.has(peer):\n",
        "            if False:\n",
        tests=_in("member", "test_a_process_that_is_gone_is_no_longer_dialled"),
    ),
    Mutant(
        "an error in the background goes unnoticed",
        MEMBERSHIP,
        "        if not task.cancelled() and (fault := task.exception()) is not None:\n",
        "        if False and (fault := task.exception()) is not None:\n",
        tests=_in("member", "test_an_error_in_the_background_ends_the_process"),
    ),
    Mutant(
        "two that have just joined and lost each other wait for each other",
        MEMBER,
        "            if is_stuck() and protocol.is_dispensable:\n",
        "            if False:\n",
        tests=_in("elastic_link", "test_of_two_that_have_just_joined_and_lose_each_other_one_leaves"),
    ),
    Mutant(
        "a joiner is given a state that holds the last exchange",
        DONOR,
        "        if self.is_over:\n            return []\n",
        "",
        tests=_in("donor", "test_nothing_is_copied_after_the_last_exchange"),
    ),
    Mutant(
        "a donor does not notice the last exchange",
        ELASTIC,
        "        self.donor.is_over |= completed.round_id.last\n",
        "",
        tests=_in("member", "test_a_donor_ends_with_the_last_exchange"),
    ),
    Mutant(
        "a run whose last round has no delay never ends",
        ELASTIC,
        "        if self.unfinished:  # the last",
        "        if False:  # the last",
        tests=_in("elastic_loop", "test_a_run_whose_last_round_has_no_delay_ends"),
    ),
    Mutant(
        "an eager worker's share is of the members before a change that is under way",
        ELASTIC,
        "            event_loop().run(member.wait_opened(step))\n",
        "            pass\n",
        tests=_in("member", "test_the_weights_of_a_round_are_told_once_its_members_are_certain"),
    ),
    Mutant(
        "one that is excluded after its last round ends well",
        DEPARTURE,
        "    if excluded is not None:\n",
        "    if False:\n",
        tests=_in("elastic_link", "test_one_that_is_excluded_after_its_last_round_does_not_end_well"),
    ),
    Mutant(
        "states are given before they are settled",
        DONOR,
        "for copy in self._copies if self._protocol.is_settled(copy.applied)]",
        "for copy in self._copies]",
        tests=_DONOR,
    ),
    Mutant(
        "members that train are given states",
        DONOR,
        "if view.has(joiner) and joiner.seat in view.following:",
        "if view.has(joiner):",
        tests=_DONOR,
    ),
    Mutant(
        "an older life is given states",
        DONOR,
        "if view.has(joiner) and joiner.seat in view.following:",
        "if joiner.seat in view.following:",
        tests=_DONOR,
    ),
    Mutant(
        "a joiner is given what is too old",
        DONOR,
        "if fragment == copy.fragment and boundary <= copy.applied:",
        "if fragment == copy.fragment:",
        tests=_DONOR,
    ),
    Mutant(
        "copies are made again and again", DONOR, "return sorted(asked - copied)", "return sorted(asked)", tests=_DONOR
    ),
    Mutant("copies are made too early", DONOR, "if boundary <= applied}", "}", tests=_DONOR),
    Mutant("lost joiners are remembered", DONOR, "if decision.view.has(key[0])}", "}", tests=_DONOR),
    Mutant(
        "copies for lost joiners are kept",
        DONOR,
        "        if not self._asked:\n            self._copies = []\n",
        "",
        tests=_DONOR,
    ),
    Mutant(
        "a run starts without waiting",
        ENTRANCE,
        "not (late and len(present) >= self._min_workers)",
        "len(present) < self._min_workers",
        tests=_ALL,
    ),
    Mutant("a run waits for all", ENTRANCE, "not (late and len(present) >= self._min_workers)", "True", tests=_LATE),
    Mutant(
        "too few start",
        ENTRANCE,
        "not (late and len(present) >= self._min_workers)",
        "not late",
        tests=_in("entrance", "test_too_few_workers_do_not_start_and_say_who_is_missing"),
    ),
    Mutant(
        "a run that is over is joined",
        ENTRANCE,
        "        if view.over:\n",
        "        if False:\n",
        tests=_in("entrance", "test_nobody_joins_a_run_that_is_over"),
    ),
    Mutant(
        "all start together after a crash",
        ENTRANCE,
        "        return groups[max(groups, key=rank)]\n",
        "        return present\n",
        tests=_CRASH,
    ),
    Mutant(
        "the furthest start even if they are few",
        ENTRANCE,
        "len(groups[start]), steps[start], -min(groups[start]).seat",
        "steps[start], len(groups[start]), -min(groups[start]).seat",
        tests=_CRASH,
    ),
    Mutant(
        "the first start though others are further",
        ENTRANCE,
        "len(groups[start]), steps[start], -min(groups[start]).seat",
        "len(groups[start]), 0, -min(groups[start]).seat",
        tests=_CRASH,
    ),
    Mutant(
        "different beginnings are joined",
        ENTRANCE,
        "if not greeting.steps and (differs := self._difference(greeting)):",
        "if False and (differs := self._difference(greeting)):",
        tests=_in("entrance", "test_workers_that_begin_from_nothing_must_begin_alike"),
    ),
    Mutant(
        "a fresh worker differs from those that resume",
        ENTRANCE,
        "return None if own.steps else describe",
        "return describe",
        also=(ENTRANCE, "if not greeting.steps and (differs", "if (differs"),
        tests=_in("entrance", "test_a_fresh_worker_joins_those_that_resume"),
    ),
    Mutant(
        "members that are gone are at work",
        ENTRANCE,
        "if any(membership.is_present(process) for process in",
        "if any(True for process in",
        tests=_in("entrance", "test_a_run_that_was_left_with_a_reason_is_not_over"),
    ),
    Mutant(
        "no other donor is asked",
        ADMISSION,
        "        self._ask_again()\n        if self._promoting:\n",
        "        if self._promoting:\n",
        tests=_OTHER_DONOR,
    ),
    Mutant(
        "all donors are asked again",
        ADMISSION,
        "and self._asked.get(fragment) not in donors:",
        "and fragment not in self._asked:",
        tests=_OTHER_DONOR,
    ),
    Mutant("the first donor gives all", ADMISSION, "donors[fragment % len(donors)]", "donors[0]", tests=_OTHER_DONOR),
    Mutant(
        "a joiner is promoted into the past",
        ADMISSION,
        "self._promoted.set_result(decision.boundary)",
        "self._promoted.set_result(decision.boundary - 1)",
        tests=_PROMOTED,
    ),
    Mutant(
        "a joiner follows the newest step of nobody",
        ADMISSION,
        "return max(self._boundary, self._member.protocol.newest_applied)",
        "return self._member.protocol.newest_applied",
        tests=_PROMOTED,
    ),
    Mutant(
        "weights are those of the newest members",
        MEMBER,
        "for span in reversed(spans) if span.first_step <= step)",
        "for span in reversed(spans))",
        tests=_PROMOTED,
    ),
    Mutant(
        "members owe a step early", MEMBER, "Span(decision.boundary + 1,", "Span(decision.boundary,", tests=_PROMOTED
    ),
    Mutant("a peer that is refused stays a member", MEMBER, "        self.lost(peer, why)\n\n", "\n", tests=_NONSENSE),
    Mutant(
        "a refused worker is told nothing",
        MEMBER,
        'self.peers.drop(peer, f"{REFUSED}{why}")',
        "self.peers.drop(peer)",
        tests=_NONSENSE,
    ),
    Mutant(
        "payloads are not compared",
        MEMBER,
        "usable = self.rounds.check(peer, message, view)",
        "usable = self.rounds.check(peer, message, view) or True",
        also=(TABLE, "_check_size(message.payload, frozenset({reduction.payload_bytes}))", "pass"),
        tests=_NONSENSE,
    ),
    Mutant(
        "payloads that waited are dropped",
        MEMBER,
        "            self._check_and_receive(peer, message, view)\n\n    def adv",
        "            pass\n\n    def adv",
        tests=_in("elastic_link", "test_a_worker_joins_a_run_that_is_under_way"),
    ),
    Mutant(
        "rounds opened after a failure wait for ever",
        MEMBER,
        "            opened.fail(self.error)\n            return\n",
        "            return\n",
        tests=_in("member", "test_a_round_that_is_waited_for_ends_with_the_error"),
    ),
    Mutant(
        "older lives are kept connected",
        MEMBER,
        "                self.peers.drop(peer)\n                del self.greetings[peer]\n",
        "                pass\n",
        tests=_in("entrance", "test_a_seat_is_taken_again_by_another_process"),
    ),
    Mutant(
        "a view comes back after a newer one",
        MEMBERSHIP,
        "entry is None or entry.version <= self._version:",
        "entry is None:",
        also=(MEMBERSHIP, "        if view.number > self.view.number:\n", "        if True:\n"),
        tests=_in("membership", "test_an_older_view_does_not_come_back"),
    ),
    Mutant(
        "a member that has left stays present",
        MEMBERSHIP,
        "                self.present.pop(seat, None)\n",
        "",
        tests=_in("membership", "test_processes_come_and_go"),
    ),
    Mutant(
        "a second process goes unnoticed",
        MEMBERSHIP,
        "        self.spawn(self._wait_replaced(self._presence))\n",
        "",
        tests=_in("membership", "test_a_process_whose_seat_is_taken_learns_it"),
    ),
    Mutant(
        "the registry does not learn that a run is over",
        DEPARTURE,
        "    if over:\n        await _end_run(member)\n",
        "",
        tests=_in("entrance", "test_nobody_joins_a_run_that_is_over"),
    ),
    Mutant(
        "a joiner waits for a run that is over",
        ELASTIC,
        "            member.fail(run_is_over(self.worker))\n",
        "            pass\n",
        tests=_in("member", "test_a_joiner_learns_that_the_run_has_ended_meanwhile"),
    ),
    Mutant(
        "an interrupted wait goes on",
        LOOP,
        "            running.cancel()\n",
        "            pass\n",
        tests=_in("member", "test_an_interrupted_wait_cancels_the_work"),
    ),
    Mutant(
        "a wait that takes long is a failure of the work",
        LOOP,
        "                    continue\n",
        "                    raise\n",
        tests=_in("member", "test_work_returns_or_raises"),
    ),
    Mutant(
        "a child shares its parent's loop",
        LOOP,
        "return _of_process(os.getpid())",
        "return _of_process(0)",
        tests=_in("member", "test_a_forked_child_has_its_own_loop"),
    ),
    Mutant(
        "everywhere is announced",
        ADDRESS,
        "if host not in _EVERYWHERE:",
        "if True:",
        tests=_in("member", "test_the_address_by_which_the_registry_is_reached_is_announced"),
    ),
    Mutant(
        "a view is offered once",
        MEMBERSHIP,
        "                await asyncio.sleep(_AGAIN_S)\n",
        "                return\n",
        tests=_in("membership", "test_a_view_is_offered_until_the_registry_answers"),
    ),
    Mutant(
        "views are offered after closing",
        MEMBERSHIP,
        "        if self._closed:\n            work.close()\n            return\n",
        "",
        tests=_in("membership", "test_nothing_is_offered_after_closing"),
    ),
]
