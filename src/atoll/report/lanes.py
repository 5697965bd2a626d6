"""Computes when each worker of a run waited and had rounds under way, as measured."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from atoll.report.record import EventLog, RunRecord
from atoll.runs.events import Round, utilisation


class Span(NamedTuple):
    """Holds the two ends of a time in seconds."""

    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Lane:
    """Holds the times of one worker, in seconds since the first worker of its run began."""

    worker: int
    begin_s: float
    end_s: float
    waits: tuple[Span, ...]
    """Exposed waits in order, none over another."""
    flights: tuple[tuple[Round, Span], ...]
    """Rounds from send to arrival, in order of their sends."""
    rows: tuple[int, ...]
    """For each of them a row in which none is over another."""
    utilisation: float | None
    """The share of the whole run's time in which it did not wait."""


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
    flights = [(r, Span(offset_s + r.opened_s, offset_s + max(r.done_s, r.opened_s))) for r in timed]
    flights.sort(key=lambda flight: flight[1])
    last = log.last
    waited_s = last.wait_s[worker] if last and worker < len(last.wait_s) else 0.0
    seconds = last.seconds if last and math.isfinite(last.seconds) else 0.0
    return Lane(
        worker=worker,
        begin_s=offset_s,
        end_s=max([offset_s + seconds, *(span.end_s for _, span in flights)]),
        waits=tuple(_waits(flights, offset_s)),
        flights=tuple(flights),
        rows=tuple(rows([span for _, span in flights])),
        utilisation=utilisation(waited_s, seconds),
    )


def _waits(flights: Iterable[tuple[Round, Span]], begin_s: float) -> Iterable[Span]:
    """Yields the waits: a worker waits until a round is done, and for one round after the other."""
    free_s = begin_s
    for r, span in sorted(flights, key=lambda flight: flight[1].end_s):
        wait = Span(max(span.end_s - r.waited_s, free_s), span.end_s)
        if wait.end_s > wait.begin_s:  # false for NaN
            yield wait
            free_s = wait.end_s


def rows(spans: Sequence[Span]) -> list[int]:
    """Returns for each span, in order of their beginnings, the lowest row in which the one before is over."""
    ends: list[float] = []
    found = []
    for span in spans:
        row = next((row for row, end_s in enumerate(ends) if end_s <= span.begin_s), len(ends))
        ends[row:] = [span.end_s, *ends[row + 1 :]]
        found.append(row)
    return found
