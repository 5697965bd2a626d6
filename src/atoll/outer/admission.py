"""Lets a worker join a run that is under way, first or after it was cut off from the others.

It takes over what all workers have alike (anchors, the outer optimizer's slots, counts) as some member had it a while
ago, receives every round since, and applies those that are due. Once it has caught up it is promoted: rounds after a
`boundary` wait for it. There it starts from the anchor, with nothing of its own, and a fragment's rounds count it once
it has trained for a full period.

A worker that was cut off keeps what it has trained and no round has carried, unless the others are more than a period
ahead: it puts that onto the new anchor. A round that it had sent and not applied has carried its work if it counted
this worker. The round tells, now or when it is due, if the worker receives it; if a member had applied it before, the
newest round that counted this worker tells. Where nothing tells, the work counts as carried, so that none enters twice.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from atoll.errors import ExcludedError, LinkError
from atoll.link.base import Admission, FragmentState, RoundId
from atoll.outer.flight import Flight

if TYPE_CHECKING:
    from atoll.outer.loop import OuterLoop

ATTEMPTS = 5
"""How often a worker tries again that is cut off while it catches up."""


@dataclass(slots=True)
class Unsent:
    """Holds the work that a worker had not sent, or not seen arrive, when it was cut off."""

    step: int
    """Inner steps that it had made."""
    deltas: dict[int, Tensor]
    """By fragment, what it has trained since its last send."""
    sent: Mapping[RoundId, Flight]
    """What it had sent before, as far as the rounds were in flight."""
    carried: dict[RoundId, bool] = field(default_factory=dict)
    """Whether those rounds have counted this worker, as far as it is known."""


def tell_advanced(loop: "OuterLoop", step: int, applied: int) -> None:
    """Tell the link that this worker has made inner steps, and has applied all rounds up to one of them."""

    def save(fragment: int) -> FragmentState:
        loop._rounds.offload.bring_home()
        try:
            return loop._rounds.shared(fragment, applied)
        finally:
            loop._rounds.offload.use_again()

    loop.link.advanced(step, applied, save)


def rejoin(loop: "OuterLoop") -> None:
    """Join again after an ExcludedError, with the work that no round has carried."""
    unsent = _measure(loop)
    enter(loop, loop.link.rejoin(), unsent)
    loop.counters.rejoins += 1


def enter(loop: "OuterLoop", admission: Admission, unsent: Unsent | None = None) -> None:
    """Catch up with the other workers and start from where they are."""
    left, boundary = ATTEMPTS, None
    while boundary is None:
        try:
            boundary = _CatchUp(loop, admission, unsent).run()
        except ExcludedError:
            left -= 1
            if not left:
                raise
            admission = loop.link.rejoin()
    _start(loop, boundary)
    if unsent is not None:
        _put_back(loop, unsent)


def _measure(loop: "OuterLoop") -> Unsent:
    """Measure what was trained since the last sends, as if all that was sent had arrived."""
    rounds, sent, deltas = loop._rounds, dict(loop._rounds.waiting()), {}
    for fragment, replica in enumerate(rounds.replicas):
        rounds.offload.use_only(fragment)
        delta = replica.unsent()
        for round_id, flight in sent.items():
            if round_id.fragment == fragment:
                rounds.unsent_work(round_id, flight, delta, lost=False)
        deltas[fragment] = rounds.offload.kept(delta)
    return Unsent(loop.steps, deltas, sent)


class _CatchUp:
    """Takes over the state of the members and follows their rounds until little is left."""

    def __init__(self, loop: "OuterLoop", admission: Admission, unsent: Unsent | None) -> None:
        assert loop._schedule is not None  # DataParallel is refused
        self._loop = loop
        self._rounds = loop._rounds
        self._schedule = loop._schedule
        self._admission = admission
        self._unsent = unsent
        self._opened: dict[int, int] = {}  # by fragment: the step up to which all its rounds are opened, or applied
        self._held = 0  # the step up to which some member had applied all rounds when it gave a fragment away

    def run(self) -> int:
        """Catch up; return the last step whose rounds do without this worker."""
        self._rounds.forget()
        self._rounds.offload.bring_home()
        for state in self._admission.states(len(self._rounds.replicas)):
            self._take_over(state)
        newest = self._held = max(self._opened.values())
        at, behind = min(self._opened.values()), None
        while True:
            newest = max(newest, self._admission.newest_step())
            if newest == at or (behind is not None and newest - at >= behind):
                break  # nothing is left, or the others are as fast as this worker follows
            behind = newest - at
            self._follow(newest)
            at = newest
        boundary = self._admission.promote()
        if boundary < at:
            raise LinkError(f"worker {self._loop.link.worker} was to join at step {boundary}, before rounds of {at}")
        self._follow(boundary)
        return boundary

    def _take_over(self, state: FragmentState) -> None:
        fragment = state.fragment
        self._rounds.take_shared(fragment, state)
        self._opened[fragment] = state.applied
        newest = self._rounds.counted[fragment].get(self._loop.link.worker)
        for round_id in self._sent():
            if newest is not None and round_id.fragment == fragment and round_id.step <= state.applied:
                self._note(round_id, carried=newest >= round_id.step)

    def _follow(self, step: int) -> None:
        """Open all rounds up to this step; apply those that are due, or that a member had applied."""
        delay, rounds = self._schedule.delay, self._rounds
        applied = max(step - delay, self._held)
        fragments = range(len(rounds.replicas))
        ids = [RoundId(s, f) for f in fragments for s in self._schedule.sends(f, self._opened[f], step)]
        for round_id in sorted(ids):
            rounds.follow(round_id)
        for round_id, flight in rounds.waiting():
            if round_id.step <= applied:
                rounds.offload.use_only(round_id.fragment)
                rounds.apply(round_id, round_id.step + delay, merging=False)
                if round_id in self._sent():
                    self._note(round_id, carried=self._loop.link.worker in flight.counted)
        self._opened = {fragment: max(step, opened) for fragment, opened in self._opened.items()}
        rounds.drop(step)
        tell_advanced(self._loop, step, applied)

    def _sent(self) -> Mapping[RoundId, Flight]:
        return {} if self._unsent is None else self._unsent.sent

    def _note(self, round_id: RoundId, *, carried: bool) -> None:
        assert self._unsent is not None
        self._unsent.carried.setdefault(round_id, carried)


def _start(loop: "OuterLoop", boundary: int) -> None:
    """Begin at the anchor, after the step `boundary`."""
    assert loop._schedule is not None
    loop._sending = {}
    loop._roll_backs.start_anew()
    for fragment, replica in enumerate(loop._rounds.replicas):
        replica.left_out = loop._schedule.next_send(fragment, boundary) - boundary < loop._schedule.period
    loop.steps = boundary
    loop._watch.joined(boundary)


def _put_back(loop: "OuterLoop", unsent: Unsent) -> None:
    """Put what was not sent onto the anchor, unless it is too old."""
    assert loop._schedule is not None
    rounds = loop._rounds
    if loop.steps - unsent.step > loop._schedule.period:
        loop.counters.rejoins_dropped += 1
        return
    sent = {round_id: work for round_id, flight in unsent.sent.items() if (work := flight.sent_work) is not None}
    lost = [(round_id, work) for round_id, work in sent.items() if not unsent.carried.get(round_id, True)]
    for fragment, delta in unsent.deltas.items():
        rounds.offload.use_only(fragment)
        replica = rounds.replicas[fragment]
        replica.window.write(replica.anchor - delta.to(replica.window.device))
        replica.left_out = False
        for payload in (work for round_id, work in lost if round_id.fragment == fragment):
            replica.put_back(payload)
            loop.counters.rounds_missed += 1
    for round_id, flight in rounds.waiting():
        flight.keeps = True
        flight.owed = sent.get(round_id)
    loop._watch.joined(loop.steps)
