"""One method, one model, one link: everything that can be said before it is paid for."""

import math
from dataclasses import dataclass

import numpy as np

from atoll._util.checks import check_whole
from atoll.plan import cost, simulate
from atoll.plan.cost import Array
from atoll.plan.link import GOODPUT, LEAST_BITS_PER_S, MOST_BITS_PER_S, Link
from atoll.plan.method import Method, Model

_POINTS = 97  # rates that are looked at together


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What to expect. Bytes and seconds are those of one worker."""

    method: Method
    utilisation: float
    """The part of its time in which a worker computes, 0 to 1, if every layer travels as soon as it can: the papers'
    model, and the best that can be done."""
    utilisation_with_atoll: float
    """The same as atoll sends: after the step."""
    utilisation_of_run: float
    """The same over a run of so many steps as were asked for, from its quiet beginning to its last exchange; with none,
    once it is under way."""
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
    layered = float(steady_utilisation(model, method, workers, rates, latency_s=link.latency_s, layered=True)[0])
    with_atoll, of_run = (float(busy(model, method, workers, rates, link, n)[0]) for n in (0, steps))
    period_s = method.period * model.step_s
    return Outlook(
        method=method,
        utilisation=layered,
        utilisation_with_atoll=with_atoll,
        utilisation_of_run=of_run,
        wait_s_per_period=period_s * (1 / with_atoll - 1),
        bytes_per_round=max(cost.round_bytes(model, method, workers)),
        bytes_per_step=cost.bytes_per_step(model, method, workers),
        bytes_of_run=cost.bytes_of_run(model, method, workers, steps),
        average_bits_per_s=cost.average_bits_per_s(model, method, workers),
        peak_bits_per_s=cost.peak_bits_per_s(model, method, workers),
        memory_bytes=cost.extra_bytes(model, method, workers, offload=method.offload),
        memory_offloaded_bytes=None if method.gradients else cost.extra_bytes(model, method, workers, offload=True),
        run_s=steps * model.step_s / of_run,
    )


def busy(model: Model, method: Method, workers: int, rates: Array, link: Link, steps: int = 0) -> Array:
    """[rates]: the part of its time in which a worker computes as atoll sends, on lines like this one of other rates.

    Over a run of so many steps; with none, once it is under way.
    """
    latency_s, goodput = link.latency_s, link.goodput
    if not steps:
        return steady_utilisation(model, method, workers, rates, latency_s=latency_s, layered=False, goodput=goodput)
    return (
        steps * model.step_s / simulate.run_s(method.job(model, workers, steps), goodput * rates, latency_s=latency_s)
    )


def steady_utilisation(
    model: Model,
    method: Method,
    workers: int,
    rates: Array,
    *,
    latency_s: float = 0.0,
    layered: bool,
    goodput: float = GOODPUT,
) -> Array:
    """[rates]: the part of its time in which a worker computes once a run is under way, all workers being alike.

    Layer by layer on a line that carries nothing else, or after the step as atoll does it, with `goodput` of the rate;
    see `plan.simulate`.
    """
    period_s = method.period * model.step_s
    carried = rates if layered else goodput * rates
    job, layers = method.job(model, workers, 0), method.layers(model) if layered else None
    waited_s = simulate.steady_wait_s(job, carried, latency_s=latency_s, layers=layers, layer_count=model.layers)
    return period_s / (period_s + waited_s)


def bandwidth_needed(
    model: Model,
    method: Method,
    workers: int,
    level: float,
    *,
    latency_s: float = 0.0,
    layered: bool = False,
    goodput: float = GOODPUT,
) -> float:
    """Bits per second from which on `steady_utilisation` is at least `level`, to 0.1 %.

    Infinite where latency alone prevents it, nearly or altogether; 0 for one worker, who needs no line.
    """
    if workers == 1:
        return 0.0
    low, high = LEAST_BITS_PER_S, MOST_BITS_PER_S
    while high / low > 1.001:
        rates = np.geomspace(low, high, _POINTS)
        reached = steady_utilisation(
            model, method, workers, rates, latency_s=latency_s, layered=layered, goodput=goodput
        )
        enough = np.flatnonzero(reached >= level)
        if not enough.size:
            return math.inf
        if enough[0] == 0:
            return float(rates[0])
        low, high = float(rates[enough[0] - 1]), float(rates[enough[0]])
    return high
