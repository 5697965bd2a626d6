"""A plan: what every method would cost on a link, what to choose, and the settings to begin with.

`plan.outlook` answers for one method. Here are all of them side by side, for people (`commands.plan_words`), for
programs (`as_json`) and for the eye (`report.planned`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

from atoll.checks import check_whole
from atoll.errors import ConfigError
from atoll.plan import paper
from atoll.plan.advise import Recommendation, advise
from atoll.plan.laws import Defaults, defaults
from atoll.plan.link import Link
from atoll.plan.method import FRAGMENT_LAYERS, LABELS, Method, Model, methods
from atoll.plan.outlook import Outlook, bandwidth_needed, outlook
from atoll.plan.simulate import Layers, dealt

LEVELS = paper.LEVELS
"""Utilisations for which a bandwidth is worked out."""
LONGEST_PERIOD = 10_000
"""Inner steps; the simulator looks at every step of several periods."""
OWN = "run"
"""What the method of a run file is called beside the others."""

# ---------------------------------------------------------------------- the time of a step

FLOPS_PER_PARAMETER = 6
"""For every token: 2 forward, 4 backward."""
CHIPS = {
    "v100": 125e12,
    "a100": 312e12,
    "h100": 989e12,
    "h100-pcie": 756e12,
    "h200": 989e12,
    "b200": 2250e12,
    "l4": 121e12,
    "l40s": 362e12,
    "a10": 125e12,
    "a6000": 155e12,
    "rtx3090": 71e12,
    "rtx4090": 165e12,
    "mi250x": 383e12,
    "mi300x": 1307e12,
    "tpu-v4": 275e12,
    "tpu-v5e": 197e12,
    "tpu-v5p": 459e12,
    "tpu-v6e": 918e12,
}
"""Dense FLOP/s in bf16 as the makers state them (V100: fp16)."""


def chip_flops(name: str) -> float:
    """The peak of a chip, FLOP/s."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"chip must be one of {', '.join(CHIPS)}, got {name!r}; for another, give its --flops")
    return CHIPS[name.lower()]


def step_seconds(parameters: int, tokens: int, flops: float, mfu: float) -> float:
    """How long a worker with so many FLOP/s at its peak, of which it makes use of `mfu`, needs for so many tokens."""
    return FLOPS_PER_PARAMETER * parameters * tokens / (flops * mfu)


# ---------------------------------------------------------------------- fragments as they are


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmented(Method):
    """A method whose fragments are known one by one, instead of by their number of equal layers."""

    own_layers: Layers
    """Those of every fragment, from 1."""
    own_values: tuple[int, ...]
    """Parameters of every fragment."""

    def layers(self, model: Model) -> Layers:
        """The layers of every fragment."""
        return self.own_layers

    def values(self, model: Model) -> tuple[int, ...]:
        """Parameters of every fragment."""
        return self.own_values


