"""The same bits on a GPU as on the CPU: a worker with one and a worker without must agree."""

import copy
import inspect
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from atoll import (
    Delayed,
    DiLoCo,
    Eager,
    Guard,
    Lockstep,
    OuterLoop,
    Streaming,
    Sync,
    checkpoint,
    connect,
    kernels,
    local,
)
from atoll.core.codec import Codec
from atoll.core.flat import fingerprint
from atoll.core.fragments import Balanced
from atoll.core.outer_step import SGD, Adam, Blend, Momentum, Nesterov, OuterOptimizer, weighted_mean
from atoll.errors import NonFiniteError
from atoll.outer.stats import Applied
from atoll.settings import config
from atoll.settings.model_presets import preset
from atoll.train.data.batches import Batches, held_out
from atoll.train.model import head
from atoll.train.model.decoder import Decoder
from atoll.train.ranks.worker_ranks import WorkerRanks
from atoll.train.step.backward import Backward
from atoll.train.step.cuda_graph import GraphedPass
from atoll.train.step.inner_optimizer import InnerOptimizer
from atoll.train.step.recipe import resolve
from atoll.train.step.step_time import probe_step
from atoll.train.trainer import Trainer

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),  # of torch, by torch's compiler
]

AGREE = 5e-4
"""To which share two runs' losses agree."""
BLOCKS = ["int8", "int4", "e3m0", "e2m1"]
CODECS = [Codec(name) for name in ("fp64", "fp32", "bf16", "fp16", *BLOCKS)]
CODECS += [Codec(name, stochastic=True) for name in BLOCKS]
TOP64 = Codec("top64", feedback=0.95)
CODECS += [Codec("lloyd4"), Codec("lloyd2"), TOP64]


