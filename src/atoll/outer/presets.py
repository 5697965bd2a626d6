"""Describes the algorithms as values: four independent axes and an outer optimizer, with one preset per paper.

A `Sync` is checked when it is made, so nothing downstream checks it again. Presets take the axes that make sense for
them: `Streaming(period=50, codec="int8")`, `DiLoCo(codec="e3m0")`, `Eager(fragments=Blocks())`.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import ParamSpec, TypeVar, get_args

from atoll.core.codec import Codec
from atoll.core.fragments import Blocks, FragmentPolicy, Whole
from atoll.core.outer_step import Adam, Blend, EagerMerge, Merge, Nesterov, OuterOptimizer
from atoll.core.schedule import Schedule
from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sync:
    """Says when, what and how workers exchange, and how the result is merged."""

    period: int
    """Inner steps between two sends of the same fragment (H)."""
    fragments: FragmentPolicy = Whole()
    """What is synchronised together (P of them)."""
    delay: int | tuple[int, ...] = 0
    """Inner steps between a fragment's send and its apply (tau), 0 to period; a tuple has one per worker."""
    codec: Codec = Codec("fp32")
    """How a delta travels."""
    merge: Merge = Blend()
    """How an applied round reaches the live parameters."""
    outer: OuterOptimizer = Nesterov()
    """The outer optimizer that turns mean deltas into anchor steps."""

    def __post_init__(self) -> None:
        for name, kinds in _KINDS.items():
            if not isinstance(getattr(self, name), kinds):
                raise ConfigError(f"{name} must be {_either(kinds)}, got {getattr(self, name)!r}")
        if not self.delays:
            raise ConfigError("delay must be a number or one number per worker, got ()")
        for delay in self.delays:
            Schedule(self.period, 1, delay)
        if self.eager:
            if set(self.delays) != {self.period}:
                raise ConfigError(
                    f"delay must equal period ({self.period}) under the eager merge, got {self.delay}: a worker adds "
                    "its newest delta at the moment the previous round arrives; for other delays use merge=Blend(...)"
                )
            if isinstance(self.outer, Adam):
                raise ConfigError(
                    "outer must be Nesterov, Momentum or SGD under the eager merge, got Adam: a worker's own part of "
                    "a step can only be told apart when steps add up"
                )

    @property
    def delays(self) -> tuple[int, ...]:
        """Every delay in use."""
        return self.delay if isinstance(self.delay, tuple) else (self.delay,)

    def delay_of(self, worker: int, workers: int) -> int:
        """Return this worker's delay in inner steps."""
        if len(self.delays) not in (1, workers):
            raise ConfigError(f"delay has {len(self.delays)} entries for {workers} workers: give one, or one each")
        return self.delays[worker % len(self.delays)]

    def trailing(self, workers: int) -> frozenset[int]:
        """Return the workers that apply a round only after they have sent the next one of its fragment."""
        return frozenset(w for w in range(workers) if self.delay_of(w, workers) == self.period)

    @property
    def ahead(self) -> int:
        """Inner steps that a worker can be ahead of another: then it waits for a round the other has not sent."""
        return self.period + max(self.delays)

    @property
    def eager(self) -> bool:
        """Whether the merge is the eager one."""
        return isinstance(self.merge, EagerMerge)

    def terms(self) -> dict[str, str]:
        """Return what all workers must agree on, as text."""
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Says that workers average gradients on every step, before the inner optimizer's step."""

    codec: Codec = Codec("fp32")
    """How a gradient travels."""

    def __post_init__(self) -> None:
        if self.codec.feedback:
            problem = f"codec must be without feedback under DataParallel, got {self.codec}"
            raise ConfigError(f"{problem}: gradients are used at once; take fp32, bf16 or int8", setting="codec")

    @property
    def ahead(self) -> int:
        """Inner steps that a worker can be ahead of another."""
        return 1

    def terms(self) -> dict[str, str]:
        """Return what all workers must agree on, as text."""
        return {"gradients": str(self.codec)}


_KINDS: dict[str, tuple[type, ...]] = {
    "fragments": get_args(FragmentPolicy),
    "codec": (Codec,),
    "merge": get_args(Merge),
    "outer": get_args(OuterOptimizer),
}


def _either(kinds: tuple[type, ...]) -> str:
    return " or ".join(f"{kind.__name__}(...)" for kind in kinds)


def _codec(codec: Codec | str) -> Codec:
    return Codec(codec) if isinstance(codec, str) else codec


_Arguments = ParamSpec("_Arguments")
_Preset = TypeVar("_Preset")