def in_fragments(method: Method, model: Model, count: int) -> Fragmented:
    """The same with so many fragments, as far as layers can be dealt to them evenly."""
    check_whole("fragments", count)
    if count > model.layers:
        raise ConfigError(f"fragments must be at most {model.layers}, the layers of the model, got {count}")
    layers = dealt(model.layers, count)
    edges = accumulate((len(group) for group in layers), initial=0)
    values = tuple(end - start for start, end in pairwise(model.parameters * e // model.layers for e in edges))
    settings = {name: getattr(method, name) for name in Method.__dataclass_fields__}
    return Fragmented(**settings, own_layers=layers, own_values=values)


def chosen_methods(names: Sequence[str], model: Model, period: int | None, fragments: int | None) -> list[Method]:
    """The papers' methods by name, all if there are none, for this model."""
    found = methods(names, period)
    if fragments is not None:
        return [m if m.each is None else in_fragments(m, model, fragments) for m in found]
    # A model of one or two layers is one fragment, as with `core.fragments.Blocks`.
    fewest = min(FRAGMENT_LAYERS, model.layers)
    return [m if m.each is None else replace(m, each=min(m.each, fewest)) for m in found]


# ---------------------------------------------------------------------- a plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be planned."""

    model: Model
    workers: int
    link: Link
    methods: tuple[Method, ...]
    step_from: str
    """Where the time of a step comes from, in words."""
    tokens: int | None = None
    """Of a step of one worker, if known."""
    steps: int | None = None
    """Inner steps of the run, if known: without it, nothing is said of whole runs."""
    price: float | None = None
    """Of one worker for an hour."""
    target: float = 0.95
    """Utilisation to be reached, 0 to 1."""

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        if not 0 < self.target < 1:
            raise ConfigError(f"target must be a share of the time above 0 and below 1, got {self.target:g}")
        if self.price is not None and not 0 <= self.price < math.inf:
            raise ConfigError(f"price must be a finite number of at least 0, got {self.price:g}")
        if self.steps is not None:
            check_whole("steps", self.steps)
        for method in self.methods:
            if method.period > LONGEST_PERIOD:
                raise ConfigError(
                    f"period must be at most {LONGEST_PERIOD} inner steps to be planned, got {method.period}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What comes out, by the names of the methods."""

    asked: Asked
    outlooks: Mapping[str, Outlook]
    needed: Mapping[str, Mapping[float, float]]
    """Bits per second for every level, as atoll sends, at the link's latency; inf: no rate is enough."""
    on_grid: Mapping[str, Mapping[float, float | None]]
    """The same as the Streaming paper would print them."""
    recommendation: Recommendation
    defaults: Defaults

    def cost(self, name: str) -> float | None:
        """Of a whole run of all workers."""
        asked = self.asked
        if asked.price is None or asked.steps is None:
            return None
        return self.outlooks[name].run_s / 3600 * asked.workers * asked.price


def make(asked: Asked) -> Plan:
    """Work everything out; takes a second or two."""
    model, workers, link = asked.model, asked.workers, asked.link
    return Plan(
        asked=asked,
        outlooks={m.name: outlook(model, m, workers, link, asked.steps or 0) for m in asked.methods},
        needed={
            m.name: {level: bandwidth_needed(model, m, workers, level, latency_s=link.latency_s) for level in LEVELS}
            for m in asked.methods
        },
        on_grid={m.name: paper.on_the_grid(model, m) for m in asked.methods},
        recommendation=advise(model, workers, link, asked.target),
        defaults=defaults(model.parameters, workers),
    )


def label(method: Method) -> str:
    """For people: "DiLoCo, 16 bits"."""
    return LABELS.get(method.name, f"this run, {method.codec.format}")


# ---------------------------------------------------------------------- for programs


def as_json(plan: Plan) -> dict[str, Any]:
    """Plain values; what has no finite number is None. Bits and bytes per second, seconds and bytes, no prefixes."""
    asked = plan.asked
    return {
        "model": plain(asked.model) | {"step_from": asked.step_from, "tokens_per_step": asked.tokens},
        "link": {**plain(asked.link), "text": str(asked.link)},
        "workers": asked.workers,
        "steps": asked.steps,
        "target": asked.target,
        "methods": {name: _method_json(plan, name) for name in plan.outlooks},
        "advice": [_advice_json(advice) for advice in plan.recommendation.choices],
        "target_reached": plan.recommendation.reached,
        "next_level": plan.recommendation.next_level,
        "defaults": plain(plan.defaults),
    }


def _method_json(plan: Plan, name: str) -> dict[str, Any]:
    seen = plan.outlooks[name]
    known = plan.asked.steps is not None
    return {
        **_outlook_json(seen),
        "bytes_of_run": seen.bytes_of_run if known else None,
        "run_s": plain(seen.run_s) if known else None,
        "cost": plan.cost(name),
        "bandwidth_for": {_percent(level): rate for level, rate in plan.on_grid[name].items()},
        "bandwidth_needed": {_percent(level): plain(rate) for level, rate in plan.needed[name].items()},
    }


def _outlook_json(seen: Outlook) -> dict[str, Any]:
    method = seen.method
    return {
        "label": label(method),
        "period": 1 if method.gradients else method.period,
        "delay": 0 if method.gradients else method.delay,
        "codec": method.codec.format,
        **{name: plain(value) for name, value in _fields(seen).items() if name != "method"},
    }


def _advice_json(advice: Any) -> dict[str, Any]:
    seen: Outlook = advice.outlook
    told = {name: plain(value) for name, value in _fields(advice).items() if name != "outlook"}
    of_runs = {"bytes_of_run": None, "run_s": None}  # it was asked for settings, not for a run
    return {"method": seen.method.name, **told, **_outlook_json(seen), **of_runs}


def _percent(level: float) -> str:
    return f"{100 * level:.0f}"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def plain(value: Any) -> Any:
    """A value as JSON has it: dataclasses as tables, None for what is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
