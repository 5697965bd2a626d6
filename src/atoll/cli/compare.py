"""Trains the runs of a study, each in its own process, and compares them.

A run that fails ends no other, and small models, which one core serves best, keep all cores busy. Finished runs are not
repeated; interrupted ones are resumed.
"""

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

from rich.console import Console
from rich.text import Text

from atoll.cli.processes import ProcessExit, ProcessObserver, ProcessSpec, count_cores, supervise
from atoll.errors import AtollError, ConfigError, DataError, printable
from atoll.plan.line import parse_line
from atoll.report import load_all, rich_table, summary
from atoll.report.table import Row
from atoll.report.tasks import comparison_table
from atoll.runs.events import read as read_events
from atoll.runs.layout import LOG, METRICS, MODEL
from atoll.runs.tail import Tail
from atoll.settings.config import RunConfig
from atoll.settings.study import Claim, Study, read, shipped, titles
from atoll.train.folder import RunFolder
from atoll.train.model.hub import is_missing
from atoll.train.model.sample import sample
from atoll.train.progress.view import Board
from atoll.train.run import prepare
from atoll.watch.report_page import write

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
    """Trains every run of these study and run files, and prints a table, the claims and where the report is.

    Args:
        files: Names of studies that come with atoll, study files and run files; none lists the names.
        overrides: Settings of the form KEY=VALUE.
        jobs: Runs at the same time; None chooses by cores.
        out: Folder of the runs and the report; None takes the files'.
        fresh: Whether to train finished runs again.
        link: Link for which times are computed.

    Returns:
        The exit status: 0, or 1 if a run failed.
    """
    if not files:
        known = titles()
        width = max(map(len, known))
        print("\n".join(f"atoll compare {name:{width}} {title}" for name, title in known.items()))
        return 0
    study = read(files, overrides, out)
    slow = parse_line(link)
    console = Console()
    console.print(Text(printable(study.title), style="bold"))
    failed = run_all(study, jobs=jobs, fresh=fresh)
    folders = [RunFolder(run).path for name, run in study.runs.items() if name not in failed]
    if folders:
        rows = summary(load_all(folders), slow)
        console.print(rich_table(rows, slow))
        if (tasks := comparison_table([row.record for row in rows])) is not None:
            console.print(tasks)
        verdicts = [*steps_note(files, study), *(verdict(claim, rows) for claim in study.claims)]
        for line in verdicts:
            console.print(Text(printable(line)), soft_wrap=True)
        place = folders[0].parent
        page, pictures = place / "report.html", place / "pictures"
        write(folders, page, link=slow, png=pictures, title=study.title, claims=verdicts)
        console.print(Text(f"report: {page}   pictures: {pictures}"), soft_wrap=True)
    for name, why in failed.items():
        print(f"error: run {name} failed: {printable(why)}", file=sys.stderr)
    return 1 if failed else 0


def demo(out: Path, steps: int | None = None, jobs: int | None = None) -> int:
    """Trains four methods side by side on the Python standard library's source, and prints a sample."""
    overrides = [] if steps is None else [f"train.steps={steps}", f"train.warmup={steps // 10}"]
    status = compare([DEMO], overrides, jobs=jobs, out=out, fresh=True)
    if status == 0:
        console = Console()
        console.print(Text('\nwhat the model trained by Streaming DiLoCo in 4 bits writes after "def main(":\n'))
        (text,) = sample(out / "streaming", "def main(", tokens=200, temperature=0.7)
        console.print(Text(printable(text)), soft_wrap=True)
    return status


def verdict(claim: Claim, rows: Sequence[Row]) -> str:
    """Says whether a claim holds, and by which numbers."""
    losses = {row.name: row.loss for row in rows}
    one, other = losses.get(claim.run), losses.get(claim.against)
    if one is None or other is None:
        return f"unknown: {claim.say} (a run is missing)"
    difference = one / other - 1
    figures = f"{claim.run} {one:.3f}, {claim.against} {other:.3f}: {difference:+.1%}"
    return f"{'holds' if claim.holds(difference) else 'does not hold'}: {claim.say} ({figures})"


def steps_note(files: Sequence[Path], study: Study) -> list[str]:
    """Says for how many steps the claims are meant if the runs have others than their files."""
    try:
        written = read(files).runs
    except ConfigError:  # files that only the overrides make complete
        return []
    named = {name for claim in study.claims for name in (claim.run, claim.against)} & written.keys()
    meant = {written[name].train.steps for name in named}
    if all(written[name].train.steps == study.runs[name].train.steps for name in named):
        return []
    steps = ", ".join(map(str, sorted(count for count in meant if count is not None)))
    return [f"the claims are meant for the file's {steps or 'own'} steps, which were changed:"]