def noise(numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 1e-3


@pytest.mark.parametrize("codec", CODECS, ids=str)
@pytest.mark.parametrize("numel", [1, 127, 129, 300_001])
def test_payloads(codec: Codec, numel: int) -> None:
    here, there = codec.encode(noise(numel), 3), codec.encode(noise(numel).cuda(), 3)
    assert torch.equal(here, there.cpu())
    assert torch.equal(codec.decode(here, numel), codec.decode(there, numel).cpu())


@pytest.mark.parametrize("outer", [SGD(), Momentum(), Nesterov(), Adam()], ids=str)
def test_outer_steps(outer: OuterOptimizer) -> None:
    results = []
    for device in ("cpu", "cuda"):
        anchor, *rest = (noise(100_003, seed).to(device) for seed in range(5))
        slots = tuple(slot.abs() for slot in rest[: len(outer.slot_names)])
        mean = weighted_mean(rest, [1.0, 2.0, 0.3, 1.7])
        anchor, slots = outer.step(anchor, slots, mean, 3)
        results.append([t.cpu() for t in (mean, anchor, *slots)])
        assert fingerprint(anchor) == fingerprint(anchor.cpu())
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


SYNCS = [
    DiLoCo(period=4),
    DiLoCo(period=4, outer=Adam()),
    Streaming(period=4, fragments=Balanced(count=3), delay=3, codec=Codec("e3m0", feedback=True)),
    Streaming(period=4, fragments=Balanced(count=2), delay=1),
    Streaming(period=4, fragments=Balanced(count=2), delay=2, merge=Blend(0.0), codec="int4", outer=Momentum()),
    DiLoCo(period=3, codec="bf16", outer=SGD()),
    Eager(period=4),
    Delayed(period=4, codec="int8"),
    DiLoCo(period=4, codec="lloyd2"),
    DiLoCo(period=4, codec=TOP64, outer=SGD(1.0)),
    Streaming(period=4, fragments=Balanced(count=2), delay=1, codec=TOP64),
    Eager(period=4, codec=TOP64),
]


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_loops(sync: Sync) -> None:
    assert torch.equal(train("cpu", sync, stop=13), train("cuda", sync, stop=13))


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_loops_of_parameters_in_bf16(sync: Sync) -> None:
    trained = [train(device, sync, stop=13, dtype=torch.bfloat16) for device in ("cpu", "cuda")]
    assert torch.equal(*trained)


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_four_workers_in_two_shots(sync: Sync) -> None:
    assert torch.equal(train("cpu", sync, stop=13, workers=4), train("cuda", sync, stop=13, workers=4))


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_resume(sync: Sync, tmp_path: Path) -> None:
    assert torch.equal(train("cuda", sync, stop=6, folder=tmp_path), train("cuda", sync, stop=13))


@pytest.mark.parametrize("sync", SYNCS, ids=str)
def test_what_is_kept_in_the_hosts_memory_changes_nothing(sync: Sync, tmp_path: Path) -> None:
    plain = train("cuda", sync, stop=13)
    assert torch.equal(plain, train("cuda", sync, stop=13, offload=True))
    assert torch.equal(plain, train("cuda", sync, stop=6, folder=tmp_path, offload=True))


def test_kernels_and_plain_torch_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    by_kernels = [train("cuda", sync, stop=13) for sync in SYNCS]
    monkeypatch.setattr(kernels, "usable", lambda device: False)
    for sync, expected in zip(SYNCS, by_kernels, strict=True):
        assert torch.equal(train("cuda", sync, stop=13), expected)


@pytest.mark.parametrize("codec", [Codec("e3m0"), Codec("lloyd2"), TOP64], ids=str)
def test_a_worker_on_a_gpu_and_one_without_train_together(codec: Codec) -> None:
    start = model("cpu", torch.float32)
    sync = Streaming(period=4, fragments=Balanced(count=2), delay=1, codec=codec)
    links = local(2)
    loops = [
        OuterLoop(copy.deepcopy(start).to(device), sync, link)
        for device, link in zip(("cpu", "cuda"), links, strict=True)
    ]
    walk(loops, 13)  # every round compares the anchors' fingerprints
    Lockstep(loops).finish()
    here, there = (torch.cat([p.detach().cpu().flatten() for p in loop.model.parameters()]) for loop in loops)
    assert torch.equal(here, there)


@pytest.mark.parametrize("count", [2, 4])  # one shot and two
def test_payloads_through_the_hosts_memory(count: int) -> None:
    sync = Streaming(period=4, fragments=Balanced(count=2), delay=1)
    expected = train("cuda", sync, stop=13, workers=count)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    start = model("cuda", torch.float32)

    def work(worker: int) -> torch.Tensor:
        with connect(address, worker=worker, workers=count, keys="none", deadline_s=60, join_s=60) as link:
            outer = OuterLoop(copy.deepcopy(start), sync, link)
            walk([outer], 13)
            outer.finish()
        return torch.cat([p.detach().cpu().flatten() for p in outer.model.parameters()])

    with ThreadPoolExecutor(count) as threads:
        for found in threads.map(work, range(count)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("offload", [False, True])
def test_rounds_take_no_new_memory_once_warm(offload: bool) -> None:
    sync = Streaming(period=4, fragments=Balanced(count=2), delay=1)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    start = model("cpu", torch.float32, width=4096)  # so that no two vectors share a piece of memory

    def taken() -> list[int]:
        return [torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.host_memory_stats()["num_host_alloc"]]

    def work(device: str) -> list[int]:
        with connect(address, worker=int(device == "cpu"), workers=2, keys="none", deadline_s=60, join_s=60) as link:
            outer = OuterLoop(copy.deepcopy(start).to(device), sync, link, offload=offload and device == "cuda")
            walk([outer], 20)
            before = taken()
            walk([outer], 40)
            found = [now - then for now, then in zip(taken(), before, strict=True)]
            outer.finish()
            return found

    with ThreadPoolExecutor(2) as threads:
        found, _ = threads.map(work, ("cuda", "cpu"))
    assert max(found) <= 2, found  # of 20 rounds; two may meet where they have not met before


def test_parameters_that_do_not_fall_into_stretches() -> None:
    sync = Streaming(period=4, fragments=Balanced(count=2), delay=1)
    assert torch.equal(train("cpu", sync, stop=13, width=51), train("cuda", sync, stop=13, width=51))


def test_rolled_back_and_lent_with_offload() -> None:
    found = []
    for offload in (False, True):
        outer = OuterLoop(
            model("cuda", torch.float32),
            Streaming(period=4, fragments=Balanced(count=2)),
            local(1)[0],
            guard=Guard(leave_out_nonfinite=True),
            offload=offload,
        )
        walk([outer], 9)
        with outer.anchor() as lent:
            anchor = [p.detach().clone() for p in lent.parameters()]
        outer.model.get_parameter("0.weight").data[0, 0] = float("nan")
        walk([outer], 4)
        assert outer.counters.roll_backs == 1
        found.append([*anchor, *(p.detach().clone() for p in outer.model.parameters())])
    assert all(tensor.isfinite().all() for tensor in found[0])
    assert all(torch.equal(here, there) for here, there in zip(*found, strict=True))


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_waits_for_the_device_when_nothing_is_due(offload: bool) -> None:
    sync = Streaming(period=6, fragments=Balanced(count=2))
    outer = OuterLoop(model("cuda", torch.float32), sync, local(1)[0], offload=offload)
    outer.join()  # or the first step does, and reads fingerprints
    quiet = 0
    try:
        for step in range(1, 25):
            if not outer.is_due(step):
                quiet += 1
                torch.cuda.set_sync_debug_mode("error")
            outer.step()
            torch.cuda.set_sync_debug_mode("default")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert quiet > 8


@pytest.mark.parametrize("offload", [False, True])
def test_nothing_holds_up_the_device_where_a_round_is_sent_or_applied(offload: bool) -> None:
    seen: list[Applied] = []
    sync = Streaming(period=6, fragments=Balanced(count=2), delay=2)
    loops = [
        OuterLoop(model("cuda", torch.float32), sync, end, offload=offload, observer=seen.append) for end in local(2)
    ]
    crew = Lockstep(loops)
    for _ in range(14):  # all that is made once
        crew.step()
    try:
        torch.cuda.set_sync_debug_mode("error")
        for _ in range(24):
            crew.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) > 8 and all(applied.norm == 0 for applied in seen)


def test_steps_are_launched_while_the_device_is_busy() -> None:
    """Events are waited for unseen by torch's check: so the device is kept busy, and must be when step() returns."""
    seen: list[Applied] = []
    sync = Streaming(period=4, fragments=Balanced(count=1))
    outer = OuterLoop(model("cuda", torch.float32), sync, local(1)[0], observer=seen.append)
    for _ in range(11):
        outer.step()
    for _ in range(2):  # sent after 12, applied after 13
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # cycles: about a second
        trained = torch.cuda.Event()
        trained.record()
        outer.step()
        assert outer.is_due(outer.steps) and not trained.query()
    assert outer.counters.rounds_sent == outer.counters.rounds_applied == len(seen) == 3


def test_a_nan_in_top64_is_told_at_once() -> None:
    sync = DiLoCo(period=2, codec=TOP64, outer=SGD(1.0))
    outer = OuterLoop(model("cuda", torch.float32), sync, local(1)[0])
    outer.step()
    outer.model.get_parameter("2.weight").data[3, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"parameter '2.weight': a value is nan"):
        outer.step()


def test_a_nan_is_told_with_its_parameter() -> None:
    outer = OuterLoop(model("cuda", torch.float32), Streaming(period=2, fragments=Balanced(count=1)), local(1)[0])
    outer.step()
    outer.model.get_parameter("2.weight").data[3, 5] = float("nan")
    outer.step()
    with pytest.raises(NonFiniteError, match=r"step 2, fragment 0, parameter '2.weight': a value was not finite"):
        outer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_loss_in_parts(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(head, "LOGITS_BYTES", 1)  # parts of 1024 tokens
    torch.manual_seed(0)
    hidden = torch.randn(3, 700, 64, device="cuda", requires_grad=True)
    matrix = torch.randn(1000, 64, device="cuda", requires_grad=True)
    targets = torch.randint(0, 1000, (3, 700), device="cuda")
    with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
        total, cross_entropy = head.head_loss(hidden, matrix, targets, 1e-2)
    (3 * total).backward()
    assert not cross_entropy.requires_grad and hidden.grad is not None and matrix.grad is not None
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, matrix)]
    wanted, _ = head.loss_of_logits(exact[0] @ exact[1].T, targets, 1e-2)
    (3 * wanted).backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5 if dtype == torch.float32 else 3e-3)
    for ours, theirs in ((hidden.grad, exact[0].grad), (matrix.grad, exact[1].grad)):
        assert theirs is not None
        error = (ours.double() - theirs).norm() / theirs.norm()
        assert error < (1e-5 if dtype == torch.float32 else 2e-2)


