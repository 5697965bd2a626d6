"""Finds what `atoll plan` is to plan: a model by its numbers, a preset, or the model and method of a run file."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any, NamedTuple

from atoll.cli.plan.options import PlanOptions, count
from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.plan.line import parse_line
from atoll.plan.method import RUN_FILE_METHOD, Method, Model
from atoll.plan.planner import DEFAULT_LINK, LONGEST_PERIOD, MOST_WORKERS, PlanRequest
from atoll.settings.config import RunConfig, load, parse
from atoll.settings.model_presets import ModelConfig, preset
from atoll.settings.toml import parse_toml, read

MOST_LAYERS = 256
"""The most that can be planned in a few seconds; few models have more."""
_UNKNOWN_S = 1.0  # the time of a step until it is known
_SWITCHES = ("stochastic", "feedback", "offload")


class Workload(NamedTuple):
    """Holds what is trained, before the time of a step is known."""

    request: PlanRequest
    """As far as model or run file say; the time of a step is a placeholder."""
    config: RunConfig | None = None
    """The run file, or one made of a preset; None for a model by its numbers."""
    vocabulary: int = 0


def workload_of(options: PlanOptions) -> Workload:
    """Return what the options describe; ConfigError unless they describe exactly one workload."""
    given = [options.run is not None, options.preset is not None, options.params is not None]
    if sum(given) != 1:
        which = "only one of them" if any(given) else "--params 10e9 --layers 48, --preset 1B, or a run file"
        raise ConfigError(f"say what is trained: {which}")
    if options.run is not None:
        return _run_file_workload(options, options.run)
    workers = 2 if options.workers is None else _parse_workers(options.workers)
    if options.preset is not None:
        if options.layers is not None:
            raise ConfigError("layers: a preset has its own; for others give --params and --layers")
        shape = _preset(options.preset)
        blocks = shape.layers * (replace(shape, layers=2).parameters - replace(shape, layers=1).parameters)
        model = Model(
            parameters=shape.parameters, layers=shape.layers, step_s=_UNKNOWN_S, rest=shape.parameters - blocks
        )
        config = parse({"model": {"preset": options.preset, "vocabulary": shape.vocabulary}})
        return Workload(PlanRequest(model=model, workers=workers), config, shape.vocabulary)
    if options.layers is None:
        raise ConfigError("layers: give --layers, the number of blocks of the model; fragments are made of them")
    layers = count("layers", options.layers, MOST_LAYERS, "48")
    model = Model(parameters=count("params", options.params or ""), layers=layers, step_s=_UNKNOWN_S)
    return Workload(PlanRequest(model=model, workers=workers))


def period_option(options: PlanOptions) -> int | None:
    """Return --period as a number, if it is given."""
    return None if options.period is None else count("period", options.period, LONGEST_PERIOD, "100")


def _parse_workers(text: str) -> int:
    return count("workers", text, MOST_WORKERS, "8")


def _preset(name: str) -> ModelConfig:
    try:
        return preset(name)
    except ConfigError as error:
        told = str(error).partition(": for another shape")[0]  # the rest is advice for Python code
        more = " For" if told.endswith("?") else "; for"
        raise ConfigError(f"{told}{more} another model give --params and --layers") from None


# ---------------------------------------------------------------------- run files


def _run_file_workload(options: PlanOptions, run: Path) -> Workload:
    if options.layers is not None:
        raise ConfigError("layers: a run file has its own; change it with --set model.layers=...")
    if "study" in parse_toml(read(run), str(run)):
        raise ConfigError(f"{run}: this is a study, and a plan is for one run: atoll init run.toml makes one")
    period = period_option(options)
    overrides = list(options.changes)
    overrides += [] if options.workers is None else [f"sync.workers={_parse_workers(options.workers)}"]
    overrides += [] if period is None else [f"sync.period={period}"]
    config = load(run, overrides)

    from atoll.core.fragments import find_blocks
    from atoll.train.data.token_files import known_vocabulary

    vocabulary = known_vocabulary(config.data)
    model, context = _empty_model(config, vocabulary)
    blocks = find_blocks(model)
    _check_layers(len(blocks))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    rest = sum(size for name, size in sizes.items() if not any(name.startswith(f"{block}.") for block in blocks))
    planned = Model(
        parameters=sum(sizes.values()),
        layers=max(len(blocks), 1),
        step_s=_UNKNOWN_S,
        rest=rest if blocks else 0,
    )
    emulated = config.link.emulate
    request = PlanRequest(
        model=planned,
        workers=config.sync.workers,
        link=replace(parse_line(emulated), goodput=1.0) if emulated else DEFAULT_LINK,
        methods=_own_method(config, model, blocks),
        tokens=config.train.batch * (config.train.sequence or context),
        steps=config.train.steps,
        adapt=_adapter(config),
        left_out=config.unplanned(),
    )
    return Workload(request, config, vocabulary)


def _adapter(config: RunConfig) -> Callable[[Method], Method | None]:
    """Return a function that adapts a method to a run file's settings, with the switches it must turn off."""
    velocities = len(config.outer_optimizer().slot_names)
    known: dict[tuple[str | int, ...], tuple[str, ...] | None] = {}

    def adapt(method: Method) -> Method | None:
        given = method.settings()
        which = given["sync.method"], given["sync.codec"]
        if which not in known:
            known[which] = _turned_off(config, given)
        off = known[which]
        if off is None:
            return None
        stochastic, feedback, offload = (getattr(config.sync, name) and f"sync.{name}" not in off for name in _SWITCHES)
        codec = Codec(method.codec.format, stochastic, feedback)
        return replace(method, codec=codec, velocities=velocities, offload=offload, resets=off)

    return adapt


