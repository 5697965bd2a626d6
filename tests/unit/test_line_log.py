"""Events of the lines between workers: counted over restarts and shards, and not too often."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from atoll.link.net.traffic import Line
from atoll.link.seat import Seat
from atoll.runs.events import End, Event, Step
from atoll.runs.lines import Lines
from atoll.train.progress.line_log import LineLog
from atoll.train.ranks.worker_ranks import WorkerRanks

NONE: dict[str, Any] = {"tokens": 8, "step_s": 0.1, "bytes_sent": [], "bytes_received": [], "wait_s": []}
END = End(step=40, seconds=20.0, loss=3.0, best_loss=3.0, outcome="finished", **NONE)
LINE = Line(sent=100, received=10, bytes_per_s=None)


def a_step(step: int) -> Step:
    return Step(
        step=step, seconds=step / 2, loss=[2.0], grad_norm=[1.0], lr=0.1, tokens_per_s=1.0, participants=1, **NONE
    )


class Kept:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = False

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True

    @property
    def lines(self) -> list[Lines]:
        return [event for event in self.events if isinstance(event, Lines)]


@pytest.fixture
def kept() -> Kept:
    return Kept()


def log(kept: Kept, lines: dict[int, Line], past: Sequence[Event] = (), ranks: WorkerRanks | None = None) -> LineLog:
    return LineLog(kept, Seat(0, 3), ranks or WorkerRanks(), lambda: lines, past)


def test_lines_come_before_the_step_with_what_each_connection_has_carried(kept: Kept) -> None:
    log(kept, {2: LINE, 1: replace(LINE, sent=5, bytes_per_s=1e6)}).write(a_step(10))
    lines = Lines(
        step=10, seconds=5.0, worker=0, sent_bytes=[0, 5, 100], received_bytes=[0, 10, 10], capacity=[None, 1e6, None]
    )
    assert kept.events == [lines, a_step(10)]


def test_they_do_not_come_with_every_step_but_always_at_the_end(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    carried = {1: LINE}
    writer = log(kept, carried)
    now_s = 50.0
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    for step in range(1, 13):
        writer.write(a_step(step))
        now_s += 1.0
    assert [lines.step for lines in kept.lines] == [1, 6, 11]
    carried[1] = replace(LINE, sent=200)
    writer.write(END)
    assert kept.lines[-1].sent_bytes == [0, 200, 0] and kept.events[-1] == END
    writer.close()
    assert kept.closed


def test_a_resumed_run_counts_on_from_its_events(kept: Kept) -> None:
    past = [Lines(step=1, seconds=1, worker=0, sent_bytes=[0, 7, 8], received_bytes=[0, 1, 2], capacity=[None] * 3)]
    log(kept, {1: LINE}, past).write(a_step(1))
    assert kept.lines[0].sent_bytes == [0, 107, 8] and kept.lines[0].received_bytes == [0, 11, 2]


def test_nothing_is_told_where_nothing_travels(kept: Kept) -> None:
    log(kept, {}).write(END)
    assert kept.events == [END]


def test_ranks_that_exchange_a_shard_each_add_up_with_every_step(kept: Kept) -> None:
    asked: list[int] = []

    class TwoShards(WorkerRanks):
        hold_whole_model = False

        def sum_over_shards(self, numbers: Sequence[float]) -> list[float]:
            asked.append(1)
            return [2 * number for number in numbers]

    writer = log(kept, {1: replace(LINE, bytes_per_s=50.0)}, ranks=TwoShards())
    for step in range(1, 4):
        writer.write(a_step(step))
    assert len(asked) == 3, "a rank whose clock is ahead would wait for the others"
    (lines,) = kept.lines
    assert lines.sent_bytes == [0, 200, 0] and lines.capacity == [None, 100.0, None]
    assert math.isfinite(lines.seconds)
