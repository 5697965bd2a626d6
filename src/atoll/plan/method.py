"""Describes a model by its size, and the methods to train it on several workers."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from atoll._util.checks import check_whole
from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.plan.job import Job

Layers = tuple[tuple[int, ...], ...]
"""The layers of every fragment, counted from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Describes a model as layers of equal size, all of which take part in every step."""

    parameters: int
    """Parameters that are trained and exchanged."""
    layers: int
    step_s: float
    """Seconds of computing of one inner step of one worker."""
    rest: int = 0
    """Parameters outside layers, such as an embedding: a last fragment wherever layers are dealt to fragments, as with
    `core.fragments.Blocks`."""

    def __post_init__(self) -> None:
        check_whole("parameters", self.parameters, why="it counts what is trained")
        check_whole("layers", self.layers, why="it counts what is computed one after the other")
        check_whole("rest", self.rest, least=0, why="it counts what is outside layers")
        if self.rest >= self.parameters:
            raise ConfigError(f"rest must be less than parameters ({self.parameters}), got {self.rest}")
        if not 0 < self.step_s < math.inf:
            raise ConfigError(f"the time of a step must be a finite number of seconds above 0, got {self.step_s!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """Describes one method to train on several workers."""

    name: str
    period: int
    """Inner steps between two exchanges of the same parameters."""
    each: int | None = None
    """Layers of a fragment; None: the whole model is one fragment."""
    delay: int = 0
    """Inner steps from a send to its apply."""
    codec: Codec = Codec("bf16")
    eager: bool = False
    """Whether a worker applies its own newest delta at once (Eager Updates)."""
    gradients: bool = False
    """Whether gradients are exchanged on every step (data-parallel); period is then 1 and delay 0."""
    velocities: int = 1
    """Vectors as long as the model that the outer optimizer keeps: 0 for SGD, 2 for Adam, else 1."""
    offload: bool = False
    """Whether anchor and velocities are in host memory (`sync.offload`)."""
    resets: tuple[str, ...] = ()
    """Settings of a run file that conflict with the method and must be set to false, by dotted key."""

    def __post_init__(self) -> None:
        check_whole("period", self.period, why="it counts inner steps")
        check_whole("delay", self.delay, least=0, why="it counts inner steps")
        if self.delay > self.period:
            raise ConfigError(f"delay must be between 0 and period ({self.period}), got {self.delay}")
        if self.gradients and (self.period, self.delay) != (1, 0):
            raise ConfigError(
                f"gradients are exchanged on every step and used at once: period must be 1 and delay 0, "
                f"got {self.period} and {self.delay}"
            )

    def layers(self, model: Model) -> Layers:
        """Return the layers of every fragment; parameters outside layers are needed and ready with the first."""
        if self.each is None:
            return (tuple(range(1, model.layers + 1)),)
        return _with_rest(strided(model.layers, self.each), model)

    def values(self, model: Model) -> tuple[int, ...]:
        """Return the number of parameters of every fragment."""
        return (model.parameters,) if self.each is None else _sizes(strided(model.layers, self.each), model)

    def payload_bytes(self, model: Model) -> tuple[int, ...]:
        """Return the exact bytes of one worker's payload, per fragment."""
        return tuple(self.codec.payload_bytes(values) for values in self.values(model))

    def job(self, model: Model, workers: int, steps: int) -> Job:
        """Return a run of this method for the simulator."""
        return Job(
            steps=steps,
            step_s=model.step_s,
            period=self.period,
            payload_bytes=self.payload_bytes(model),
            delay=self.delay,
            workers=workers,
            gradients=self.gradients,
        )

    def settings(self) -> dict[str, str | int]:
        """Return every setting of a run file that the method depends on, by dotted key."""
        resets = dict.fromkeys(self.resets, "false")
        if self.gradients:
            return {"sync.method": "data-parallel", "sync.codec": self.codec.format, **resets}
        # Only "streaming" blends a round that is applied late with what the worker has learnt meanwhile.
        name = "eager" if self.eager else "streaming" if self.delay else "diloco"
        return {
            "sync.method": name,
            "sync.period": self.period,
            "sync.fragments": "whole" if self.each is None else f"blocks:{self.each}",
            **({} if self.eager else {"sync.delay": self.delay}),
            "sync.codec": self.codec.format,
            **resets,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentedMethod(Method):
    """Describes a method whose fragments are given one by one instead of by a number of equal layers."""

    fragment_layers: Layers
    """The layers of every fragment, from 1."""
    fragment_values: tuple[int, ...]
    """Parameters of every fragment."""

    def layers(self, model: Model) -> Layers:
        """Return the layers of every fragment."""
        return self.fragment_layers

    def values(self, model: Model) -> tuple[int, ...]:
        """Return the number of parameters of every fragment."""
        return self.fragment_values


# ---------------------------------------------------------------------- fragments


def strided(layers: int, each: int) -> Layers:
    """Deal layers to fragments of `each`, as far apart as possible: of P fragments the p-th has p, p + P, p + 2P ..."""
    check_whole("layers", layers)
    check_whole("layers per fragment", each)
    if each > layers:
        raise ConfigError(f"a fragment of {each} layers is more than the model has ({layers})")
    return _dealt(layers, -(-layers // each))


def _dealt(layers: int, count: int) -> Layers:
    """Deal layers to `count` fragments in turn."""
    return tuple(tuple(range(first, layers + 1, count)) for first in range(1, count + 1))


def _with_rest(layers: Layers, model: Model) -> Layers:
    """Add the fragment of the parameters outside layers, if there are any."""
    return layers + (((1,),) if model.rest else ())


def _sizes(layers: Layers, model: Model) -> tuple[int, ...]:
    """Return the parameters of every fragment, and those outside layers."""
    edges = accumulate((len(group) for group in layers), initial=0)
    inside = model.parameters - model.rest
    sizes = tuple(end - start for start, end in pairwise(inside * e // model.layers for e in edges))
    return sizes + ((model.rest,) if model.rest else ())


def in_fragments(method: Method, model: Model, count: int) -> FragmentedMethod:
    """Return the method with `count` fragments of layers, as equal as possible, and one of the rest of the model."""
    check_whole("fragments", count)
    if count > model.layers:
        raise ConfigError(f"fragments must be at most {model.layers}, the layers of the model, got {count}")
    layers = _dealt(model.layers, count)
    settings = {name: getattr(method, name) for name in Method.__dataclass_fields__}
    return FragmentedMethod(
        **settings, fragment_layers=_with_rest(layers, model), fragment_values=_sizes(layers, model)
    )


# ---------------------------------------------------------------------- the papers' methods

FRAGMENT_LAYERS = 3
"""Layers of a fragment in the Streaming paper."""
PERIOD = 100
"""Period of the Streaming paper's comparison."""

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(name="data-parallel", period=1, gradients=True),
        Method(name="diloco", period=PERIOD),
        Method(name="streaming-blocking", period=PERIOD, each=FRAGMENT_LAYERS),
        Method(name="streaming-bf16", period=PERIOD, each=FRAGMENT_LAYERS, delay=1),
        Method(name="streaming", period=PERIOD, each=FRAGMENT_LAYERS, delay=1, codec=Codec("e3m0")),
        Method(name="eager", period=PERIOD, delay=PERIOD, codec=Codec("e3m0"), eager=True),
    )
}
"""The methods of the Streaming paper's comparison and Eager Updates, all with the period of the comparison."""

LABELS = {
    "data-parallel": "data-parallel, 16 bits",
    "diloco": "DiLoCo, 16 bits",
    "streaming-blocking": "Streaming, 16 bits, waiting",
    "streaming-bf16": "Streaming, 16 bits, hidden",
    "streaming": "Streaming, 4 bits, hidden",
    "eager": "Eager, 4 bits, hidden",
}
RUN_FILE_METHOD = "run"
"""Name of a run file's own method beside the others."""


def label(method: Method) -> str:
    """Return a method's name for people, such as "DiLoCo, 16 bits"."""
    return LABELS.get(method.name, f"this run, {method.codec.format}")


def methods(names: Iterable[str] = (), period: int | None = None) -> list[Method]:
    """Return the papers' methods of these names, or all, with another period if one is given."""
    chosen = list(names) or list(METHODS)
    for name in chosen:
        if name not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}; got {name!r}")
    return [with_period(METHODS[name], period) for name in chosen]


def with_period(method: Method, period: int | None) -> Method:
    """Return the method with another period; the delay of Eager stays the whole period."""
    if period is None or method.gradients:
        return method
    check_whole("period", period, why="it counts inner steps")
    return replace(method, period=period, delay=period if method.eager else min(method.delay, period))


def methods_for(model: Model, names: Iterable[str], period: int | None, fragments: int | None) -> list[Method]:
    """Return the papers' methods of these names, or all, with fragments that fit the model."""
    found = methods(names, period)
    if fragments is not None:
        return [m if m.each is None else in_fragments(m, model, fragments) for m in found]
    # A model of one or two layers is one fragment, as with `core.fragments.Blocks`.
    fewest = min(FRAGMENT_LAYERS, model.layers)
    return [m if m.each is None else replace(m, each=min(m.each, fewest)) for m in found]
