"""Plans a run: what every method costs on a link, which one to choose, and settings to start with.

`plan.forecast` answers for one method; here all methods are side by side. `cli.plan.text` shows a plan to people,
`as_json` to programs, and `report.planned` draws it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from atoll._util.checks import check_whole
from atoll.errors import ConfigError
from atoll.plan import cost, paper_grid
from atoll.plan.forecast import Forecast, bandwidth_needed, forecast
from atoll.plan.line import Line
from atoll.plan.method import Method, Model, label
from atoll.plan.recommend import Recommendation, explain, recommend
from atoll.plan.scaling_laws import Defaults, defaults

LONGEST_PERIOD = 10_000
"""Inner steps: the most that can be planned in a few seconds."""
MOST_WORKERS, MOST_STEPS = 4096, 10**12
"""As in run files."""
LEAST_STEP_S, MOST_STEP_S, MOST_PRICE = 1e-6, 1e9, 1e12
"""Bounds within which all sums are finite numbers."""


class WorkerMemory(NamedTuple):
    """Holds the memory of one worker's chips."""

    chips: int = 1
    chip_bytes: float | None = None
    """Bytes of one chip, if known."""


DEFAULT_LINK, UNKNOWN_MEMORY = Line(1e9), WorkerMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Holds what is to be planned."""

    model: Model
    workers: int
    link: Line = DEFAULT_LINK
    methods: tuple[Method, ...] = ()
    step_from: str = "as given"
    """Where the time of a step comes from, in words."""
    tokens: int | None = None
    """Tokens of a step of one worker, if known."""
    steps: int | None = None
    """Inner steps of the run; if unknown, the plan has no totals of a run."""
    price: float | None = None
    """Price of one worker for an hour."""
    target: float = 0.95
    """Utilisation to reach, 0 to 1."""
    memory: WorkerMemory = UNKNOWN_MEMORY
    adapt: Callable[[Method], Method | None] = lambda method: method
    """Returns what a recommended method becomes beside a run file's settings; None if it conflicts with them."""
    left_out: tuple[str, ...] = ()
    """Settings of a run file that the figures do not include, by dotted key."""

    def __post_init__(self) -> None:
        steps = 1 if self.steps is None else self.steps
        periods = [("period", method.period, LONGEST_PERIOD) for method in self.methods]
        for name, value, most in [("workers", self.workers, MOST_WORKERS), ("steps", steps, MOST_STEPS), *periods]:
            check_whole(name, value)
            if value > most:
                raise ConfigError(f"{name} must be at most {most:,} to be planned, got {value:,}")
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
        check_whole("chips", self.memory.chips, why="they compute the steps of one worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Holds what every method costs, by name, and what to choose."""

    request: PlanRequest
    forecasts: Mapping[str, Forecast]
    needed: Mapping[str, Mapping[float, float]]
    """Bits per second for every level, as atoll sends, at the link's latency; inf if no rate is enough."""
    on_grid: Mapping[str, Mapping[float, float | None]]
    """The same as the Streaming paper would print them: `paper_grid.ASSUMPTIONS`. 0 for one worker."""
    recommendation: Recommendation
    defaults: Defaults

    def cost(self, expected: Forecast) -> float | None:
        """Return the price of a whole run of all workers, if it is known."""
        request = self.request
        if request.price is None or request.steps is None:
            return None
        return expected.run_s / 3600 * request.workers * request.price

    def device_bytes(self, expected: Forecast) -> int:
        """Return what a worker holds apart from activations: model, gradients, AdamW's moments, the outer loop's."""
        return cost.training_bytes(self.request.model) + expected.memory_bytes

    def fits(self, expected: Forecast) -> bool | None:
        """Return whether a worker's chips have room for that; None if their memory is not known."""
        chips, chip_bytes = self.request.memory
        return None if chip_bytes is None else self.device_bytes(expected) < chips * chip_bytes


def make_plan(request: PlanRequest) -> Plan:
    """Compute a plan; takes a second or two."""
    model, workers, link, steps = request.model, request.workers, request.link, request.steps or 0
    return Plan(
        request=request,
        forecasts={m.name: forecast(model, m, workers, link, steps) for m in request.methods},
        needed={
            m.name: {level: bandwidth_needed(model, m, workers, level, link) for level in paper_grid.LEVELS}
            for m in request.methods
        },
        on_grid={
            m.name: paper_grid.bandwidth_on_grid(model, m) if workers > 1 else dict.fromkeys(paper_grid.LEVELS, 0.0)
            for m in request.methods
        },
        recommendation=recommend(model, workers, link, request.target, steps=steps, adapt=request.adapt),
        defaults=defaults(model.parameters, workers),
    )


# ---------------------------------------------------------------------- for programs


def as_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as plain values in bits per second, seconds and bytes; what has no finite number is None."""
    request, found = plan.request, plan.recommendation
    values = {
        "model": asdict(request.model) | {"step_from": request.step_from, "tokens_per_step": request.tokens},
        "link": asdict(request.link) | {"text": str(request.link)},
        "workers": request.workers,
        "chips": request.memory.chips,
        "memory_of_a_chip_bytes": request.memory.chip_bytes,
        "steps": request.steps,
        "target": request.target,
        "not_in_the_figures": list(request.left_out),
        "methods": {name: _method_json(plan, name) for name in plan.forecasts},
        "advice": [_choice_json(plan, choice) for choice in found.choices],
        "target_reached": found.reached,
        "next_level": found.next_level,
        "defaults": asdict(plan.defaults),
    }
    return {name: _finite(value) for name, value in values.items()}


def _method_json(plan: Plan, name: str) -> dict[str, Any]:
    return _forecast_json(plan, plan.forecasts[name]) | {
        "bandwidth_for": {f"{100 * level:.0f}": rate for level, rate in plan.on_grid[name].items()},
        "bandwidth_for_assumes": paper_grid.ASSUMPTIONS,
        "bandwidth_needed": {f"{100 * level:.0f}": rate for level, rate in plan.needed[name].items()},
    }


def _choice_json(plan: Plan, choice: Forecast) -> dict[str, Any]:
    why = explain(choice, of_run=plan.request.steps is not None)
    return {"method": choice.method.name, "settings": choice.method.settings(), "why": why} | _forecast_json(
        plan, choice
    )


def _forecast_json(plan: Plan, expected: Forecast) -> dict[str, Any]:
    method, figures = expected.method, {field.name: getattr(expected, field.name) for field in fields(expected)}
    del figures["method"], figures["penalty"]
    if plan.request.steps is None:
        figures |= {"bytes_of_run": None, "run_s": None}
    return {
        "label": label(method),
        "period": method.period,
        "delay": method.delay,
        "codec": method.codec.format,
        **figures,
        "cost": plan.cost(expected),
        "device_bytes": plan.device_bytes(expected),
        "fits": plan.fits(expected),
        "loss_penalty": expected.penalty.loss,
        "source": expected.penalty.source,
    }


def _finite(value: Any) -> Any:
    """Return a value with None for every number in it that is not finite, as JSON has no other."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