def _turned_off(config: RunConfig, given: dict[str, str | int]) -> tuple[str, ...] | None:
    """Return the fewest switches that must be off for these settings; None if other settings conflict with them."""
    switches = [f"sync.{name}" for name in _SWITCHES if getattr(config.sync, name)]
    for off in chain.from_iterable(combinations(switches, n) for n in range(len(switches) + 1)):
        try:
            config.changed(**given, **dict.fromkeys(off, False))
        except ConfigError:
            continue
        return off
    return None


def _empty_model(config: RunConfig, vocabulary: int) -> tuple[Any, int]:
    """Build the model on the meta device; return it and the tokens of a sequence."""
    import torch

    from atoll.train.model.decoder import Decoder
    from atoll.train.model.export import load_start

    with torch.device("meta"):
        if config.model.hf is not None:
            model = load_start(config.model.hf, weights=False)
            return model, min(model.context or 1024, 1024)
        shape = config.shape(vocabulary)
        _check_layers(shape.layers)
        return Decoder(shape), shape.context


def _check_layers(layers: int) -> None:
    if layers > MOST_LAYERS:
        raise ConfigError(f"model.layers: must be at most {MOST_LAYERS} to be planned, got {layers}")


def _own_method(config: RunConfig, model: Any, blocks: Sequence[str]) -> tuple[Method, ...]:
    """Return the run file's method with the fragments of this model; nothing if it exchanges nothing."""
    from atoll.core.fragments import Whole, split
    from atoll.outer.presets import Sync

    sync = config.synchronisation()
    if sync is None:
        return ()
    fragments = split(model, sync.fragments if isinstance(sync, Sync) else Whole())
    # Parameters outside blocks are used before the first block, and their gradients are complete with its own.
    layers = tuple(
        tuple(n for n, block in enumerate(blocks, 1) if any(p.startswith(f"{block}.") for p in fragment.parameters))
        or (1,)
        for fragment in fragments
    )
    values = tuple(fragment.numel for fragment in fragments)
    own = Method(name=RUN_FILE_METHOD, period=1, codec=sync.codec, fragment_layers=layers, fragment_values=values)
    if not isinstance(sync, Sync):
        return (replace(own, gradients=True),)
    run = replace(
        own,
        period=sync.period,
        delay=min(sync.delays),  # the worker that applies first waits first, and the others wait for it
        eager=sync.eager,
        velocities=len(sync.outer.slot_names),
        offload=config.sync.offload,
    )
    return (run,)
