"""Draws compute, waiting and rounds over time: as modelled for a link, and as measured."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from atoll._util.units import share_text
from atoll.plan.line import Line
from atoll.plan.method import Job
from atoll.plan.simulate import stops
from atoll.report.canvas import Palette, dress, heading, legend_of_lanes, linear_time_axis, new_figure, shorten
from atoll.report.lanes import Lane, Span, lanes
from atoll.report.record import RunRecord, jobs
from atoll.report.table import Row

MOST_WORKERS = 8
"""Workers of a run that a measured timeline shows."""
_MOST_ROWS = 6  # of rounds under way at once; more of them share the last
_THIN = 0.11  # height of a round's bar, in lanes


class _Bars(NamedTuple):
    """Holds what to draw of one worker, or of several that behave alike."""

    run: int
    title: str
    utilisation: float | None
    busy: Span
    waits: Sequence[Span]
    thin: Sequence[Span]
    """Rounds under way, or the time in which the link is busy."""
    rows: Sequence[int]

    @property
    def height(self) -> float:
        """In lanes with one row of thin bars."""
        return 1 + 1.35 * _THIN * min(max(self.rows, default=0), _MOST_ROWS - 1)


def _draw(palette: Palette, drawn: Sequence[_Bars], window_s: float, thin: str, edge: float) -> Figure:
    height = sum(bars.height for bars in drawn)
    figure = new_figure(palette, 1.05 + 0.62 * height, narrow_height=1.58 + 0.62 * height)
    axes = figure.add_subplot()
    dress(axes, palette, x="", y="", grid="x")
    y = 0.0
    for bars in drawn:
        _draw_bars(axes, palette, bars, y, window_s, edge)
        said = "" if bars.utilisation is None else share_text(bars.utilisation)
        said += "" if palette.narrow or not said else " computing"
        heading(axes, palette, y - 0.3, bars.title, said)
        y += bars.height
    axes.set_ylim(height - 0.55, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    linear_time_axis(axes, palette, "time since the start", window_s)
    legend_of_lanes(figure, palette, thin)
    return figure


def _draw_bars(axes: Axes, palette: Palette, bars: _Bars, y: float, window_s: float, edge: float) -> None:
    def lengths(spans: Iterable[Span]) -> list[tuple[float, float]]:
        return [(begin, min(end, window_s) - begin) for begin, end in spans if begin < min(end, window_s)]

    colour = palette.of(bars.run)
    edges = [bars.busy.begin_s, *(time for wait in bars.waits for time in wait), bars.busy.end_s]
    computing = map(Span, edges[::2], edges[1::2])
    axes.broken_barh(lengths(bars.waits), (y - 0.24, 0.36), facecolor=palette.idle, linewidth=0)
    axes.broken_barh(lengths(computing), (y - 0.24, 0.36), facecolor=colour, linewidth=0)
    for row in range(_MOST_ROWS):
        mine = [span for span, at in zip(bars.thin, bars.rows, strict=True) if min(at, _MOST_ROWS - 1) == row]
        if shown := lengths(mine):
            place = (y + 0.17 + 1.35 * _THIN * row, _THIN)
            axes.broken_barh(shown, place, facecolor=colour, alpha=0.6, edgecolor=palette.paper, linewidth=edge)


def _title(name: str, workers: Sequence[int], palette: Palette) -> str:
    """Returns the name of a run, or of some of its workers."""
    if not workers:
        return shorten(name, 28 if palette.narrow else 60)
    these = "worker" if len(workers) == 1 else "workers"
    return f"{shorten(name, 14 if palette.narrow else 40)}, {these} {', '.join(map(str, workers))}"


def _window(spans: Sequence[float]) -> float:
    """Returns the seconds to show: the longest of the runs' own, unless that would hide the shortest."""
    return max(min(max(spans), 4 * min(spans)), 1e-6)


# ---------------------------------------------------------------------- modelled


