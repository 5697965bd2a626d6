"""A delta that has exploded is left out, its worker starts anew, and runs without one keep their bits."""

import copy
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import atoll
from atoll.core.fragments import Balanced
from atoll.core.outliers import SMALLEST, Norms, Size, outliers
from atoll.errors import ConfigError, LinkError
from atoll.link.local import Absence, Faults
from atoll.outer.presets import Sync
from atoll.outer.stats import Applied

norms = st.floats(0, 1e30)


# ---------------------------------------------------------------------- the judgement


@given(st.lists(norms, min_size=1, max_size=6), st.floats(1.1, 100))
def test_a_delta_as_large_as_its_own_last_ones_always_counts(found: list[float], ratio: float) -> None:
    assert not any(outliers([Size(norm, norm) for norm in found], ratio))


@given(st.lists(st.tuples(norms, norms), min_size=1, max_size=6), st.floats(1.1, 100))
def test_the_smallest_is_only_left_out_for_its_own_past_and_nobody_is_without_a_ratio(
    found: list[tuple[float, float]], ratio: float
) -> None:
    sizes = [Size(*size) for size in found]
    smallest = min(range(len(sizes)), key=lambda number: sizes[number].norm)
    norm, usual = sizes[smallest]
    assert outliers(sizes, ratio)[smallest] == (0 < ratio**3 * usual < norm)
    assert not any(outliers(sizes, None))


@pytest.mark.parametrize(
    ("sizes", "left_out"),
    [
        ([(100.1, 10), (10, 10)], [True, False]),
        ([(99.9, 10), (10, 10)], [False, False]),
        ([(100.1, 1), (50, 1)], [False, False]),  # all have grown together
        ([(50, 1), (1, 1), (1, 1), (50, 1)], [True, False, False, True]),
        ([(999, 0), (1, 1)], [False, False]),  # no past: only beyond the third power
        ([(1001, 0), (1, 1)], [True, False]),
        ([(1e30, 0)], [False]),  # one alone, without a past
        ([(999, 1)], [False]),
        ([(1001, 1)], [True]),
        ([(999, 1), (999, 1)], [False, False]),  # all together, up to the third power
        ([(1001, 1), (1001, 1), (1001, 0)], [True, True, False]),
        ([(5, 0), (0, 0)], [False, False]),  # nothing to compare with
        ([(1e6, 1), (0, 0)], [True, False]),
    ],
)
def test_what_is_left_out(sizes: list[tuple[float, float]], left_out: list[bool]) -> None:
    assert outliers([Size(*size) for size in sizes], 10.0) == left_out


def test_a_past_is_the_largest_of_eight_and_is_forgotten_after_two_outliers() -> None:
    past = Norms()
    assert past.usual == 0
    for norm in (9.0, 1, 1, 1, 1, 1, 1, 1):
        past.counted(norm)
    assert past.usual == 9
    past.counted(2)
    assert past.usual == 2
    past.left_out()
    again = Norms()
    again.load_state_dict(past.state_dict())
    assert again.usual == 2
    again.left_out()
    assert again.usual == 0


def test_rounding_is_no_past() -> None:
    past = Norms(floor=0.01)
    past.counted(0.01)
    assert past.usual == 0 and not past.is_runaway(1.0, 10.0)
    past.counted(0.02)
    again = Norms()
    again.load_state_dict(past.state_dict())
    again.counted(0.001)
    assert again.usual == 0.02 and again.state_dict() == past.state_dict()


def test_a_runaway_is_known_by_its_own_past() -> None:
    past = Norms()
    assert not past.is_runaway(1e30, 10.0)
    past.counted(1.0)
    assert not past.is_runaway(999.0, 10.0)
    assert past.is_runaway(1001.0, 10.0)
    past.counted(2.0)
    past.counted(1.0)
    assert not past.is_runaway(20.0, 10.0)
    assert past.is_runaway(20.1, 10.0)


