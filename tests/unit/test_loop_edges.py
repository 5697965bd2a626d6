"""The outer loop on links that tell less, in rounds that nobody reached, and with states that a GPU has saved."""

import copy
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from atoll import Balanced, DataParallel, DiLoCo, Eager, Guard, Lockstep, OuterLoop, Streaming, Sync, local, run_local
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import ConfigError, LinkError, NonFiniteError
from atoll.link.base import Link, Offer, Pending, Round, RoundId
from atoll.link.local import Faults, LocalLink
from atoll.outer.stats import Applied, Products, mean_square
from harness import Problem, Toy, by_part, toy, train, train_data_parallel


@dataclass
class Changed:
    """A round of another link, changed when it has come in."""

    pending: Pending
    change: Callable[[Round], Round]

    def wait(self) -> Round:
        return self.change(self.pending.wait())


class Changing(Link):
    """A link written by a user on top of another."""

    def __init__(self, inner: Link, change: Callable[[Round], Round]) -> None:
        self.worker, self.workers = inner.worker, inner.workers
        self._inner, self._change = inner, change

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        self._inner.join(terms, weight, start)

    def weights(self, step: int) -> Mapping[int, float]:
        return self._inner.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        return Changed(self._inner.open(round_id, offer, reduction), self._change)

    def close(self, reason: str | None = None) -> None:
        self._inner.close(reason)


def loops_behind(change: Callable[[Round], Round], workers: int, seen: list[Applied]) -> list[OuterLoop]:
    problem = Problem()
    return [
        OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=2), Changing(link, change), observer=seen.append)
        for link in local(workers)
    ]


# ---------------------------------------------------------------------- links that tell less


def test_a_link_need_not_tell_how_a_round_travelled() -> None:
    seen: list[Applied] = []
    loops = loops_behind(lambda completed: replace(completed, transfer=None), 2, seen)
    train(loops, 4, 0.1)
    assert loops[0].counters.rounds_applied == 2 and loops[0].counters.hidden_s == 0
    assert all(applied.transfer is None for applied in seen)


def test_a_payload_of_another_length_is_refused_with_its_worker() -> None:
    def cut(completed: Round) -> Round:
        first, second = completed.payloads
        return replace(completed, payloads=(first, second[:-1]))

    with pytest.raises(LinkError, match="step 2, fragment 0: worker 1 sent 39 bytes where 40 were due"):
        train(loops_behind(cut, 2, []), 2, 0.1)


def test_inner_products_that_come_with_a_mean_are_those_of_the_payloads() -> None:
    def without_payloads(completed: Round) -> Round:
        deltas = torch.stack([Codec("fp32").decode(payload, 10).double() for payload in completed.payloads])
        return replace(completed, payloads=(), inner=deltas @ deltas.T)

    runs: list[list[Applied]] = [[], []]
    for change, seen in zip((lambda completed: completed, without_payloads), runs, strict=True):
        train(loops_behind(change, 4, seen), 4, 0.1)
    for plain, told in zip(*runs, strict=True):
        assert told.members == plain.members == (0, 1, 2, 3)
        assert told.norm == pytest.approx(plain.norm) and told.cosine == pytest.approx(plain.cosine)


# ---------------------------------------------------------------------- observed rounds


def test_the_square_of_a_mean_follows_from_the_products_of_its_terms() -> None:
    deltas = torch.randn(3, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    weights, inner = (1.0, 2.0, 5.0), deltas @ deltas.T
    known, counted = Products(), Products()
    known.add_known(inner, mean_square(inner, weights))
    counted.add(list(deltas), (deltas * torch.tensor(weights, dtype=torch.float64)[:, None] / 8).sum(0))
    completed = Round(RoundId(1, 0), (), ())
    assert known.applied(completed, 1).sums == pytest.approx(counted.applied(completed, 1).sums)


def test_a_round_of_one_has_a_norm_and_no_cosine_and_can_be_printed() -> None:
    seen: list[Applied] = []
    problem = Problem()
    loop = OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=2), local(1)[0], observer=seen.append)
    train([loop], 2, 0.1)
    (applied,) = seen
    assert applied.norm > 0 and applied.cosine is None
    assert repr(applied) == f"Applied(step 2, fragment 0, step=2, members=(0,), norm={applied.norm}, cosine=None)"


@pytest.mark.parametrize("workers", [2, 4])
def test_a_fragment_without_values_has_rounds_like_any_other(workers: int) -> None:
    seen: list[Applied] = []
    loops = [OuterLoop(Toy(np.zeros(0), (0,)), DiLoCo(period=1), link, observer=seen.append) for link in local(workers)]
    Lockstep(loops).step()
    assert len(seen) == workers and all(applied.norm == 0 and applied.cosine == 0 for applied in seen)


