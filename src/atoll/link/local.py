"""Links the workers of one process, for research, tests and the demo; faults are given as data.

Each worker may run in its own thread (`run_local`), or one caller may step all workers together (`atoll.Lockstep`).
Both give the same bits: nothing depends on which worker comes first.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from atoll._util.checks import check_whole, config_error
from atoll.core.allreduce import Reduction, mean_between, shots
from atoll.errors import ConfigError, LinkError
from atoll.link.base import (
    Link,
    Member,
    Offer,
    Pending,
    Round,
    RoundId,
    TransferStats,
    describe_differences,
    split_outliers,
    warn_unfinished,
)

Result = TypeVar("Result")
ENDED = "its work has ended"
"""Why the link of a worker is closed that `run_local` has run to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Absence:
    """Takes a worker away from inner step `first` to `last`, both included; last=None means for good.

    Absence(worker=3, first=1, last=50) joins late; Absence(worker=3, first=51) leaves after step 50. An absent worker
    still calls `step()`, to follow the rounds; `OuterLoop.trains` tells it not to train.
    """

    worker: int
    first: int = 1
    last: int | None = None

    def __post_init__(self) -> None:
        whole = all(type(step) is int for step in (self.worker, self.first, self.last or 1))
        if not whole or self.first < 1 or (self.last is not None and self.last < self.first):
            problem = (
                f"an absence lasts from first >= 1 to last >= first, whole numbers, got {self.first} to {self.last}"
            )
            raise ConfigError(problem, setting="absences", value=self)

    def covers(self, worker: int, step: int) -> bool:
        """Return whether this worker is away during this inner step."""
        return worker == self.worker and self.first <= step and (self.last is None or step <= self.last)


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Describes what goes wrong, the same on every run."""

    drop: float = 0.0
    """Probability that one worker's payload of one round is lost; it then keeps its own parameters."""
    seed: int = 0
    """Decides which payloads are lost."""
    absences: tuple[Absence, ...] = ()
    """Which workers are away, and when."""
    speeds: Mapping[int, float] = field(default_factory=dict)
    """Worker -> share of inner steps it makes, above 0 and at most 1; workers not named make all of them."""

    def __post_init__(self) -> None:
        if not 0 <= self.drop <= 1:
            raise config_error("drop", self.drop, "a probability between 0 and 1")
        if not isinstance(self.absences, tuple):
            raise config_error("absences", self.absences, "a tuple of Absence(...)")
        for worker, speed in self.speeds.items():
            if not 0 < speed <= 1:
                raise config_error(f"speed of worker {worker}", speed, "above 0 and at most 1")

    def lost(self, worker: int, round_id: RoundId) -> bool:
        """Return whether this worker's payload of this round is lost."""
        return random.Random(f"{self.seed} {worker} {round_id}").random() < self.drop

    def present(self, worker: int, step: int) -> bool:
        """Return whether this worker is a member during this inner step."""
        return not any(absence.covers(worker, step) for absence in self.absences)

    def trains(self, worker: int, step: int) -> bool:
        """Return whether this worker makes this inner step."""
        speed = self.speeds.get(worker, 1.0)
        return self.present(worker, step) and int(step * speed) > int((step - 1) * speed)


@dataclass(slots=True)
class _LocalRound:
    """Holds what the workers have posted to one round."""

    offers: dict[int, Offer | None] = field(default_factory=dict)
    reductions: dict[int, Reduction] = field(default_factory=dict)
    reduced: Tensor | None = None
    """The encoded mean of a two-shot round, once the first worker has asked for it."""
    last_s: float = 0.0
    """When a worker last posted to it."""
    taken: set[int] = field(default_factory=set)
    """Workers that have the result."""