# ---------------------------------------------------------------------- runs


def target(x: torch.Tensor) -> torch.Tensor:
    return (x @ torch.linspace(-1, 1, 16))[:, None]


class Run:
    """A regression trained by several workers; the parameters of one may be spoilt once."""

    def __init__(self, sync: Sync, workers: int, *, optimizer: type = torch.optim.AdamW, **loop: object) -> None:
        torch.manual_seed(0)
        start = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))
        self.models = [copy.deepcopy(start) for _ in range(workers)]
        self.observed: list[Applied] = []
        faults = loop.pop("faults", None)
        links = atoll.local(workers, faults=faults, timeout_s=20)  # type: ignore[arg-type]
        self.loops = [
            atoll.OuterLoop(model, sync, link, observer=self.observed.append if not link.worker else None, **loop)  # type: ignore[arg-type]
            for model, link in zip(self.models, links, strict=True)
        ]
        self.crew = atoll.Lockstep(self.loops)
        self.inner = [optimizer(model.parameters(), lr=0.01) for model in self.models]
        self.data = [torch.Generator().manual_seed(100 + worker) for worker in range(workers)]

    def train(self, steps: int, *, spoil: int = 0, scale: float = 1e6, rate_from: int = 0) -> None:
        """Make some steps; after step `spoil`, worker 1 gets noise; from `rate_from` on, all learn 40 times faster."""
        for _ in range(steps):
            step = self.loops[0].steps + 1
            for model, inner, data in zip(self.models, self.inner, self.data, strict=True):
                if step == rate_from:
                    inner.param_groups[0]["lr"] *= 40
                x = torch.randn(64, 16, generator=data)
                inner.zero_grad()
                (model(x) - target(x)).square().mean().backward()
                inner.step()
            if step == spoil:
                with torch.no_grad():
                    for parameter in self.models[1].parameters():
                        parameter.add_(torch.randn(parameter.shape, generator=self.data[1]) * scale)
            self.crew.step()

    def held_out(self) -> float:
        x = torch.randn(2048, 16, generator=torch.Generator().manual_seed(7))
        with torch.no_grad():
            return float((self.models[0](x) - target(x)).square().mean())


def syncs(codec: str) -> Iterator[Sync]:
    outer = atoll.Nesterov(0.5, 0.5)
    yield atoll.DiLoCo(period=10, codec=codec, outer=outer)
    yield atoll.Streaming(period=10, fragments=Balanced(count=2), codec=codec, outer=outer)
    yield atoll.Streaming(period=10, fragments=Balanced(count=2), delay=6, codec=codec, outer=outer)
    yield atoll.Eager(period=10, codec=codec, outer=outer)
    yield atoll.Delayed(period=10, codec=codec, outer=outer)


@pytest.mark.thorough_after(5)
@pytest.mark.parametrize(
    ("sync", "workers"), [*((sync, 2) for sync in syncs("fp32")), *((sync, 5) for sync in syncs("e3m0"))], ids=str
)
def test_one_exploding_delta_is_left_out_and_the_run_goes_on(sync: Sync, workers: int) -> None:
    spoilt = Run(sync, workers)
    spoilt.train(60, spoil=37)
    spoilt.crew.finish()
    held_out = spoilt.held_out()
    undisturbed = Run(sync, workers)
    undisturbed.train(60)
    undisturbed.crew.finish()
    assert held_out < 1.5 * undisturbed.held_out() + 0.05
    counters = spoilt.loops[1].counters
    assert counters.rounds_outlier >= 1
    assert counters.roll_backs >= 1
    assert counters.rounds_missed == 0
    for loop in spoilt.loops:
        assert loop.counters.outliers_seen == counters.rounds_outlier
        assert loop is spoilt.loops[1] or loop.counters.roll_backs == loop.counters.rounds_outlier == 0
    assert {worker for applied in spoilt.observed for worker in applied.outliers} == {1}
    for model in spoilt.models:
        for mine, first in zip(model.parameters(), spoilt.models[0].parameters(), strict=True):
            assert torch.equal(mine, first)


