"""Recommends settings for a link: the least risky that keep workers busy enough.

Risk is the distance from common practice, in this order: data-parallel; the outer loop, first by a shorter period, then
by a smaller delay, then by more bits; at last Eager Updates. The order does not depend on the link, so a better link
never needs a riskier choice. A riskier choice is offered as well if it gains something over all less risky ones: loss
(`plan.loss_penalty`), bytes or utilisation.
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
from atoll.plan.forecast import Forecast, bandwidth_needed, forecast, utilisation
from atoll.plan.line import Line
from atoll.plan.method import Method, Model
from atoll.plan.paper_grid import LEVELS

PERIODS = (5, 10, 20, 30, 50, 100, 200, 300, 500, 1000)
EACH: tuple[int | None, ...] = (None, 3, 6, 2, 1)
"""Layers of a fragment, most preferred first: the whole model, then the papers' three."""
DELAYS = (0, 1, 2, 3, 5, 10)
"""The Streaming paper advises up to 5, and saw less than 0.2 % up to 10."""
FORMATS = ("fp32", "bf16", "int8", "e3m0")
"""The papers' 4-bit format stands for all of them: the others take as many bytes."""
FEWEST_ROUNDS = 5
"""Periods that a run must have for a period to be advised."""

_SWEEP_ERROR = 1e-3  # a sweep rounds bytes; what it sees this far below the target is computed exactly
_AS_GOOD = 0.99  # of the best: then risk decides


@dataclass(frozen=True, slots=True, kw_only=True)
class Recommendation:
    """Holds the recommended choices, and what more would take."""

    choices: tuple[Forecast, ...]
    """The choices that reach the target, least risky first, with distinct periods and merges; if none does, those that
    come closest, best first. Empty for one worker, which exchanges nothing."""
    reached: bool
    """Whether the choices reach the target utilisation: over the run if its steps are known, else once under way."""
    next_level: str
    """What the next of 50, 80, 90, 95 and 99 % takes, in words."""


def recommend(
    model: Model,
    workers: int,
    link: Line,
    target: float = 0.95,
    *,
    steps: int = 0,
    most: int = 3,
    adapt: Callable[[Method], Method | None] = lambda method: method,
) -> Recommendation:
    """Recommend settings with which workers compute for at least `target` of their time, or come as close as possible.

    Args:
        model: The model to train.
        workers: Number of workers.
        link: Every worker's line.
        target: Utilisation to reach, above 0 and below 1.
        steps: Inner steps of the run. If known, the utilisation is that of the whole run, and only periods of which
            the run has a few are recommended.
        most: The most choices to return.
        adapt: Returns what a method becomes beside settings that are given, or None to rule it out.

    Raises:
        ConfigError: A number is out of its range.
    """
    check_whole("workers", workers)
    check_whole("most", most, why="it counts choices")
    check_whole("steps", steps, least=0)
    if not 0 < target < 1:
        raise ConfigError(f"target must be between 0 and 1, both excluded, got {target!r}: it is a part of the time")
    if workers == 1:
        return Recommendation(choices=(), reached=True, next_level="One worker has nothing to exchange.")
    options = [fit for method in candidates(model, periods_for(steps)) if (fit := adapt(method)) is not None]
    if not options:
        return Recommendation(choices=(), reached=False, next_level="No method goes with the settings that are given.")
    search = _Search(model, workers, link, steps, options, sweep(model, workers, link, options, steps))
    found = search.reaching(target)
    choices = tuple(search.gaining(found or search.closest())[:most])
    return Recommendation(choices=choices, reached=bool(found), next_level=search.next_level(choices[0]))


# ---------------------------------------------------------------------- what there is to choose