def _preset(function: Callable[_Arguments, _Preset]) -> Callable[_Arguments, _Preset]:
    """Makes a call with wrong arguments, `DiLoCo(20)`, say which ones the preset takes."""
    parameters = signature(function).parameters
    example = next(f"{name}={parameter.default!r}" for name, parameter in parameters.items())

    @wraps(function)
    def checked(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Preset:
        try:
            signature(function).bind(*args, **kwargs)
        except TypeError as error:
            allowed = f"name what you set, as in {function.__name__}({example}); it takes {', '.join(parameters)}"
            raise TypeError(f"{function.__name__}(): {error}; {allowed}") from None
        return function(*args, **kwargs)

    return checked


@_preset
def DiLoCo(  # noqa: N802 - presets read like the papers' names
    *,
    period: int = 500,
    fragments: FragmentPolicy = Whole(),
    delay: int | tuple[int, ...] = 0,
    codec: Codec | str = "fp32",
    merge: Merge = Blend(0.0),
    outer: OuterOptimizer = Nesterov(0.7, 0.9),
) -> Sync:
    """Return DiLoCo (arXiv 2311.08105): everything at once, every `period` inner steps, and everybody waits.

    Args:
        period: Inner steps between two rounds (H).
        fragments: What is synchronised together; `Whole()` is the paper's.
        delay: Inner steps between a send and its apply, 0 to period; a tuple has one per worker.
        codec: How a delta travels, a `Codec` or its name.
        merge: How an applied round reaches the live parameters; `Blend(0.0)` replaces them.
        outer: The outer optimizer.
    """
    return Sync(period=period, fragments=fragments, delay=delay, codec=_codec(codec), merge=merge, outer=outer)


@_preset
def Streaming(  # noqa: N802
    *,
    period: int = 100,
    fragments: FragmentPolicy = Blocks(),
    delay: int | tuple[int, ...] = 1,
    codec: Codec | str = "e3m0",
    merge: Merge = Blend(0.25),
    outer: OuterOptimizer = Nesterov(0.6, 0.9),
) -> Sync:
    """Return Streaming DiLoCo (arXiv 2501.18512): fragments in turn, in 4 bits, while training goes on.

    Alpha and the outer learning rate are not the paper's: alpha 0.5 and its 0.4 ended higher
    (docs/decisions/0040-alpha-of-streaming.md).

    Args:
        period: Inner steps between two sends of the same fragment (H).
        fragments: What is synchronised together; `Blocks()` puts up to three blocks of the model in a fragment.
        delay: Inner steps between a send and its apply (tau), 0 to period; a tuple has one per worker.
        codec: How a delta travels, a `Codec` or its name.
        merge: How an applied round reaches the live parameters; `Blend(0.25)` keeps a quarter of a worker's own
            progress since its last merge.
        outer: The outer optimizer.
    """
    return Sync(period=period, fragments=fragments, delay=delay, codec=_codec(codec), merge=merge, outer=outer)


@_preset
def Eager(  # noqa: N802
    *,
    period: int = 30,
    fragments: FragmentPolicy = Whole(),
    codec: Codec | str = "e3m0",
    outer: OuterOptimizer = Nesterov(0.4, 0.9),
) -> Sync:
    """Return Eager Updates (arXiv 2502.12996): exchanges hide behind a period; a worker uses its own delta at once.

    Args:
        period: Inner steps between two sends of the same fragment (H); a round is applied one period after its send.
        fragments: What is synchronised together.
        codec: How a delta travels, a `Codec` or its name.
        outer: The outer optimizer: Nesterov, Momentum or SGD.
    """
    return Sync(period=period, fragments=fragments, delay=period, codec=_codec(codec), merge=EagerMerge(), outer=outer)


@_preset
def Delayed(  # noqa: N802
    *,
    period: int = 30,
    fragments: FragmentPolicy = Whole(),
    codec: Codec | str = "e3m0",
    outer: OuterOptimizer = Nesterov(0.4, 0.9),
) -> Sync:
    """Return the baseline that Eager beats: every round is applied one period late.

    Args:
        period: Inner steps between two sends of the same fragment (H); a round is applied one period after its send.
        fragments: What is synchronised together.
        codec: How a delta travels, a `Codec` or its name.
        outer: The outer optimizer.
    """
    return Sync(period=period, fragments=fragments, delay=period, codec=_codec(codec), merge=Blend(0.0), outer=outer)


@_preset
def DataParallel(*, codec: Codec | str = "fp32") -> Gradients:  # noqa: N802
    """Return the data-parallel baseline: gradients are averaged on every step, before the inner optimizer uses them.

    Args:
        codec: How a gradient travels, a `Codec` or its name.
    """
    return Gradients(codec=_codec(codec))
