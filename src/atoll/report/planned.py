"""Draws a plan: utilisation against bandwidth, and how each method spends its time on the given link."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from atoll._util.units import count_words, seconds_text, share_text
from atoll.plan.cost import Array
from atoll.plan.forecast import bandwidth_needed, utilisation
from atoll.plan.line import LEAST_BITS_PER_S, Line
from atoll.plan.method import Method, Model
from atoll.plan.simulate import stops
from atoll.report.canvas import LIGHT, Palette, dress, heading, linear_time_axis, shorten, to_png

_POINTS = 640  # of a curve; with fewer, its kinks are cut off
_LEAST_RATE = 1e3  # of the axis, bits per second
_PERIODS = 3
_EDGES = (0.02, 0.999)  # utilisations between which the curves are worth seeing
_MOST_STEPS = 20_000  # of data-parallel in a timeline
_MOST_BARS = 4000  # of one method; more would be thinner than a pixel
_COLOURS = {"data-parallel": 6, "diloco": 1, "streaming-blocking": 2, "streaming-bf16": 3, "streaming": 4, "eager": 0}
_OTHER = 7  # the colour of a run's own method


def write(model: Model, methods: Mapping[str, Method], workers: int, link: Line, target: float, path: Path) -> None:
    """Draw methods, by label, into a PNG file."""
    path.write_bytes(to_png(partial(draw, model, methods, workers, link, target)))


def draw(
    model: Model,
    methods: Mapping[str, Method],
    workers: int,
    link: Line,
    target: float = 0.95,
    palette: Palette = LIGHT,
) -> Figure:
    """Draw curves above, with a line at the target utilisation, and timelines below; each method has its colour."""
    lanes = 0.62 * len(methods)
    figure = Figure(figsize=(8.4, 4.6 + lanes), layout="constrained")
    upper, lower = figure.subplots(2, 1, height_ratios=[3.4, 0.7 + lanes])
    upper.axhline(target, color=palette.muted, linewidth=0.8, zorder=1)
    _draw_curves(upper, palette, model, methods, workers, link)
    _draw_timelines(lower, palette, model, methods, workers, link)
    handles = [
        *(Line2D([], [], color=_colour(palette, m), linewidth=2, label=name) for name, m in methods.items()),
        Line2D([], [], color=palette.muted, linewidth=2, label="best possible"),
        Line2D([], [], color=palette.muted, linewidth=1.3, linestyle=(0, (4, 2)), label="as atoll sends"),
    ]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=3, frameon=False, labelcolor=palette.ink, columnspacing=1.6
    )
    return figure


def _colour(palette: Palette, method: Method) -> str:
    """Return a method's colour, the same in every plan."""
    return palette.of(_COLOURS.get(method.name, _OTHER))


# ---------------------------------------------------------------------- curves


def _draw_curves(
    axes: Axes, palette: Palette, model: Model, methods: Mapping[str, Method], workers: int, link: Line
) -> None:
    rates = _rates(model, methods, workers, link)
    unit, name = (1e9, "Gbit/s") if rates[-1] > 1e10 else (1e6, "Mbit/s")
    dress(axes, palette, x=f"bandwidth of every worker, {name}", y="time spent computing")
    for method in methods.values():
        colour = _colour(palette, method)
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
    """Return rates from where methods hardly compute to where they hardly wait; the link's rate is among them."""
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
    """Draw a few periods of each run under way, without the first ones, in which no round has come back."""
    dress(axes, palette, x="", y="", grid="x")
    longest = max(method.period for method in methods.values())
    timelines = [_timeline(model, method, workers, link, longest) for method in methods.values()]
    paired = list(zip(timelines, methods.values(), strict=True))
    ends = [t.periods_s for t, method in paired if not method.gradients] or [t.periods_s for t in timelines]
    window_s = max(min(max(ends), _PERIODS * min(ends)), model.step_s)  # or the quickest would hardly be seen
    for n, ((name, method), timeline) in enumerate(zip(methods.items(), timelines, strict=True)):
        _draw_lane(axes, palette, _colour(palette, method), n, timeline, window_s)
        heading(axes, palette, n - 0.3, shorten(name, 60), f"{share_text(timeline.share)} computing")
    axes.set_ylim(len(methods) - 0.45, -0.8)
    axes.yaxis.set_major_locator(NullLocator())
    linear_time_axis(axes, palette, "time, as atoll sends", window_s)
    axes.legend(
        handles=[
            Patch(facecolor=palette.muted, label="computing"),
            Patch(facecolor=palette.idle, edgecolor=palette.grid, label="waiting"),
            Line2D([], [], color=palette.muted, alpha=0.6, linewidth=3, label="line busy"),
        ],
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=3, frameon=False, labelcolor=palette.ink, borderpad=0.1,
    )  # fmt: skip


