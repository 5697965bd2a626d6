"""One model trained by workers at far-apart sites, over slow lines: what each method leaves of the speed without any.

    sudo python benchmarks/wan.py                                    # everything, about an hour on two cores
    sudo python benchmarks/wan.py --methods ddp eager --rates 20     # a part; results are merged into wan.json

The decoder of 7 million parameters over bytes, batches of 16 sequences of 64, AdamW at one learning rate, one thread a
worker. Every worker is a process in a site of its own, a network namespace whose line is limited to the same rate in
both directions (benchmarks/sites.py). Batches, start and number of steps are the same for all methods.

    alone          no network: as many processes train at the same time and exchange nothing
    ddp            DistributedDataParallel over gloo, defaults: fp32 gradients on every step
    torchft        torchft 0.2.0's DiLoCo, fp32: 3 fragments in turn, one outer optimizer each, no delay
    torchft-delay  the same; a fragment travels for as many steps as cover it, at most one fewer than lie between two
                   fragments (torchft allows no more), and alpha is 0.5
    diloco         atoll.DiLoCo, fp32: everything at once, everybody waits
    streaming      atoll.Streaming, 4 bits (e3m0): fragments of 3 blocks, alpha 0.5; the delay covers the
                   exchange
    eager          atoll.Eager, 4 bits (e3m0): everything at once, the exchange hides behind a whole period

The period is the same for all that have one, and outer optimizers are those of the papers (torchft: 0.7 and 0.9). A
delay covers an exchange if the line could carry its bytes in so many steps of the length measured alone, plus two: one
because it begins between steps, one because workers are never quite in step.

Figures: "speed" is steps a second as a share of those without any exchange, which the same processes make between the
timed steps wherever nothing is on its way, for a machine may change its own speed; both are those of the slowest
worker, whom all others would wait for over any line. A run with more workers than cores says nothing about how fast a
real site would be, but its share is fair. "MB sent" is the kernel's count for a worker's interface, acknowledgements
included, each period; a segment's headers count once however many packets it becomes, so the wire carries up to 5 %
more. "held up" is how much longer the part of a step took that exchanges something, each period: backward for ddp, the
inner step with torchft's hooks, all of outer.step() for atoll, coding included. "waiting" is the part of it in which
atoll was blocked on the link. "in flight" is how much longer forward, backward and the inner step took, together,
while a round travelled. The loss is held-out cross-entropy, the mean over workers, of the outer parameters after all
steps (atoll: after finish(); alone: each worker's own model). torchft has no finish(): what was trained since a
fragment's last exchange is not in its outer parameters, so its loss is a little behind; "local_loss" in the JSON is
that of the workers' own models.

Whole periods are on the clock, after one of warm-up and a sixth, so that few exchanges cross the clock's ends. DDP
would take hours on slow lines: there it is timed over a few steps, and its loss comes from a run of all steps on an
unlimited line, since a line does not change arithmetic. "other load" is what processes other than the workers took of
the cores; with more than a few percent (!) the speed says little: measure again on a quiet machine.
"""

import argparse
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from matplotlib.figure import Figure

from atoll.core.allreduce import sent_bytes
from atoll.core.fragments import Fragment, split
from atoll.link.net.run_keys import throw_away
from atoll.report.canvas import Palette, dress, to_png
from atoll.train.model.decoder import Decoder
from sites import Sites, available
from wan_worker import (
    BATCH,
    LEARNING_RATE,
    METHODS,
    SEQUENCE,
    SHAPE,
    TORCHFT_FRAGMENTS,
    Task,
    our_sync,
    torchft_fragments,
)

RESULTS = Path(__file__).parent / "results"
IMAGES = Path(__file__).parent.parent / "docs" / "images"
LABELS = {
    "alone": "no network",
    "ddp": "DDP, gloo, fp32",
    "torchft": "torchft DiLoCo, fp32",
    "torchft-delay": "torchft DiLoCo, fp32, delayed",
    "diloco": "atoll DiLoCo, fp32",
    "streaming": "atoll Streaming, e3m0",
    "eager": "atoll Eager, e3m0",
}
LONGEST_CELL_S = 900
DDP_SECONDS = 40
"""About as long as DDP is timed on a slow line."""
MARGIN = 2
"""Steps that a delay is longer than the exchange: one because it begins between two, one for workers out of step."""
LOUD = 0.05
"""Share of the cores that others may take before a figure is marked."""

Cell = dict[str, Any]
"""One row of the table: what was run and what came out, ready for JSON."""