def trainer(*, compiled: bool) -> Trainer:
    settings = config.parse(
        {
            "model": {"preset": "small"},
            "device": "cuda",
            "compile": compiled,
            "train": {"steps": 40, "batch": 4, "lr": 1e-3, "warmup": 5},
            "sync": {"method": "streaming", "workers": 2, "period": 4},
            "log": {"view": "none"},
        }
    )
    shape = preset("small")
    settings = resolve(settings, parameters=shape.parameters, context=shape.context)
    text = Path(inspect.__file__).read_bytes()[:100_000]  # of noise, a broken run learns as much as a good one
    tokens = np.frombuffer(text, np.uint8)
    assert settings.train.sequence is not None
    batches = Batches([tokens], workers=2, batch=4, sequence=settings.train.sequence, seed=0, device="cuda")
    checks = held_out(tokens, sequence=settings.train.sequence, tokens=4096, batch=4)
    start = Decoder(shape, generator=torch.Generator().manual_seed(0)).to("cuda").train()
    return Trainer(settings, start, batches, checks, local(2))


def final_loss(training: Trainer) -> float:
    while not training.done:
        training.step()
    training.finish()
    training.evaluate()
    return training.best


@pytest.mark.parametrize("resident", [True, False])
def test_batches_are_those_of_the_cpu_and_nobody_waits_for_them(
    resident: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**16, 10_001, np.uint16)
    here, there = (
        Batches([tokens], workers=2, batch=4, sequence=100, seed=0, device=device) for device in ("cpu", "cuda")
    )
    monkeypatch.setattr("atoll.train.data.batches.RESIDENT_BYTES", 2**28 if resident else 0)
    there.batch(0, 0)  # brings the file
    for draw in range(30):
        torch.cuda.set_sync_debug_mode("error")
        try:
            drawn = there.batch(1, draw)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(drawn.cpu(), here.batch(1, draw))


