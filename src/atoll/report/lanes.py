"""Computes when each worker of a run computed, waited and had rounds under way: as measured, and as modelled."""

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from atoll.plan.line import Line
from atoll.plan.method import Job
from atoll.plan.simulate import stops
from atoll.report.record import EventLog, RunRecord
from atoll.runs.events import RoundApplied


class Span(NamedTuple):
    """Holds the two ends of a time in seconds."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Holds the times of one worker, in seconds since the first worker of its run began."""

    worker: int
    """The worker, or the first of several that behave alike."""
    begin_s: float
    end_s: float
    waits: tuple[Span, ...]
    """Exposed waits in order, none over another."""
    flights: tuple[Span, ...]
    """When rounds were under way, from send to arrival; modelled: when the link is busy."""
    rounds: tuple[RoundApplied, ...] = ()
    """The rounds of these flights, if they were measured."""
    rows: tuple[int, ...]
    """For each flight a row in which none is over another."""
    utilisation: float | None
    """The share of the whole run's time in which it did not wait."""


# ---------------------------------------------------------------------- measured


def lanes(record: RunRecord, *, aligned: bool = True) -> list[Lane]:
    """Returns a lane per worker, aligned by their machines' clocks or else as if all had begun together."""
    began = [process.start.began for process in record.processes]
    aligned = aligned and all(time > 0 for time in began)  # NaN and 0: unknown
    found = []
    for process in record.processes:
        offset_s = process.start.began - min(began) if aligned else 0.0
        found += [_lane(process, worker, offset_s) for worker in process.workers]
    return sorted(found, key=lambda lane: lane.worker)


def _lane(log: EventLog, worker: int, offset_s: float) -> Lane:
    timed = [r for r in log.rounds if r.worker == worker and math.isfinite(r.opened_s) and math.isfinite(r.done_s)]
    timed.sort(key=lambda r: (r.opened_s, r.done_s))
    flights = [Span(offset_s + r.opened_s, offset_s + max(r.done_s, r.opened_s)) for r in timed]
    seconds = log.last.seconds if log.last and math.isfinite(log.last.seconds) else 0.0
    return Lane(
        worker=worker,
        begin_s=offset_s,
        end_s=max([offset_s + seconds, *(span.end_s for span in flights)]),
        waits=tuple(waits(zip((f.end_s for f in flights), (r.waited_s for r in timed), strict=True), offset_s)),
        flights=tuple(flights),
        rounds=tuple(timed),
        rows=tuple(rows(flights)),
        utilisation=log.busy_share(worker),
    )


def waits(ended: Iterable[tuple[float, float]], begin_s: float) -> Iterator[Span]:
    """Yields the waits by the ends of rounds and the seconds waited for each: one wait is after the other."""
    free_s = begin_s
    for end_s, waited_s in sorted(ended, key=itemgetter(0)):
        if (wait := wait_until(end_s, waited_s, free_s)) is not None:
            yield wait
            free_s = wait.end_s


def wait_until(end_s: float, waited_s: float, free_s: float) -> Span | None:
    """Returns the wait for a round that was done at `end_s`; None if the worker did not wait after `free_s`."""
    wait = Span(max(end_s - waited_s, free_s), end_s)
    return wait if wait.end_s > wait.begin_s else None  # also for NaN


def rows(spans: Sequence[Span]) -> list[int]:
    """Returns for each span, in order of their beginnings, the lowest row in which the one before is over."""
    ends: list[float] = []
    found = []
    for span in spans:
        row = next((row for row, end_s in enumerate(ends) if end_s <= span.begin_s), len(ends))
        ends[row:] = [span.end_s, *ends[row + 1 :]]
        found.append(row)
    return found


# ---------------------------------------------------------------------- modelled


def modelled_lane(job: Job, link: Line, lane: int, utilisation: float, until_s: float = math.inf) -> Lane:
    """Returns how workers of a lane of the planner would begin, with one machine for each on such a link."""
    waited: list[Span] = []
    carried: list[Span] = []
    for stop in stops(job, link):
        if stop.reached_s[lane] >= until_s:
            break
        if stop.sent:
            carried.append(Span(*stop.carried_s[lane]))
        if stop.left_s[lane] > stop.reached_s[lane]:
            waited.append(Span(stop.reached_s[lane], stop.left_s[lane]))
    return Lane(
        worker=job.lanes()[lane][0],
        begin_s=0.0,
        end_s=clock(job, link, job.steps),
        waits=tuple(waited),
        flights=tuple(carried),
        rows=(0,) * len(carried),
        utilisation=utilisation,
    )


def modelled_lanes(
    runs: Sequence[tuple[Job, float]], link: Line
) -> tuple[float, list[tuple[int, tuple[int, ...], Lane]]]:
    """Returns how runs, jobs with their utilisation, would begin on such a link: the seconds to show, and lanes.

    Each lane has the place of its run and the workers that it stands for; () if it stands for all.
    """
    moving = [job for job, _ in runs if job.steps]
    outer = [job for job in moving if not job.gradients] or moving
    window_s = window([clock(job, link, min(3 * (1 if job.gradients else job.period), job.steps)) for job in outer])
    found = []
    for n, (job, share) in enumerate(runs):
        for lane, workers in enumerate(job.lanes()):
            named = workers if len(job.lanes()) > 1 else ()
            found.append((n, named, modelled_lane(job, link, lane, share, window_s)))
    return window_s, found


def window(spans: Sequence[float]) -> float:
    """Returns the seconds to show: the longest of the runs' own, unless that would hide the shortest."""
    return max(min(max(spans), 4 * min(spans)), 1e-6) if spans else 1e-6


def clock(job: Job, link: Line, step: int) -> float:
    """Returns the modelled seconds until the slowest worker has left this step."""
    steps, waited_s = _waited(job, link)
    return step * job.step_s + waited_s[bisect_right(steps, step) - 1]


@lru_cache(maxsize=64)
def _waited(job: Job, link: Line) -> tuple[list[int], list[float]]:
    """Returns the steps after which a worker waited, and the seconds that the slowest had waited by then."""
    steps, waited_s = [0], [0.0]
    for stop in stops(job, link):
        longest_s = max(left - stop.step * job.step_s for left in stop.left_s)
        if longest_s > waited_s[-1]:
            steps.append(stop.step)
            waited_s.append(longest_s)
    return steps, waited_s
