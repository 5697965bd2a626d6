"""The laws that tie the family together, each exact or to rounding."""

from typing import Any

import numpy as np
import pytest
import torch

from atoll import Crew, DataParallel, DiLoCo, Eager, Nesterov, OuterLoop, Streaming, Sync
from atoll.core.codec import Codec
from atoll.core.outer import SGD, Blend, EagerMerge, Momentum
from atoll.link.base import RoundId
from atoll.link.local import Absence, Faults
from harness import (
    PRESETS,
    Problem,
    bits,
    by_part,
    gradient,
    snapshot,
    toy,
    train,
    train_data_parallel,
    train_in_threads,
)
from oracle import codecs, reference

PROBLEM = Problem(sizes=(3, 1, 4, 2), workers=3, steps=23)


def run(sync: Sync, problem: Problem = PROBLEM) -> list[OuterLoop]:
    loops = problem.loops(sync)
    train(loops, problem.steps, problem.inner)
    return loops


def test_streaming_with_one_fragment_no_delay_and_alpha_0_is_diloco() -> None:
    streaming = Streaming(period=5, fragments=by_part(1), delay=0, codec="fp64", merge=Blend(0.0), outer=Nesterov())
    problem = Problem(sizes=(10,), workers=3, steps=23)
    for a, b in zip(run(streaming, problem), run(DiLoCo(period=5, codec="fp64"), problem), strict=True):
        assert bits(a) == bits(b)


@pytest.mark.parametrize("outer", [SGD(0.5), Momentum(0.4, 0.8), Nesterov(0.7, 0.9)])
def test_eager_of_one_worker_is_diloco_of_one_worker(outer: SGD | Momentum) -> None:
    """Live parameters and all: what differs is only that the eager anchor lags by one round."""
    problem = Problem(sizes=(10,), workers=1, steps=20)
    (eager,) = run(Eager(period=5, codec="fp64", outer=outer), problem)
    (diloco,) = run(DiLoCo(period=5, codec="fp64", outer=outer), problem)
    np.testing.assert_allclose(toy(eager).vector(), toy(diloco).vector(), rtol=1e-12)


