"""Compute, waiting and rounds over time: as modelled for a link, and as measured."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from atoll._util.units import share_text
from atoll.plan.job import Job
from atoll.plan.link import Link
from atoll.plan.simulate import stops
from atoll.report.canvas import Palette, dress, heading, legend_place, new_figure, shorten
from atoll.report.clock import clock, linear_time_axis, window
from atoll.report.load import RunRecord, jobs
from atoll.report.measured import Lane, Span, lanes
from atoll.report.table import Row

MOST_WORKERS = 8
"""Of a run, in a measured timeline."""
_MOST_ROWS = 6  # of rounds under way at once; more of them share the last
_PROCESSOR = 0.36  # height, in lanes
_WIRE = 0.11


def _draw_processor(axes: Axes, palette: Palette, colour: str, y: float, spans: Sequence[Span], idle: bool) -> None:
    """Spans of a thick bar, computing or idle."""
    bars = [(begin_s, end_s - begin_s) for begin_s, end_s in spans if end_s > begin_s]
    axes.broken_barh(bars, (y - 0.24, _PROCESSOR), facecolor=palette.idle if idle else colour, linewidth=0)


def _legend(figure: Figure, palette: Palette, below: str) -> None:
    figure.legend(
        handles=[
            Patch(facecolor=palette.muted, label="computing (in the run's colour)"),
            Patch(facecolor=palette.idle, edgecolor=palette.grid, label="waiting"),
            Line2D([], [], color=palette.muted, alpha=0.6, linewidth=3, label=below),
        ],
        **legend_place(palette, columns=1 if palette.narrow else 3),
    )


# ---------------------------------------------------------------------- modelled


def draw_modelled(records: Sequence[RunRecord], rows: Sequence[Row], link: Link, palette: Palette) -> Figure:
    """How each run would begin with one machine per worker and such a link for each."""
    modelled = jobs(records)
    window_s = window(modelled, link)
    count = sum(len(job.lanes()) for job in modelled)
    figure = new_figure(palette, 1.05 + 0.62 * count, narrow_height=1.58 + 0.62 * count)
    axes = figure.add_subplot()
    dress(axes, palette, x="", y="", grid="x")
    y = 0
    for n, (job, row) in enumerate(zip(modelled, rows, strict=True)):
        for lane, workers in enumerate(job.lanes()):
            _draw_job(axes, palette, n, job, link, lane, y, window_s)
            who = _who(row.name, workers if len(job.lanes()) > 1 else (), palette)
            said = f"{share_text(row.link_time.utilisation)}" + ("" if palette.narrow else " computing")
            heading(axes, palette, y - 0.3, who, said)
            y += 1
    axes.set_ylim(count - 0.55, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    linear_time_axis(axes, palette, "time since the start", window_s)
    _legend(figure, palette, "link busy")
    return figure


def _who(name: str, workers: Sequence[int], palette: Palette) -> str:
    """A run, or some of its workers."""
    if not workers:
        return shorten(name, 28 if palette.narrow else 60)
    these = "worker" if len(workers) == 1 else "workers"
    return f"{shorten(name, 14 if palette.narrow else 40)}, {these} {', '.join(map(str, workers))}"


def _draw_job(axes: Axes, palette: Palette, n: int, job: Job, link: Link, lane: int, y: float, window_s: float) -> None:
    """One worker's processor and link, up to the window's end."""
    computing: list[Span] = []
    waiting: list[Span] = []
    carrying: list[tuple[float, float]] = []
    since = 0.0
    for stop in stops(job, link):
        reached, left = stop.reached_s[lane], stop.left_s[lane]
        if since >= window_s:
            break
        if stop.sent:
            begin_s, end_s = stop.carried_s[lane]
            carrying.append((begin_s, min(end_s, window_s) - begin_s))
        if left > reached:
            computing.append(Span(since, min(reached, window_s)))
            waiting.append(Span(reached, min(left, window_s)))
            since = left
    end = clock(job, link, job.steps)
    if since < min(window_s, end):
        computing.append(Span(since, min(window_s, end)))
    _draw_processor(axes, palette, palette.of(n), y, waiting, idle=True)
    _draw_processor(axes, palette, palette.of(n), y, computing, idle=False)
    axes.broken_barh(
        [c for c in carrying if c[1] > 0], (y + 0.17, _WIRE), facecolor=palette.of(n), alpha=0.6, linewidth=0
    )


# ---------------------------------------------------------------------- measured


def is_measured(record: RunRecord) -> bool:
    """Whether its rounds travelled, and when is known."""
    return record.on_wire and any(lane.flights for lane in lanes(record))


def draw_measured(records: Sequence[RunRecord], palette: Palette) -> Figure:
    """How each run that was measured has begun, one lane per worker; the colours are by the place among all."""
    drawn = {n: _shown(record) for n, record in enumerate(records) if is_measured(record)}
    spans = [_first_periods(records[n], lanes_of) for n, lanes_of in drawn.items()]
    window_s = max(min(max(spans), 4 * min(spans)), 1e-6)
    height = sum(_height(lane) for lanes_of in drawn.values() for lane in lanes_of)
    figure = new_figure(palette, 1.05 + 0.62 * height, narrow_height=1.58 + 0.62 * height)
    axes = figure.add_subplot()
    dress(axes, palette, x="", y="", grid="x")
    y = 0.0
    for n, lanes_of in drawn.items():
        for lane in lanes_of:
            _draw_lane(axes, palette, n, lane, y, window_s)
            said = "" if lane.utilisation is None else share_text(lane.utilisation)
            said += "" if palette.narrow or not said else " computing"
            heading(axes, palette, y - 0.3, _who(records[n].name, (lane.worker,), palette), said)
            y += _height(lane)
    axes.set_ylim(height - 0.55, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    linear_time_axis(axes, palette, "time since the start", window_s)
    _legend(figure, palette, "a round under way")
    return figure


def _shown(record: RunRecord) -> list[Lane]:
    """The lanes to draw; clocks that are further apart than what is to be seen are not to be trusted."""
    aligned, together = lanes(record)[:MOST_WORKERS], lanes(record, aligned=False)[:MOST_WORKERS]
    apart_s = max(lane.begin_s for lane in aligned)
    return aligned if apart_s < _first_periods(record, together) else together


def _first_periods(record: RunRecord, shown: Iterable[Lane]) -> float:
    """Seconds until the rounds of the first three periods were there, with those that began before that."""
    until = 3 * max(record.start.period, 1)
    ends = [span.end_s for lane in shown for r, span in lane.flights if r.step <= until]
    return max(ends) if ends else max(lane.end_s for lane in shown)


def _height(lane: Lane) -> float:
    """In lanes that have one row of rounds."""
    return 1 + 1.35 * _WIRE * (min(max(lane.rows, default=0), _MOST_ROWS - 1))


def _draw_lane(axes: Axes, palette: Palette, n: int, lane: Lane, y: float, window_s: float) -> None:
    colour = palette.of(n)
    waits = [Span(w.begin_s, min(w.end_s, window_s)) for w in lane.waits if w.begin_s < window_s]
    begins = [min(lane.begin_s, window_s), *(w.end_s for w in waits)]
    ends = [*(w.begin_s for w in waits), min(lane.end_s, window_s)]
    _draw_processor(axes, palette, colour, y, waits, idle=True)
    _draw_processor(axes, palette, colour, y, list(map(Span, begins, ends)), idle=False)
    for (_, span), row in zip(lane.flights, lane.rows, strict=True):
        if span.begin_s < window_s:
            bar = (span.begin_s, min(span.end_s, window_s) - span.begin_s)
            low = y + 0.17 + 1.35 * _WIRE * min(row, _MOST_ROWS - 1)
            axes.broken_barh([bar], (low, _WIRE), facecolor=colour, alpha=0.6, edgecolor=palette.paper, linewidth=0.6)
