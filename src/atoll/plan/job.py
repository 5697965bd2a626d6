"""A run as far as its time is concerned, one step at a time: what it waits for on a link, and when.

The model: every worker computes inner steps of equal length and has one link of its own, which carries its rounds one
after the other. A round leaves after its step, and is there once every worker's part has passed its link. Who must
apply it earlier waits. `core.schedule` says what is due when, so the loop and this cannot disagree.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from atoll._util.checks import check_whole
from atoll.core.allreduce import sent_bytes, shots
from atoll.core.schedule import Due, Schedule
from atoll.errors import ConfigError
from atoll.plan.link import Link

# ---------------------------------------------------------------------- one round


def transfer_s(payload_bytes: int, workers: int, link: Link) -> float:
    """Seconds from the departure of a round's first bit to the arrival of its last, on a link that is free."""
    return _carry_s(payload_bytes, workers, link) + _latency_s(workers, link)


def _carry_s(payload_bytes: int, workers: int, link: Link) -> float:
    """Seconds for which a round occupies a link."""
    return 8 * sent_bytes(payload_bytes, workers) / link.bits_per_s


def _latency_s(workers: int, link: Link) -> float:
    """Every shot travels the distance once; nobody to send to, no distance."""
    return shots(workers) * link.latency_s


def _check_round(payload_bytes: int, workers: int) -> None:
    check_whole("workers", workers)
    check_whole("payload_bytes", payload_bytes, least=0)


# ---------------------------------------------------------------------- a run


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run as far as its time is concerned."""

    steps: int
    """Inner steps of every worker."""
    step_s: float
    """Seconds of compute of one inner step."""
    period: int
    """Inner steps between two sends of the same fragment."""
    payload_bytes: tuple[int, ...]
    """Bytes of one worker's payload, per fragment; empty: nothing is ever sent."""
    delay: int | tuple[int, ...]
    """Inner steps from a round's send to its apply; a tuple has one per worker."""
    workers: int
    """How many take part."""
    gradients: bool = False
    """Data-parallel: one round of everything on every step, and nothing hides it; period and delay do not matter."""
    finish: bool = True
    """Whether the run ends with the exchange of what was not sent yet, as `OuterLoop.finish` does."""

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, least=0)
        if not 0 <= self.step_s < math.inf:
            raise ConfigError(f"step_s must be a number of seconds, 0 or more, got {self.step_s!r}")
        for size in (*self.payload_bytes, 0):
            _check_round(size, self.workers)
        if isinstance(self.delay, tuple) and len(self.delay) != self.workers:
            raise ConfigError(f"delay has {len(self.delay)} entries for {self.workers} workers: give one, or one each")
        self.schedules()

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Workers that behave alike, together; ordered by their delay."""
        if self.gradients or isinstance(self.delay, int):
            return (tuple(range(self.workers)),)
        delays = self.delay
        return tuple(tuple(w for w in range(self.workers) if delays[w] == d) for d in sorted(set(delays)))

    def schedules(self) -> tuple[Schedule, ...]:
        """What is due when, per lane; none if nothing is ever sent."""
        fragments = len(self.payload_bytes)
        if not fragments:
            return ()
        if self.gradients:
            return (Schedule(1, fragments, 0),)
        delays = [self.delay] if isinstance(self.delay, int) else sorted(set(self.delay))
        return tuple(Schedule(self.period, fragments, delay) for delay in delays)


class Carried(NamedTuple):
    """A round on one worker's link."""

    fragment: int
    begin_s: float
    end_s: float
    """When the link is free again; the round itself arrives a latency later."""


class Stop(NamedTuple):
    """The end of an inner step after which something is sent or applied. Times are since the start of the run."""

    step: int
    reached_s: tuple[float, ...]
    """Per lane: when the step was computed."""
    left_s: tuple[float, ...]
    """Per lane: when the next step could begin; what lies between is waiting."""
    carried: tuple[tuple[Carried, ...], ...]
    """Per lane: the rounds sent now, on the link of each of its workers."""


class RunTime(NamedTuple):
    """How long a run takes on a link, and why."""

    total_s: float
    compute_s: float
    exposed_s: float
    """Waiting of the slowest worker: total_s - compute_s."""
    bytes_per_worker: int
    """What one worker put on its link."""
    utilisation: float
    """compute_s / total_s, 0 to 1."""


