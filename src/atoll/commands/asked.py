"""What `atoll plan` was given, as what is to be planned: numbers, a preset or a run file, and a step's time."""

import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from atoll.checks import check_whole
from atoll.config import RunConfig, load, parse
from atoll.errors import ConfigError
from atoll.plan.laws import TOKENS_PER_PARAMETER
from atoll.plan.link import Link, parse_link
from atoll.plan.method import Method, Model
from atoll.planner import OWN, Asked, Fragmented, chip_flops, chosen_methods, step_seconds
from atoll.shapes import preset
from atoll.units import count_words

DEFAULT_LINK = Link(1e9)
MOST_LAYERS = 10_000
"""More would take the simulator long, and no model has them."""
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
    chips: int = 1
    mfu: float = 0.4
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
    config: RunConfig | None = None
    """For a run file or a preset."""
    vocabulary: int = 0
    method: Method | None = None
    """The run file's own."""
    tokens: int | None = None
    steps: int | None = None
    link: Link | None = None


def asked_for(options: Options) -> Asked:
    """Everything that is to be planned; ConfigError says in a line what is missing or makes no sense."""
    subject = _subject(options)
    check_whole("workers", subject.workers, why="they train the model")
    link = _link(options, subject)  # before a step is measured: a slip should not cost a minute
    tokens = subject.tokens
    if options.tokens is not None:
        tokens = count("tokens", options.tokens)
    step_s, step_from, tokens = _step_time(options, subject, tokens)
    model = Model(parameters=subject.parameters, layers=subject.layers, step_s=step_s)
    period = options.period
    if period is None and subject.method is not None and not subject.method.gradients:
        period = subject.method.period
    methods = chosen_methods(options.methods, model, period, options.fragments)
    if subject.method is not None:
        methods = [subject.method, *methods]
    return Asked(
        model=model,
        workers=subject.workers,
        link=link,
        methods=tuple(methods),
        step_from=step_from,
        tokens=tokens,
        steps=_steps(options, subject, tokens),
        price=options.price,
        target=options.target,
    )


# ---------------------------------------------------------------------- numbers


def count(name: str, text: str) -> int:
    """'10e9', '10B' or '350M' as a whole number."""
    match = re.fullmatch(r"\s*([+-]?[0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([kMBGT]?)\s*", text)
    try:
        value = float(match[1]) * _PREFIXES[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not 1 <= value <= 1e18:
        raise ConfigError(f"{name} must be a number from 1 to 10^18, like 10e9, 10B or 350M, got {text!r}")
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
    given = [bool(options.run), bool(options.preset), options.params is not None]
    if sum(given) != 1:
        which = "only one of them" if any(given) else "--params 10e9 --layers 48, --preset 1B, or a run file"
        raise ConfigError(f"say what is trained: {which}")
    if options.run is not None:
        return _of_run(options)
    workers = 2 if options.workers is None else options.workers
    if options.preset is not None:
        shape = preset(options.preset)
        config = parse({"model": {"preset": options.preset, "vocabulary": shape.vocabulary}})
        if options.layers is not None:
            raise ConfigError("layers: a preset has its own; for others give --params and --layers")
        return _Subject(
            parameters=shape.parameters,
            layers=shape.layers,
            workers=workers,
            config=config,
            vocabulary=shape.vocabulary,
        )
    if options.changes:
        raise ConfigError("--set changes a run file, and none is given")
    if options.layers is None:
        raise ConfigError("layers: give --layers, the number of blocks of the model; fragments are made of them")
    layers = count("layers", options.layers)
    if layers > MOST_LAYERS:
        raise ConfigError(
            f"layers must be at most {MOST_LAYERS}, got {options.layers}: they are the blocks of the model"
        )
    return _Subject(parameters=count("params", options.params or ""), layers=layers, workers=workers)


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
    parameters = sum(p.numel() for p in model.parameters())
    return _Subject(
        parameters=parameters,
        layers=max(len(blocks), 1),
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
        own_layers=layers,
        own_values=values,
    )


# ---------------------------------------------------------------------- times and totals


def _step_time(options: Options, subject: _Subject, tokens: int | None) -> tuple[float, str, int | None]:
    """Seconds of a step, how they are known, and the tokens in it."""
    if options.step_time is not None:
        return seconds("step-time", options.step_time), "as given", tokens
    if options.probe:
        return _probed(subject, tokens)
    if options.chip is None and options.flops is None:
        raise ConfigError(
            "the time of a step is needed: --step-time 0.8 (seconds); or --tokens 500e3 (of a step of one worker) "
            "with --chip h100 or --flops 989e12; or --probe, to measure it here with a run file or --preset"
        )
    if tokens is None:
        raise ConfigError("tokens: give --tokens, those of a step of one worker; its time follows from them")
    if not 0 < options.mfu <= 1:
        raise ConfigError(f"mfu must be a share above 0 and at most 1, got {options.mfu:g}")
    check_whole("chips", options.chips, why="they compute the steps of one worker")
    peak = float(count("flops", options.flops)) if options.flops else chip_flops(options.chip or "")
    what = f"chips of {count_words(peak)} FLOP/s" if options.flops else str(options.chip)
    step_s = step_seconds(subject.parameters, tokens, peak * options.chips, options.mfu)
    return step_s, f"estimated: {options.chips} x {what} at {100 * options.mfu:.0f} % of the peak", tokens


def _probed(subject: _Subject, tokens: int | None) -> tuple[float, str, int | None]:
    from atoll.train.probe import probe_step

    config = subject.config
    if config is None:
        raise ConfigError("--probe needs a model to train: a run file, or --preset")
    if tokens is not None and tokens != subject.tokens:
        sequence = config.train.sequence or config.shape(subject.vocabulary).context
        if tokens % sequence:
            raise ConfigError(f"tokens must be a multiple of the sequence of {sequence} tokens, got {tokens}")
        config = config.changed(**{"train.batch": tokens // sequence, "train.accumulate": 1})
    found = probe_step(config, subject.vocabulary, tell=lambda line: print(line, file=sys.stderr))
    return found.step_s, f"measured: {found.device}", found.tokens


def _steps(options: Options, subject: _Subject, tokens: int | None) -> int | None:
    """Inner steps of a worker over the run, if that can be told."""
    if options.steps is not None and options.tokens_total is not None:
        raise ConfigError("give --steps or --tokens-total, not both")
    if options.steps is not None:
        return count("steps", options.steps)
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


def _link(options: Options, subject: _Subject) -> Link:
    if options.probe_link is None:
        return parse_link(options.link) if options.link is not None else subject.link or DEFAULT_LINK
    if options.link is not None:
        raise ConfigError("give --link or --probe-link, not both")

    from atoll.link.probe import measure, parse_end

    host, port = parse_end(options.probe_link, serving=False)
    print(f"measuring the line to {host}:{port}, about 7 s", file=sys.stderr)
    speed = measure(host, port)
    up, down = (Link(rate) for rate in (speed.up_bits_per_s, speed.down_bits_per_s))
    print(f"measured: {up} there, {down} back, {1e3 * speed.latency_s:.3g} ms one way", file=sys.stderr)
    # A round goes both ways at once, and is over when the slower one is.
    return Link(min(up.bits_per_s, down.bits_per_s), speed.latency_s)
