"""One method, one model, one link: everything that can be said before it is paid for."""

import math
from dataclasses import dataclass

import numpy as np

from atoll.checks import check_whole
from atoll.plan import cost, steady
from atoll.plan.job import time_of
from atoll.plan.lines import Array, Place
from atoll.plan.link import GOODPUT, Link
from atoll.plan.method import Method, Model
from atoll.plan.simulate import simulate

_FIRST, _LAST, _POINTS = 1.0, 1e30, 97  # rates between which one is looked for, in bits per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What to expect. Bytes and seconds are those of one worker."""

    method: Method
    utilisation: float
    """The part of its time in which a worker computes, 0 to 1, if every layer travels as soon as it can: the papers'
    model, and the best that can be done."""
    utilisation_with_atoll: float
    """The same as atoll sends: after the step."""
    wait_s_per_period: float
    """Seconds of waiting in every period (data-parallel: every step), with atoll."""
    bytes_per_round: int
    """Of the largest fragment."""
    bytes_per_step: float
    bytes_of_run: int
    average_bits_per_s: float
    """What the line must carry on average, or training waits."""
    peak_bits_per_s: float
    """What it must carry for an exchange to be over in the time it has."""
    memory_bytes: int
    """On the device, beside parameters, gradients, inner optimizer and activations."""
    memory_offloaded_bytes: int | None
    """The same with `sync.offload`: anchors and velocities in the machine's memory. None: data-parallel has none."""
    run_s: float
    """Of a run of so many steps as were asked for, with atoll; at its end all that was not sent yet is."""


def outlook(model: Model, method: Method, workers: int, link: Link, steps: int = 0) -> Outlook:
    """What to expect of a method on this link, and of a run of so many steps."""
    check_whole("workers", workers)
    check_whole("steps", steps, least=0)
    rates = np.array([link.bits_per_s])
    layered, with_atoll = (
        float(steady_utilisation(model, method, workers, rates, latency_s=link.latency_s, layered=layered)[0])
        for layered in (True, False)
    )
    period_s = method.period * model.step_s
    return Outlook(
        method=method,
        utilisation=layered,
        utilisation_with_atoll=with_atoll,
        wait_s_per_period=period_s * (1 / with_atoll - 1),
        bytes_per_round=max(cost.round_bytes(model, method, workers)),
        bytes_per_step=cost.bytes_per_step(model, method, workers),
        bytes_of_run=cost.bytes_of_run(model, method, workers, steps),
        average_bits_per_s=cost.average_bits_per_s(model, method, workers),
        peak_bits_per_s=cost.peak_bits_per_s(model, method, workers),
        memory_bytes=cost.extra_bytes(model, method, workers, offload=method.offload),
        memory_offloaded_bytes=None if method.gradients else cost.extra_bytes(model, method, workers, offload=True),
        run_s=_run_s(model, method, workers, link, steps, with_atoll),
    )


def _run_s(model: Model, method: Method, workers: int, link: Link, steps: int, busy: float) -> float:
    """Seconds of a run, with its quiet beginning and the exchange at its end: what comes between repeats."""
    period = method.period
    repeated = max(0, steps // period - steady.WARM_UP - steady.REPEATS) * period
    rest = method.job(model, workers, steps - repeated)
    return repeated * model.step_s / busy + time_of(rest, Link(GOODPUT * link.bits_per_s, link.latency_s)).total_s


def steady_utilisation(
    model: Model, method: Method, workers: int, rates: Array, *, latency_s: float = 0.0, layered: bool
) -> Array:
    """[rates]: the part of its time in which a worker computes once a run is under way, all workers being alike.

    Layer by layer on a line that carries nothing else, or after the step as atoll does it, on one that also carries
    packet headers; see `plan.simulate` and `GOODPUT`.
    """
    period, period_s = method.period, method.period * model.step_s
    if not layered:
        waited_s = steady.waited_s(model, method, workers, GOODPUT * rates, latency_s=latency_s)
        return period_s / (period_s + waited_s)
    run = simulate(
        method.job(model, workers, (steady.WARM_UP + steady.REPEATS) * period),
        [Place(up_bits_per_s=1.0, down_bits_per_s=1.0, latency_s=latency_s)],
        layers=method.layers(model),
        layer_count=model.layers,
        rates=rates,
    )
    # Nobody outruns the line, though it may take longer than this run to notice; see `plan.steady`.
    carried_s = 8 * sum(cost.round_bytes(model, method, workers)) / rates
    return np.minimum(run.utilisation(since=steady.WARM_UP * period), period_s / np.maximum(carried_s, period_s))


def bandwidth_needed(
    model: Model, method: Method, workers: int, level: float, *, latency_s: float = 0.0, layered: bool = False
) -> float:
    """Bits per second from which on utilisation is at least `level`, to 0.1 %.

    Infinite where latency alone prevents it; 0 for one worker, who needs no line.
    """
    if workers == 1:
        return 0.0
    low, high = _FIRST, _LAST
    while high / low > 1.001:
        rates = np.geomspace(low, high, _POINTS)
        reached = steady_utilisation(model, method, workers, rates, latency_s=latency_s, layered=layered)
        enough = np.flatnonzero(reached >= level)
        if not enough.size:
            return math.inf
        if enough[0] == 0:
            return float(rates[0])
        low, high = float(rates[enough[0] - 1]), float(rates[enough[0]])
    return high
