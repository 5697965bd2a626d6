"""What `atoll plan` was given, as what is to be planned: numbers, a preset or a run file, and a step's time."""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from atoll.checks import check_whole
from atoll.config import RunConfig, load, parse
from atoll.errors import ConfigError
from atoll.plan.laws import TOKENS_PER_PARAMETER
from atoll.plan.link import Link, parse_link
from atoll.plan.method import Method, Model
from atoll.planner import MOST_STEPS, OWN, Asked, Fragmented, chip_named, chosen_methods, step_seconds
from atoll.shapes import ModelConfig, preset
from atoll.units import count_words

DEFAULT_LINK = Link(1e9)
MOST_LAYERS = 256
"""More would take longer than five seconds, and few models have them."""
_MFU = 0.4
_MEASURED_LATER = 1.0
_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line, as it was typed; `commands.plan` says what each is."""

    run: Path | None = None
    changes: Sequence[str] = ()
    params: str | None = None
    layers: str | None = None
    preset: str | None = None
    workers: int | None = None
    link: str | None = None
    probe_link: str | None = None
    methods: Sequence[str] = ()
    period: int | None = None
    fragments: int | None = None
    step_time: str | None = None
    tokens: str | None = None
    chip: str | None = None
    flops: str | None = None
    chips: int | None = None
    mfu: float | None = None
    memory: str | None = None
    probe: bool = False
    steps: str | None = None
    tokens_total: str | None = None
    price: float | None = None
    target: float = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """What is trained, before the time of a step is known."""

    parameters: int
    layers: int
    workers: int
    rest: int = 0
    """Parameters outside layers, if known."""
    config: RunConfig | None = None
    """For a run file or a preset."""
    vocabulary: int = 0
    method: Method | None = None
    """The run file's own."""
    tokens: int | None = None
    steps: int | None = None
    link: Link | None = None


def asked_for(options: Options) -> Asked:
    """Everything that is to be planned; ConfigError says in a line what is missing or makes no sense.

    All that can be refused is, before anything is measured: a slip should not cost a minute.
    """
    _refuse_contradictions(options)
    subject = _subject(options)
    check_whole("workers", subject.workers, why="they train the model")
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
        price=options.price,
        target=options.target,
        memory_bytes=_memory(options),
        chips=1 if options.chips is None else options.chips,
    )
    if options.probe_link is not None:
        asked = replace(asked, link=_measured_link(options.probe_link))
    if probed is not None:
        step = _measured_step(probed, subject.vocabulary)
        asked = replace(asked, model=replace(model, step_s=step.seconds), step_from=step.known_from)
    return asked


def _refuse_contradictions(options: Options) -> None:
    """What would be ignored, or said twice."""
    given = {
        "--step-time": options.step_time is not None,
        "--probe": options.probe,
        "--chip": options.chip is not None,
        "--flops": options.flops is not None,
        "--mfu": options.mfu is not None,
        "--steps": options.steps is not None,
        "--tokens-total": options.tokens_total is not None,
        "--link": options.link is not None,
        "--probe-link": options.probe_link is not None,
    }
    estimated = ("--chip", "--flops", "--mfu")
    excluded = {
        "--step-time": ("--probe", *estimated),
        "--probe": estimated,
        "--chip": ("--flops",),
        "--steps": ("--tokens-total",),
        "--link": ("--probe-link",),
    }
    for one, others in excluded.items():
        if both := [other for other in others if given[one] and given[other]]:
            raise ConfigError(f"give {one} or {both[0]}, not both: they say the same in two ways")
    if options.chips is not None and not (given["--chip"] or given["--flops"] or options.memory is not None):
        raise ConfigError("--chips is for --chip, --flops or --memory, and none of them is given")
    if (
        options.fragments is not None
        and options.methods
        and not any(m.startswith("streaming") for m in options.methods)
    ):
        raise ConfigError("--fragments is for streaming, and no --method of it is asked for")
    if options.changes and options.run is None:
        raise ConfigError("--set changes a run file, and none is given")


def _methods(options: Options, subject: _Subject, model: Model) -> tuple[Method, ...]:
    """The run file's own first, then those asked for, with its period."""
    own, period = subject.method, options.period
    if period is None and own is not None and not own.gradients:
        period = own.period
    chosen = chosen_methods(options.methods, model, period, options.fragments)
    return tuple(chosen) if own is None else (own, *chosen)


# ---------------------------------------------------------------------- numbers


