"""Matplotlib figures as SVG for a page (colours are CSS variables) and as PNG (colours are colours).

Figures are drawn with a palette. For SVG it holds marker colours that nothing else uses; they are replaced by
`var(--ink)` and the like, so that one picture serves light and dark. The same figure gives the same bytes.
"""

import io
import re
import warnings
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_SVG = "http://www.w3.org/2000/svg"
_MARKERS = "os^Dv<>p"
_LINES: tuple[Literal["-", "--", ":", "-."], ...] = ("-", "--", ":", "-.")
_HREF = "{http://www.w3.org/1999/xlink}href"


@dataclass(frozen=True, slots=True)
class Palette:
    """Colours by role, and whether there is little room."""

    paper: str
    """What everything is drawn on."""
    ink: str
    """Text."""
    muted: str
    """Text of less weight."""
    grid: str
    idle: str
    """Waiting: a pale surface."""
    series: tuple[str, ...]
    """One per run, distinguishable without red-green vision (after Okabe and Ito)."""
    narrow: bool = False
    """For a phone: about 360 px wide."""

    def of(self, run: int) -> str:
        """The colour of a run, by its place."""
        return self.series[run % len(self.series)]


LIGHT = Palette(
    paper="#ffffff",
    ink="#1b1f24",
    muted="#59636e",
    grid="#e1e4e8",
    idle="#e9ebee",
    series=("#0072b2", "#d55e00", "#009e73", "#b8579a", "#c98b00", "#3d9fd9", "#7b7f85", "#8c564b"),
)
DARK = Palette(
    paper="#15181b",
    ink="#e6e8ea",
    muted="#9ba6b0",
    grid="#2c3238",
    idle="#2b3036",
    series=("#4aa8e0", "#f0803c", "#2cc295", "#e090c4", "#e8b13a", "#9ad4f5", "#a9adb3", "#c99a8c"),
)
_ROLES = ("paper", "ink", "muted", "grid", "idle")
_MARKS = Palette("#010101", "#010102", "#010103", "#010104", "#010105", tuple(f"#0101{16 + n:02x}" for n in range(8)))
_VARIABLES = {getattr(_MARKS, role): f"var(--{role})" for role in _ROLES}
_VARIABLES |= {mark: f"var(--run-{n})" for n, mark in enumerate(_MARKS.series)}


def css_variables(palette: Palette) -> str:
    """The declarations that give `to_svg`'s pictures their colours."""
    roles = [f"--{role}: {getattr(palette, role)};" for role in _ROLES]
    return " ".join(roles + [f"--run-{n}: {colour};" for n, colour in enumerate(palette.series)])


Draw = Callable[[Palette], Figure]
"""Makes a figure in the colours and the width of a palette."""


def to_svg(draw: Draw, name: str, label: str, *, narrow: bool) -> str:
    """One `<svg>` element for an HTML page; `name` makes its ids unique, `label` is read to who cannot see it."""
    buffer = io.BytesIO()
    with _settings(name):
        figure = draw(replace(_MARKS, narrow=narrow))
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    root = ET.fromstring(buffer.getvalue())
    _tidy(root, name)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    root.set("class", "narrow" if narrow else "wide")
    ET.register_namespace("", _SVG)
    return ET.tostring(root, encoding="unicode")


def to_png(draw: Draw) -> bytes:
    """The wide picture on white, 200 pixels an inch."""
    buffer = io.BytesIO()
    with _settings("png"):
        draw(LIGHT).savefig(
            buffer,
            format="png",
            dpi=200,
            facecolor=LIGHT.paper,
            bbox_inches="tight",
            pad_inches=0.15,
            metadata={"Software": None},
        )
    return buffer.getvalue()


@contextmanager
def _settings(salt: str) -> Iterator[None]:
    settings: dict[Any, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,  # a run may be called $x
        "axes.unicode_minus": False,
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "path.simplify": False,
    }
    # Fonts that lack a glyph of a run's name matter for its width only: the browser has others.
    with warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing from font", category=UserWarning)
        yield


# ---------------------------------------------------------------------- SVG


def _tidy(root: ET.Element, name: str) -> None:
    """Keep what is drawn: no metadata or style sheet, colours and fonts from the page, short numbers, own ids."""
    used = {m for e in root.iter() for v in e.attrib.values() for m in re.findall(r"#([\w.-]+)", v)}
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
    for element in root.iter():
        element.tail = None
        if element.tag != f"{{{_SVG}}}text":
            element.text = None
        attributes = element.attrib
        if "id" in attributes:
            identity = attributes.pop("id")
            if identity in used:
                attributes["id"] = f"{name}-{identity}"
        if _HREF in attributes:
            attributes["href"] = f"#{name}-{attributes.pop(_HREF).removeprefix('#')}"
        if attributes.get("transform", "").startswith("rotate(-0 "):
            del attributes["transform"]
        if "d" in attributes:
            attributes["d"] = " ".join(re.sub(r"-?\d+\.\d+", _short, attributes["d"]).split())
        if "clip-path" in attributes:
            attributes["clip-path"] = attributes["clip-path"].replace("url(#", f"url(#{name}-")
        if "style" in attributes:
            attributes["style"] = _style(attributes["style"])


