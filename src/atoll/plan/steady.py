"""What is waited for in every period once a run is under way, and over a whole run, all workers being alike.

`plan.simulate` for the one case that is asked about thousands of times. Both ways to send are the same here: what
leaves after a step is ready at its end or, layer by layer, somewhat earlier; it is needed at the end of the step
`delay` later or, layer by layer, as much later as its layer's forward is.

What a period does to the clock and the line is a sum and a maximum of what was before, so two periods bound what all
later ones can do: nothing grows faster for ever than what grew fastest, nothing slower than what grew slowest (the
bounds of Collatz and Wielandt, for sums and maxima). Periods are followed until both bounds agree.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from atoll.core.allreduce import shots
from atoll.plan import cost
from atoll.plan.lines import Array
from atoll.plan.method import Method, Model

EXACT = 1e-7
"""Utilisations that differ by less are the same."""
FEWEST_PERIODS, MOST_SENDS = 16, 4000
"""How long it is followed at most: so many periods or, if that is longer, so many sends. Where the bounds still differ,
the lower counts. That takes dozens of fragments and a latency of a third of the period or more; in 20,000 settings at
random they differed by up to 0.006 of the time, and what they came to in the end was within 1e-4 of the lower."""


# ---------------------------------------------------------------------- what leaves after a step


class _Send(NamedTuple):
    """Seconds, [rates]: of what leaves after one step of a period."""

    offset: int
    """Which step it is."""
    carried: Array
    """For which the line has it."""
    alone: Array
    """From the end of the step to when the line is done, if the line had nothing before it."""
    behind: Array
    """From when the line is free of what was before it to when it must be through at the latest to be of use."""
    fresh: Array
    """The same from the end of the step, if the line had nothing before it."""


def _sends(model: Model, method: Method, workers: int, rates: Array, layered: bool) -> list[_Send]:
    """Of one period, by step."""
    if not layered:
        together = cost.sent_together(model, method, workers)
        return [_Send(offset, *[8 * size / rates] * 4) for offset, size in together.items()]
    chunks: dict[int, list[tuple[int, float]]] = {}
    sizes, offsets = cost.round_bytes(model, method, workers), cost.offsets(model, method)
    for offset, size, layers in zip(offsets, sizes, method.layers(model), strict=True):
        chunks.setdefault(offset, []).extend((layer, size / len(layers)) for layer in layers)
    return [_layer_by_layer(model, rates, offset, found) for offset, found in chunks.items()]


def _layer_by_layer(model: Model, rates: Array, offset: int, chunks: list[tuple[int, float]]) -> _Send:
    """Lines take what is ready first: the last layers, whichever fragments they belong to."""
    depth, unit = model.layers, model.step_s / (3 * model.layers - 1)
    ordered = sorted(chunks, key=lambda chunk: -chunk[0])
    layer = np.array([layer for layer, _ in ordered])[:, None]
    carry = 8 * np.array([size for _, size in ordered])[:, None] / rates
    ready = (3 * depth - 2 * layer + 2 - (layer == 1)) * unit - model.step_s
    spare = (1 - layer) * unit
    passed = np.cumsum(carry, axis=0)
    alone = passed + np.maximum.accumulate(ready - (passed - carry), axis=0)
    return _Send(offset, passed[-1], alone[-1], (passed + spare).max(axis=0), (alone + spare).max(axis=0))


# ---------------------------------------------------------------------- the clock and the line


class _Run:
    """Seconds of waiting so far, and what is on its way; times since the period began, had nobody ever waited."""

    def __init__(self, model: Model, method: Method, sends: list[_Send], latency_s: float) -> None:
        self.step_s, self.period, self.delay = model.step_s, method.period, method.delay
        self.sends, self.latency_s = sends, latency_s
        self.waited = np.zeros_like(sends[0].carried)
        self.free = np.full_like(self.waited, -self.period * self.step_s)
        self.flying: deque[tuple[int, Array]] = deque()  # (step after which it is due, when it is there)

    def send(self, send: _Send) -> None:
        """What is due before this step is waited for, then it leaves."""
        self.apply(send.offset - 1)
        end = send.offset * self.step_s + self.waited
        there = np.maximum(self.free + send.behind, end + send.fresh) + self.latency_s
        self.free = np.maximum(self.free + send.carried, end + send.alone)
        self.flying.append((send.offset + self.delay, there))

    def apply(self, step: int) -> None:
        """Wait for everything that is due up to a step."""
        while self.flying and self.flying[0][0] <= step:
            due, there = self.flying.popleft()
            self.waited = np.maximum(self.waited, there - due * self.step_s)

    def follow(self) -> None:
        """One period; the next one begins then."""
        for send in self.sends:
            self.send(send)
        self.moved(1, 0.0)

    def moved(self, periods: int, longer_s: Array | float) -> None:
        """The same state, later by some periods that took so much longer than computing, for `periods` of one."""
        past = periods * self.period
        self.waited = self.waited + longer_s
        self.free = self.free + longer_s - past * self.step_s
        self.flying = deque((due - past, there + longer_s - past * self.step_s) for due, there in self.flying)

    def state(self) -> Array:
        """Everything that decides what follows: [clock, line, rounds on their way; rates].

        What is due before the next send is on the clock: so the same rounds are left whenever a period begins.
        """
        waited, left = self.waited, []
        for due, there in self.flying:
            if due < 0:
                waited = np.maximum(waited, there - due * self.step_s)
            else:
                left.append(there)
        return np.array([waited, self.free, *left])


# ---------------------------------------------------------------------- what it comes to


def waited_s(
    model: Model, method: Method, workers: int, rates: Array, *, latency_s: float = 0.0, layered: bool = False
) -> Array:
    """[rates]: seconds of waiting per period (data-parallel: per step), after the step or layer by layer."""
    if workers == 1:
        return np.zeros_like(rates)
    sends, latency_s = _sends(model, method, workers, rates, layered), shots(workers) * latency_s
    period_s, hidden_s = method.period * model.step_s, method.delay * model.step_s
    late_s = [send.fresh + latency_s - hidden_s for send in sends]
    line_late_s = sum((send.carried for send in sends), np.zeros_like(rates)) - period_s
    least = cost.least_waited_s(method, [send.offset for send in sends], late_s, line_late_s)
    if cost.rounds_apart(model, method):
        return least
    return _settled(_Run(model, method, sends, latency_s), least, period_s)


def _settled(run: _Run, least: Array, period_s: float) -> Array:
    """What every period adds in the end, which is no less than `least`; where both bounds stay apart, the lower."""
    most: Array = np.full_like(least, np.inf)
    run.follow()
    before = kept = run.state()
    kept_at = 1
    for lap in range(2, 2 + max(FEWEST_PERIODS, MOST_SENDS // len(run.sends))):
        run.follow()
        now = run.state()
        # What repeats with several periods is seen when one that is kept is so many of them ago.
        for past, periods in ((before, 1), (kept, lap - kept_at)):
            grown = (now - past) / periods
            most, least = np.minimum(most, grown.max(axis=0)), np.maximum(least, grown.min(axis=0))
        if (period_s / (period_s + least) - period_s / (period_s + most) <= EXACT).all():
            break
        before = now
        if lap == 2 * kept_at:
            kept, kept_at = now, lap
    return least


def _followed(run: _Run, periods: int) -> tuple[int, Array | None]:
    """The first of so many periods: how many are left, and what each of them adds if that is known."""
    before: Array | None = None
    for done in range(1, min(periods, FEWEST_PERIODS) + 1):
        run.follow()
        now = run.state()
        if before is not None and (np.ptp(now - before, axis=0) <= EXACT * run.period * run.step_s).all():
            return periods - done, now[0] - before[0]
        before = now
    return max(0, periods - FEWEST_PERIODS), None


def run_s(model: Model, method: Method, workers: int, rates: Array, steps: int, *, latency_s: float = 0.0) -> Array:
    """[rates]: seconds of a run as atoll sends, with its quiet beginning and, at its end, what was not sent yet.

    Long ones are followed until a period repeats the one before it, for 16 at most; what comes then is as in
    `waited_s`, although a line that is a little too slow may be hidden by the delay for longer.
    """
    if workers == 1 or not steps:
        return np.full_like(rates, steps * model.step_s)
    sends = _sends(model, method, workers, rates, layered=False)
    run = _Run(model, method, sends, shots(workers) * latency_s)
    periods = max(0, (steps - sends[-1].offset) // method.period)  # in which everything is sent
    left, longer_s = _followed(run, periods)
    if left:
        if longer_s is None:
            longer_s = waited_s(model, method, workers, rates, latency_s=latency_s)
        run.moved(0, left * longer_s)
    # Every fragment trains a period before it is sent first, so that one is over.
    last = steps - (periods + 1) * method.period
    for send in sends:
        if send.offset <= last:
            run.send(send)
    run.apply(last)
    end = last * model.step_s
    for _, there in run.flying:
        run.waited = np.maximum(run.waited, there - end)
    since = [(send, steps - send.offset) for send in sends]
    unsent = [send.carried for send, ago in since if ago < method.period or ago % method.period]
    if unsent:
        run.waited = np.maximum(run.free - end, run.waited) + sum(unsent) + run.latency_s
    return steps * model.step_s + run.waited
