"""Adds to a worker's events what it exchanges with each other worker, and how fast the lines are."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from atoll.link.net.traffic import Line
from atoll.link.seat import Seat
from atoll.runs.events import End, Event, Sink, Step
from atoll.runs.lines import Lines
from atoll.train.ranks.worker_ranks import WorkerRanks

EVERY_S: Final = 5.0
"""Seconds between two events of the lines, at least."""


class LineLog:
    """Passes events to a sink, with `Lines` before a `Step` now and then, and before the `End`.

    Ranks that exchange a shard each add up their bytes: so every rank of such a worker has one.

    Args:
        sink: Takes the events.
        seat: This worker's place in the run.
        ranks: The worker's ranks.
        lines: Returns worker -> what has been exchanged with it since this process joined.
        past: Events of the run before it was resumed.
    """

    def __init__(
        self,
        sink: Sink,
        seat: Seat,
        ranks: WorkerRanks,
        lines: Callable[[], Mapping[int, Line]],
        past: Iterable[Event] = (),
    ) -> None:
        self._sink = sink
        self._seat = seat
        self._ranks = ranks
        self._lines = lines
        self._before = [0] * 2 * seat.workers  # bytes sent to each worker and received from it, by earlier processes
        self._next_s = -float("inf")
        for event in past:
            if isinstance(event, Lines):
                self._before = [*event.sent_bytes, *event.received_bytes]

    def write(self, event: Event) -> None:
        """Passes an event on, after what there is to tell of the lines."""
        if isinstance(event, Step | End) and (lines := self._event(event)) is not None:
            self._sink.write(lines)
        self._sink.write(event)

    def close(self) -> None:
        """Closes the sink."""
        self._sink.close()

    def _event(self, event: Step | End) -> Lines | None:
        """Returns what to tell with an event, if it is time; the ranks that exchange a shard each ask together."""
        now_s = time.monotonic()
        is_due = now_s >= self._next_s or isinstance(event, End)
        if self._ranks.hold_whole_model and not is_due:
            return None
        numbers = self._ranks.sum_over_shards(self._numbers())  # with every step: the clocks of ranks differ
        if not is_due or not any(numbers):
            return None
        self._next_s = now_s + EVERY_S
        size = self._seat.workers
        return Lines(
            step=event.step,
            seconds=event.seconds,
            worker=self._seat.worker,
            sent_bytes=[int(number) for number in numbers[:size]],
            received_bytes=[int(number) for number in numbers[size : 2 * size]],
            capacity=[number or None for number in numbers[2 * size :]],
        )

    def _numbers(self) -> list[float]:
        """Returns bytes sent to each worker, bytes received from each, and bytes/s to each, 0 where unknown."""
        none = Line(0, 0, None)
        known = self._lines()
        lines = [known.get(worker, none) for worker in range(self._seat.workers)]
        carried = [*(line.sent for line in lines), *(line.received for line in lines)]
        totals = [now + before for now, before in zip(carried, self._before, strict=True)]
        return [*totals, *(line.bytes_per_s or 0.0 for line in lines)]