@pytest.mark.parametrize("compiled", [False, True])
def test_two_runs_agree_and_a_resumed_one_goes_on(compiled: bool) -> None:
    """To AGREE: attention and embedding add up gradients in any order, in bf16."""
    once = final_loss(trainer(compiled=compiled))
    assert final_loss(trainer(compiled=compiled)) == pytest.approx(once, rel=AGREE)
    first = trainer(compiled=compiled)
    for _ in range(18):
        first.step()
    second, forgetful = trainer(compiled=compiled), trainer(compiled=compiled)
    second.load_state_dict(first.state_dict())
    forgetful.load_state_dict(first.state_dict() | {"inner": forgetful.state_dict()["inner"]})
    assert final_loss(second) == pytest.approx(once, rel=AGREE)
    assert final_loss(forgetful) != pytest.approx(once, rel=10 * AGREE)  # so that would have been noticed
    torch.compiler.reset()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_graph_leaves_the_gradients_of_the_pass_it_captured(accumulate: int) -> None:
    run = {"device": "cuda", "precision": "fp32", "train": {"batch": 4, "lr": 1e-3, "accumulate": accumulate}}
    shape = preset("tiny")
    settings = resolve(config.parse(run), parameters=shape.parameters, context=shape.context)
    decoder = Decoder(shape, generator=torch.Generator().manual_seed(0)).to("cuda")
    inner = InnerOptimizer(decoder, settings.train)
    plain = Backward(WorkerRanks().wrap(decoder), inner, settings)
    played = GraphedPass(plain, list(decoder.parameters()), torch.cuda.graph_pool_handle())
    for step, length in enumerate([65, 65, 65, 33, 65]):
        if step == 4:  # from then on it is not played
            moved = decoder.get_parameter("blocks.0.qkv.weight")
            moved.data = moved.data.clone()
        tokens = torch.randint(256, (4, length), device="cuda")
        wanted, gradients = plain(tokens), [p.grad.clone() for p in decoder.parameters() if p.grad is not None]
        found = played(tokens)
        assert found.item() == pytest.approx(wanted.item(), rel=1e-5)
        for parameter, gradient in zip(decoder.parameters(), gradients, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)  # sums of an embedding's rows
        inner.clip()
        inner.step(1e-3)


def graphed_workers(name: str, workers: int, batch: int) -> tuple[list[Decoder], list[Backward], list[GraphedPass]]:
    """Returns models of a preset, their passes, and the same passes as graphs that share one memory pool."""
    shape = preset(name)
    settings = resolve(
        config.parse(
            {
                "device": "cuda",
                "precision": "fp32",
                "model": {"preset": name},
                "train": {"batch": batch, "lr": 1e-3},
            }
        ),
        parameters=shape.parameters,
        context=shape.context,
    )
    models = [Decoder(shape, generator=torch.Generator().manual_seed(seed)).to("cuda") for seed in range(workers)]
    plain = [Backward(WorkerRanks().wrap(one), InnerOptimizer(one, settings.train), settings) for one in models]
    pool = torch.cuda.graph_pool_handle()
    graphed = [GraphedPass(act, list(one.parameters()), pool) for act, one in zip(plain, models, strict=True)]
    return models, plain, graphed


