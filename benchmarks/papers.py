"""Trains the papers' comparison at 35 million parameters, and compares each method's loss with data-parallel's.

    python benchmarks/papers.py train --text TOKENS                          # every method, on a GPU
    python benchmarks/papers.py train --text TOKENS eager-30,lr=0.7,m=0.6 streaming-30,seed=1 --parallel 2 --seconds 500
    python benchmarks/papers.py train --text TOKENS --tokens 51_200_000 ...  # a tenth as long, for a sweep
    python benchmarks/papers.py tasks --text TOKENS --data FOLDER            # BLiMP and LAMBADA of what was trained
    python benchmarks/papers.py table --results FOLDER [--image FILE]        # from the results, anywhere

All rows train the papers' 35M decoder (6 layers of width 512, sequences of 1024) with two workers in one process, 64
sequences a step; rows of one seed read the same tokens in the same order. The inner AdamW is that of the scaling-laws
paper. The outer Nesterov has the Streaming paper's learning rate, 0.4, and momentum 0.9. A row may change these:
METHOD[,lr=OUTER][,m=MOMENTUM][,alpha=][,inner=LR][,seed=]...

TOKENS is the folder that `books.py` makes: English books as BPE tokens of a vocabulary of 32,000. Without --text the
text is all Python source that is installed on the machine, which the oldest results were made with.

`train` goes through the rows in order. Each row is a run folder with checkpoints, so it resumes what was interrupted.
It starts no row that the time left is too short for, and stops between two steps when its seconds are over. It copies
the metrics of every finished run to results/TEXT-DIGEST, or to results/TEXT-DIGEST-51M for another length. So the table
can be made in several short sessions, even on machines that keep nothing between them, as long as a row fits into one.

Held-out loss is in nats per token, of the outer parameters (data-parallel: of the model) after all steps, over two
million tokens of text that no worker has seen, the same for all. "training loss" is that of the workers' own
parameters, over the last 500 steps. "gap" is to data-parallel of the same seed, in percent, beside that of the papers'
tables. The loss of every held-out sequence is kept too (.npy). The ± after a gap is its standard error over the choice
of held-out books (`books.py origins` finds them; without that, over groups of 16 neighbouring sequences); it does not
include differences between seeds. `tasks` runs `atoll eval` on the final models of --runs, even while other rows are
trained, and adds the scores to the results.
"""

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from atoll.errors import AtollError
from atoll.runs.layout import BEST, CHECKPOINTS, METRICS, MODEL
from atoll.settings import config as run_file
from atoll.train.data.batches import held_out
from atoll.train.model.export import load_export
from atoll.train.run import prepare
from papers_rows import KEYS, METHODS, REFERENCE, Row
from papers_table import FIRST_TEXT, LOG_EVERY, RESULTS, TASKS, Result, costs_of_4_bits, load, picture, table

WORKERS = 2
TOKENS = 512_000_000
"""Least number of training tokens of a run, of both workers together."""
INTERRUPTED = 130
"""The exit code of a run that was stopped and saved."""