def _short(match: re.Match[str]) -> str:
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


def _style(style: str) -> str:
    """Declarations without the font's name, colours as variables."""
    kept = [d.strip() for d in style.split(";") if not d.strip().startswith("font-family")]
    return re.sub(r"#[0-9a-f]{6}\b", lambda m: _VARIABLES.get(m[0], m[0]), "; ".join(kept))


# ---------------------------------------------------------------------- what all figures share


def new_figure(palette: Palette, height: float, *, narrow_height: float) -> Figure:
    """A figure of the width that the palette asks for; heights in inches."""
    size = (3.7, narrow_height) if palette.narrow else (8.4, height)
    return Figure(figsize=size, layout="constrained")


def dress(axes: Axes, palette: Palette, *, x: str, y: str, grid: str = "both") -> None:
    """Labels, a quiet grid, and no box."""
    axes.set_xlabel(x, color=palette.muted)
    axes.set_ylabel(y, color=palette.muted)
    axes.tick_params(which="both", colors=palette.muted, length=0, labelsize=8.5)
    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    if grid in ("both", "x"):
        axes.xaxis.grid(True, color=palette.grid, linewidth=0.8)
    if grid in ("both", "y"):
        axes.yaxis.grid(True, color=palette.grid, linewidth=0.8)


def heading(axes: Axes, palette: Palette, y: float, left: str, right: str) -> None:
    """Words above a bar: its name, and at the far end its number."""
    where = axes.get_yaxis_transform()
    behind = {"facecolor": palette.paper, "edgecolor": "none", "pad": 1.5}  # the grid must not cross the words
    axes.text(0, y, left, transform=where, color=palette.ink, va="bottom", ha="left", bbox=behind)
    axes.text(1, y, right, transform=where, color=palette.muted, va="bottom", ha="right", bbox=behind)


def shorten(name: str, most: int) -> str:
    """A name that fits."""
    return name if len(name) <= most else f"{name[: most - 3].rstrip()}..."


def marker(run: int) -> str:
    """A shape for a run, beside its colour."""
    return _MARKERS[run % len(_MARKERS)]


def _legend_columns(names: Sequence[str], palette: Palette) -> int:
    """As many columns as fit beside each other."""
    room, key = (46, 8) if palette.narrow else (108, 8)  # in letters

    def width(columns: int) -> int:
        least, more = divmod(len(names), columns)  # the first columns are one longer, as Matplotlib has it
        ends = list(accumulate(least + (column < more) for column in range(columns)))
        return sum(key + max(map(len, names[a:b])) for a, b in pairwise([0, *ends]))

    return next((columns for columns in range(len(names), 1, -1) if width(columns) <= room), 1)


def legend(figure: Figure, palette: Palette, names: Sequence[str], places: Sequence[int] | None = None) -> None:
    """Above the axes, where it covers nothing; the figure grows by its height."""
    places = list(range(len(names))) if places is None else places
    handles = [
        Line2D(
            [], [], color=palette.of(n), linestyle=line_style(palette, n), linewidth=1.8,
            marker=marker(n), markersize=5, markeredgewidth=0,
        )
        for n in places
    ]  # fmt: skip
    short = [shorten(name, 38 if palette.narrow else 34) for name in names]
    columns = _legend_columns(short, palette)
    made = figure.legend(handles, [" "] * len(short), **legend_place(palette, columns))
    for text, name in zip(made.get_texts(), short, strict=True):  # set later: a label that begins with _ is dropped
        text.set_text(name)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * (-(-len(short) // columns) - 1))


def line_style(palette: Palette, n: int) -> Literal["-", "--", ":", "-."]:
    """Another kind of line each time that the colours begin anew."""
    return _LINES[n // len(palette.series) % len(_LINES)]


def legend_place(palette: Palette, columns: int) -> dict[str, Any]:
    """What `Figure.legend` must be told."""
    return {
        "loc": "outside upper left",
        "ncols": columns,
        "frameon": False,
        "labelcolor": palette.ink,
        "handlelength": 2.2,
        "columnspacing": 1.4,
        "borderpad": 0.1,
    }
