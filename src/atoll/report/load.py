"""Reads the folders of runs."""

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from atoll._util.disk import lines_limited, open_plain, parse_json, read_limited
from atoll.errors import ConfigError, DataError
from atoll.report.record import EventLog, RunRecord, log_of, merge
from atoll.runs.events import MOST_LINE, Start, read
from atoll.runs.layout import ABOUT, METRICS, RUN, worker_folder, worker_of
from atoll.settings import toml as runfile

_MOST_ABOUT = 2**20  # bytes of about.json, which is read whole
_MOST_WORKERS = 4096  # as in a run file; more is a damaged file, and would take forever


def load(folder: Path) -> RunRecord:
    """Reads the folder of a run, or the folders of its workers inside it as one run.

    Raises:
        DataError: a file is missing or damaged, or the folders are of different runs.
    """
    folder = Path(folder)
    if not folder.is_dir():
        what = "is a file, not" if folder.exists() else "does not exist, or is not"
        raise DataError(f"{folder} {what} the folder of a run: give the folder that holds {METRICS}")
    homes = [folder] if (folder / METRICS).is_file() else worker_homes(folder) or [folder]
    for needed in (METRICS, RUN):
        if not (homes[0] / needed).is_file():
            raise DataError(f"{homes[0]} is not the folder of a run: it has no {needed}")
    found = {home: log for home in homes if (log := log_of(read(home / METRICS)))}
    if not found:
        raise DataError(f"{homes[0] / METRICS} has no start event: nothing has happened in this run yet")
    for home, log in found.items():
        try:
            check_start(log.start, worker_of(home))
        except DataError as error:
            raise DataError(f"{home / METRICS}: {error}") from error
    try:
        record = record_of(list(found.values()), folder.resolve().name)
    except DataError as error:
        raise DataError(f"{folder}: {error}") from error
    record = replace(record, folder=folder, config=run_table(homes[0] / RUN), about=_json(homes[0] / ABOUT))
    try:
        record.job()
    except ConfigError as error:
        raise DataError(f"{homes[0] / METRICS}: the start event cannot be that of a run: {error}") from error
    return record


def record_of(logs: Sequence[EventLog], name: str) -> RunRecord:
    """Returns the logs of a run's processes as one run, without its folder and settings.

    Args:
        logs: Of each process, in worker order.
        name: Its name if the events have none.

    Raises:
        DataError: the logs are of different runs.
    """
    whole = merge(logs)
    return RunRecord(
        name=plain_text(whole.start.name) or plain_text(name),
        folder=Path(),
        config={},
        about={},
        processes=tuple(logs),
        **{field.name: getattr(whole, field.name) for field in fields(EventLog)},
    )


def check_start(start: Start, folder_worker: int | None = None) -> None:
    """Refuses numbers of workers that no run has, and a worker in the folder of another.

    Raises:
        DataError: the event cannot be that of a run.
    """
    problem = ""
    if not 1 <= start.workers <= _MOST_WORKERS:
        problem = f"workers must be between 1 and {_MOST_WORKERS}, got {start.workers}"
    elif start.worker is not None and not 0 <= start.worker < start.workers:
        problem = f"worker must be between 0 and {start.workers - 1}, got {start.worker}"
    elif start.worker is not None and folder_worker not in (None, start.worker):
        problem = f"in {worker_folder(folder_worker)} it should be worker {folder_worker}, got {start.worker}"
    if problem:
        raise DataError(f"the start event cannot be that of a run: {problem}")


def load_all(folders: Sequence[Path]) -> list[RunRecord]:
    """Reads several runs, each folder once; runs of the same name are told apart by their folders.

    A folder that is no run but holds runs stands for those, in the order of their names.
    """
    if not folders:
        raise ConfigError("give the folder of at least one run, got none")
    unique = {run.resolve(): run for folder in folders for run in _runs_of(Path(folder))}
    records = {path: load(folder) for path, folder in unique.items()}
    named = []
    for path, record in records.items():
        twins = [p for p, r in records.items() if r.name == record.name and p != path]
        name = f"{record.name} ({plain_text(_told_apart(path, twins))})" if twins else record.name
        named.append(replace(record, name=name))
    return named


def _runs_of(folder: Path) -> list[Path]:
    """Returns the folder itself, unless it is no run and holds some."""
    if is_run(folder) or not folder.is_dir():
        return [folder]
    return sorted(child for child in folder.iterdir() if is_run(child)) or [folder]


def is_run(folder: Path) -> bool:
    """Returns whether a folder is that of a run, or holds folders of its workers."""
    return (folder / METRICS).is_file() or bool(worker_homes(folder))


def worker_homes(folder: Path) -> list[Path]:
    """Returns the folders of a run's workers, in worker order."""
    numbered = {worker: file for file in folder.glob(f"*/{METRICS}") if (worker := worker_of(file.parent)) is not None}
    return [numbered[worker].parent for worker in sorted(numbered) if _trains_one(numbered[worker])]


def _trains_one(file: Path) -> bool:
    """Whether a file of events begins as that of one worker: a run of all may have such a name, too."""
    try:
        with open_plain(file) as lines:
            first = parse_json(next(lines_limited(file, lines, MOST_LINE), b"{}"))
    except (OSError, ValueError):  # read() says what is damaged
        return True
    if not isinstance(first, dict) or first.get("event") != "start":
        return True
    return first.get("worker") is not None or (first.get("workers") == 1 and file.parent.name == worker_folder(0))


def _told_apart(path: Path, twins: Sequence[Path]) -> str:
    """Returns the shortest end of a path that no twin shares."""
    for length in range(1, len(path.parts)):
        tail = path.parts[-length:]
        if all(twin.parts[-length:] != tail for twin in twins):
            return "/".join(tail)
    return str(path)


def plain_text(text: str) -> str:
    """Returns text without characters that could break out of a line, a terminal or an encoding."""
    return "".join(c if c.isprintable() else "\ufffd" for c in text).strip()


def run_table(path: Path) -> dict[str, Any]:
    """Returns the table of a run.toml; DataError if it cannot be read."""
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
