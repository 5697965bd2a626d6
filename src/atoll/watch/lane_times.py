"""Computes when the workers of a watched run trained, waited and had rounds on their way."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from atoll.link.net.departure import FINISHED, STOPPED
from atoll.report.lanes import Span, rows, waits
from atoll.report.load import plain_text
from atoll.report.presence import Presence, presences
from atoll.report.record import RunRecord
from atoll.runs.events import Lost, Members, Resumed
from atoll.watch.live_run import LiveRun, sent_rounds
from atoll.watch.process import MOST_KEPT, ProcessLog, WorkerTrack
from atoll.watch.sections import LaneOfWorker, LanesSection, Row, WindowOfWorker, WindowSection
from atoll.watch.state import least_workers
from atoll.watch.thinning import join_near

NOW_S: Final = 60.0
"""Seconds of the window that scrolls."""
MOST_SPANS: Final = 2000
"""Spans of each kind that a window has of a worker; fewer if there are many workers."""
_MOST_OF_ALL, _FEWEST_SPANS = 64_000, 20
UNSEEN: Final = 5e-5
"""The share of a window that is narrower than a pixel."""
_LONGEST = 300  # characters of words


# ---------------------------------------------------------------------- the whole run


def lanes_section(run: LiveRun, record: RunRecord, now: float) -> LanesSection:
    """Returns a lane per worker over the whole run."""
    names = {worker: name for name, process in run.processes.items() for worker in process.tracks}
    views = sorted(record.views, key=lambda view: view.view)
    seats = presences(record) if views else [Presence(worker) for worker in sorted(names)]
    paused = _paused(run, record, views)
    times = dict(zip([v.view for v in views], run.time_of_step(v.boundary for v in views), strict=True))
    found: list[LaneOfWorker] = []
    for seat in seats:
        name = names.get(seat.worker)
        process = run.processes[name] if name is not None else None
        spans = _by_views(run, seat, paused, run.newest_s) if views else []
        if process is not None and not views:
            spans = _by_process(run, process, process.tracks[seat.worker])
        if name is not None and run.is_silent(name, now):
            spans = _gone(run, run.processes[name], spans)
        if spans or process is not None:
            found.append(_lane(run, seat, process, spans[-MOST_KEPT:]))
    return {"end_s": run.newest_s, "workers": found, "views": [[at, number] for number, at in times.items()][-200:]}


def _lane(run: LiveRun, seat: Presence, process: ProcessLog | None, spans: list[Row]) -> LaneOfWorker:
    lane: LaneOfWorker = {
        "worker": seat.worker,
        "spans": spans,
        "marks": sorted(_marks(run, seat, process), key=lambda mark: mark[0])[-MOST_KEPT:],
        "from_s": 0.0,
        "bucket_s": 1.0,
        "waiting": [],
        "flying": [],
    }
    if process is not None:
        track = process.tracks[seat.worker]
        lane["from_s"] = run.since(process, process.began)
        waiting, lane["flying"] = track.shares.until(process.newest)
        lane["waiting"] = [min(share, 1.0) for share in waiting]
        lane["bucket_s"] = track.shares.bucket_s
    return lane


def _paused(run: LiveRun, record: RunRecord, views: Sequence[Members]) -> list[Span]:
    """Returns when fewer workers were there than the run needs."""
    least = least_workers(record)
    edges = [*run.time_of_step(view.boundary for view in views), run.newest_s]
    few = [len(view.members) < least for view in views]
    return [Span(begin, end) for begin, end, is_few in zip(edges, edges[1:], few, strict=False) if is_few]


def _by_views(run: LiveRun, seat: Presence, paused: Sequence[Span], end_s: float) -> list[Row]:
    """Returns the spans of a worker of an elastic run."""
    steps = [(*span, "training") for span in seat.training] + [(*span, "catching up") for span in seat.following]
    steps.sort()
    times = run.time_of_step(step for begin, end, _ in steps for step in (begin, end))
    found: list[Row] = []
    free_s = 0.0
    for (_, _, what), begin, end in zip(steps, times[::2], times[1::2], strict=True):
        begin = max(begin, free_s)
        if begin > free_s:
            found.append([free_s, begin, "away"])
        found += _cut(Span(begin, end), what, paused)
        free_s = max(free_s, end)
    if free_s < end_s:
        still = bool(steps) and steps[-1][1] >= run.step  # its last span reaches to the newest step
        found += _cut(Span(free_s, end_s), steps[-1][2], paused) if still else [[free_s, end_s, "away"]]
    return _merged(found)


def _cut(span: Span, what: str, paused: Sequence[Span]) -> Iterator[Row]:
    """Yields a span in parts: some of it may have been a pause."""
    begin = span.begin_s
    for pause in paused if what == "training" else ():
        if pause.end_s <= begin or pause.begin_s >= span.end_s:
            continue
        yield [begin, max(pause.begin_s, begin), what]
        yield [max(pause.begin_s, begin), min(pause.end_s, span.end_s), "paused"]
        begin = min(pause.end_s, span.end_s)
    yield [begin, span.end_s, what]


def _by_process(run: LiveRun, process: ProcessLog, track: WorkerTrack) -> list[Row]:
    """Returns the spans of a worker by the events of its process alone."""
    found: list[Row] = []
    begin = run.since(process, process.began)
    for away in track.away:
        found.append([begin, run.since(process, away.begin_s), "training"])
        found.append([run.since(process, away.begin_s), run.since(process, away.end_s), "away"])
        begin = run.since(process, away.end_s)
    found.append([begin, run.since(process, process.newest), "training"])
    return _merged(found)


def _gone(run: LiveRun, process: ProcessLog, spans: Iterable[Row]) -> list[Row]:
    """Returns spans in which a silent process is gone since its newest event, as far as others go on."""
    since_s = run.since(process, process.newest)
    kept = [[begin, min(end, since_s), what] for begin, end, what in spans if begin < since_s]
    return _merged([*kept, [since_s, run.newest_s, "gone"]])


def _merged(spans: Iterable[Row]) -> list[Row]:
    """Returns spans without empty ones; those that touch and are of one kind become one."""
    found: list[Row] = []
    for begin, end, what in spans:
        if end <= begin:
            continue
        if found and found[-1][2] == what and found[-1][1] >= begin:
            found[-1][1] = end
        else:
            found.append([begin, end, what])
    return found


def _marks(run: LiveRun, seat: Presence, process: ProcessLog | None) -> Iterator[Row]:
    """Yields the moments of a worker's lane: those that others have told, and its own."""
    told = _told(run, seat.worker)
    for at in run.time_of_step(seat.joined):
        yield [at, "joined", f"Worker {seat.worker} has joined."]
    for at in run.time_of_step(seat.lost):
        why = min(told, key=lambda lost: abs(lost[0] - at), default=(0.0, ""))[1]
        words = f"Worker {seat.worker} is gone: {why}" if why else f"Worker {seat.worker} is gone."
        yield [at, "left" if why.startswith((FINISHED, STOPPED)) else "lost", words]
    if process is not None:
        for at, resumed in process.kept[Resumed]:
            yield [run.since(process, at), "resumed", f"Worker {seat.worker} went on from step {resumed.step}."]