class Bench:
    """What all cells have in common."""

    def __init__(self, period: int, periods: int) -> None:
        self.period, self.warm_up, self.steps = period, period + period // 6, periods * period
        self.model = Decoder(SHAPE, generator=torch.Generator().manual_seed(0))
        self.settings = {
            "parameters": SHAPE.parameters,
            "batch": BATCH,
            "sequence": SEQUENCE,
            "learning_rate": LEARNING_RATE,
            "period": period,
            "warm_up": self.warm_up,
            "steps": self.steps,
        }

    def measure(self, method: str, workers: int, rate: int | None, alone: Cell | None) -> Cell:
        """Run one method once; `alone` is the same number of workers without a network."""
        delay, cover, warm_up, steps = 0, 0, self.warm_up, self.steps
        if alone is not None and rate is not None:
            delay, cover = self.delay_and_cover(method, workers, rate, alone["step_s"])
            if method == "ddp":
                step_s = alone["step_s"] + carry_s(self.exchanged_bytes(method, workers), rate)
                warm_up, steps = 1, max(3, min(12, int(DDP_SECONDS / step_s)))
        with Sites(workers, None if rate is None else f"{rate}mbit") as sites, tempfile.TemporaryDirectory() as folder:
            throw_away(workers).save(Path(folder))
            task = Task(
                method=method,
                worker=0,
                addresses=[site.address for site in sites],
                period=self.period,
                delay=delay,
                cover=cover,
                warm_up=warm_up,
                steps=steps,
                folder=folder,
            )
            results = run(sites, task)
        return self.cell(task, rate, results, alone)

    def delay_and_cover(self, method: str, workers: int, rate: int, step_s: float) -> tuple[int, int]:
        """The delay to ask for, and how many steps an exchange may last, leaving some without one."""
        fragments = {"torchft-delay": TORCHFT_FRAGMENTS, "streaming": len(self.fragments("streaming")), "eager": 1}
        if method not in fragments:
            return 0, 0
        covering = math.ceil(carry_s(self.exchanged_bytes(method, workers), rate) / step_s) + MARGIN
        apart = self.period // fragments[method] - 1
        delays = {"torchft-delay": min(covering, apart), "streaming": min(covering, self.period), "eager": 0}
        return delays[method], min(covering, apart)

    def fragments(self, method: str) -> tuple[Fragment, ...]:
        """Those of one of our rows."""
        return split(self.model, our_sync(method, self.period, 0).fragments)

    def exchanged_bytes(self, method: str, workers: int) -> float:
        """What a worker sends in one exchange of the largest fragment; all of it is also received."""
        ring = 2 * (workers - 1) / workers
        if method == "ddp":
            return ring * 4 * SHAPE.parameters
        if method.startswith("torchft"):
            return ring * 4 * max(sum(p.numel() for p in f.parameters()) for f in torchft_fragments(self.model))
        largest = max(fragment.numel for fragment in self.fragments(method))
        return sent_bytes(our_sync(method, self.period, 0).codec.payload_bytes(largest), workers)

    def cell(self, task: Task, rate: int | None, results: list[dict[str, Any]], alone: Cell | None) -> Cell:
        """What the workers saw, in figures that can be compared."""
        steps, periods = task.steps, task.steps / self.period
        step_s = max(r["step_s"] for r in results) / steps
        where = "backward_s" if task.method == "ddp" else "inner_s" if "torchft" in task.method else "outer_s"
        held_up = [self.period * (r[where] / steps - r[f"bare_{where}"]) for r in results]
        waited = [r["wait_s"] / periods for r in results]
        bare_s = max(r["bare_step_s"] for r in results)
        slower = [s / (r["bare_backward_s"] + r["bare_inner_s"]) - 1 for r in results for s in r["overlapped_s"]]
        machine, own = results[0]["machine_s"], sum(r["cpu_s"] for r in results)
        cores = len(os.sched_getaffinity(0))
        return {
            "method": task.method,
            "workers": task.workers,
            "rate_mbit": rate,
            "delay": task.delay,
            "timed_steps": steps,
            "step_s": step_s,
            "bare_step_s": bare_s,
            "share": bare_s / step_s,
            "bare_step_s_by_worker": [r["bare_step_s"] for r in results],
            **{part: mean(r[part] for r in results) / steps for part in ("backward_s", "inner_s", "outer_s")},
            "sent_bytes_per_period": mean(r["sent_bytes"] for r in results) / periods,
            "received_bytes_per_period": mean(r["received_bytes"] for r in results) / periods,
            "overlapped_steps": len(slower),
            "overlapped_slower": mean(slower) if slower else None,
            "held_up_s_per_period": mean(held_up) if alone else 0.0,
            "wait_s_per_period": mean(waited) if ours(task.method) else None,
            "least_held_up_s_per_period": min(held_up) if alone else 0.0,
            "least_wait_s_per_period": min(waited) if ours(task.method) else None,
            "loss": mean(r["loss"] for r in results) if (task.warm_up, steps) == (self.warm_up, self.steps) else None,
            "loss_spread": max(r["loss"] for r in results) - min(r["loss"] for r in results),
            "local_loss": mean(r["local_loss"] for r in results),
            "other_load": max(0.0, (machine - own) / (results[0]["wall_s"] * cores)),
        }


