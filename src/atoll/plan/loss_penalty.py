"""Estimates from the papers' tables how much higher a method's loss ends than data-parallel's.

Losses are nats per token on C4 after 20 tokens a parameter, as printed. Between two measurements they are interpolated
over the logarithms of size, workers and period. Beyond the smallest or largest model of a table, that model counts, and
the source says so. Periods under 30 count as 30; beyond 100, the increase that DiLoCo measured up to 1000 is added. The
increase for a longer period is Streaming's: that of 2 workers for one, that of 4 for more. The penalty is None where no
paper measured anything near: more than 8 workers, longer periods, delays beyond 10, Eager Updates with other than 2
workers.
"""

import math
from typing import NamedTuple

import numpy as np

from atoll._util.units import count_words
from atoll.plan.method import Method, Model
from atoll.settings.model_presets import preset

_Table = dict[int, tuple[float, ...]]
"""Losses by the number of parameters of a model."""
_M, _B = 10**6, 10**9


def _by_preset(losses: dict[str, tuple[float, ...]]) -> _Table:
    """Replace the papers' round model names by the numbers of parameters that the models have."""
    return {preset(name).parameters: row for name, row in losses.items()}


# Scaling Laws, whole model, period 30, 16 bits: data-parallel, then 1, 2, 4 and 8 workers.
_BY_WORKERS: _Table = {
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
_STREAMING = _by_preset(
    {
        "35M": (3.51, 3.53, 3.60, 3.56, 3.64),
        "100M": (3.19, 3.21, 3.25, 3.22, 3.29),
        "200M": (2.97, 2.98, 3.02, 3.00, 3.05),
        "300M": (2.80, 2.81, 2.84, 2.83, 2.87),
        "500M": (2.67, 2.67, 2.70, 2.69, 2.73),
        "1B": (2.49, 2.48, 2.50, 2.50, 2.53),
    }
)

# Eager Updates, table 6, 2 workers, in fragments: period 30, and 100. Below 500 million the paper prints one for both.
_EAGER = _by_preset(
    {
        "35M": (3.62, 3.62),
        "100M": (3.27, 3.27),
        "200M": (3.03, 3.03),
        "300M": (2.86, 2.86),
        "500M": (2.71, 2.71),
        "1B": (2.50, 2.52),
    }
)
_EAGER_WHOLE = 2.69 / 2.68 - 1  # its table 3: eager against waiting, 500M, whole model
_TWENTYFOLD_PERIOD = math.log(1.029) / math.log(15.02)  # DiLoCo: perplexity 2.9 % higher at 1000 than at 50, near 15
_TEN_STEPS = 0.002  # Streaming: less than that for a delay of 10
_LONGEST_DELAY, _LONGEST_PERIOD = 10, 1000


class Penalty(NamedTuple):
    """Holds a relative increase of the final loss against data-parallel: 0.006 is 0.6 %."""

    loss: float | None
    """None where no paper measured anything near."""
    source: str
    """The papers and tables that it comes from, or why it is None."""


def penalty(model: Model, workers: int, method: Method) -> Penalty:
    """Return the penalty that the papers' tables suggest for a method."""
    if method.gradients:
        return Penalty(0.0, "data-parallel itself")
    if method.period > _LONGEST_PERIOD:
        return Penalty(None, f"no paper went beyond a period of {_LONGEST_PERIOD}")
    if not method.eager and method.delay > _LONGEST_DELAY:
        return Penalty(None, f"no paper prints a loss for a delay beyond {_LONGEST_DELAY}")
    if method.codec.format in ("lloyd2", "top64"):
        return Penalty(None, f"no paper of these three measured {method.codec.format}")
    if workers > _WORKERS[-1]:
        return Penalty(None, f"no paper went beyond {_WORKERS[-1]} workers")
    whole = len(method.layers(model)) == 1
    return (_eager if method.eager else _blended)(model.parameters, workers, method, whole)


def _blended(parameters: int, workers: int, method: Method, whole: bool) -> Penalty:
    delay = _TEN_STEPS * max(0, method.delay - 1) / (_LONGEST_DELAY - 1)
    if not whole and 2 <= workers <= 4:
        loss = _streamed(parameters, workers, method.period) + delay
        return Penalty(loss, "Streaming, tables 5 and 6" + _beyond(parameters, _STREAMING))
    table = _known(workers)
    loss = _by_workers(parameters, workers) + _longer(parameters, workers, method.period) + delay
    if method.period <= 30:
        return Penalty(loss, "Scaling Laws, losses by workers, at 30" + _beyond(parameters, table))
    source = "Scaling Laws by workers, and what Streaming's table 5 adds for the period"
    return Penalty(loss, source + _beyond(parameters, table))


def _eager(parameters: int, workers: int, method: Method, whole: bool) -> Penalty:
    if workers != 2:
        return Penalty(None, "Eager Updates was measured with 2 workers only")
    if whole:
        loss = _by_workers(parameters, 2) + _longer(parameters, 2, method.period) + _EAGER_WHOLE
        return Penalty(loss, "Scaling Laws by workers, and Eager's table 3" + _beyond(parameters, _known(2)))
    reference = _between(parameters, _STREAMING, 0)
    at_30, at_100 = (_between(parameters, _EAGER, column) / reference - 1 for column in (0, 1))
    source = "Eager Updates, table 6" + _beyond(parameters, _EAGER)
    return Penalty(_at_period(method.period, at_30, at_100), source)


def _streamed(parameters: int, workers: int, period: int) -> float:
    """Interpolate Streaming's tables 5 and 6, for 2 to 4 workers."""
    share = math.log(workers / 2) / math.log(2)
    losses = [_between(parameters, _STREAMING, column) for column in range(5)]
    at_30, at_100 = ((losses[first] + share * (losses[first + 1] - losses[first])) / losses[0] - 1 for first in (1, 3))
    return _at_period(period, at_30, at_100)


def _longer(parameters: int, workers: int, period: int) -> float:
    """Return what a period adds to the penalty at 30."""
    members = min(max(workers, 2), 4)
    return _streamed(parameters, members, period) - _streamed(parameters, members, 30)


def _at_period(period: int, at_30: float, at_100: float) -> float:
    """Interpolate between periods; below 30 the papers see little difference, and above 5 none that is worse."""
    if period > 100:
        return at_100 + _TWENTYFOLD_PERIOD * math.log(period / 100) / math.log(20)
    return at_30 + (at_100 - at_30) * max(0.0, math.log(period / 30)) / math.log(100 / 30)


def _known(workers: int) -> _Table:
    """Return the sizes that Scaling Laws has for this number of workers; the largest were not trained with 8."""
    return {size: losses for size, losses in _BY_WORKERS.items() if len(losses) == 5 or workers <= 4}


def _by_workers(parameters: int, workers: int) -> float:
    """Interpolate the losses of Scaling Laws, at a period of 30."""
    table = _known(workers)
    counts = _WORKERS if workers > 4 else _WORKERS[:3]
    ratios = [_between(parameters, table, n + 1) / _between(parameters, table, 0) - 1 for n in range(len(counts))]
    return float(np.interp(math.log(workers), np.log(counts), ratios))


def _beyond(parameters: int, table: _Table) -> str:
    """Return what to add to a source whose models are all larger or all smaller."""
    smallest, largest = min(table), max(table)
    if smallest <= parameters <= largest:
        return ""
    end = f"smallest, {count_words(smallest)}" if parameters < smallest else f"largest, {count_words(largest)}"
    return f"; beyond its sizes, as at its {end} parameters"


def _between(parameters: int, table: _Table, column: int) -> float:
    """Interpolate a column of a table over the logarithm of the size."""
    sizes = sorted(table)
    return float(np.interp(math.log(parameters), np.log(sizes), [table[size][column] for size in sizes]))