def test_graphs_of_two_workers_do_not_disturb_each_other() -> None:
    models, plain, graphed = graphed_workers("tiny", 2, batch=4)
    tokens = [torch.randint(256, (4, 65), device="cuda") for _ in models]
    wanted = []
    for act, one, batch in zip(plain, models, tokens, strict=True):
        act(batch)
        wanted.append([p.grad.clone() for p in one.parameters() if p.grad is not None])
    for order in ((1, 0), (0, 1)):  # captured in one order, replayed in another
        for n in order:
            graphed[n](tokens[n])
        for one, gradients in zip(models, wanted, strict=True):
            for parameter, gradient in zip(one.parameters(), gradients, strict=True):
                torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-6)


def test_graphs_share_the_memory_of_a_pass() -> None:
    models, _, graphed = graphed_workers("small", 4, batch=32)
    tokens = torch.randint(256, (32, preset("small").context + 1), device="cuda")
    gradients, held = 4 * sum(p.numel() for p in models[0].parameters()), []
    for each in graphed:
        each(tokens)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held.append(torch.cuda.memory_reserved())
    a_pass = held[0] - 5 * gradients  # four models and the first one's gradients
    assert a_pass > 10 * gradients  # or there would be nothing to share
    assert held[3] - held[0] < 3 * gradients + 0.1 * a_pass


def test_captured_or_launched_one_by_one_a_run_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    played = trainer(compiled=True)
    with monkeypatch.context() as patch:
        patch.setattr("atoll.train.step.cuda_graph.LARGEST_FLOPS", 0)
        launched = trainer(compiled=True)
    played_pass, launched_pass = (each._local[0].backward for each in (played, launched))
    assert isinstance(played_pass, GraphedPass) and isinstance(launched_pass, Backward)
    assert final_loss(played) == pytest.approx(final_loss(launched), rel=AGREE)
    torch.compiler.reset()


def test_a_step_is_measured_for_a_plan() -> None:
    run = {"model": {"preset": "tiny"}, "train": {"batch": 2, "sequence": 64}, "device": "cuda", "compile": False}
    found = probe_step(config.parse(run), 256, tell=lambda line: None)
    assert 0 < found.step_s < 10 and found.device == torch.cuda.get_device_name()


def model(device: str, dtype: torch.dtype, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 256), nn.GELU(), nn.Linear(256, width)).to(device, dtype)


def train(
    device: str,
    sync: Sync,
    *,
    stop: int,
    folder: Path | None = None,
    workers: int = 3,
    dtype: torch.dtype = torch.float32,
    offload: bool = False,
    width: int = 64,
) -> torch.Tensor:
    """The final parameters after 13 steps; with a folder, by way of checkpoints written after step `stop`."""
    start = model(device, dtype, width)
    seen: list[Applied] = []

    def made() -> list[OuterLoop]:
        ends = local(workers)
        return [OuterLoop(copy.deepcopy(start), sync, end, offload=offload, observer=seen.append) for end in ends]

    loops = made()
    walk(loops, stop)
    if folder is not None:
        for loop in loops:
            state = {"model": loop.model.state_dict(), "outer": loop.state_dict()}
            checkpoint.save(folder / str(loop.link.worker), loop.steps, state)
        loops = made()
        for loop in loops:
            _, state = checkpoint.load(folder / str(loop.link.worker))
            loop.model.load_state_dict(state["model"])
            loop.load_state_dict(state["outer"])
        walk(loops, 13 - stop)
    Lockstep(loops).finish()
    assert seen
    return torch.cat([p.detach().cpu().flatten() for p in loops[0].model.parameters()])


def walk(loops: list[OuterLoop], steps: int) -> None:
    crew = Lockstep(loops)
    for _ in range(steps):
        for loop in loops:
            for number, p in enumerate(loop.model.parameters()):
                seed = 1000 * loop.steps + 100 * loop.link.worker + number
                p.data.sub_(noise(p.numel(), seed).view(p.shape).to(p.device, p.dtype))
        crew.step()
