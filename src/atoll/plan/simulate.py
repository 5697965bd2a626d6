"""Simulates the time of a run: workers compute steps of equal length, and rounds queue on one line per worker.

A line carries one payload after the other. A round is complete when every worker's part has passed its line and the
latency is over; a worker that has to apply it earlier waits. Workers with the same delay behave alike and form a lane.
Many line rates are simulated at once: arrays are [lanes, rates]. Two ways to send are modelled:

    after the step   a fragment leaves when the step is over and is needed when the step `delay` later is over, as in
                     atoll
    layer by layer   a layer leaves when its own backward is over and is needed before its own forward in the step
                     after that one: the papers' simulator, and what DistributedDataParallel comes close to

A step of L layers is 3L - 1 pieces of equal length: L forward, then from the last layer to the first one backward for
its parameters and, except for the first layer, one for its inputs.

A period adds to the clocks and lines a sum and a maximum of what they were before. So any two states bound what all
later periods add: no less than the entry that grew least, no more than the one that grew most (the Collatz-Wielandt
bounds of a max-plus system). `steady_wait_s` follows periods until both bounds agree.
"""

import math
from collections import deque
from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from atoll.core.allreduce import sent_bytes, shots
from atoll.plan import cost
from atoll.plan.cost import Array
from atoll.plan.line import Line
from atoll.plan.method import Job, Layers

EXACT = 1e-7
"""Utilisations that differ by less are taken as equal."""
FEWEST_PERIODS, MOST_SENDS = 16, 4000
"""`steady_wait_s` follows at most this many periods or, if that is longer, sends. Where the bounds still differ, the
lower counts. That takes dozens of fragments and a latency of a third of the period or more; in 20,000 random settings
the bounds differed by up to 0.006 of the time, and the value reached in the end was within 1e-4 of the lower."""

# ---------------------------------------------------------------------- what leaves after a step


class _Send(NamedTuple):
    """Holds what leaves after one step of a period, in seconds on the line, [rates]."""

    offset: int
    """The step within the period."""
    fragments: tuple[int, ...]
    carried: Array
    """Time for which the line is busy with it."""
    alone: Array
    """From the end of the step until a line that was idle before has carried it."""
    behind: Array
    """From the moment a busy line turns to it until it must have passed to be in time."""
    fresh: Array
    """From the end of the step until then, on a line that was idle before."""


def _sends(job: Job, rates: Array, layers: Layers | None = None, layer_count: int = 1) -> list[_Send]:
    """Return the sends of one period by step; with `layers` (of every fragment), layer by layer."""
    schedule = job.schedules()[0]
    together: dict[int, list[int]] = {}
    for fragment in range(schedule.fragments):
        together.setdefault(schedule.offset(fragment), []).append(fragment)
    return [_send(job, rates, offset, tuple(found), layers, layer_count) for offset, found in together.items()]


def _send(
    job: Job, rates: Array, offset: int, fragments: tuple[int, ...], layers: Layers | None, layer_count: int
) -> _Send:
    sizes = {f: sent_bytes(job.payload_bytes[f], job.workers) for f in fragments}
    if layers is None:
        return _Send(offset, fragments, *[8 * sum(sizes.values()) / rates] * 4)
    chunks = [(layer, size / len(layers[f])) for f, size in sizes.items() for layer in layers[f]]
    # A line takes what is ready first: the last layers, whichever fragments they belong to.
    ordered = sorted(chunks, key=lambda chunk: -chunk[0])
    layer = np.array([layer for layer, _ in ordered])[:, None]
    carry = 8 * np.array([size for _, size in ordered])[:, None] / rates
    piece = job.step_s / (3 * layer_count - 1)
    ready = (3 * layer_count - 2 * layer + 2 - (layer == 1)) * piece - job.step_s
    spare = (1 - layer) * piece
    passed = np.cumsum(carry, axis=0)
    alone = passed + np.maximum.accumulate(ready - (passed - carry), axis=0)
    return _Send(offset, fragments, passed[-1], alone[-1], (passed + spare).max(axis=0), (alone + spare).max(axis=0))


# ---------------------------------------------------------------------- clocks and lines


class Stop(NamedTuple):
    """Describes the end of an inner step after which something is sent or applied; seconds since the run's start."""

    step: int
    reached_s: tuple[float, ...]
    """When each lane has computed the step."""
    left_s: tuple[float, ...]
    """When each lane continues: the rounds that it applies after this step are complete."""
    sent: tuple[int, ...] = ()
    """Fragments that are sent."""
    carried_s: tuple[tuple[float, float], ...] = ()
    """When each lane's line begins to carry them, and when it is free again; empty if nothing is sent."""


