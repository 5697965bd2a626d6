"""Digests of final parameters: what a change that only moves code around must leave as it is, to the bit.

    python tests/digests.py record      # writes tests/golden/digests.json anew

The workers' inner steps are single IEEE 754 operations on numbers that an integer generator draws, and the outer loop
promises the same bits on all processors, so these digests hold on every machine.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import atoll
from atoll import DataParallel, Delayed, DiLoCo, Eager, Guard, Lockstep, Nesterov, OuterLoop, Streaming
from atoll.core.codec import Codec
from atoll.core.fragments import Balanced, Blocks, Patterns, Whole
from atoll.core.outer_step import SGD, Adam, Blend, Momentum
from atoll.link.base import Link
from atoll.link.local import Absence, Faults
from atoll.link.shaped import Shape, shaped
from atoll.outer.presets import Gradients, Sync

GOLDEN = Path(__file__).parent / "golden" / "digests.json"
STEPS = 31
CODECS = ("fp32", "bf16", "fp16", "int8", "int4", "e2m1", "e3m0", "lloyd4")


class Tower(nn.Module):
    """A few blocks of unequal size between two other parameters; one is frozen."""

    def __init__(self, worker: int = 0) -> None:
        super().__init__()
        self.worker = worker
        self.embedding = nn.Parameter(drawn((40, 9), 1).clone())
        self.blocks = nn.ModuleList(nn.ParameterDict({"w": drawn((30 + 7 * n, 11), 2 + n).clone()}) for n in range(4))
        self.head = nn.Parameter(drawn((700,), 9).clone())
        self.frozen = nn.Parameter(drawn((5,), 10).clone(), requires_grad=False)

    def pull(self, step: int) -> list[tuple[nn.Parameter, Tensor]]:
        """Each trained parameter with its gradient: towards the worker's own target, with noise."""
        found = []
        for n, parameter in enumerate(p for p in self.parameters() if p.requires_grad):
            target = drawn(tuple(parameter.shape), 1000 * (self.worker + 1) + n)
            noise = drawn(tuple(parameter.shape), 10**6 * (self.worker + 1) + 100 * step + n)
            found.append((parameter, (parameter.detach() - target) + noise * 0.5))
        return found


