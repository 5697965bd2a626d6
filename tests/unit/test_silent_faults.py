"""Mistakes that once gave a wrong model silently: each is refused, by the name of what differs."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from atoll import DataParallel, DiLoCo, Eager, Guard, Lockstep, OuterLoop, Streaming, Sync, checkpoint, connect, local
from atoll.core.flat import checksum
from atoll.core.fragments import Balanced
from atoll.errors import AtollError, ConfigError, LinkError, NonFiniteError
from atoll.outer.agreement import MOST_TERMS, frozen_terms
from atoll.outer.presets import Gradients
from fleet import Fleet, Me, free_port
from harness import PRESETS, Problem, bits, preset, spoil, tolerant, train


def lora(base: int) -> nn.ModuleList:
    """A frozen layer, made from a seed, under a trained one that is always the same."""
    torch.manual_seed(base)
    frozen = nn.Linear(4, 4).requires_grad_(False)
    torch.manual_seed(0)
    return nn.ModuleList([frozen, nn.Linear(4, 4)])


def weight(model: nn.Module, name: str = "1.weight") -> Tensor:
    return model.get_parameter(name).data


def meet(models: Sequence[nn.Module], sync: Sync | Gradients | None = None) -> None:
    for model, link in zip(models, local(len(models)), strict=True):
        OuterLoop(model, sync or DiLoCo(period=2), link).join()


class TestFrozenParameters:
    def test_two_base_models_are_refused_by_the_name_of_what_differs(self) -> None:
        with pytest.raises(LinkError, match=r"worker 1 and worker 0 differ in frozen parameter '0\.weight'"):
            meet([lora(0), lora(1)])
        meet([lora(1), lora(1)])

    @pytest.mark.parametrize("sync", [Eager(period=4), DataParallel()])
    def test_one_value_is_enough_under_every_method(self, sync: Sync | Gradients) -> None:
        models = [lora(0), lora(0)]
        weight(models[1], "0.bias")[3] += 1e-7
        with pytest.raises(LinkError, match=r"differ in frozen parameter '0\.bias' [^;]*$"):
            meet(models, sync)

    def test_names_shapes_and_dtypes_count_too(self) -> None:
        other = lora(0)
        other[0].to(torch.bfloat16)
        with pytest.raises(LinkError, match=r"'0\.weight' .*\(4, 4\) bfloat16 .* against \(4, 4\) float32"):
            meet([lora(0), other])
        more = lora(0)
        more.register_parameter("extra", nn.Parameter(torch.ones(2), requires_grad=False))
        with pytest.raises(LinkError, match=r"frozen parameter 'extra' .*left out"):
            meet([lora(0), more])

    def test_a_compiled_copy_is_the_same_model(self) -> None:
        wrapped = nn.Module()
        wrapped.add_module("_orig_mod", lora(0))
        assert frozen_terms(wrapped) == frozen_terms(lora(0))

    def test_a_resumed_run_must_have_the_same_base(self) -> None:
        (loop,) = (OuterLoop(lora(0), DiLoCo(period=2), link) for link in local(1))
        loop.step()
        state = loop.state_dict()
        other = OuterLoop(lora(1), DiLoCo(period=2), local(1)[0])
        with pytest.raises(ConfigError, match=r"saved beside another model: frozen parameter '0\.weight'"):
            other.load_state_dict(state)
        OuterLoop(lora(0), DiLoCo(period=2), local(1)[0]).load_state_dict(state)

    def test_what_each_worker_averages_for_itself_need_not_be_alike(self) -> None:
        """A teacher, or a target network: a frozen copy that follows the parameters of its worker."""

        def loops() -> list[OuterLoop]:
            return [OuterLoop(lora(0), DiLoCo(period=2), link) for link in local(2, timeout_s=20)]

        def step(crew: Sequence[OuterLoop]) -> None:
            for loop in crew:
                weight(loop.model).add_(0.1 * (1 + loop.link.worker))
                weight(loop.model, "0.weight").lerp_(weight(loop.model), 0.1)
            Lockstep(crew).step()

        first, resumed = loops(), loops()
        for _ in range(3):
            step(first)
        for old, new in zip(first, resumed, strict=True):
            new.model.load_state_dict(old.model.state_dict())
            new.load_state_dict(old.state_dict())
        for crew in (first, resumed):
            step(crew)
        assert [bits(loop) for loop in resumed] == [bits(loop) for loop in first]

    def test_a_base_that_one_worker_loads_later_is_refused_when_they_meet(self) -> None:
        first, second = (OuterLoop(lora(0), DiLoCo(period=2), link) for link in local(2))
        second.model.get_submodule("0").load_state_dict(other_state(second.model.get_submodule("0")))
        first.join()
        with pytest.raises(LinkError, match=r"differ in frozen parameter '0\.weight'"):
            second.join()

    def test_many_take_few_bytes_and_the_place_is_still_told(self) -> None:
        model = nn.ParameterDict({f"p{n:05}": nn.Parameter(torch.tensor([float(n)])) for n in range(2000)})
        model.requires_grad_(False)
        before = frozen_terms(model)
        assert len(before) <= MOST_TERMS and sum(len(k) + len(v) for k, v in before.items()) < 100_000
        model["p01321"].data += 1
        after = frozen_terms(model)
        (key,) = (key for key in before if before[key] != after[key])
        first, last = key.split("'")[1::2]
        assert first <= "p01321" <= last

    def test_it_differs_between_processes_too(self, tmp_path: Path) -> None:
        with Fleet(tmp_path, 2).start(adapt) as fleet:
            for worker in fleet.crew:
                assert "differ in frozen parameter '0.weight'" in worker.error()


def adapt(me: Me) -> None:
    with me.link() as link:
        OuterLoop(lora(me.worker), DiLoCo(period=2), link).join()


TENSORS: dict[str, Callable[[], Tensor]] = {
    "uint8": lambda: torch.arange(13, dtype=torch.uint8),
    "int8": lambda: torch.arange(6, dtype=torch.int8).view(2, 3),
    "bool": lambda: torch.tensor([True, False, True]),
    "bf16": lambda: torch.ones(3, dtype=torch.bfloat16),
    "float8": lambda: torch.ones(5).to(torch.float8_e4m3fn),
    "complex": lambda: torch.ones(3, dtype=torch.complex64),
    "scalar": lambda: torch.tensor(1.0),
    "transposed": lambda: torch.arange(6.0).view(2, 3).T,
    "odd offset": lambda: torch.arange(9, dtype=torch.bfloat16)[3:],
    "strided": lambda: torch.arange(20.0)[::3],
}


class TestChecksum:
    @pytest.mark.parametrize("name", TENSORS)
    def test_of_any_dtype_and_layout_it_is_that_of_the_values(self, name: str) -> None:
        tensor = TENSORS[name]()
        copied = tensor.clone(memory_format=torch.contiguous_format)
        assert checksum(tensor) == checksum(copied) != 0
        raw = copied.view(-1).view(torch.uint8)
        for at in (0, -1):
            raw[at] ^= 1
            assert checksum(copied) != checksum(tensor)
            raw[at] ^= 1

    def test_of_nothing_and_of_what_cannot_be_read(self) -> None:
        assert checksum(torch.empty(0)) == 0
        assert checksum(torch.empty(3, device="meta")) == 0
        assert checksum(torch.eye(3).to_sparse()) == 0

    def test_of_a_tensor_made_of_others(self) -> None:
        one, other = TwoTensor(torch.ones(3), torch.ones(3)), TwoTensor(torch.ones(3), torch.zeros(3))
        assert checksum(one) == checksum(TwoTensor(torch.ones(3), torch.ones(3))) != checksum(other)


# ---------------------------------------------------------------------- loaded behind the loop's back


def loop_of(model: nn.Module, sync: Sync | Gradients | None = None) -> OuterLoop:
    return OuterLoop(model, sync or DiLoCo(period=2), local(1)[0])


def other_state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor + 1 for name, tensor in model.state_dict().items()}


class TestLoadedLater:
    @pytest.mark.parametrize("sync", [DiLoCo(period=2), DataParallel()])
    @pytest.mark.parametrize("assign", [False, True])
    def test_parameters_loaded_after_the_loop_was_made_are_refused(self, sync: Any, assign: bool) -> None:
        model = lora(0)
        loop = loop_of(model, sync)
        model.load_state_dict(other_state(model), assign=assign)
        for refused in (loop.join, loop.step, loop.finish):
            with pytest.raises(AtollError, match=r"parameter '1\.weight' \(2 in all\) was loaded"):
                refused()

    def test_a_part_of_the_model_counts_and_a_frozen_part_is_compared_when_workers_meet(self) -> None:
        model = lora(0)
        loop = loop_of(model)
        model[0].load_state_dict(other_state(model[0]))
        loop.step()
        model[1].load_state_dict(other_state(model[1]))
        with pytest.raises(AtollError, match=r"parameter '1\.weight'"):
            loop.step()

    def test_what_is_put_back_is_no_fault(self) -> None:
        """As when averaged parameters are evaluated."""
        model = lora(0)
        loop = loop_of(model)
        for _ in range(3):
            own = copy.deepcopy(model.state_dict())
            model.load_state_dict(other_state(model))
            model.load_state_dict(own)
            weight(model).add_(1)  # an inner step
            loop.step()

    def test_loading_inside_anchor_is_nobodys_business(self) -> None:
        model = lora(0)
        loop = loop_of(model)
        own = copy.deepcopy(model.state_dict())
        with loop.anchor():
            model.load_state_dict(other_state(model))
        loop.step()
        assert torch.equal(weight(model), own["1.weight"])

    def test_a_roll_back_gives_up_what_was_loaded(self) -> None:
        model = lora(0)
        loop = loop_of(model)
        start = weight(model).clone()
        model.load_state_dict(other_state(model))
        loop.roll_back()
        loop.step()
        assert torch.equal(weight(model), start)

    def test_copies_and_pickles_of_the_model_are_free_and_loops_leave_nothing_behind(self) -> None:
        model = lora(0)
        loop = loop_of(model)
        twin = copy.deepcopy(model)
        twin.load_state_dict(other_state(twin))
        torch.save(model, stored := io.BytesIO())
        again = pickle.loads(pickle.dumps(model))
        again.load_state_dict(other_state(again))
        assert stored.tell()
        loop.step()
        del loop
        assert not model._load_state_dict_post_hooks and not model[1]._load_state_dict_pre_hooks


# ---------------------------------------------------------------------- resume


def trained(sync: Sync, weights: tuple[float, ...] = (1.0, 2.0)) -> list[OuterLoop]:
    problem = Problem(workers=2, weights=weights)
    loops = problem.loops(sync)
    train(loops, 7, 0.1)
    return loops


class TestResume:
    @pytest.mark.parametrize("sync", [Eager(period=3), Streaming(period=4, fragments=Balanced(count=2))])
    def test_without_its_model_or_with_another_ones_a_state_is_refused(self, sync: Sync) -> None:
        saved = trained(sync)
        fresh = Problem(workers=2, weights=(1.0, 2.0)).loops(sync)
        before = bits(fresh[0])
        with pytest.raises(ConfigError, match=r"parameter 'parts\.[01]\.values' of fragment 0 .*restore the model"):
            fresh[0].load_state_dict(saved[0].state_dict())
        assert bits(fresh[0]) == before and fresh[0].steps == 0
        fresh[0].model.load_state_dict(saved[1].model.state_dict())
        with pytest.raises(ConfigError, match=r"restore the model of the same checkpoint first"):
            fresh[0].load_state_dict(saved[0].state_dict())
        fresh[0].model.load_state_dict(saved[0].model.state_dict())
        weight(fresh[0].model, "parts.3.values")[1] += 1e-9
        with pytest.raises(ConfigError, match=r"parameter 'parts\.3\.values' of fragment \d \(1 of its"):
            fresh[0].load_state_dict(saved[0].state_dict())

    def test_data_parallel_too(self) -> None:
        saved, fresh = loop_of(lora(0), DataParallel()), loop_of(lora(0), DataParallel())
        weight(saved.model, "1.bias").add_(1)
        with pytest.raises(ConfigError, match=r"parameter '1\.bias' of fragment 0 \(1 of its 2 parameters\)"):
            fresh.load_state_dict(saved.state_dict())

    def test_another_weight_is_refused_with_both(self) -> None:
        saved = trained(Eager(period=3))
        fresh = Problem(workers=2, weights=(1.5, 2.0)).loops(Eager(period=3))
        fresh[0].model.load_state_dict(saved[0].model.state_dict())
        with pytest.raises(ConfigError, match=r"weight: the state was saved with 1\.0, this is 1\.5"):
            fresh[0].load_state_dict(saved[0].state_dict())

    def test_states_of_older_versions_are_loaded(self, tmp_path: Path) -> None:
        saved = trained(Eager(period=3))
        fresh = Problem(workers=2, weights=(1.0, 2.0)).loops(Eager(period=3))
        for old, new in zip(saved, fresh, strict=True):
            state = old.state_dict()
            for key in ("weight", "frozen", "live"):
                del state[key]
            for fragment in state["fragments"]:
                del fragment["step"]
            checkpoint.save(tmp_path / str(old.link.worker), 7, {"model": old.model.state_dict(), "outer": state})
            _, state = checkpoint.load(tmp_path / str(old.link.worker))
            new.model.load_state_dict(state["model"])
            new.load_state_dict(state["outer"])
        train(saved, 5, 0.1)
        train(fresh, 5, 0.1)
        assert [bits(loop) for loop in fresh] == [bits(loop) for loop in saved]


# ---------------------------------------------------------------------- merges that are undone


class Masters:
    """SGD on a copy of the parameters, as with fp32 masters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.live, self.lr = list(parameters), lr
        self.take()

    def take(self) -> None:
        self.copies = [p.detach().float().clone() for p in self.live]

    @torch.no_grad()
    def step(self) -> None:
        for p, copied in zip(self.live, self.copies, strict=True):
            copied -= self.lr * p.grad.float()
            p.copy_(copied)