def time_of(job: Job, link: Link) -> RunTime:
    """How long a job takes; its last rounds have arrived then if it finishes."""
    compute_s, sent = job.steps * job.step_s, 0
    waited_s = [0.0] * len(job.lanes())
    for stop in stops(job, link):
        waited_s = [w + left - at for w, left, at in zip(waited_s, stop.left_s, stop.reached_s, strict=True)]
        sent += sum(sent_bytes(job.payload_bytes[c.fragment], job.workers) for c in stop.carried[0])
    total_s = compute_s + max(waited_s)
    return RunTime(total_s, compute_s, max(waited_s), sent, compute_s / total_s if total_s else 1.0)


def stops(job: Job, link: Link) -> Iterator[Stop]:
    """Every moment of a run at which something is sent or applied, in order; the finish is one more at the end."""
    queue = _Queue(job, link)
    schedules = job.schedules()
    for step, dues in due_steps(schedules, job.steps):
        sent = dues[0].send  # the same in every lane: only applies differ
        needed = [
            [(step - s.delay, fragment) for fragment in due.apply] for s, due in zip(schedules, dues, strict=True)
        ]
        yield queue.stop(step, sent, needed)
    if job.finish and schedules and job.steps:
        yield queue.drain(job.steps)
        unsent = [f for f in range(len(job.payload_bytes)) if not schedules[0].is_send(f, job.steps)]
        if unsent:
            yield queue.stop(job.steps, unsent, [[(job.steps, f) for f in unsent]] * len(schedules))


class _Queue:
    """The clocks and links of all lanes, and the rounds on their way."""

    def __init__(self, job: Job, link: Link) -> None:
        self.job = job
        self.carry_s = [_carry_s(size, job.workers, link) for size in job.payload_bytes]
        self.latency_s = _latency_s(job.workers, link)
        lanes = len(job.lanes())
        # Waiting is added up apart from compute: sums of many small steps would drift.
        self.waited_s = [0.0] * lanes
        self.free_s = [0.0] * lanes
        self.arrival_s: dict[tuple[int, int], float] = {}

    def stop(self, step: int, sent: Sequence[int], needed: Sequence[Sequence[tuple[int, int]]]) -> Stop:
        reached = tuple(step * self.job.step_s + waited for waited in self.waited_s)
        carried: list[list[Carried]] = [[] for _ in reached]
        for fragment in sent:
            for lane, now in enumerate(reached):
                begin = max(now, self.free_s[lane])
                self.free_s[lane] = begin + self.carry_s[fragment]
                carried[lane].append(Carried(fragment, begin, self.free_s[lane]))
            self.arrival_s[step, fragment] = max(self.free_s) + self.latency_s
        left = tuple(
            max([now, *(self.arrival_s[round_id] for round_id in needed[lane])]) for lane, now in enumerate(reached)
        )
        self._forget(step)
        for lane, now in enumerate(reached):
            self.waited_s[lane] += left[lane] - now
        return Stop(step, reached, left, tuple(map(tuple, carried)))

    def drain(self, step: int) -> Stop:
        """Wait for everything that is still on its way."""
        return self.stop(step, (), [list(self.arrival_s)] * len(self.free_s))

    def _forget(self, step: int) -> None:
        """Nobody applies a round later than a period after its send."""
        oldest = step - self.job.period
        self.arrival_s = {round_id: at for round_id, at in self.arrival_s.items() if round_id[0] > oldest}


def due_steps(schedules: Sequence[Schedule], steps: int) -> Iterator[tuple[int, tuple[Due, ...]]]:
    """Steps after which something is due, ascending, with what is due in each lane."""
    if not schedules:
        return
    period = schedules[0].period
    # From step 3 * period on every fragment has been sent and applied, and what is due repeats with the period.
    offsets = {schedules[0].offset(fragment) for fragment in range(schedules[0].fragments)}
    lates = {0, *(schedule.delay for schedule in schedules)}
    some = {lap * period + offset + late for lap in (1, 2, 3) for offset in offsets for late in lates}
    first = [
        (step, tuple(s.due(step) for s in schedules)) for step in sorted(some) if step <= min(steps, 4 * period - 1)
    ]
    yield from first
    again = [(step, dues) for step, dues in first if step >= 3 * period]
    for lap in count(1) if steps >= 4 * period else ():
        for step, dues in again:
            if step + lap * period > steps:
                return
            yield step + lap * period, dues
