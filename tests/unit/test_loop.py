"""The loop as a training script sees it."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import atoll
from atoll import DataParallel, Delayed, DiLoCo, Eager, Lockstep, Nesterov, OuterLoop, Streaming, Sync, local
from atoll.core.codec import Codec
from atoll.core.fragments import Balanced, Blocks
from atoll.core.outer_step import SGD, Adam, Blend, EagerMerge, Momentum, OuterOptimizer
from atoll.errors import AtollError, ConfigError, NonFiniteError
from atoll.link.base import RoundId
from atoll.link.local import Absence, Faults
from harness import Problem, Toy, bits, by_part, inner_step, snapshot, toy, train


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2))


def train_classifier(model: nn.Module, inner: torch.optim.Optimizer, outer: OuterLoop, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(outer.link.worker)
    losses = []
    for _ in range(steps):
        x = torch.randn(16, 6, generator=generator)
        loss = nn.functional.cross_entropy(model(x), (x.sum(1) > 0).long())
        inner.zero_grad()
        loss.backward()
        inner.step()
        outer.step()
        losses.append(loss.item())
    return losses


SHARED = nn.Linear(2, 2)


class TestInnerOptimizers:
    """Any inner optimizer works and keeps its state to itself."""

    @pytest.mark.parametrize("name", ["AdamW", "Muon", "SGD", "Adafactor"])
    def test_state_is_never_touched(self, name: str) -> None:
        model = small_model()
        parameters = [p for p in model.parameters() if name != "Muon" or p.ndim == 2]
        inner = getattr(torch.optim, name)(parameters, lr=0.02)
        outer = OuterLoop(model, DiLoCo(period=4), local(1)[0])
        losses = train_classifier(model, inner, outer, 3)
        before = copy.deepcopy(inner.state_dict())
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        outer.step()  # the fourth: sends and applies
        assert outer.counters.rounds_applied == 1
        after = inner.state_dict()
        assert after["param_groups"] == before["param_groups"]
        for key, entry in before["state"].items():
            for field, value in entry.items():
                assert torch.equal(torch.as_tensor(after["state"][key][field]), torch.as_tensor(value)), (key, field)
        for p, g in zip(model.parameters(), gradients, strict=True):
            assert (p.grad is None and g is None) or (p.grad is not None and g is not None and torch.equal(p.grad, g))
        losses += train_classifier(model, inner, outer, 40)
        assert np.mean(losses[-5:]) < losses[0]


class TestAnchor:
    def test_lends_the_outer_parameters_and_gives_the_own_ones_back(self) -> None:
        loops = Problem(workers=2).loops(Streaming(period=4, fragments=by_part(4), codec="int8"))
        train(loops, 11, 0.1)
        before = bits(loops[0])
        live, anchor, _ = snapshot(loops[0])
        with loops[0].anchor() as model:
            assert model is loops[0].model
            np.testing.assert_array_equal(toy(loops[0]).vector(), anchor)
        np.testing.assert_array_equal(toy(loops[0]).vector(), live)
        assert not np.array_equal(live, anchor)
        assert bits(loops[0]) == before

    def test_gives_back_after_an_error(self) -> None:
        (loop,) = Problem(workers=1).loops(DiLoCo(period=4))
        train([loop], 3, 0.1)
        live = toy(loop).vector()
        with pytest.raises(ZeroDivisionError), loop.anchor():
            raise ZeroDivisionError
        np.testing.assert_array_equal(toy(loop).vector(), live)
        train([loop], 3, 0.1)

    def test_gives_back_after_the_model_was_frozen_inside(self) -> None:
        (loop,) = Problem(workers=1).loops(DiLoCo(period=4))
        train([loop], 3, 0.1)
        live = toy(loop).vector()
        with loop.anchor() as model:
            model.requires_grad_(False)
        np.testing.assert_array_equal(toy(loop).vector(), live)
        loop.model.requires_grad_(True)
        train([loop], 3, 0.1)

    def test_no_saving_inside(self) -> None:
        (loop,) = Problem(workers=1).loops(DiLoCo(period=4))
        with loop.anchor(), pytest.raises(AtollError, match="before saving"):
            loop.state_dict()

    def test_no_step_and_no_second_loan_inside(self) -> None:
        (loop,) = Problem(workers=1).loops(DiLoCo(period=4))
        with loop.anchor():
            with pytest.raises(AtollError, match="the model holds the anchor"):
                loop.step()
            with pytest.raises(AtollError, match="already in use"), loop.anchor():
                pass

    def test_under_data_parallel_it_is_the_model_itself(self) -> None:
        (loop,) = Problem(workers=1).loops(DataParallel())
        live = toy(loop).vector()
        with loop.anchor():
            np.testing.assert_array_equal(toy(loop).vector(), live)


class TestFinish:
    @pytest.mark.parametrize(
        "sync",
        [
            DiLoCo(period=5),
            Streaming(period=6, fragments=by_part(4), delay=4),
            Streaming(period=6, fragments=by_part(4), delay=(1, 3, 6)),
            Eager(period=5),
            Eager(period=6, fragments=by_part(4), codec=Codec("int8", feedback=True)),
            Delayed(period=5),
        ],
        ids=str,
    )
    @pytest.mark.parametrize("steps", [0, 3, 5, 13, 20])
    @pytest.mark.parametrize("drop", [0.0, 0.4])
    def test_everyone_ends_with_the_same_model(self, sync: Sync, steps: int, drop: float) -> None:
        problem = Problem(workers=3, faults=Faults(drop=drop, seed=steps))
        loops = problem.loops(sync)
        train(loops, steps, problem.inner)
        Lockstep(loops).finish()
        for loop in loops:
            live, anchor, _ = snapshot(loop)
            np.testing.assert_array_equal(live, anchor)
            np.testing.assert_array_equal(live, toy(loops[0]).vector())
        with pytest.raises(AtollError, match="finish"):
            loops[0].step()

    @pytest.mark.parametrize("drop", [0.0, 0.6])
    @pytest.mark.parametrize(
        ("merge", "delay"), [(Blend(0.0), 0), (Blend(0.0), 3), (Blend(0.5), 3), (Blend(0.0), 4), (EagerMerge(), 4)]
    )
    def test_no_work_is_lost(self, merge: Blend | EagerMerge, delay: int, drop: float) -> None:
        """One worker at lr 1 without momentum: the final model is where plain training went."""
        # Blending gives up, by alpha, what was trained during a delay; up to the first apply nothing is given up.
        steps = 14 if isinstance(merge, EagerMerge) or delay == 0 else 4 + delay - 1
        drops = (Faults(drop=drop, seed=seed) for seed in range(1000))
        faults = next(
            f for f in drops if f.lost(0, RoundId(4, 0)) == bool(drop) and not f.lost(0, RoundId(steps, 0, last=True))
        )
        problem = Problem(workers=1, faults=faults)
        sync = Sync(period=4, delay=delay, codec=Codec("fp64"), merge=merge, outer=SGD(1.0))
        (loop,) = problem.loops(sync)
        train([loop], steps, problem.inner)
        loop.finish()
        np.testing.assert_allclose(toy(loop).vector(), problem.alone(steps), rtol=1e-12)

    def test_one_step_more_does_not_throw_the_model_back(self) -> None:
        """Under Delayed, the round before was blended in after the last one was sent."""
        ends = []
        for steps in (60, 61, 75, 90, 91):
            model = Toy(np.zeros(1), (1,), torch.float32)
            loop = OuterLoop(model, Delayed(period=30, codec="fp32"), local(1)[0])
            for _ in range(steps):
                model.descend(np.ones(1), 1.0)
                loop.step()
            loop.finish()
            ends.append(model.vector()[0])
        assert ends == sorted(ends, reverse=True)

    @pytest.mark.parametrize("merge", [Blend(0.0), EagerMerge()])
    def test_a_payload_lost_on_the_very_last_step_is_sent_again(self, merge: Blend | EagerMerge) -> None:
        delay, steps = (0, 4) if isinstance(merge, Blend) else (4, 8)
        ids = [RoundId(4, 0), RoundId(8, 0), RoundId(steps, 0, last=True)]
        drops = (Faults(drop=0.5, seed=seed) for seed in range(1000))
        faults = next(f for f in drops if [f.lost(0, i) for i in ids] == [True, False, False])
        problem = Problem(workers=1, faults=faults)
        (loop,) = problem.loops(Sync(period=4, delay=delay, codec=Codec("fp64"), merge=merge, outer=SGD(1.0)))
        train([loop], steps, problem.inner)
        loop.finish()
        np.testing.assert_allclose(toy(loop).vector(), problem.alone(steps), rtol=1e-12)

    @pytest.mark.parametrize("steps", [4, 5, 6, 7])
    def test_feedback_is_not_counted_twice(self, steps: int) -> None:
        """One worker: the final model is off by what the very last rounding lost, and no more."""
        problem = Problem(sizes=(8,), workers=1)
        codec = Codec("int4", feedback=True)
        (loop,) = problem.loops(Sync(period=4, delay=3, codec=codec, outer=SGD(1.0)))
        train([loop], steps, problem.inner)
        before = loop.state_dict()["fragments"][0]
        loop.finish()
        held_back = loop.state_dict()["fragments"][0]["residual"].numpy()
        if steps < 7:  # no round applied yet, so nothing of the delay's work has been blended away
            assert before["version"] == 0
            np.testing.assert_allclose(toy(loop).vector() - held_back, problem.alone(steps), rtol=1e-12, atol=1e-14)

    @pytest.mark.parametrize(("first", "last", "mean"), [(1, 7, -7.0), (8, None, -7.0)])
    def test_who_was_there_on_the_last_step_takes_part(self, first: int, last: int | None, mean: float) -> None:
        faults = Faults(absences=(Absence(worker=1, first=first, last=last),))
        loops = [OuterLoop(Toy(np.zeros(1), (1,)), DiLoCo(period=50), link) for link in local(2, faults=faults)]
        crew = Lockstep(loops)
        for _ in range(7):
            for loop in loops:
                if loop.trains:
                    toy(loop).descend(np.ones(1), 1.0)
            crew.step()
        crew.finish()
        assert [toy(loop).vector()[0] for loop in loops] == [mean, mean]

    def test_right_after_a_resume(self) -> None:
        problem = Problem(workers=2)
        ends = []
        for resumes in (False, True):
            loops = problem.loops(Eager(period=2))
            train(loops, 3, 0.1)
            if resumes:
                states = [(loop.model.state_dict(), loop.state_dict()) for loop in loops]
                loops = problem.loops(Eager(period=2), local(2, timeout_s=5))
                for loop, (model, outer) in zip(loops, states, strict=True):
                    loop.model.load_state_dict(model)
                    loop.load_state_dict(outer)
            Lockstep(loops).finish()
            ends.append(bits(loops[0]))
        assert ends[0] == ends[1]

    def test_a_finished_run_cannot_be_resumed(self) -> None:
        (loop,) = Problem(workers=1).loops(Eager(period=2))
        train([loop], 3, 0.1)
        loop.finish()
        (fresh,) = Problem(workers=1).loops(Eager(period=2))
        with pytest.raises(ConfigError, match="after finish"):
            fresh.load_state_dict(loop.state_dict())

    def test_a_nan_at_the_end_can_be_mended(self) -> None:
        (loop,) = Problem(workers=1).loops(Eager(period=2))
        train([loop], 3, 0.1)
        mended = next(iter(loop.model.parameters())).data
        value = mended[0].item()
        mended[0] = float("nan")
        with pytest.raises(NonFiniteError):
            loop.finish()
        mended[0] = value
        loop.finish()

    def test_the_last_partial_period_is_a_plain_mean(self) -> None:
        problem = Problem(workers=2)
        loops = problem.loops(DiLoCo(period=5, codec="fp64"))
        train(loops, 7, 0.1)
        mean = np.mean([toy(loop).vector() for loop in loops], axis=0)
        Lockstep(loops).finish()
        np.testing.assert_allclose(toy(loops[0]).vector(), mean, rtol=1e-12)

    def test_right_after_a_round_there_is_nothing_to_send(self) -> None:
        loops = Problem(workers=2).loops(DiLoCo(period=5))
        train(loops, 10, 0.1)
        sent = loops[0].counters.rounds_sent
        Lockstep(loops).finish()
        assert loops[0].counters.rounds_sent == sent == 2


class TestComingBack:
    """Worker 1 is away for a while; both walk one unit a step; the round of step 4 is applied after step 7."""

    def walk(self, faults: Faults, steps: int) -> tuple[list[float], float]:
        sync = Sync(period=4, delay=3, codec=Codec("fp64"), outer=SGD(1.0), merge=Blend(0.0))
        loops = [OuterLoop(Toy(np.zeros(1), (1,)), sync, link) for link in local(2, faults=faults)]
        crew = Lockstep(loops)
        for _ in range(steps):
            for loop in loops:
                if loop.trains:
                    toy(loop).descend(-np.ones(1), 1.0)
            crew.step()
        return [toy(loop).vector()[0] for loop in loops], snapshot(loops[0])[1][0]

    def test_a_round_that_was_sent_meanwhile_is_merged(self) -> None:
        faults = Faults(absences=(Absence(worker=1, first=1, last=4),))
        assert self.walk(faults, 6) == ([6.0, 2.0], 0.0)
        assert self.walk(faults, 7) == ([4.0, 4.0], 4.0)
        assert self.walk(faults, 11) == ([5.0, 5.0], 5.0)  # and nothing of it is taken back

    def test_nothing_is_kept_of_a_payload_that_was_lost_meanwhile(self) -> None:
        away = (Absence(worker=1, first=5, last=5),)
        tried = (Faults(drop=0.5, seed=seed, absences=away) for seed in range(1000))
        lost = {(0, 4): False, (1, 4): True, (0, 8): False, (1, 8): False}
        faults = next(f for f in tried if all(f.lost(w, RoundId(t, 0)) == so for (w, t), so in lost.items()))
        assert self.walk(faults, 6) == ([6.0, 1.0], 0.0)
        assert self.walk(faults, 7) == ([4.0, 4.0], 4.0)
        assert self.walk(faults, 11) == ([5.0, 5.0], 5.0)


class TestCounting:
    @pytest.mark.parametrize("codec", ["fp32", "bf16", "int8", "e3m0"])
    def test_bytes_are_the_formula(self, codec: str) -> None:
        problem = Problem(sizes=(300, 77, 4, 129), workers=3, steps=25, dtype=torch.float32)
        sync = Streaming(period=6, fragments=by_part(4), delay=2, codec=codec)
        loops = problem.loops(sync)
        train(loops, problem.steps, problem.inner)
        sends = [sum((t - f * 6 // 4) in range(6, 26, 6) for t in range(1, 26)) for f in range(4)]
        expected = sum(n * Codec(codec).payload_bytes(size) for n, size in zip(sends, problem.sizes, strict=True))
        for loop in loops:
            assert loop.counters.bytes_sent == expected
            assert loop.counters.rounds_sent == sum(sends)
        applied = loops[0].counters.rounds_applied
        assert applied == sum((t - f * 6 // 4) in range(6, 24, 6) for f in range(4) for t in range(1, 24))

    @pytest.mark.parametrize(("workers", "received"), [(1, 0), (2, 400), (3, 2 * 400), (4, 1.5 * 400), (5, 1.6 * 400)])
    def test_received_bytes_are_the_others(self, workers: int, received: float) -> None:
        loops = Problem(sizes=(100,), workers=workers, dtype=torch.float32).loops(DiLoCo(period=3))
        train(loops, 6, 0.1)
        assert {loop.counters.bytes_received for loop in loops} == {2 * received}

    def test_who_is_away_receives_what_moves_the_anchor(self) -> None:
        """The others' payloads, or their mean where that is all there is."""
        away = (Absence(worker=4, first=1, last=4), Absence(worker=3, first=3, last=4))
        problem = Problem(sizes=(100,), workers=5, dtype=torch.float32, faults=Faults(absences=away))
        loops = problem.loops(DiLoCo(period=2))
        train(loops, 2, 0.1)  # four in two shots
        assert [loop.counters.bytes_received for loop in loops] == [600, 600, 600, 600, 400]
        train(loops, 2, 0.1)  # three in one
        assert [loop.counters.bytes_received for loop in loops] == [1400, 1400, 1400, 1800, 1600]


