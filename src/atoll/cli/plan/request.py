"""Turns the options of `atoll plan` into a request for the planner."""

import math
import sys
from dataclasses import replace
from typing import NamedTuple

from atoll._util.units import count_words
from atoll.cli.plan.numbers import count, number, seconds, size
from atoll.cli.plan.options import PlanOptions, check_conflicts
from atoll.cli.plan.workload import Workload, period_option, workload_of
from atoll.errors import ConfigError
from atoll.plan.chips import chip_named, step_seconds
from atoll.plan.line import Line, parse_line
from atoll.plan.method import Method, Model, methods_for
from atoll.plan.planner import MOST_STEPS, PlanRequest, WorkerMemory
from atoll.plan.scaling_laws import TOKENS_PER_PARAMETER
from atoll.settings.config import RunConfig

DEFAULT_LINK = Line(1e9)
_DEFAULT_MFU = 0.4
_UNTIL_MEASURED_S = 1.0


def plan_request(options: PlanOptions) -> PlanRequest:
    """Return what is to be planned; everything is checked before anything is measured.

    Raises:
        ConfigError: An option is missing, out of its range, or conflicts with another.
    """
    check_conflicts(options)
    workload = workload_of(options)
    tokens = workload.tokens if options.tokens is None else count("tokens", options.tokens)
    probed = _to_probe(options, workload, tokens)
    tokens = tokens if probed is None else probed.tokens
    step = _Step(_UNTIL_MEASURED_S, "") if probed is not None else _known_step(options, workload, tokens)
    model = Model(parameters=workload.parameters, layers=workload.layers, step_s=step.seconds, rest=workload.rest)
    request = PlanRequest(
        model=model,
        workers=workload.workers,
        link=_known_link(options, workload),
        methods=_methods(options, workload, model),
        step_from=step.source,
        tokens=tokens,
        steps=_steps(options, workload, tokens),
        price=None if options.price is None else number("price", options.price, "a number from 0 to 1e12"),
        target=number("target", options.target, "a share of the time above 0 and below 1"),
        memory=WorkerMemory(_chips(options), _chip_bytes(options)),
        adapt=workload.adapt,
        left_out=workload.left_out,
    )
    if options.probe_link is not None:
        request = replace(request, link=_measured_link(options.probe_link))
    if probed is not None:
        step = _measured_step(probed, workload.vocabulary)
        request = replace(request, model=replace(model, step_s=step.seconds), step_from=step.source)
    return request


def _methods(options: PlanOptions, workload: Workload, model: Model) -> tuple[Method, ...]:
    """Return the run file's own method first, then those of --method, with its period."""
    own, period = workload.method, period_option(options)
    if period is None and own is not None and not own.gradients:
        period = own.period
    fragments = None if options.fragments is None else count("fragments", options.fragments, like="8")
    chosen = methods_for(model, options.methods, period, fragments)
    return tuple(chosen) if own is None else (own, *chosen)


# ---------------------------------------------------------------------- times and totals


class _Step(NamedTuple):
    seconds: float
    source: str
    """Where the time comes from, in words."""


def _known_step(options: PlanOptions, workload: Workload, tokens: int | None) -> _Step:
    """Return the time of a step as given, or as estimated from a chip's peak."""
    if options.step_time is not None:
        return _Step(seconds("step-time", options.step_time), "as given")
    if options.chip is None and options.flops is None:
        raise ConfigError(
            "the time of a step is needed: --step-time 0.8 (seconds); or --tokens 500e3 (of a step of one worker) "
            "with --chip h100 or --flops 989e12; or --probe, to measure it here with a run file or --preset"
        )
    if tokens is None:
        raise ConfigError("tokens: give --tokens, those of a step of one worker; its time follows from them")
    mfu = _DEFAULT_MFU if options.mfu is None else number("mfu", options.mfu, "a share above 0 and at most 1")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu must be a share above 0 and at most 1, got {mfu:g}")
    chips = _chips(options)
    peak = (
        float(count("flops", options.flops, like="989e12"))
        if options.flops is not None
        else chip_named(options.chip or "").flops
    )
    what = f"chips of {count_words(peak)} FLOP/s" if options.flops is not None else str(options.chip)
    step_s = step_seconds(workload.parameters, tokens, peak * chips, mfu)
    return _Step(step_s, f"estimated: {chips} x {what} at {100 * mfu:.0f} % of the peak")


def _chips(options: PlanOptions) -> int:
    """Return the chips of one worker."""
    return 1 if options.chips is None else count("chips", options.chips, like="8")


class _Probe(NamedTuple):
    """Holds a step that can be measured."""

    config: RunConfig
    tokens: int


def _to_probe(options: PlanOptions, workload: Workload, tokens: int | None) -> _Probe | None:
    """Return the step that --probe is to measure, if any."""
    if not options.probe:
        return None
    config = workload.config
    if config is None:
        raise ConfigError("--probe needs a model to train: a run file, or --preset")
    if config.model.hf is not None:
        raise ConfigError(f"a step of {config.model.hf} cannot be measured without its weights: give --step-time")
    sequence = config.train.sequence or config.shape(workload.vocabulary).context
    if tokens is None or tokens == workload.tokens:
        return _Probe(config, config.train.batch * sequence)
    if tokens % sequence:
        raise ConfigError(f"tokens must be a multiple of the sequence of {sequence} tokens, got {tokens}")
    return _Probe(config.changed(**{"train.batch": tokens // sequence, "train.accumulate": 1}), tokens)


def _measured_step(probe: _Probe, vocabulary: int) -> _Step:
    """Measure a few steps on this machine."""
    from atoll.train.step.step_time import probe_step

    found = probe_step(probe.config, vocabulary, tell=lambda line: print(line, file=sys.stderr))
    return _Step(found.step_s, f"measured: {found.device}")


def _chip_bytes(options: PlanOptions) -> float | None:
    """Return the memory of one chip: as given, or that of the chip named."""
    if options.memory is not None:
        return size("memory", options.memory)
    return None if options.chip is None else chip_named(options.chip).memory_bytes


def _steps(options: PlanOptions, workload: Workload, tokens: int | None) -> int | None:
    """Return the inner steps of the run, if they are known."""
    if options.steps is not None:
        return count("steps", options.steps, MOST_STEPS, "20000")
    if options.tokens_total is None and workload.steps is not None:
        return workload.steps
    if tokens is None:
        if options.tokens_total is not None:
            raise ConfigError("tokens-total needs --tokens, those of a step of one worker, to become steps")
        return None
    total = workload.parameters * TOKENS_PER_PARAMETER
    if options.tokens_total is not None:
        total = count("tokens-total", options.tokens_total)
    return max(1, math.ceil(total / (workload.workers * tokens)))


def _known_link(options: PlanOptions, workload: Workload) -> Line:
    """Return the link as given, or the run file's; of one to be measured, only the address is checked."""
    if options.probe_link is None:
        return parse_line(options.link) if options.link is not None else workload.link or DEFAULT_LINK

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
