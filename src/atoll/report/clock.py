"""When a run would be where on a given link, and axes that show it."""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from atoll.plan.job import Job
from atoll.plan.link import Link
from atoll.plan.simulate import stops
from atoll.report.canvas import Palette


@lru_cache(maxsize=64)
def _waits(job: Job, link: Link) -> tuple[list[int], list[float]]:
    """Steps after which somebody waited, and the seconds waited up to there by the most patient worker."""
    steps, waits = [0], [0.0]
    for stop in stops(job, link):
        waited = max(left - stop.step * job.step_s for left in stop.left_s)
        if waited > waits[-1]:
            steps.append(stop.step)
            waits.append(waited)
    return steps, waits


def clock(job: Job, link: Link, step: int) -> float:
    """Seconds until the slowest worker has left this step."""
    steps, waits = _waits(job, link)
    return step * job.step_s + waits[bisect_right(steps, step) - 1]


def window(jobs: Sequence[Job], link: Link) -> float:
    """Three periods of the slower runs, but not so much that those of the faster ones vanish."""
    moving = [job for job in jobs if job.steps]
    outer = [job for job in moving if not job.gradients] or moving
    spans = [clock(job, link, min(3 * (1 if job.gradients else job.period), job.steps)) for job in outer]
    return max(min(max(spans), 4 * min(spans)), 1e-6)


_DAY = 86400.0
_NICE = [n * s for s in (1e-3, 1e-2, 0.1, 1.0) for n in (1, 2, 5)] + [10.0, 20.0, 30.0]
_NICE += [n * 60.0 for n in (1, 2, 5, 10, 20, 30)] + [n * 3600.0 for n in (1, 2, 5, 12)]
_NICE += [n * _DAY for n in (1, 2, 5, 10, 20, 50, 100)] + [n * 365 * _DAY for n in (1, 2, 5, 10, 100, 1000)]
_COARSE = [1e-3, 1e-2, 0.1, 1.0, 10.0, 60.0, 600.0, 3600.0, 36000.0, 4 * _DAY, 40 * _DAY, 365 * _DAY, 3650 * _DAY]


def time_axis(axes: Axes, palette: Palette, label: str, begins: Sequence[float], ends: Sequence[float]) -> None:
    """Logarithmic where the runs' times differ so much that a linear axis would hide the short ones."""
    most = 4 if palette.narrow else 9
    if not ends or max(ends) < 6 * min(ends):
        linear_time_axis(axes, palette, label, 1.05 * max(ends, default=1.0))
        return
    low, high = min(begins) / 1.3, max(ends) * 1.3
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    for candidates in (_NICE, _COARSE, _COARSE[::2]):
        ticks = [t for t in candidates if low <= t <= high]
        if len(ticks) <= most:
            break
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FixedFormatter([_tick(t) for t in ticks]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(f"{label}, logarithmic", color=palette.muted)


def linear_time_axis(axes: Axes, palette: Palette, label: str, longest_s: float) -> None:
    """From 0, with round numbers of a unit that fits."""
    unit_s, unit = unit_of(longest_s)
    ticks = MaxNLocator(5 if palette.narrow else 9, steps=[1, 2, 5, 10]).tick_values(0, longest_s / unit_s)
    axes.set_xlim(0, longest_s)
    axes.xaxis.set_major_locator(FixedLocator([tick * unit_s for tick in ticks if tick * unit_s <= longest_s]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x / unit_s:g}"))
    axes.set_xlabel(f"{label}, {unit}", color=palette.muted)


def unit_of(longest_s: float) -> tuple[float, str]:
    """The unit, in seconds and by name, in which a time is a handy number."""
    units = [(365 * _DAY, "years"), (_DAY, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds")]
    return next(((s, unit) for s, unit in units if longest_s >= 2 * s), (1e-3, "milliseconds"))


def _tick(seconds: float) -> str:
    for size, unit in ((365 * _DAY, "y"), (_DAY, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= size:
            return f"{seconds / size:g} {unit}"
    return f"{seconds * 1e3:g} ms"
