"""Save at any step, with rounds in flight, and resume: the same bits as never having stopped."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from atoll import DataParallel, DiLoCo, Eager, OuterLoop, Streaming, checkpoint, local
from atoll.core.codec import Codec
from atoll.errors import AtollError, ConfigError
from atoll.link.local import Absence, Faults
from harness import PRESETS, Problem, bits, by_part, preset, toy, train, train_data_parallel

PROBLEM = Problem(
    sizes=(3, 1, 4, 2),
    workers=3,
    weights=(1.0, 2.5, 0.3),
    steps=18,
    faults=Faults(drop=0.15, seed=5, absences=(Absence(worker=2, first=5, last=9),)),
    dtype=torch.float32,
)
FOUR = replace(PROBLEM, sizes=(3, 300, 4, 2), workers=4, weights=(1.0, 2.5, 0.3, 0.9))
"""Three of four from step 5 to 9, so that rounds go in two shots, then in one, then in two again."""


def save(loop: OuterLoop, folder: Path) -> None:
    checkpoint.save(
        folder / f"worker-{loop.link.worker}",
        loop.steps,
        {
            "model": loop.model.state_dict(),
            "outer": loop.state_dict(),
        },
    )


def resume(loop: OuterLoop, folder: Path) -> None:
    _, state = checkpoint.load(folder / f"worker-{loop.link.worker}")
    loop.model.load_state_dict(state["model"])
    loop.load_state_dict(state["outer"])


@pytest.mark.thorough_after(6)
@pytest.mark.parametrize(("problem", "stops"), [(PROBLEM, range(19)), (FOUR, (2, 5, 7, 12, 15))], ids=["three", "four"])
@pytest.mark.parametrize("name", PRESETS)
def test_resume_at_every_step_is_exact(name: str, problem: Problem, stops: Sequence[int], tmp_path: Path) -> None:
    """Three periods of every preset, stopped after each single step, through files.

    With four workers, whose rounds go in two shots, after some: at another place of each preset's period every time.
    """
    sync = preset(name, problem.workers)
    whole = problem.loops(sync)
    train(whole, problem.steps, problem.inner)
    expected = [bits(loop) for loop in whole]
    running = problem.loops(sync)
    for step in range(problem.steps + 1):
        if step in stops:
            folder = tmp_path / str(step)
            for loop in running:
                save(loop, folder)
            continued = problem.loops(sync)
            for loop in continued:
                resume(loop, folder)
            train(continued, problem.steps - step, problem.inner)
            assert [bits(loop) for loop in continued] == expected, f"stopped after step {step}"
            assert [c.counters.rounds_applied for c in continued] == [w.counters.rounds_applied for w in whole]
            assert [c.counters.bytes_received for c in continued] == [w.counters.bytes_received for w in whole]
        if step < problem.steps:
            train(running, 1, problem.inner)


@pytest.mark.parametrize("stop", [13, 16])
def test_a_mean_that_only_the_slowest_have_still_to_apply_is_reduced_again_before_the_next(
    stop: int, tmp_path: Path
) -> None:
    """The next one, which the fastest apply at once, carries what it lost."""
    problem = replace(FOUR, faults=Faults())
    sync = replace(preset("unequal delays", 4), codec=Codec("e3m0", feedback=True))
    whole, stopped, continued = (problem.loops(sync) for _ in range(3))
    train(whole, problem.steps, problem.inner)
    train(stopped, stop, problem.inner)
    for old, new in zip(stopped, continued, strict=True):
        save(old, tmp_path)
        resume(new, tmp_path)
    train(continued, problem.steps - stop, problem.inner)
    assert [bits(loop) for loop in continued] == [bits(loop) for loop in whole]


@pytest.mark.parametrize("stop", [7, 12])
@pytest.mark.parametrize("name", PRESETS)
def test_a_state_survives_ones_own_torch_save(name: str, stop: int, tmp_path: Path) -> None:
    sync = preset(name, PROBLEM.workers)
    whole = PROBLEM.loops(sync)
    train(whole, stop, PROBLEM.inner)
    continued = PROBLEM.loops(sync)
    for old, new in zip(whole, continued, strict=True):
        torch.save({"model": old.model.state_dict(), "outer": old.state_dict()}, tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=True)
        new.model.load_state_dict(state["model"])
        new.load_state_dict(state["outer"])
    for loops in (whole, continued):
        train(loops, PROBLEM.steps - stop, PROBLEM.inner)
    assert [bits(loop) for loop in continued] == [bits(loop) for loop in whole]


@pytest.mark.parametrize("workers", [3, 4])
def test_resume_data_parallel(workers: int, tmp_path: Path) -> None:
    problem = Problem(workers=workers, steps=6)
    whole = problem.loops(DataParallel())
    train_data_parallel(whole, 6, problem.inner)
    first = problem.loops(DataParallel())
    train_data_parallel(first, 4, problem.inner)
    second = problem.loops(DataParallel())
    for a, b in zip(first, second, strict=True):
        save(a, tmp_path)
        resume(b, tmp_path)
    train_data_parallel(second, 2, problem.inner)
    assert [bits(loop) for loop in second] == [bits(loop) for loop in whole]


@pytest.mark.parametrize("stop", [8, 9])
def test_a_reducer_that_was_away_knows_after_a_resume_too_what_others_have_reduced(stop: int) -> None:
    """What it kept of a mean is then of an older round than the last, and is not added."""
    problem = replace(FOUR, workers=5, weights=(), faults=Faults(absences=(Absence(worker=4, first=5, last=9),)))
    sync = DiLoCo(period=2, codec=Codec("e3m0", feedback=True))
    whole = problem.loops(sync)
    train(whole, stop, problem.inner)
    resumed = problem.loops(sync)
    for old, new in zip(whole, resumed, strict=True):
        new.model.load_state_dict(old.model.state_dict())
        new.load_state_dict(old.state_dict())
    for loops in (whole, resumed):
        train(loops, problem.steps - stop, problem.inner)
    assert [bits(loop) for loop in resumed] == [bits(loop) for loop in whole]


def test_a_state_is_not_torn_by_training_on() -> None:
    loops = PROBLEM.loops(Eager(period=3))
    train(loops, 7, PROBLEM.inner)
    state = loops[0].state_dict()
    before = [f["anchor"].clone() for f in state["fragments"]]
    train(loops, 5, PROBLEM.inner)
    assert all(torch.equal(f["anchor"], b) for f, b in zip(state["fragments"], before, strict=True))
    assert not torch.equal(loops[0].state_dict()["fragments"][0]["anchor"], before[0])


def test_a_foreign_state_is_refused_and_changes_nothing() -> None:
    loops = PROBLEM.loops(Streaming(period=5, fragments=by_part(4)))
    train(loops, 7, PROBLEM.inner)
    state = loops[0].state_dict()
    fresh = PROBLEM.loops(Streaming(period=4, fragments=by_part(4)))
    before = bits(fresh[0])
    with pytest.raises(ConfigError, match="saved with other settings than these: period: 5 against 4"):
        fresh[0].load_state_dict(state)
    other_layout = Problem(sizes=(3, 1, 4, 3), workers=3, dtype=torch.float32).loops(
        Streaming(period=5, fragments=by_part(4))
    )
    with pytest.raises(ConfigError, match="layout of fragment 3: 1 parameters of float32, 2 values"):
        other_layout[0].load_state_dict(state)
    fewer = Problem(sizes=(3, 1), workers=3).loops(Streaming(period=5, fragments=by_part(2)))
    with pytest.raises(ConfigError, match="fragments"):
        fewer[0].load_state_dict(state)
    assert fewer[0].steps == 0
    with pytest.raises(ConfigError, match="this is the state of worker 0; this is worker 1"):
        fresh[1].load_state_dict(state)
    assert bits(fresh[0]) == before


def test_loading_after_the_first_step_is_refused() -> None:
    loops = Problem(workers=1).loops(DiLoCo(period=5))
    state = loops[0].state_dict()
    train(loops, 1, 0.1)
    with pytest.raises(AtollError, match="before the first step"):
        loops[0].load_state_dict(state)


def test_the_parameters_of_a_checkpoint_may_be_loaded_before_or_after_the_loop_is_made() -> None:
    """Workers' live parameters differ, so a loop made on top of them must not take them for the anchor."""
    problem = Problem(workers=2, steps=12)
    sync = DiLoCo(period=5, codec="fp64")
    whole = problem.loops(sync)
    train(whole, 12, problem.inner)
    stopped = problem.loops(sync)
    train(stopped, 8, problem.inner)
    continued = []
    for old, link in zip(stopped, local(2), strict=True):
        loop = OuterLoop(toy(old), sync, link)
        loop.load_state_dict(old.state_dict())
        continued.append(loop)
    train(continued, 4, problem.inner)
    assert [bits(loop) for loop in continued] == [bits(loop) for loop in whole]