class _Clocks:
    """Tracks the clock and the line of every lane, and the rounds in flight.

    Waiting is added up apart from computing, because sums of many small steps would drift.
    """

    def __init__(self, job: Job, rates: int, latency_s: float) -> None:
        schedules = job.schedules()
        self.step_s, self.period = job.step_s, schedules[0].period
        self.delays = [schedule.delay for schedule in schedules]
        self.latency_s = shots(job.workers) * latency_s
        self.waited = np.zeros((len(schedules), rates))
        self.free = np.full_like(self.waited, -self.period * self.step_s)
        self.in_flight: list[deque[tuple[int, Array]]] = [deque() for _ in schedules]  # (step, complete) per lane

    def send(self, step: int, send: _Send) -> None:
        """Wait for everything due before this step, then send at its end."""
        self.apply(step - 1)
        end = step * self.step_s + self.waited
        passed = np.maximum(self.free + send.behind, end + send.fresh)
        complete = (passed.max(axis=0) if len(passed) > 1 else passed[0]) + self.latency_s
        self.free = np.maximum(self.free + send.carried, end + send.alone)
        for delay, rounds in zip(self.delays, self.in_flight, strict=True):
            rounds.append((step + delay, complete))

    def apply(self, step: int) -> None:
        """Wait for all rounds due up to this step."""
        for lane, rounds in enumerate(self.in_flight):
            while rounds and rounds[0][0] <= step:
                due, complete = rounds.popleft()
                self.waited[lane] = np.maximum(self.waited[lane], complete - due * self.step_s)

    def drain(self, step: int) -> None:
        """Wait at the end of this step for everything in flight."""
        self.in_flight = [deque((min(due, step), at) for due, at in rounds) for rounds in self.in_flight]
        self.apply(step)

    def follow(self, sends: list[_Send]) -> None:
        """Follow one period; steps are counted from the beginning of the next one afterwards."""
        for send in sends:
            self.send(send.offset, send)
        self._shift(-self.period, -self.period * self.step_s)

    def delay_all(self, seconds: Array) -> None:
        """Let everything happen later by some seconds of waiting, [rates]."""
        self.waited = self.waited + seconds
        self._shift(0, seconds)

    def _shift(self, steps: int, seconds: float | Array) -> None:
        self.free = self.free + seconds
        self.in_flight = [deque((due + steps, at + seconds) for due, at in rounds) for rounds in self.in_flight]

    def state(self) -> Array:
        """Return everything that decides what follows in a run of one lane: [clock, line, rounds in flight; rates].

        Rounds that are due before the next send count as waited for, so every period begins with the same number.
        """
        waited, left = self.waited[0], []
        for due, complete in self.in_flight[0]:
            if due < 0:
                waited = np.maximum(waited, complete - due * self.step_s)
            else:
                left.append(complete)
        return np.array([waited, self.free[0], *left])

    def next_due(self) -> float:
        """Return the first step at whose end some lane applies a round."""
        return min((rounds[0][0] for rounds in self.in_flight if rounds), default=math.inf)

    def stop(self, step: int, send: _Send | None = None, *, drain: bool = False) -> Stop:
        """Pass the end of a step, with what is sent after it, at the first rate; wait for what is due or for all."""
        reached = step * self.step_s + self.waited[:, 0]
        carried: tuple[tuple[float, float], ...] = ()
        if send is not None:
            begin = np.maximum(self.free[:, 0], reached)
            self.send(step, send)
            carried = tuple(zip(begin.tolist(), self.free[:, 0].tolist(), strict=True))
        (self.drain if drain else self.apply)(step)
        left = step * self.step_s + self.waited[:, 0]
        return Stop(step, tuple(reached.tolist()), tuple(left.tolist()), send.fragments if send else (), carried)


# ---------------------------------------------------------------------- one run


class RunTime(NamedTuple):
    """Says how long a run takes, and what it sends."""

    total_s: float
    compute_s: float
    exposed_s: float
    """Waiting of the slowest worker: total_s - compute_s."""
    bytes_per_worker: int
    """Payload bytes that one worker puts on its line."""
    utilisation: float
    """compute_s / total_s, 0 to 1."""


def time_of(job: Job, link: Line) -> RunTime:
    """Return how long a job takes on a link, all of whose rate payloads get."""
    compute_s, waited_s, sent = job.steps * job.step_s, 0.0, 0
    sizes = [sent_bytes(size, job.workers) for size in job.payload_bytes]
    for stop in stops(job, link):
        waited_s = max(stop.left_s) - stop.step * job.step_s
        sent += sum(sizes[fragment] for fragment in stop.sent)
    total_s = compute_s + waited_s
    return RunTime(total_s, compute_s, waited_s, sent, compute_s / total_s if total_s else 1.0)


def stops(job: Job, link: Line) -> Iterator[Stop]:
    """Yield every step end at which something is sent or applied, in order; the finish adds one or two at the end.

    Payloads get all of the link's rate, whatever its goodput.
    """
    if not job.payload_bytes:
        return
    rates = np.array([link.bits_per_s])
    sends, clocks = _sends(job, rates), _Clocks(job, 1, link.latency_s)
    for step, send in _until(job.steps, clocks.period, sends):
        while (due := clocks.next_due()) < step:
            yield clocks.stop(int(due))
        yield clocks.stop(step, send)
    while (due := clocks.next_due()) <= job.steps:
        yield clocks.stop(int(due))
    if job.finish and job.steps:
        yield clocks.stop(job.steps, drain=True)
        if unsent := _unsent(job):
            yield clocks.stop(job.steps, _send(job, rates, 0, unsent, None, 1), drain=True)


