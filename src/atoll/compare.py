"""Runs the runs of a study, each in a process of its own, and shows how they compare.

A run that fails takes no other down, and small models, which one core serves best, keep all cores busy. What is
finished is not run again; what was interrupted is resumed.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.text import Text

from atoll.config import RunConfig
from atoll.errors import AtollError, ConfigError, DataError
from atoll.events import Tail
from atoll.events import read as read_events
from atoll.layout import METRICS
from atoll.plan.link import parse_link
from atoll.report import load_all, rich_table, summary, write
from atoll.report.table import Row
from atoll.study import Claim, Study, read
from atoll.train.folder import RunFolder
from atoll.train.run import prepare
from atoll.train.sample import sample
from atoll.train.view import Board

POLL_S = 0.3
PATIENCE_S = 60.0
"""How long an interrupted run may take to save."""
DEMO = Path(__file__).with_name("demo.toml")


def compare(
    files: Sequence[Path],
    overrides: Sequence[str] = (),
    *,
    jobs: int | None = None,
    out: Path | None = None,
    fresh: bool = False,
    link: str = "100Mbit/s",
) -> int:
    """Run every run of these study and run files, `jobs` at a time, and print how they end; returns an exit status."""
    study = read(files, overrides, out)
    slow = parse_link(link)
    console = Console()
    console.print(Text(study.title, style="bold"))
    failed = run_all(study, jobs=jobs, fresh=fresh)
    folders = [folder_of(run) for name, run in study.runs.items() if name not in failed]
    if folders:
        rows = summary(load_all(folders), slow)
        console.print(rich_table(rows, slow))
        verdicts = [verdict(claim, rows) for claim in study.claims]
        for told in verdicts:
            console.print(Text(told), soft_wrap=True)
        place = folders[0].parent
        page, pictures = place / "report.html", place / "pictures"
        write(folders, page, link=slow, png=pictures, title=study.title, claims=verdicts)
        console.print(Text(f"report: {page}   pictures: {pictures}"), soft_wrap=True)
    for name, why in failed.items():
        print(f"error: run {name} failed: {why}", file=sys.stderr)
    return 1 if failed else 0


def demo(out: Path, steps: int | None = None, jobs: int | None = None) -> int:
    """The embedded study: four methods side by side on the Python standard library's source, and a generated sample."""
    overrides = [] if steps is None else [f"train.steps={steps}", f"train.warmup={steps // 10}"]
    status = compare([DEMO], overrides, jobs=jobs, out=out, fresh=True)
    if status == 0:
        console = Console()
        console.print(Text('\nwhat the model trained by Streaming DiLoCo in 4 bits writes after "def main(":\n'))
        (text,) = sample(out / "streaming", "def main(", tokens=200, temperature=0.7)
        console.print(Text(text), soft_wrap=True)
    return status


def folder_of(run: RunConfig) -> Path:
    """Where a run is kept."""
    return RunFolder(run).path


def verdict(claim: Claim, rows: Sequence[Row]) -> str:
    """A claim, whether it holds, and the figure that says so."""
    losses = {row.name: row.loss for row in rows}
    one, other = losses.get(claim.run), losses.get(claim.against)
    if one is None or other is None:
        return f"unknown: {claim.say} (a run is missing)"
    difference = one / other - 1
    figures = f"{claim.run} {one:.3f}, {claim.against} {other:.3f}: {difference:+.1%}"
    return f"{'holds' if claim.holds(difference) else 'does not hold'}: {claim.say} ({figures})"


# ---- processes


@dataclass
class _Child:
    name: str
    process: "subprocess.Popen[bytes]"
    tail: Tail
    errors: IO[bytes]


