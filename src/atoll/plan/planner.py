"""Plans a run: what every method costs on a link, which one to choose, and settings to start with.

`plan.forecast` answers for one method; here all methods are side by side. `cli.plan.text` shows a plan to people,
`as_json` to programs, and `report.planned` draws it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any, NamedTuple

from atoll._util.checks import check_whole
from atoll.errors import ConfigError
from atoll.plan import cost, paper_grid
from atoll.plan.forecast import Forecast, bandwidth_needed, forecast
from atoll.plan.line import Line
from atoll.plan.loss_penalty import Penalty, penalty
from atoll.plan.method import Method, Model, label
from atoll.plan.recommend import Advice, Recommendation, recommend
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


UNKNOWN_MEMORY = WorkerMemory()


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Holds what is to be planned."""

    model: Model
    workers: int
    link: Line
    methods: tuple[Method, ...]
    step_from: str
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
        check_whole("chips", self.memory.chips, why="they compute the steps of one worker")
        for method in self.methods:
            if method.period > LONGEST_PERIOD:
                raise ConfigError(
                    f"period must be at most {LONGEST_PERIOD} inner steps to be planned, got {method.period}"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Holds what every method costs, by name, and what to choose."""

    request: PlanRequest
    forecasts: Mapping[str, Forecast]
    penalties: Mapping[str, Penalty]
    """How much higher the papers' losses ended than data-parallel's."""
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
        penalties={m.name: penalty(model, workers, m) for m in request.methods},
        needed={
            m.name: {
                level: bandwidth_needed(model, m, workers, level, latency_s=link.latency_s, goodput=link.goodput)
                for level in paper_grid.LEVELS
            }
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
    request = plan.request
    return {
        "model": _plain(request.model) | {"step_from": request.step_from, "tokens_per_step": request.tokens},
        "link": {**_plain(request.link), "text": str(request.link)},
        "workers": request.workers,
        "chips": request.memory.chips,
        "memory_of_a_chip_bytes": request.memory.chip_bytes,
        "steps": request.steps,
        "target": request.target,
        "not_in_the_figures": list(request.left_out),
        "methods": {name: _method_json(plan, name) for name in plan.forecasts},
        "advice": [_advice_json(plan, advice) for advice in plan.recommendation.choices],
        "target_reached": plan.recommendation.reached,
        "next_level": plan.recommendation.next_level,
        "defaults": _plain(plan.defaults),
    }


def _method_json(plan: Plan, name: str) -> dict[str, Any]:
    loss, source = plan.penalties[name]
    return {
        **_forecast_json(plan, plan.forecasts[name]),
        "loss_penalty": loss,
        "source": source,
        "bandwidth_for": {_percent(level): rate for level, rate in plan.on_grid[name].items()},
        "bandwidth_for_assumes": paper_grid.ASSUMPTIONS,
        "bandwidth_needed": {_percent(level): _plain(rate) for level, rate in plan.needed[name].items()},
    }


def _advice_json(plan: Plan, advice: Advice) -> dict[str, Any]:
    method = advice.forecast.method
    told = {name: _plain(value) for name, value in _fields(advice).items() if name != "forecast"}
    return {"method": method.name, "settings": method.settings(), **told, **_forecast_json(plan, advice.forecast)}


def _forecast_json(plan: Plan, expected: Forecast) -> dict[str, Any]:
    method, steps_known = expected.method, plan.request.steps is not None
    return {
        "label": label(method),
        "period": method.period,
        "delay": method.delay,
        "codec": method.codec.format,
        **{name: _plain(value) for name, value in _fields(expected).items() if name != "method"},
        "bytes_of_run": expected.bytes_of_run if steps_known else None,
        "run_s": _plain(expected.run_s) if steps_known else None,
        "cost": plan.cost(expected),
        "device_bytes": plan.device_bytes(expected),
        "fits": plan.fits(expected),
    }


def _percent(level: float) -> str:
    return f"{100 * level:.0f}"


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__dataclass_fields__}


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: dataclasses as tables, None for what is not finite."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(each) for name, each in asdict(value).items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    return value