def _told(run: LiveRun, worker: int) -> list[tuple[float, str]]:
    """Returns when and why a worker was lost, as the others tell."""
    return [
        (run.since(process, at), plain_text(event.why)[:_LONGEST])
        for process in run.logs()
        for at, event in process.kept[Lost]
        if event.worker == worker
    ]


# ---------------------------------------------------------------------- a window


def window_section(run: LiveRun, window: Span | None = None, *, unseen: float = UNSEEN) -> WindowSection:
    """Returns what the workers did in a window.

    Args:
        run: The run.
        window: In seconds since the run began; None: the last minute.
        unseen: The share of the window below which waits are left out; 0 where a reader may zoom further in.
    """
    if window is None:
        window = Span(max(0.0, run.newest_s - NOW_S), run.newest_s)
    found = [
        _in_window(run, process, worker, window, unseen)
        for worker, process in sorted(((w, p) for p in run.logs() for w in p.tracks), key=itemgetter(0))
    ]
    return {"from_s": window.begin_s, "to_s": window.end_s, "workers": found}


def _in_window(run: LiveRun, process: ProcessLog, worker: int, window: Span, unseen: float) -> WindowOfWorker:
    origin = run.began if process.began else 0.0
    most = min(MOST_SPANS, max(_FEWEST_SPANS, _MOST_OF_ALL // process.start.workers))
    inside = process.tracks[worker].flights.within(Span(window.begin_s + origin, window.end_s + origin))
    inside[:, :2] -= origin
    shortest_s = (min(window.end_s, run.newest_s) - max(window.begin_s, 0.0)) * unseen
    waited = waits(inside[inside[:, 2] > shortest_s][:, 1:3].tolist(), 0.0)
    long = [wait for wait in waited if wait.end_s - wait.begin_s > shortest_s]
    under_way = sent_rounds(process) if worker == min(process.tracks) else []
    times = run.time_of_step(step for step, _ in under_way)
    return {
        "worker": worker,
        "waits": [[*span] for span in join_near(long, most)],
        "flights": _flights(inside[inside[:, 0].argsort(kind="stable")], most),
        "on_their_way": [[*sent, at] for sent, at in zip(under_way, times, strict=True)],
    }


def _flights(inside: NDArray[np.float64], most: int) -> list[Row]:
    """Returns the flights, in order of their beginnings, with the row of each; too many are joined in one row."""
    if len(inside) > most:
        return [[*span, -1, -1, 0] for span in join_near(inside[:, :2], most)]
    spans = [Span(begin, end) for begin, end in inside[:, :2].tolist()]
    numbered = zip(spans, inside[:, 3:].astype(int).tolist(), rows(spans), strict=True)
    return [[*span, step, fragment, row] for span, (step, fragment), row in numbered]
