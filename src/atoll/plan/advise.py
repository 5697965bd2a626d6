"""Which settings to use on a given link: the least risky that keep workers busy enough, and what more would take.

Risk is how far a choice is from what everybody does, in this order: data-parallel; the outer loop, the shorter its
period the better, then the smaller its delay, then the more bits; at last Eager Updates. The order does not depend on
the link, so on a better link nothing riskier is needed. `plan.measured` says what a choice cost in the papers. One that
is riskier is offered as well if it gains something over all that are less so: loss, bytes or utilisation.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atoll._util.checks import check_whole
from atoll._util.units import bytes_text, seconds_text, share_text
from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.plan import cost
from atoll.plan.cost import Array
from atoll.plan.link import Link
from atoll.plan.measured import penalty
from atoll.plan.method import Method, Model
from atoll.plan.outlook import Outlook, bandwidth_needed, busy, outlook
from atoll.plan.paper import LEVELS

PERIODS = (5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
EACH: tuple[int | None, ...] = (None, 3, 6, 2, 1)
"""Layers of a fragment, in the order in which they are preferred: all of them; the papers' three."""
DELAYS = (0, 1, 2, 3, 5, 10)
"""The Streaming paper advises up to 5, and saw less than 0.2 % up to 10."""
FORMATS = ("fp32", "bf16", "int8", "e3m0")
"""Of the 4-bit formats the papers'; others take as many bytes."""
FEWEST_ROUNDS = 5
"""Of a run, where its steps are known: with fewer, a period says little about it."""

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
    that come closest, best first. None for one worker, who has nothing to exchange."""
    reached: bool
    """Whether the choices' utilisation is at least the target: that of the run if its steps are known, else once it is
    under way."""
    next_level: str
    """What it takes to get to the next of 50, 80, 90, 95 and 99 %."""


def advise(
    model: Model,
    workers: int,
    link: Link,
    target: float = 0.95,
    *,
    steps: int = 0,
    most: int = 3,
    memory_limit_bytes: int | None = None,
    suited: Callable[[Method], Method | None] = lambda method: method,
) -> Recommendation:
    """Settings with which workers compute for at least `target` (0 to 1) of their time, or come as close as can be.

    With `steps`, of the time of a run of so many, and with periods that it has a few of. With `memory_limit_bytes`,
    only those that add no more than that on a worker's device. `suited` says what a method becomes beside settings that
    are given, None if it cannot be with them.
    """
    check_whole("workers", workers)
    check_whole("most", most, why="it counts choices")
    check_whole("steps", steps, least=0)
    if not 0 < target < 1:
        raise ConfigError(f"target must be between 0 and 1, both excluded, got {target!r}: it is a part of the time")
    if workers == 1:
        return Recommendation(choices=(), reached=True, next_level="One worker has nothing to exchange.")
    options = [fit for method in candidates(model, periods_for(steps)) if (fit := suited(method)) is not None]
    if not options:
        return Recommendation(choices=(), reached=False, next_level="No method goes with the settings that are given.")
    wanted = _Wanted(model, workers, link, steps, _fitting(model, workers, memory_limit_bytes, options))
    swept = wanted.sweep()
    found = wanted.reaching(target, swept)
    kept = wanted.gaining(found or wanted.closest(swept))[:most]
    outlooks = [outlook(model, method, workers, link, steps) for method in kept]
    return Recommendation(
        choices=tuple(_advice(model, workers, ahead, steps) for ahead in outlooks),
        reached=bool(found),
        next_level=wanted.next_level(outlooks[0], swept),
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


def periods_for(steps: int) -> tuple[int, ...]:
    """The periods of which a run of so many steps (0: not known) has a few; the shortest if it has one of it at all."""
    if not steps:
        return PERIODS
    return tuple(p for p in PERIODS if FEWEST_ROUNDS * p <= steps) or tuple(p for p in PERIODS[:1] if p <= steps)


def _fitting(model: Model, workers: int, limit: int | None, options: Sequence[Method]) -> Sequence[Method]:
    if limit is None:
        return options
    sizes = [cost.extra_bytes(model, method, workers, offload=method.offload) for method in options]
    if min(sizes) > limit:
        raise ConfigError(
            f"memory_limit_bytes is {bytes_text(limit)}; the least that any choice adds is {bytes_text(min(sizes))}"
        )
    return [method for method, size in zip(options, sizes, strict=True) if size <= limit]


def sweep(model: Model, workers: int, link: Link, options: Sequence[Method], steps: int = 0) -> Array:
    """[options]: utilisation with atoll, to about a thousandth; over a run if steps are given.

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
        rates = link.bits_per_s * (sizes[0] / np.maximum(sizes, 1.0))
        found[members] = busy(model, first, workers, rates, link, steps)
    return found