@pytest.mark.parametrize("workers", [2, 4])
def test_when_nearly_all_explode_at_once_none_counts(workers: int) -> None:
    run = Run(next(syncs("fp32")), workers)
    run.train(36)
    with torch.no_grad():
        for model in run.models[: max(2, workers - 1)]:
            for parameter in model.parameters():
                parameter.add_(1e6)
    run.train(24)
    assert run.held_out() < 0.1
    assert sum(loop.counters.rounds_outlier for loop in run.loops) == run.loops[0].counters.outliers_seen > 1


@pytest.mark.parametrize("sync", list(syncs("fp32")), ids=str)
def test_one_that_is_alone_is_judged_by_its_past(sync: Sync) -> None:
    run = Run(sync, 2, faults=Faults(absences=(Absence(worker=0, first=31, last=55),)))
    run.train(70, spoil=37)
    run.crew.finish()
    assert run.held_out() < 10


def test_a_small_fragment_is_judged_less_strictly() -> None:
    sync = atoll.Streaming(period=10, fragments=Balanced(count=3), outer=atoll.Nesterov(0.5, 0.5))
    run = Run(sync, 2)
    assert min(window.numel for window in run.loops[0]._windows) < SMALLEST
    for spoil in range(51, 61):
        run = Run(sync, 2)
        run.train(70, spoil=spoil)
        assert run.held_out() < 1


def test_an_outlier_of_the_last_exchange_is_counted() -> None:
    run = Run(next(syncs("fp32")), 2)
    run.train(45, spoil=44)
    run.crew.finish()
    assert [loop.counters.outliers_seen for loop in run.loops] == [1, 1]
    assert [loop.counters.rounds_outlier for loop in run.loops] == [0, 1]
    assert [loop.counters.rounds_left_out for loop in run.loops] == [0, 1]


def test_an_outlier_is_not_usual_afterwards() -> None:
    run = Run(next(syncs("fp32")), 2)
    run.train(40, spoil=37)
    run.train(10, spoil=47)
    assert run.loops[1].counters.rounds_outlier == 2
    assert run.held_out() < 10


@pytest.mark.parametrize("sync", list(syncs("fp32"))[1:], ids=str)
def test_a_runaway_starts_anew_in_the_next_step_and_does_not_wait_for_the_round(sync: Sync) -> None:
    run = Run(sync, 2)
    run.train(40, spoil=40)
    run.train(1)
    assert max(float(parameter.detach().abs().max()) for parameter in run.models[1].parameters()) < 100


@pytest.mark.thorough_after(4)
@pytest.mark.parametrize("sync", [*syncs("fp32"), *syncs("e3m0")], ids=str)
def test_what_explodes_just_before_the_end_is_left_out_of_the_last_exchange_too(sync: Sync) -> None:
    run = Run(sync, 2)
    run.train(40, spoil=39)
    run.crew.finish()
    assert run.held_out() < 100


@pytest.mark.parametrize("workers", [2, 4])
def test_without_an_outlier_the_guard_changes_no_bit(workers: int) -> None:
    runs = [Run(next(syncs("e3m0")), workers, guard=atoll.Guard(outlier_ratio=ratio)) for ratio in (10.0, None)]
    for run in runs:
        run.train(25)
    for mine, theirs in zip(*(run.models[0].parameters() for run in runs), strict=True):
        assert torch.equal(mine, theirs)
    assert runs[0].loops[0].counters.outliers_seen == 0


@pytest.mark.parametrize("sync", list(syncs("fp32")), ids=str)
def test_all_may_grow_together(sync: Sync) -> None:
    run = Run(sync, 3, optimizer=torch.optim.SGD)
    for inner in run.inner:
        inner.param_groups[0]["lr"] = 5e-4
    run.train(60, rate_from=41)
    assert run.loops[0].counters.outliers_seen == 0