def regression(
    make: Callable[..., Any],
    sync: Sync,
    *,
    lr: float = 0.05,
    steps: int = 120,
    workers: int = 2,
    dtype: torch.dtype = torch.float32,
    refresh: bool = False,
    warmup: int = 0,
) -> list[OuterLoop]:
    """Workers that want different things of one linear map, stepped together."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)).to(dtype)
    models = [copy.deepcopy(start) for _ in range(workers)]
    loops = [OuterLoop(m, sync, link) for m, link in zip(models, local(workers), strict=True)]
    inner, data = [make(m.parameters(), lr=lr) for m in models], torch.Generator().manual_seed(1)
    crew = Lockstep(loops)
    for step in range(steps):
        for k, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            x = torch.randn(16, 8, generator=data).to(dtype)
            model.zero_grad()
            (model(x) - x.roll(1 + k, 1)).square().mean().backward()
            if warmup:
                optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / warmup)
            optimizer.step()
        crew.step()
        for loop, optimizer in zip(loops, inner, strict=True):
            if refresh and loop.merged:
                optimizer.take()
    crew.finish()
    return loops


WATCHED: dict[str, Sync] = {
    "diloco": DiLoCo(period=5),
    "streaming": Streaming(period=8, fragments=Balanced(count=2), delay=2),
    "eager": Eager(period=6, outer=DiLoCo().outer),
}


class TestUndoneMerges:
    @pytest.mark.parametrize("name", WATCHED)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_an_optimizer_that_steps_on_its_own_copy_is_found_out(self, name: str, dtype: torch.dtype) -> None:
        with pytest.raises(AtollError, match=r"worker 0: .*steps on a copy of its own, such as fp32 masters"):
            regression(Masters, WATCHED[name], dtype=dtype, lr=0.2 if dtype == torch.bfloat16 else 0.05)

    @pytest.mark.parametrize("name", WATCHED)
    def test_one_that_takes_the_parameters_anew_is_not(self, name: str) -> None:
        regression(Masters, WATCHED[name], refresh=True)

    @pytest.mark.parametrize("lr", [0.0, 0.5, 1.5])
    @pytest.mark.parametrize("period", [1, 2, 5])
    def test_no_learning_rate_and_no_period_looks_like_it(self, lr: float, period: int) -> None:
        regression(torch.optim.SGD, DiLoCo(period=period), lr=lr, steps=60)

    @pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Rprop])
    @pytest.mark.parametrize("name", WATCHED)
    def test_no_optimizer_of_torch_looks_like_it(self, make: Callable[..., Any], name: str) -> None:
        regression(make, WATCHED[name], lr=0.02, workers=3, steps=60, warmup=40)

    @pytest.mark.parametrize("rate", [0.8, 1.0, 1.2])
    @pytest.mark.parametrize("period", [2, 4])
    @pytest.mark.parametrize("warmup", [1, 20])
    def test_one_step_to_ones_own_goal_is_no_copy(self, rate: float, period: int, warmup: int) -> None:
        """Each worker pulls to its own goal, nearly all the way in one step: what a merge moved is taken back."""
        models = [nn.Linear(64, 1, bias=False) for _ in range(2)]
        goals = [torch.randn(1, 64), torch.randn(1, 64)]
        models[1].load_state_dict(models[0].state_dict())
        loops = [OuterLoop(m, DiLoCo(period=period), link) for m, link in zip(models, local(2), strict=True)]
        crew = Lockstep(loops)
        for step in range(40):
            with torch.no_grad():
                for model, goal in zip(models, goals, strict=True):
                    model.weight.grad = model.weight - goal
                    model.weight -= rate * min(1.0, (step + 1) / warmup) * model.weight.grad
            crew.step()
        crew.finish()

    def test_only_the_first_merges_are_looked_at_and_of_them_few_values(self) -> None:
        model = nn.Linear(3000, 1000)
        loop = loop_of(model, DiLoCo(period=2))
        assert 0 < loop._windows[0].sample().numel() < 20_000
        calls: list[int] = []
        sample = loop._windows[0].sample

        def counted(*, gradients: bool = False) -> Tensor:
            calls.append(loop.steps)
            return sample(gradients=gradients)

        loop._windows[0].sample = counted  # type: ignore[method-assign]
        for _ in range(60):
            loop.step()
        assert calls and max(calls) < 40

    def test_merged_tells_when_parameters_were_written(self) -> None:
        loops = Problem(workers=2).loops(Streaming(period=4, fragments=Balanced(count=1), delay=1))
        told = []
        for _ in range(10):
            train(loops, 1, 0.1)
            told.append(loops[0].merged)
        assert [step for step, merged in enumerate(told, 1) if merged] == [5, 9]
        loops[0].roll_back()
        assert loops[0].merged


# ---------------------------------------------------------------------- one torchrun over all workers


class TestDefaultGroup:
    @pytest.fixture
    def started(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29499", "RANK": "1", "WORLD_SIZE": "2"}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)

    @pytest.mark.usefixtures("started")
    def test_without_a_store_of_torchrun_keys_must_be_given(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with pytest.raises(ConfigError, match="no store of torchrun to hand them out"):
            connect(join_s=0.1)
        monkeypatch.setenv("RANK", "first")
        with pytest.raises(ConfigError, match="was not started by torchrun"):
            connect(join_s=0.1)

    @pytest.mark.usefixtures("started")
    def test_a_group_that_spans_the_workers_is_refused_when_they_meet(self) -> None:
        loop = OuterLoop(lora(0), DiLoCo(period=2), connect(keys="none", join_s=0.1))
        distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
        try:
            with pytest.raises(ConfigError, match=r"spans 2 processes.*connect\(\"127\.0\.0\.1:PORT\", worker=1"):
                loop.join()
            link = connect("127.0.0.1:29499", worker=1, workers=2, keys="none", join_s=0.1)
            own = OuterLoop(lora(0), DiLoCo(period=2), link)
            with pytest.raises(LinkError, match="finds no worker 0"):  # this far it comes
                own.join()
        finally:
            distributed.destroy_process_group()

    @pytest.mark.usefixtures("started")
    def test_without_one_or_with_one_of_this_process_alone_it_goes_on(self) -> None:
        for group in (False, True):
            if group:
                distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
            try:
                with pytest.raises(LinkError, match="finds no worker 0"):
                    OuterLoop(lora(0), DiLoCo(period=2), connect(keys="none", join_s=0.1)).join()
            finally:
                if group:
                    distributed.destroy_process_group()


# ---------------------------------------------------------------------- numbers that are not finite


def with_inner(loops: Sequence[OuterLoop], inner: Sequence[Any], steps: int, spoilt: int) -> None:
    """Steps of all workers; the gradient of worker 1 is NaN once."""
    crew = Lockstep(loops)
    for step in range(1, steps + 1):
        for loop, optimizer in zip(loops, inner, strict=True):
            for p in loop.model.parameters():
                p.grad = p.detach() - loop.link.worker
                if step == spoilt and loop.link.worker == 1:
                    p.grad.fill_(torch.nan)
            optimizer.step()
        crew.step()


class Momentum:
    """An optimizer that torch does not know of."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.buffers = {parameter: torch.zeros_like(parameter) for parameter in parameters}

    @torch.no_grad()
    def step(self) -> None:
        for parameter, buffer in self.buffers.items():
            assert parameter.grad is not None
            buffer.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.01 * buffer)

    def forget(self) -> None:
        for buffer in self.buffers.values():
            buffer.zero_()