@lru_cache(maxsize=64)
def _waits(job: Job, link: Line) -> tuple[list[int], list[float]]:
    """Returns the steps after which a worker waited, and the seconds that the slowest had waited by then."""
    steps, waits = [0], [0.0]
    for stop in stops(job, link):
        waited = max(left - stop.step * job.step_s for left in stop.left_s)
        if waited > waits[-1]:
            steps.append(stop.step)
            waits.append(waited)
    return steps, waits


def clock(job: Job, link: Line, step: int) -> float:
    """Returns the modelled seconds until the slowest worker has left this step."""
    steps, waits = _waits(job, link)
    return step * job.step_s + waits[bisect_right(steps, step) - 1]


def draw_modelled(records: Sequence[RunRecord], rows: Sequence[Row], link: Line, palette: Palette) -> Figure:
    """Draws how each run would begin with one machine per worker and such a link for each."""
    modelled = jobs(records)
    moving = [job for job in modelled if job.steps]
    outer = [job for job in moving if not job.gradients] or moving
    periods = [min(3 * (1 if job.gradients else job.period), job.steps) for job in outer]
    window_s = _window([clock(job, link, steps) for job, steps in zip(outer, periods, strict=True)])
    drawn = []
    for n, (job, row) in enumerate(zip(modelled, rows, strict=True)):
        for lane, workers in enumerate(job.lanes()):
            title = _title(row.name, workers if len(job.lanes()) > 1 else (), palette)
            drawn.append(_modelled_bars(n, title, row.link_time.utilisation, job, link, lane, window_s))
    return _draw(palette, drawn, window_s, "link busy", edge=0)


def _modelled_bars(n: int, title: str, utilisation: float, job: Job, link: Line, lane: int, window_s: float) -> _Bars:
    waits: list[Span] = []
    carried: list[Span] = []
    for stop in stops(job, link):
        if stop.reached_s[lane] >= window_s:
            break
        if stop.sent:
            carried.append(Span(*stop.carried_s[lane]))
        if stop.left_s[lane] > stop.reached_s[lane]:
            waits.append(Span(stop.reached_s[lane], stop.left_s[lane]))
    busy = Span(0.0, clock(job, link, job.steps))
    return _Bars(n, title, utilisation, busy, waits, carried, [0] * len(carried))


# ---------------------------------------------------------------------- measured


def is_measured(record: RunRecord) -> bool:
    """Whether payloads left their process, and the times are known."""
    return record.on_wire and any(lane.flights for lane in lanes(record))


def draw_measured(records: Sequence[RunRecord], palette: Palette) -> Figure:
    """Draws how each measured run began, one lane per worker."""
    shown = {n: _shown(record) for n, record in enumerate(records) if is_measured(record)}
    window_s = _window([_first_periods(records[n], lanes_of) for n, lanes_of in shown.items()])
    drawn = [
        _Bars(
            run=n,
            title=_title(records[n].name, (lane.worker,), palette),
            utilisation=lane.utilisation,
            busy=Span(lane.begin_s, lane.end_s),
            waits=lane.waits,
            thin=[span for _, span in lane.flights],
            rows=lane.rows,
        )
        for n, lanes_of in shown.items()
        for lane in lanes_of
    ]
    return _draw(palette, drawn, window_s, "a round under way", edge=0.6)


def _shown(record: RunRecord) -> list[Lane]:
    """Returns the lanes to draw, aligned by clocks that are no further apart than the time to show."""
    aligned, together = lanes(record)[:MOST_WORKERS], lanes(record, aligned=False)[:MOST_WORKERS]
    apart_s = max(lane.begin_s for lane in aligned)
    return aligned if apart_s < _first_periods(record, together) else together


def _first_periods(record: RunRecord, shown: Iterable[Lane]) -> float:
    """Returns the seconds until the rounds of the first three periods had arrived."""
    until = 3 * max(record.start.period, 1)
    ends = [span.end_s for lane in shown for r, span in lane.flights if r.step <= until]
    return max(ends) if ends else max(lane.end_s for lane in shown)