class TestDtypes:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_low_precision_parameters_have_an_fp32_anchor(self, dtype: torch.dtype) -> None:
        loops = Problem(workers=2, dtype=dtype).loops(DiLoCo(period=3, outer=Nesterov(0.7, 0.9)))
        train(loops, 9, 0.05)
        for loop in loops:
            state = loop.state_dict()["fragments"][0]
            assert state["anchor"].dtype == state["slots"]["velocity"].dtype == torch.float32
            live = torch.cat([p.detach().flatten() for p in loop.model.parameters()])
            assert torch.equal(live, state["anchor"].to(dtype))
            assert not torch.equal(live.float(), state["anchor"])

    @pytest.mark.parametrize(
        "sync",
        [
            DiLoCo(period=2),
            Eager(period=2, codec="fp32"),
            Streaming(period=2, fragments=by_part(4), merge=Blend(0.5), outer=Nesterov(0.4, 0.9)),
        ],
    )
    def test_rounding_of_the_live_copy_is_not_taken_for_work(self, sync: Sync) -> None:
        """After one piece of work and then none, every dtype's anchor comes to rest in the same place."""
        ends = []
        for dtype in (torch.float32, torch.bfloat16):
            start = np.linspace(1, 2, 10)
            start = torch.tensor(start).bfloat16().double().numpy()
            loops = [OuterLoop(Toy(start, (3, 1, 4, 2), dtype), sync, link) for link in local(2)]
            for loop in loops:
                toy(loop).descend(np.full(10, 0.03125), 1.0)
            crew = Lockstep(loops)
            for _ in range(200):
                crew.step()
            ends.append(snapshot(loops[0])[1])
        # A blending worker also hands on a part of its rounded live value, which is no more than a rounding.
        np.testing.assert_allclose(
            ends[1], ends[0], atol=0.02 if isinstance(sync.merge, Blend) and sync.merge.alpha else 1e-5
        )


