"""Folders of runs as values: what a run was, and what happened in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from atoll._util.disk import lines_limited, open_plain, parse_json, read_limited
from atoll.errors import ConfigError, DataError
from atoll.plan.job import Job
from atoll.report.parts import Part, merge, part_of
from atoll.runs.events import MOST_LINE, End, Eval, Fault, Resumed, Round, Start, Step, read, utilisation
from atoll.runs.layout import ABOUT, METRICS, RUN, worker_folder
from atoll.settings import toml as runfile

_MOST_ABOUT = 2**20  # bytes of about.json, which is read whole
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
    parts: tuple[Part, ...]
    """What each process wrote, by its own clock: the above is of all together."""

    @property
    def here(self) -> tuple[int, ...]:
        """The workers of which something is known: not those whose folders are on other machines."""
        return tuple(sorted({worker for part in self.parts for worker in part.workers}))

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
        return self._of_a_worker("bytes_sent")

    @property
    def on_wire(self) -> bool:
        """Whether its rounds travelled between processes, so that what they took is worth a number."""
        return self.last is not None and any(self.last.wire_sent + self.last.wire_received)

    @property
    def wire_sent(self) -> float:
        """Bytes that a worker put on the wire, headers included, mean over the workers."""
        return self._of_a_worker("wire_sent")

    @property
    def wire_received(self) -> float:
        """Bytes that a worker took from the wire, mean over the workers."""
        return self._of_a_worker("wire_received")

    @property
    def wait_s(self) -> float:
        """For how long a worker did nothing but wait for rounds, seconds, mean over the workers."""
        return self._of_a_worker("wait_s")

    @property
    def hidden_s(self) -> float:
        """For how long rounds travelled while a worker trained, seconds, summed over rounds, mean over the workers."""
        return self._of_a_worker("hidden_s")

    @property
    def utilisation(self) -> float | None:
        """The share of its time that a worker did not wait for rounds, mean over the workers; None: nothing is known.

        Each by its own clock.
        """
        lasts = [(part.last, worker) for part in self.parts if part.last for worker in part.workers]
        shares = [utilisation(last.wait_s[worker], last.seconds) for last, worker in lasts if worker < len(last.wait_s)]
        known = [share for share in shares if share is not None]
        return sum(known) / len(known) if known else None

    def _of_a_worker(self, name: str) -> float:
        """A total, mean over the workers of which it is known."""
        values: list[float] = getattr(self.last, name) if self.last else []
        known = [values[worker] for worker in self.here if worker < len(values)]
        return sum(known) / len(known) if known else 0.0

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
    """Read the folder of a run; a DataError says what is missing or damaged.

    Where each worker had a process of its own, it holds a folder for each; those that are there are read as one run.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not" if folder.exists() else "does not exist, or is not"
        raise DataError(f"{folder} {what} the folder of a run: give the folder that holds {METRICS}")
    homes = [folder] if (folder / METRICS).is_file() else _worker_folders(folder) or [folder]
    for needed in (METRICS, RUN):
        if not (homes[0] / needed).is_file():
            raise DataError(f"{homes[0]} is not the folder of a run: it has no {needed}")
    found = {home: part for home in homes if (part := part_of(read(home / METRICS)))}
    if not found:
        raise DataError(f"{homes[0] / METRICS} has no start event: nothing has happened in this run yet")
    for home, part in found.items():
        _check(part.start, home)
    parts = tuple(found.values())
    try:
        whole = merge(parts)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    record = RunRecord(
        name=printable(whole.start.name) or printable(folder.resolve().name),
        folder=folder,
        config=_toml(homes[0] / RUN),
        about=_json(homes[0] / ABOUT),
        start=whole.start,
        steps=whole.steps,
        rounds=whole.rounds,
        evals=whole.evals,
        faults=whole.faults,
        resumes=whole.resumes,
        end=whole.end,
        parts=parts,
    )
    try:
        record.job()
    except ConfigError as error:
        raise DataError(f"{homes[0] / METRICS}: the start event cannot be that of a run: {error}") from error
    return record


def _check(start: Start, home: Path) -> None:
    """Refuse numbers of workers that no run has, and a worker in the folder of another."""
    problem = ""
    if start.workers > _MOST_WORKERS:
        problem = f"workers must be at most {_MOST_WORKERS}, got {start.workers}"
    elif start.worker is not None and not 0 <= start.worker < start.workers:
        problem = f"worker must be between 0 and {start.workers - 1}, got {start.worker}"
    elif start.worker is not None and _number(home) not in (None, start.worker):
        problem = f"in {home.name} it should be worker {_number(home)}, got {start.worker}"
    if problem:
        raise DataError(f"{home / METRICS}: the start event cannot be that of a run: {problem}")


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
    if _is_run(folder) or not folder.is_dir():
        return [folder]
    return sorted(child for child in folder.iterdir() if _is_run(child)) or [folder]


def _is_run(folder: Path) -> bool:
    return (folder / METRICS).is_file() or bool(_worker_folders(folder))


def _worker_folders(folder: Path) -> list[Path]:
    """Where the workers of one run are, one process each, in worker order."""
    numbered = {number: file for file in folder.glob(f"*/{METRICS}") if (number := _number(file.parent)) is not None}
    return [numbered[number].parent for number in sorted(numbered) if _trains_one(numbered[number])]


def _number(folder: Path) -> int | None:
    """The worker whose folder it is, by its name; None: not that of a worker."""
    digits = folder.name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() and folder.name == worker_folder(int(digits[:9])) else None


def _trains_one(file: Path) -> bool:
    """Whether a file of events begins as that of one worker: a run of all may have such a name, too."""
    try:
        with open_plain(file) as lines:
            first = parse_json(next(lines_limited(file, lines, MOST_LINE), b"{}"))
    except (OSError, ValueError):  # damage; read() has the words for it
        return True
    if not isinstance(first, dict) or first.get("event") != "start":
        return True
    return first.get("worker") is not None or (first.get("workers") == 1 and file.parent.name == worker_folder(0))


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
        return runfile.parse_toml(runfile.read(path), str(path))
    except ConfigError as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        value = parse_json(read_limited(path, _MOST_ABOUT))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} cannot be read: it should hold one JSON object")
    return value