def settings(row: Row, arguments: argparse.Namespace) -> run_file.RunConfig:
    """Build the run of a row."""
    sync = {"workers": WORKERS, **METHODS[row.method]}
    if row.method != REFERENCE:
        sync |= {"outer_lr": 0.4} if ("outer", "sgd") in row.changes else {"outer_lr": 0.4, "outer_momentum": 0.9}
    made_here = {"tokenizer": "bpe", "vocabulary": 32_000, "held_out": 0.03, "cache": str(arguments.runs / "tokens")}
    table = {
        "name": row.name,
        "out": str(runs_of(arguments)),
        "model": {"preset": arguments.preset},
        "data": {"source": sources(), **made_here}
        if arguments.text is None
        else {"source": str(arguments.text), "tokenizer": "bpe"},
        "train": {
            "batch": 32,
            "sequence": arguments.sequence,
            "lr": 3e-3,
            "eval_tokens": arguments.eval_tokens,
            "log_every": LOG_EVERY,
            "keep": 1,
        },
        "sync": sync,
        "log": {"view": "lines"},
    }
    run = run_file.parse(table, [f"{KEYS[key]}={value}" for key, value in row.changes])
    steps = -(-arguments.tokens // (run.train.batch * sequence_of(run) * run.sync.workers))
    evaluations = 20 if arguments.tokens >= TOKENS else 5
    lengths = {
        "steps": steps,
        "warmup": min(1000, steps // 10),
        "eval_every": max(1, steps // evaluations),
        "save_every": max(1, steps // 2 if arguments.tokens >= TOKENS else steps),
    }
    return run.changed(**{f"train.{key}": value for key, value in lengths.items()})


def runs_of(arguments: argparse.Namespace) -> Path:
    """Return the folder of the run folders of one length."""
    folder: Path = arguments.runs / str(arguments.tokens)
    return folder


def sequence_of(run: run_file.RunConfig) -> int:
    """Return the tokens of a sequence."""
    assert run.train.sequence is not None  # as settings() gives it
    return run.train.sequence


def sources() -> list[str]:
    """Return patterns of all installed Python source, each folder once."""
    paths = [Path(sysconfig.get_path(kind)).resolve() for kind in ("stdlib", "purelib", "platlib")]
    outermost = [path for path in paths if not any(other in path.parents for other in paths)]
    return sorted({f"{path}/**/*.py" for path in outermost})


class Training:
    """Trains rows, some at a time, until the time is over."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments, self._runs = arguments, runs_of(arguments)
        self._until = time.monotonic() + arguments.seconds
        self._active: dict[subprocess.Popen[bytes], tuple[run_file.RunConfig, float]] = {}
        self._failed: list[str] = []
        self._text = digest(settings(Row(REFERENCE, ()), arguments))
        self.results: Path = arguments.results or default_results(arguments, self._text)

    def train(self, rows: Sequence[Row]) -> None:
        """Train the rows that are not finished; rows that the time left is too short for wait for the next call."""
        self._runs.mkdir(parents=True, exist_ok=True)
        self.results.mkdir(parents=True, exist_ok=True)
        self._check_text()
        try:
            for row in rows:
                run = settings(row, self._arguments)
                if self._finished(run):
                    print(f"{run.name}: in the results already", flush=True)
                    continue
                while len(self._active) >= self._arguments.parallel:
                    self._wait()
                left, takes = self._until - time.monotonic(), self._latest()
                if left < 0.95 * takes:
                    print(f"{run.name}: left out, {left:.0f} s are left and the last took {takes:.0f} s", flush=True)
                    continue
                self._start(run)
            while self._active:
                self._wait()
        finally:
            for process in self._active:
                process.send_signal(signal.SIGINT)
                process.wait()
        if self._failed:
            sys.exit(f"failed: {', '.join(self._failed)}")

    def _finished(self, run: run_file.RunConfig) -> bool:
        return (self.results / f"{run.name}.jsonl").exists()

    def _latest(self) -> float:
        """Return the seconds of the run that finished last on this machine; 0 if none has."""
        finished = max(self._runs.glob("*/took"), key=lambda path: path.stat().st_mtime, default=None)
        return float(finished.read_text()) if finished else 0.0

    def _start(self, run: run_file.RunConfig) -> None:
        file = self._runs / f"{run.name}.toml"
        file.write_text(run.to_toml())
        begun = (self._runs / run.name / "run.toml").exists()  # if with other settings, it is refused
        command = [sys.executable, "-m", "atoll", "train", str(file), *(["--resume"] if begun else [])]
        with (self._runs / f"{run.name}.log").open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        print(f"{run.name}: {'goes on' if begun else 'begins'}", flush=True)
        self._active[process] = run, time.monotonic()

    def _wait(self) -> None:
        """Wait until a run has ended or the time is over, and keep what is finished."""
        while all(process.poll() is None for process in self._active):
            time.sleep(0.1)
            if time.monotonic() >= self._until:
                for process in self._active:
                    process.send_signal(signal.SIGINT)
                    process.wait()
        for process in [process for process in self._active if process.poll() is not None]:
            run, began = self._active.pop(process)
            if process.returncode == 0:
                self._keep(run, time.monotonic() - began)
            elif process.returncode == INTERRUPTED:
                print(f"{run.name}: the time is over; call again to go on", flush=True)
            else:
                log = (self._runs / f"{run.name}.log").read_text()
                print(f"{run.name}: ended with {process.returncode}\n{log[-2000:]}", flush=True)
                self._failed.append(run.name)

    def _keep(self, run: run_file.RunConfig, seconds: float) -> None:
        """Copy a finished run to the results; the .jsonl comes last, because it marks the run as finished."""
        folder, kept = self._runs / run.name, self.results / f"{run.name}.jsonl"
        np.save(kept.with_suffix(".npy"), sequence_losses(folder / MODEL, run))
        (folder / "took").write_text(str(seconds))
        kept.with_suffix(".json").write_text(json.dumps(about(folder, self._text), indent=1) + "\n")
        keep_metrics(folder, kept)
        for large in (CHECKPOINTS, BEST):
            shutil.rmtree(folder / large, ignore_errors=True)
        end = Result.read(kept).end
        print(f"{run.name}: {end.loss:.4f}, {seconds:.0f} s, {end.tokens / end.seconds:,.0f} tokens/s", flush=True)

    def _check_text(self) -> None:
        """Exit if the results are of another text: the losses could not be compared."""
        for path in self.results.glob("*.json"):
            if json.loads(path.read_text())["text"] != self._text:
                sys.exit(f"{path} was trained on another text than the one here: give another folder as --results")


def keep_metrics(folder: Path, kept: Path) -> None:
    """Copy the metrics of a run to the results."""
    shutil.copy(folder / METRICS, kept.with_suffix(".part"))
    kept.with_suffix(".part").rename(kept)


def score(runs: Path, results: Path, data: Path) -> None:
    """Evaluate the final models of finished rows on tasks, and add the scores to the results that have none yet."""
    for took in sorted(runs.glob("*/took")):
        folder, kept = took.parent, results / f"{took.parent.name}.jsonl"
        if kept.exists() and not set(TASKS.values()) <= Result.read(kept).scores.keys():
            command = [sys.executable, "-m", "atoll", "eval", str(folder), "--tasks", ",".join(TASKS.values())]
            subprocess.run([*command, "--data", str(data), "--batch", "256"], check=True)
            keep_metrics(folder, kept)


def default_results(arguments: argparse.Namespace, text: str) -> Path:
    """Return the folder for results of a text and a length."""
    length = "" if arguments.tokens == TOKENS else f"-{arguments.tokens / 1e6:.3g}M"
    name = FIRST_TEXT if arguments.text is None else f"{arguments.text.name}-{text[:8]}"
    return RESULTS / f"{name}{length}"


def digest(run: run_file.RunConfig) -> str:
    """Return a digest of the tokens that a run is trained and evaluated on."""
    data, found = prepare(run), hashlib.blake2b(digest_size=16)
    for file in (*data.train, data.held_out):
        found.update(file.data)
    return found.hexdigest()


def about(folder: Path, text: str) -> dict[str, Any]:
    """Return the settings of a run, without paths of its machine, and the digest of its text."""
    places = ("out", "data.source", "data.cache")
    used = run_file.settings_of(run_file.load(folder / "run.toml"))
    return {key: value for key, value in used.items() if key not in places} | {"text": text}


def sequence_losses(export: Path, run: run_file.RunConfig) -> npt.NDArray[np.float32]:
    """Return the loss of each held-out sequence that a run evaluates."""
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=["train", "tasks", "table"])
    known = f"METHOD is one of {', '.join(METHODS)}; key is one of {', '.join(KEYS)}"
    parser.add_argument(
        "rows", nargs="*", type=Row.parse, help=f"METHOD[,key=value ...]; left out: every method. {known}"
    )
    parser.add_argument("--text", type=Path, help="folder of tokens, as books.py makes it")
    parser.add_argument("--data", type=Path, help="folder with the files of the tasks, as `atoll eval` takes it")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of all workers together")
    parser.add_argument("--parallel", type=int, default=1, help="rows at a time, each in a process of its own")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop, and go on with the next call")
    parser.add_argument("--preset", default="35M", help="of the model; another is for trying this out")
    parser.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--eval-tokens", type=int, default=2**21, help="held-out tokens of an evaluation")
    parser.add_argument("--runs", type=Path, default=Path("runs") / "papers")
    parser.add_argument("--results", type=Path, help="folder; left out: one of the text and the length")
    parser.add_argument("--image", type=Path, help="file for the picture of the methods without changes")
    arguments = parser.parse_intermixed_args()
    if arguments.act == "tasks" and arguments.data is None:
        parser.error("tasks needs --data: the folder with the JSONL files of the tasks, as `atoll eval` takes it")
    if arguments.act != "table":
        try:
            training = Training(arguments)
            if arguments.act == "train":
                training.train(arguments.rows or [Row(method, ()) for method in METHODS])
            else:
                score(runs_of(arguments), training.results, arguments.data)
        except AtollError as problem:
            parser.error(str(problem))
        return
    folder = arguments.results or RESULTS / FIRST_TEXT
    results = load(folder)
    print("\n".join(table(results)))
    print("", *costs_of_4_bits(results), sep="\n")
    if missing := [name for name in METHODS if name not in results]:
        print(f"\nnot trained yet: {', '.join(missing)}")
    if arguments.image is not None:
        picture(results).savefig(arguments.image, dpi=130)


if __name__ == "__main__":
    main()
