"""Muon for the blocks' matrices and AdamW for the rest, two optimizers around one outer loop, as docs/loop.md shows."""

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from atoll import Blocks, DiLoCo, Eager, Guard, Lockstep, Nesterov, OuterLoop, Streaming, Sync, checkpoint, local
from atoll.errors import AtollError

WORKERS = 2
OUTER = Nesterov(lr=0.7, momentum=0.6)
SYNCS = {
    "diloco": DiLoCo(period=4, outer=OUTER),
    "streaming": Streaming(period=4, fragments=Blocks(each=1), codec="fp32", outer=OUTER),
    "eager": Eager(period=4, codec="fp32", outer=OUTER),
}
every_sync = pytest.mark.parametrize("name", SYNCS)


class Net(nn.Module):
    """An embedding, two blocks with a matrix that Muon turns and one that it does not, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)) for _ in range(2))
        self.head = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return torch.as_tensor(self.head(x))


def net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Net()


class Worker:
    """A model with its two optimizers and its own data."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.model = net()
        matrices = [p for p in self.model.blocks.parameters() if p.ndim == 2]
        others = [p for p in self.model.parameters() if all(p is not matrix for matrix in matrices)]
        self.muon = Muon(matrices, lr=0.02, adjust_lr_fn="match_rms_adamw")
        self.inner: list[Optimizer] = [self.muon, AdamW(others, lr=0.02)]

    def backward(self, step: int, scaler: Any = None) -> None:
        data = torch.Generator().manual_seed(1000 * step + self.number)
        tokens = torch.randint(12, (4, 6), generator=data)
        loss = nn.functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        (loss if scaler is None else scaler.scale(loss)).backward()

    def train(self, step: int) -> None:
        self.backward(step)
        for optimizer in self.inner:
            optimizer.step()
            optimizer.zero_grad()

    def state(self) -> list[Tensor]:
        """Parameters and both optimizers' vectors."""
        states = [optimizer.state[p] for optimizer in self.inner for p in optimizer.param_groups[0]["params"]]
        return [*self.model.parameters(), *(state[key] for state in states for key in sorted(state))]


def crew_of(sync: Sync, **guard: Any) -> tuple[list[Worker], list[OuterLoop]]:
    workers = [Worker(number) for number in range(WORKERS)]
    links = local(WORKERS, timeout_s=60)
    loops = [
        OuterLoop(worker.model, sync, link, guard=Guard(**guard)) for worker, link in zip(workers, links, strict=True)
    ]
    return workers, loops


def train(workers: list[Worker], loops: list[OuterLoop], steps: int) -> None:
    crew = Lockstep(loops)
    for _ in range(steps):
        for worker, loop in zip(workers, loops, strict=True):
            worker.train(loop.steps + 1)
        crew.step()


def assert_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


# ---------------------------------------------------------------------- against a plain loop


def plain_loop(name: str, steps: int) -> tuple[list[Worker], list[Tensor]]:
    """Train by hand; the workers at the end, and the anchor by parameter."""
    workers = [Worker(number) for number in range(WORKERS)]
    parameters = [list(worker.model.parameters()) for worker in workers]
    names = [key for key, _ in workers[0].model.named_parameters()]
    parts = [list(range(len(names)))]
    if name == "streaming":
        blocks = [[i for i, key in enumerate(names) if key.startswith(f"blocks.{b}.")] for b in range(2)]
        parts = [*blocks, [i for i, key in enumerate(names) if not key.startswith("blocks.")]]
    period, delay, alpha = 4, {"diloco": 0, "streaming": 1, "eager": 4}[name], 0.25 if name == "streaming" else 0.0
    anchor = [p.detach().clone() for p in parameters[0]]
    velocity = [torch.zeros_like(p) for p in anchor]
    own = [[torch.zeros_like(p) for p in anchor] for _ in workers]
    start = [[p.clone() for p in anchor] for _ in workers]
    sent: dict[tuple[int, int], list[Tensor]] = {}
    for t in range(1, steps + 1):
        for worker in workers:
            worker.train(t)
        with torch.no_grad():
            for p, i in ((p, i) for p, part in enumerate(parts) for i in part):
                offset = p * period // len(parts)
                if t - offset >= period and (t - offset) % period == 0:
                    sent[t, i] = [start[m][i] - parameters[m][i] for m in range(WORKERS)]
                if (t - delay, i) in sent:
                    first, second = sent[t - delay, i]
                    mean = 0.5 * first + 0.5 * second
                    velocity[i] = 0.6 * velocity[i] + mean
                    anchor[i] = anchor[i] - 0.7 * (0.6 * velocity[i] + mean)
                    for m in range(WORKERS) if name != "eager" else ():
                        parameters[m][i].copy_(alpha * parameters[m][i] + (1 - alpha) * anchor[i])
                        start[m][i] = anchor[i]
                for m in range(WORKERS) if name == "eager" and (t, i) in sent else ():
                    delta = sent[t, i][m]
                    own[m][i] = 0.6 * own[m][i] + delta
                    start[m][i] = anchor[i] - 0.35 * (0.6 * own[m][i] + delta)
                    parameters[m][i].copy_(start[m][i])
    return workers, anchor


