"""A worker that has lost its numbers: it is left out of the round, rolled back, counted, and trains on."""

import numpy as np
import pytest
import torch

import harness
from atoll import DataParallel, DiLoCo, Lockstep, OuterLoop, Streaming, Sync
from atoll.errors import LinkError, NonFiniteError
from atoll.outer.presets import Gradients
from atoll.outer.stats import Applied
from harness import (
    PRESETS,
    Problem,
    by_part,
    check_recovered,
    inner_step,
    snapshot,
    spoil,
    toy,
    train,
    train_data_parallel,
)

PROBLEM = Problem()


def tolerant(sync: Sync | Gradients, observed: list[Applied] | None = None) -> list[OuterLoop]:
    return harness.tolerant(PROBLEM, sync, observed)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_the_round_is_the_mean_of_the_others_and_all_end_at_the_same_place(value: float) -> None:
    sync, observed = DiLoCo(period=4, codec="fp64"), list[Applied]()
    loops = tolerant(sync, observed)
    start = toy(loops[0]).vector()
    train(loops, 3, PROBLEM.inner)
    for loop in loops:
        inner_step(loop, PROBLEM.inner)
    deltas = [start - toy(loop).vector() for loop in loops]
    spoil(loops[1], value)
    Lockstep(loops).step()
    mean = (deltas[0] + deltas[2]) / 2
    after = start - 0.7 * (mean + 0.9 * mean)
    for loop in loops:
        np.testing.assert_allclose(toy(loop).vector(), after, rtol=1e-12, atol=1e-12)
    assert [loop.counters.rounds_left_out for loop in loops] == [0, 1, 0]
    assert observed[-1].members == (0, 2) and observed[-1].step == 4
    np.testing.assert_allclose(observed[-1].norm, np.linalg.norm(mean))
    cosine = deltas[0] @ deltas[2] / np.linalg.norm(deltas[0]) / np.linalg.norm(deltas[2])
    assert observed[-1].cosine == pytest.approx(cosine)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_goes_on_with_one_anchor_and_the_worker_takes_part_again(name: str) -> None:
    sync, observed = PRESETS[name], list[Applied]()
    loops = tolerant(sync, observed)
    train(loops, 7, PROBLEM.inner)
    spoil(loops[1])
    train(loops, 40, PROBLEM.inner)
    check_recovered(loops, observed, left_out=len(loops[0].fragments))  # once for every fragment


def test_rolled_back_means_at_the_anchor_and_out_of_the_next_round_of_each_fragment() -> None:
    observed = list[Applied]()
    loops = tolerant(Streaming(period=6, fragments=by_part(4), delay=2), observed)
    train(loops, 8, PROBLEM.inner)
    loops[2].roll_back()
    np.testing.assert_array_equal(toy(loops[2]).vector(), snapshot(loops[2])[1])
    train(loops, 12, PROBLEM.inner)
    left = [(a.round_id.step, a.round_id.fragment) for a in observed if 2 not in a.members]
    assert left == [(9, 2), (10, 3), (12, 0), (13, 1)]  # the next send of each


def test_a_state_saved_between_roll_back_and_round_still_knows_it() -> None:
    sync = DiLoCo(period=4)
    loops = tolerant(sync)
    train(loops, 2, PROBLEM.inner)
    loops[0].roll_back()
    states = [loop.state_dict() for loop in loops]
    again = tolerant(sync)
    for loop, old, state in zip(again, loops, states, strict=True):
        loop.model.load_state_dict(old.model.state_dict())
        loop.load_state_dict(state)
    train(again, 2, PROBLEM.inner)
    assert again[0].counters.rounds_left_out == 1


def test_finishing_with_a_spoilt_worker_averages_the_others() -> None:
    loops = tolerant(DiLoCo(period=50, codec="fp64"))
    start = toy(loops[0]).vector()
    train(loops, 3, PROBLEM.inner)
    ends = [toy(loop).vector() for loop in loops]
    spoil(loops[0])
    Lockstep(loops).finish()
    mean = (2 * start - ends[1] - ends[2]) / 2
    np.testing.assert_allclose(toy(loops[0]).vector(), start - mean, rtol=1e-12, atol=1e-12)


def test_data_parallel_takes_the_mean_of_the_finite_gradients() -> None:
    loops, clean = tolerant(DataParallel()), tolerant(DataParallel())
    crew = Lockstep(loops)
    for loop in loops:
        for number, parameter in enumerate(loop.model.parameters()):
            parameter.grad = torch.full_like(parameter, float("nan") if loop is loops[1] and number == 0 else 2.0)
    crew.average_gradients()
    assert all(bool((p.grad == 2).all()) for loop in loops for p in loop.model.parameters() if p.grad is not None)
    assert [loop.counters.rounds_left_out for loop in loops] == [0, 1, 0]
    train_data_parallel(clean, 3, PROBLEM.inner)
    assert clean[0].counters.rounds_left_out == 0


def one_round_of_gradients(loops: list[OuterLoop], spoilt: int | None) -> None:
    crew = Lockstep(loops)
    for loop in loops:
        for parameter in loop.model.parameters():
            parameter.grad = torch.full_like(parameter, float("nan") if loop.link.worker == spoilt else 2.0)
    crew.average_gradients()
    crew.step()


def test_a_spoilt_first_gradient_does_not_hide_that_a_worker_started_or_resumed_differently() -> None:
    started = tolerant(DataParallel())
    next(started[1].model.parameters()).data += 1.0
    with pytest.raises(LinkError, match="worker 1 and worker 0 differ in starting parameters"):
        one_round_of_gradients(started, spoilt=1)
    saved, resumed = tolerant(DataParallel()), tolerant(DataParallel())
    one_round_of_gradients(saved, spoilt=None)
    for before, loop in zip(saved, resumed, strict=True):
        loop.load_state_dict(before.state_dict())
    next(resumed[1].model.parameters()).data += 1.0
    one_round_of_gradients(resumed, spoilt=1)  # it is not in this round, so it is compared in the next
    with pytest.raises(LinkError, match="workers 0 and 1 have different anchors"):
        one_round_of_gradients(resumed, spoilt=None)


def test_a_round_that_nobody_reached_is_observed_too() -> None:
    observed = list[Applied]()
    loops = tolerant(DiLoCo(period=2), observed)
    for loop in loops:
        loop.roll_back()
    train(loops, 4, PROBLEM.inner)
    assert [(a.round_id.step, a.members) for a in observed] == [(2, ()), (4, (0, 1, 2))]


def test_without_the_option_it_is_an_error_that_names_the_worker() -> None:
    loops = PROBLEM.loops(DiLoCo(period=1))
    spoil(loops[1])
    with pytest.raises(NonFiniteError, match=r"worker 1, step 1, fragment 0, parameter 'parts\.0\.values'"):
        Lockstep(loops).step()
