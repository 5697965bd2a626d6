"""What the outer loop costs a training loop: speed against the bare loop, and memory beyond it.

    python benchmarks/overhead.py

The 7M decoder, AdamW, fp32, 512 tokens a step, on the CPU; one worker on a local link, period 30. The bare loop and
each preset take turns step by step, so that noise hits all alike; the figure is the ratio of their times over whole
periods. Memory is measured in one process per preset, as the difference of peak resident sizes.
"""

import argparse
import resource
import subprocess
import sys
import time

import torch
from torch import nn

from atoll import DiLoCo, Eager, OuterLoop, Streaming, Sync, local
from atoll.settings.model_presets import preset
from atoll.train.model.decoder import Decoder

PERIOD = 30


class Loop:
    """A bare training loop, with or without an outer loop after each step."""

    def __init__(self, sync: Sync | None) -> None:
        self.model = Decoder(preset("7M"), generator=torch.Generator().manual_seed(0))
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.outer = None if sync is None else OuterLoop(self.model, sync, local(1)[0])
        self.batch = torch.randint(0, 256, (4, 129), generator=torch.Generator().manual_seed(1))

    def step(self) -> float:
        """Seconds for one training step."""
        start = time.perf_counter()
        self.model.loss(self.batch).total.backward()
        self.inner.step()
        self.inner.zero_grad(set_to_none=False)
        if self.outer is not None:
            self.outer.step()
        return time.perf_counter() - start


PRESETS: dict[str, Sync | None] = {
    "bare": None,
    "DiLoCo fp32": DiLoCo(period=PERIOD),
    "DiLoCo e3m0": DiLoCo(period=PERIOD, codec="e3m0"),
    "Streaming e3m0": Streaming(period=PERIOD),
    "Eager e3m0": Eager(period=PERIOD),
}


def speed(periods: int) -> None:
    loops = {name: Loop(sync) for name, sync in PRESETS.items()}
    print(f"speed: {preset('7M').parameters / 1e6:.2f} million parameters, period {PERIOD}, {periods} periods")
    seconds = dict.fromkeys(loops, 0.0)
    for step in range(-PERIOD, periods * PERIOD):
        for name, loop in loops.items():
            taken = loop.step()
            seconds[name] += taken if step >= 0 else 0.0  # the first period warms up
    for name, total in seconds.items():
        per_step = 1e3 * total / (periods * PERIOD)
        print(f"  {name:16} {per_step:8.2f} ms/step {seconds['bare'] / total:8.3f} of the bare loop's speed")


class Blocky(nn.Module):
    """Nothing but parameters, in 12 blocks, so that activations do not hide what the outer loop needs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(12))


def peak_bytes(name: str) -> int:
    """The highest resident size of this process, which trains with one preset for two periods."""
    model = Blocky()
    sync = PRESETS[name]
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = None if sync is None else OuterLoop(model, sync, local(1)[0])
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    inner.step()
    for _ in range(2 * PERIOD + 2):
        if outer is not None:
            outer.step()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def memory() -> None:
    values = sum(p.numel() for p in Blocky().parameters())
    print(f"memory: peak beyond the bare loop, in vectors of all {values / 1e6:.1f} million parameters (fp32)")
    peaks = {}
    for name in PRESETS:
        command = [sys.executable, __file__, "--peak-of", name]
        peaks[name] = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        if name != "bare":
            print(f"  {name:16} {(peaks[name] - peaks['bare']) / (4 * values):8.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--periods", type=int, default=6)
    parser.add_argument("--peak-of", choices=PRESETS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(peak_bytes(arguments.peak_of))
        return
    memory()
    speed(arguments.periods)


if __name__ == "__main__":
    main()
