"""Workers inside one process: research, tests, the demo. A real link, with faults given as data.

Each worker may run in a thread of its own (`run_local`), or one caller may step them all together (`atoll.Lockstep`).
The result is the same to the bit: nothing depends on who comes first.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from atoll._util.checks import check_whole
from atoll.core.allreduce import Reduction, mean_between, shots
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Offer, Passage, Pending, Round, RoundId, admitted, difference

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """A worker that is not there from inner step `first` to `last`, both included; last=None means for good.

    Absence(worker=3, first=1, last=50) joins late; Absence(worker=3, first=51) leaves after step 50. An absent worker
    calls `step()` like the others, to follow the rounds; `OuterLoop.trains` tells it not to train.
    """

    worker: int
    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        whole = all(type(step) is int for step in (self.worker, self.first, self.last or 1))
        if not whole or self.first < 1 or (self.last is not None and self.last < self.first):
            raise ConfigError(
                f"an absence lasts from first >= 1 to last >= first, whole numbers, got {self.first} to {self.last}"
            )

    def covers(self, worker: int, step: int) -> bool:
        """Whether this worker is away during this inner step."""
        return worker == self.worker and self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, as data: the same faults on every run."""

    drop: float = 0.0
    """Chance that one worker's payload of one round is lost; it then keeps its own parameters."""
    seed: int = 0
    """Decides which payloads are lost."""
    absences: tuple[Absence, ...] = ()
    """Who is away, and when."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Worker -> the share of inner steps it has time for, above 0 up to 1; others make all of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            raise ConfigError(f"drop must be a chance between 0 and 1, got {self.drop}")
        if not isinstance(self.absences, tuple):
            raise ConfigError(f"absences must be a tuple of Absence(...), got {self.absences!r}")
        for worker, speed in self.speeds.items():
            if not 0 < speed <= 1:
                raise ConfigError(f"speed of worker {worker} must be above 0 and at most 1, got {speed}")

    def lost(self, worker: int, round_id: RoundId) -> bool:
        """Whether this worker's payload of this round is lost."""
        return random.Random(f"{self.seed} {worker} {round_id}").random() < self.drop

    def present(self, worker: int, step: int) -> bool:
        """Whether this worker is there during this inner step."""
        return not any(absence.covers(worker, step) for absence in self.absences)

    def trains(self, worker: int, step: int) -> bool:
        """Whether this worker makes this inner step."""
        speed = self.speeds.get(worker, 1.0)
        return self.present(worker, step) and int(step * speed) > int((step - 1) * speed)


