"""What `atoll plan` was given, as what is to be planned."""

import math
import sys
from dataclasses import replace
from typing import NamedTuple

from atoll._util.units import count_words
from atoll.cli.plan.options import Options, refuse_contradictions
from atoll.cli.plan.parse import count, number, seconds, size
from atoll.cli.plan.subject import Subject, subject_of, typed_period
from atoll.errors import ConfigError
from atoll.plan.laws import TOKENS_PER_PARAMETER
from atoll.plan.link import Link, parse_link
from atoll.plan.method import Method, Model
from atoll.plan.planner import MOST_STEPS, Asked, chip_named, chosen_methods, step_seconds
from atoll.settings.config import RunConfig

DEFAULT_LINK = Link(1e9)
_MFU = 0.4
_MEASURED_LATER = 1.0


def asked_for(options: Options) -> Asked:
    """Everything that is to be planned; ConfigError says in a line what is missing or makes no sense.

    All that can be refused is, before anything is measured: a slip should not cost a minute.
    """
    refuse_contradictions(options)
    subject = subject_of(options)
    tokens = subject.tokens if options.tokens is None else count("tokens", options.tokens)
    probed = _to_probe(options, subject, tokens)
    tokens = tokens if probed is None else probed.tokens
    step = _Step(_MEASURED_LATER, "") if probed is not None else _known_step(options, subject, tokens)
    model = Model(parameters=subject.parameters, layers=subject.layers, step_s=step.seconds, rest=subject.rest)
    asked = Asked(
        model=model,
        workers=subject.workers,
        link=_known_link(options, subject),
        methods=_methods(options, subject, model),
        step_from=step.known_from,
        tokens=tokens,
        steps=_steps(options, subject, tokens),
        price=None if options.price is None else number("price", options.price, "a number from 0 to 1e12"),
        target=number("target", options.target, "a share of the time above 0 and below 1"),
        memory_bytes=_memory(options),
        chips=_chips(options),
        suited=subject.suited,
        left_out=subject.left_out,
    )
    if options.probe_link is not None:
        asked = replace(asked, link=_measured_link(options.probe_link))
    if probed is not None:
        step = _measured_step(probed, subject.vocabulary)
        asked = replace(asked, model=replace(model, step_s=step.seconds), step_from=step.known_from)
    return asked


def _methods(options: Options, subject: Subject, model: Model) -> tuple[Method, ...]:
    """The run file's own first, then those asked for, with its period."""
    own, period = subject.method, typed_period(options)
    if period is None and own is not None and not own.gradients:
        period = own.period
    fragments = None if options.fragments is None else count("fragments", options.fragments, like="8")
    chosen = chosen_methods(options.methods, model, period, fragments)
    return tuple(chosen) if own is None else (own, *chosen)


# ---------------------------------------------------------------------- times and totals


class _Step(NamedTuple):
    seconds: float
    known_from: str
    """In words."""


def _known_step(options: Options, subject: Subject, tokens: int | None) -> _Step:
    """A step as given, or estimated."""
    if options.step_time is not None:
        return _Step(seconds("step-time", options.step_time), "as given")
    if options.chip is None and options.flops is None:
        raise ConfigError(
            "the time of a step is needed: --step-time 0.8 (seconds); or --tokens 500e3 (of a step of one worker) "
            "with --chip h100 or --flops 989e12; or --probe, to measure it here with a run file or --preset"
        )
    if tokens is None:
        raise ConfigError("tokens: give --tokens, those of a step of one worker; its time follows from them")
    mfu = _MFU if options.mfu is None else number("mfu", options.mfu, "a share above 0 and at most 1")
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu must be a share above 0 and at most 1, got {mfu:g}")
    chips = _chips(options)
    peak = (
        float(count("flops", options.flops, like="989e12"))
        if options.flops is not None
        else chip_named(options.chip or "").flops
    )
    what = f"chips of {count_words(peak)} FLOP/s" if options.flops is not None else str(options.chip)
    step_s = step_seconds(subject.parameters, tokens, peak * chips, mfu)
    return _Step(step_s, f"estimated: {chips} x {what} at {100 * mfu:.0f} % of the peak")


def _chips(options: Options) -> int:
    """Those that compute the steps of one worker."""
    return 1 if options.chips is None else count("chips", options.chips, like="8")


class _Probe(NamedTuple):
    """A step that can be measured."""

    config: RunConfig
    tokens: int


def _to_probe(options: Options, subject: Subject, tokens: int | None) -> _Probe | None:
    """What is to be measured, if anything."""
    if not options.probe:
        return None
    config = subject.config
    if config is None:
        raise ConfigError("--probe needs a model to train: a run file, or --preset")
    if config.model.hf is not None:
        raise ConfigError(f"a step of {config.model.hf} cannot be measured without its weights: give --step-time")
    sequence = config.train.sequence or config.shape(subject.vocabulary).context
    if tokens is None or tokens == subject.tokens:
        return _Probe(config, config.train.batch * sequence)
    if tokens % sequence:
        raise ConfigError(f"tokens must be a multiple of the sequence of {sequence} tokens, got {tokens}")
    return _Probe(config.changed(**{"train.batch": tokens // sequence, "train.accumulate": 1}), tokens)


def _measured_step(probe: _Probe, vocabulary: int) -> _Step:
    from atoll.train.step.step_time import probe_step

    found = probe_step(probe.config, vocabulary, tell=lambda line: print(line, file=sys.stderr))
    return _Step(found.step_s, f"measured: {found.device}")


def _memory(options: Options) -> float | None:
    """Bytes of one chip: given, or those of the chip named."""
    if options.memory is not None:
        return size("memory", options.memory)
    return None if options.chip is None else chip_named(options.chip).memory_bytes


def _steps(options: Options, subject: Subject, tokens: int | None) -> int | None:
    """Inner steps of a worker over the run, if that can be told."""
    if options.steps is not None:
        return count("steps", options.steps, MOST_STEPS, "20000")
    if options.tokens_total is None and subject.steps is not None:
        return subject.steps
    if tokens is None:
        if options.tokens_total is not None:
            raise ConfigError("tokens-total needs --tokens, those of a step of one worker, to become steps")
        return None
    total = subject.parameters * TOKENS_PER_PARAMETER
    if options.tokens_total is not None:
        total = count("tokens-total", options.tokens_total)
    return max(1, math.ceil(total / (subject.workers * tokens)))


def _known_link(options: Options, subject: Subject) -> Link:
    """Given, or the run file's. One that is to be measured is only checked to have an address."""
    if options.probe_link is None:
        return parse_link(options.link) if options.link is not None else subject.link or DEFAULT_LINK

    from atoll.link.net.bandwidth import parse_end

    parse_end(options.probe_link, serving=False)
    return DEFAULT_LINK


def _measured_link(address: str) -> Link:
    from atoll.link.net.bandwidth import measure, parse_end

    host, port = parse_end(address, serving=False)
    print(f"measuring the line to {host}:{port}, about 7 s", file=sys.stderr)
    speed = measure(host, port)
    up, down = (Link(rate) for rate in (speed.up_bits_per_s, speed.down_bits_per_s))
    print(f"measured: {up} there, {down} back, {1e3 * speed.latency_s:.3g} ms one way", file=sys.stderr)
    # A round goes both ways at once, and is over when the slower one is.
    return Link(min(up.bits_per_s, down.bits_per_s), speed.latency_s)
