"""What the outer loop costs a training loop: speed against the bare loop, and memory beyond it.

    python benchmarks/overhead.py

A decoder-like model of about 7 million parameters, AdamW, fp32, on the CPU; one worker on a local link, period 30.
The bare loop and each preset take turns, period by period, so that noise hits all alike; the figure is the median of
the ratios within one turn. Memory is measured in one process per preset, as the difference of peak resident sizes.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from torch import Tensor, nn

from atoll import DiLoCo, Eager, OuterLoop, Streaming, Sync, local

PERIOD = 30


def build_model() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, num_layers=8, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(1024, 256), body, nn.LayerNorm(256), nn.Linear(256, 1024))


class Loop:
    """A bare training loop, with or without an outer loop after each step."""

    def __init__(self, sync: Sync | None) -> None:
        self.model = build_model()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.outer = None if sync is None else OuterLoop(self.model, sync, local(1)[0])
        self.batch = torch.randint(0, 1024, (4, 65), generator=torch.Generator().manual_seed(1))

    def steps(self, count: int) -> float:
        """Seconds for `count` training steps."""
        start = time.perf_counter()
        for _ in range(count):
            logits: Tensor = self.model(self.batch[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), self.batch[:, 1:].flatten()).backward()
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
    values = sum(p.numel() for p in loops["bare"].model.parameters())
    for loop in loops.values():
        loop.steps(PERIOD)
    seconds: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(periods):
        for name, loop in loops.items():
            seconds[name].append(loop.steps(PERIOD))
    print(f"speed: {values / 1e6:.2f} million parameters, period {PERIOD}, medians of {periods} periods")
    for name, times in seconds.items():
        ratio = statistics.median(bare / own for bare, own in zip(seconds["bare"], times, strict=True))
        per_step = 1e3 * statistics.median(times) / PERIOD
        print(f"  {name:16} {per_step:8.2f} ms/step {ratio:8.3f} of the bare loop's speed in the same round")


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
    parser.add_argument("--periods", type=int, default=9)
    parser.add_argument("--peak-of", choices=PRESETS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_of:
        print(peak_bytes(arguments.peak_of))
        return
    memory()
    speed(arguments.periods)


if __name__ == "__main__":
    main()