def run_all(study: Study, *, jobs: int | None = None, fresh: bool = False) -> dict[str, str]:
    """Run what is not finished; returns why runs failed, by name."""
    cores = len(os.sched_getaffinity(0))
    at_once = min(jobs or (1 if _on_gpu(study) else cores), len(study.runs))
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdigit() and int(asked) else max(1, cores // at_once)
    for run in study.runs.values():
        if fresh:
            RunFolder(run).clear()
        elif RunFolder(run).begun:
            _check_unchanged(run)
    for run in {(run.data, run.sync.workers): run for run in study.runs.values()}.values():
        with suppress(AtollError):  # the run itself will say it, and take no other down
            prepare(run)  # once, with a progress bar, before they all ask for it
    board = Board(list(study.runs))
    children = _Children(board, at_once, threads)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        children.run(study)
    except KeyboardInterrupt:
        board.close()
        print("stopped; what was saved is kept, and the same command goes on from there", flush=True)
        raise SystemExit(130) from None
    finally:
        signal.signal(signal.SIGTERM, before)
        board.close()
    return children.failed


def _check_unchanged(run: RunConfig) -> None:
    """Refuse a run that was begun with other settings before others are trained beside it."""
    try:
        RunFolder(run).as_begun(run)
    except ConfigError as problem:
        raise ConfigError(f"{problem}; --fresh trains the study anew, --out keeps both") from None


def _on_gpu(study: Study) -> bool:
    from atoll.train.recipe import device_of

    return any(device_of(run) != "cpu" for run in study.runs.values())


class _Children:
    """At most so many runs at a time, each with so many threads."""

    def __init__(self, board: Board, at_once: int, threads: int) -> None:
        self._board, self._at_once, self._threads = board, at_once, threads
        self._running: list[_Child] = []
        self.failed: dict[str, str] = {}

    def run(self, study: Study) -> None:
        """Run all to their ends, feeding the board."""
        waiting: deque[RunConfig] = deque()
        for run in study.runs.values():
            if (folder := RunFolder(run)).finished:
                self._board.recall(run.name, read_events(folder.path / METRICS))
            else:
                waiting.append(run)
        with tempfile.TemporaryDirectory(prefix="atoll-") as scratch:
            try:
                while waiting or self._running:
                    while waiting and len(self._running) < self._at_once:
                        self._running.append(self._start(waiting.popleft(), Path(scratch)))
                    time.sleep(POLL_S)
                    self._look()
            finally:
                self._stop()

    def _start(self, run: RunConfig, scratch: Path) -> _Child:
        if run.threads is None and not RunFolder(run).begun:  # a run goes on with the threads it has begun with
            run = run.changed(threads=self._threads)
        file = scratch / f"{run.name}.toml"
        file.write_text(run.changed(**{"log.view": "none"}).to_toml())
        errors = (scratch / f"{run.name}.err").open("w+b")
        command = [sys.executable, "-m", "atoll", "train", str(file), "--resume"]
        environment = os.environ | {"OMP_NUM_THREADS": str(run.threads or self._threads)}
        # In a session of its own: Ctrl-C reaches this process alone, which passes it on once; twice would not save.
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=environment, start_new_session=True
        )
        return _Child(run.name, process, Tail(folder_of(run) / METRICS), errors)

    def _look(self) -> None:
        """Pass on what has happened, and take leave of those that have ended."""
        for child in list(self._running):
            status = child.process.poll()
            try:
                for event in child.tail.new():
                    self._board.update(child.name, event)
            except DataError as fault:
                child.process.kill()
                status = child.process.wait()
                child.errors.write(str(fault).encode())
            if status is None:
                continue
            self._running.remove(child)
            child.errors.seek(0)
            if status:
                told = child.errors.read().decode(errors="replace").strip()
                self.failed[child.name] = told.removeprefix("error: ") or f"exit status {status}"
                self._board.fail(child.name, self.failed[child.name].splitlines()[-1])
            child.errors.close()

    def _stop(self) -> None:
        """Ask those that still run to save and stop, as Ctrl-C would."""
        for child in self._running:
            child.process.send_signal(signal.SIGINT)
        for child in self._running:
            try:
                child.process.wait(PATIENCE_S)
            except subprocess.TimeoutExpired:
                child.process.kill()
            child.errors.close()