class TestRolledBackAgainAndAgain:
    @pytest.mark.parametrize("sync", [DiLoCo(period=3), Streaming(period=4, fragments=Balanced(count=2), delay=2)])
    def test_an_optimizer_that_is_not_torchs_keeps_nan_and_the_second_roll_back_says_so(self, sync: Sync) -> None:
        loops = tolerant(Problem(workers=3), sync)
        inner = [Momentum(loop.model.parameters()) for loop in loops]
        with pytest.raises(NonFiniteError, match=r"worker 1, step \d+: rolled back 2 times in a row.*on_roll_back"):
            with_inner(loops, inner, 20, spoilt=2)

    @pytest.mark.parametrize("sync", [DiLoCo(period=3), Streaming(period=4, fragments=Balanced(count=2), delay=2)])
    def test_one_that_is_reset_comes_back(self, sync: Sync) -> None:
        models = [nn.Linear(4, 4) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        inner = [Momentum(model.parameters()) for model in models]
        loops = [
            OuterLoop(model, sync, link, guard=Guard(leave_out_nonfinite=True, on_roll_back=optimizer.forget))
            for model, link, optimizer in zip(models, local(2), inner, strict=True)
        ]
        with_inner(loops, inner, 20, spoilt=2)
        assert [loop.counters.roll_backs for loop in loops] == [0, 1]
        assert all(torch.isfinite(p).all() for p in models[1].parameters())

    def test_two_that_are_not_in_a_row_are_forgiven(self) -> None:
        loops = tolerant(Problem(workers=3), DiLoCo(period=2))
        for _ in range(4):
            train(loops, 1, 0.05)
            spoil(loops[1])
            train(loops, 1, 0.05)
            train(loops, 4, 0.05)  # left out of the first of these rounds, and not of the second
        assert loops[1].counters.roll_backs == 4


def end_badly(me: Me, how: str) -> None:
    """Worker 1 comes to an error of its own, and nobody closes the link."""
    link = me.link()
    loop = OuterLoop(lora(0), DiLoCo(period=2), link)
    for step in range(4):
        if me.worker == 1 and step == 3:
            weight(loop.model, "1.bias")[0] = torch.nan
        try:
            loop.step()
        except NonFiniteError as fault:
            if how == "script":
                sys.last_value = fault  # as Python does when an error ends a script
                return
            raise


def test_the_others_are_told_what_ended_a_script_that_never_closed_its_link(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2).start(end_badly, "script") as fleet:
        told = fleet[0].error()
        assert "worker 1 left: its process has ended without closing the link: NonFiniteError: worker 1" in told
        assert "step 4, fragment 0, parameter '1.bias'" in told


# ---------------------------------------------------------------------- how old an anchor is


class TestAgeOfAnAnchor:
    def test_it_is_the_step_after_which_the_last_applied_round_was_sent(self) -> None:
        loops = Problem(workers=2).loops(DiLoCo(period=4))
        seen = []
        for _ in range(9):
            seen.append(loops[0].anchor_step)
            train(loops, 1, 0.1)
        assert seen == [0, 0, 0, 0, 4, 4, 4, 4, 8]
        Lockstep(loops).finish()
        assert loops[0].anchor_step == 9

    def test_a_delay_and_several_fragments_make_it_older(self) -> None:
        loops = Problem(workers=2).loops(Streaming(period=4, fragments=Balanced(count=2), delay=1))
        seen = []
        for _ in range(12):
            train(loops, 1, 0.1)
            seen.append(loops[0].anchor_step)
        assert seen == [0, 0, 0, 0, 0, 0, 4, 4, 6, 6, 8, 8]  # sent after 4, 6, 8 ...; the older of the two counts

    @pytest.mark.parametrize("name", PRESETS)
    def test_the_anchor_is_that_of_the_end_once_a_run_is_finished(self, name: str) -> None:
        loops = Problem().loops(preset(name, 3))
        train(loops, 13, 0.1)
        assert loops[0].anchor_step < 13
        Lockstep(loops).finish()
        assert [loop.anchor_step for loop in loops] == [13] * 3

    def test_it_is_saved_and_under_data_parallel_it_is_now(self) -> None:
        loops = trained(Eager(period=3))
        fresh = Problem(workers=2, weights=(1.0, 2.0)).loops(Eager(period=3))
        fresh[0].model.load_state_dict(loops[0].model.state_dict())
        fresh[0].load_state_dict(loops[0].state_dict())
        assert fresh[0].anchor_step == loops[0].anchor_step == 3
        gradients = loop_of(lora(0), DataParallel())
        assert gradients.anchor_step == 0


# ---------------------------------------------------------------------- whole scripts


WORKER = """
import sys, torch, atoll
from torch import nn
worker, address = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Linear(4, 4)

def main():
    link = atoll.connect(address, worker=worker, workers=2, keys="none", join_s=60)
    outer = atoll.OuterLoop(model, atoll.DiLoCo(period=2), link)
    for step in range(100):
        if worker == 1 and step == 5:
            model.weight.data[0, 0] = torch.nan
        outer.step()

if __name__ == "__main__":
    if len(sys.argv) > 3:
        process = torch.multiprocessing.get_context(sys.argv[3]).Process(target=main)
        process.start()
        process.join()
        raise SystemExit(process.exitcode)
    main()
"""
DDP = """
import sys, torch, atoll
from torch import distributed, nn
torch.set_num_threads(1)
torch.manual_seed(0)
link = atoll.connect(join_s=60)
distributed.init_process_group("gloo")
model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
outer = atoll.OuterLoop(model.module, atoll.DiLoCo(period=2), link)
model(torch.ones(1, 4)).sum().backward()
try:
    outer.step()
except atoll.errors.ConfigError as fault:
    print("refused:", fault)
finally:
    distributed.destroy_process_group()
"""


def script(folder: Path, text: str) -> str:
    (folder / "script.py").write_text(text)
    return str(folder / "script.py")


@pytest.mark.slow
@pytest.mark.parametrize("how", [[], ["fork"]], ids=["script", "child process"])
def test_a_script_that_a_nan_ends_tells_the_others(how: list[str], tmp_path: Path) -> None:
    command = [sys.executable, script(tmp_path, WORKER)]
    arguments = (f"127.0.0.1:{free_port()}", *how)
    workers = [subprocess.Popen([*command, str(k), *arguments], stderr=subprocess.PIPE, text=True) for k in range(2)]
    errors = [worker.communicate(timeout=120)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [1, 1]
    assert "NonFiniteError: worker 1, step 6, fragment 0, parameter 'weight'" in errors[1]
    assert (
        "worker 1 left: its process has ended without closing the link: NonFiniteError: worker 1, step 6" in errors[0]
    )


@pytest.mark.slow
def test_ddp_over_all_processes_of_a_torchrun_is_refused(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ran = subprocess.run([*torchrun, script(tmp_path, DDP)], capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("a default process group spans 2 processes of this torchrun") == 2
