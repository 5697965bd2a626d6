"""Draws the pictures of a report from the rows of its table."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from atoll._util.units import bytes_text, count_text
from atoll.core.schedule import Schedule
from atoll.plan.line import Line
from atoll.plan.method import Job
from atoll.report.canvas import (
    Draw,
    Palette,
    dress,
    heading,
    legend,
    line_style,
    marker,
    new_figure,
    time_axis,
)
from atoll.report.lanes import clock
from atoll.report.members import draw_members
from atoll.report.record import RunRecord
from atoll.report.table import Row, bytes_sent
from atoll.report.timeline import draw_measured, draw_modelled, is_measured
from atoll.report.words import shorten
from atoll.runs.events import Eval, Step

_POINTS = 300  # more than a screen shows; keeps the page small however long the run
_DOTS = 60  # more of them would hide their line
_TOKENS = attrgetter("tokens")

Points = list[tuple[float, float]]
Place = Callable[[Step | Eval], float]
"""Returns where on the x axis an event belongs."""


def pictures(rows: Sequence[Row], link: Line) -> dict[str, Draw]:
    """Returns every picture that the rows have data for, by its name on the page and in files."""
    found: dict[str, Draw] = {}
    if any(_held_out(row.record, _TOKENS) for row in rows):
        found["loss-tokens"] = partial(_loss_against_tokens, rows)
        found["loss-time"] = partial(_loss_against_time, rows, link)
    found["bytes"] = partial(_bytes_sent, rows)
    if any(is_measured(row.record) for row in rows):
        found["measured"] = partial(draw_measured, rows)
    if any(row.record.views for row in rows):
        found["members"] = partial(draw_members, rows)
    if any(row.record.step for row in rows):
        found["timeline"] = partial(draw_modelled, rows, link)
    if any(_outer_steps(row.record) for row in rows):
        found["outer"] = partial(_outer_gradients, rows)
    return found


# ---------------------------------------------------------------------- loss


def _held_out(record: RunRecord, x: Place) -> Points:
    """Returns some of the held-out losses, the last among them."""
    points = [(x(e), e.loss) for e in record.evals if math.isfinite(e.loss)]
    return points[:: -_stride(points)][::-1]


def _training(record: RunRecord, x: Place) -> Points:
    """Returns training losses, mean over the workers that trained; after the first over neighbouring events too."""
    points = []
    for event in record.steps:
        losses = [loss for loss in event.loss if loss is not None and math.isfinite(loss)]
        if losses:
            points.append((x(event), sum(losses) / len(losses)))
    size = _stride(points)
    groups = [points[:1], *(points[at : at + size] for at in range(1, len(points), size))] if points else []
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _stride(points: Sequence[object]) -> int:
    return -(-len(points) // _POINTS) or 1


def _loss_against_tokens(rows: Sequence[Row], palette: Palette) -> Figure:
    figure, axes = _draw_losses(rows, [_TOKENS] * len(rows), palette)
    axes.set_xlabel("tokens, all workers", color=palette.muted)
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count_text(x)))
    return figure


def _loss_against_time(rows: Sequence[Row], link: Line, palette: Palette) -> Figure:
    places = [partial(_modelled_s, row.job, link) for row in rows]
    figure, axes = _draw_losses(rows, places, palette)
    highest = axes.get_ylim()[1]
    ends, begins = [], []
    for row, at in zip(rows, places, strict=True):
        times = [t for t, loss in _held_out(row.record, at) if t > 0 and loss <= highest]
        ends += times[-1:]
        begins += times[:1]
    time_axis(axes, palette, f"time at {link}", begins, ends)
    return figure


def _modelled_s(job: Job, link: Line, event: Step | Eval) -> float:
    return clock(job, link, event.step)


def _draw_losses(rows: Sequence[Row], places: Sequence[Place], palette: Palette) -> tuple[Figure, Axes]:
    figure = new_figure(3.9)
    axes = figure.add_subplot()
    dress(axes, palette, x="", y="loss, nats per token")
    for n, (row, x) in enumerate(zip(rows, places, strict=True)):
        colour, style = palette.of(n), line_style(palette, n)
        if faint := _training(row.record, x):
            axes.plot(*zip(*faint, strict=True), color=colour, linewidth=0.9, alpha=0.3, zorder=2)
        if line := _held_out(row.record, x):
            dots: dict[str, Any] = (
                {"marker": "o", "markersize": 3.6, "markeredgewidth": 0} if len(line) <= _DOTS else {}
            )
            axes.plot(*zip(*line, strict=True), color=colour, linestyle=style, linewidth=1.8, zorder=3, **dots)
            axes.plot(*line[-1], marker=marker(n), color=colour, markersize=6, markeredgewidth=0, zorder=4)
    axes.set_ylim(*_loss_range([row.record for row in rows]))
    legend(figure, palette, [row.name for row in rows])
    return figure, axes


def _loss_range(records: Sequence[RunRecord]) -> tuple[float, float]:
    """Returns the losses to show: of one run all, of several what tells them apart, without the steep beginning."""
    curves = [points for r in records if (points := _held_out(r, _TOKENS))]
    lowest = min(y for points in curves for _, y in points)
    early = [next((y for x, y in points if x >= 0.12 * points[-1][0]), points[-1][1]) for points in curves]
    trained = [points for r in records if (points := _training(r, _TOKENS))]
    shown_from = 0.0 if len(records) == 1 else 0.5
    late = [y for points in trained for x, y in points if x >= shown_from * points[-1][0]]
    tops = [*early, *(points[-1][1] for points in curves), *late, lowest]
    highest = max(top for top in tops if top <= 4 * abs(lowest) + 4)  # what no training has is far below
    lowest = min(lowest, *late, highest)
    room = max(highest - lowest, 0.02 * abs(highest), 1e-6)
    return lowest - 0.06 * room, highest + 0.06 * room


# ---------------------------------------------------------------------- bytes


def _bytes_sent(rows: Sequence[Row], palette: Palette) -> Figure:
    sent = bytes_sent(rows)
    figure = new_figure(0.75 + 0.52 * len(sent))
    axes = figure.add_subplot()
    dress(axes, palette, x="payload bytes of a worker", y="", grid="x")
    for y, (n, name, size, words) in enumerate(sent):
        axes.barh(y, size, height=0.36, color=palette.muted if n is None else palette.of(n))
        heading(axes, palette, y - 0.28, shorten(name, 70), words)
    axes.set_xlim(0, max([1.0, *(size for _, _, size, _ in sent)]))
    axes.set_ylim(len(sent) - 0.65, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: bytes_text(x).replace(".00", "").replace(".0 ", " ")))
    return figure


# ---------------------------------------------------------------------- outer gradients


def _outer_steps(record: RunRecord) -> list[tuple[int, float, float | None]]:
    """Returns (step, norm over all fragments, mean cosine) of each period in which every fragment had its round."""
    count = len(record.start.payload_bytes)
    if record.gradients or not record.rounds or not count:
        return []
    schedule = Schedule(max(record.start.period, 1), count, 0)
    laps: dict[int, dict[int, tuple[int, float, float | None]]] = {}
    for r in record.rounds:
        # The last exchange of a run is not a round of a period: it holds what was left.
        if r.fragment < count and schedule.is_send(r.fragment, r.step) and math.isfinite(r.norm):
            lap = (r.step - schedule.offset(r.fragment)) // schedule.period
            laps.setdefault(lap, {})[r.fragment] = (r.step, r.norm, r.cosine)
    points = []
    for _, parts in sorted(laps.items()):
        if len(parts) == count:
            steps, norms, cosines = zip(*parts.values(), strict=True)
            agreed = [c for c in cosines if c is not None and math.isfinite(c)]
            points.append((max(steps), math.hypot(*norms), sum(agreed) / len(agreed) if agreed else None))
    return points


def _outer_gradients(rows: Sequence[Row], palette: Palette) -> Figure:
    figure = new_figure(3.4)
    norm, cosine = figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    shown = []
    for n, row in enumerate(rows):
        if points := _outer_steps(row.record):
            shown.append(n)
            looks: dict[str, Any] = {"color": palette.of(n), "linestyle": line_style(palette, n), "linewidth": 1.5}
            kept = points[:: _stride(points)]
            norm.plot([s for s, _, _ in kept], [v for _, v, _ in kept], **looks)
            pairs = [(s, c) for s, _, c in kept if c is not None]
            cosine.plot([s for s, _ in pairs], [c for _, c in pairs], **looks)
    dress(norm, palette, x="inner step", y="norm of the mean delta")
    dress(cosine, palette, x="inner step", y="cosine similarity between workers")
    for axes in (norm, cosine):
        axes.set_xlim(left=0)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count_text(x)))
    norm.set_ylim(bottom=0)
    legend(figure, palette, [rows[n].name for n in shown], shown)
    return figure