# ---------------------------------------------------------------------- rounds without this worker


def test_gradients_that_nobody_received_are_zeros() -> None:
    problem = Problem(workers=2, faults=Faults(drop=1.0))
    loops = problem.loops(DataParallel())
    train_data_parallel(loops, 1, 0.1)
    assert all((p.grad == 0).all() for loop in loops for p in loop.model.parameters() if p.grad is not None)
    assert np.array_equal(toy(loops[0]).vector(), problem.start)


@pytest.mark.parametrize("sync", [Streaming(period=4, fragments=by_part(4), delay=3), Eager(period=4)], ids=str)
def test_a_worker_rolled_back_with_rounds_in_flight_finishes_with_the_others(sync: Sync) -> None:
    loops = Problem().loops(sync)
    train(loops, 9, 0.1)
    loops[1].roll_back()
    Lockstep(loops).finish()
    assert len({toy(loop).vector().tobytes() for loop in loops}) == 1


SAVED_LATE = Streaming(period=4, fragments=by_part(4), delay=3)


def late_loops(guard: Guard) -> list[OuterLoop]:
    """Two workers, taken up from a state that a GPU has saved before it knew that worker 1 could not send its delta."""
    problem = Problem(workers=2)

    def made() -> list[OuterLoop]:
        models = [Toy(problem.start, problem.sizes) for _ in range(2)]
        return [OuterLoop(m, SAVED_LATE, link, guard=guard) for m, link in zip(models, local(2), strict=True)]

    before, after = made(), made()
    train(before, 5, 0.1)
    for old, new in zip(before, after, strict=True):
        state = old.state_dict()
        if old.link.worker == 1:
            for flight in state["flights"]:
                flight |= {"unsent": True, "payload": None, "anchor": None, "size": None}
        new.model.load_state_dict(old.model.state_dict())
        new.load_state_dict(state)
    return after


def test_what_a_saved_state_could_not_send_is_left_out_and_its_worker_rolled_back() -> None:
    loops = late_loops(Guard(leave_out_nonfinite=True))
    train(loops, 3, 0.1)
    assert [loop.counters.roll_backs for loop in loops] == [0, 1]
    assert [loop.counters.rounds_left_out for loop in loops] == [0, 4]  # each fragment's next round
    train(loops, 12, 0.1)
    Lockstep(loops).finish()
    assert np.array_equal(toy(loops[0]).vector(), toy(loops[1]).vector())


def test_what_a_saved_state_could_not_send_is_an_error_that_names_the_round() -> None:
    loops = late_loops(Guard())
    with pytest.raises(NonFiniteError, match="worker 1, step 4, fragment 0: a value was not finite, or too large"):
        train(loops, 3, 0.1)


# ---------------------------------------------------------------------- the rest


def test_what_is_due_can_be_asked_for_any_step() -> None:
    (loop,) = Problem(workers=1).loops(Streaming(period=8, fragments=by_part(4), delay=1))
    assert [step for step in range(1, 14) if loop.is_due(step)] == [8, 9, 10, 11, 12, 13]
    (plain,) = Problem(workers=1).loops(DiLoCo(period=5))
    assert [step for step in range(1, 12) if plain.is_due(step)] == [5, 10]


def test_offload_without_a_gpu_is_refused() -> None:
    with pytest.raises(ConfigError, match="offload is for parameters on a GPU"):
        OuterLoop(nn.Linear(2, 2), DiLoCo(), local(1)[0], offload=True)


def test_loops_share_one_hook_of_torch_and_are_freed() -> None:
    model = nn.Linear(2, 2)
    first = OuterLoop(model, DiLoCo(), local(1)[0])
    hooks = len(torch_optimizer._global_optimizer_post_hooks)
    loop = OuterLoop(model, DiLoCo(), local(1)[0])
    assert len(torch_optimizer._global_optimizer_post_hooks) == hooks
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    assert first._roll_backs._optimizers.found


def test_an_interrupt_ends_the_workers_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, ended = threading.Barrier(3), list[str]()

    def interrupted(futures: object) -> None:
        opened.wait(20)
        raise KeyboardInterrupt

    def work(link: LocalLink) -> None:
        pending = link.open(RoundId(1, link.worker), None, Reduction(Codec(), 6))  # another on each
        opened.wait(20)
        try:
            pending.wait()
        except LinkError as error:
            ended.append(str(error))

    monkeypatch.setattr("atoll.link.local.wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_local(work, local(2, timeout_s=20))
    assert len(ended) == 2 and all("interrupted by KeyboardInterrupt" in message for message in ended)


@pytest.mark.parametrize(
    ("arguments", "setting"),
    [({"leave_out_nonfinite": "no"}, "leave_out_nonfinite"), ({"on_roll_back": 3}, "on_roll_back")],
)
def test_a_guard_of_wrong_types_is_refused(arguments: dict[str, Any], setting: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Guard(**arguments)
    assert refusal.value.setting == setting


@pytest.mark.parametrize("arguments", [{"guard": True}, {"observer": 3}])
def test_a_loop_with_wrong_arguments_is_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(arguments))):
        OuterLoop(nn.Linear(2, 2), DiLoCo(), local(1)[0], **arguments)