def ours(method: str) -> bool:
    return method in ("diloco", "streaming", "eager")


def carry_s(count: float, rate: int) -> float:
    """Seconds that a line of so many Mbit/s needs for so many bytes."""
    return 8 * count / (rate * 1e6)


def run(sites: Sites, task: Task) -> list[dict[str, Any]]:
    """Start a worker in every site and wait for what they write; if one fails, so does the run, with its last words."""
    folder = Path(task.folder)
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "line", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    script = str(Path(__file__).with_name("wan_worker.py"))
    processes = []
    for worker, site in enumerate(sites):
        described = json.dumps(asdict(task) | {"worker": worker})
        with open(folder / f"log-{worker}", "wb") as log:
            command = [sys.executable, script, described]
            processes.append(site.popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
    deadline = time.monotonic() + LONGEST_CELL_S
    running = True
    while running:
        time.sleep(0.2)
        codes = [process.poll() for process in processes]
        running = None in codes
        failed = [worker for worker, code in enumerate(codes) if code not in (None, 0)]
        if failed or (running and time.monotonic() > deadline):
            worker = failed[0] if failed else 0
            reason = f"failed ({codes[worker]})" if failed else f"has not ended after {LONGEST_CELL_S} s"
            words = (folder / f"log-{worker}").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"{task.method}: worker {worker} {reason}:\n{words}")
    return [json.loads((folder / f"result-{worker}.json").read_text()) for worker in range(task.workers)]


def missing(method: str) -> str | None:
    """Why a method cannot be run here."""
    if method.startswith("torchft") and importlib.util.find_spec("torchft") is None:
        return "torchft is not installed: pip install torchft==0.2.0"
    return None


def cells(bench: Bench, arguments: argparse.Namespace) -> Iterator[Cell]:
    """Run what was asked for, each number of workers alone first: the machine may be busier than the last time."""
    chosen = [method for method in arguments.methods if method != "alone"]
    for method in chosen:
        if (reason := missing(method)) is not None:
            print(f"left out: {method}: {reason}", flush=True)
    chosen = [method for method in chosen if missing(method) is None]
    for workers in arguments.workers:
        alone = bench.measure("alone", workers, None, None)
        yield alone
        limited = [(method, rate) for rate in arguments.rates for method in chosen]
        for method, rate in [("ddp", None)] * ("ddp" in chosen) + limited:
            try:
                yield bench.measure(method, workers, rate, alone)
            except RuntimeError as error:  # the other cells are still worth having
                print(f"FAILED: {error}", flush=True)


def key(cell: Cell) -> tuple[int, int, int]:
    """Where a cell belongs in the table: by workers, rate and method."""
    return cell["workers"], cell["rate_mbit"] or 0, list(LABELS).index(cell["method"])


class Results:
    """The file of all cells; those measured anew replace the old ones."""

    def __init__(self, path: Path, settings: dict[str, Any], fresh: bool) -> None:
        self.path, self.settings = path, settings
        self.cells: dict[tuple[int, int, int], Cell] = {}
        if fresh or not path.exists():
            return
        stored = json.loads(path.read_text())
        if stored["settings"] != settings:
            raise SystemExit(f"{path.name} holds results of other settings, {stored['settings']}: add --fresh")
        self.cells = {key(cell): cell for cell in stored["cells"]}

    def add(self, cell: Cell) -> None:
        """Keep a cell, at once also on disk."""
        self.cells[key(cell)] = cell
        stored = {"settings": self.settings, "cells": self.ordered()}
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(json.dumps(stored, indent=1) + "\n")

    def ordered(self) -> list[Cell]:
        """By workers, rate and method."""
        return [self.cells[place] for place in sorted(self.cells)]

    def loss(self, cell: Cell) -> float | None:
        """Its own, or for a DDP of few steps that of the run on an unlimited line."""
        full = self.cells.get((cell["workers"], 0, key(cell)[2])) if cell["method"] == "ddp" else None
        loss: float | None = (full or cell)["loss"]
        return loss