class _LocalStore:
    """Holds the contributions that the workers of one process leave for each other."""

    def __init__(self, workers: int, faults: Faults, timeout_s: float) -> None:
        self.workers = workers
        self.faults = faults
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.terms: dict[int, Mapping[str, str]] = {}
        self.joined: dict[int, float] = {}
        self.threads: dict[int, threading.Thread] = {}
        self.gone: dict[int, str] = {}
        self.rounds: dict[RoundId, _LocalRound] = {}
        self.newest: dict[int, RoundId] = {}  # by worker: the round it has posted to last
        self.dealt: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}  # by fragment: its last reduced round

    def join(self, worker: int, terms: Mapping[str, str], weight: float) -> None:
        with self.changed:
            self.check_open(worker)
            if worker in self.terms:
                problem = f"worker {worker} has joined already: each OuterLoop needs its own link, from a new local()"
                raise LinkError(problem, worker=worker)
            for other, theirs in self.terms.items():
                if differs := describe_differences(terms, theirs):
                    raise LinkError(f"worker {worker} and worker {other} differ in {differs}", worker=other)
            self.terms[worker] = terms
            self.joined[worker] = weight
            self.threads[worker] = threading.current_thread()
            self.changed.notify_all()

    def weights(self, worker: int, step: int) -> dict[int, float]:
        members = self.members(step)
        with self.changed:
            self.wait_for(step, worker, lambda: [w for w in members if w not in self.joined])
            return {w: self.joined[w] for w in members}

    def members(self, step: int) -> list[int]:
        return [w for w in range(self.workers) if self.faults.present(w, step)]

    def post(self, worker: int, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> None:
        arrives = self.faults.present(worker, round_id.step) and not self.faults.lost(worker, round_id)
        with self.changed:
            self.check_open(worker)
            self.threads[worker] = threading.current_thread()
            posted = self.rounds.setdefault(round_id, _LocalRound())
            posted.offers[worker], posted.reductions[worker] = offer if arrives else None, reduction
            posted.last_s = time.perf_counter()
            self.newest[worker] = round_id
            self.changed.notify_all()

    def take(self, worker: int, round_id: RoundId, reduction: Reduction, opened_s: float) -> Round:
        for earlier in self.skipped(worker, round_id) if reduction.residual is not None else ():
            self.settle(worker, earlier, reduction)
        who, payloads, outliers = self.settle(worker, round_id, reduction)
        with self.changed:
            posted = self.rounds[round_id]
            if posted.reduced is not None and reduction.residual is not None:  # an absent worker saves it, too
                reduction.residual.note(tuple(round_id), tuple(self.members(round_id.step)))
            posted.taken.add(worker)
            if len(posted.taken | self.gone.keys()) == self.workers:
                del self.rounds[round_id]
            transfer = TransferStats(opened_s, posted.last_s)
            return Round(round_id, who, payloads, posted.reduced, outliers, transfer=transfer)

    def skipped(self, worker: int, round_id: RoundId) -> list[RoundId]:
        """Return the fragment's earlier rounds that this worker applied before a resume and others have still to.

        What reducing them loses enters this round, so they are reduced again first.
        """
        with self.changed:
            known = [other for other, posted in self.rounds.items() if worker not in posted.taken]
        return sorted(other for other in known if other.fragment == round_id.fragment and other < round_id)

    def settle(
        self, worker: int, round_id: RoundId, reduction: Reduction
    ) -> tuple[tuple[Member, ...], tuple[Tensor, ...], tuple[Member, ...]]:
        """Wait for a round and reduce it if nobody has; returns who counts, their payloads, and outliers."""
        members = self.members(round_id.step)
        with self.changed:
            self.check_open(worker)
            posted = self.rounds[round_id]
            self.wait_for(round_id, worker, lambda: [w for w in members if w not in posted.offers])
            offers = [offer for _, offer in sorted(posted.offers.items()) if offer is not None]
        # Outside the lock, for this may wait for a GPU.
        arrived = [sent for offer in offers if (sent := offer.settled()) is not None]
        with self.changed:
            self.check_open(worker)
            counted, outliers = split_outliers(arrived, reduction)
            payloads, who = tuple(c.payload for c in counted), tuple(c.member for c in counted)
            if counted and shots(len(members)) == 2 and posted.reduced is None:
                here = [payload.to(reduction.device) for payload in payloads]
                posted.reduced = mean_between(self.reducers(round_id), here, [m.weight for m in who])
        return who, payloads, outliers

    def reducers(self, round_id: RoundId) -> dict[int, Reduction]:
        """Return the members of a round about to be reduced; one that was absent learns of the round before."""
        reductions = {member: self.rounds[round_id].reductions[member] for member in self.members(round_id.step)}
        before = self.dealt.get(round_id.fragment)
        for reduction in reductions.values():
            if before is not None and reduction.residual is not None:
                reduction.residual.note(*before)
        self.dealt[round_id.fragment] = tuple(round_id), tuple(reductions)
        return reductions

    def wait_for(self, what: RoundId | int, worker: int, missing: Callable[[], list[int]]) -> None:
        """Wait for a round, or for all to join before a step, holding the lock, until `missing` is empty."""
        round_id, at = (what, str(what)) if isinstance(what, RoundId) else (None, f"step {what}")
        deadline = time.monotonic() + self.timeout_s
        while absent := missing():
            for other in absent:
                if self.gone.get(other) == ENDED or self.is_past(other, round_id):
                    problem = "all workers must make the same number of steps and then call finish()"
                    whose = f"{self.progress(other)}, {self.progress(worker)}"
                    raise LinkError(f"{problem}: {whose}", worker=other, round_id=round_id)
                if other in self.gone:
                    problem = f"{at}: worker {other} left without sending: {self.gone[other]}"
                    raise LinkError(problem, worker=other, round_id=round_id)
                if self.threads.get(other) is threading.current_thread():
                    problem = f"{at}: worker {worker} waits for worker {other}, which the same thread steps"
                    call = "finish()" if round_id and round_id.last else "step()"
                    advice = f"step them together with atoll.Lockstep(loops).{call}"
                    raise LinkError(f"{problem}: {advice}", worker=other, round_id=round_id)
            if not self.changed.wait(deadline - time.monotonic()):
                names = f"worker{'s' if len(absent) > 1 else ''} {', '.join(map(str, absent))}"
                problem = f"{at}: nothing from {names} in {self.timeout_s:g} s"
                if round_id and round_id.last:
                    problem += f": {self.progress(absent[0])}; call finish() on every worker"
                raise LinkError(problem, worker=absent[0], round_id=round_id)

    def is_past(self, worker: int, round_id: RoundId | None) -> bool:
        """Return whether a worker that has not posted to a round never will: it has made more steps, or fewer."""
        newest = self.newest.get(worker)
        if newest is None or round_id is None:
            return False
        return newest.step > round_id.step or (newest.last and not round_id.last)

    def progress(self, worker: int) -> str:
        """Describe how far a worker has come, as far as its rounds tell."""
        newest = self.newest.get(worker)
        if newest is not None and newest.last:
            return f"worker {worker} called finish() after step {newest.step}"
        sent = "nothing" if newest is None else f"step {newest.step} last"
        return f"worker {worker} sent {sent} and {'ended' if worker in self.gone else 'has not called finish()'}"

    def check_open(self, worker: int) -> None:
        if worker in self.gone:
            raise LinkError(f"the link of worker {worker} is closed: {self.gone[worker]}", worker=worker)

    def leave(self, worker: int, reason: str) -> None:
        with self.changed:
            self.gone.setdefault(worker, reason)
            self.changed.notify_all()


@dataclass(frozen=True, slots=True)
class _LocalPending:
    store: _LocalStore
    worker: int
    round_id: RoundId
    reduction: Reduction
    opened_s: float

    def wait(self) -> Round:
        return self.store.take(self.worker, self.round_id, self.reduction, self.opened_s)


class LocalLink(Link):
    """Links one worker to the others of this process; `local` makes the links of all workers."""

    def __init__(self, store: _LocalStore, worker: int) -> None:
        self.worker = worker
        self.workers = store.workers
        self._store = store

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        """Join the other workers; LinkError names the terms in which another worker differs."""
        self._store.join(self.worker, {**terms, **(start or {})}, weight)

    def present(self, step: int) -> bool:
        """Return whether this worker is a member during this inner step."""
        return self._store.faults.present(self.worker, step)

    def trains(self, step: int) -> bool:
        """Return whether this worker makes this inner step: not if it is absent, or slower and skips it."""
        return self._store.faults.trains(self.worker, step)

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all present workers; waits for those that have yet to join."""
        return self._store.weights(self.worker, step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; with None, the worker only receives the result."""
        self._store.post(self.worker, round_id, offer, reduction)
        return _LocalPending(self._store, self.worker, round_id, reduction, time.perf_counter())

    def close(self, reason: str | None = None) -> None:
        """Leave for good: workers that wait for this one get a LinkError with the reason."""
        self._store.leave(self.worker, reason or "it was closed")


def local(workers: int, *, faults: Faults | None = None, timeout_s: float = 600.0) -> list[LocalLink]:
    """Make the links of all workers of this process, in worker order.

    Args:
        workers: Number of workers.
        faults: What goes wrong; None for nothing.
        timeout_s: Seconds that a worker waits for another before it raises a LinkError.
    """
    check_whole("workers", workers)
    if not timeout_s > 0:
        raise config_error("timeout_s", timeout_s, "a number of seconds above 0")
    faults = Faults() if faults is None else faults
    if not isinstance(faults, Faults):
        raise config_error("faults", faults, "a Faults(...)")
    for worker in (*(absence.worker for absence in faults.absences), *faults.speeds):
        if not 0 <= worker < workers:
            problem = f"faults name worker {worker}; workers are 0 to {workers - 1}"
            raise ConfigError(problem, setting="faults", value=worker)
    store = _LocalStore(workers, faults, timeout_s)
    return [LocalLink(store, worker) for worker in range(workers)]


def run_local(work: Callable[[LocalLink], Result], links: list[LocalLink]) -> list[Result]:
    """Run `work(link)` for every worker in its own thread; if one fails, all do, and its error is raised.

    Args:
        work: Called with the worker's link; its result is returned.
        links: The links of all workers, from `local` or `shaped`.

    Returns:
        The results, in worker order.
    """

    def worker(link: LocalLink) -> Result:
        try:
            result = work(link)
            warn_unfinished(link)
            return result
        except BaseException as error:
            link.close(f"{type(error).__name__}: {error}")
            raise
        finally:
            link.close(ENDED)

    with ThreadPoolExecutor(len(links), thread_name_prefix="atoll-worker") as pool:
        futures = [pool.submit(worker, link) for link in links]
        try:
            wait(futures)
        except BaseException as interruption:
            for link in links:
                link.close(f"interrupted by {type(interruption).__name__}")
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    # The cause, rather than the LinkErrors that it brought about in the others.
    for error in sorted(errors, key=lambda e: isinstance(e, LinkError)):
        raise error
    return [future.result() for future in futures]