def candidates(model: Model, periods: Iterable[int] = PERIODS) -> Iterator[Method]:
    """Yield every method that is considered, least risky first."""
    for name in FORMATS[:2]:
        yield Method(name="data-parallel", period=1, gradients=True, codec=Codec(name))
    parts = [each for each in EACH if each is None or each < model.layers]
    for period in periods:
        # No paper measured a blend with a round that returns when more than a third of the next period is over.
        for delay in (delay for delay in DELAYS if delay <= max(1, period // 3)):
            for codec in map(Codec, FORMATS):
                for each in parts:
                    name = "diloco" if each is None else "streaming"
                    yield Method(name=name, period=period, each=each, delay=delay, codec=codec)
    for period in periods:
        for codec in map(Codec, FORMATS):
            for each in parts:
                yield Method(name="eager", period=period, each=each, delay=period, codec=codec, eager=True)


def periods_for(steps: int) -> tuple[int, ...]:
    """Return the periods of which a run has a few (0 steps: all), or the shortest if the run has one of it at all."""
    if not steps:
        return PERIODS
    return tuple(p for p in PERIODS if FEWEST_ROUNDS * p <= steps) or tuple(p for p in PERIODS[:1] if p <= steps)


def sweep(model: Model, workers: int, link: Line, options: Sequence[Method], steps: int = 0) -> Array:
    """Return the utilisation with atoll to about a thousandth, [options]; over a run if steps are given.

    Formats share a simulation: half the bytes on a line take as long as the same bytes on a line twice as fast.
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
        found[members] = utilisation(model, first, workers, rates, link, steps)
    return found


# ---------------------------------------------------------------------- what to choose


def _kind(method: Method) -> tuple[int, bool, bool]:
    """Return what distinguishes choices: at most one of a kind is recommended."""
    return method.period, method.eager, method.gradients


class _Search(NamedTuple):
    """Selects among options, least risky first."""

    model: Model
    workers: int
    link: Line
    steps: int
    options: Sequence[Method]
    swept: Array
    """Utilisation to about a thousandth, [options]."""

    def exact(self, method: Method) -> Forecast:
        """Return exact figures of an option."""
        return forecast(self.model, method, self.workers, self.link, self.steps)

    def reaching(self, target: float) -> list[Forecast]:
        """Return the least risky option of each kind that reaches the target, least risky first."""
        found: dict[tuple[int, bool, bool], Forecast] = {}
        for n in np.flatnonzero(self.swept >= target - _SWEEP_ERROR):
            kind = _kind(self.options[int(n)])
            if kind not in found and (expected := self.exact(self.options[int(n)])).utilisation_of_run >= target:
                found[kind] = expected
        return list(found.values())

    def closest(self) -> list[Forecast]:
        """Return the best option of each kind, best first; of those as good as the best, the least risky."""
        left = self.swept.copy()
        chosen: list[Forecast] = []
        while left.max() >= 0:
            method = self.options[int(np.flatnonzero(left >= _AS_GOOD * left.max())[0])]
            chosen.append(self.exact(method))
            left[[_kind(other) == _kind(method) for other in self.options]] = -1
        return chosen

    def gaining(self, chosen: Sequence[Forecast]) -> list[Forecast]:
        """Return those that gain loss, bytes or utilisation over every less risky one, in the same order."""
        risk = [self.options.index(expected.method) for expected in chosen]
        costs = np.array([
            (math.inf if e.penalty.loss is None else e.penalty.loss, e.bytes_per_step, 1 - e.utilisation_of_run)
            for e in chosen
        ])  # fmt: skip
        return [
            mine
            for n, mine in enumerate(chosen)
            if not any(risk[other] < risk[n] and (costs[other] <= costs[n]).all() for other in range(len(chosen)))
        ]

    def next_level(self, first: Forecast) -> str:
        """Say what it takes to get from the first choice to the next of the papers' levels."""
        now = first.utilisation_of_run
        level = next((level for level in LEVELS if level > now), None)
        if level is None:
            return f"Nothing is left to gain: workers are busy {share_text(now)} of the time."
        faster = self._rate_for(first, level)
        enough = np.flatnonzero(self.swept >= level + _SWEEP_ERROR)
        if not enough.size:
            nothing = "no settings reach"
            return f"{faster}; on this link {nothing} it." if faster else f"On this link {nothing} {share_text(level)}."
        text = describe(self.options[enough[0]])
        other = f"it takes other settings: {text[0].lower()}{text[1:]}."
        return f"{faster}. On this link {other}" if faster else f"For {share_text(level)} {other}"

    def _rate_for(self, first: Forecast, level: float) -> str:
        """Say which rate the first choice needs for a level; empty if the link has it, so that the run is too short."""
        if first.utilisation_with_atoll >= level:
            return ""
        needed = bandwidth_needed(self.model, first.method, self.workers, level, self.link)
        if math.isinf(needed):
            return (
                f"{share_text(level)} is out of reach of the first of these choices at any bandwidth, for latency alone"
            )
        unit = 10.0 ** (math.floor(math.log10(needed)) - 2)
        enough = Line(math.ceil(needed / unit) * unit)  # to three digits, upwards: less would not do
        if enough.bits_per_s <= self.link.bits_per_s:
            return ""
        return f"{share_text(level)} takes {enough} with the first of these choices"


# ---------------------------------------------------------------------- in words


def explain(expected: Forecast, *, of_run: bool) -> str:
    """Return what a choice does, in a sentence; `of_run`: over a whole run, whose steps are known."""
    method, wait_s = expected.method, expected.wait_s_per_period
    every = "step" if method.gradients else f"{method.period} steps"
    waits = f"waits {seconds_text(wait_s)} in every {every}" if wait_s > 0 else "never waits"
    computes = f"is busy {share_text(expected.utilisation_of_run)} of the {'run' if of_run else 'time'}"
    return f"{describe(method)}: a worker sends {bytes_text(expected.bytes_per_step)} a step, {waits}, and {computes}."


def describe(method: Method) -> str:
    """Describe a method: 'In fragments of 3 layers every 100 steps, in e3m0, hidden behind 1 step'."""
    if method.gradients:
        return f"Gradients on every step, in {method.codec.format}"
    layers = f"{method.each} layer{'s' if method.each != 1 else ''}"
    what = "Everything at once" if method.each is None else f"In fragments of {layers}"
    steps = f"{method.delay} step{'s' if method.delay != 1 else ''}"
    hidden = "eagerly, behind all of them" if method.eager else f"hidden behind {steps}" if method.delay else "waiting"
    return f"{what} every {method.period} steps, in {method.codec.format}, {hidden}"
