"""What can be chosen, as the planner sees it: a model by its size, and the ways to train it on several workers."""

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
    """What is trained: layers of equal size, all of which take part in every step."""

    parameters: int
    """All that are trained and exchanged."""
    layers: int
    step_s: float
    """Seconds of computing of one inner step of one worker."""
    rest: int = 0
    """Parameters that are in no layer, such as an embedding: a last fragment of their own wherever layers are dealt to
    fragments, as with `core.fragments.Blocks`."""

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
    """One way to train on several workers."""

    name: str
    period: int
    """Inner steps between two exchanges of the same parameters."""
    each: int | None = None
    """Layers of a fragment; None: everything at once."""
    delay: int = 0
    """Inner steps for which an exchange may go on while training does."""
    codec: Codec = Codec("bf16")
    """How values travel."""
    eager: bool = False
    """Whether a worker's own newest change is applied at once (Eager Updates)."""
    gradients: bool = False
    """Data-parallel: gradients on every step, a period of 1 without delay."""
    velocities: int = 1
    """Vectors as long as the model that the outer optimizer keeps: SGD none, Adam two, others one."""
    offload: bool = False
    """Whether anchor and velocities are in the machine's memory (`sync.offload`)."""
    resets: tuple[str, ...] = ()
    """Settings of a run file that cannot go with it and must be turned off, by dotted key."""

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
        """The layers of every fragment; what is in none is needed and complete when the first is."""
        if self.each is None:
            return (tuple(range(1, model.layers + 1)),)
        return with_rest(strided(model.layers, self.each), model)

    def values(self, model: Model) -> tuple[int, ...]:
        """Parameters of every fragment; together all of the model's."""
        return (model.parameters,) if self.each is None else shares(strided(model.layers, self.each), model)

    def payload_bytes(self, model: Model) -> tuple[int, ...]:
        """One worker's payload of every fragment, exactly as it will travel."""
        return tuple(self.codec.payload_bytes(values) for values in self.values(model))

    def job(self, model: Model, workers: int, steps: int) -> Job:
        """A run of so many steps."""
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
        """What a run file says for it, by dotted key; all that the method depends on, whatever the file has."""
        resets = dict.fromkeys(self.resets, "false")
        if self.gradients:
            return {"sync.method": "data-parallel", "sync.codec": self.codec.format, **resets}
        # Only what comes back late is blended with what was learnt meanwhile, and that is what "streaming" does.
        name = "eager" if self.eager else "streaming" if self.delay else "diloco"
        return {
            "sync.method": name,
            "sync.period": self.period,
            "sync.fragments": "whole" if self.each is None else f"blocks:{self.each}",
            **({} if self.eager else {"sync.delay": self.delay}),
            "sync.codec": self.codec.format,
            **resets,
        }


def strided(layers: int, each: int) -> Layers:
    """Deal layers to fragments of `each`, as far apart as possible: of P fragments the p-th has p, p + P, p + 2P ..."""
    check_whole("layers", layers)
    check_whole("layers per fragment", each)
    if each > layers:
        raise ConfigError(f"a fragment of {each} layers is more than the model has ({layers})")
    return dealt(layers, -(-layers // each))


def dealt(layers: int, count: int) -> Layers:
    """Deal layers to `count` fragments in turn."""
    return tuple(tuple(range(first, layers + 1, count)) for first in range(1, count + 1))


def with_rest(dealt: Layers, model: Model) -> Layers:
    """Fragments of layers, and that of what is in none."""
    return dealt + (((1,),) if model.rest else ())


def shares(dealt: Layers, model: Model) -> tuple[int, ...]:
    """Parameters of each of them."""
    edges = accumulate((len(group) for group in dealt), initial=0)
    inside = model.parameters - model.rest
    sizes = tuple(end - start for start, end in pairwise(inside * e // model.layers for e in edges))
    return sizes + ((model.rest,) if model.rest else ())


FRAGMENT_LAYERS = 3
"""Of the Streaming paper."""
PERIOD = 100
"""Of its comparison."""

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
"""The papers' comparison, and Eager Updates; names without a second part are atoll's presets, but for 16 bits where the
papers have them. Every period is that of the comparison."""

LABELS = {
    "data-parallel": "data-parallel, 16 bits",
    "diloco": "DiLoCo, 16 bits",
    "streaming-blocking": "Streaming, 16 bits, waiting",
    "streaming-bf16": "Streaming, 16 bits, hidden",
    "streaming": "Streaming, 4 bits, hidden",
    "eager": "Eager, 4 bits, hidden",
}


def methods(names: Iterable[str] = (), period: int | None = None) -> list[Method]:
    """Those of these names, or all, with another period if one is given."""
    chosen = list(names) or list(METHODS)
    for name in chosen:
        if name not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}; got {name!r}")
    return [with_period(METHODS[name], period) for name in chosen]


def with_period(method: Method, period: int | None) -> Method:
    """The same with another period; an exchange that had all of it to hide in still has."""
    if period is None or method.gradients:
        return method
    check_whole("period", period, why="it counts inner steps")
    return replace(method, period=period, delay=period if method.eager else min(method.delay, period))
