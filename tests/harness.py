"""A toy problem that the library and the NumPy oracle can both run, and ways to run it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from atoll import Delayed, DiLoCo, Eager, Guard, Lockstep, OuterLoop, Streaming, Sync, local
from atoll.core.codec import Codec
from atoll.core.fragments import Patterns
from atoll.core.outer_step import Adam
from atoll.link.base import RoundId
from atoll.link.local import Faults, LocalLink, run_local
from atoll.outer.presets import Gradients
from atoll.outer.stats import Applied

Vector = NDArray[np.float64]


class Part(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values.clone())


class Toy(nn.Module):
    """A vector cut into parts: part p is fragment p under `by_part`."""

    def __init__(self, start: Vector, sizes: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(p) for p in torch.tensor(start, dtype=dtype).split(list(sizes)))

    def vector(self) -> Vector:
        return torch.cat([p.detach().double().flatten() for p in self.parameters()]).numpy()

    @torch.no_grad()
    def descend(self, gradient: Vector, rate: float) -> None:
        """One plain SGD step."""
        sizes = [p.numel() for p in self.parameters()]
        for p, g in zip(self.parameters(), torch.tensor(gradient).split(sizes), strict=True):
            p.sub_(rate * g)


def by_part(count: int) -> Patterns:
    return Patterns(groups=tuple((f"parts.{p}.*",) for p in range(count)))


PRESETS: dict[str, Sync] = {
    "diloco": DiLoCo(period=5),
    "streaming": Streaming(period=6, fragments=by_part(4), delay=2),
    "several in flight": Streaming(period=6, fragments=by_part(4), delay=5, codec="int8"),
    "unequal delays": Streaming(period=6, fragments=by_part(4), delay=(0, 3, 6), codec="bf16"),
    "eager": Eager(period=4),
    "streaming eager": Eager(period=6, fragments=by_part(4), codec="e2m1"),
    "delayed": Delayed(period=4),
    "feedback": Streaming(period=4, fragments=by_part(4), codec=Codec("e3m0", feedback=True)),
    "stochastic": Eager(period=4, codec=Codec("int4", stochastic=True, feedback=True)),
    "adam": DiLoCo(period=5, outer=Adam()),
}
"""Every preset, and combinations that have gone wrong elsewhere, for a problem of 4 parts and 3 workers."""


def preset(name: str, workers: int) -> Sync:
    """One of PRESETS for another number of workers."""
    sync = PRESETS[name]
    if not isinstance(sync.delay, tuple):
        return sync
    return replace(sync, delay=tuple(sync.delay[worker % len(sync.delay)] for worker in range(workers)))


def gradient(worker: int, step: int, x: Vector) -> Vector:
    """Different for every worker and step, coupled across the whole vector, gentle enough to stay bounded."""
    noise = np.random.default_rng([worker, step])
    return noise.uniform(0.5, 1.5, x.size) * (x - noise.normal(size=x.size)) + 0.3 * np.sin(np.roll(x, 1))


@dataclass(frozen=True)
class Problem:
    sizes: tuple[int, ...] = (3, 1, 4, 2)
    workers: int = 3
    weights: tuple[float, ...] = ()
    steps: int = 20
    inner: float = 0.07
    faults: Faults = field(default_factory=Faults)
    dtype: torch.dtype = torch.float64

    @property
    def start(self) -> Vector:
        return np.random.default_rng(7).normal(size=sum(self.sizes))

    @property
    def all_weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * self.workers

    @property
    def slices(self) -> list[slice]:
        ends = np.cumsum(self.sizes)
        return [slice(int(end - size), int(end)) for end, size in zip(ends, self.sizes, strict=True)]

    def oracle_arguments(self, wire: Callable[[Vector], Vector] = lambda d: d, without: str = "") -> dict[str, Any]:
        """The arguments that oracles share, by name, less those named in `without`."""
        arguments = {
            "x0": self.start,
            "grad": gradient,
            "there": self.faults.present,
            "trains": self.faults.trains,
            "lost": lambda m, t, p: self.faults.lost(m, RoundId(t, p)),
            "wire": wire,
            "weights": self.all_weights,
            "steps": self.steps,
            "inner": self.inner,
        }
        return {name: value for name, value in arguments.items() if name not in without.split()}

    def alone(self, steps: int) -> Vector:
        """Where plain training takes worker 0 by itself."""
        x = self.start
        for step in range(1, steps + 1):
            x = x - self.inner * gradient(0, step, x)
        return x

    def loops(self, sync: Sync | Gradients, links: Sequence[LocalLink] | None = None) -> list[OuterLoop]:
        links = links or local(self.workers, faults=self.faults, timeout_s=30)
        return [
            OuterLoop(Toy(self.start, self.sizes, self.dtype), sync, link, weight=weight)
            for link, weight in zip(links, self.all_weights, strict=True)
        ]


def tolerant(problem: Problem, sync: Sync | Gradients, observed: list[Applied] | None = None) -> list[OuterLoop]:
    """Loops that leave out what is not finite; rounds of the first are noted."""
    return [
        OuterLoop(
            Toy(problem.start, problem.sizes, problem.dtype),
            sync,
            link,
            guard=Guard(leave_out_nonfinite=True),
            observer=observed.append if observed is not None and link.worker == 0 else None,
        )
        for link in local(problem.workers, timeout_s=30)
    ]


def spoil(loop: OuterLoop, value: float = float("nan"), part: int = 0) -> None:
    """Put it among the live parameters."""
    with torch.no_grad():
        loop.model.get_parameter(f"parts.{part}.values")[0] = value


def check_recovered(loops: Sequence[OuterLoop], observed: Sequence[Applied], left_out: int) -> None:
    """Worker 1 of three was spoilt once: it missed so many rounds, and goes on with the others' anchor."""
    delays = [loop.sync.delay_of(loop.link.worker, loop.link.workers) for loop in loops if isinstance(loop.sync, Sync)]
    anchors = {snapshot(loop)[1].tobytes() for loop, delay in zip(loops, delays, strict=True) if delay == delays[0]}
    assert len(anchors) == 1
    assert all(np.isfinite(toy(loop).vector()).all() for loop in loops)
    assert [loop.counters.rounds_left_out for loop in loops] == [0, left_out, 0]
    assert [loop.counters.roll_backs for loop in loops] == [0, 1, 0]
    without = [applied for applied in observed if applied.members != (0, 1, 2)]
    assert len(without) == left_out and all(applied.members == (0, 2) for applied in without)
    Lockstep(loops).finish()
    finals = {toy(loop).vector().tobytes() for loop in loops}
    assert len(finals) == 1 and np.isfinite(toy(loops[0]).vector()).all()