class TestBadNumbers:
    def test_a_crew_with_one_bad_worker_does_not_move(self) -> None:
        loops = Problem(workers=3).loops(DiLoCo(period=2))
        train(loops, 1, 0.1)
        for loop in loops:
            inner_step(loop, 0.1)
        bad = next(iter(loops[1].model.parameters())).data
        value = bad[0].item()
        bad[0] = float("nan")
        before = [bits(loop) for loop in loops]
        with pytest.raises(NonFiniteError, match="worker 1"):
            Lockstep(loops).step()
        assert [bits(loop) for loop in loops] == before
        assert [loop.steps for loop in loops] == [1, 1, 1]
        bad[0] = value
        Lockstep(loops).step()
        assert [loop.counters.rounds_applied for loop in loops] == [1, 1, 1]

    @pytest.mark.parametrize("sync", [DiLoCo(period=3), Streaming(period=3, fragments=by_part(4)), Eager(period=3)])
    def test_a_nan_is_refused_by_name_and_nothing_changes(self, sync: Sync) -> None:
        loops = Problem(workers=1, dtype=torch.float32).loops(sync)
        train(loops, 2, 0.1)
        inner_step(loops[0], 0.1)
        with torch.no_grad():
            next(iter(loops[0].model.parameters()))[1] = float("nan")
        before = bits(loops[0])
        pattern = r"worker 0, step 3, fragment 0, parameter 'parts.0.values': a value is nan"
        with pytest.raises(NonFiniteError, match=pattern):
            loops[0].step()
        assert bits(loops[0]) == before
        assert loops[0].steps == 2

    def test_a_nan_gradient_too(self) -> None:
        (loop,) = Problem(workers=1).loops(DataParallel())
        for p in loop.model.parameters():
            p.grad = torch.full_like(p, float("inf"))
        with pytest.raises(NonFiniteError, match="a value is inf"):
            loop.average_gradients()


