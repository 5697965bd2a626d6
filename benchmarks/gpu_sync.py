"""What the outer loop costs on a GPU: its kernels against a plain copy, its rounds, its memory.

    python benchmarks/gpu_sync.py kernels [--values 100000000]
    python benchmarks/gpu_sync.py rounds [--presets 35M 300M 1B] [--periods 3]
    python benchmarks/gpu_sync.py memory [--presets 35M 300M 1B]

kernels: bytes that each kernel must read and write, over the time it takes, as a share of the rate at which a vector of
that length is copied in the same run (medians of many). Payloads lie where the loop puts them; that it copies a
round's payloads there before it decodes them is not in these rows, but in "added" below.

rounds: two worker processes on this GPU have the same preset with Streaming in e3m0, period 30, and exchange over
loopback. Periods with an outer loop and periods without take turns, and both processes begin each together; "added" is
the difference in time, per step, as a share of the step without, the median over periods. Three cases: both train, and
share the GPU; only the first trains, almost as if it had a GPU to itself, while the second sends and receives (whose
kernels are in "added" too, for they run on the same GPU); the same with offload. Like `atoll train`'s, the loops have
an observer, which looks at every round when the next one is applied. "host" is what outer.step() took of the training
thread's time; "waited", of that, what it waited for rounds.
Every outer.step() after which nothing is due runs with torch's synchronisation check set to raise an error, and one is
profiled: the CUDA calls in it are named.

memory: the peak of a bare run, and of runs of one worker with the outer loop with and without offload, from before it
is made, in processes of their own; evaluating and finish() are not in it. All at 1B need about 105 GiB of GPU memory.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import atoll
from atoll.cli.launch import free_ports
from atoll.core.codec import Codec
from atoll.core.flat import PIECE, pieces, words_of
from atoll.core.outer_step import Nesterov, weighted_mean
from atoll.link.net.fixed_link import NetLink
from atoll.outer.stats import Applied
from atoll.settings.model_presets import preset
from atoll.train.model.decoder import Decoder

Rate = Callable[[Callable[[], object], int], float]
"""(what to do, bytes that it must move) -> bytes a second."""
Report = Callable[[str, float], None]
"""(kernel, bytes a second)"""
RESULTS = Path(__file__).parent / "results" / "gpu_sync.json"
SEQUENCE, PERIOD = 1024, 30
BATCHES = {"35M": 32, "300M": 16, "1B": 8}
"""Sequences a step, so that three processes fit on an H200."""
HEAD = (16384, 32000)
"""Tokens and vocabulary of the logits that the trainer makes at a time."""
MODES = ("bare", "outer", "offload")
"""Of a worker that exchanges with nobody, whose memory is measured."""


class Case(NamedTuple):
    """What two workers that exchange do."""

    name: str
    both_train: bool
    offload: bool


CASES = [Case("shared", True, False), Case("one", False, False), Case("offload", False, True)]
FORMATS = ("e3m0", "e2m1", "int4", "int8", "lloyd2", "bf16")
TOP64 = Codec("top64", feedback=0.95)


# ---------------------------------------------------------------------- kernels


def kernels(values: int) -> list[dict[str, Any]]:
    """Throughput of each kernel as a share of a copy's."""
    from triton.testing import do_bench

    from atoll.kernels.codec import decode_mean, encode, room
    from atoll.kernels.cross_entropy import cross_entropy_
    from atoll.kernels.fingerprint import sums_of_pieces
    from atoll.kernels.live import live
    from atoll.kernels.outer import outer_merge
    from atoll.kernels.products import inner_products

    def rate(act: Callable[[], object], moved: int) -> float:
        milliseconds: float = do_bench(act, warmup=25, rep=100, return_mode="median")
        return moved / (milliseconds / 1e3)

    values = max(values, sum(tensor.numel() for tensor in parameters(values, torch.bfloat16)))
    start, anchor, velocity, mean = (torch.randn(values, device="cuda") for _ in range(4))
    copy_rate = rate(lambda: anchor.copy_(start), 8 * values)
    rows = [{"kernel": "copy", "share": 1.0, "bytes_per_s": copy_rate}]
    print(f"copy of {values:,} fp32 values: {copy_rate / 1e12:.2f} TB/s")

    def report(kernel: str, found: float) -> None:
        rows.append({"kernel": kernel, "share": found / copy_rate, "bytes_per_s": found})
        print(f"{kernel:56} {found / 1e12:5.2f} TB/s  {found / copy_rate:6.1%}", flush=True)

    for dtype in (torch.float32, torch.bfloat16):
        table = live(parameters(values, dtype))
        assert table is not None
        numel, size, name = table.numel, dtype.itemsize, str(dtype).removeprefix("torch.")
        for form in FORMATS:
            codec = Codec(form)
            payload = room(codec, numel, 1, start.device)[0]
            worst = torch.zeros(1, dtype=torch.int32, device="cuda")
            moved = numel * (4 + size) + payload.numel()
            found = rate(lambda c=codec, p=payload, w=worst, t=table: encode(c, start[: t.numel], t, p, w), moved)  # type: ignore[misc]
            report(f"encode {form}, {name} parameters", found)
        piece = slice(0, numel)
        found = rate(
            lambda t=table, at=piece: outer_merge(Nesterov(0.4), anchor, velocity, mean, at, t, 0.5),  # type: ignore[misc]
            numel * (20 + 2 * size),
        )
        report(f"outer step and blend, {name} parameters", found)
    for form in FORMATS:
        codec = Codec(form)
        payloads = room(codec, values, 2, start.device)
        payloads.copy_(torch.stack([codec.encode(start * scale) for scale in (1.0, 1e-3)]))
        found = rate(
            lambda c=codec, p=payloads: decode_mean(c, p, [1.0, 2.0], values, slice(0, values), mean),  # type: ignore[misc]
            payloads.numel() + 4 * values,
        )
        report(f"decode {form} of 2 members into their mean", found)
    payloads = room(Codec("e3m0"), values, 2, start.device)
    payloads.copy_(torch.stack([Codec("e3m0").encode(start), Codec("e3m0").encode(anchor)]))
    found = rate(lambda: inner_products(Codec("e3m0"), payloads, values), payloads.numel())
    report("inner products of 2 members, e3m0", found)
    report_top64(start, anchor, mean, rate, report)
    found = rate(lambda: sums_of_pieces(words_of(anchor), PIECE), 4 * values)
    report("fingerprint of an anchor", found)
    logits = torch.randn(HEAD, device="cuda", dtype=torch.bfloat16)
    targets = torch.randint(HEAD[1], HEAD[:1], device="cuda")
    losses = torch.empty(2, HEAD[0], device="cuda")
    found = rate(
        lambda: cross_entropy_(logits, targets, losses[0], losses[1], scale=1.0, z_loss=0.0, gradients=True),
        2 * logits.nbytes,
    )
    report("cross-entropy and its gradient, bf16 logits", found)
    return rows