# ---------------------------------------------------------------------- what to choose


class _Kind(NamedTuple):
    period: int
    eager: bool
    gradients: bool


def _kind(method: Method) -> _Kind:
    return _Kind(method.period, method.eager, method.gradients)


class _Wanted(NamedTuple):
    """A run on a link, and what there is to choose for it, least risky first."""

    model: Model
    workers: int
    link: Link
    steps: int
    options: Sequence[Method]

    def sweep(self) -> Array:
        """[options]: utilisation, nearly."""
        return sweep(self.model, self.workers, self.link, self.options, self.steps)

    def busy(self, method: Method) -> float:
        """Utilisation, exactly."""
        rates = np.array([self.link.bits_per_s])
        return float(busy(self.model, method, self.workers, rates, self.link, self.steps)[0])

    def reaching(self, target: float, swept: Array) -> list[Method]:
        """Of each period and merge the least risky that reaches the target, least risky first."""
        found: dict[_Kind, Method] = {}
        for n in np.flatnonzero(swept >= target - _NEARLY):
            method = self.options[int(n)]
            if _kind(method) not in found and self.busy(method) >= target:
                found[_kind(method)] = method
        return list(found.values())

    def closest(self, swept: Array) -> list[Method]:
        """The best of each period and merge; of those that are as good as the best, the least risky first."""
        left = swept.copy()
        chosen: list[Method] = []
        while left.max() >= 0:
            method = self.options[int(np.flatnonzero(left >= _AS_GOOD * left.max())[0])]
            chosen.append(method)
            left[[_kind(other) == _kind(method) for other in self.options]] = -1
        return chosen

    def gaining(self, chosen: Sequence[Method]) -> list[Method]:
        """Those that gain something over every less risky one, in the same order."""
        costs = {method: self._cost(method) for method in chosen}
        risk = {method: n for n, method in enumerate(self.options)}
        return [
            method
            for method, mine in costs.items()
            if not any(
                risk[other] < risk[method] and all(t <= m for t, m in zip(theirs, mine, strict=True))
                for other, theirs in costs.items()
            )
        ]

    def _cost(self, method: Method) -> tuple[float, float, float]:
        """What should be small: loss, of which not to know is the worst; bytes; waiting."""
        loss = penalty(self.model, self.workers, method).loss
        sent = cost.bytes_per_step(self.model, method, self.workers)
        return math.inf if loss is None else loss, sent, 1 - self.busy(method)

    def next_level(self, ahead: Outlook, swept: Array) -> str:
        """What it takes to get to the next of the papers' levels."""
        now = ahead.utilisation_of_run
        level = next((level for level in LEVELS if level > now), None)
        if level is None:
            return f"Nothing is left to gain: workers are busy {share_text(now)} of the time."
        first = self._rate_for(ahead, level)
        enough = np.flatnonzero(swept >= level + _NEARLY)
        if not enough.size:
            nobody = "no settings reach"
            return f"{first}; on this link {nobody} it." if first else f"On this link {nobody} {share_text(level)}."
        words = in_words(self.options[enough[0]])
        other = f"it takes other settings: {words[0].lower()}{words[1:]}."
        return f"{first}. On this link {other}" if first else f"For {share_text(level)} {other}"

    def _rate_for(self, ahead: Outlook, level: float) -> str:
        """What the first choice needs for a level; empty if the link has it: then the line is not what is missing."""
        if ahead.utilisation_with_atoll >= level:
            return ""  # but for the end of a run that is too short
        needed = bandwidth_needed(
            self.model, ahead.method, self.workers, level, latency_s=self.link.latency_s, goodput=self.link.goodput
        )
        if math.isinf(needed):
            return (
                f"{share_text(level)} is out of reach of the first of these choices at any bandwidth, for latency alone"
            )
        unit = 10.0 ** (math.floor(math.log10(needed)) - 2)
        enough = Link(math.ceil(needed / unit) * unit)  # to three digits, upwards: less would not do
        if enough.bits_per_s <= self.link.bits_per_s:
            return ""
        return f"{share_text(level)} takes {enough} with the first of these choices"


# ---------------------------------------------------------------------- in words


def _advice(model: Model, workers: int, ahead: Outlook, steps: int) -> Advice:
    method, wait_s = ahead.method, ahead.wait_s_per_period
    loss, source = penalty(model, workers, method)
    every = "step" if method.gradients else f"{method.period} steps"
    waits = f"waits {seconds_text(wait_s)} in every {every}" if wait_s > 0 else "never waits"
    computes = f"is busy {share_text(ahead.utilisation_of_run)} of the {'run' if steps else 'time'}"
    why = f"{in_words(method)}: a worker sends {bytes_text(ahead.bytes_per_step)} a step, {waits}, and {computes}."
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
