"""Folders of runs as values: what a run was, and what happened in it."""

import json
import math
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll.errors import ConfigError, DataError
from atoll.events import End, Eval, Fault, Resumed, Round, Start, Step, read
from atoll.layout import ABOUT, METRICS, RUN
from atoll.plan.cost import Job

_MOST_WORKERS = 4096  # as in a run file; more is a damaged file, and would take forever


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One run, finished or not."""

    name: str
    """For people; `load_all` makes it unique."""
    folder: Path
    config: dict[str, Any]
    """run.toml."""
    about: dict[str, Any]
    """about.json: versions, device, seed, when it was started."""
    start: Start
    steps: tuple[Step, ...]
    rounds: tuple[Round, ...]
    evals: tuple[Eval, ...]
    faults: tuple[Fault, ...]
    resumes: tuple[Resumed, ...]
    end: End | None
    """None while it runs, or if it was killed."""

    @property
    def finished(self) -> bool:
        """Whether it came to its planned end."""
        return self.end is not None and self.end.outcome == "finished"

    @property
    def last(self) -> End | Step | None:
        """The newest totals."""
        return self.end or (self.steps[-1] if self.steps else None)

    @property
    def step(self) -> int:
        """Inner steps made."""
        return self.last.step if self.last else 0

    @property
    def tokens(self) -> int:
        """Tokens that all workers together have trained on."""
        return self.last.tokens if self.last else 0

    @property
    def loss(self) -> float | None:
        """The last held-out loss, nats per token; None if there is none, or it is not finite."""
        losses = [e.loss for e in self.evals] + ([self.end.loss] if self.end else [])
        return losses[-1] if losses and math.isfinite(losses[-1]) else None

    @property
    def sent_bytes(self) -> float:
        """Payload bytes that a worker handed to its link, mean over the workers."""
        return sum(self.last.bytes_sent) / max(len(self.last.bytes_sent), 1) if self.last else 0.0

    @property
    def tokens_per_s(self) -> float | None:
        """Of all workers together, over the whole run, as measured where it ran."""
        return self.tokens / self.last.seconds if self.last and self.last.seconds > 0 else None

    @property
    def step_s(self) -> float:
        """Mean seconds of compute of one inner step of one worker."""
        if self.end and math.isfinite(self.end.step_s):
            return self.end.step_s
        total = made = 0.0
        before = 0
        for event in self.steps:
            if math.isfinite(event.step_s):
                total += event.step_s * (event.step - before)
                made += event.step - before
            before = event.step
        return total / made if made else 0.0

    @property
    def missed(self) -> int:
        """Payloads that were due in a round and did not arrive."""
        return sum(max(r.expected - len(r.members), 0) for r in self.rounds)

    @property
    def gradients(self) -> bool:
        """Whether it exchanged gradients on every step: data-parallel."""
        return self.start.method == "data-parallel"

    def job(self) -> Job:
        """What it would do on machines of its own, as far as it got."""
        silent = self.start.method == "none" or self.start.workers == 1
        delays = set(self.start.delay)
        return Job(
            steps=self.step,
            step_s=self.step_s,
            period=max(self.start.period, 1),
            payload_bytes=() if silent else tuple(self.start.payload_bytes),
            delay=0 if self.gradients or not delays else delays.pop() if len(delays) == 1 else tuple(self.start.delay),
            workers=self.start.workers,
            gradients=self.gradients,
            finish=self.finished,
        )


def load(folder: Path) -> RunRecord:
    """Read the folder of a run; a DataError says what is missing or damaged."""
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not" if folder.exists() else "does not exist, or is not"
        raise DataError(f"{folder} {what} the folder of a run: give the folder that holds {METRICS}")
    for needed in (METRICS, RUN):
        if not (folder / needed).is_file():
            raise DataError(f"{folder} is not the folder of a run: it has no {needed}")
    events = read(folder / METRICS)
    starts = [e for e in events if isinstance(e, Start)]
    if not starts:
        raise DataError(f"{folder / METRICS} has no start event: nothing has happened in this run yet")
    newest = next((e for e in reversed(events) if isinstance(e, Step | End)), None)
    record = RunRecord(
        name=printable(starts[-1].name) or printable(folder.resolve().name),
        folder=folder,
        config=_toml(folder / RUN),
        about=_json(folder / ABOUT),
        start=starts[-1],
        steps=tuple(e for e in events if isinstance(e, Step)),
        rounds=tuple(e for e in events if isinstance(e, Round)),
        evals=tuple(e for e in events if isinstance(e, Eval)),
        faults=tuple(e for e in events if isinstance(e, Fault)),
        resumes=tuple(e for e in events if isinstance(e, Resumed)),
        end=newest if isinstance(newest, End) else None,  # an interrupted run may have gone on
    )
    if record.start.workers > _MOST_WORKERS:
        raise DataError(
            f"{folder / METRICS}: the start event cannot be that of a run: "
            f"workers must be at most {_MOST_WORKERS}, got {record.start.workers}"
        )
    try:
        record.job()
    except ConfigError as error:
        raise DataError(f"{folder / METRICS}: the start event cannot be that of a run: {error}") from error
    return record


def load_all(folders: Sequence[Path]) -> list[RunRecord]:
    """Read several runs; those of the same name are told apart by their folders, and a folder counts once.

    A folder that is no run but holds runs stands for those, in the order of their names.
    """
    unique = {run.resolve(): run for folder in folders for run in _runs_of(Path(folder))}
    records = [load(folder) for folder in unique.values()]
    paths = list(unique)
    named = []
    for record, path in zip(records, paths, strict=True):
        twins = [p for r, p in zip(records, paths, strict=True) if r.name == record.name and p != path]
        name = f"{record.name} ({printable(_told_apart(path, twins))})" if twins else record.name
        named.append(replace(record, name=name))
    return named


def jobs(records: Sequence[RunRecord]) -> list[Job]:
    """What each would do on machines of its own, with one compute time per inner step for all that compute the same.

    Runs of the same model size, tokens per step, device and threads differ in the load of the machine alone: they
    share the smallest mean that was measured among them.
    """
    quickest: dict[tuple[int, int, str, int], float] = {}
    for record in records:
        if record.step_s > 0:
            kind = _computes(record)
            quickest[kind] = min(record.step_s, quickest.get(kind, math.inf))
    return [replace(record.job(), step_s=quickest.get(_computes(record), 0.0)) for record in records]


def _computes(record: RunRecord) -> tuple[int, int, str, int]:
    start = record.start
    return start.parameters, start.tokens_per_step, start.device, start.threads


def _runs_of(folder: Path) -> list[Path]:
    """The folder itself, unless it is no run and holds some."""
    if (folder / METRICS).is_file():
        return [folder]
    return sorted(file.parent for file in folder.glob(f"*/{METRICS}") if file.is_file()) or [folder]


def _told_apart(path: Path, twins: Sequence[Path]) -> str:
    """The shortest end of a path that no twin shares."""
    for length in range(1, len(path.parts)):
        tail = path.parts[-length:]
        if all(twin.parts[-length:] != tail for twin in twins):
            return "/".join(tail)
    return str(path)


def printable(text: str) -> str:
    """Without what could break out of a line, a terminal or an encoding."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text).strip()


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:  # bad UTF-8 and bad TOML are ValueErrors
        raise DataError(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} cannot be read: it should hold one JSON object")
    return value