@every_sync
def test_both_optimizers_and_the_anchor_have_the_bits_of_a_plain_loop(name: str) -> None:
    """After 14 steps the last merge is some steps ago: what follows depends on momentum that it left alone."""
    workers, loops = crew_of(SYNCS[name])
    train(workers, loops, 14)
    plain, anchor = plain_loop(name, 14)
    for worker, expected in zip(workers, plain, strict=True):
        assert_same(worker.state(), expected.state())
    with loops[0].anchor() as agreed:
        assert_same(list(agreed.parameters()), anchor)


@every_sync
def test_a_merge_leaves_the_momentum_of_both_alone(name: str) -> None:
    workers, loops = crew_of(SYNCS[name])
    crew, merges = Lockstep(loops), 0
    for step in range(1, 10):
        for worker in workers:
            worker.train(step)
        live, before = copy.deepcopy(list(workers[0].model.parameters())), copy.deepcopy(workers[0].state())
        crew.step()
        assert_same(before[len(live) :], workers[0].state()[len(live) :])
        changed = not all(torch.equal(a, b) for a, b in zip(live, workers[0].model.parameters(), strict=True))
        assert changed == loops[0].merged
        merges += changed
    assert merges >= 2


# ---------------------------------------------------------------------- save and resume


@every_sync
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(name: str, tmp_path: Path) -> None:
    whole, loops = crew_of(SYNCS[name])
    train(whole, loops, 14)
    before, saved = crew_of(SYNCS[name])
    train(before, saved, 9)  # with rounds in flight, but for DiLoCo
    for worker, loop in zip(before, saved, strict=True):
        inner = [optimizer.state_dict() for optimizer in worker.inner]
        made = {"model": worker.model.state_dict(), "inner": inner, "outer": loop.state_dict()}
        checkpoint.save(tmp_path / str(worker.number), loop.steps, made)
    after, resumed = [Worker(number) for number in range(WORKERS)], []
    for worker, link in zip(after, local(WORKERS, timeout_s=60), strict=True):
        step, state = checkpoint.load(tmp_path / str(worker.number))
        worker.model.load_state_dict(state["model"])
        for optimizer, one in zip(worker.inner, state["inner"], strict=True):
            optimizer.load_state_dict(one)
        resumed.append(OuterLoop(worker.model, SYNCS[name], link))
        resumed[-1].load_state_dict(state["outer"])
        assert step == 9
    train(after, resumed, 5)
    for worker, expected in zip(after, whole, strict=True):
        assert_same(worker.state(), expected.state())


# ---------------------------------------------------------------------- roll-backs


def test_a_roll_back_makes_both_optimizers_forget() -> None:
    """What follows has the bits of fresh optimizers that start from the anchor."""
    workers, loops = crew_of(SYNCS["diloco"])
    train(workers, loops, 6)
    assert all(optimizer.state for optimizer in workers[1].inner)
    kept = [copy.deepcopy(optimizer.state_dict()["state"]) for optimizer in workers[0].inner]
    loops[1].roll_back()
    assert loops[1].merged and not any(optimizer.state for optimizer in workers[1].inner)
    for optimizer, before in zip(workers[0].inner, kept, strict=True):
        assert str(optimizer.state_dict()["state"]) == str(before), "another worker's optimizers are its own"
    fresh = Worker(1)
    with loops[0].anchor() as agreed:
        fresh.model.load_state_dict(agreed.state_dict())
    for worker in (workers[1], fresh):
        worker.train(7)
    assert_same(workers[1].state(), fresh.state())


