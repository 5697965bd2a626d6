"""Predicts what one method costs on one link: utilisation, bytes, bandwidth, memory, time and loss."""

import math
from dataclasses import dataclass

import numpy as np

from atoll._util.checks import check_whole
from atoll.plan import cost, simulate
from atoll.plan.cost import Array
from atoll.plan.line import LEAST_BITS_PER_S, MOST_BITS_PER_S, Line
from atoll.plan.loss_penalty import Penalty, penalty
from atoll.plan.method import Method, Model

NO_LATENCY = Line(math.inf)
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
    layered = float(utilisation(model, method, workers, rates, link, layered=True)[0])
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


def utilisation(
    model: Model,
    method: Method,
    workers: int,
    rates: Array,
    link: Line = NO_LATENCY,
    steps: int = 0,
    *,
    layered: bool = False,
) -> Array:
    """Return the part of its time in which a worker computes, [rates].

    Args:
        model: The model to train.
        method: The method to train it with.
        workers: Number of workers.
        rates: Bits per second of every worker's line.
        link: Its latency and goodput; its rate is not used.
        steps: Inner steps of a run, to get the utilisation of all of it; 0: that of a run under way.
        layered: Whether every layer is sent as soon as it can be and gets all of the rate, for a run under way.
            Otherwise a fragment is sent after the step, as atoll does it, and gets the goodput.
    """
    carried, latency_s = rates if layered else link.goodput * rates, link.latency_s
    job, period_s = method.job(model, workers, steps), method.period * model.step_s
    if steps:
        return steps * model.step_s / simulate.run_s(job, carried, latency_s=latency_s)
    layers = method.layers(model) if layered else None
    waited_s = simulate.steady_wait_s(job, carried, latency_s=latency_s, layers=layers, layer_count=model.layers)
    return period_s / (period_s + waited_s)


def bandwidth_needed(
    model: Model, method: Method, workers: int, level: float, link: Line = NO_LATENCY, *, layered: bool = False
) -> float:
    """Return the bits per second from which on `utilisation` under way is at least `level`, to 0.1 %.

    It is infinite where latency alone prevents that, and 0 for one worker, which needs no line.
    """
    if workers == 1:
        return 0.0
    low, high = LEAST_BITS_PER_S, MOST_BITS_PER_S
    while high / low > 1.001:
        rates = np.geomspace(low, high, _RATES_AT_ONCE)
        enough = np.flatnonzero(utilisation(model, method, workers, rates, link, layered=layered) >= level)
        if not enough.size:
            return math.inf
        if enough[0] == 0:
            return float(rates[0])
        low, high = float(rates[enough[0] - 1]), float(rates[enough[0]])
    return high
