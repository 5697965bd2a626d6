"""Links the workers of a replay in one process: members of rounds, joins and cut-offs are those that were recorded.

Workers are threads that take turns: one trains until it has to wait for another. So they share torch's random numbers,
each with its own state, and compute what single processes compute.
"""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from atoll import checkpoint
from atoll.core.allreduce import Reduction, mean_between, shots
from atoll.errors import ExcludedError, LinkError
from atoll.link.base import Admission, Contribution, FragmentState, Link, Offer, Round, RoundId, TransferStats
from atoll.runs.evidence import AnchorMoved
from atoll.train.replay.record import Difference, Process, RunRecord, Stretch


class LifeOverError(Exception):
    """Nobody has recorded the round that a worker waits for: there its life ends."""


class StoppedError(Exception):
    """Another worker has failed, or has found a difference."""


class DiffersError(Exception):
    """A replayed anchor is not the recorded one."""

    def __init__(self, round_id: RoundId, what: str) -> None:
        super().__init__(f"{round_id}: {what}")
        self.difference = Difference(round_id, what)


class Board:
    """Holds what the workers of a replay leave for each other; a worker uses it while it has the turn.

    Args:
        record: What was recorded.
        weights: The weight of every worker.
        delay: Steps from a round's send to its apply.
    """

    def __init__(self, record: RunRecord, weights: Mapping[int, float], delay: int) -> None:
        self.record = record
        self.weights = weights
        self.delay = delay
        self.turn = threading.Condition()
        """Held by the worker that trains."""
        self.stopped = False
        self.states: dict[int, list[FragmentState]] = {}
        """By step at which somebody joins: what all workers have alike then."""
        self._posted: dict[RoundId, dict[int, tuple[Offer | None, Reduction]]] = {}
        self._reduced: dict[tuple[RoundId, tuple[int, ...]], Tensor] = {}
        self._dealt: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by fragment: its last reduced round
        self._taken = dict.fromkeys(record.processes, 0.0)  # needs no rounds up to this step any more
        self._stuck: set[int] = set()

    def wait_for(self, worker: int, what: str, happens: Callable[[], bool]) -> None:
        """Give the turn away until something has happened."""
        if happens():
            return
        random = checkpoint.rng_state()
        while not happens():
            self._stuck.add(worker)
            if self.stopped:
                raise StoppedError
            running = {other for other, taken in self._taken.items() if taken != float("inf")}
            if self._stuck >= running:
                problem = f"worker {worker} waits for {what}, and no worker of the replay can go on"
                raise LinkError(f"{problem}: the records do not belong together, or are not whole", worker=worker)
            self.turn.wait()
        checkpoint.set_rng_state(random)

    def _changed(self) -> None:
        self._stuck.clear()
        self.turn.notify_all()

    def post(self, worker: int, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> None:
        """Leave a worker's payload, or None, for the others; what it has left before it was cut off stays."""
        self._posted.setdefault(round_id, {}).setdefault(worker, (offer, reduction))
        self._changed()

    def advanced(self, worker: int, step: int, applied: float, save: Callable[[int], FragmentState]) -> None:
        """Note how far a worker is, and copy what it shares with a worker that joins at this step."""
        due = step in self.record.boundaries and step not in self.states
        if due and worker in self.record.members_at(step + 1):
            fragments = 1 + max(round_id.fragment for round_id in self.record.rounds)
            self.states[step] = [save(fragment) for fragment in range(fragments)]
        self.passed(worker, applied)

    def passed(self, worker: int, step: float) -> None:
        """Note that a worker takes no rounds up to this step any more; infinity: none at all."""
        self._taken[worker] = step
        oldest = min(self._taken.values())
        self._posted = {round_id: posted for round_id, posted in self._posted.items() if round_id.step > oldest}
        self._reduced = {key: mean for key, mean in self._reduced.items() if key[0].step > oldest}
        self._changed()

    def take(self, worker: int, round_id: RoundId, made: AnchorMoved, reduction: Reduction) -> Round:
        """Wait for the payloads of the recorded members, and complete the round with them."""
        two_shots, posted = shots(len(made.between) or 1) == 2, self._posted.setdefault(round_id, {})
        due = {*made.members, *made.outliers, *(made.between if two_shots else ())}
        self.wait_for(worker, f"{round_id}", lambda: posted.keys() >= due)
        counted = [self._sent(round_id, member, posted[member][0]) for member in made.members]
        left_out = tuple(self._sent(round_id, member, posted[member][0]).member for member in made.outliers)
        who, payloads = tuple(sent.member for sent in counted), tuple(sent.payload for sent in counted)
        mean = None
        if two_shots and counted:
            key, reducers = (round_id, (*made.members, -1, *made.between)), tuple(made.between)
            if key not in self._reduced:
                reductions = {member: posted[member][1] for member in reducers}
                self._reduced[key] = self._mean(round_id, reductions, counted)
            mean = self._reduced[key]
            if reduction.residual is not None:
                reduction.residual.note(tuple(round_id), reducers)
        now = time.perf_counter()
        return Round(round_id, who, payloads, mean, left_out, complete=True, transfer=TransferStats(now, now))

    def _sent(self, round_id: RoundId, member: int, offer: Offer | None) -> Contribution:
        sent = None if offer is None else offer.settled()
        if sent is None:
            raise DiffersError(round_id, f"worker {member} took part, and in the replay it has nothing to send")
        return sent

    def _mean(self, round_id: RoundId, reductions: dict[int, Reduction], counted: list[Contribution]) -> Tensor:
        before = self._dealt.get(round_id.fragment)
        for reduction in reductions.values():
            if before is not None and reduction.residual is not None:
                reduction.residual.note(*before)
        self._dealt[round_id.fragment] = tuple(round_id), tuple(reductions)
        return mean_between(reductions, [sent.payload for sent in counted], [sent.member.weight for sent in counted])


@dataclass(frozen=True, slots=True)
class RecordedPending:
    """A round in flight."""

    link: "RecordedLink"
    round_id: RoundId
    reduction: Reduction

    def wait(self) -> Round:
        """Complete the round with its recorded members."""
        return self.link.take(self.round_id, self.reduction)


@dataclass(frozen=True, slots=True)
class RecordedAdmission(Admission):
    """Leads a worker into the run at the recorded step."""

    board: Board
    worker: int
    boundary: int

    def states(self, fragments: int) -> Iterator[FragmentState]:
        """Yield what another worker had at that step."""
        there = self.board.states
        self.board.wait_for(self.worker, f"the others at step {self.boundary}", lambda: self.boundary in there)
        yield from there[self.boundary]

    def newest_step(self) -> int:
        """Return the step at which the worker joins."""
        return self.boundary

    def promote(self) -> int:
        """Return the same."""
        return self.boundary


class RecordedLink(Link):
    """Links one recorded process of a worker to the others.

    Args:
        board: What the workers share.
        worker: This worker.
        workers: Number of seats.
        process: What the process has recorded.
        limit: The step after which another process of the worker begins.
    """

    elastic = True

    def __init__(self, board: Board, worker: int, workers: int, process: Process, limit: float) -> None:
        self.worker = worker
        self.workers = workers
        self.before_rejoin: Callable[[], object] = lambda: None
        """Called when the worker has been cut off."""
        self._board = board
        self._stretches = process.stretches
        self._limits = [*(stretch.first for stretch in process.stretches[1:]), limit]
        self._at = 0  # number of the stretch
        self._steps = process.joined

    @property
    def stretch(self) -> Stretch:
        """The part of the record since the worker was last cut off."""
        return self._stretches[self._at]

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join as it was recorded: with all others, or when they were under way."""
        return None if self.stretch.joined is None else self._admission(self.stretch.joined)

    def rejoin(self) -> Admission:
        """Join again where the worker did."""
        self.before_rejoin()
        self._at += 1
        self._steps = self.stretch.first
        return self._admission(self.stretch.first)

    def _admission(self, boundary: int) -> Admission:
        self._board.passed(self.worker, boundary - self._board.delay)
        return RecordedAdmission(self._board, self.worker, boundary)

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of the members of the recorded view."""
        return {worker: self._board.weights[worker] for worker in self._board.record.members_at(step)}

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> RecordedPending:
        """Start a round; those after the worker has joined anew are not for its former self."""
        if round_id.step <= self._limits[self._at]:
            self._board.post(self.worker, round_id, offer, reduction)
        return RecordedPending(self, round_id, reduction)

    def take(self, round_id: RoundId, reduction: Reduction) -> Round:
        """Complete a round, unless the worker was cut off while it waited for it."""
        step, own = self._steps + 1, round_id in self.stretch.rounds
        if self._is_cut_off(counted=step) and round_id.step + self._board.delay == step and not own:
            raise ExcludedError(f"worker {self.worker} was cut off at step {step}", worker=self.worker)
        made = self.recorded(round_id)
        if made is None:
            raise LifeOverError
        return self._board.take(self.worker, round_id, made, reduction)

    def recorded(self, round_id: RoundId) -> AnchorMoved | None:
        """Return a round as this worker has recorded it, or the others; None if nobody has."""
        return self.stretch.rounds.get(round_id) or self._board.record.rounds.get(round_id)

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note how far the worker is."""
        self._steps = step
        done = min(applied, step - 1) if self.unfinished else applied  # the last exchange is of the last step
        self._board.advanced(self.worker, step, done, save)

    def check(self) -> None:
        """Raise an ExcludedError where the worker learnt between two steps that it was cut off."""
        if self._is_cut_off(counted=self._steps):
            step = self._stretches[self._at + 1].since
            raise ExcludedError(f"worker {self.worker} was cut off before step {step}", worker=self.worker)

    def _is_cut_off(self, counted: int) -> bool:
        """Return whether the worker was cut off when its outer loop had counted so many steps."""
        if self.stretch.excluded is None or self.stretch.excluded != counted:
            return False
        in_check = self._stretches[self._at + 1].since == counted + 1
        return in_check == (counted == self._steps)

    def close(self, reason: str | None = None) -> None:
        """Do nothing: the replay ends the worker's life."""