def report_top64(start: Tensor, anchor: Tensor, mean: Tensor, rate: Rate, report: Report) -> None:
    """Report the kernels of top64, and plain torch by the bytes that they must move."""
    from atoll.kernels.codec import room
    from atoll.kernels.top64 import decode_mean, encode, inner_products

    values, whole, weights = start.numel(), slice(0, start.numel()), [1.0, 2.0]
    payloads, worst = room(TOP64, values, 2, start.device), torch.zeros(1, dtype=torch.int32, device="cuda")
    payloads.copy_(torch.stack([TOP64.encode(vector) for vector in (start, anchor)]))
    written, sent = 4 * values, payloads[0].numel()
    report("encode top64, a vector", rate(lambda: encode(start, payloads[0], worst), written + sent))
    report("encode top64, a vector, plain torch", rate(lambda: TOP64.encode(start), written + sent))
    found = rate(lambda: decode_mean(payloads, weights, values, whole, mean), written + 2 * sent)
    report("decode top64 of 2 members into their mean", found)
    found = rate(lambda: plain_mean(TOP64, payloads, weights, mean), written + 2 * sent)
    report("decode top64 of 2 members into their mean, plain torch", found)
    report("inner products of 2 members, top64", rate(lambda: inner_products(payloads, values), 2 * sent))


def plain_mean(codec: Codec, payloads: Tensor, weights: Sequence[float], mean: Tensor) -> None:
    """Decode payloads into their mean as workers without kernels do."""
    for piece in pieces(mean.numel(), mean.device):
        mean[piece] = weighted_mean([codec.decode_piece(one, mean.numel(), piece) for one in payloads], weights)