class TestDataParallel:
    def test_forgetting_to_average_is_an_error(self) -> None:
        (loop,) = Problem(workers=1).loops(DataParallel())
        with pytest.raises(AtollError, match="average_gradients\\(\\) was not called"):
            loop.step()

    def test_averaging_twice_is_an_error(self) -> None:
        (loop,) = Problem(workers=1).loops(DataParallel())
        loop.average_gradients()
        with pytest.raises(AtollError, match="called twice"):
            loop.average_gradients()

    def test_an_absent_worker_is_an_error(self) -> None:
        problem = Problem(workers=2, faults=Faults(absences=(Absence(worker=1, first=1, last=3),)))
        with pytest.raises(ConfigError, match="worker 1 is absent at step 1: DataParallel has no anchor"):
            Lockstep(problem.loops(DataParallel())).average_gradients()

    def test_averaging_is_nothing_under_other_presets(self) -> None:
        (loop,) = Problem(workers=1).loops(DiLoCo())
        loop.average_gradients()
        assert all(p.grad is None for p in loop.model.parameters())

    def test_finish_changes_nothing(self) -> None:
        (loop,) = Problem(workers=1).loops(DataParallel())
        live = toy(loop).vector()
        loop.finish()
        np.testing.assert_array_equal(toy(loop).vector(), live)


