"""A plan: what every method would cost on a link, what to choose, and the settings to begin with.

`plan.outlook` answers for one method. Here are all of them side by side, for people (`commands.plan_words`), for
programs (`as_json`) and for the eye (`report.planned`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from typing import Any, NamedTuple

from atoll._util.checks import check_whole
from atoll.errors import ConfigError
from atoll.plan import cost, paper
from atoll.plan.advise import Advice, Recommendation, advise
from atoll.plan.laws import Defaults, defaults
from atoll.plan.link import Link
from atoll.plan.measured import Penalty, penalty
from atoll.plan.method import FRAGMENT_LAYERS, LABELS, Layers, Method, Model, dealt, methods, shares, with_rest
from atoll.plan.outlook import Outlook, bandwidth_needed, outlook

LONGEST_PERIOD = 10_000
"""Inner steps; the simulator looks at every step of several periods."""
MOST_WORKERS, MOST_STEPS = 4096, 10**12
"""As in run files."""
LEAST_STEP_S, MOST_STEP_S, MOST_PRICE = 1e-6, 1e9, 1e12
"""No step is so short; beyond, sums would not be numbers any more."""
OWN = "run"
"""What the method of a run file is called beside the others."""

# ---------------------------------------------------------------------- the time of a step

FLOPS_PER_PARAMETER = 6
"""For every token: 2 forward, 4 backward."""


class Chip(NamedTuple):
    """What a maker states."""

    flops: float
    """Dense FLOP/s in bf16 (V100: fp16)."""
    memory_bytes: float
    """Of the largest version."""


CHIPS = {
    "v100": Chip(125e12, 32e9),
    "a100": Chip(312e12, 80e9),
    "h100": Chip(989e12, 80e9),
    "h100-pcie": Chip(756e12, 80e9),
    "h200": Chip(989e12, 141e9),
    "b200": Chip(2250e12, 180e9),
    "l4": Chip(121e12, 24e9),
    "l40s": Chip(362e12, 48e9),
    "a10": Chip(125e12, 24e9),
    "a6000": Chip(155e12, 48e9),
    "rtx3090": Chip(71e12, 24e9),
    "rtx4090": Chip(165e12, 24e9),
    "mi250x": Chip(383e12, 128e9),
    "mi300x": Chip(1307e12, 192e9),
    "tpu-v4": Chip(275e12, 32e9),
    "tpu-v5e": Chip(197e12, 16e9),
    "tpu-v5p": Chip(459e12, 95e9),
    "tpu-v6e": Chip(918e12, 32e9),
}


def chip_named(name: str) -> Chip:
    """A chip by its name, in any case."""
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
    """The same with so many fragments of layers, dealt as evenly as can be; what is in no layer is one more."""
    check_whole("fragments", count)
    if count > model.layers:
        raise ConfigError(f"fragments must be at most {model.layers}, the layers of the model, got {count}")
    layers = dealt(model.layers, count)
    settings = {name: getattr(method, name) for name in Method.__dataclass_fields__}
    return Fragmented(**settings, own_layers=with_rest(layers, model), own_values=shares(layers, model))


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
    memory_bytes: float | None = None
    """Of one chip of a worker, if known."""
    chips: int = 1
    """Of a worker."""
    suited: Callable[[Method], Method | None] = lambda method: method
    """What a method that may be advised becomes beside a run file's settings; None if it cannot go with them."""
    left_out: tuple[str, ...] = ()
    """Settings of a run file that are not in the figures, by dotted key."""

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        if self.workers > MOST_WORKERS:
            raise ConfigError(f"workers must be at most {MOST_WORKERS}, got {self.workers}")
        if not LEAST_STEP_S <= self.model.step_s <= MOST_STEP_S:
            span = f"from {LEAST_STEP_S:.0e} to {MOST_STEP_S:.0e} seconds"
            raise ConfigError(f"the time of a step must be {span}, got {self.model.step_s:g}")
        if self.model.parameters < self.model.layers:
            raise ConfigError(
                f"params must be at least as many as layers ({self.model.layers}), got {self.model.parameters}"
            )
        if not 0 < self.target < 1:
            raise ConfigError(f"target must be a share of the time above 0 and below 1, got {self.target:g}")
        if self.price is not None and not 0 <= self.price <= MOST_PRICE:
            raise ConfigError(f"price must be a number from 0 to {MOST_PRICE:.0e}, got {self.price:g}")
        if self.price is not None and self.steps is None:
            raise ConfigError("price is for a whole run: give --steps, or --tokens (of a step of one worker)")
        if self.steps is not None:
            check_whole("steps", self.steps)
            if self.steps > MOST_STEPS:
                raise ConfigError(f"steps must be at most {MOST_STEPS:.0e}, got {self.steps:.3g}")
        check_whole("chips", self.chips, why="they compute the steps of one worker")
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
    penalties: Mapping[str, Penalty]
    """How much higher the papers' losses ended than data-parallel's."""
    needed: Mapping[str, Mapping[float, float]]
    """Bits per second for every level, as atoll sends, at the link's latency; inf: no rate is enough."""
    on_grid: Mapping[str, Mapping[float, float | None]]
    """The same as the Streaming paper would print them: `paper.ASSUMED`. 0 for one worker, who needs no line."""
    recommendation: Recommendation
    defaults: Defaults

    def cost(self, seen: Outlook) -> float | None:
        """Of a whole run of all workers."""
        asked = self.asked
        if asked.price is None or asked.steps is None:
            return None
        return seen.run_s / 3600 * asked.workers * asked.price

    def device_bytes(self, seen: Outlook) -> int:
        """What a worker holds before activations: parameters, gradients, AdamW's moments, and what the method adds."""
        return cost.training_bytes(self.asked.model) + seen.memory_bytes

    def fits(self, seen: Outlook) -> bool | None:
        """Whether that is less than all chips of a worker have together; None: nobody has said what they have."""
        asked = self.asked
        return None if asked.memory_bytes is None else self.device_bytes(seen) < asked.chips * asked.memory_bytes


