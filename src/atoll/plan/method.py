"""Describes what is planned: a model by its size, a method to train it on several workers, and the run of both."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from atoll._util.checks import check_whole
from atoll.core.codec import Codec
from atoll.core.schedule import Schedule
from atoll.errors import ConfigError

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
class Job:
    """Holds what the time of a run depends on, apart from its link."""

    steps: int
    """Inner steps of every worker."""
    step_s: float
    """Seconds of compute of one inner step."""
    period: int
    """Inner steps between two sends of the same fragment."""
    payload_bytes: tuple[int, ...]
    """Bytes of one worker's payload, per fragment; empty if nothing is ever sent."""
    delay: int | tuple[int, ...]
    """Inner steps from a round's send to its apply; a tuple has one per worker."""
    workers: int
    gradients: bool = False
    """Whether all gradients are exchanged on every step (data-parallel); period and delay are then ignored."""
    finish: bool = True
    """Whether the run ends by exchanging what was not sent yet, as `OuterLoop.finish` does."""

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, least=0)
        check_whole("workers", self.workers)
        if not 0 <= self.step_s < math.inf:
            raise ConfigError(f"step_s must be a number of seconds, 0 or more, got {self.step_s!r}")
        for size in self.payload_bytes:
            check_whole("payload_bytes", size, least=0)
        if isinstance(self.delay, tuple) and len(self.delay) != self.workers:
            raise ConfigError(f"delay has {len(self.delay)} entries for {self.workers} workers: give one, or one each")
        self.schedules()

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Group the workers by delay, ascending: workers of one lane behave alike."""
        if self.gradients or isinstance(self.delay, int):
            return (tuple(range(self.workers)),)
        delays = self.delay
        return tuple(tuple(w for w in range(self.workers) if delays[w] == d) for d in sorted(set(delays)))

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedule of every lane; none if nothing is ever sent."""
        fragments = len(self.payload_bytes)
        if not fragments:
            return ()
        if self.gradients:
            return (Schedule(1, fragments, 0),)
        delays = [self.delay] if isinstance(self.delay, int) else sorted(set(self.delay))
        return tuple(Schedule(self.period, fragments, delay) for delay in delays)


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
    fragment_layers: Layers = ()
    """The layers of every fragment, from 1, where they are given one by one instead of by `each`."""
    fragment_values: tuple[int, ...] = ()
    """The parameters of these fragments."""

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
        """Return the layers of every fragment."""
        return self.fragment_layers or self._fragments(model)[0]

    def values(self, model: Model) -> tuple[int, ...]:
        """Return the number of parameters of every fragment."""
        return self.fragment_values or self._fragments(model)[1]

    def _fragments(self, model: Model) -> tuple[Layers, tuple[int, ...]]:
        if self.each is None:
            return (tuple(range(1, model.layers + 1)),), (model.parameters,)
        if self.each > model.layers:
            raise ConfigError(f"a fragment of {self.each} layers is more than the model has ({model.layers})")
        return strided(model, -(-model.layers // self.each))

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


# ---------------------------------------------------------------------- fragments


def strided(model: Model, count: int) -> tuple[Layers, tuple[int, ...]]:
    """Return layers and parameters of `count` fragments: the p-th has layers p, p + count, p + 2 count ...

    Parameters outside layers are one fragment more, needed and ready with the first layer.
    """
    layers = tuple(tuple(range(first, model.layers + 1, count)) for first in range(1, count + 1))
    inside = model.parameters - model.rest
    edges = (inside * edge // model.layers for edge in accumulate(map(len, layers), initial=0))
    values = tuple(end - start for start, end in pairwise(edges))
    return ((*layers, (1,)), (*values, model.rest)) if model.rest else (layers, values)


def in_fragments(method: Method, model: Model, count: int) -> Method:
    """Return the method with `count` fragments of layers, as equal as possible, and one of the rest of the model."""
    check_whole("fragments", count)
    if count > model.layers:
        raise ConfigError(f"fragments must be at most {model.layers}, the layers of the model, got {count}")
    layers, values = strided(model, count)
    return replace(method, fragment_layers=layers, fragment_values=values)


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
"""The methods of the Streaming paper's comparison and Eager Updates, all with its period.

Data-parallel and DiLoCo send 16 bits, as in that paper, so that methods and not codecs are compared. The presets send
fp32, twice as much."""

RUN_FILE_METHOD = "run"
"""Name of a run file's own method beside the others."""


def label(method: Method) -> str:
    """Return a method's name for people, such as "DiLoCo, 16 bits"."""
    if method.name == RUN_FILE_METHOD:
        return f"this run, {method.codec.format}"
    kind = (
        "data-parallel" if method.gradients else "Eager" if method.eager else "Streaming" if method.each else "DiLoCo"
    )
    when = ", hidden" if method.delay else ", waiting" if kind == "Streaming" else ""
    bits = 8 * method.codec.payload_bytes(4096) / 4096
    return f"{kind}, {int(bits) or round(bits, 2)} bits{when}"


def methods_for(
    model: Model, names: Iterable[str] = (), period: int | None = None, fragments: int | None = None
) -> list[Method]:
    """Return the papers' methods of these names, or all, with fragments that fit the model.

    Args:
        model: The model to train.
        names: Keys of METHODS; all if there are none.
        period: Another period; the delay of Eager stays the whole period.
        fragments: Fragments of Streaming, beside that of parameters outside layers.
    """
    found = []
    for name in list(names) or METHODS:
        if name not in METHODS:
            raise ConfigError(f"method must be one of {', '.join(METHODS)}; got {name!r}")
        method = METHODS[name]
        if period is not None and not method.gradients:
            method = replace(method, period=period, delay=period if method.eager else min(method.delay, period))
        if method.each is not None:
            # A model of one or two layers is one fragment, as with `core.fragments.Blocks`.
            method = replace(method, each=min(method.each, model.layers))
            method = method if fragments is None else in_fragments(method, model, fragments)
        found.append(method)
    return found
