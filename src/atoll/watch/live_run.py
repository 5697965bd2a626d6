"""Holds a watched run: the logs of its processes, and when each was last heard."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from atoll.core.schedule import Schedule
from atoll.errors import ConfigError, DataError
from atoll.report.load import check_start, record_of
from atoll.report.record import EventLog, RunRecord, merge
from atoll.runs.events import End, Failed, Joined, Lost, Members, Resumed, Start, Step
from atoll.watch.process import ProcessLog
from atoll.watch.source import About, News, Source

QUIET_S: Final = 30.0
"""Seconds after which a process that writes nothing counts as silent, if it does not write more seldom anyway."""
_TURNS = (Start, Members, Lost, Joined, Resumed, End, Failed)
_MOST_SENT = 64  # rounds on their way that are named
_LOG_EVERY = 10  # inner steps between two step events, by default
_TIMES = 10  # intervals between its step events after which it counts as silent


class LiveRun:
    """Takes the news of a run's processes, and answers questions about all of them as one run."""

    def __init__(self, about: About) -> None:
        self.about = about
        self.processes: dict[str, ProcessLog] = {}
        self.heard: dict[str, float] = {}
        """Process -> Unix time at which it was last known to be alive."""
        self.began = 0.0
        """The Unix time at which its first worker began; 0 if that is not known."""
        self.taken = 0
        """Events so far."""
        self.has_turned = False
        """Whether others may train than when this was last set to False."""
        self.stepped: dict[str, float] = {}
        """Process -> Unix time at which it was heard with its newest step."""
        self.trouble = ""
        """Why none of them can be followed at the moment; empty if they can."""
        self._troubles: dict[str, str] = {}  # process -> why its events cannot be read any further
        self._clock = 0, np.zeros((2, 1))  # events taken, and then the steps and times known
        self._foreign: dict[str, str] = {}  # process -> why it is not of this run

    def take(self, news: Iterable[News]) -> None:
        """Adds what is new."""
        for told in news:
            self.heard[told.process] = told.heard
            self._troubles[told.process] = told.trouble
            self.taken += len(told.events)
            self.has_turned |= any(isinstance(event, _TURNS) for event in told.events)
            process = self.processes.get(told.process)
            for event in told.events:
                if isinstance(event, Start):
                    process = self._begin(told.process, event)
                elif process is not None:
                    process.take(event)
            if any(isinstance(event, Start | Step) for event in told.events):
                self.stepped[told.process] = told.heard

    def _begin(self, name: str, start: Start) -> ProcessLog | None:
        """Begins a process anew, if it is of this run."""
        self.processes.pop(name, None)
        self._foreign.pop(name, None)
        try:
            check_start(start)
            merge([*(process.log() for process in self.processes.values()), EventLog(start=start)])
            begun = ProcessLog(start)
            for other, process in self.processes.items():
                if twice := sorted(begun.tracks.keys() & process.tracks.keys()):
                    raise DataError(f"worker {twice[0]} is shown as {other} already")
        except DataError as error:
            self._foreign[name] = f"{name}: {error}"
            return None
        self.processes[name] = begun
        self.began = min((process.began for process in self.processes.values() if process.began), default=0.0)
        return self.processes[name]

    @property
    def troubles(self) -> list[str]:
        """Why events of some processes are not shown."""
        return [words for words in (self.trouble, *self._troubles.values(), *self._foreign.values()) if words]

    # ---------------------------------------------------------------------- all processes as one run

    def logs(self) -> list[ProcessLog]:
        """Returns the processes in worker order."""
        return sorted(self.processes.values(), key=lambda process: min(process.tracks))

    def record(self) -> RunRecord | None:
        """Returns the run as the report has it, without most of its steps and rounds; None before it begins."""
        logs = [process.log() for process in self.logs()]
        if not logs:
            return None
        return replace(record_of(logs, self.about.name), config=dict(self.about.settings))

    def since(self, process: ProcessLog, time: float) -> float:
        """Returns a time of a process as seconds since the run began."""
        return time - (self.began if process.began else 0.0)

    @property
    def newest_s(self) -> float:
        """The time of the newest event, in seconds since the run began."""
        return max((self.since(process, process.newest) for process in self.processes.values()), default=0.0)

    @property
    def step(self) -> int:
        """The newest step of any process."""
        return max((process.last.step for process in self.processes.values() if process.last), default=0)

    def is_silent(self, name: str, now: float) -> bool:
        """Returns whether a process that has not ended in order has failed, or was not heard for long."""
        process = self.processes[name]
        is_late = now - self.heard[name] > self.patience_s(name)
        return process.end is None and (bool(process.failure) or is_late)

    def heard_of(self, now: float) -> list[ProcessLog]:
        """Returns the processes that are not silent."""
        return [process for name, process in self.processes.items() if not self.is_silent(name, now)]

    def patience_s(self, name: str) -> float:
        """Returns the seconds without an event after which something is wrong with a process."""
        process = self.processes[name]
        if process.recent and not process.interval_s:  # one step event, and the next may come many steps later
            return max(QUIET_S, _TIMES * self._log_every * process.recent[0][1].step_s)
        return max(QUIET_S, _TIMES * process.interval_s)

    @property
    def _log_every(self) -> int:
        """Inner steps between two step events; those of the default, if the settings are not known."""
        train = self.about.settings.get("train")
        every = train.get("log_every", _LOG_EVERY) if isinstance(train, Mapping) else _LOG_EVERY
        return every if isinstance(every, int) else _LOG_EVERY

    def time_of_step(self, steps: Iterable[float]) -> list[float]:
        """Returns when the run was at these steps, in seconds since it began."""
        taken, known = self._clock
        if taken != self.taken:
            points = [(step, self.since(p, at)) for p in self.processes.values() for step, at in p.clock.items()]
            first = dict(sorted([(0.0, 0.0), *points], reverse=True))  # of the first worker to get there
            known = np.array(list(first.items()), dtype=np.float64)[::-1].T
            known = np.stack([known[0], np.maximum.accumulate(known[1])])
            self._clock = self.taken, known
        times: list[float] = np.interp([*steps], known[0], known[1]).tolist()
        return times

    def left_s(self, now: float) -> float | None:
        """Returns the seconds from its newest event to its end, at the pace of those who train; None if unknown."""
        found = []
        for process in self.heard_of(now):
            pace = process.rate(lambda step: step.step)
            if pace and process.end is None and process.last is not None:
                found.append((process.start.steps - process.last.step) / pace)
        left_s = max(found, default=math.nan)
        return max(left_s, 0.0) if math.isfinite(left_s) else None


