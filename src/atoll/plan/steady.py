"""What is waited for in every period once a run is under way, after the step, all workers being alike.

`plan.simulate` for the one case that is asked about thousands of times: the same clock and line, nothing else.
"""

from collections import deque

import numpy as np

from atoll.core.shots import shots
from atoll.plan import cost
from atoll.plan.lines import Array
from atoll.plan.method import Method, Model

WARM_UP = 4
"""Periods after which every fragment has been sent, applied and sent again, and what happens nearly repeats."""
REPEATS = 12
"""With the period or, where rounds stay away for longer, with two, three, four or six of them: this holds all."""


def waited_s(model: Model, method: Method, workers: int, rates: Array, *, latency_s: float = 0.0) -> Array:
    """[rates]: seconds of waiting per period (data-parallel: per step), as atoll sends: after the step."""
    least = cost.exposed_at(model, method, workers, rates, latency_s=latency_s)
    if cost.rounds_apart(model, method):
        return least
    # A line that is a little too slow falls behind by a little in every period, and nobody waits before that has eaten
    # up the delay, which may be long after we have stopped looking. What it comes to in the end is known.
    seen: Array = np.maximum(least, _followed(model, method, workers, rates, shots(workers) * latency_s))
    return seen


def _followed(model: Model, method: Method, workers: int, rates: Array, latency_s: float) -> Array:
    """Round by round, on one clock and one line."""
    step_s, together = model.step_s, cost.sent_together(model, method, workers)
    carries = [(offset, 8 * size / rates) for offset, size in together.items()]
    waited, free, begun = np.zeros_like(rates), np.zeros_like(rates), np.zeros_like(rates)
    flying: deque[tuple[int, Array]] = deque()  # (step of the apply, arrival)
    for lap in range(WARM_UP + REPEATS):
        begun = waited if lap == WARM_UP else begun
        for offset, carry in carries:
            step = lap * method.period + offset
            while flying and flying[0][0] < step:
                due, arrival = flying.popleft()
                waited = np.maximum(waited, arrival - due * step_s)
            free = np.maximum(free, step * step_s + waited) + carry
            flying.append((step + method.delay, free + latency_s))
    return (waited - begun) / REPEATS