def _until(steps: int, period: int, sends: list[_Send]) -> Iterator[tuple[int, _Send]]:
    """Yield the sends of a run and their steps; every fragment trains a full period before its first."""
    for lap in count(1):
        for send in sends:
            if lap * period + send.offset > steps:
                return
            yield lap * period + send.offset, send


def _unsent(job: Job) -> tuple[int, ...]:
    """Return the fragments that have changed since their last send when the run ends."""
    schedule = job.schedules()[0]
    return tuple(f for f in range(schedule.fragments) if not schedule.is_send(f, job.steps))


# ---------------------------------------------------------------------- many rates


def steady_wait_s(
    job: Job, rates: Array, *, latency_s: float = 0.0, layers: Layers | None = None, layer_count: int = 1
) -> Array:
    """Return the seconds of waiting in every period (data-parallel: every step) once a run is under way.

    Args:
        job: The run, with one delay for all workers. Its number of steps does not matter.
        rates: Bits per second that payloads get, [rates].
        latency_s: Seconds from a bit's departure to its arrival.
        layers: The layers of every fragment, to send layer by layer. None: after the step.
        layer_count: Layers of the model, with `layers`.

    Returns:
        Seconds, [rates].
    """
    if job.workers == 1:
        return np.zeros_like(rates)
    sends, clocks = _sends(job, rates, layers, layer_count), _Clocks(job, len(rates), latency_s)
    period, delay, steps = clocks.period, clocks.delays[0], [send.offset for send in sends]
    period_s = period * job.step_s
    late_s = [send.fresh + clocks.latency_s - delay * job.step_s for send in sends]
    line_late_s = sum((send.carried for send in sends), np.zeros_like(rates)) - period_s
    least = cost.least_wait_s(period, delay, steps, late_s, line_late_s)
    return least if cost.rounds_apart(period, delay, steps) else _converged(clocks, sends, least, period_s)


def _converged(clocks: _Clocks, sends: list[_Send], least: Array, period_s: float) -> Array:
    """Return what every period adds in the end, at least `least`; where the bounds stay apart, the lower one."""
    most: Array = np.full_like(least, np.inf)
    clocks.follow(sends)
    before = kept = clocks.state()
    kept_at = 1
    for lap in range(2, 2 + max(FEWEST_PERIODS, MOST_SENDS // len(sends))):
        clocks.follow(sends)
        now = clocks.state()
        # A pattern that repeats after several periods shows against the state that was kept that many periods ago.
        for past, periods in ((before, 1), (kept, lap - kept_at)):
            grown = (now - past) / periods
            most, least = np.minimum(most, grown.max(axis=0)), np.maximum(least, grown.min(axis=0))
        if (period_s / (period_s + least) - period_s / (period_s + most) <= EXACT).all():
            break
        before = now
        if lap == 2 * kept_at:
            kept, kept_at = now, lap
    return least


def run_s(job: Job, rates: Array, *, latency_s: float = 0.0) -> Array:
    """Return the seconds of a whole run with one delay for all workers, sending after the step, [rates].

    Long runs are followed until a period repeats the one before it, for 16 periods at most; later ones take what
    `steady_wait_s` says, although a line that is a little too slow may be hidden by the delay for longer.
    """
    if job.workers == 1 or not job.steps:
        return np.full_like(rates, job.steps * job.step_s)
    sends, clocks = _sends(job, rates), _Clocks(job, len(rates), latency_s)
    periods = max(0, (job.steps - sends[-1].offset) // clocks.period)  # in which everything is sent
    left, longer_s = _followed(clocks, sends, periods)
    if left:
        clocks.delay_all(left * (steady_wait_s(job, rates, latency_s=latency_s) if longer_s is None else longer_s))
    last = job.steps - (periods + 1) * clocks.period  # within the last period, which is not complete
    for send in sends:
        if send.offset <= last:
            clocks.send(send.offset, send)
    clocks.drain(last)
    if unsent := _unsent(job):
        clocks.send(last, _send(job, rates, 0, unsent, None, 1))
        clocks.drain(last)
    total: Array = job.steps * job.step_s + clocks.waited[0]
    return total


def _followed(clocks: _Clocks, sends: list[_Send], periods: int) -> tuple[int, Array | None]:
    """Follow the first periods; return how many are left, and what each of them adds if that is known."""
    before: Array | None = None
    for done in range(1, min(periods, FEWEST_PERIODS) + 1):
        clocks.follow(sends)
        now = clocks.state()
        if before is not None and (np.ptp(now - before, axis=0) <= EXACT * clocks.period * clocks.step_s).all():
            return periods - done, now[0] - before[0]
        before = now
    return max(0, periods - FEWEST_PERIODS), None
