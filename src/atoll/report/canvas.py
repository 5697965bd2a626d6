"""Draws figures with Matplotlib in the colours of a palette, and renders them as PNG."""

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from atoll.report.words import shorten

_MARKERS = "os^Dv<>p"
_LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")


@dataclass(frozen=True, slots=True)
class Palette:
    """Holds the colours by role."""

    paper: str
    """Background."""
    ink: str
    """Text."""
    muted: str
    """Secondary text."""
    grid: str
    idle: str
    """A worker that waits."""
    series: tuple[str, ...]
    """One colour per run, distinguishable without red-green vision (after Okabe and Ito)."""

    def of(self, run: int) -> str:
        """Returns the colour of a run by its place."""
        return self.series[run % len(self.series)]


LIGHT = Palette(
    paper="#ffffff",
    ink="#1b1f24",
    muted="#59636e",
    grid="#e1e4e8",
    idle="#e9ebee",
    series=("#0072b2", "#d55e00", "#009e73", "#b8579a", "#c98b00", "#3d9fd9", "#7b7f85", "#8c564b"),
)

Draw = Callable[[Palette], Figure]
"""Makes a figure in the colours of a palette."""


def to_png(draw: Draw) -> bytes:
    """Returns the picture on white as a PNG of 200 pixels an inch; the same figure gives the same bytes."""
    settings: dict[Any, Any] = {
        "text.parse_math": False,  # a run may be called $x
        "axes.unicode_minus": False,
        "font.family": "sans-serif",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "sans-serif"],
        "font.size": 9,
    }
    margin: dict[str, Any] = {"bbox_inches": "tight", "pad_inches": 0.15}
    buffer = io.BytesIO()
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        draw(LIGHT).savefig(buffer, format="png", dpi=200, facecolor=LIGHT.paper, metadata={"Software": None}, **margin)
    return buffer.getvalue()


# ---------------------------------------------------------------------- what all figures share


def new_figure(height: float) -> Figure:
    """Returns an empty figure of this height in inches."""
    return Figure(figsize=(8.4, height), layout="constrained")


def dress(axes: Axes, palette: Palette, *, x: str, y: str, grid: Literal["both", "x", "y"] = "both") -> None:
    """Gives axes their labels and a quiet grid, and takes away the box."""
    axes.set_xlabel(x, color=palette.muted)
    axes.set_ylabel(y, color=palette.muted)
    axes.tick_params(which="both", colors=palette.muted, length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(True, axis=grid, color=palette.grid, linewidth=0.8)


def heading(axes: Axes, palette: Palette, y: float, left: str, right: str) -> None:
    """Writes a name above the left end of a bar and a number above the right end."""
    where = axes.get_yaxis_transform()
    behind = {"facecolor": palette.paper, "edgecolor": "none", "pad": 1.5}  # the grid must not cross the words
    axes.text(0, y, left, transform=where, color=palette.ink, va="bottom", ha="left", bbox=behind)
    axes.text(1, y, right, transform=where, color=palette.muted, va="bottom", ha="right", bbox=behind)


def marker(run: int) -> str:
    """Returns the marker of a run by its place."""
    return _MARKERS[run % len(_MARKERS)]


def line_style(palette: Palette, run: int) -> Literal["-", "--", ":", "-."]:
    """Returns the line style of a run: another one each time that the colours repeat."""
    return _LINES[run // len(palette.series) % len(_LINES)]


def legend(figure: Figure, palette: Palette, names: Sequence[str], places: Sequence[int] | None = None) -> None:
    """Names the runs above the axes, and makes the figure higher by the lines that this takes."""
    handles = [
        Line2D(
            [], [], color=palette.of(n), linestyle=line_style(palette, n), linewidth=1.8,
            marker=marker(n), markersize=5, markeredgewidth=0, label=" ",
        )
        for n in places or range(len(names))
    ]  # fmt: skip
    short = [shorten(name, 34) for name in names]
    letters, key = 108, 8  # that fit beside each other, and those of a marker
    columns = max(1, min(len(short), letters // (key + max(map(len, short), default=0))))
    made = legend_above(figure, palette, handles, columns)
    for text, name in zip(made.get_texts(), short, strict=True):  # set later: a label that begins with _ is dropped
        text.set_text(name)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * (-(-len(short) // columns) - 1))


def legend_above(figure: Figure, palette: Palette, handles: Sequence[Patch | Line2D], columns: int) -> Legend:
    """Puts a legend of these keys above the axes."""
    return figure.legend(
        handles=handles, loc="outside upper left", ncols=columns, frameon=False, labelcolor=palette.ink,
        handlelength=2.2, columnspacing=1.4, borderpad=0.1,
    )  # fmt: skip


# ---------------------------------------------------------------------- axes of time

_DAY = 86400.0
_UNITS = [(365 * _DAY, "years", "y"), (_DAY, "days", "d"), (3600.0, "hours", "h"), (60.0, "minutes", "min")]
_UNITS += [(1.0, "seconds", "s"), (1e-3, "milliseconds", "ms")]
_TICKS = [n * s for s in (1e-3, 1e-2, 0.1, 1.0) for n in (1, 2, 5)] + [10.0, 20.0, 30.0]
_TICKS += [n * 60.0 for n in (1, 2, 5, 10, 20, 30)] + [n * 3600.0 for n in (1, 2, 5, 12)]
_TICKS += [n * _DAY for n in (1, 2, 5, 10, 20, 50, 100)] + [n * 365 * _DAY for n in (1, 2, 5, 10, 100, 1000)]
_COARSE = [1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 4 * _DAY, 40 * _DAY, 365 * _DAY, 3650 * _DAY]


def time_axis(axes: Axes, palette: Palette, label: str, begins: Sequence[float], ends: Sequence[float]) -> None:
    """Makes x an axis of seconds, logarithmic where a linear one would hide the shortest run."""
    if not ends or max(ends) < 6 * min(ends):
        linear_time_axis(axes, palette, label, 1.05 * max(ends, default=1.0))
        return
    low, high = min(begins) / 1.3, max(ends) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    choices = [[tick for tick in ticks if low <= tick <= high] for ticks in (_TICKS, _COARSE, _COARSE[::2])]
    ticks = next((ticks for ticks in choices if len(ticks) <= 9), choices[-1])
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([_tick(tick) for tick in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{label}, logarithmic", color=palette.muted)


def linear_time_axis(axes: Axes, palette: Palette, label: str, longest_s: float) -> None:
    """Makes x an axis of seconds from 0, with round numbers of a unit that fits."""
    unit_s, unit = next(((s, unit) for s, unit, _ in _UNITS if longest_s >= 2 * s), _UNITS[-1][:2])
    ticks = MaxNLocator(9, steps=[1, 2, 5, 10]).tick_values(0, longest_s / unit_s)
    axes.set_xlim(0, longest_s)
    axes.xaxis.set_major_locator(FixedLocator([tick * unit_s for tick in ticks if tick * unit_s <= longest_s]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / unit_s:g}"))
    axes.set_xlabel(f"{label}, {unit}", color=palette.muted)


def _tick(seconds: float) -> str:
    unit_s, unit = next(((s, short) for s, _, short in _UNITS if seconds >= s), (1e-3, "ms"))
    return f"{seconds / unit_s:g} {unit}"
