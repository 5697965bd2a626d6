"""Draws a plan: utilisation against bandwidth, and how each method spends its time on the given link."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from atoll._util.units import count_words, seconds_text
from atoll.plan.cost import Array
from atoll.plan.forecast import bandwidth_needed, utilisation
from atoll.plan.line import LEAST_BITS_PER_S, Line
from atoll.plan.method import Method, Model
from atoll.report.canvas import LIGHT, Palette, dress, to_png
from atoll.report.lanes import Lane, Span, clock, modelled_lane
from atoll.report.timeline import draw_lanes, lane_handles
from atoll.report.words import shorten

_POINTS = 640  # of a curve; with fewer, its kinks are cut off
_LEAST_RATE = 1e3  # of the axis, bits per second
_PERIODS = 3
_EDGES = (0.02, 0.999)  # utilisations between which the curves are worth seeing
_MOST_STEPS = 20_000  # of data-parallel in a timeline
_COLOURS = {"data-parallel": 6, "diloco": 1, "streaming-blocking": 2, "streaming-bf16": 3, "streaming": 4, "eager": 0}
_OTHER = 7  # the colour of a run's own method


def write(model: Model, methods: Mapping[str, Method], workers: int, link: Line, target: float, path: Path) -> None:
    """Draws methods, by label, into a PNG file."""
    path.write_bytes(to_png(partial(draw, model, methods, workers, link, target)))


def draw(
    model: Model,
    methods: Mapping[str, Method],
    workers: int,
    link: Line,
    target: float = 0.95,
    palette: Palette = LIGHT,
) -> Figure:
    """Draws curves above, with a line at the target utilisation, and timelines below; each method has its colour."""
    lanes = 0.62 * len(methods)
    figure = Figure(figsize=(8.4, 4.6 + lanes), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3.4, 0.7 + lanes])
    upper.axhline(target, color=palette.muted, linewidth=0.8, zorder=1)
    _draw_curves(upper, palette, model, methods, workers, link)
    _draw_timelines(lower, palette, model, methods, workers, link)
    handles = [
        *(Line2D([], [], color=palette.of(_place(m)), linewidth=2, label=name) for name, m in methods.items()),
        Line2D([], [], color=palette.muted, linewidth=2, label="best possible"),
        Line2D([], [], color=palette.muted, linewidth=1.3, linestyle=(0, (4, 2)), label="as atoll sends"),
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=3, frameon=False, labelcolor=palette.ink, columnspacing=1.6
    )
    return figure


def _place(method: Method) -> int:
    """Returns the place of a method's colour in a palette, the same in every plan."""
    return _COLOURS.get(method.name, _OTHER)


# ---------------------------------------------------------------------- curves


def _draw_curves(
    axes: Axes, palette: Palette, model: Model, methods: Mapping[str, Method], workers: int, link: Line
) -> None:
    rates = _rates(model, methods, workers, link)
    unit, name = (1e9, "Gbit/s") if rates[-1] > 1e10 else (1e6, "Mbit/s")
    dress(axes, palette, x=f"bandwidth of every worker, {name}", y="time spent computing")
    for method in methods.values():
        colour = palette.of(_place(method))
        best, ours = (utilisation(model, method, workers, rates, link, layered=layered) for layered in (True, False))
        axes.plot(rates / unit, ours, color=colour, linewidth=1.3, linestyle=(0, (4, 2)), alpha=0.85)
        axes.plot(rates / unit, best, color=colour, linewidth=2)
    axes.set_xscale("log")
    axes.set_xlim(rates[0] / unit, rates[-1] / unit)
    axes.set_ylim(-0.01, 1.03)
    axes.yaxis.set_major_locator(FixedLocator([0, 0.2, 0.4, 0.6, 0.8, 1]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f} %"))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    here = link.bits_per_s / unit
    if rates[0] <= link.bits_per_s <= rates[-1]:
        axes.axvline(here, color=palette.ink, linewidth=1, zorder=1)
        axes.annotate(
            str(link), (here, 1), xycoords=("data", "axes fraction"), xytext=(0, 2), textcoords="offset points",
            ha="center", va="bottom", color=palette.ink, fontsize=8.5,
        )  # fmt: skip
    titles = f"{count_words(model.parameters)} parameters, {seconds_text(model.step_s)} a step, {workers} workers"
    axes.set_title(titles, loc="left", color=palette.ink, fontsize=10, pad=18)


def _rates(model: Model, methods: Mapping[str, Method], workers: int, link: Line) -> Array:
    """Returns rates from where methods hardly compute to where they hardly wait; the link's rate is among them."""
    low, high = 1e15, 1e3
    for method in methods.values():
        first, last = (bandwidth_needed(model, method, workers, level, link) for level in _EDGES)
        first = max(first, _LEAST_RATE)  # one worker needs none
        low = min(low, first)
        high = max(high, last if np.isfinite(last) else 1e5 * first)
    if np.isfinite(link.bits_per_s):
        low, high = min(low, link.bits_per_s), max(high, link.bits_per_s)
    # Beyond six decades, the interesting part would be a stripe.
    high = min(high, max(1e6 * low, 2 * link.bits_per_s if np.isfinite(link.bits_per_s) else 0.0))
    rates: Array = np.geomspace(low / 1.2, max(high, 10 * low) * 1.2, _POINTS)
    return rates


# ---------------------------------------------------------------------- timelines


def _draw_timelines(
    axes: Axes, palette: Palette, model: Model, methods: Mapping[str, Method], workers: int, link: Line
) -> None:
    """Draws a few periods of each run under way, without the first ones, in which no round has come back."""
    longest = max(method.period for method in methods.values())
    found = {name: _lane(model, method, workers, link, longest) for name, method in methods.items()}
    ends = [periods_s for name, (_, periods_s) in found.items() if not methods[name].gradients]
    ends = ends or [periods_s for _, periods_s in found.values()]
    window_s = max(min(max(ends), _PERIODS * min(ends)), model.step_s)  # or the quickest would hardly be seen
    drawn = [(_place(methods[name]), shorten(name, 60), lane) for name, (lane, _) in found.items()]
    draw_lanes(axes, palette, drawn, window_s, label="time, as atoll sends")
    axes.legend(
        handles=lane_handles(palette, "computing", "line busy"),
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, labelcolor=palette.ink, borderpad=0.1,
    )  # fmt: skip


def _lane(model: Model, method: Method, workers: int, link: Line, longest: int) -> tuple[Lane, float]:
    """Returns the lane of a worker since a period began, and the length of the periods to be shown.

    Several times more periods are simulated than that, because other methods may be slower.
    """
    period, since = method.period, 4 if method.gradients else 3 * method.period
    shown = since + _PERIODS * (longest if method.gradients else period)
    steps = max(shown, since + min(_PERIODS**2 * (longest if method.gradients else period), _MOST_STEPS))
    job = replace(method.job(model, workers, steps), finish=False)
    line = Line(max(link.goodput * link.bits_per_s, LEAST_BITS_PER_S), link.latency_s)
    zero_s, shown_s, end_s = (clock(job, line, step) for step in (since, shown, steps))
    lane = modelled_lane(job, line, 0, (steps - since) * job.step_s / (end_s - zero_s))
    waits, flights = (
        tuple(Span(max(begin - zero_s, 0.0), end - zero_s) for begin, end in spans if end > zero_s)
        for spans in (lane.waits, lane.flights)
    )
    lane = replace(lane, end_s=end_s - zero_s, waits=waits, flights=flights, rows=(0,) * len(flights))
    return lane, shown_s - zero_s