def read_run(source: Source) -> LiveRun:
    """Returns a run with all that a source has now."""
    run = LiveRun(source.about())
    run.take(source.poll())
    while source.share < 1:
        run.take(source.poll())
    run.about = source.about()
    return run


def schedule_of(start: Start, worker: int) -> Schedule | None:
    """Returns when a worker sends and applies its rounds; None if it exchanges none, or the numbers are damaged."""
    if start.method in ("none", "data-parallel") or not start.payload_bytes or worker >= len(start.delay):
        return None
    try:
        return Schedule(start.period, len(start.payload_bytes), start.delay[worker])
    except ConfigError:
        return None


def sent_rounds(process: ProcessLog) -> list[tuple[int, int]]:
    """Returns (step, fragment) of rounds that were sent and not applied yet, as far as its newest step tells."""
    worker = min(process.tracks)  # workers of one process tell of rounds together
    schedule, last = schedule_of(process.start, worker), process.last
    if schedule is None or last is None or process.end is not None:
        return []
    found = []
    for fragment in range(min(schedule.fragments, _MOST_SENT)):
        since = max(process.tracks[worker].applied.get(fragment, 0), last.step - 2 * schedule.period)
        found += [(step, fragment) for step in schedule.sends(fragment, since, last.step)]
    return sorted(found)[-_MOST_SENT:]
