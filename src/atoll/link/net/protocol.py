"""Runs one member's part of the protocol between workers: rounds, views and flushes. Pure: no clock, no network.

A driver feeds it what happens (a round is opened, a message comes, a peer is lost, the registry has a new view) and
carries out the actions it returns. Without failures nobody asks anybody: a round is complete when what its members owe
is here. Everything that a member sends is kept until all members say that they have applied it, so that a flush can
pass on what a lost member had sent to some of them.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from atoll.link.base import RoundId
from atoll.link.net.actions import (
    Action,
    Adopt,
    Complete,
    Exclude,
    Mean,
    Message,
    Part,
    Progress,
    Propose,
    Reduce,
    Result,
    RoundMessage,
    Send,
    Whole,
)
from atoll.link.net.applied_steps import AppliedSteps
from atoll.link.net.flush import Flush
from atoll.link.net.round_state import Offer, RoundState
from atoll.link.net.views import Decision, Era, Process, Relay, Told, View, attempt_of, era_of


class Protocol:
    """Keeps one member's rounds and its knowledge of who else is a member.

    Args:
        me: This process.
        step: The step after which it starts or resumes; None for a process that joins a run under way.
        min_workers: No round is completed between fewer members that train.
    """

    def __init__(self, me: Process, step: int | None = 0, min_workers: int = 1) -> None:
        self.me = me
        self.eras: tuple[Era, ...] = ()
        self.flush = Flush(me)  # the driver asks it what was told, and tells it who has connected
        self._applied = AppliedSteps(me, step)
        self._min_workers = min_workers
        self._has_followed = False
        self._step = self._made = self._since = step or 0
        self._rounds: dict[RoundId, RoundState] = {}
        self._waiting: list[tuple[RoundId, Offer]] = []  # opened during a flush
        self._actions: list[Action] = []

    # ------------------------------------------------------------------ what happens

    def open(self, round_id: RoundId, offer: Offer) -> list[Action]:
        """Start a round with what this member offers; a follower's offer is not used."""
        self._waiting.append((round_id, offer))
        self._open_waiting()
        return self._take_actions()

    def advance(self, step: int) -> None:
        """Note that this member has made inner steps up to this one: a joiner starts where the others are.

        In a flush it counts afterwards: the others have been told how far it was, and its rounds wait for the new view.
        """
        self._made = max(self._made, step)
        if not self.is_flushing:
            self._step = max(self._step, step)

    def has_applied(self, step: int) -> list[Action]:
        """Note that this member has applied all rounds up to a step; a joiner, first, those that its state holds."""
        if not self.has_state and self._has_followed:
            self._since = step
        self._applied.note_own(step)
        self.flush.forget_early(step)
        self._send(self._others(), Progress(step))
        self._drop_old()
        return self._take_actions()

    def receive(self, sender: Process, message: Message, view: int) -> list[Action]:
        """Take in a message; of a process that is no member of the newest view, nothing counts.

        Args:
            sender: The process that has sent it.
            message: The message.
            view: Number of the view that its sender had adopted. A round that it belongs to may have other members than
                is known here, so the message waits until that view is adopted here.
        """
        if isinstance(message, Told):
            if self.flush.hear(sender, message):
                self._adopt_if_all_told()
        else:
            self._take_or_keep(sender, message, view)
        return self._take_actions()

    def reduced(self, round_id: RoundId, attempt: int, part: int, mean: Any) -> list[Action]:
        """Take the mean that a `Reduce` has asked for, and send it to all."""
        known = self._rounds.get(round_id)
        if known is not None and known.attempt.view == attempt:
            known.means[attempt, part] = mean
            self._send(self._receivers(round_id), Mean(round_id, attempt, part, mean))
            self._complete(round_id)
        return self._take_actions()

    def lose(self, process: Process) -> list[Action]:
        """Note that a process does not answer any more; nothing is completed until its view has ended.

        A member that has not caught up leaves it to others to propose that view. If none comes for long, it has to
        leave and to join anew: two members that cannot reach each other, and have both not caught up, wait in vain.
        """
        self.flush.lost.add(process)
        self._propose_without_lost()
        return self._take_actions()

    def leave_behind(self, round_id: RoundId) -> list[Action]:
        """Propose to complete a round, and those before it, without the members that it waits for here.

        A member that has put nothing into the round proposes nothing: the round might be left with nobody. Nor does one
        that would leave a round with fewer than `min_workers`, or whose view does without those members already: then
        they have opened the round, and what they have sent is on its way.
        """
        known = self._rounds.get(round_id)
        if known is None or not known.is_open or self.is_held_up:
            return []
        if self.me not in known.attempt.members:
            return []
        step, marked = round_id.step, self.view.late
        late = {member for member in known.missing() if marked.get(member.seat, -1) < step}
        waiting = [known for other, known in self._rounds.items() if other.step <= step and not known.done]
        left = min(len(known.attempt.members) - len(late.intersection(known.missing())) for known in waiting)
        if late and left >= self._min_workers:
            self._actions.append(Propose(self.view.leaving_behind(late, step)))
        return self._take_actions()

    def far_behind(self, most: int) -> list[Process]:
        """Return members that lack more than `most` rounds of one fragment that are complete here, if enough remain.

        All keep these rounds for them, and they may never catch up. At a run's end nobody is: no more rounds come.
        """
        done = [round_id for round_id, known in self._rounds.items() if known.done]
        if any(round_id.last for round_id in self._rounds):
            return []
        far = []
        for member in self.view.owing if len(done) > most and self.has_caught_up else ():
            lacking = Counter(round_id.fragment for round_id in done if round_id.step > self._applied.of(member))
            if member != self.me and max(lacking.values(), default=0) > most:
                far.append(member)
        return far if len(self.view.owing) - len(far) >= self._min_workers else []

    def on_view(self, view: View) -> list[Action]:
        """Take a view that the registry has accepted, and tell its members what is held here."""
        if view.number <= self.view.number:
            return []
        self.flush.begin(view)
        if not view.has(self.me):
            self._actions.append(Exclude(view))
            return self._take_actions()
        self._applied.keep(view)
        self._has_followed |= self.me.seat in view.following
        told = self._tell()
        self.flush.hear(self.me, told)
        self._send(self._others(), told)
        self._propose_without_lost()
        self._adopt_if_all_told()
        return self._take_actions()

    # ------------------------------------------------------------------ what is known

    @property
    def view(self) -> View:
        """The newest view that is known here, adopted or not."""
        return self.flush.view

    @property
    def adopted(self) -> int:
        """Number of the last view that was flushed."""
        return self.flush.adopted

    @property
    def is_flushing(self) -> bool:
        """Whether the newest view is not yet adopted here."""
        return self.flush.is_under_way

    @property
    def is_held_up(self) -> bool:
        """Whether no round may be completed: a flush is under way or due."""
        return self.flush.is_due

    def has_opened(self, step: int) -> bool:
        """Return whether every later view keeps the members of this step's rounds, less those that are lost."""
        return self._step >= step and not self.is_flushing

    @property
    def step(self) -> int:
        """The newest inner step that this member has made."""
        return self._step

    @property
    def settled_step(self) -> int:
        """The step up to which all members that train have applied all rounds: nothing can change these any more."""
        return min(map(self._applied.of, self.view.owing), default=-1)

    @property
    def has_state(self) -> bool:
        """Whether this member has said up to which step it has applied rounds; a joiner does once it has the state."""
        return self._applied.own is not None

    @property
    def has_caught_up(self) -> bool:
        """Whether this member trains, and has applied all rounds that were made before it did."""
        return self._has_caught_up(self.me)

    @property
    def is_dispensable(self) -> bool:
        """Whether another member that is not lost has caught up: the others can go on without this one."""
        others = (member for member in self.view.owing if member != self.me and member not in self.flush.lost)
        return any(map(self._has_caught_up, others))

    def _has_caught_up(self, member: Process) -> bool:
        return member in self.view.owing and self._applied.has_caught_up(member, self.eras)

    @property
    def newest_applied(self) -> int:
        """The newest step up to which some member has applied all rounds: those are complete everywhere soon."""
        return max(map(self._applied.said, self.view.members), default=-1)

    def is_settled(self, step: int) -> bool:
        """Return whether nothing can change the rounds up to a step any more: all members have applied those known."""
        known = [round_id.step for round_id in self._rounds if round_id.step <= step]
        return not known or max(known) <= self.settled_step

    # ------------------------------------------------------------------ rounds

    def awaited(self, round_id: RoundId) -> list[Process]:
        """Return the members that a round waits for here: for their payloads, or else for means of their parts."""
        return self._rounds[round_id].awaited() if round_id in self._rounds else []

    def forget(self, round_id: RoundId) -> None:
        """Forget a round that is complete here; for members that are fixed, so that nobody asks for it again."""
        del self._rounds[round_id]

    def _is_paused(self, round_id: RoundId) -> bool:
        """Return whether a round waits for more members to train; older ones, which had enough, do not."""
        return round_id.step >= self.eras[-1].first_step and len(self.eras[-1].owing) < self._min_workers

    def _open_waiting(self) -> None:
        if self.is_flushing:
            return
        waiting, self._waiting = self._waiting, []
        for round_id, offer in waiting:
            self._step = max(self._step, round_id.step)
            known = self._round(round_id)
            known.offer = offer
            self._contribute(round_id)
            self._complete(round_id)

    def _round(self, round_id: RoundId) -> RoundState:
        if round_id not in self._rounds:
            self._rounds[round_id] = RoundState(self.me, attempt_of(self.eras, round_id.step))
        return self._rounds[round_id]

    def _contribute(self, round_id: RoundId) -> None:
        """Send what this member owes to the round's attempt."""
        known = self._rounds[round_id]
        attempt, offer = known.attempt, known.offer
        if offer is None or self.me not in attempt.members:
            return
        known.held[self.me] = offer.whole
        if not attempt.in_parts:
            self._send(self._receivers(round_id), Whole(round_id, self.me, offer.whole))
            return
        members = len(attempt.members)
        for part in range(offer.part_count(members)):
            message = Part(round_id, attempt.view, part, offer.part(part, members))
            if (reducer := known.reducer(part)) == self.me:
                known.add(self.me, message)
                self._reduce(round_id, part)
            else:
                self._send([reducer], message)

    def _take_or_keep(self, sender: Process, message: RoundMessage | Progress, view: int) -> None:
        if view > self.adopted:
            self.flush.keep((sender, message, view))
        elif self.view.has(sender):
            self._take(sender, message)

    def _take(self, sender: Process, message: RoundMessage | Progress) -> None:
        if isinstance(message, Progress):
            self._applied.note(sender, message.applied)
            self._drop_old()
            return
        if message.round_id.step <= self._applied.said(self.me):
            return
        self._round(message.round_id).add(sender, message)
        if isinstance(message, Part):
            self._reduce(message.round_id, message.part)
        self._complete(message.round_id)

    def _reduce(self, round_id: RoundId, part: int) -> None:
        """Ask for the mean of a part once all members' payloads of it are here."""
        known = self._rounds[round_id]
        if not self.is_flushing and (payloads := known.payloads_to_reduce(part)) is not None:
            self._actions.append(Reduce(round_id, known.attempt.view, part, payloads))

    def _complete(self, round_id: RoundId) -> None:
        known = self._rounds[round_id]
        if not known.is_open or self.is_held_up or self._is_paused(round_id) or not known.gather():
            return
        known.done = True
        due = era_of(self.eras, round_id.step).due
        self._actions.append(Complete(round_id, known.attempt, known.payloads(), known.result, due))

    # ------------------------------------------------------------------ views

    def _tell(self) -> Told:
        rounds = {round_id: known.status for round_id, known in self._rounds.items()}
        return Told(self.view.number, self.adopted, self._step, self._applied.own, self._since, self.eras, rounds)

    def _propose_without_lost(self) -> None:
        """Propose a view without the lost; a member that has not caught up keeps those that train.

        They may have settled, and given to others, rounds that it does not know: without them it would make these anew.
        """
        gone = self.flush.lost_seats()
        if not self.has_caught_up:
            gone &= self.view.following
        if gone:
            self._actions.append(Propose(self.view.without(gone)))

    def _adopt_if_all_told(self) -> None:
        if (decision := self.flush.decision()) is not None:
            self._adopt(decision)

    def _adopt(self, decision: Decision) -> None:
        self.flush.adopted, self.eras = decision.view.number, decision.eras
        self._step = max(self._step, self._made)
        self._applied.take(decision, self.flush.told_of(self.adopted))
        self._actions.append(Adopt(decision))
        if decision.stranded:  # nothing is completed until they are gone
            self.flush.lost |= decision.stranded
            self._propose_without_lost()
        for round_id, attempt in decision.attempts.items():
            if round_id not in self._rounds and round_id.step > self._applied.of(self.me):
                self._rounds[round_id] = RoundState(self.me, attempt)  # this member comes to it later
        for round_id, known in sorted(self._rounds.items()):
            if round_id.step > decision.boundary:  # of members that have adopted the view already, or of a lost one
                known.attempt = attempt_of(self.eras, round_id.step)
                known.held = {owner: payload for owner, payload in known.held.items() if self.view.has(owner)}
            elif not known.done:
                before, known.attempt = known.attempt, decision.attempts.get(round_id, known.attempt)
                if before.in_parts and before != known.attempt:
                    self._contribute(round_id)
        for relay in decision.relays:
            if relay.holder == self.me:
                self._relay(relay)
        for sender, message, view in self.flush.take_early():
            self._take_or_keep(sender, message, view)
        self._open_waiting()
        self._drop_old()
        for round_id, known in self._rounds.items():
            for part in sorted({part for _, part in known.parts}):
                self._reduce(round_id, part)
            self._complete(round_id)

    def _relay(self, relay: Relay) -> None:
        known = self._rounds.get(relay.round_id)
        if known is None:  # by now, all members have applied it
            return
        if relay.owner is not None:
            self._send(relay.receivers, Whole(relay.round_id, relay.owner, known.held[relay.owner]))
        elif known.result is not None:
            self._send(relay.receivers, Result(relay.round_id, known.attempt, known.result))

    # ------------------------------------------------------------------ messages

    def _receivers(self, round_id: RoundId) -> list[Process]:
        receiving = era_of(self.eras, round_id.step).receiving
        return [member for member in self._others() if member in receiving]

    def _others(self) -> list[Process]:
        return [member for member in self.view.members if member != self.me]

    def _send(self, receivers: Iterable[Process], message: Message) -> None:
        self._actions += [Send(receiver, message, self.adopted) for receiver in receivers]

    def _drop_old(self) -> None:
        """Forget rounds that every member has applied, and the eras they were of."""
        applied = min(map(self._applied.of, self.view.members), default=-1)
        for round_id in [known for known, state in self._rounds.items() if known.step <= applied and not state.is_open]:
            del self._rounds[round_id]
        while len(self.eras) > 1 and self.eras[1].first_step <= applied + 1:
            self.eras = self.eras[1:]

    def _take_actions(self) -> list[Action]:
        actions, self._actions = self._actions, []
        return actions