# ---------------------------------------------------------------------- processes


def run_all(study: Study, *, jobs: int | None = None, fresh: bool = False) -> dict[str, str]:
    """Trains the runs that are not finished; returns why runs failed, by name."""
    check_starts(study, fresh=fresh)
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
        with suppress(AtollError):  # the run reports it itself, and ends no other
            prepare(run)  # once, with a progress bar, before all runs need it
    observer = _StudyObserver(Board(list(study.runs)), study)
    with tempfile.TemporaryDirectory(prefix="atoll-") as scratch, closing(observer.board):
        trainers = [_job(run, threads, Path(scratch)) for run in observer.unfinished()]
        outcome = supervise(trainers, audience=observer, at_once=at_once, together=False)
    if outcome.interrupted and (len(outcome.ended) < len(trainers) or any(one.status for one in outcome.ended)):
        print("stopped; what was saved is kept, and the same command goes on from there", flush=True)
        raise SystemExit(130)
    return observer.failed


def check_starts(study: Study, *, fresh: bool = False) -> None:
    """Refuses a study with a run to train that begins from a folder that is not there.

    Args:
        study: The study; a run may begin from the model of another one.
        fresh: Whether finished runs are trained again.
    """
    made = {RunFolder(run).path / MODEL for run in study.runs.values()}
    for run in study.runs.values():
        where = run.model.hf
        if where is None or Path(where) in made or not is_missing(where) or (RunFolder(run).finished and not fresh):
            continue
        makers = (name for name in shipped() for one in read([Path(name)]).runs.values() if _model_of(one) == where)
        maker = next(makers, None)
        advice = f"train it first: atoll compare {maker}" if maker else "train or copy it first"
        problem = f"run {run.name}: model.hf: there is no folder {where!r}"
        raise ConfigError(f"{problem}; {advice}", setting="model.hf", value=where)


def _model_of(run: RunConfig) -> str:
    return f"{run.out}/{run.name}/{MODEL}"


def _check_unchanged(run: RunConfig) -> None:
    """Refuses a run that began with other settings, before any run is trained."""
    try:
        RunFolder(run).as_begun(run)
    except ConfigError as problem:
        advice = "--fresh trains the study again, --out keeps both"
        raise ConfigError(f"{problem}; {advice}", setting=problem.setting, value=problem.value) from None


def _on_gpu(study: Study) -> bool:
    from atoll.train.step.recipe import device_of

    return any(device_of(run) != "cpu" for run in study.runs.values())


def _job(run: RunConfig, threads: int, scratch: Path) -> ProcessSpec:
    """Describes the process that trains a run."""
    folder = RunFolder(run)
    if run.threads is None and not folder.begun:  # a resumed run keeps its threads
        run = run.changed(threads=threads)
    file = scratch / f"{run.name}.toml"
    file.write_text(run.changed(**{"log.view": "none"}).to_toml(), encoding="utf-8")
    return ProcessSpec(
        name=run.name,
        command=[sys.executable, "-m", "atoll", "train", str(file), "--resume"],
        environment=os.environ | {"OMP_NUM_THREADS": str(run.threads or threads)},
        log=folder.path / LOG,
    )


class _StudyObserver(ProcessObserver):
    """Shows the events of all runs on a board, and records why runs failed; their output stays in their logs."""

    def __init__(self, board: Board, study: Study) -> None:
        self.board = board
        self.failed: dict[str, str] = {}
        self._runs = study.runs
        self._tails: dict[str, Tail] = {}

    def unfinished(self) -> list[RunConfig]:
        """Returns the runs to train, and shows the finished ones."""
        for name, run in self._runs.items():
            metrics = RunFolder(run).path / METRICS
            if RunFolder(run).finished:
                self.board.recall(name, read_events(metrics))
            else:
                self._tails[name] = Tail(metrics)
        return [self._runs[name] for name in self._tails]

    def look(self, name: str) -> None:
        """Shows the new events of a run."""
        if name in self.failed:
            return
        try:
            for event in self._tails[name].new():
                self.board.update(name, event)
        except DataError as fault:
            self._fail(name, str(fault))

    def end(self, ended: ProcessExit) -> None:
        """Records a run that has failed."""
        if ended.status and not ended.asked:
            said = ended.said.removeprefix("error: ") or f"exit status {ended.status}"
            self._fail(ended.job.name, f"{said}; its output is in {ended.job.log}")

    def _fail(self, name: str, why: str) -> None:
        self.failed.setdefault(name, why)
        self.board.fail(name, why)