def parameters(values: int, dtype: torch.dtype) -> list[Tensor]:
    """At least as many values, in the tensors of a decoder's blocks."""
    block = [1024, 1024, 3 * 1024 * 1024, 64, 64, 1024 * 1024, 4 * 1024 * 1024, 4 * 1024 * 1024]
    return [torch.randn(size, device="cuda").to(dtype) for size in block * -(-values // sum(block))]


# ---------------------------------------------------------------------- rounds


class Training:
    """One worker's bare training loop."""

    def __init__(self, name: str) -> None:
        shape = preset(name)
        with torch.device("cuda"):  # which draws a billion values much sooner than the host
            self.model = Decoder(shape, generator=torch.Generator("cuda").manual_seed(0)).train()
        self.model.compile()
        self._inner = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.99), fused=True)
        self._tokens = torch.randint(0, shape.vocabulary, (BATCHES[name], SEQUENCE + 1), device="cuda")

    def step(self) -> None:
        self._inner.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = self.model.loss(self._tokens)
        loss.total.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._inner.step()


def worker(name: str, number: int, ports: list[int], periods: int, out: str, mode: str) -> None:
    """One process: by itself, for its memory, or one of two ("rounds")."""
    training = Training(name)
    sync = atoll.Streaming(period=PERIOD)
    found: dict[str, Any] = {}
    if mode == "rounds":
        for case, port in zip(CASES, ports, strict=True):
            with atoll.connect(f"127.0.0.1:{port}", worker=number, workers=2, keys="none", deadline_s=120) as link:
                offload = case.offload and number == 0
                outer = atoll.OuterLoop(training.model, sync, link, offload=offload, observer=Watch())
                outer.join()
                trains = case.both_train or number == 0
                found[case.name] = Rounds(training if trains else None, outer, link).measure(periods)
                outer.finish()  # the next case begins with equal parameters
    else:
        for _ in range(2):
            training.step()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        if mode == "bare":
            training.step()
        else:
            outer = atoll.OuterLoop(training.model, sync, atoll.local(1)[0], offload=mode == "offload")
            for _ in range(2 * PERIOD + 1):  # a fragment is sent after a full period: until all have been applied
                training.step()
                outer.step()
        torch.cuda.synchronize()
        found["peak"] = torch.cuda.memory_stats()["active_bytes.all.peak"]  # with what copies still use
    Path(out).write_text(json.dumps(found))


class Watch:
    """Looks at every applied round, a round later, as the trainer does a step later."""

    def __init__(self) -> None:
        self._last: Applied | None = None

    def __call__(self, applied: Applied) -> None:
        if self._last is not None:
            assert self._last.norm >= 0
        self._last = applied


class Rounds:
    """Periods with and without an outer loop, in turns; a worker without `training` only exchanges."""

    def __init__(self, training: Training | None, outer: atoll.OuterLoop, link: NetLink) -> None:
        self._training, self._outer, self._link = training, outer, link
        self._periods = 0

    def measure(self, periods: int) -> dict[str, Any]:
        for _ in range(2):  # warm up: graphs, every fragment's kernels, pinned memory
            self._period(outer=True)
        turns = []
        for number in range(periods):
            order = (False, True) if number % 2 else (True, False)  # or a GPU that gets slower would show as "added"
            found = {outer: self._period(outer=outer) for outer in order}
            turns.append((found[False]["seconds"], found[True]))
        added = [found["seconds"] / bare - 1 for bare, found in turns]
        counters = self._outer.counters
        return {
            "bare_step_s": statistics.median(bare for bare, _ in turns) / PERIOD,
            "added": statistics.median(added),
            "added_in_each": added,
            "host_s_per_step": statistics.median(found["host"] for _, found in turns) / PERIOD,
            "waited_s_per_step": statistics.median(found["waited"] for _, found in turns) / PERIOD,
            "steps_without_synchronising": sum(found["watched"] for _, found in turns),
            "calls_of_a_quiet_step": self._profiled(),
            "hidden_s_per_round": counters.hidden_s / max(1, counters.rounds_applied),
        }

    def _train(self) -> None:
        if self._training is not None:
            self._training.step()

    def _period(self, *, outer: bool) -> dict[str, float]:
        while outer and self._outer.is_due(self._outer.steps):  # nothing is to be on its way at the ends
            self._train()
            self._outer.step()
        self._periods += 1
        self._link.gather(f"period {self._periods}", "")
        torch.cuda.synchronize()
        began, host, watched = time.perf_counter(), 0.0, 0
        waited = self._outer.counters.wait_s
        for _ in range(PERIOD):
            self._train()
            if outer:
                due = self._outer.is_due(self._outer.steps + 1)
                here = time.perf_counter()
                torch.cuda.set_sync_debug_mode("default" if due else "error")
                self._outer.step()
                torch.cuda.set_sync_debug_mode("default")
                host += time.perf_counter() - here
                watched += not due
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        return {"seconds": seconds, "host": host, "watched": watched, "waited": self._outer.counters.wait_s - waited}

    def _profiled(self) -> list[str]:
        """Names of the CUDA calls that outer.step() makes when nothing is due."""
        from torch.profiler import ProfilerActivity, profile, record_function

        while self._outer.is_due(self._outer.steps + 1):
            self._train()
            self._outer.step()
        self._train()
        torch.cuda.synchronize()
        name = "a quiet outer.step()"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen, record_function(name):
            self._outer.step()
        found = next(event for event in seen.events() or () if event.name == name)
        return sorted({event.name for event in below(found) if event.name.startswith("cuda")})