def test_with_the_guard_off_an_explosion_counts() -> None:
    run = Run(next(syncs("fp32")), 2, guard=atoll.Guard(outlier_ratio=None))
    run.train(40, spoil=35)
    assert run.held_out() > 1e3


@pytest.mark.parametrize("ratio", [1.0, 0, -3, float("nan"), float("inf"), 1e200, "10"])
def test_a_ratio_that_makes_no_sense_is_refused(ratio: object) -> None:
    with pytest.raises(ConfigError, match="outlier_ratio must be a number above 1"):
        atoll.Guard(outlier_ratio=ratio)  # type: ignore[arg-type]


def test_workers_with_different_ratios_are_refused() -> None:
    links = atoll.local(2)
    loops = [
        atoll.OuterLoop(nn.Linear(2, 2), atoll.DiLoCo(period=2), link, guard=atoll.Guard(outlier_ratio=ratio))
        for link, ratio in zip(links, (10.0, None), strict=True)
    ]
    loops[0].join()
    with pytest.raises(LinkError, match=r"outlier_ratio: None against 10\.0"):
        loops[1].join()


def test_a_ratio_may_be_a_whole_number() -> None:
    for link, ratio in zip(atoll.local(2), (10, 10.0), strict=True):
        model = nn.Linear(2, 2)
        nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
        atoll.OuterLoop(model, atoll.DiLoCo(period=2), link, guard=atoll.Guard(outlier_ratio=ratio)).join()


def test_a_lost_payload_is_not_a_past_and_no_outlier() -> None:
    run = Run(next(syncs("fp32")), 3, faults=Faults(drop=0.5, seed=3))
    run.train(80)
    assert run.loops[0].counters.outliers_seen == 0
    assert sum(loop.counters.rounds_missed for loop in run.loops) > 0


@pytest.mark.parametrize("sync", list(syncs("e3m0")), ids=str)
def test_what_is_usual_is_resumed(sync: Sync) -> None:
    whole = Run(sync, 2)
    whole.train(34)
    states = [(loop.state_dict(), copy.deepcopy(loop.model.state_dict())) for loop in whole.loops]
    inner = [copy.deepcopy(optimizer.state_dict()) for optimizer in whole.inner]
    data = [generator.get_state() for generator in whole.data]
    whole.train(26, spoil=37)
    resumed = Run(sync, 2)
    for number, (outer, model) in enumerate(states):
        resumed.models[number].load_state_dict(model)
        resumed.inner[number].load_state_dict(inner[number])
        resumed.data[number].set_state(data[number])
        resumed.loops[number].load_state_dict(outer)
    resumed.train(26, spoil=37)
    assert resumed.loops[1].counters.rounds_outlier == whole.loops[1].counters.rounds_outlier >= 1
    for mine, theirs in zip(resumed.models[1].parameters(), whole.models[1].parameters(), strict=True):
        assert torch.equal(mine, theirs)


# ---------------------------------------------------------------------- the inner optimizer


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_worker_that_is_rolled_back_has_a_fresh_optimizer_and_others_keep_theirs(optimizer: type) -> None:
    run = Run(next(syncs("fp32")), 2, optimizer=optimizer)
    run.train(5)
    before = copy.deepcopy(run.inner[0].state_dict()["state"])
    run.loops[1].roll_back()
    assert str(run.inner[0].state_dict()["state"]) == str(before)
    assert not any(
        value.any() if isinstance(value, torch.Tensor) else value
        for state in run.inner[1].state.values()
        for value in state.values()
    )
    run.train(5)


def test_a_nan_does_not_stay_in_the_moments() -> None:
    run = Run(next(syncs("fp32")), 2, guard=atoll.Guard(leave_out_nonfinite=True))
    run.train(60, spoil=12, scale=float("nan"))
    assert run.loops[1].counters.roll_backs == 1
    assert run.loops[1].counters.rounds_left_out == 1
