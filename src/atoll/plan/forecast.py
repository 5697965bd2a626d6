"""Predicts what one method costs on one link: utilisation, bytes, bandwidth, memory, time and loss."""

import math
from dataclasses import dataclass

import numpy as np

from atoll._util.checks import check_whole
from atoll.plan import cost, simulate
from atoll.plan.cost import Array
from atoll.plan.line import GOODPUT, LEAST_BITS_PER_S, MOST_BITS_PER_S, Line
from atoll.plan.loss_penalty import Penalty, penalty
from atoll.plan.method import Method, Model

_RATES_AT_ONCE = 97


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """Holds what to expect of a method; bytes and seconds are those of one worker."""

    method: Method
    utilisation: float
    """Part of its time in which a worker computes, 0 to 1, if every layer is sent as soon as it can be: the papers'
    model, and the best possible."""
    utilisation_with_atoll: float
    """The same as atoll sends, after the step."""
    utilisation_of_run: float
    """The same over the whole run with its last exchange; without a number of steps, `utilisation_with_atoll`."""
    wait_s_per_period: float
    """Seconds of waiting in every period (data-parallel: every step), with atoll."""
    bytes_per_round: int
    """Bytes of the largest fragment's round."""
    bytes_per_step: float
    bytes_of_run: int
    average_bits_per_s: float
    """Rate below which a worker has to wait, whatever its delay."""
    peak_bits_per_s: float
    """Rate at which every round is over within its delay."""
    memory_bytes: int
    """Bytes added on the device, beside parameters, gradients, inner optimizer and activations."""
    memory_offloaded_bytes: int | None
    """The same with `sync.offload`; None for data-parallel, which has nothing to offload."""
    run_s: float
    """Seconds of the whole run with atoll, including its last exchange."""
    penalty: Penalty
    """How much higher the papers' loss ended than data-parallel's."""


def forecast(model: Model, method: Method, workers: int, link: Line, steps: int = 0) -> Forecast:
    """Return what to expect of a method on a link; `steps` are the inner steps of the run, if known."""
    check_whole("workers", workers)
    check_whole("steps", steps, least=0)
    rates = np.array([link.bits_per_s])
    layered = float(steady_utilisation(model, method, workers, rates, latency_s=link.latency_s, layered=True)[0])
    with_atoll, of_run = (float(utilisation(model, method, workers, rates, link, n)[0]) for n in (0, steps))
    period_s = method.period * model.step_s
    return Forecast(
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
        penalty=penalty(model, workers, method),
    )


def utilisation(model: Model, method: Method, workers: int, rates: Array, link: Line, steps: int = 0) -> Array:
    """Return the part of its time in which a worker computes as atoll sends, [rates].

    The link gives latency and goodput, not the rate. With `steps` it is that of a whole run, else that of a run under
    way.
    """
    latency_s, goodput = link.latency_s, link.goodput
    if not steps:
        return steady_utilisation(model, method, workers, rates, latency_s=latency_s, layered=False, goodput=goodput)
    job = method.job(model, workers, steps)
    return steps * model.step_s / simulate.run_s(job, goodput * rates, latency_s=latency_s)


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
    """Return the part of its time in which a worker computes once a run is under way, [rates].

    With `layered`, every layer is sent as soon as it can be and gets all of the rate; otherwise a fragment is sent
    after the step, as atoll does it, and gets `goodput` of the rate.
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
    """Return the bits per second from which on `steady_utilisation` is at least `level`, to 0.1 %.

    It is infinite where latency alone prevents that, and 0 for one worker, which needs no line.
    """
    if workers == 1:
        return 0.0
    low, high = LEAST_BITS_PER_S, MOST_BITS_PER_S
    while high / low > 1.001:
        rates = np.geomspace(low, high, _RATES_AT_ONCE)
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