def toy(loop: OuterLoop) -> Toy:
    assert isinstance(loop.model, Toy)
    return loop.model


def inner_step(loop: OuterLoop, rate: float) -> None:
    """One inner step of one worker, unless it is absent or slow."""
    if loop.trains:
        model = toy(loop)
        model.descend(gradient(loop.link.worker, loop.steps + 1, model.vector()), rate)


def train(loops: Sequence[OuterLoop], steps: int, rate: float) -> None:
    """Step all workers together, in this thread."""
    crew = Lockstep(loops)
    for _ in range(steps):
        for loop in loops:
            inner_step(loop, rate)
        crew.step()


def train_data_parallel(loops: Sequence[OuterLoop], steps: int, rate: float) -> None:
    crew = Lockstep(loops)
    for _ in range(steps):
        for loop in loops:
            model = toy(loop)
            sizes = [p.numel() for p in model.parameters()]
            g = torch.tensor(gradient(loop.link.worker, loop.steps + 1, model.vector()))
            for p, part in zip(model.parameters(), g.split(sizes), strict=True):
                p.grad = part.to(p.dtype)
        crew.average_gradients()
        for loop in loops:
            with torch.no_grad():
                for p in loop.model.parameters():
                    assert p.grad is not None
                    p.sub_(rate * p.grad)
        crew.step()


def train_in_threads(problem: Problem, sync: Sync) -> list[OuterLoop]:
    """Every worker in a thread of its own."""

    def work(link: LocalLink) -> OuterLoop:
        weight = problem.all_weights[link.worker]
        loop = OuterLoop(Toy(problem.start, problem.sizes, problem.dtype), sync, link, weight=weight)
        for _ in range(problem.steps):
            inner_step(loop, problem.inner)
            loop.step()
        return loop

    return run_local(work, local(problem.workers, faults=problem.faults, timeout_s=30))


def snapshot(loop: OuterLoop) -> tuple[Vector, Vector, Vector]:
    """(live parameters, anchor, velocity), each over the whole vector."""
    fragments = loop.state_dict()["fragments"]
    if not fragments:
        return toy(loop).vector(), toy(loop).vector(), np.zeros_like(toy(loop).vector())
    anchor = torch.cat([f["anchor"] for f in fragments]).double().numpy()
    velocity = torch.cat([f["slots"].get("velocity", torch.zeros_like(f["anchor"])) for f in fragments])
    return toy(loop).vector(), anchor, velocity.double().numpy()


def bits(loop: OuterLoop) -> list[bytes]:
    """Everything of a worker that must survive: live parameters and the loop's own vectors, as bytes."""
    tensors = list(loop.model.parameters())
    for fragment in loop.state_dict()["fragments"]:
        tensors += [fragment["anchor"], *fragment["slots"].values()]
        tensors += [fragment[key] for key in ("residual", "own", "newest") if fragment[key] is not None]
    return [t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in tensors]
