"""Draws who took part in elastic runs: a lane per worker over inner steps."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from atoll._util.units import count_text, share_text
from atoll.report.canvas import Palette, dress, heading, legend_above, new_figure
from atoll.report.presence import Presence, presences
from atoll.report.table import Row
from atoll.report.words import shorten

MOST_SEATS = 16
"""Workers of a run that the picture shows."""
_CATCHING_UP = 0.35  # opacity


def draw_members(rows: Sequence[Row], palette: Palette) -> Figure:
    """Draws the members of every elastic run over its inner steps."""
    shown = {n: presences(row.record)[:MOST_SEATS] for n, row in enumerate(rows) if row.record.views}
    lanes = sum(map(len, shown.values()))
    figure = new_figure(1.0 + 0.46 * lanes)
    axes = figure.add_subplot()
    dress(axes, palette, x="inner step", y="", grid="x")
    y = 0
    for n, seats in shown.items():
        record = rows[n].record
        changes = sorted({view.boundary for view in record.views} - {0})
        axes.vlines(changes, y - 0.28, y + len(seats) - 0.72, color=palette.muted, linewidth=0.7, linestyle=":")
        for seat in seats:
            _draw_seat(axes, palette, palette.of(n), seat, y, record.step)
            name = f"{shorten(rows[n].name, 40)}, worker {seat.worker}"
            heading(axes, palette, y - 0.22, name, f"{share_text(seat.share(record.step))} of the steps")
            y += 1
    axes.set_ylim(y - 0.6, -0.75)
    axes.set_xlim(0, max([1, *(rows[n].record.step for n in shown)]))
    axes.yaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count_text(x)))
    legend_above(figure, palette, _handles(palette), columns=6)
    return figure


def _draw_seat(axes: Axes, palette: Palette, colour: str, seat: Presence, y: float, steps: int) -> None:
    place = (y - 0.16, 0.26)
    axes.broken_barh([(0, steps)], place, facecolor=palette.idle, linewidth=0)
    axes.broken_barh([(a, b - a) for a, b in seat.following], place, facecolor=colour, alpha=_CATCHING_UP, linewidth=0)
    axes.broken_barh([(a, b - a) for a, b in seat.training], place, facecolor=colour, linewidth=0)
    for steps_at, shape in ((seat.lost, "X"), (seat.joined, "^")):
        if not steps_at:
            continue
        axes.plot(
            steps_at, [y - 0.03] * len(steps_at), shape, color=palette.ink, markeredgecolor=palette.paper,
            markersize=7, markeredgewidth=0.8, clip_on=False,
        )  # fmt: skip


def _handles(palette: Palette) -> list[Patch | Line2D]:
    def mark(shape: str, label: str) -> Line2D:
        return Line2D([], [], linestyle="", marker=shape, color=palette.ink, markersize=6, label=label)

    return [
        Patch(facecolor=palette.muted, label="training"),
        Patch(facecolor=palette.muted, alpha=_CATCHING_UP, label="catching up"),
        Patch(facecolor=palette.idle, edgecolor=palette.grid, label="away"),
        mark("X", "lost, or left"),
        mark("^", "joined"),
        Line2D([], [], color=palette.muted, linewidth=0.7, linestyle=":", label="a new view"),
    ]
