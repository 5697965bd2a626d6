"""What the papers measured: how much higher the loss ends than data-parallel's, by size, workers, period and merge.

Losses are nats per token on C4 after 20 tokens a parameter, as printed. What lies between two measurements is taken on
a straight line over the logarithms of size, workers and period; what lies beyond is not known, and None.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from atoll.plan.method import Method

_M, _B = 10**6, 10**9

# Scaling Laws, whole model, period 30, 16 bits: data-parallel, then 1, 2, 4 and 8 workers.
_BY_WORKERS: dict[int, tuple[float, ...]] = {
    35 * _M: (3.485, 3.482, 3.508, 3.554, 3.621),
    90 * _M: (3.167, 3.162, 3.182, 3.213, 3.265),
    180 * _M: (2.950, 2.943, 2.957, 2.981, 3.019),
    335 * _M: (2.784, 2.777, 2.788, 2.808, 2.841),
    550 * _M: (2.653, 2.645, 2.657, 2.673, 2.698),
    1300 * _M: (2.460, 2.451, 2.464, 2.472, 2.493),
    2400 * _M: (2.326, 2.317, 2.323, 2.332, 2.351),
    4 * _B: (2.224, 2.219, 2.220, 2.230),
    10 * _B: (2.090, 2.086, 2.086, 2.096),
}
_WORKERS = (1, 2, 4, 8)

# Streaming, tables 5 and 6, 4 bits, a delay of 1: data-parallel; then 2 and 4 workers at period 30, and at 100.
_STREAMING: dict[int, tuple[float, ...]] = {
    35 * _M: (3.51, 3.53, 3.60, 3.56, 3.64),
    100 * _M: (3.19, 3.21, 3.25, 3.22, 3.29),
    200 * _M: (2.97, 2.98, 3.02, 3.00, 3.05),
    300 * _M: (2.80, 2.81, 2.84, 2.83, 2.87),
    500 * _M: (2.67, 2.67, 2.70, 2.69, 2.73),
    1 * _B: (2.49, 2.48, 2.50, 2.50, 2.53),
}

# Eager Updates, table 6, 2 workers, in fragments: period 30, and 100. Below 500 million the paper prints one for both.
_EAGER: dict[int, tuple[float, ...]] = {
    35 * _M: (3.62, 3.62),
    100 * _M: (3.27, 3.27),
    200 * _M: (3.03, 3.03),
    300 * _M: (2.86, 2.86),
    500 * _M: (2.71, 2.71),
    1 * _B: (2.50, 2.52),
}
_EAGER_WHOLE = 2.69 / 2.68 - 1  # its table 3: eager against waiting, 500M, whole model
_TWENTYFOLD_PERIOD = math.log(1.029) / math.log(15.02)  # DiLoCo: perplexity 2.9 % higher at 1000 than at 50, near 15
_TEN_STEPS = 0.002  # Streaming: less than that for a delay of 10
_LONGEST_DELAY, _LONGEST_PERIOD = 10, 1000


class Penalty(NamedTuple):
    """A relative increase of the final loss against data-parallel: 0.006 is 0.6 %."""

    loss: float | None
    """None where nobody measured anything near."""
    source: str
    """Where it is from, in a few words."""


def penalty(parameters: int, workers: int, method: Method) -> Penalty:
    """What the papers lead one to expect of such a choice."""
    if method.gradients:
        return Penalty(0.0, "data-parallel itself")
    if method.period > _LONGEST_PERIOD:
        return Penalty(None, f"no paper went beyond a period of {_LONGEST_PERIOD}")
    if not method.eager and method.delay > _LONGEST_DELAY:
        return Penalty(None, f"no paper prints a loss for a delay beyond {_LONGEST_DELAY}")
    return _eager(parameters, workers, method) if method.eager else _waiting(parameters, workers, method)


def _waiting(parameters: int, workers: int, method: Method) -> Penalty:
    """Blended, at once or after a few steps."""
    delay = _TEN_STEPS * max(0, method.delay - 1) / (_LONGEST_DELAY - 1)
    if method.each is not None and workers in (2, 3, 4) and _inside(parameters, _STREAMING):
        return Penalty(_streamed(parameters, workers, method.period) + delay, "Streaming, tables 5 and 6")
    base = _by_workers(parameters, workers)
    if base is None:
        return Penalty(None, "no paper measured so many workers or a model of this size")
    nearest = min(max(parameters, min(_STREAMING)), max(_STREAMING))
    members = min(max(workers, 2), 4)
    longer = _streamed(nearest, members, method.period) - _streamed(nearest, members, 30)
    if method.period <= 30:
        return Penalty(base + delay, "Scaling Laws, losses by workers, at 30")
    return Penalty(base + longer + delay, "Scaling Laws by workers, and what Streaming's table 5 adds for the period")


def _eager(parameters: int, workers: int, method: Method) -> Penalty:
    if method.each is None:
        waiting = _by_workers(parameters, workers) if workers == 2 else None
        if waiting is not None:
            nearest = min(max(parameters, min(_STREAMING)), max(_STREAMING))
            longer = _streamed(nearest, 2, method.period) - _streamed(nearest, 2, 30)
            return Penalty(waiting + longer + _EAGER_WHOLE, "Scaling Laws by workers, and Eager's table 3")
    elif workers == 2 and _inside(parameters, _EAGER):
        at_30, at_100 = (
            _between(parameters, _EAGER, column) / _between(parameters, _STREAMING, 0) - 1 for column in (0, 1)
        )
        return Penalty(_at_period(method.period, at_30, at_100), "Eager Updates, table 6")
    return Penalty(None, "Eager Updates was measured with 2 workers and up to 1 billion parameters only")


def _streamed(parameters: int, workers: int, period: int) -> float:
    """Tables 5 and 6, for 2 to 4 workers."""
    share = math.log(workers / 2) / math.log(2)
    losses = [_between(parameters, _STREAMING, column) for column in range(5)]
    at_30, at_100 = ((losses[first] + share * (losses[first + 1] - losses[first])) / losses[0] - 1 for first in (1, 3))
    return _at_period(period, at_30, at_100)


def _at_period(period: int, at_30: float, at_100: float) -> float:
    """Shorter than 30 as at 30: the papers see little difference there, and none that is worse above 5."""
    if period > 100:
        return at_100 + _TWENTYFOLD_PERIOD * math.log(period / 100) / math.log(20)
    return at_30 + (at_100 - at_30) * max(0.0, math.log(period / 30)) / math.log(100 / 30)


def _by_workers(parameters: int, workers: int) -> float | None:
    if not 1 <= workers <= _WORKERS[-1] or not _inside(parameters, _BY_WORKERS):
        return None
    known = {size: losses for size, losses in _BY_WORKERS.items() if len(losses) == 5 or workers <= 4}
    if not _inside(parameters, known):
        return None
    ratios = [
        _between(parameters, known, n + 1) / _between(parameters, known, 0) - 1
        for n in range(len(_WORKERS))
        if n < 3 or workers > 4
    ]
    return float(np.interp(math.log(workers), np.log(_WORKERS[: len(ratios)]), ratios))


def _inside(parameters: int, table: dict[int, tuple[float, ...]]) -> bool:
    return min(table) <= parameters <= max(table)


def _between(parameters: int, table: dict[int, tuple[float, ...]], column: int) -> float:
    sizes: Sequence[int] = sorted(table)
    return float(np.interp(math.log(parameters), np.log(sizes), [table[size][column] for size in sizes]))