HEADER = (
    f"{'workers':>7} {'Mbit/s':>9} {'method':30} {'delay':>5} {'step s':>7} {'speed':>7} {'MB sent':>8} "
    f"{'held up s':>9} {'waiting s':>9} {'in flight':>9} {'loss':>7} {'other load':>10}"
)


def line(cell: Cell, loss: float | None) -> str:
    rate = cell["rate_mbit"] or ("none" if cell["method"] == "alone" else "unlimited")
    waiting = "" if cell["wait_s_per_period"] is None else f"{cell['wait_s_per_period']:.2f}"
    in_flight = "" if cell["overlapped_slower"] is None else f"{cell['overlapped_slower']:+.1%}"
    return (
        f"{cell['workers']:>7} {rate:>9} {LABELS[cell['method']]:30} {cell['delay'] or '':>5} {cell['step_s']:>7.3f} "
        f"{cell['share']:>7.1%} {cell['sent_bytes_per_period'] / 1e6:>8.2f} {cell['held_up_s_per_period']:>9.2f} "
        f"{waiting:>9} {in_flight:>9} {'' if loss is None else f'{loss:.3f}':>7} "
        f"{cell['other_load']:>9.1%}{'!' if cell['other_load'] > LOUD else ' '}"
    )


def picture(results: Results, palette: Palette) -> Figure:
    """Bars: the share of the speed alone, by rate and number of workers."""
    limited = [cell for cell in results.ordered() if cell["rate_mbit"]]
    groups = sorted({(cell["rate_mbit"], cell["workers"]) for cell in limited})
    methods = [method for method in LABELS if any(cell["method"] == method for cell in limited)]
    figure = Figure(figsize=(8.4, 3.8), layout="constrained")
    axes = figure.add_subplot()
    width = 0.86 / max(len(methods), 1)
    for place, method in enumerate(methods):
        bars = [(groups.index((c["rate_mbit"], c["workers"])), c["share"]) for c in limited if c["method"] == method]
        x = [group + (place - (len(methods) - 1) / 2) * width for group, _ in bars]
        heights = [100 * share for _, share in bars]
        drawn = axes.bar(x, heights, 0.92 * width, color=palette.of(place), label=LABELS[method])
        axes.bar_label(drawn, fmt="%.0f", fontsize=7, color=palette.muted, padding=1)
    axes.set_xticks(range(len(groups)), [f"{rate} Mbit/s\n{workers} workers" for rate, workers in groups])
    axes.set_ylim(0, 112)
    dress(axes, palette, x="", y="speed, % of the same workers without a network", grid="y")
    figure.legend(loc="outside upper left", ncols=3, frameon=False, labelcolor=palette.ink, fontsize=8.5)
    return figure


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rates", nargs="+", type=int, default=[20, 100], help="Mbit/s")
    parser.add_argument("--workers", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--period", type=int, default=30, help="a multiple of torchft's 3 fragments")
    parser.add_argument("--periods", type=int, default=1, help="on the clock, after one of warm-up")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of wan.json (and wan.png)")
    parser.add_argument("--fresh", action="store_true", help="forget results that are there")
    parser.add_argument("--table", action="store_true", help="run nothing, print what is there")
    return parser.parse_args()


def main() -> None:
    arguments = parsed()
    bench = Bench(arguments.period, arguments.periods)
    results = Results(arguments.results / "wan.json", bench.settings, arguments.fresh)
    if not arguments.table:
        if (reason := available()) is not None:
            raise SystemExit(f"no sites here: {reason}")
        print(HEADER, flush=True)
        for cell in cells(bench, arguments):
            results.add(cell)
            print(line(cell, cell["loss"]), flush=True)
        print()
    print(f"{SHAPE.parameters / 1e6:.2f} million parameters, period {bench.period}; MB and seconds are per period")
    print("\n".join([HEADER, *(line(cell, results.loss(cell)) for cell in results.ordered())]))
    images = IMAGES if arguments.results == RESULTS else arguments.results
    (images / "wan.png").write_bytes(to_png(lambda palette: picture(results, palette)))


if __name__ == "__main__":
    main()
