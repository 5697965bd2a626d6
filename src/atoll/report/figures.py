"""Draws the pictures of a report from the records of runs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from atoll._util.units import bytes_text, count_text, loss_text, ratio_text, seconds_text, share_text
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
    shorten,
    time_axis,
)
from atoll.report.record import RunRecord, jobs
from atoll.report.table import Row
from atoll.report.timeline import MOST_WORKERS, clock, draw_measured, draw_modelled, is_measured

_POINTS = 300  # more than a screen shows; keeps the page small however long the run
_DOTS = 60  # more of them would hide their line

Points = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Picture:
    """Holds a figure with its title, caption and description."""

    key: str
    """File name without ending, and the id on the page."""
    topic: str
    """Its title in one or two words."""
    title: str
    caption: str
    alt: str
    """Describes it in numbers, for screen readers."""
    draw: Draw


def pictures(records: Sequence[RunRecord], rows: Sequence[Row], link: Line) -> list[Picture]:
    """Returns every picture that the records have data for."""
    return [*_of_losses(records, rows, link), *_of_bytes_and_time(records, rows, link), *_of_rounds(records)]


def _of_losses(records: Sequence[RunRecord], rows: Sequence[Row], link: Line) -> Iterator[Picture]:
    if not any(_held_out(r, lambda step, tokens: tokens) for r in records):
        return
    yield Picture(
        "loss-tokens",
        "Loss",
        "Loss against tokens",
        "Held-out loss of the outer parameters (line; a dot is an evaluation) and training loss, mean over the "
        "workers (faint). Between two rounds, the outer parameters are those of an earlier step.",
        f"Held-out loss against tokens. At the end, in nats per token: {_each(rows, lambda r: loss_text(r.loss))}.",
        partial(_loss_against_tokens, records),
    )
    quickest = " (the quickest of the runs' own)" if len(records) > 1 else ""
    to_the_end = _each(rows, lambda r: seconds_text(r.link_time.total_s))
    yield Picture(
        "loss-time",
        "Time",
        f"Loss against time at {link}",
        f"The same losses over the time that each run would take with one machine per worker and a link of "
        f"{link} for each. Modelled from the measured compute time of a step{quickest} and the bytes of "
        f"each round.",
        f"Held-out loss against modelled time. To the end: {to_the_end}.",
        partial(_loss_against_time, records, link),
    )


def _of_bytes_and_time(records: Sequence[RunRecord], rows: Sequence[Row], link: Line) -> Iterator[Picture]:
    yield Picture(
        "bytes",
        "Bytes",
        "Bytes sent per worker",
        "Payloads that one worker handed to its link over the run, each counted once. The axis is logarithmic.",
        f"Bytes sent per worker. {_each(rows, lambda r: bytes_text(r.sent_bytes))}.",
        partial(_bytes_sent, rows),
    )
    if any(is_measured(r) for r in records):
        yield Picture(
            "measured",
            "Measured",
            "Compute and communication, measured",
            "The first moments of each worker, as measured: the thick bar is its processor, pale while "
            "it waited, each thin bar below it a round from sending to arrival. Workers are aligned by their machines' "
            f"clocks if these are close; at most {MOST_WORKERS} of a run are drawn. The share is over the whole run.",
            f"Share of the time not spent waiting, measured. {_each(rows, _measured_share)}.",
            partial(draw_measured, records),
        )
    if any(r.step for r in records):
        yield Picture(
            "timeline",
            "Timeline",
            f"Compute and communication at {link}, modelled",
            "How each run would begin with one machine per worker: the thick bar is a worker's processor, the thin "
            "one below it its link. The share is over the whole run.",
            f"Share of the time spent computing. {_each(rows, lambda r: share_text(r.link_time.utilisation))}.",
            partial(draw_modelled, records, rows, link),
        )


def _of_rounds(records: Sequence[RunRecord]) -> Iterator[Picture]:
    if any(_outer_steps(r) for r in records):
        yield Picture(
            "outer",
            "Outer gradients",
            "Outer gradients",
            "Length of the mean delta over all fragments, and how much the workers' deltas agree (1: the same "
            "direction, 0: unrelated), once a period.",
            "Norm of the outer gradient, and cosine similarity between workers, over inner steps.",
            partial(_outer_gradients, records),
        )


def _each(rows: Sequence[Row], text: Callable[[Row], str]) -> str:
    return "; ".join(f"{row.name}: {text(row)}" for row in rows)


def _measured_share(row: Row) -> str:
    return "not measured" if row.utilisation is None else share_text(row.utilisation)


# ---------------------------------------------------------------------- loss


def _held_out(record: RunRecord, x: Callable[[int, int], float]) -> Points:
    """Returns some of the held-out losses, the last among them."""
    points = [(x(e.step, e.tokens), e.loss) for e in record.evals if math.isfinite(e.loss)]
    return points[:: -_stride(points)][::-1]


def _training(record: RunRecord, x: Callable[[int, int], float]) -> Points:
    """Returns training losses, mean over the workers that trained and over neighbouring events."""
    points = []
    for event in record.steps:
        losses = [loss for loss in event.loss if loss is not None and math.isfinite(loss)]
        if losses:
            points.append((x(event.step, event.tokens), sum(losses) / len(losses)))
    size = _stride(points)
    groups = [points[at : at + size] for at in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def _stride(points: Sequence[object]) -> int:
    return -(-len(points) // _POINTS) or 1


def _loss_against_tokens(records: Sequence[RunRecord], palette: Palette) -> Figure:
    figure = new_figure(palette, 3.9, narrow_height=3.5)
    axes = figure.add_subplot()
    dress(axes, palette, x="tokens, all workers", y="loss, nats per token")
    for n, record in enumerate(records):
        _loss_lines(axes, palette, n, record, lambda step, tokens: tokens)
    axes.set_ylim(*_loss_range(records))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(4 if palette.narrow else 7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: count_text(x)))
    legend(figure, palette, [r.name for r in records])
    return figure


def _loss_against_time(records: Sequence[RunRecord], link: Line, palette: Palette) -> Figure:
    figure = new_figure(palette, 3.9, narrow_height=3.5)
    axes = figure.add_subplot()
    dress(axes, palette, x="", y="loss, nats per token")
    lowest, highest = _loss_range(records)
    ends, begins = [], []
    for n, (record, job) in enumerate(zip(records, jobs(records), strict=True)):
        at = partial(_modelled, job, link)
        _loss_lines(axes, palette, n, record, at)
        times = [t for t, loss in _held_out(record, at) if t > 0 and loss <= highest]
        ends += times[-1:]
        begins += times[:1]
    axes.set_ylim(lowest, highest)
    time_axis(axes, palette, f"time at {link}", begins, ends)
    legend(figure, palette, [r.name for r in records])
    return figure


def _modelled(job: Job, link: Line, step: int, tokens: int) -> float:
    return clock(job, link, step)


def _loss_lines(axes: Axes, palette: Palette, n: int, record: RunRecord, x: Callable[[int, int], float]) -> None:
    colour, style = palette.of(n), line_style(palette, n)
    if faint := _training(record, x):
        axes.plot(*zip(*faint, strict=True), color=colour, linewidth=0.9, alpha=0.3, zorder=2)
    if line := _held_out(record, x):
        dots: dict[str, Any] = {"marker": "o", "markersize": 3.6, "markeredgewidth": 0} if len(line) <= _DOTS else {}
        axes.plot(*zip(*line, strict=True), color=colour, linestyle=style, linewidth=1.8, zorder=3, **dots)
        axes.plot(*line[-1], marker=marker(n), color=colour, markersize=6, markeredgewidth=0, zorder=4)


def _loss_range(records: Sequence[RunRecord]) -> tuple[float, float]:
    """Returns the losses to show: every end and the last half of training, without the steep beginning."""
    curves = [points for r in records if (points := _held_out(r, lambda step, tokens: tokens))]
    lowest = min(y for points in curves for _, y in points)
    early = [next((y for x, y in points if x >= 0.12 * points[-1][0]), points[-1][1]) for points in curves]
    trained = [points for r in records if (points := _training(r, lambda step, tokens: tokens))]
    late = [y for points in trained for x, y in points if x >= 0.5 * points[-1][0]]
    tops = [*early, *(points[-1][1] for points in curves), *late, lowest]
    highest = max(top for top in tops if top <= 4 * abs(lowest) + 4)  # what no training has is far below
    lowest = min(lowest, *late, highest)
    room = max(highest - lowest, 0.02 * abs(highest), 1e-6)
    return lowest - 0.06 * room, highest + 0.06 * room


# ---------------------------------------------------------------------- bytes


def _bytes_sent(rows: Sequence[Row], palette: Palette) -> Figure:
    figure = new_figure(palette, 0.75 + 0.52 * len(rows), narrow_height=0.75 + 0.52 * len(rows))
    axes = figure.add_subplot()
    dress(axes, palette, x="bytes, logarithmic", y="", grid="x")
    sizes = [row.sent_bytes for row in rows if row.sent_bytes > 0]
    low = 10.0 ** (math.floor(math.log10(min(sizes))) - 1) if sizes else 1.0
    high = max(sizes, default=10.0)
    axes.set_xscale("log")
    axes.set_xlim(low, 10.0 ** math.ceil(math.log10(high) + 0.01))
    for n, row in enumerate(rows):
        if row.sent_bytes > 0:
            axes.barh(n, row.sent_bytes - low, left=low, height=0.36, color=palette.of(n))
        said = "sends nothing" if not row.sent_bytes else bytes_text(row.sent_bytes)
        if row.fewer is not None and not row.is_reference:
            said += f", {ratio_text(row.fewer)}"
        heading(axes, palette, n - 0.28, shorten(row.name, 26 if palette.narrow else 70), said)
    axes.set_ylim(len(rows) - 0.65, -0.75)
    axes.yaxis.set_major_locator(NullLocator())
    decades = range(round(math.log10(low)), math.ceil(math.log10(high) + 0.01) + 1)
    axes.xaxis.set_major_locator(FixedLocator([10.0**d for d in decades][:: 2 if palette.narrow else 1]))
    axes.xaxis.set_minor_locator(NullLocator())
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


def _outer_gradients(records: Sequence[RunRecord], palette: Palette) -> Figure:
    figure = new_figure(palette, 3.4, narrow_height=5.2)
    norm, cosine = figure.subplots(2, 1) if palette.narrow else figure.subplots(1, 2, gridspec_kw={"wspace": 0.08})
    shown = []
    for n, record in enumerate(records):
        if points := _outer_steps(record):
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
    legend(figure, palette, [records[n].name for n in shown], shown)
    return figure