class TestModels:
    def test_a_parameter_unfrozen_later_is_an_error_not_a_silent_divergence(self) -> None:
        model = small_model()
        frozen = next(iter(model.parameters())).requires_grad_(False)
        loop = OuterLoop(model, DiLoCo(period=2), local(1)[0])
        loop.step()
        frozen.requires_grad_(True)
        with pytest.raises(ConfigError, match=r"parameter '0.weight' \(1 in all\) is trained but in no fragment"):
            loop.step()

    def test_tied_weights_travel_once(self) -> None:
        first, second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        second.weight = first.weight
        model = nn.Sequential(first, second)
        loop = OuterLoop(model, DiLoCo(period=1), local(1)[0])
        loop.step()
        assert loop.counters.bytes_sent == 4 * (16 * 16 + 16)

    def test_batch_norm_statistics_are_named_in_a_warning(self) -> None:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        with pytest.warns(UserWarning, match="3 buffers such as '1.running_mean' change in training"):
            OuterLoop(model, DiLoCo(), local(1)[0])

    @pytest.mark.parametrize(
        ("outer", "warned"), [(Nesterov(), 1), (Momentum(), 1), (Nesterov(momentum=0.0), 0), (SGD(1.0), 0), (Adam(), 0)]
    )
    def test_top64_with_outer_momentum_is_warned_about(self, outer: OuterOptimizer, warned: int) -> None:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            OuterLoop(small_model(), DiLoCo(codec=Codec("top64", feedback=0.95), outer=outer), local(1)[0])
            OuterLoop(small_model(), DiLoCo(codec="e3m0", outer=outer), local(1)[0])
        told = [one for one in seen if "outer=atoll.SGD(lr=1.0)" in str(one.message)]
        assert len(told) == warned and {one.filename for one in told} <= {__file__}

    def test_describe(self) -> None:
        loop = OuterLoop(small_model(), Streaming(fragments=Balanced(count=2)), local(1)[0])
        assert "share" in loop.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(period=0), "period must be a whole number of at least 1, got 0"),
        (lambda: Streaming(period=10, delay=11), r"delay must be between 0 and period \(10\), got 11"),
        (lambda: Streaming(period=10, delay=(1, 11)), r"delay must be between 0 and period \(10\), got 11"),
        (lambda: DiLoCo(period=12.5), "period must be a whole number of at least 1, got 12.5"),  # type: ignore[arg-type]
        (lambda: DiLoCo(period=True), "period must be a whole number of at least 1, got True"),
        (lambda: Streaming(delay=()), r"delay must be a number or one number per worker, got \(\)"),
        (lambda: DiLoCo(codec="fp4"), "codec must be one of"),
        (lambda: DataParallel(codec="fp4"), "codec must be one of"),
        (
            lambda: DataParallel(codec=Codec("top64", feedback=0.9)),
            "codec must be without feedback under DataParallel, got",
        ),
        (lambda: DiLoCo(outer=Nesterov), r"outer must be SGD\(...\) or Momentum\(...\)"),  # type: ignore[arg-type]
        (lambda: DiLoCo(merge=None), "merge must be Blend"),  # type: ignore[arg-type]
        (lambda: OuterLoop([small_model()], DiLoCo(), local(1)[0]), r"model must be a torch\.nn\.Module, got list"),  # type: ignore[arg-type]
        (lambda: OuterLoop(small_model(), DiLoCo(), local(1)), "link must be one worker's end of a link, got list"),  # type: ignore[arg-type]
        (
            lambda: Lockstep([OuterLoop(SHARED, DiLoCo(), end) for end in local(2)]),
            "workers 0 and 1 train the same parameters",
        ),
        (lambda: Problem(workers=1).loops(DiLoCo), "sync must be made by DiLoCo"),  # type: ignore[arg-type]
        (lambda: DiLoCo(merge=EagerMerge()), r"delay must equal period \(500\) under the eager merge, got 0"),
        (lambda: Eager(outer=Adam()), "outer must be Nesterov, Momentum or SGD under the eager merge, got Adam"),
        (lambda: Problem(workers=2).loops(DiLoCo(delay=(1, 2, 3))), "delay has 3 entries for 2 workers"),
        (lambda: Problem(workers=1, weights=(-1.0,)).loops(DiLoCo()), "weight of worker 0 must be a number above 0"),
        (lambda: Problem(workers=1).loops(Streaming(fragments=Blocks(count=9))), "count"),
    ],
)
def test_impossible_settings_say_why(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


def test_defaults_of_presets() -> None:
    diloco, streaming, eager, delayed = DiLoCo(), Streaming(), Eager(), Delayed()
    assert (diloco.period, diloco.delay, diloco.outer, diloco.codec) == (500, 0, Nesterov(0.7, 0.9), Codec("fp32"))
    assert (streaming.period, streaming.delay, streaming.merge) == (100, 1, Blend(0.25))
    assert (streaming.outer, streaming.codec, streaming.fragments) == (Nesterov(0.6, 0.9), Codec("e3m0"), Blocks())
    assert (eager.period, eager.delay, eager.merge, eager.outer) == (30, 30, EagerMerge(), Nesterov(0.4, 0.9))
    assert (delayed.period, delayed.delay, delayed.merge) == (30, 30, Blend(0.0))


def test_public_names() -> None:
    assert len(atoll.__all__) <= 36
    for name in atoll.__all__:
        assert getattr(atoll, name).__doc__, name
