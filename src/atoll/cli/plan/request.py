"""Turns the options of `atoll plan` into a request for the planner."""

import math
import sys
from dataclasses import replace

from atoll._util.units import count_words
from atoll.cli.plan.options import PlanOptions, check_options, count, number, seconds, size
from atoll.cli.plan.workload import Workload, period_option, workload_of
from atoll.errors import ConfigError
from atoll.plan.chips import chip_named, step_seconds
from atoll.plan.line import Line, parse_line
from atoll.plan.method import Method, methods_for
from atoll.plan.planner import DEFAULT_LINK, MOST_STEPS, PlanRequest, WorkerMemory
from atoll.plan.scaling_laws import TOKENS_PER_PARAMETER
from atoll.settings.config import RunConfig

_DEFAULT_MFU = 0.4


def plan_request(options: PlanOptions) -> PlanRequest:
    """Return what is to be planned; everything is checked before anything is measured.

    Raises:
        ConfigError: An option is missing, out of its range, or conflicts with another.
    """
    check_options(options)
    workload = workload_of(options)
    request = workload.request
    if options.tokens is not None:
        request = replace(request, tokens=count("tokens", options.tokens))
    config = _probed_config(workload, request.tokens) if options.probe else None
    if config is not None:
        request = replace(request, tokens=config.train.batch * _sequence(config, workload.vocabulary))
    else:
        step_s, step_from = _known_step(options, request)
        request = replace(request, model=replace(request.model, step_s=step_s), step_from=step_from)
    request = replace(
        request,
        link=_known_link(options, request.link),
        methods=_methods(options, request),
        steps=_steps(options, request),
        price=None if options.price is None else number("price", options.price, "a number from 0 to 1e12"),
        target=number("target", options.target, "a share of the time above 0 and below 1"),
        memory=WorkerMemory(_chips(options), _chip_bytes(options)),
    )
    if options.probe_link is not None:
        request = replace(request, link=_measured_link(options.probe_link))
    if config is not None:
        from atoll.train.step.step_time import probe_step

        found = probe_step(config, workload.vocabulary, tell=lambda line: print(line, file=sys.stderr))
        model = replace(request.model, step_s=found.step_s)
        request = replace(request, model=model, step_from=f"measured: {found.device}")
    return request


def _methods(options: PlanOptions, request: PlanRequest) -> tuple[Method, ...]:
    """Return the run file's own method first, then those of --method, with its period."""
    period = period_option(options)
    for own in request.methods:
        period = own.period if period is None and not own.gradients else period
    fragments = None if options.fragments is None else count("fragments", options.fragments, like="8")
    return (*request.methods, *methods_for(request.model, options.methods, period, fragments))


# ---------------------------------------------------------------------- times and totals


def _known_step(options: PlanOptions, request: PlanRequest) -> tuple[float, str]:
    """Return the time of a step as given, or as estimated from a chip's peak, and where it comes from."""
    if options.step_time is not None:
        return seconds("step-time", options.step_time), "as given"
    if options.chip is None and options.flops is None:
        raise ConfigError(
            "the time of a step is needed: --step-time 0.8 (seconds); or --tokens 500e3 (of a step of one worker) "
            "with --chip h100 or --flops 989e12; or --probe, to measure it here with a run file or --preset"
        )
    if request.tokens is None:
        raise ConfigError(
            "with --chip or --flops, give --tokens of a step of one worker (batch x sequence length), like 500e3"
        )
    mfu = _DEFAULT_MFU if options.mfu is None else number("mfu", options.mfu, "a share above 0 and at most 1")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu must be a share above 0 and at most 1, got {mfu:g}")
    if options.flops is not None:
        peak = float(count("flops", options.flops, like="989e12"))
        what = f"chips of {count_words(peak)} FLOP/s"
    else:
        peak, what = chip_named(options.chip or "").flops, str(options.chip)
    chips = _chips(options)
    step_s = step_seconds(request.model.parameters, request.tokens, peak * chips, mfu)
    return step_s, f"estimated: {chips} x {what} at {100 * mfu:.0f} % of the peak"


def _chips(options: PlanOptions) -> int:
    """Return the chips of one worker."""
    return 1 if options.chips is None else count("chips", options.chips, like="8")


def _chip_bytes(options: PlanOptions) -> float | None:
    """Return the memory of one chip: as given, or that of the chip named."""
    if options.memory is not None:
        return size("memory", options.memory)
    return None if options.chip is None else chip_named(options.chip).memory_bytes


def _sequence(config: RunConfig, vocabulary: int) -> int:
    return config.train.sequence or config.shape(vocabulary).context


def _probed_config(workload: Workload, tokens: int | None) -> RunConfig:
    """Return the run whose step --probe is to measure."""
    config = workload.config
    if config is None:
        raise ConfigError("--probe needs a model to train: a run file, or --preset")
    if config.model.hf is not None:
        raise ConfigError(f"a step of {config.model.hf} cannot be measured without its weights: give --step-time")
    if tokens == workload.request.tokens:
        return config
    sequence = _sequence(config, workload.vocabulary)
    if tokens is None or tokens % sequence:
        raise ConfigError(f"tokens must be a multiple of the sequence of {sequence} tokens, got {tokens}")
    return config.changed(**{"train.batch": tokens // sequence, "train.accumulate": 1})


def _steps(options: PlanOptions, request: PlanRequest) -> int | None:
    """Return the inner steps of the run, if they are known."""
    if options.steps is not None:
        return count("steps", options.steps, MOST_STEPS, "20000")
    if options.tokens_total is None and (request.steps is not None or request.tokens is None):
        return request.steps
    if request.tokens is None:
        raise ConfigError("tokens-total needs --tokens, those of a step of one worker, to become steps")
    total = request.model.parameters * TOKENS_PER_PARAMETER
    if options.tokens_total is not None:
        total = count("tokens-total", options.tokens_total)
    return max(1, math.ceil(total / (request.workers * request.tokens)))


def _known_link(options: PlanOptions, own: Line) -> Line:
    """Return the link as given, or the run file's; of one to be measured, only the address is checked."""
    if options.probe_link is None:
        return own if options.link is None else parse_line(options.link)

    from atoll.link.net.bandwidth import parse_end

    parse_end(options.probe_link, serving=False)
    return DEFAULT_LINK


def _measured_link(address: str) -> Line:
    """Measure the line to an end that serves at this address."""
    from atoll.link.net.bandwidth import measure, parse_end

    host, port = parse_end(address, serving=False)
    print(f"measuring the line to {host}:{port}, about 7 s", file=sys.stderr)
    speed = measure(host, port)
    up, down = (Line(rate) for rate in (speed.up_bits_per_s, speed.down_bits_per_s))
    print(f"measured: {up} there, {down} back, {1e3 * speed.latency_s:.3g} ms one way", file=sys.stderr)
    # A round goes both ways at once, and is over when the slower one is.
    return Line(min(up.bits_per_s, down.bits_per_s), speed.latency_s)