def make(asked: Asked) -> Plan:
    """Work everything out; takes a second or two."""
    model, workers, link, steps = asked.model, asked.workers, asked.link, asked.steps or 0
    return Plan(
        asked=asked,
        outlooks={m.name: outlook(model, m, workers, link, steps) for m in asked.methods},
        penalties={m.name: penalty(model, workers, m) for m in asked.methods},
        needed={
            m.name: {
                level: bandwidth_needed(model, m, workers, level, latency_s=link.latency_s, goodput=link.goodput)
                for level in paper.LEVELS
            }
            for m in asked.methods
        },
        on_grid={
            m.name: paper.on_the_grid(model, m) if workers > 1 else dict.fromkeys(paper.LEVELS, 0.0)
            for m in asked.methods
        },
        recommendation=advise(model, workers, link, asked.target, steps=steps, suited=asked.suited),
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
        "chips": asked.chips,
        "memory_of_a_chip_bytes": asked.memory_bytes,
        "steps": asked.steps,
        "target": asked.target,
        "not_in_the_figures": list(asked.left_out),
        "methods": {name: _method_json(plan, name) for name in plan.outlooks},
        "advice": [_advice_json(plan, advice) for advice in plan.recommendation.choices],
        "target_reached": plan.recommendation.reached,
        "next_level": plan.recommendation.next_level,
        "defaults": plain(plan.defaults),
    }


def _method_json(plan: Plan, name: str) -> dict[str, Any]:
    loss, source = plan.penalties[name]
    return {
        **_outlook_json(plan, plan.outlooks[name]),
        "loss_penalty": loss,
        "source": source,
        "bandwidth_for": {_percent(level): rate for level, rate in plan.on_grid[name].items()},
        "bandwidth_for_assumes": paper.ASSUMED,
        "bandwidth_needed": {_percent(level): plain(rate) for level, rate in plan.needed[name].items()},
    }


def _advice_json(plan: Plan, advice: Advice) -> dict[str, Any]:
    seen = advice.outlook
    told = {name: plain(value) for name, value in _fields(advice).items() if name != "outlook"}
    return {"method": seen.method.name, "settings": seen.method.settings(), **told, **_outlook_json(plan, seen)}


def _outlook_json(plan: Plan, seen: Outlook) -> dict[str, Any]:
    method, known = seen.method, plan.asked.steps is not None
    return {
        "label": label(method),
        "period": method.period,
        "delay": method.delay,
        "codec": method.codec.format,
        **{name: plain(value) for name, value in _fields(seen).items() if name != "method"},
        "bytes_of_run": seen.bytes_of_run if known else None,
        "run_s": plain(seen.run_s) if known else None,
        "cost": plan.cost(seen),
        "device_bytes": plan.device_bytes(seen),
        "fits": plan.fits(seen),
    }


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
