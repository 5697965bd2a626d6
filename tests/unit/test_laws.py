"""The laws that tie the family together, each exact or to rounding."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from atoll import DataParallel, DiLoCo, Eager, Lockstep, Nesterov, OuterLoop, Streaming, Sync, local
from atoll.core import allreduce
from atoll.core.allreduce import MOST_PARTS_EACH
from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.core.outer_step import SGD, Blend, EagerMerge, Momentum
from atoll.link.base import RoundId
from atoll.link.local import Absence, Faults
from harness import (
    PRESETS,
    Problem,
    Toy,
    bits,
    by_part,
    gradient,
    preset,
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
    crew = Lockstep(loops)
    for step in range(1, PROBLEM.steps + 1):
        for loop in loops:
            toy(loop).descend(gradient(0, step, toy(loop).vector()), PROBLEM.inner)
        crew.step()
    for loop in loops:
        np.testing.assert_allclose(toy(loop).vector(), PROBLEM.alone(PROBLEM.steps), rtol=1e-12)


@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize(
    ("alpha", "lr", "momentum"), [(0.0, 0.4, 0.9), (0.25, 0.6, 0.9), (0.5, 0.4, 0.9), (0.5, 0.7, 0.6)]
)
def test_alpha_limits_how_far_the_anchor_moves_in_a_round(alpha: float, lr: float, momentum: float, delay: int) -> None:
    """Decision 40: under constant progress p in a period, the anchor moves by G p / (1 - alpha + alpha G)."""
    period, rounds, gain = 4, 240, lr / (1 - momentum)
    sync = Streaming(
        period=period,
        fragments=by_part(2),
        delay=delay,
        codec="fp64",
        merge=Blend(alpha),
        outer=Nesterov(lr, momentum),
    )
    loops = [OuterLoop(Toy(np.zeros(3), (2, 1)), sync, link) for link in local(2)]
    crew, anchors = Lockstep(loops), []
    for step in range(1, rounds * period + 1):
        for loop in loops:
            toy(loop).descend(np.ones(3), 1 / period)
        crew.step()
        if step > (rounds - 2) * period and step % period == 0:
            anchors.append(snapshot(loops[0])[1])
    progress = 1 - (1 - alpha) * delay / period  # a merge drops a part of what was done since the send
    wanted = gain * progress / (1 - alpha + alpha * gain)
    np.testing.assert_allclose(anchors[0] - anchors[1], np.full(3, wanted), rtol=1e-9)


COMING_AND_GOING = {
    3: (Absence(worker=1, first=4, last=9),),
    4: (Absence(worker=1, first=4, last=9),),
    5: (Absence(worker=1, first=4, last=9), Absence(worker=4, first=1, last=6), Absence(worker=0, first=15)),
}
"""Three are there for some of the rounds and more for others, so that both kinds of round occur in one run."""


@pytest.mark.parametrize("workers", COMING_AND_GOING)
@pytest.mark.parametrize("name", PRESETS)
def test_anchors_and_velocities_have_the_same_bits_on_every_worker(name: str, workers: int) -> None:
    problem = Problem(
        sizes=(3, 300, 4, 2),
        workers=workers,
        weights=(1.0, 2.5, 0.3, 1.1, 0.7)[:workers],
        steps=24,
        faults=Faults(drop=0.3, absences=COMING_AND_GOING[workers] if workers > 3 else ()),
        dtype=torch.float32,
    )
    loops = run(preset(name, workers), problem)
    seen: dict[tuple[int, int], dict[str, Any]] = {}
    for loop in loops:
        for number, fragment in enumerate(loop.state_dict()["fragments"]):
            assert fragment["version"] > 0
            # Workers with unequal delays may be a version apart; equal versions must be equal.
            first = seen.setdefault((number, fragment["version"]), fragment)
            assert torch.equal(fragment["anchor"], first["anchor"])
            assert all(torch.equal(fragment["slots"][k], first["slots"][k]) for k in first["slots"])


@pytest.mark.thorough_after(10)
@pytest.mark.parametrize("workers", COMING_AND_GOING)
@pytest.mark.parametrize("name", PRESETS)
def test_threads_and_turns_give_the_same_bits(name: str, workers: int) -> None:
    problem = Problem(
        sizes=(3, 300, 4, 2),
        workers=workers,
        steps=19,
        faults=Faults(drop=0.2, absences=COMING_AND_GOING[workers], speeds={2: 0.5}),
        dtype=torch.float32,
    )
    sync = preset(name, workers)
    for a, b in zip(run(sync, problem), train_in_threads(problem, sync), strict=True):
        assert bits(a) == bits(b)


@pytest.mark.parametrize("codec", ["fp32", "bf16"])
@pytest.mark.parametrize("workers", [4, 5])
def test_a_second_shot_changes_nothing_but_the_rounding(
    workers: int, codec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = Faults(drop=0.3, absences=COMING_AND_GOING[workers])
    problem = Problem(sizes=(700, 9), workers=workers, steps=24, faults=faults, dtype=torch.float32)
    sync = Streaming(period=4, fragments=by_part(2), delay=1, codec=codec)
    two = [bits(loop) for loop in run(sync, problem)]
    monkeypatch.setattr(allreduce, "ONE_SHOT_MEMBERS", workers)
    one = [bits(loop) for loop in run(sync, problem)]
    assert (two == one) == (codec == "fp32")


def test_no_payload_and_no_part_of_a_mean_share_their_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of whatever rounds: torch's generator takes the low 32 bits of a seed."""
    seeds, encode = [], Codec.encode

    def watched(codec: Codec, vector: Tensor, seed: int = 0) -> Tensor:
        seeds.append(seed % 2**32)
        return encode(codec, vector, seed)

    monkeypatch.setattr(Codec, "encode", watched)
    monkeypatch.setattr("atoll.core.allreduce.PART_BYTES", 1)  # as many parts as there can be
    problem = Problem(sizes=(4 * BLOCK, 5 * BLOCK, 599), workers=4, dtype=torch.float32)
    loops = problem.loops(Streaming(period=3, fragments=by_part(3), codec=Codec("int4", stochastic=True)))
    train(loops, 30, 0.1)
    assert len(set(seeds)) == len(seeds) == 28 * 4 + 27 * 4 * MOST_PARTS_EACH  # the last round is still under way


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


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("name", ["e3m0", "int8", "e2m1", "int4"])
def test_what_enters_the_eager_correction_is_the_decoded_delta(name: str, workers: int) -> None:
    """Against the paper's own form with a 4-bit wire; un-decoded own deltas would drift from it."""
    problem = Problem(sizes=(10,), workers=workers, steps=40)
    loops = run(Eager(period=4, codec=name, outer=Nesterov(0.4, 0.9)), problem)
    arguments = problem.oracle_arguments(codecs.Wire(name), without="there trains lost")
    for loop, expected in zip(loops, reference.eager(**arguments, period=4, lr=0.4, momentum=0.9), strict=True):
        for mine, theirs in zip(snapshot(loop), expected, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.thorough_after(4)
@pytest.mark.parametrize("workers", [3, 4, 5])
@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("eager", [False, True])
def test_losses_absences_and_rounding_together_as_in_the_oracle(eager: bool, feedback: bool, workers: int) -> None:
    """A fixed case of what the property tests generate, with all faults at once."""
    delays = (1, 3, 2, 0, 4)[:workers]
    problem = Problem(
        sizes=(300, 5),
        workers=workers,
        weights=(1.0, 2.0, 0.5, 1.5, 0.3)[:workers],
        steps=48,
        faults=Faults(
            drop=0.4,
            seed=1,
            absences=(Absence(worker=1, first=10, last=17), Absence(worker=workers - 1, first=30, last=41)),
        ),
    )
    codec, arguments = (
        Codec("int4", feedback=feedback),
        problem.oracle_arguments(codecs.Wire("int4")),
    )
    outer = {"period": 4, "lr": 0.4, "momentum": 0.9, "slices": problem.slices, "feedback": feedback}
    if eager:
        loops = run(Eager(period=4, fragments=by_part(2), codec=codec, outer=Nesterov(0.4, 0.9)), problem)
        expected = reference.eager_with_faults(**arguments, **outer)
    else:
        sync = Streaming(period=4, fragments=by_part(2), delay=delays, codec=codec, outer=Nesterov(0.4, 0.9))
        loops = run(sync, problem)
        expected = reference.streaming(**arguments, **outer, delays=delays, alpha=0.25)
    assert sum(loop.counters.rounds_missed for loop in loops) > 5
    for loop, theirs in zip(loops, expected, strict=True):
        for mine, reference_vector in zip(snapshot(loop), theirs, strict=True):
            np.testing.assert_allclose(mine, reference_vector, rtol=1e-12, atol=1e-12)
