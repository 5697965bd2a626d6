"""Changes of the members of an elastic run: as events, as lines, and in reports."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from atoll.link.base import RoundId
from atoll.link.net.views import Decision, Process, View
from atoll.report.record import log_of, merge
from atoll.runs.events import Event, Joined, Lost, Members, RoundApplied, Start
from atoll.train.progress.members import MembershipLog
from atoll.train.progress.summary import RunSummary, event_line


def decided(
    number: int, seats: Mapping[int, int], following: tuple[int, ...] = (), boundary: int = 0, **more: Any
) -> Decision:
    view = View(number, dict(seats), frozenset(following), **more)
    return Decision(view, boundary, (), {}, (), {}, frozenset())


def left_behind(number: int, *late: tuple[int, int]) -> Decision:
    """A view in which rounds, each of a step and a fragment, do without worker 1."""
    rounds = {RoundId(*one): frozenset({Process(1, 5)}) for one in late}
    return replace(decided(number, {0: 5, 1: 5}, boundary=9), left_behind=rounds)


def members(number: int, training: list[int], following: list[int], boundary: int) -> Members:
    return Members(step=50, view=number, members=training, following=following, boundary=boundary, seconds=2.0)


def test_who_comes_and_goes_is_told_once_and_in_order() -> None:
    log = MembershipLog(0, 1, lambda line: None)
    log.decided(decided(1, {0: 5, 1: 5, 2: 5}))
    log.lost(1, "is silent")
    log.decided(decided(2, {0: 5, 2: 5}, boundary=10))
    log.decided(decided(3, {0: 5, 1: 6, 2: 5}, (1,), boundary=20))
    log.decided(decided(4, {0: 5, 1: 6, 2: 5}, boundary=25))
    assert list(log.events(50, 2.0)) == [
        members(1, [0, 1, 2], [], 0),
        Lost(step=50, worker=1, why="is silent"),
        members(2, [0, 2], [], 10),
        members(3, [0, 2], [1], 20),
        members(4, [0, 1, 2], [], 25),
        Joined(step=50, worker=1, at=25),
    ]
    assert list(log.events(51, 3.0)) == []
    log.decided(decided(5, {0: 5, 1: 6, 2: 5}, boundary=60, over=True))
    log.decided(decided(6, {0: 5}, boundary=60, over=True))
    assert list(log.events(60, 4.0)) == []  # the run is over: all leave


def test_a_worker_that_another_has_lost_and_one_that_joins_itself() -> None:
    log = MembershipLog(1, 1, lambda line: None)
    log.decided(decided(7, {0: 5, 1: 5, 2: 5}, (1,), boundary=30))
    log.decided(decided(8, {0: 5, 1: 5}, boundary=40))
    log.joined(40, since=22)
    lost, joined = Lost(step=41, worker=2, why="another worker has lost it"), Joined(step=41, worker=1, at=40, since=22)
    kinds = [event for event in log.events(41, 2.0) if not isinstance(event, Members)]
    assert kinds == [lost, joined]


def test_a_view_tells_who_was_left_behind_and_how_often() -> None:
    log = MembershipLog(0, 1, lambda line: None)
    for decision in (decided(1, {0: 5, 1: 5}), left_behind(2, (4, 0), (5, 1)), left_behind(3, (6, 0)), left_behind(4)):
        log.decided(decision)
    late = [event.late for event in log.events(50, 2.0) if isinstance(event, Members)]
    assert late == [{}, {1: 2}, {1: 3}, {}]


def test_a_pause_is_said_at_once_and_once() -> None:
    said: list[str] = []
    log = MembershipLog(0, 2, said.append)
    log.decided(decided(1, {0: 5, 1: 5}))
    log.decided(decided(2, {0: 5}))
    log.decided(decided(3, {0: 5, 1: 6}, (1,)))
    assert said == ["paused until others come back: 1 worker, and link.min_workers is 2"]
    log.decided(decided(4, {0: 5, 1: 6}))
    log.decided(decided(5, {0: 5, 1: 6}, over=True))
    log.decided(decided(6, {0: 5}, over=True))
    assert said[1:] == ["training goes on: 2 workers, and link.min_workers is 2"]


def test_the_lines_of_members() -> None:
    def line(event: Event) -> str:
        return event_line(event, RunSummary().after(event)).partition(": ")[2]

    assert line(members(3, [0], [1, 2], 20)) == "view 3 from step 21: worker 0, workers 1, 2 catching up"
    late = replace(members(3, [0, 1], [], 20), late={1: 3})
    assert line(late) == "view 3 from step 21: workers 0, 1; worker 1 is late, rounds without it so far: 3"
    assert line(Lost(step=5, worker=1, why="is silent")) == "worker 1 is gone: is silent"
    assert line(Joined(step=5, worker=1, at=4)) == "worker 1 has joined at step 4"
    assert line(Joined(step=5, worker=1, at=4, since=2)) == "worker 1 was cut off at step 2 and is back at step 4"


def test_a_report_has_the_rounds_that_the_lowest_worker_was_not_there_for() -> None:
    def log(worker: int, steps: list[int]) -> Any:
        start: dict[str, Any] = {
            "name": "x",
            "method": "streaming",
            "workers": 2,
            "steps": 9,
            "parameters": 1,
            "tokens_per_step": 1,
        }
        start |= {"period": 1, "delay": [1, 1], "codec": "fp32", "fragments": [1], "payload_bytes": [4]}
        start |= {"vocabulary": 1, "device": "cpu", "threads": 1, "weights": [1.0, 1.0], "worker": worker}
        rounds = [
            RoundApplied(
                step=step, fragment=0, applied=step, members=[worker], expected=1, norm=1.0, cosine=None, bytes=4
            )
            for step in steps
        ]
        return log_of([Start(**start), *rounds])

    merged = merge([log(0, [1, 2, 6, 6]), log(1, [1, 2, 3, 4, 6, 6, 7])])
    found = [(r.step, r.members[0]) for r in merged.rounds]
    assert found == [(1, 0), (2, 0), (3, 1), (4, 1), (6, 0), (6, 0), (7, 1)]