class _Board:
    """Where the workers of one process leave their contributions for each other."""

    def __init__(self, workers: int, faults: Faults, timeout_s: float) -> None:
        self.workers = workers
        self.faults = faults
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.terms: dict[int, Mapping[str, str]] = {}
        self.joined: dict[int, float] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.gone: dict[int, str] = {}
        self.rounds: dict[RoundId, dict[int, Offer | None]] = {}
        self.reductions: dict[RoundId, dict[int, Reduction]] = {}
        self.dealt: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by fragment, the last that was reduced
        self.reduced: dict[RoundId, Tensor] = {}
        self.last_s: dict[RoundId, float] = {}  # when somebody last posted to a round
        self.taken: dict[RoundId, set[int]] = {}

    def join(self, worker: int, terms: Mapping[str, str], weight: float) -> None:
        with self.changed:
            self.check_open(worker)
            if worker in self.terms:
                raise LinkError(
                    f"worker {worker} has joined already: an OuterLoop needs a link of its own, from a new local()"
                )
            for other, theirs in self.terms.items():
                if differs := difference(terms, theirs):
                    raise LinkError(f"worker {worker} and worker {other} differ in {differs}")
            self.terms[worker] = terms
            self.joined[worker] = weight
            self.threads[worker] = threading.current_thread()
            self.changed.notify_all()

    def weights(self, worker: int, step: int) -> dict[int, float]:
        members = self.members(step)
        with self.changed:
            self.wait_for(f"step {step}", worker, lambda: [w for w in members if w not in self.joined])
            return {w: self.joined[w] for w in members}

    def members(self, step: int) -> list[int]:
        return [w for w in range(self.workers) if self.faults.present(w, step)]

    def post(self, worker: int, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> None:
        arrives = self.faults.present(worker, round_id.step) and not self.faults.lost(worker, round_id)
        with self.changed:
            self.check_open(worker)
            self.threads[worker] = threading.current_thread()
            self.rounds.setdefault(round_id, {})[worker] = offer if arrives else None
            self.reductions.setdefault(round_id, {})[worker] = reduction
            self.last_s[round_id] = time.perf_counter()
            self.changed.notify_all()

    def take(self, worker: int, round_id: RoundId, reduction: Reduction, opened_s: float) -> Round:
        members = self.members(round_id.step)
        with self.changed:
            self.check_open(worker)
            posted = self.rounds[round_id]
            self.wait_for(str(round_id), worker, lambda: [w for w in members if w not in posted])
            offers = [offer for _, offer in sorted(posted.items()) if offer is not None]
        arrived = [c for offer in offers if (c := offer.settled()) is not None]  # others may go on meanwhile
        with self.changed:
            self.check_open(worker)
            counted, outliers = admitted(arrived, reduction)
            payloads, who = tuple(c.payload for c in counted), tuple(c.member for c in counted)
            if counted and shots(len(members)) == 2 and round_id not in self.reduced:
                here = [payload.to(reduction.device) for payload in payloads]
                self.reduced[round_id] = mean_between(self.reducers(round_id), here, [m.weight for m in who])
            if round_id in self.reduced and reduction.residual is not None:  # one that is away saves it, too
                reduction.residual.note(tuple(round_id), tuple(members))
            passage = Passage(opened_s, self.last_s[round_id])
            completed = Round(round_id, who, payloads, self.reduced.get(round_id), outliers, passage=passage)
            self.taken.setdefault(round_id, set()).add(worker)
            if len(self.taken[round_id] | self.gone.keys()) == self.workers:
                del self.rounds[round_id], self.reductions[round_id], self.taken[round_id], self.last_s[round_id]
                self.reduced.pop(round_id, None)
            return completed

    def reducers(self, round_id: RoundId) -> dict[int, Reduction]:
        """The members of a round that is reduced now; one that was away knows of the round before, too."""
        reductions = {member: self.reductions[round_id][member] for member in self.members(round_id.step)}
        before = self.dealt.get(round_id.fragment)
        for reduction in reductions.values():
            if before is not None and reduction.residual is not None:
                reduction.residual.note(*before)
        self.dealt[round_id.fragment] = tuple(round_id), tuple(reductions)
        return reductions

    def wait_for(self, what: str, worker: int, missing: Callable[[], list[int]]) -> None:
        """Wait, holding the lock, until nobody is missing."""
        deadline = time.monotonic() + self.timeout_s
        while absent := missing():
            for other in absent:
                if other in self.gone:
                    raise LinkError(f"{what}: worker {other} left without sending: {self.gone[other]}")
                if self.threads.get(other) is threading.current_thread():
                    raise LinkError(
                        f"{what}: worker {worker} waits for worker {other}, which the same thread steps: "
                        "step them together with atoll.Lockstep(loops).step()"
                    )
            if not self.changed.wait(deadline - time.monotonic()):
                who = f"worker{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
                raise LinkError(f"{what}: nothing from {who} in {self.timeout_s:g} s")

    def check_open(self, worker: int) -> None:
        if worker in self.gone:
            raise LinkError(f"the link of worker {worker} is closed: {self.gone[worker]}")

    def leave(self, worker: int, reason: str) -> None:
        with self.changed:
            self.gone.setdefault(worker, reason)
            self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class _Pending:
    board: _Board
    worker: int
    round_id: RoundId
    reduction: Reduction
    opened_s: float

    def wait(self) -> Round:
        return self.board.take(self.worker, self.round_id, self.reduction, self.opened_s)


class LocalLink:
    """One worker's end of a link inside this process; `local` makes all of them."""

    def __init__(self, board: _Board, worker: int) -> None:
        self.worker = worker
        self.workers = board.workers
        self._board = board

    def join(self, terms: Mapping[str, str], weight: float) -> None:
        """Say what all must agree on; LinkError names the differences to another worker."""
        self._board.join(self.worker, terms, weight)

    def present(self, step: int) -> bool:
        """Whether this worker is a member during this inner step."""
        return self._board.faults.present(self.worker, step)

    def trains(self, step: int) -> bool:
        """Whether it makes this inner step: false when absent, or when slower and skipping it."""
        return self._board.faults.trains(self.worker, step)

    def weights(self, step: int) -> Mapping[int, float]:
        """Worker -> weight of all who are present at this step; waits for those who have yet to join."""
        return self._board.weights(self.worker, step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; None takes part in nothing and still learns the result."""
        self._board.post(self.worker, round_id, offer, reduction)
        return _Pending(self._board, self.worker, round_id, reduction, time.perf_counter())

    def on_any_rank(self, so: bool) -> bool:
        """Whether it is so: a worker is whole here."""
        return so

    def check(self) -> None:
        """Nothing fails here while nobody waits."""

    def close(self, reason: str | None = None) -> None:
        """Leave for good: whoever waits for this worker gets a LinkError with the reason."""
        self._board.leave(self.worker, reason or "it was closed")


def local(workers: int, *, faults: Faults | None = None, timeout_s: float = 600.0) -> list[LocalLink]:
    """The ends of a link between `workers` workers of this process, in worker order."""
    check_whole("workers", workers)
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s must be a number of seconds above 0, got {timeout_s}")
    faults = Faults() if faults is None else faults
    if not isinstance(faults, Faults):
        raise ConfigError(f"faults must be a Faults(...), got {faults!r}")
    for worker in (*(absence.worker for absence in faults.absences), *faults.speeds):
        if not 0 <= worker < workers:
            raise ConfigError(f"faults name worker {worker}; workers are 0 to {workers - 1}")
    board = _Board(workers, faults, timeout_s)
    return [LocalLink(board, worker) for worker in range(workers)]


def run_local(work: Callable[[LocalLink], Result], links: list[LocalLink]) -> list[Result]:
    """Run `work(link)` for every worker, each in its own thread; one that fails takes the others down with it."""

    def worker(link: LocalLink) -> Result:
        try:
            return work(link)
        except BaseException as error:
            link.close(f"{type(error).__name__}: {error}")
            raise
        finally:
            link.close("its work has ended; all workers must make the same number of steps")

    with ThreadPoolExecutor(len(links), thread_name_prefix="atoll-worker") as pool:
        futures = [pool.submit(worker, link) for link in links]
        try:
            wait(futures)
        except BaseException as interruption:
            for link in links:
                link.close(f"interrupted by {type(interruption).__name__}")
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    # The first cause, rather than the LinkErrors it brought about in the others.
    for error in sorted(errors, key=lambda e: isinstance(e, LinkError)):
        raise error
    return [future.result() for future in futures]
