"""Links in one process that a worker can join while the others train, and be cut off from: the smallest that do.

They are LocalLinks whose faults keep the worker absent up to a step that is known beforehand. So the same run can be
made without joining, by a worker that is absent and follows all rounds: the oracle.
"""

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from atoll.core.allreduce import Reduction
from atoll.errors import ExcludedError
from atoll.link.base import Admission, FragmentState, Link, Offer, Pending, Round, RoundId
from atoll.link.local import LocalLink

WAIT_S = 30.0


@dataclass
class Board:
    """What the workers of a run tell a late one."""

    late: int
    """The worker that joins."""
    boundary: int
    """The last step whose rounds do without it."""
    donors: Mapping[int, tuple[int, int]]
    """Fragment -> the member that gives its state away, and the step up to which it has applied all rounds then."""
    seed: int = 0
    """Decides how much of what the members do is known to the joiner."""
    states: dict[int, FragmentState] = field(default_factory=dict)
    newest: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)
    log: list[str] = field(default_factory=list)
    """What the late worker's loop has called, in order."""
    told: list[int] = field(default_factory=list)
    """The steps up to which the late worker says that it has applied all rounds."""

    def offer_state(self, worker: int, step: int, save: Callable[[int], FragmentState]) -> None:
        with self.changed:
            for fragment, (donor, wanted) in self.donors.items():
                if worker == donor and step >= wanted and fragment not in self.states:
                    self.states[fragment] = save(fragment)
            self.changed.notify_all()

    def opened(self, step: int) -> None:
        with self.changed:
            self.newest = max(self.newest, step)


@dataclass
class LocalAdmission(Admission):
    board: Board
    rng: random.Random

    def states(self, fragments: int) -> Iterator[FragmentState]:
        for fragment in range(fragments):
            with self.board.changed:
                here = self.board.changed.wait_for(partial(self.board.states.__contains__, fragment), WAIT_S)
                assert here, self.board.states.keys()
                self.board.log.append(f"state {fragment}")
                state = self.board.states[fragment]
            yield state

    def newest_step(self) -> int:
        known = min(self.board.newest, self.board.boundary)
        return known if self.rng.random() < 0.5 else self.rng.randint(0, known)

    def promote(self) -> int:
        self.board.log.append("promote")
        return self.board.boundary


@dataclass
class CutPending:
    """A round that a worker may open again after it was cut off; it was sent once."""

    link: "LateLink"
    step: int
    pending: Pending
    completed: Round | None = None

    def wait(self) -> Round:
        self.link.cut("wait", self.step)
        self.completed = self.completed or self.pending.wait()
        return self.completed


class LateLink(Link):
    """A member's link, or the late worker's."""

    elastic = True

    def __init__(self, inner: LocalLink, board: Board, cuts: Mapping[tuple[str, int], int] | None = None) -> None:
        self.worker, self.workers = inner.worker, inner.workers
        self._inner = inner
        self._board = board
        self.cuts = dict(cuts or {})
        """(call, step) -> how often that call is answered with an ExcludedError."""
        self.swallowed: frozenset[RoundId] = frozenset()
        """Rounds that this worker sends into the void."""
        self._posted: dict[RoundId, CutPending] = {}
        self._checks = 0

    @property
    def is_late(self) -> bool:
        return self.worker == self._board.late

    def cut(self, call: str, step: int) -> None:
        left = self.cuts.get((call, step), 0)
        if left:
            self.cuts[call, step] = left - 1
            raise ExcludedError(f"worker {self.worker} is out: {call} {step}", worker=self.worker)

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        self._inner.join(terms, weight)
        return self.admission() if self.is_late and not self._inner.present(1) else None

    def rejoin(self) -> Admission:
        self._board.log.append("rejoin")
        return self.admission()

    def admission(self) -> Admission:
        return LocalAdmission(self._board, random.Random(self._board.seed))

    def weights(self, step: int) -> Mapping[int, float]:
        return self._inner.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        if self.is_late:
            self._board.log.append(f"open {round_id.step} {round_id.fragment} {offer is not None}")
            self.cut("open", round_id.step)
        else:
            self._board.opened(round_id.step)
        if round_id not in self._posted:
            sent = None if round_id in self.swallowed else offer
            pending = self._inner.open(round_id, sent, reduction)
            self._posted[round_id] = CutPending(self, round_id.step, pending)
        return self._posted[round_id]

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        if self.is_late:
            self._board.told.append(applied)
            self.cut("applied", applied)
        else:
            self._board.offer_state(self.worker, applied, save)

    def check(self) -> None:
        self._checks += 1
        if self.is_late:
            self.cut("check", self._checks)

    def close(self, reason: str | None = None) -> None:
        self._inner.close(reason)
