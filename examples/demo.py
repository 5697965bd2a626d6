"""Four workers, four ways to keep them in step, one table and one picture.

    python examples/demo.py [--steps 300] [--out out/demo]

Every worker is a copy of a small byte-level language model with its own files of the Python standard library's
source, which is on every machine that can run this. All methods see the same data in the same order; what differs is
what the workers tell each other, and how often.
"""

import argparse
import copy
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import torch
from torch import Tensor, nn

from atoll import Crew, DataParallel, DiLoCo, Eager, Nesterov, OuterLoop, Streaming, Sync, local
from atoll.core.fragments import Blocks
from atoll.shapes import ModelConfig
from atoll.sync import Gradients
from atoll.train.model import Decoder

WORKERS = 4
CONTEXT = 64
BATCH = 8
MODEL = ModelConfig(layers=4, width=64, heads=4, head_width=16, feedforward=256, vocabulary=256, context=CONTEXT)
METHODS: dict[str, Sync | Gradients] = {
    "data-parallel": DataParallel(),
    "DiLoCo": DiLoCo(period=10, outer=Nesterov.for_workers(WORKERS)),
    "Streaming, 4 bit": Streaming(period=10, fragments=Blocks(each=1), outer=Nesterov.for_workers(WORKERS)),
    # The papers' momentum of 0.9 is for hundreds of rounds; over 30 rounds that arrive one late it overshoots.
    "Eager, 4 bit": Eager(period=10, outer=Nesterov(0.4, 0.6)),
}


def corpus() -> tuple[list[Tensor], Tensor]:
    """One training text per worker and a held-out one, as bytes; files are dealt out whole."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [b"".join(f.read_bytes() for f in files[worker :: WORKERS + 1]) for worker in range(WORKERS + 1)]
    *shards, held_out = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]
    return shards, held_out


def batches(text: Tensor, seed: int) -> Iterator[Tensor]:
    """Endless random windows [BATCH, CONTEXT + 1]."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(text) - CONTEXT - 1, (BATCH,), generator=generator)
        yield torch.stack([text[s : s + CONTEXT + 1] for s in starts.tolist()]).long()


@dataclass
class Outcome:
    """What one method reached."""

    steps: list[int]
    losses: list[float]
    bytes_sent: int
    model: Decoder


def train(sync: Sync | Gradients, start: Decoder, shards: list[Tensor], held_out: Tensor, steps: int) -> Outcome:
    """Train all workers in turn and evaluate what they agree on."""
    models = [copy.deepcopy(start) for _ in range(WORKERS)]
    inner = [torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1) for model in models]
    loops = [OuterLoop(model, sync, link) for model, link in zip(models, local(WORKERS), strict=True)]
    streams = [batches(shard, seed) for seed, shard in enumerate(shards)]
    crew, checks, losses = Crew(loops), [], []
    fixed = [next(batches(held_out, seed=1000 + i)) for i in range(12)]

    def evaluate() -> float:
        with loops[0].anchor(), torch.no_grad():
            return sum(models[0].loss(batch).cross_entropy.item() for batch in fixed) / len(fixed)

    for step in range(1, steps + 1):
        rate = min(step / 20, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2)
        for model, optimizer, stream in zip(models, inner, streams, strict=True):
            optimizer.param_groups[0]["lr"] = 2e-3 * rate
            optimizer.zero_grad()
            model.loss(next(stream)).total.backward()
        crew.average_gradients()
        for model, optimizer in zip(models, inner, strict=True):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        crew.step()
        if step % 20 == 0:
            checks.append(step)
            losses.append(evaluate())
            print(f"\r  step {step:4}/{steps}   held-out loss {losses[-1]:.3f}", end="", flush=True)
    sent = loops[0].counters.bytes_sent
    crew.finish()
    checks.append(steps)
    losses.append(evaluate())
    return Outcome(checks, losses, sent, models[0])


def sample(model: Decoder, prompt: str, length: int = 160) -> str:
    """Continue a prompt, byte by byte."""
    tokens = torch.tensor([list(prompt.encode())])
    drawn = model.generate(tokens, length, temperature=0.7, generator=torch.Generator().manual_seed(0))
    return bytes(drawn[0].tolist()).decode(errors="replace")


def picture(outcomes: dict[str, Outcome], path: Path) -> None:
    """Held-out loss against steps, and bytes sent per worker on a log axis."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (curves, bars) = pyplot.subplots(1, 2, figsize=(11, 4.2), width_ratios=(3, 2), layout="constrained")
    for number, (name, outcome) in enumerate(outcomes.items()):
        curves.plot(outcome.steps, outcome.losses, label=name, color=f"C{number}")
        bars.barh(name, outcome.bytes_sent / 1e6, color=f"C{number}")
    curves.set(xlabel="inner steps", ylabel="held-out loss, nats per byte", title="What the workers agree on")
    curves.legend(frameon=False)
    bars.set(xscale="log", xlabel="MB sent per worker", title="What it costs to agree")
    bars.invert_yaxis()
    for axes in (curves, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("out/demo"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    start = Decoder(MODEL)
    shards, held_out = corpus()
    values = sum(p.numel() for p in start.parameters())
    megabytes = sum(map(len, shards)) / 1e6
    print(f"{WORKERS} workers, {values / 1e6:.2f} million parameters, {megabytes:.1f} MB of Python source")
    outcomes: dict[str, Outcome] = {}
    began = time.perf_counter()
    for name, sync in METHODS.items():
        print(name)
        outcomes[name] = train(sync, start, shards, held_out, arguments.steps)
        print()
    print(f"\n{'method':18} {'held-out loss':>13} {'against DP':>11} {'sent per worker':>16} {'fewer bytes':>12}")
    reference = outcomes["data-parallel"]
    for name, outcome in outcomes.items():
        print(
            f"{name:18} {outcome.losses[-1]:13.3f} {outcome.losses[-1] / reference.losses[-1] - 1:+11.1%} "
            f"{outcome.bytes_sent / 1e6:13.2f} MB {reference.bytes_sent / outcome.bytes_sent:11.0f}x"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    picture(outcomes, arguments.out / "demo.png")
    print(f"\npicture: {arguments.out / 'demo.png'}   training took {time.perf_counter() - began:.0f} s")
    print("a sample of the streaming model:\n")
    print(sample(outcomes["Streaming, 4 bit"].model, "def main("))


if __name__ == "__main__":
    main()
