"""The papers' comparison at 35 million parameters, trained for real: what each method's loss is beside data-parallel's.

    python benchmarks/papers_35m.py train [--methods diloco-30 ...] [--seconds 500]   # on a GPU; about 6 minutes each
    python benchmarks/papers_35m.py train --methods streaming-100 --set sync.outer_lr=0.6 --suffix lr0.6   # a variant
    python benchmarks/papers_35m.py table                                              # from the results, anywhere

The papers' 35M decoder (6 layers of width 512, sequences of 1024), two workers in one process, the same tokens in the
same order for all of one seed: 64 sequences a step, all Python source that is installed on the machine, as BPE tokens
of a vocabulary of 32,000. AdamW as in the scaling-laws paper, outer Nesterov at the Streaming paper's 0.4 and 0.9.

`train` goes through the methods in order, takes up what was interrupted (each is a run folder with checkpoints), stops
between two steps when its seconds are over, and copies the metrics of every finished run to the results. So the table
can be made in several short sessions, also on machines that forget everything: a method fits into one. On another
machine the text is another; what was trained on it is not put beside what was not: give --results a folder of its own.

Held-out loss is in nats per token, of the outer parameters (data-parallel: of the model) after all steps, over two
million tokens of files that no worker has seen, the same for all. "training loss" is that of the workers' own
parameters, over the last 500 steps. "gap" is to data-parallel in percent, beside that of the papers' tables. The text
has 105 million tokens, so it is read five times, where the papers' runs see each token once. The loss of every held-out
sequence is kept too (.npy): what stands after a gap is its standard error by the choice of held-out text, over
neighbourhoods of 16 sequences; other seeds differ besides.
"""

import argparse
import hashlib
import json
import math
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from matplotlib.figure import Figure

from atoll import config as run_file
from atoll.errors import ConfigError
from atoll.events import End, Eval, Start, Step, read
from atoll.layout import MODEL
from atoll.train.batches import Batches, held_out
from atoll.train.export import load_export
from atoll.train.run import prepare
from atoll.units import bytes_text