def count(name: str, text: str, most: int = 10**18, like: str = "10e9, 10B or 350M") -> int:
    """'10e9', '10B' or '350M' as a whole number."""
    match = re.fullmatch(r"\s*([+-]?[0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([kMBGT]?)\s*", text)
    try:
        value = float(match[1]) * _PREFIXES[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not 1 <= value <= most or abs(value - round(value)) > 1e-9 * value:
        largest = f"{most:,}" if most < 10**6 else f"{most:.0e}".replace("e+", "e")
        raise ConfigError(f"{name} must be a whole number from 1 to {largest}, like {like}, got {text!r}")
    return round(value)


def seconds(name: str, text: str) -> float:
    """'0.8', '0.8 s' or '800ms' in seconds."""
    match = re.fullmatch(r"\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(s|ms|)\s*", text)
    try:
        value = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a time above 0, like 0.8 (seconds) or 800ms, got {text!r}")
    return value


# ---------------------------------------------------------------------- the model


def _subject(options: Options) -> _Subject:
    given = [options.run is not None, options.preset is not None, options.params is not None]
    if sum(given) != 1:
        which = "only one of them" if any(given) else "--params 10e9 --layers 48, --preset 1B, or a run file"
        raise ConfigError(f"say what is trained: {which}")
    if options.run is not None:
        return _of_run(options)
    workers = 2 if options.workers is None else options.workers
    if options.preset is not None:
        shape = _preset(options.preset)
        config = parse({"model": {"preset": options.preset, "vocabulary": shape.vocabulary}})
        if options.layers is not None:
            raise ConfigError("layers: a preset has its own; for others give --params and --layers")
        return _Subject(
            parameters=shape.parameters,
            layers=shape.layers,
            rest=shape.parameters - shape.layers * _of_a_layer(shape),
            workers=workers,
            config=config,
            vocabulary=shape.vocabulary,
        )
    if options.layers is None:
        raise ConfigError("layers: give --layers, the number of blocks of the model; fragments are made of them")
    layers = count("layers", options.layers, MOST_LAYERS, "48")
    return _Subject(parameters=count("params", options.params or ""), layers=layers, workers=workers)


def _preset(name: str) -> ModelConfig:
    try:
        return preset(name)
    except ConfigError as error:
        told = str(error).partition(": for another shape")[0]  # which is advice for who writes Python
        more = " For" if told.endswith("?") else "; for"
        raise ConfigError(f"{told}{more} another model give --params and --layers") from None


def _of_a_layer(shape: ModelConfig) -> int:
    """Parameters of one block."""
    return replace(shape, layers=2).parameters - replace(shape, layers=1).parameters


def _of_run(options: Options) -> _Subject:
    assert options.run is not None
    if options.layers is not None:
        raise ConfigError("layers: a run file has its own; change it with --set model.layers=...")
    overrides = list(options.changes)
    overrides += [] if options.workers is None else [f"sync.workers={options.workers}"]
    overrides += [] if options.period is None else [f"sync.period={options.period}"]
    config = load(options.run, overrides)
    vocabulary = _vocabulary(config)
    model, context = _empty_model(config, vocabulary)

    from atoll.core.fragments import find_blocks

    blocks = find_blocks(model)
    sequence = config.train.sequence or context
    tokens = config.train.batch * sequence
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    rest = sum(size for name, size in sizes.items() if not any(name.startswith(f"{block}.") for block in blocks))
    return _Subject(
        parameters=sum(sizes.values()),
        layers=max(len(blocks), 1),
        rest=rest if blocks else 0,
        workers=config.sync.workers,
        config=config,
        vocabulary=vocabulary,
        method=_own_method(config, model, blocks),
        tokens=tokens,
        steps=config.train.steps,
        link=parse_link(config.link.emulate) if config.link.emulate else None,
    )


def _vocabulary(config: RunConfig) -> int:
    """The tokenizer's, as far as that is known without the text."""
    from atoll.sections import BPE_VOCABULARY
    from atoll.train.tokenizer import Bytes, open_tokenizer

    match config.data.tokenizer:
        case "bytes":
            return Bytes.vocabulary
        case "bpe":
            return config.data.vocabulary or BPE_VOCABULARY
        case path:
            if not Path(path).expanduser().exists():
                raise ConfigError(f"data.tokenizer: {path} is not there")
            return open_tokenizer(Path(path).expanduser()).vocabulary


def _empty_model(config: RunConfig, vocabulary: int) -> tuple[Any, int]:
    """The model without values, and the tokens of a sequence."""
    import torch

    from atoll.train import hub
    from atoll.train.model import Decoder

    with torch.device("meta"):
        if config.model.hf is not None:
            model = hub.load(config.model.hf, weights=False)
            return model, min(model.context or 1024, 1024)
        shape = config.shape(vocabulary)
        return Decoder(shape), shape.context


def _own_method(config: RunConfig, model: Any, blocks: Sequence[str]) -> Method | None:
    """What the run file says, with the fragments that this model has."""
    from atoll.core.fragments import Whole, split
    from atoll.core.outer import SGD, Adam
    from atoll.sync import Sync

    sync = config.synchronisation()
    if sync is None:
        return None
    fragments = split(model, sync.fragments if isinstance(sync, Sync) else Whole())
    # What is outside blocks is looked up before the first of them, and its gradient is complete when theirs are.
    layers = tuple(
        tuple(n for n, block in enumerate(blocks, 1) if any(p.startswith(f"{block}.") for p in fragment.parameters))
        or (1,)
        for fragment in fragments
    )
    values = tuple(fragment.numel for fragment in fragments)
    if not isinstance(sync, Sync):
        return Fragmented(name=OWN, period=1, codec=sync.codec, gradients=True, own_layers=layers, own_values=values)
    return Fragmented(
        name=OWN,
        period=sync.period,
        delay=min(sync.delays),  # who applies first waits first, and the others for it
        codec=sync.codec,
        eager=sync.eager,
        velocities={SGD: 0, Adam: 2}.get(type(sync.outer), 1),
        offload=config.sync.offload,
        own_layers=layers,
        own_values=values,
    )


# ---------------------------------------------------------------------- times and totals


class _Step(NamedTuple):
    seconds: float
    known_from: str
    """In words."""


def _known_step(options: Options, subject: _Subject, tokens: int | None) -> _Step:
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
    mfu = _MFU if options.mfu is None else options.mfu
    if not 0 < mfu <= 1:
        raise ConfigError(f"mfu must be a share above 0 and at most 1, got {mfu:g}")
    chips = 1 if options.chips is None else options.chips
    check_whole("chips", chips, why="they compute the steps of one worker")
    peak = (
        float(count("flops", options.flops, like="989e12"))
        if options.flops is not None
        else chip_named(options.chip or "").flops
    )
    what = f"chips of {count_words(peak)} FLOP/s" if options.flops is not None else str(options.chip)
    step_s = step_seconds(subject.parameters, tokens, peak * chips, mfu)
    return _Step(step_s, f"estimated: {chips} x {what} at {100 * mfu:.0f} % of the peak")


class _Probe(NamedTuple):
    """A step that can be measured."""

    config: RunConfig
    tokens: int


def _to_probe(options: Options, subject: _Subject, tokens: int | None) -> _Probe | None:
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
    from atoll.train.probe import probe_step

    found = probe_step(probe.config, vocabulary, tell=lambda line: print(line, file=sys.stderr))
    return _Step(found.step_s, f"measured: {found.device}")


def _memory(options: Options) -> float | None:
    """Bytes of one chip: given, or those of the chip named."""
    if options.memory is None:
        return None if options.chip is None else chip_named(options.chip).memory_bytes
    match = re.fullmatch(r"\s*([0-9.]+)\s*(GB|MB|TB)\s*", options.memory)
    try:
        size = float(match[1]) * {"MB": 1e6, "GB": 1e9, "TB": 1e12}[match[2]] if match else 0.0
    except ValueError:
        size = 0.0
    if size <= 0:
        raise ConfigError(f"memory must be that of one chip, like 80GB, got {options.memory!r}")
    return size


def _steps(options: Options, subject: _Subject, tokens: int | None) -> int | None:
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


def _known_link(options: Options, subject: _Subject) -> Link:
    """Given, or the run file's. One that is to be measured is only checked to have an address."""
    if options.probe_link is None:
        return parse_link(options.link) if options.link is not None else subject.link or DEFAULT_LINK

    from atoll.link.probe import parse_end

    parse_end(options.probe_link, serving=False)
    return DEFAULT_LINK


def _measured_link(address: str) -> Link:
    from atoll.link.probe import measure, parse_end

    host, port = parse_end(address, serving=False)
    print(f"measuring the line to {host}:{port}, about 7 s", file=sys.stderr)
    speed = measure(host, port)
    up, down = (Link(rate) for rate in (speed.up_bits_per_s, speed.down_bits_per_s))
    print(f"measured: {up} there, {down} back, {1e3 * speed.latency_s:.3g} ms one way", file=sys.stderr)
    # A round goes both ways at once, and is over when the slower one is.
    return Link(min(up.bits_per_s, down.bits_per_s), speed.latency_s)
