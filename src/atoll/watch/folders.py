"""Reads the events of a run from folders on this machine while they grow."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from atoll.errors import ConfigError, DataError
from atoll.report.load import is_run, run_table, worker_homes
from atoll.runs.layout import METRICS, RUN, worker_of
from atoll.runs.tail import Tail
from atoll.watch.source import About, News

MOST_EVENTS: Final = 4000
"""Events of one process that a poll returns: some 20 ms of reading."""
_RESCAN = 4  # polls between two searches for new folders


class Folders:
    """Follows the folder of a run, or folders of its workers.

    Folders of workers that begin later are found when they are there.

    Raises:
        ConfigError: a folder does not exist, or is no run but holds some.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = [Path(folder) for folder in folders]
        for folder in self._folders:
            _check(folder)
        self._tails: dict[Path, Tail] = {}
        self._polls = 0
        self._unread = False  # whether a poll has left something
        self._settings: tuple[Path, float, Mapping[str, Any]] | None = None  # file, its time, its table

    def poll(self) -> list[News]:
        """Returns what is new, at most `MOST_EVENTS` of each process."""
        if self._polls % _RESCAN == 0:
            self._tails = {home: self._tails.get(home) or Tail(home / METRICS) for home in self._homes()}
        self._polls += 1
        found = [self._news(home, tail) for home, tail in self._tails.items()]
        self._unread = any(len(news.events) >= MOST_EVENTS for news in found)
        return found

    def _homes(self) -> list[Path]:
        """Returns the folders with a file of events, each once."""
        found: dict[Path, Path] = {}
        for folder in self._folders:
            for home in [folder] if (folder / METRICS).is_file() else worker_homes(folder):
                found.setdefault(home.resolve(), home)
        return [*found.values(), *(home for home in self._tails if home not in found.values())]

    def _news(self, home: Path, tail: Tail) -> News:
        heard = 0.0
        with suppress(OSError):
            heard = (home / METRICS).stat().st_mtime
        try:
            return News(process=str(home), events=tail.new(MOST_EVENTS), heard=heard)
        except DataError as error:
            return News(process=str(home), heard=heard, trouble=f"{error}; what follows is not shown")

    @property
    def share(self) -> float:
        """The share of the bytes that are there, 0 to 1, that `poll` has returned."""
        if not self._unread:
            return 1.0
        size = 0
        for home in self._tails:
            with suppress(OSError):
                size += (home / METRICS).stat().st_size
        return min(sum(tail.offset for tail in self._tails.values()) / max(size, 1), 0.999)

    def about(self) -> About:
        """Returns the name of the folder, and the settings of the first worker's run file."""
        name = self._folders[0].resolve()
        return About(name=name.parent.name if worker_of(name) is not None else name.name, settings=self._table())

    def _table(self) -> Mapping[str, Any]:
        """Returns the table of the run file, which is read again when it has changed."""
        file = next((home / RUN for home in self._tails if (home / RUN).is_file()), None)
        if file is None:
            return {}
        with suppress(OSError, DataError):  # the run goes on without
            changed = file.stat().st_mtime
            if self._settings is None or self._settings[:2] != (file, changed):
                self._settings = (file, changed, {})
                self._settings = (file, changed, run_table(file))
        return self._settings[2] if self._settings else {}

    def close(self) -> None:
        """Does nothing: files are open only while they are read."""


def _check(folder: Path) -> None:
    problem = ""
    if not folder.is_dir():
        problem = "is a file" if folder.exists() else "does not exist"
        problem = f"{problem}: give the folder of a run, such as runs/run"
    elif not is_run(folder) and (runs := sorted(child.name for child in folder.iterdir() if is_run(child))):
        more = " or another of them" if len(runs) > 1 else ""
        problem = f"is no run, but holds {len(runs)}: give {folder / runs[0]}{more}"
    if problem:
        raise ConfigError(f"{folder}: {problem}", setting="run", value=str(folder))