@cache
def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    """Numbers from -1 to 1, fp32: from integers, for those are the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randint(-(2**20), 2**20, shape, generator=generator, dtype=torch.int64)
    return whole.to(torch.float32) * 2.0**-20


@torch.no_grad()
def inner_step(loop: OuterLoop, step: int) -> None:
    """One plain SGD step of one worker, unless the link has it absent or slow."""
    assert isinstance(loop.model, Tower)
    if loop.trains:
        for parameter, gradient in loop.model.pull(step):
            parameter.sub_(gradient * 0.125)


@torch.no_grad()
def data_parallel_step(loops: Sequence[OuterLoop], step: int) -> None:
    """One step in which gradients are averaged first."""
    for loop in loops:
        assert isinstance(loop.model, Tower)
        for parameter, gradient in loop.model.pull(step):
            parameter.grad = gradient
    Lockstep(loops).average_gradients()
    for loop in loops:
        for parameter in loop.model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad * 0.125)


def train(loops: Sequence[OuterLoop], first: int, last: int) -> None:
    """Inner steps `first` to `last`, of workers of one process."""
    crew = Lockstep(loops)
    for step in range(first, last + 1):
        if isinstance(loops[0].sync, Gradients):
            data_parallel_step(loops, step)
        else:
            for loop in loops:
                inner_step(loop, step)
        crew.step()


def loops_on(links: Sequence[Link], sync: Sync | Gradients, **options: Any) -> list[OuterLoop]:
    """A worker for every link; they weigh 1, 2, 1, 2 and so on."""
    return [OuterLoop(Tower(link.worker), sync, link, weight=1.0 + link.worker % 2, **options) for link in links]


def digest(loops: Sequence[OuterLoop]) -> str:
    """Of live parameters, anchors and counters of bytes of all workers."""
    found = hashlib.sha256()
    for loop in loops:
        for parameter in loop.model.parameters():
            found.update(parameter.detach().numpy().tobytes())
        with loop.anchor() as model:
            for parameter in model.parameters():
                found.update(parameter.detach().numpy().tobytes())
        counters = loop.counters
        found.update(f"{counters.rounds_sent} {counters.rounds_applied} {counters.bytes_sent}".encode())
    return found.hexdigest()[:16]


def run(sync: Sync | Gradients, workers: int = 2, faults: Faults | None = None, *, finish: bool = True) -> str:
    """The digest of a run in one process."""
    loops = loops_on(atoll.local(workers, faults=faults), sync, guard=Guard(leave_out_nonfinite=faults is not None))
    train(loops, 1, STEPS)
    if finish:
        Lockstep(loops).finish()
    return digest(loops)


def resumed(sync: Sync | Gradients, workers: int, at: int) -> str:
    """The digest of a run that was saved after step `at` and taken up by others."""
    loops = loops_on(atoll.local(workers), sync)
    train(loops, 1, at)
    saved = [(loop.model.state_dict(), loop.state_dict()) for loop in loops]
    loops = loops_on(atoll.local(workers), sync)
    for loop, (model, outer) in zip(loops, saved, strict=True):
        loop.model.load_state_dict(model)
        loop.load_state_dict(outer)
    train(loops, at + 1, STEPS)
    Lockstep(loops).finish()
    return digest(loops)


def behind_a_line(sync: Sync) -> str:
    """The digest of a run whose links are slow and late."""
    links = shaped(atoll.local(3), Shape(bits_per_s=1e9, latency_s=0.0005))
    loops = loops_on(links, sync)
    train(loops, 1, STEPS)
    Lockstep(loops).finish()
    found = digest(loops)
    for link in links:
        link.close()
    return found


OUTER = Nesterov(0.7, 0.6)
ALPHA_HALF: dict[str, Any] = {"merge": Blend(0.5), "outer": Nesterov(0.4, 0.9)}
PRESETS: dict[str, Sync | Gradients] = {
    "diloco": DiLoCo(period=6),
    "streaming": Streaming(period=6, delay=2, fragments=Blocks(each=2), **ALPHA_HALF),
    "streaming late": Streaming(period=6, delay=6, fragments=Blocks(each=1), **ALPHA_HALF),
    "eager": Eager(period=6, outer=OUTER),
    "streaming eager": Eager(period=6, fragments=Blocks(each=2), outer=OUTER),
    "delayed": Delayed(period=6),
    "data-parallel": DataParallel(),
}
FAULTS = {
    "drops": Faults(drop=0.4, seed=3),
    "absent": Faults(absences=(Absence(worker=1, first=8, last=17),)),
}


def cases() -> dict[str, Callable[[], str]]:
    """By name, what makes a digest."""
    found: dict[str, Callable[[], str]] = {}
    for name, sync in PRESETS.items():
        for workers in (1, 2, 3, 4, 5):
            found[f"{name}, {workers} workers"] = partial(run, sync, workers)
        found[f"{name}, not finished"] = partial(run, sync, 3, finish=False)
        for at in (5, 6, 13, 20):
            found[f"{name}, resumed at {at}"] = partial(resumed, sync, 4, at)
    for codec in CODECS:
        for feedback in (False, True):
            for stochastic in (False, True):
                encoded = _codec(codec, feedback, stochastic)
                if encoded is None:
                    continue
                for name in ("streaming", "eager", "diloco"):
                    sync = replace(PRESETS[name], codec=encoded)
                    for workers in (2, 5):
                        label = f"{name}, {encoded}, {workers} workers"
                        found[label] = partial(run, sync, workers)
                sync = replace(PRESETS["streaming"], codec=encoded)
                found[f"streaming, {encoded}, resumed"] = partial(resumed, sync, 5, 14)
    for name, faults in FAULTS.items():
        for method in ("diloco", "streaming", "eager", "streaming eager", "delayed"):
            sync = PRESETS[method]
            found[f"{method}, {name}"] = partial(run, sync, 4, faults)
    streaming = PRESETS["streaming"]
    assert isinstance(streaming, Sync)
    for outer in (SGD(0.9), Momentum(0.5, 0.8), Adam()):
        found[f"streaming, {outer}"] = partial(run, replace(streaming, outer=outer), 3)
    patterns = Patterns(groups=(("blocks.[01].*",), ("blocks.[23].*",), ("embedding", "head")))
    for fragments in (Whole(), Balanced(count=3), patterns):
        found[f"streaming, {fragments}"] = partial(run, replace(streaming, fragments=fragments), 3)
    for alpha in (0.0, 0.25, 1.0):
        found[f"streaming, alpha {alpha}"] = partial(run, replace(streaming, merge=Blend(alpha)), 3)
    found["streaming, delays 0, 3 and 6"] = partial(run, replace(streaming, delay=(0, 3, 6)), 3)
    found["streaming, behind a line"] = partial(behind_a_line, streaming)
    return found


def _codec(name: str, feedback: bool, stochastic: bool) -> Codec | None:
    try:
        return Codec(name, feedback=feedback, stochastic=stochastic)
    except atoll.AtollError:
        return None


if __name__ == "__main__":
    if sys.argv[1:] != ["record"]:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    GOLDEN.write_text(json.dumps({name: make() for name, make in cases().items()}, indent=1) + "\n")