def test_period_1_with_outer_sgd_at_1_is_data_parallel_sgd() -> None:
    problem = Problem(workers=4, weights=(1.0, 2.0, 3.0, 4.0), steps=15)
    every_step = run(DiLoCo(period=1, codec="fp64", outer=SGD(1.0)), problem)
    data_parallel = problem.loops(DataParallel(codec="fp64"))
    train_data_parallel(data_parallel, problem.steps, problem.inner)
    for a, b in zip(every_step, data_parallel, strict=True):
        np.testing.assert_allclose(toy(a).vector(), toy(b).vector(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_equal_workers_at_lr_1_without_momentum_are_no_outer_loop_at_all(alpha: float) -> None:
    sync = Streaming(
        period=6, fragments=by_part(4), delay=0, codec="fp64", merge=Blend(alpha), outer=Nesterov(1.0, 0.0)
    )
    loops = PROBLEM.loops(sync)
    crew = Crew(loops)
    for step in range(1, PROBLEM.steps + 1):
        for loop in loops:
            toy(loop).descend(gradient(0, step, toy(loop).vector()), PROBLEM.inner)
        crew.step()
    for loop in loops:
        np.testing.assert_allclose(toy(loop).vector(), PROBLEM.alone(PROBLEM.steps), rtol=1e-12)


@pytest.mark.parametrize("name", PRESETS)
def test_anchors_and_velocities_have_the_same_bits_on_every_worker(name: str) -> None:
    problem = Problem(
        sizes=(3, 1, 4, 2), workers=3, weights=(1.0, 2.5, 0.3), steps=24, faults=Faults(drop=0.3), dtype=torch.float32
    )
    loops = run(PRESETS[name], problem)
    seen: dict[tuple[int, int], dict[str, Any]] = {}
    for loop in loops:
        for number, fragment in enumerate(loop.state_dict()["fragments"]):
            assert fragment["version"] > 0
            # Workers with unequal delays may be a version apart; equal versions must be equal.
            first = seen.setdefault((number, fragment["version"]), fragment)
            assert torch.equal(fragment["anchor"], first["anchor"])
            assert all(torch.equal(fragment["slots"][k], first["slots"][k]) for k in first["slots"])


@pytest.mark.parametrize("name", PRESETS)
def test_threads_and_turns_give_the_same_bits(name: str) -> None:
    problem = Problem(
        workers=3,
        steps=19,
        faults=Faults(drop=0.2, absences=(Absence(worker=1, first=4, last=9),), speeds={2: 0.5}),
        dtype=torch.float32,
    )
    for a, b in zip(run(PRESETS[name], problem), train_in_threads(problem, PRESETS[name]), strict=True):
        assert bits(a) == bits(b)


@pytest.mark.parametrize("merge", [Blend(0.0), EagerMerge()])
def test_a_lost_payload_loses_no_work(merge: Blend | EagerMerge) -> None:
    """One worker, plain averaging at lr 1, and its first payload lost: the anchor still ends where training went."""
    period = 4
    seed = next(s for s in range(1000) if _losses(s, period) == [True, False, False, False, False])
    problem = Problem(sizes=(6,), workers=1, steps=5 * period, faults=Faults(drop=0.5, seed=seed))
    delay = period if isinstance(merge, EagerMerge) else 0
    sync = Sync(period=period, delay=delay, codec=Codec("fp64"), merge=merge, outer=SGD(1.0))
    (loop,) = run(sync, problem)
    assert loop.counters.rounds_missed == 1
    np.testing.assert_allclose(toy(loop).vector(), problem.alone(problem.steps), rtol=1e-12)


def _losses(seed: int, period: int) -> list[bool]:
    return [Faults(drop=0.5, seed=seed).lost(0, RoundId(k * period, 0)) for k in range(1, 6)]


@pytest.mark.parametrize("name", ["e3m0", "int8", "e2m1", "int4"])
def test_what_enters_the_eager_correction_is_the_decoded_delta(name: str) -> None:
    """Against the paper's own form with a 4-bit wire; un-decoded own deltas would drift from it."""
    problem = Problem(sizes=(10,), workers=3, steps=40)
    loops = run(Eager(period=4, codec=name), problem)
    arguments = problem.oracle_arguments(lambda d: codecs.round_trip(d, name), without="there trains lost")
    for loop, expected in zip(loops, reference.eager(**arguments, period=4, lr=0.4, momentum=0.9), strict=True):
        for mine, theirs in zip(snapshot(loop), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_losses_absences_and_rounding_together_as_in_the_oracle(eager: bool, feedback: bool) -> None:
    """A fixed case of what the property tests generate, with all faults at once."""
    problem = Problem(
        sizes=(9, 5),
        workers=3,
        weights=(1.0, 2.0, 0.5),
        steps=48,
        faults=Faults(drop=0.4, seed=1, absences=(Absence(worker=1, first=10, last=17),)),
    )
    codec, arguments = (
        Codec("int4", feedback=feedback),
        problem.oracle_arguments(lambda d: codecs.round_trip(d, "int4")),
    )
    outer = {"period": 4, "lr": 0.4, "momentum": 0.9, "slices": problem.slices, "feedback": feedback}
    if eager:
        loops = run(Eager(period=4, fragments=by_part(2), codec=codec), problem)
        expected = reference.eager_with_faults(**arguments, **outer)
    else:
        loops = run(Streaming(period=4, fragments=by_part(2), delay=(1, 3, 2), codec=codec), problem)
        expected = reference.streaming(**arguments, **outer, delays=(1, 3, 2), alpha=0.5)
    assert sum(loop.counters.rounds_missed for loop in loops) > 5
    for loop, theirs in zip(loops, expected, strict=True):
        for mine, reference_vector in zip(snapshot(loop), theirs, strict=True):
            np.testing.assert_allclose(mine, reference_vector, rtol=1e-12, atol=1e-12)