def test_training_without_a_single_step_of_the_loop_is_warned_about_where_it_ends() -> None:
    def work(link: LocalLink) -> None:
        model = copy.deepcopy(start)
        outer = OuterLoop(model, DiLoCo(), link)
        with torch.no_grad():
            model.weight.add_(1.0)
        outer.finish()

    start = nn.Linear(2, 2)
    with pytest.warns(UserWarning, match=r"outer\.step\(\) was never called") as seen:
        run_local(work, local(2))
    assert {one.filename for one in seen} == {__file__}


def test_a_finish_that_was_refused_leaves_nothing_behind() -> None:
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    outer = OuterLoop(nn.Sequential(*layers), DiLoCo(period=4, fragments=Balanced(count=2)), local(1)[0])
    outer.step()
    first, second = (layer.weight for layer in layers)
    with torch.no_grad():
        first.add_(1.0)
        second[0, 0] = float("nan")
    trained = first.clone()
    with pytest.raises(NonFiniteError):
        outer.finish()
    with torch.no_grad():
        second[0, 0] = 0.0
    outer.step()
    assert outer.counters.roll_backs == 0 and torch.equal(first, trained)


def test_a_step_that_another_worker_has_refused_leaves_nothing_behind() -> None:
    start = nn.Linear(4, 4)
    models = [copy.deepcopy(start) for _ in range(2)]
    outers = [OuterLoop(m, DiLoCo(period=2), link) for m, link in zip(models, local(2), strict=True)]
    workers = Lockstep(outers)
    workers.step()
    with torch.no_grad():
        models[0].weight.add_(1.0)
        models[1].weight[0, 0] = float("nan")
    trained = models[0].weight.clone()
    with pytest.raises(NonFiniteError):
        workers.step()
    outers[1].roll_back()
    workers.step()
    assert outers[0].counters.roll_backs == 0
    assert torch.allclose(models[0].weight, trained, atol=1.0)


def test_a_frozen_part_that_was_loaded_after_the_start_is_each_workers_own_when_resumed() -> None:
    def make(link: LocalLink) -> tuple[nn.ModuleDict, OuterLoop]:
        model = nn.ModuleDict({"online": nn.Linear(2, 2), "target": nn.Linear(2, 2)})
        model.load_state_dict(start.state_dict())
        model["target"].requires_grad_(False)
        return model, OuterLoop(model, DiLoCo(period=4), link)

    def work(link: LocalLink) -> None:
        model, outer = make(link)
        outer.step()
        with torch.no_grad():
            next(model["online"].parameters()).add_(link.worker)
        model["target"].load_state_dict(model["online"].state_dict())
        saved[link.worker] = copy.deepcopy((model.state_dict(), outer.state_dict()))

    def resume(link: LocalLink) -> None:
        model, outer = make(link)
        parameters, state = saved[link.worker]
        model.load_state_dict(parameters)
        outer.load_state_dict(state)
        outer.step()

    start = nn.ModuleDict({"online": nn.Linear(2, 2), "target": nn.Linear(2, 2)})
    saved: dict[int, Any] = {}
    run_local(work, local(2))
    run_local(resume, local(2))


def test_adagrad_over_a_part_of_a_model_is_reset_to_its_start() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.Adagrad(model[0].parameters(), initial_accumulator_value=0.5)
    outer = OuterLoop(model, DiLoCo(), local(1)[0])
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    outer.roll_back()
    states = optimizer.state_dict()["state"].values()
    assert [float(state["step"]) for state in states] == [0.0, 0.0]
    assert all(bool((state["sum"] == 0.5).all()) for state in states)


@pytest.mark.parametrize("finishes", [True, False])
def test_a_worker_that_ends_without_finish_is_warned_about(finishes: bool) -> None:
    def work(link: LocalLink) -> None:
        outer = OuterLoop(copy.deepcopy(start), DiLoCo(period=1), link)
        outer.step()
        if finishes:
            outer.finish()

    start = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_local(work, local(2))
    assert any("without outer.finish()" in str(one.message) for one in seen) != finishes
