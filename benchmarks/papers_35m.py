"""The papers' comparison at 35 million parameters, trained for real: what each method's loss is beside data-parallel's.

    python benchmarks/papers_35m.py train [--methods diloco-30 ...] [--seconds 500]   # on a GPU; about 6 minutes each
    python benchmarks/papers_35m.py train --methods streaming-100 --set sync.outer_lr=0.6 --suffix lr0.6   # a variant
    python benchmarks/papers_35m.py table                                              # from the results, anywhere

The papers' 35M decoder (6 layers of width 512, sequences of 1024), two workers in one process, the same tokens in the
same order for all: 64 sequences a step, all Python source that is installed on the machine, as BPE tokens of a
vocabulary of 32,000. AdamW as in the scaling-laws paper, outer Nesterov at the Streaming paper's 0.4 and 0.9.

`train` goes through the methods in order, takes up what was interrupted (each is a run folder with checkpoints), stops
between two steps when its seconds are over, and copies the metrics of every finished run to the results. So the table
can be made in several short sessions, also on machines that forget everything: a method fits into one.

Held-out loss is in nats per token, of the outer parameters (data-parallel: of the model) after all steps, over two
million tokens of files that no worker has seen, the same for all. "gap" is to data-parallel in percent, beside that of
the papers' tables. The text has 105 million tokens, so it is read five times, where the papers' runs see each token
once. The loss of every held-out sequence is kept too (.npy), so that the table can say how much of a difference of two
models may be chance in the choice of held-out text (the standard error over sequences); other seeds differ besides.
"""

import argparse
import math
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from atoll import config as run_file
from atoll.events import End, Eval, Event, read
from atoll.layout import MODEL
from atoll.train.batches import held_out
from atoll.train.export import load_export
from atoll.train.run import prepare
from atoll.units import bytes_text

RESULTS = Path(__file__).parent / "results" / "papers_35m"
BATCH, SEQUENCE, WORKERS = 32, 1024, 2
TOKENS = 512_000_000
"""Of both workers together, at least."""
STREAMING = {"method": "streaming", "delay": 1, "alpha": 0.5}
FARTHEST = 6.0
"""Percent from data-parallel that the picture of gaps has room for; Delayed is beyond."""
INTERRUPTED = 130
"""The exit code of a run that was stopped and saved."""
REFERENCE = "data-parallel"
METHODS: dict[str, dict[str, Any]] = {
    "data-parallel": {"method": "data-parallel"},
    "streaming-30": {**STREAMING, "period": 30},
    "diloco-30": {"method": "diloco", "period": 30},
    "eager-30": {"method": "eager", "period": 30},
    "streaming-100": {**STREAMING, "period": 100},
    "streaming-30-fp32": {**STREAMING, "period": 30, "codec": "fp32"},
    "delayed-30": {"method": "delayed", "period": 30},
}
PAPER = {"diloco-30": 0.9, "streaming-30": 0.6, "streaming-100": 1.4, "eager-30": 3.1}
"""Gaps to data-parallel in percent at 35 million parameters: 3.54, 3.53, 3.56 and 3.62 against 3.51."""


