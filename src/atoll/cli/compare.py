"""Runs the runs of a study, each in a process of its own, and shows how they compare.

A run that fails takes no other down, and small models, which one core serves best, keep all cores busy. What is
finished is not run again; what was interrupted is resumed.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from atoll.cli.processes import ProcessExit, ProcessSpec, count_cores, supervise
from atoll.errors import AtollError, ConfigError, DataError, printable
from atoll.plan.link import parse_link
from atoll.report import load_all, rich_table, summary, write
from atoll.report.table import Row
from atoll.runs.events import Tail
from atoll.runs.events import read as read_events
from atoll.runs.layout import LOG, METRICS
from atoll.settings.config import RunConfig
from atoll.settings.study import Claim, Study, read
from atoll.train.folder import RunFolder
from atoll.train.model.sample import sample
from atoll.train.progress.view import Board
from atoll.train.run import prepare

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
    console.print(Text(printable(study.title), style="bold"))
    failed = run_all(study, jobs=jobs, fresh=fresh)
    folders = [folder_of(run) for name, run in study.runs.items() if name not in failed]
    if folders:
        rows = summary(load_all(folders), slow)
        console.print(rich_table(rows, slow))
        verdicts = [verdict(claim, rows) for claim in study.claims]
        for told in verdicts:
            console.print(Text(printable(told)), soft_wrap=True)
        place = folders[0].parent
        page, pictures = place / "report.html", place / "pictures"
        write(folders, page, link=slow, png=pictures, title=study.title, claims=verdicts)
        console.print(Text(f"report: {page}   pictures: {pictures}"), soft_wrap=True)
    for name, why in failed.items():
        print(f"error: run {name} failed: {printable(why)}", file=sys.stderr)
    return 1 if failed else 0


def demo(out: Path, steps: int | None = None, jobs: int | None = None) -> int:
    """The embedded study: four methods side by side on the Python standard library's source, and a generated sample."""
    overrides = [] if steps is None else [f"train.steps={steps}", f"train.warmup={steps // 10}"]
    status = compare([DEMO], overrides, jobs=jobs, out=out, fresh=True)
    if status == 0:
        console = Console()
        console.print(Text('\nwhat the model trained by Streaming DiLoCo in 4 bits writes after "def main(":\n'))
        (text,) = sample(out / "streaming", "def main(", tokens=200, temperature=0.7)
        console.print(Text(printable(text)), soft_wrap=True)
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


def run_all(study: Study, *, jobs: int | None = None, fresh: bool = False) -> dict[str, str]:
    """Run what is not finished; returns why runs failed, by name."""
    cores = count_cores()
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
    audience = _Audience(Board(list(study.runs)), study)
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, closing(audience.board):
        trainers = [_job(run, threads, Path(scratch)) for run in audience.unfinished()]
        outcome = supervise(trainers, audience=audience, at_once=at_once, together=False)
    if outcome.interrupted and (len(outcome.ended) < len(trainers) or any(one.status for one in outcome.ended)):
        print("stopped; what was saved is kept, and the same command goes on from there", flush=True)
        raise SystemExit(130)
    return audience.failed


def _check_unchanged(run: RunConfig) -> None:
    """Refuse a run that was begun with other settings before others are trained beside it."""
    try:
        RunFolder(run).as_begun(run)
    except ConfigError as problem:
        raise ConfigError(f"{problem}; --fresh trains the study anew, --out keeps both") from None


def _on_gpu(study: Study) -> bool:
    from atoll.train.step.recipe import device_of

    return any(device_of(run) != "cpu" for run in study.runs.values())


def _job(run: RunConfig, threads: int, scratch: Path) -> ProcessSpec:
    """Describe the process that trains a run."""
    folder = RunFolder(run)
    if run.threads is None and not folder.begun:  # a run goes on with the threads it has begun with
        run = run.changed(threads=threads)
    file = scratch / f"{run.name}.toml"
    file.write_text(run.changed(**{"log.view": "none"}).to_toml(), encoding="utf-8")
    return ProcessSpec(
        name=run.name,
        command=[sys.executable, "-m", "atoll", "train", str(file), "--resume"],
        environment=os.environ | {"OMP_NUM_THREADS": str(run.threads or threads)},
        log=folder.path / LOG,
    )


class _Audience:
    """Shows the events of all runs on a board, and keeps why runs failed."""

    def __init__(self, board: Board, study: Study) -> None:
        self.board = board
        self.failed: dict[str, str] = {}
        self._runs = study.runs
        self._tails: dict[str, Tail] = {}

    def unfinished(self) -> list[RunConfig]:
        """Choose the runs to train, and show the others as they ended."""
        for name, run in self._runs.items():
            metrics = RunFolder(run).path / METRICS
            if RunFolder(run).finished:
                self.board.recall(name, read_events(metrics))
            else:
                self._tails[name] = Tail(metrics)
        return [self._runs[name] for name in self._tails]

    def show(self, name: str, line: str) -> None:
        """A run is shown by its events; what it says is in its log."""

    def say(self, line: str) -> None:
        """Print a line of the supervisor's own."""
        print(line, flush=True)

    def look(self, name: str) -> None:
        """Pass on what has happened in a run."""
        if name in self.failed:
            return
        try:
            for event in self._tails[name].new():
                self.board.update(name, event)
        except DataError as fault:
            self._fail(name, str(fault))

    def end(self, ended: ProcessExit) -> None:
        """Take note of a run that has failed."""
        if ended.status and not ended.asked:
            said = ended.said.removeprefix("error: ") or f"exit status {ended.status}"
            self._fail(ended.job.name, f"{said}; all it said is in {ended.job.log}")

    def _fail(self, name: str, why: str) -> None:
        self.failed.setdefault(name, why)
        self.board.fail(name, why)
