"""Watched runs made up for tests: their events, and the sections of the page."""

from collections.abc import Sequence
from dataclasses import replace

from atoll.runs.events import Event, Fault, Joined, Lost, Members, Resumed, RoundApplied
from atoll.watch.compose import compose
from atoll.watch.live_run import LiveRun
from atoll.watch.sections import Sections
from atoll.watch.source import About, News
from made_up_runs import BEGAN, MadeUpRun

ELASTIC = MadeUpRun(name="elastic", steps=200, delay=10, travel_s=1.2)
SETTINGS = {"name": "elastic", "sync": {"workers": 3, "period": 20}, "link": {"min_workers": 2, "emulate": "0.7Mbit/s"}}


def elastic_events(run: MadeUpRun = ELASTIC) -> list[list[Event]]:
    """Of a run whose worker 2 is killed after step 80 and trains again after step 120."""
    logs = run.events()
    for worker, log in enumerate(logs):
        seconds = {getattr(e, "step", 0): getattr(e, "seconds", 0.0) for e in log if hasattr(e, "seconds")}

        def view(
            number: int, members: list[int], following: list[int], boundary: int, seconds: dict[int, float] = seconds
        ) -> Members:
            at = seconds.get(boundary, 0.0)
            return Members(
                step=boundary, view=number, members=members, following=following, boundary=boundary, seconds=at
            )

        _insert(log, [view(1, [0, 1, 2], [], 0)])
        if worker == 2:
            away_s = seconds[120] - seconds[80]  # for which its clock stands still
            log[:] = [e for e in log if not 80 < getattr(e, "step", 0) <= 120]
            log[:] = [_earlier(e, away_s) if getattr(e, "step", 0) > 120 else e for e in log]
            _insert(log, [Resumed(step=80, seconds=seconds[80], began=BEGAN + 0.5 + seconds[120])])
        else:
            _insert(log, [Lost(step=80, worker=2, why="closed its connection"), view(2, [0, 1], [], 80)])
            _insert(log, [view(3, [0, 1], [2], 110)])
        joined = view(4, [0, 1, 2], [], 120)
        _insert(log, [_earlier(joined, away_s) if worker == 2 else joined, Joined(step=120, worker=2, at=120)])
    _insert(logs[1], [Fault(step=60, worker=1, what="left out of 1 round: its delta was far larger than expected")])
    for log in logs:
        log[:] = [_without(e, 2) if isinstance(e, RoundApplied) and 80 < e.step <= 120 else e for e in log]
    return logs


def _earlier(event: Event, by_s: float) -> Event:
    times = {name: getattr(event, name) - by_s for name in ("seconds", "opened_s", "done_s") if hasattr(event, name)}
    return replace(event, **times)


def _without(r: RoundApplied, worker: int) -> RoundApplied:
    return replace(r, members=[member for member in r.members if member != worker])


def _insert(log: list[Event], events: Sequence[Event]) -> None:
    """Puts events where their step is."""
    step = getattr(events[0], "step", 0)
    at = next((n for n, e in enumerate(log) if getattr(e, "step", 0) > step), len(log))
    log[at:at] = events


def live_run(logs: Sequence[Sequence[Event]], heard: float = BEGAN + 60.0) -> LiveRun:
    """A run whose processes have told these events."""
    run = LiveRun(About(name="far", settings=SETTINGS))
    run.take([News(process=f"worker-{n}", events=log, heard=heard) for n, log in enumerate(logs)])
    return run


def made_sections() -> Sections:
    """The content of the page of an elastic run that has ended."""
    return compose(live_run(elastic_events()), 1.0, BEGAN + 61.0)
