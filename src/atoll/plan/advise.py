"""Which settings to use on a given link: the least risky that keep workers busy enough, and what more would take.

Risk is how far a choice is from what everybody does, in this order: data-parallel; the outer loop, the shorter its
period the better, then the smaller its delay, then the more bits; at last Eager Updates. The order does not depend on
the link, so a better link never leads to riskier advice. `plan.measured` says what a choice cost in the papers.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from atoll.checks import check_whole
from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.plan import cost
from atoll.plan.lines import Array
from atoll.plan.link import Link
from atoll.plan.measured import penalty
from atoll.plan.method import Method, Model
from atoll.plan.outlook import Outlook, bandwidth_needed, outlook, steady_utilisation
from atoll.units import bytes_text, seconds_text, share_text

PERIODS = (5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
EACH: tuple[int | None, ...] = (None, 3, 6, 2, 1)
"""Layers of a fragment, in the order in which they are preferred: all of them; the papers' three."""
DELAYS = (0, 1, 2, 3, 5, 10)
"""The Streaming paper advises up to 5, and saw less than 0.2 % up to 10."""
FORMATS = ("fp32", "bf16", "int8", "e3m0")
"""Of the 4-bit formats the papers'; others take as many bytes."""
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)

_NEARLY = 1e-3  # a sweep rounds bytes; what it sees this far below the target is looked at exactly
_AS_GOOD = 0.99  # of the best: then risk decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One choice."""

    outlook: Outlook
    loss_penalty: float | None
    """How much higher the papers' loss ended than data-parallel's: 0.006 is 0.6 %; None: nobody measured it."""
    source: str
    """Where that is from."""
    why: str
    """What it does, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """What to use, and what would be better still."""

    choices: tuple[Advice, ...]
    """Those that reach the target, least risky first, no two with the same period and merge; if there is none, those
    that come closest, best first."""
    reached: bool
    """Whether `utilisation_with_atoll` of the choices is at least the target."""
    next_level: str
    """What it takes to get to the next of 50, 80, 90, 95 and 99 %."""


def advise(
    model: Model,
    workers: int,
    link: Link,
    target: float = 0.95,
    *,
    most: int = 3,
    memory_limit_bytes: int | None = None,
) -> Recommendation:
    """Settings with which workers compute for at least `target` (0 to 1) of their time, or come as close as can be.

    With `memory_limit_bytes`, only those that add no more than that on a worker's device.
    """
    check_whole("workers", workers)
    check_whole("most", most, why="it counts choices")
    if not 0 < target < 1:
        raise ConfigError(f"target must be between 0 and 1, both excluded, got {target!r}: it is a part of the time")
    options = _fitting(model, workers, memory_limit_bytes)
    swept = sweep(model, workers, link, options)
    found = _reaching(model, workers, link, target, most, options, swept)
    reached = bool(found)
    outlooks = found or [outlook(model, method, workers, link) for method in _closest(most, options, swept)]
    return Recommendation(
        choices=tuple(_advice(model, workers, ahead) for ahead in outlooks),
        reached=reached,
        next_level=_next_level(model, workers, link, outlooks[0], options, swept),
    )


# ---------------------------------------------------------------------- what there is to choose


def candidates(model: Model, periods: Iterable[int] = PERIODS, delays: Iterable[int] = DELAYS) -> Iterator[Method]:
    """Everything that is considered, least risky first."""
    for name in FORMATS[:2]:
        yield Method(name="data-parallel", period=1, gradients=True, codec=Codec(name))
    parts = [each for each in EACH if each is None or each < model.layers]
    for period in periods:
        # A round that comes back when a third of the next is over is old news: blended, it was never measured.
        for delay in (delay for delay in delays if delay <= max(1, period // 3)):
            for codec in map(Codec, FORMATS):
                for each in parts:
                    name = "diloco" if each is None else "streaming"
                    yield Method(name=name, period=period, each=each, delay=delay, codec=codec)
    for period in periods:
        for codec in map(Codec, FORMATS):
            for each in parts:
                yield Method(name="eager", period=period, each=each, delay=period, codec=codec, eager=True)


def _fitting(model: Model, workers: int, limit: int | None) -> list[Method]:
    options = list(candidates(model))
    if limit is None:
        return options
    sizes = [cost.extra_bytes(model, method, workers) for method in options]
    if min(sizes) > limit:
        raise ConfigError(
            f"memory_limit_bytes is {bytes_text(limit)}; the least that any choice adds is {bytes_text(min(sizes))}"
        )
    return [method for method, size in zip(options, sizes, strict=True) if size <= limit]


def sweep(model: Model, workers: int, link: Link, options: Sequence[Method]) -> Array:
    """[options]: utilisation with atoll, to about a thousandth.

    Formats share a simulation: half the bytes on a line are the same bytes on twice the line.
    """
    alike: dict[tuple[int, int | None, int, bool], list[int]] = {}
    for n, method in enumerate(options):
        alike.setdefault((method.period, method.each, method.delay, method.gradients), []).append(n)
    found = np.zeros(len(options))
    for members in alike.values():
        size_of = {
            codec: sum(cost.round_bytes(model, method, workers))
            for codec, method in {options[n].codec: options[n] for n in members}.items()
        }
        first = options[members[0]]
        sizes = np.array([size_of[options[n].codec] for n in members], dtype=float)
        rates = link.bits_per_s * (sizes[0] / np.maximum(sizes, 1.0)) if workers > 1 else np.ones(len(members))
        found[members] = steady_utilisation(model, first, workers, rates, latency_s=link.latency_s, layered=False)
    return found


# ---------------------------------------------------------------------- what to choose


def _reaching(
    model: Model, workers: int, link: Link, target: float, most: int, options: Sequence[Method], swept: Array
) -> list[Outlook]:
    """The least risky of each period and merge, up to so many."""
    found: dict[tuple[int, bool, bool], Outlook] = {}
    for n in np.flatnonzero(swept >= target - _NEARLY):
        method = options[int(n)]
        if len(found) < most and _sort(method) not in found:
            ahead = outlook(model, method, workers, link)
            if ahead.utilisation_with_atoll >= target:
                found[_sort(method)] = ahead
    return list(found.values())


def _closest(most: int, options: Sequence[Method], swept: Array) -> list[Method]:
    """The best of each period and merge; of those that are as good as the best, the least risky first."""
    left = swept.copy()
    chosen: list[Method] = []
    while len(chosen) < most and left.max() >= 0:
        method = options[int(np.flatnonzero(left >= _AS_GOOD * left.max())[0])]
        chosen.append(method)
        left[[_sort(other) == _sort(method) for other in options]] = -1
    return chosen


def _sort(method: Method) -> tuple[int, bool, bool]:
    return method.period, method.eager, method.gradients


# ---------------------------------------------------------------------- in words


def _advice(model: Model, workers: int, ahead: Outlook) -> Advice:
    method, wait_s = ahead.method, ahead.wait_s_per_period
    loss, source = penalty(model.parameters, workers, method)
    every = "step" if method.gradients else f"{method.period} steps"
    waits = f"waits {seconds_text(wait_s)} in every {every}" if wait_s > 0 else "never waits"
    busy = f"is busy {share_text(ahead.utilisation_with_atoll)} of the time"
    why = f"{in_words(method)}: a worker sends {bytes_text(ahead.bytes_per_step)} a step, {waits}, and {busy}."
    return Advice(outlook=ahead, loss_penalty=loss, source=source, why=why)


def in_words(method: Method) -> str:
    """'In fragments of 3 layers every 100 steps, in e3m0, hidden behind 1 step'."""
    if method.gradients:
        return f"Gradients on every step, in {method.codec.format}"
    layers = f"{method.each} layer{'s' if method.each != 1 else ''}"
    what = "Everything at once" if method.each is None else f"In fragments of {layers}"
    steps = f"{method.delay} step{'s' if method.delay != 1 else ''}"
    hidden = "eagerly, behind all of them" if method.eager else f"hidden behind {steps}" if method.delay else "waiting"
    return f"{what} every {method.period} steps, in {method.codec.format}, {hidden}"


def _next_level(model: Model, workers: int, link: Link, ahead: Outlook, options: Sequence[Method], swept: Array) -> str:
    level = next((level for level in LEVELS if level > ahead.utilisation_with_atoll), None)
    if level is None:
        return f"Nothing is left to gain: workers are busy {share_text(ahead.utilisation_with_atoll)} of the time."
    needed = bandwidth_needed(model, ahead.method, workers, level, latency_s=link.latency_s)
    if math.isfinite(needed):
        line = f"{share_text(level)} takes {Link(float(f'{needed:.2g}'))} with the first of these choices"
    else:
        line = f"{share_text(level)} is out of reach of the first of these choices at any bandwidth, for latency alone"
    enough = np.flatnonzero(swept >= level + _NEARLY)
    if not enough.size:
        return f"{line}; on this link no settings reach it."
    words = in_words(options[enough[0]])
    return f"{line}. On this link it takes other settings: {words[0].lower()}{words[1:]}."