def test_a_nan_in_muons_momentum_does_not_outlive_a_roll_back() -> None:
    workers, loops = crew_of(SYNCS["streaming"], leave_out_nonfinite=True)
    crew = Lockstep(loops)
    for step in range(1, 21):
        for worker in workers:
            worker.backward(step)
            if (step, worker.number) == (6, 1):
                for parameter in worker.muon.param_groups[0]["params"]:
                    parameter.grad.fill_(torch.nan)
            for optimizer in worker.inner:
                optimizer.step()
                optimizer.zero_grad()
        crew.step()
    crew.finish()
    assert [loop.counters.roll_backs for loop in loops] == [0, 1]
    assert all(bool(torch.isfinite(value).all()) for worker in workers for value in worker.state())
    assert_same(*(list(worker.model.parameters()) for worker in workers))


# ---------------------------------------------------------------------- a loss scaler


def test_a_scaler_that_skips_one_of_the_two_does_not_shift_the_schedule() -> None:
    """Each optimizer looks at its own gradients, so one may be skipped; the iteration counts all the same."""
    workers, loops = crew_of(SYNCS["streaming"])
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in workers]
    crew = Lockstep(loops)
    for step in range(1, 14):
        for worker, scaler in zip(workers, scalers, strict=True):
            worker.backward(step, scaler)
            skipped = (step, worker.number) == (5, 1)
            if skipped:
                first = worker.model.get_parameter("blocks.0.0.weight").grad
                assert first is not None
                first[0, 0] = torch.inf
            before = copy.deepcopy(worker.state()) if skipped else []
            for optimizer in worker.inner:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            if skipped:
                turned = [torch.equal(a, b) for a, b in zip(before, worker.state(), strict=True)]
                of_muon = {id(p) for p in worker.muon.param_groups[0]["params"]}
                assert [id(p) in of_muon for p in worker.model.parameters()] == turned[
                    : len(list(worker.model.parameters()))
                ]
        crew.step()
    crew.finish()
    assert [scaler.get_scale() for scaler in scalers] == [256.0, 128.0]
    assert [loop.steps for loop in loops] == [13, 13]
    assert loops[0].counters.rounds_applied == loops[1].counters.rounds_applied > 6
    assert_same(*(list(worker.model.parameters()) for worker in workers))


# ---------------------------------------------------------------------- copies of parameters


class Masters(Worker):
    """Both optimizers step on copies of the parameters, as with fp32 masters, and write them back."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.stepped = [p for optimizer in self.inner for p in optimizer.param_groups[0]["params"]]
        for optimizer in self.inner:
            group = optimizer.param_groups[0]
            group["params"] = [p.detach().clone().requires_grad_() for p in group["params"]]
        self.masters = [p for optimizer in self.inner for p in optimizer.param_groups[0]["params"]]

    def train(self, step: int) -> None:
        self.backward(step)
        for master, parameter in zip(self.masters, self.stepped, strict=True):
            master.grad, parameter.grad = parameter.grad, None
        for optimizer in self.inner:
            optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.stepped, strict=True):
                parameter.copy_(master)

    @torch.no_grad()
    def copy_again(self) -> None:
        for master, parameter in zip(self.masters, self.stepped, strict=True):
            master.copy_(parameter)


def test_masters_of_both_are_noticed_unless_they_copy_what_was_merged() -> None:
    for copies_again in (True, False):
        workers = [Masters(number) for number in range(WORKERS)]
        links = local(WORKERS, timeout_s=60)
        loops = [
            OuterLoop(w.model, DiLoCo(period=16, outer=OUTER), link) for w, link in zip(workers, links, strict=True)
        ]
        crew = Lockstep(loops)
        noticed = pytest.raises(AtollError, match="steps on a copy of its own")
        expected: AbstractContextManager[Any] = nullcontext() if copies_again else noticed
        with expected:
            for step in range(1, 100):
                for worker in workers:
                    worker.train(step)
                crew.step()
                for worker, loop in zip(workers, loops, strict=True):
                    if copies_again and loop.merged:
                        worker.copy_again()