RESULTS = Path(__file__).parent / "results" / "papers_35m"
WORKERS = 2
LOG_EVERY = 50
TOKENS = 512_000_000
"""Of both workers together, at least."""
STREAMING = {"method": "streaming", "delay": 1, "alpha": 0.5}
FARTHEST = 6.0
"""Percent from data-parallel that the picture of gaps has room for; Delayed is beyond."""
OWN = ("name", "out", "train.steps", "train.warmup", "train.eval_every", "train.save_every", "train.log_every")
"""Settings that are no variant's to change."""
COMPARED = ("data", "sync.workers", "train.batch", "train.sequence", "train.eval_tokens")
"""Settings in which runs that are compared agree, or begin so."""
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
            "batch": 32,
            "sequence": 1024,
            "lr": 3e-3,
            "eval_tokens": 2**21,
            "log_every": LOG_EVERY,
            "keep": 1,
        },
        "sync": sync,
        "log": {"view": "lines"},
    }
    run = run_file.parse(table, arguments.changes)
    steps = -(-arguments.tokens // (run.train.batch * sequence_of(run) * run.sync.workers))
    lengths = {
        "steps": steps,
        "warmup": min(1000, steps // 10),
        "eval_every": max(1, steps // 20),
        "save_every": max(1, steps // 2),
    }
    return run.changed(**{f"train.{key}": value for key, value in lengths.items()})


def sequence_of(run: run_file.RunConfig) -> int:
    """Tokens of a sequence."""
    assert run.train.sequence is not None  # as settings() gives it
    return run.train.sequence


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
        if arguments.again and kept.exists():
            shutil.rmtree(folder, ignore_errors=True)
            kept.unlink()
        if kept.exists():
            print(f"{name}: in the results already", flush=True)
            if not kept.with_suffix(".npy").exists() and (folder / MODEL).exists():
                np.save(kept.with_suffix(".npy"), sequence_losses(folder / MODEL, run))
            continue
        check_text(run, arguments.results)
        file = arguments.runs / f"{name}.toml"
        file.write_text(run.to_toml())
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
            kept.with_suffix(".json").write_text(json.dumps(about(folder, run), indent=1) + "\n")
            shutil.copy(folder / "metrics.jsonl", kept)
            np.save(kept.with_suffix(".npy"), sequence_losses(folder / MODEL, run))
        elif code == INTERRUPTED:
            print(f"{name}: the time is over; call again to go on", flush=True)
            return
        else:
            sys.exit(f"{name}: ended with {code}")


def check_text(run: run_file.RunConfig, results: Path) -> None:
    """Refuse to train what could not stand beside data-parallel, for another text is on this machine."""
    reference = results / f"{REFERENCE}.jsonl"
    if run.name == REFERENCE or not reference.exists():
        return
    known = reference.with_suffix(".json")
    theirs = json.loads(known.read_text())["text"] if known.exists() else None
    if theirs is not None:
        same = theirs == digest(run)
    else:
        files, workers = list(prepare(run).train), run.sync.workers
        batches = Batches(files, workers=workers, batch=1, sequence=sequence_of(run), seed=0)
        same = batches.weights() == Result.read(reference).start.weights
    if not same:
        sys.exit(
            f"{run.name}: the text on this machine is not that of {REFERENCE} in {results}: "
            "train that here too, into a folder of its own (--results)"
        )


def digest(run: run_file.RunConfig) -> str:
    """Of the tokens that a run trains on and is measured by."""
    data, found = prepare(run), hashlib.blake2b(digest_size=16)
    for file in (*data.train, data.held_out):
        found.update(file.tokens.data)
    return found.hexdigest()


def about(folder: Path, run: run_file.RunConfig) -> dict[str, Any]:
    """The settings of a run, but for places on its machine, and a digest of its text."""
    places = ("out", "data.source", "data.cache")
    used = run_file.settings_of(run_file.load(folder / "run.toml"))
    return {key: value for key, value in used.items() if key not in places} | {"text": digest(run)}


def sequence_losses(export: Path, run: run_file.RunConfig) -> npt.NDArray[np.float32]:
    """The loss of each held-out sequence that a run evaluates."""
    model, _ = load_export(export)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device).eval()
    losses = []
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        for rows in held_out(prepare(run).held_out, sequence=sequence_of(run), tokens=run.train.eval_tokens, batch=16):
            logits, targets = model(rows[:, :-1].to(device)).float(), rows[:, 1:].to(device)
            found = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
            losses.append(found.mean(1).cpu())
    return torch.cat(losses).numpy()


class Result(NamedTuple):
    """One finished run."""

    start: Start
    steps: list[Step]
    evals: list[Eval]
    end: End
    losses: npt.NDArray[np.float32] | None
    """Of every held-out sequence, if they were kept."""

    @classmethod
    def read(cls, path: Path) -> "Result":
        """From its metrics."""
        events = list(read(path))
        losses = path.with_suffix(".npy")
        return cls(
            start=next(event for event in events if isinstance(event, Start)),
            steps=[event for event in events if isinstance(event, Step)],
            evals=[event for event in events if isinstance(event, Eval)],
            end=next(event for event in events if isinstance(event, End)),
            losses=np.load(losses) if losses.exists() else None,
        )

    @property
    def training_loss(self) -> float:
        """Of the workers' own parameters, over the last 500 steps."""
        return mean(loss for step in self.steps[-500 // LOG_EVERY :] for loss in step.loss if loss is not None)

    def gap(self, reference: "Result") -> str:
        """To another run, in percent of its loss."""
        gap = f"{100 * (self.end.loss / reference.end.loss - 1):+.2f} %"
        if self.losses is None or reference.losses is None or self.losses.shape != reference.losses.shape:
            return gap
        apart = (self.losses - reference.losses) / reference.losses.mean()
        near = np.array([part.mean() for part in np.array_split(apart, max(2, len(apart) // 16))])
        return f"{gap} ± {100 * np.std(near, ddof=1) / math.sqrt(len(near)):.2f}"


def table(results: Mapping[str, Result]) -> list[str]:
    """The lines of the table, in Markdown."""
    reference = results[REFERENCE]
    lines = [
        "| method | held-out loss | gap | papers | training loss | payload bytes a worker | tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, result in results.items():
        end, gap = result.end, "" if name == REFERENCE else result.gap(reference)
        paper = f"{PAPER[name]:+.1f} %" if name in PAPER else ""
        sent, tokens = bytes_text(mean(end.bytes_sent)), f"{end.tokens / 1e6:.0f} M"
        cells = [name, f"{end.loss:.4f}", gap, paper, f"{result.training_loss:.3f}", sent, tokens]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def costs_of_4_bits(results: Mapping[str, Result]) -> list[str]:
    """What Streaming at period 30 loses by e3m0 beside fp32: at the end, and over the last three quarters."""
    found = []
    for name, coarse in results.items():
        exact = results.get(name.replace("streaming-30", "streaming-30-fp32"))
        if exact is None or exact is coarse:
            continue
        pairs = zip(coarse.evals, exact.evals, strict=True)
        late = [100 * (one.loss / other.loss - 1) for one, other in pairs if one.tokens >= coarse.end.tokens / 4]
        found.append(
            f"{name}: 4 bits cost {coarse.gap(exact)}; in the {len(late)} evaluations of the last three quarters "
            f"{min(late):+.2f} to {max(late):+.2f} %, {mean(late):+.2f} % on average"
        )
    return found


def picture(results: Mapping[str, Result]) -> Figure:
    """Held-out loss over tokens, but for the first fifth, and how far each is from data-parallel's."""
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    known = {event.tokens: event.loss for event in results[REFERENCE].evals}
    for name, result in results.items():
        late = [event for event in result.evals if event.tokens >= result.end.tokens / 5]
        tokens = [event.tokens / 1e6 for event in late]
        losses.plot(tokens, [event.loss for event in late], label=name)
        gaps.plot(tokens, [100 * (event.loss / known[event.tokens] - 1) for event in late], label=name)
    losses.set_ylabel("held-out loss, nats per token")
    gaps.set_ylabel("gap to data-parallel, %")
    gaps.set_ylim(-3, FARTHEST)
    for axes in (losses, gaps):
        axes.set_xlabel("tokens of both workers, millions")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def load(folder: Path) -> dict[str, Result]:
    """All finished runs on the same text and as many tokens, in the order of METHODS, variants last."""
    found = {path.stem: Result.read(path) for path in sorted(folder.glob("*.jsonl"))}
    if REFERENCE not in found:
        sys.exit(f"{folder} has no {REFERENCE}.jsonl, which all are compared with: train it first")
    names = [*(name for name in METHODS if name in found), *(name for name in found if name not in METHODS)]
    reference, kept = found[REFERENCE], {}
    for name in names:
        one = found[name]
        if (one.start.weights, one.end.tokens) == (reference.start.weights, reference.end.tokens):
            kept[name] = one
        else:
            print(f"{name} is left out: it had another text than {REFERENCE}, or another length", file=sys.stderr)
    return kept


def refuse(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """What would be put in the wrong place, or could not be compared with what is there."""
    keys = [change.partition("=")[0].strip() for change in arguments.changes]
    if own := [key for key in keys if any(key == one or one.startswith(f"{key}.") for one in OWN)]:
        parser.error(f"--set {own[0]}: that is decided here, by --suffix, --runs and --tokens")
    if arguments.suffix and any(f"{method}-{arguments.suffix}" in METHODS for method in arguments.methods):
        parser.error(f"--suffix {arguments.suffix}: that is the name of another method")
    if arguments.results != RESULTS:
        return
    if (keys or arguments.tokens != TOKENS) and arguments.suffix is None:
        parser.error("--set and --tokens make a variant: give it a name (--suffix), or it would take a method's place")
    others = [key for key in keys if key.startswith(COMPARED)]
    if others or arguments.tokens != TOKENS:
        what = f"--set {others[0]}" if others else "--tokens"
        parser.error(f"{what}: the run could not be compared with others: give it a folder of its own (--results)")


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
    refuse(parser, arguments)
    try:
        if arguments.act == "train":
            train(arguments)
            return
    except ConfigError as problem:
        parser.error(str(problem))
    results = load(arguments.results)
    print("\n".join(table(results)))
    print("", *costs_of_4_bits(results), sep="\n")
    if missing := [name for name in METHODS if name not in results]:
        print(f"\nnot trained yet: {', '.join(missing)}")
    picture(results).savefig(arguments.results.with_suffix(".png"), dpi=130)


if __name__ == "__main__":
    main()