def settings(name: str, arguments: argparse.Namespace) -> run_file.RunConfig:
    """The run of a method."""
    steps = -(-arguments.tokens // (BATCH * SEQUENCE * WORKERS))
    sync = {"workers": WORKERS, **METHODS[name]}
    if METHODS[name]["method"] != "data-parallel":
        sync |= {"outer_lr": 0.4, "outer_momentum": 0.9}
    table = {
        "name": name if arguments.suffix is None else f"{name}-{arguments.suffix}",
        "out": str(arguments.runs),
        "model": {"preset": "35M"},
        "data": {
            "source": sources(),
            "tokenizer": "bpe",
            "vocabulary": 32_000,
            "held_out": 0.03,
            "cache": str(arguments.runs / "tokens"),
        },
        "train": {
            "steps": steps,
            "batch": BATCH,
            "sequence": SEQUENCE,
            "lr": 3e-3,
            "warmup": min(1000, steps // 10),
            "eval_every": max(1, steps // 20),
            "eval_tokens": 2**21,
            "log_every": 50,
            "save_every": max(1, steps // 2),
            "keep": 1,
        },
        "sync": sync,
        "log": {"view": "lines"},
    }
    return run_file.parse(table, arguments.changes)


def sources() -> list[str]:
    """Folders with Python source, each once."""
    paths = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
    outermost = [path for path in paths if not any(other in path.parents for other in paths)]
    return sorted({f"{path}/**/*.py" for path in outermost})


def train(arguments: argparse.Namespace) -> None:
    """Train what is not finished, until the time is over."""
    until = time.monotonic() + arguments.seconds
    arguments.runs.mkdir(parents=True, exist_ok=True)
    for method in arguments.methods:
        run = settings(method, arguments)
        name, folder = run.name, arguments.runs / run.name
        kept = arguments.results / f"{name}.jsonl"
        if kept.exists() and not arguments.again:
            print(f"{name}: in the results already", flush=True)
            continue
        file = arguments.runs / f"{name}.toml"
        file.write_text(run.to_toml())
        if arguments.again and folder.exists():
            shutil.rmtree(folder)
        begun = (folder / "run.toml").exists()  # if with other settings, it is refused
        command = [sys.executable, "-m", "atoll", "train", str(file), *(["--resume"] if begun else [])]
        process = subprocess.Popen(command)
        try:
            code = process.wait(max(1.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            code = process.wait()
        if code == 0:
            arguments.results.mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "metrics.jsonl", kept)
            np.save(kept.with_suffix(".npy"), sequence_losses(folder / MODEL, run))
        elif code == INTERRUPTED:
            print(f"{name}: the time is over; call again to go on", flush=True)
            return
        else:
            sys.exit(f"{name}: ended with {code}")


def sequence_losses(export: Path, run: run_file.RunConfig) -> npt.NDArray[np.float32]:
    """The loss of each held-out sequence that a run evaluates."""
    model, _ = load_export(export)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    losses = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for rows in held_out(prepare(run).held_out, sequence=SEQUENCE, tokens=run.train.eval_tokens, batch=16):
            logits, targets = model(rows[:, :-1].to(device)).float(), rows[:, 1:].to(device)
            found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            losses.append(found.mean(1).cpu())
    return torch.cat(losses).numpy()


def table(results: Mapping[str, Sequence[Event]]) -> list[str]:
    """The lines of the table, in Markdown."""
    ends = {name: next(event for event in events if isinstance(event, End)) for name, events in results.items()}
    lines = ["| method | loss | gap | papers | payload bytes a worker | tokens |", "|---|---|---|---|---|---|"]
    for name, end in ends.items():
        gap = "" if name == REFERENCE else f"{100 * (end.loss / ends[REFERENCE].loss - 1):+.2f} %"
        paper = f"{PAPER[name]:+.1f} %" if name in PAPER else ""
        sent = bytes_text(mean(end.bytes_sent))
        lines.append(f"| {name} | {end.loss:.4f} | {gap} | {paper} | {sent} | {end.tokens / 1e6:.0f} M |")
    return lines


def sureness(folder: Path) -> str:
    """The standard error of the difference of any two models whose losses by sequence are here."""
    losses = {path.stem: np.load(path) for path in sorted(folder.glob("*.npy"))}
    errors = [
        float(np.std(one - other)) / math.sqrt(len(one)) / float(one.mean())
        for (_, one), (_, other) in combinations(losses.items(), 2)
    ]
    return f"{min(errors):.3%} to {max(errors):.3%} ({', '.join(losses)})" if errors else "not known"


def picture(results: Mapping[str, Sequence[Event]]) -> Figure:
    """Held-out loss over tokens, but for the first fifth, and how far each is from data-parallel's."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    curves = {name: [event for event in events if isinstance(event, Eval)] for name, events in results.items()}
    known = {event.tokens: event.loss for event in curves[REFERENCE]}
    for name, curve in curves.items():
        late = [event for event in curve if event.tokens >= curve[-1].tokens / 5]
        tokens = [event.tokens / 1e6 for event in late]
        losses.plot(tokens, [event.loss for event in late], label=name)
        gaps.plot(tokens, [100 * (event.loss / known[event.tokens] - 1) for event in late], label=name)
    losses.set_ylabel("held-out loss, nats per token")
    losses.legend(frameon=False)
    gaps.set_ylabel("gap to data-parallel, %")
    gaps.set_ylim(-3, FARTHEST)
    for axes in (losses, gaps):
        axes.set_xlabel("tokens of both workers, millions")
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def load(folder: Path) -> dict[str, list[Event]]:
    """All finished runs in the order of METHODS, variants last."""
    found = {path.stem: list(read(path)) for path in sorted(folder.glob("*.jsonl"))}
    if REFERENCE not in found:
        sys.exit(f"{folder} has no {REFERENCE}.jsonl, which all are compared with: train it first")
    return {
        name: found[name] for name in [*(m for m in METHODS if m in found), *(f for f in found if f not in METHODS)]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=["train", "table"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of both workers together")
    parser.add_argument("--set", dest="changes", action="append", default=[], help="as of atoll train, for a variant")
    parser.add_argument("--suffix", help="of the runs' names, for a variant")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop, and go on with the next call")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "papers_35m")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--again", action="store_true", help="also what is in the results")
    arguments = parser.parse_args()
    if arguments.changes and arguments.suffix is None:
        parser.error("--set makes a variant: give it a name with --suffix, or it would take a method's place")
    if arguments.act == "train":
        train(arguments)
        return
    results = load(arguments.results)
    print("\n".join(table(results)))
    if missing := [name for name in METHODS if name not in results]:
        print(f"\nnot trained yet: {', '.join(missing)}")
    print(f"\nstandard error of a difference: {sureness(arguments.results)}")
    picture(results).savefig(arguments.results.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
