"""Draws compute, waiting and rounds over time: as modelled for a link, and as measured."""

from collections.abc import Iterable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import NullLocator

from atoll._util.units import share_text
from atoll.plan.line import Line
from atoll.report.canvas import Palette, dress, heading, legend_above, linear_time_axis, new_figure
from atoll.report.lanes import Lane, Span, lanes, modelled_lanes, window
from atoll.report.record import RunRecord
from atoll.report.table import Row
from atoll.report.words import shorten

MOST_WORKERS = 8
"""Workers of a run that a measured timeline shows."""
_MOST_ROWS = 6  # of rounds under way at once; more of them share the last
_THIN = 0.11  # height of a round's bar, in lanes

Drawn = Sequence[tuple[int, str, Lane]]
"""Lanes to draw, each with the place of its colour in the palette and a title."""


def draw_modelled(rows: Sequence[Row], link: Line, palette: Palette) -> Figure:
    """Draws how each run would begin with one machine per worker and such a link for each."""
    window_s, found = modelled_lanes([(row.job, row.link_time.utilisation) for row in rows], link)
    drawn = [(n, _title(rows[n].name, workers), lane) for n, workers, lane in found]
    return _draw(palette, drawn, window_s, "link busy", edge=0)


def is_measured(record: RunRecord) -> bool:
    """Whether payloads left their process, and the times are known."""
    return record.on_wire and any(lane.flights for lane in lanes(record))


def draw_measured(rows: Sequence[Row], palette: Palette) -> Figure:
    """Draws how each measured run began, one lane per worker."""
    shown = {n: _shown(row.record) for n, row in enumerate(rows) if is_measured(row.record)}
    window_s = window([_first_periods(rows[n].record, lanes_of) for n, lanes_of in shown.items()])
    drawn = [(n, _title(rows[n].name, (lane.worker,)), lane) for n, of in shown.items() for lane in of]
    return _draw(palette, drawn, window_s, "a round under way", edge=0.6)


def _shown(record: RunRecord) -> list[Lane]:
    """Returns the lanes to draw, aligned by clocks that are no further apart than the time to show."""
    aligned, together = lanes(record)[:MOST_WORKERS], lanes(record, aligned=False)[:MOST_WORKERS]
    apart_s = max(lane.begin_s for lane in aligned)
    return aligned if apart_s < _first_periods(record, together) else together


def _first_periods(record: RunRecord, shown: Iterable[Lane]) -> float:
    """Returns the seconds until the rounds of the first three periods had arrived."""
    until = 3 * max(record.start.period, 1)
    ends = [span.end_s for lane in shown for r, span in zip(lane.rounds, lane.flights, strict=True) if r.step <= until]
    return max(ends) if ends else max(lane.end_s for lane in shown)


def _title(name: str, workers: Sequence[int]) -> str:
    """Returns the name of a run, or of some of its workers."""
    if not workers:
        return shorten(name, 60)
    these = "worker" if len(workers) == 1 else "workers"
    return f"{shorten(name, 40)}, {these} {', '.join(map(str, workers))}"


# ---------------------------------------------------------------------- bars


def _draw(palette: Palette, drawn: Drawn, window_s: float, thin: str, edge: float) -> Figure:
    height = sum(_height(lane) for _, _, lane in drawn)
    figure = new_figure(1.05 + 0.62 * height)
    draw_lanes(figure.add_subplot(), palette, drawn, window_s, edge=edge)
    handles = lane_handles(palette, "computing (in the run's colour)", thin)
    legend_above(figure, palette, handles, columns=3)
    return figure


def lane_handles(palette: Palette, thick: str, thin: str) -> list[Patch | Line2D]:
    """Returns the keys of a timeline's legend."""
    return [
        Patch(facecolor=palette.muted, label=thick),
        Patch(facecolor=palette.idle, edgecolor=palette.grid, label="waiting"),
        Line2D([], [], color=palette.muted, alpha=0.6, linewidth=3, label=thin),
    ]


def draw_lanes(
    axes: Axes,
    palette: Palette,
    drawn: Drawn,
    window_s: float,
    *,
    label: str = "time since the start",
    edge: float = 0,
) -> None:
    """Draws lanes one below the other, up to a time; `edge` is the gap between rounds, in points."""
    dress(axes, palette, x="", y="", grid="x")
    y = 0.0
    for place, title, lane in drawn:
        _draw_bars(axes, palette, palette.of(place), lane, y, window_s, edge)
        said = "" if lane.utilisation is None else f"{share_text(lane.utilisation)} computing"
        heading(axes, palette, y - 0.3, title, said)
        y += _height(lane)
    axes.set_ylim(y - 0.55, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    linear_time_axis(axes, palette, label, window_s)


def _height(lane: Lane) -> float:
    """Returns the height in lanes with one row of thin bars."""
    return 1 + 1.35 * _THIN * min(max(lane.rows, default=0), _MOST_ROWS - 1)


def _draw_bars(axes: Axes, palette: Palette, colour: str, lane: Lane, y: float, window_s: float, edge: float) -> None:
    def lengths(spans: Iterable[Span]) -> list[tuple[float, float]]:
        return [(begin, min(end, window_s) - begin) for begin, end in spans if begin < min(end, window_s)]

    edges = [lane.begin_s, *(time for wait in lane.waits for time in wait), lane.end_s]
    computing = map(Span, edges[::2], edges[1::2])
    axes.broken_barh(lengths(lane.waits), (y - 0.24, 0.36), facecolor=palette.idle, linewidth=0)
    axes.broken_barh(lengths(computing), (y - 0.24, 0.36), facecolor=colour, linewidth=0)
    for row in range(_MOST_ROWS):
        mine = [span for span, at in zip(lane.flights, lane.rows, strict=True) if min(at, _MOST_ROWS - 1) == row]
        if shown := lengths(mine):
            place = (y + 0.17 + 1.35 * _THIN * row, _THIN)
            axes.broken_barh(shown, place, facecolor=colour, alpha=0.6, edgecolor=palette.paper, linewidth=edge)