def below(event: Any) -> Iterator[Any]:
    """All that was called in an event of the profiler, however deep."""
    for child in event.cpu_children:
        yield child
        yield from below(child)


def rounds(name: str, periods: int) -> dict[str, Any]:
    """One preset: two processes that exchange."""
    print(f"{name}, {BATCHES[name]} x {SEQUENCE} tokens a step and worker", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        first, second = run(name, ["rounds", "rounds"], periods, folder)
        row: dict[str, Any] = {"batch": BATCHES[name]}
        for case in CASES:
            both = [first[case.name], second[case.name]] if case.both_train else [first[case.name]]
            row[case.name] = found = max(both, key=lambda one: float(one["added"]))
            print(
                f"  {case.name}: step {1e3 * found['bare_step_s']:.1f} ms without; the outer loop adds "
                f"{found['added']:+.2%} ({min(found['added_in_each']):+.2%} to {max(found['added_in_each']):+.2%}), "
                f"takes {1e3 * found['host_s_per_step']:.2f} ms of the host and waits "
                f"{1e3 * found['waited_s_per_step']:.2f} ms a step; a round travels "
                f"{found['hidden_s_per_round']:.3f} s behind training; {found['steps_without_synchronising']} steps "
                f"with nothing due, CUDA calls of one: {', '.join(found['calls_of_a_quiet_step']) or 'none'}",
                flush=True,
            )
    return row


def memory(name: str) -> dict[str, int]:
    """One preset: the peaks of three processes that exchange with nobody."""
    with tempfile.TemporaryDirectory() as folder:
        unpaired = run(name, MODES, 0, folder)
    peaks = {mode: found["peak"] for mode, found in zip(MODES, unpaired, strict=True)}
    print(
        f"{name}: memory {peaks['bare'] / 2**30:.1f} GiB bare, {peaks['outer'] / peaks['bare'] - 1:+.1%} with the "
        f"outer loop, {peaks['offload'] / peaks['bare'] - 1:+.1%} with offload",
        flush=True,
    )
    return peaks


def run(name: str, modes: Sequence[str], periods: int, folder: str) -> list[dict[str, Any]]:
    """What processes that run at the same time have found, one of each mode."""
    ports = free_ports(len(CASES))
    outs = [Path(folder, f"{mode}-{number}.json") for number, mode in enumerate(modes)]
    tasks = [[name, n, ports, periods, str(outs[n]), mode] for n, mode in enumerate(modes)]
    command = [sys.executable, __file__, "rounds", "--child"]
    processes = [subprocess.Popen([*command, json.dumps(task)]) for task in tasks]
    if any([process.wait() for process in processes]):  # noqa: C419 - wait for all of them
        sys.exit(f"{name}: a process of {', '.join(modes)} failed")
    return [json.loads(out.read_text()) for out in outs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["kernels", "rounds", "memory", "all"], default="all")
    parser.add_argument("--values", type=int, default=100_000_000)
    parser.add_argument("--presets", nargs="+", choices=BATCHES, default=list(BATCHES))
    parser.add_argument("--periods", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        worker(*json.loads(arguments.child))
        return
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure")
        return
    here: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    kept = json.loads(arguments.results.read_text()) if arguments.results.exists() else here
    if any(kept.get(what) != here[what] for what in here):
        kept = here  # what was measured elsewhere would be taken for this machine's
    if arguments.what in ("kernels", "all"):
        kept["kernels"] = kernels(arguments.values)
        arguments.results.write_text(json.dumps(kept, indent=1) + "\n")
    for name in arguments.presets if arguments.what != "kernels" else ():
        row = kept.setdefault("rounds", {}).setdefault(name, {})
        if arguments.what in ("rounds", "all"):
            row |= rounds(name, arguments.periods)
            arguments.results.write_text(json.dumps(kept, indent=1) + "\n")
        if arguments.what in ("memory", "all"):
            row["peaks"] = memory(name)
            arguments.results.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