class _Timeline(NamedTuple):
    """Holds how a worker spends its time, as (begin, end) in seconds since the beginning of a period."""

    computing: list[tuple[float, float]]
    waiting: list[tuple[float, float]]
    carrying: list[tuple[float, float]]
    """When the line is busy."""
    share: float
    """Computing, of all the time."""
    periods_s: float
    """Length of the periods to be shown."""


def _timeline(model: Model, method: Method, workers: int, link: Line, longest: int) -> _Timeline:
    """Simulate several times more periods than are shown, because other methods may be slower."""
    period, since = method.period, 4 if method.gradients else 3 * method.period
    shown = since + _PERIODS * (longest if method.gradients else period)
    steps = max(shown, since + min(_PERIODS**2 * (longest if method.gradients else period), _MOST_STEPS))
    job = replace(method.job(model, workers, steps), finish=False)
    waiting: list[tuple[float, float]] = []
    carrying: list[tuple[float, float]] = []
    waited = {since: 0.0, shown: 0.0, steps: 0.0}
    rate = max(link.goodput * link.bits_per_s, LEAST_BITS_PER_S)
    for stop in stops(job, Line(rate, link.latency_s)):
        carrying += stop.carried_s[:1]
        if stop.left_s[0] > stop.reached_s[0]:
            waiting.append((stop.reached_s[0], stop.left_s[0]))
        waited |= {step: stop.left_s[0] - stop.step * job.step_s for step in waited if stop.step <= step}
    zero, shown_s, end = (step * job.step_s + waited[step] for step in (since, shown, steps))
    waiting, carrying = (_clipped(spans, zero) for spans in (waiting, carrying))
    edges = [0.0, *(edge for span in waiting for edge in span), end - zero]
    computing = [(begin, stop) for begin, stop in zip(edges[::2], edges[1::2], strict=True) if stop > begin]
    return _Timeline(computing, waiting, carrying, (steps - since) * job.step_s / (end - zero), shown_s - zero)


def _clipped(spans: list[tuple[float, float]], zero: float) -> list[tuple[float, float]]:
    """Return what is left of spans after a time, counted from then."""
    return [(max(begin - zero, 0.0), end - zero) for begin, end in spans if end > zero]


def _draw_lane(axes: Axes, palette: Palette, colour: str, n: int, timeline: _Timeline, window_s: float) -> None:
    for spans, face, alpha, low, height in (
        (timeline.computing, colour, 1.0, -0.24, 0.36),
        (timeline.waiting, palette.idle, 1.0, -0.24, 0.36),
        (timeline.carrying, colour, 0.6, 0.17, 0.11),
    ):
        bars = [(begin, min(end, window_s) - begin) for begin, end in spans if begin < window_s]
        axes.broken_barh(
            [bar for bar in bars if bar[1] > 0][:_MOST_BARS],
            (n + low, height), facecolor=face, alpha=alpha, linewidth=0,
        )  # fmt: skip
