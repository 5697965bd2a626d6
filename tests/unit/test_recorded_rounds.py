"""What the workers of an elastic run have recorded: who went on, what is superseded, and what must be alike."""

from collections.abc import Sequence
from typing import Any

import pytest

from atoll.errors import DataError
from atoll.link.base import RoundId
from atoll.runs.events import Joined, Members
from atoll.runs.evidence import AnchorMoved, Began, Excluded
from atoll.train.replay.record import RunRecord


def moved(step: int, members: Sequence[int] = (0, 1), print_: str = "a", fragment: int = 0, **more: Any) -> AnchorMoved:
    given = {"last": False, "applied": step + 1, "version": step, "outliers": [], "between": list(members), **more}
    return AnchorMoved(step=step, fragment=fragment, members=list(members), fingerprint=print_ * 16, **given)


def began(worker: int, checkpoint: int | None = None, joined: int | None = None) -> Began:
    return Began(worker=worker, checkpoint=checkpoint, joined=joined)


def view(number: int, members: list[int], boundary: int) -> Members:
    return Members(step=0, view=number, members=members, following=[], boundary=boundary, seconds=0.0)


def joined(worker: int, at: int, since: int) -> Joined:
    return Joined(step=at, worker=worker, at=at, since=since)


def record(**events: Sequence[Any]) -> RunRecord:
    return RunRecord({int(name.removeprefix("w")): [began(int(name[1:])), *said] for name, said in events.items()})


LAST = moved(9, last=True)


def test_workers_that_disagree_are_found_at_the_first_round() -> None:
    mine = [moved(2), moved(4), moved(6), LAST]
    assert record(w0=mine, w1=mine).difference is None
    for other in (moved(4, print_="b"), moved(4, [0]), moved(4, version=9)):
        found = record(w0=mine, w1=[moved(2), other, moved(6, print_="c"), LAST]).difference
        assert found is not None and found.round_id == RoundId(4, 0)


def test_a_worker_that_was_cut_off_may_have_completed_the_last_rounds_differently() -> None:
    others = [moved(2), moved(4, [1], "b"), moved(6, [1], "b"), moved(8, [1], "b"), LAST]
    cut_off: list[Any] = [moved(2), moved(4), Excluded(steps=5), joined(0, 7, 5), moved(8, [1], "b"), LAST]
    dead: list[Any] = [moved(2), moved(4)]
    for said in (cut_off, dead):
        found = record(w0=said, w1=others)
        assert found.difference is None and found.rounds[RoundId(4, 0)].members == [1]
    went_on: list[Any] = [moved(2), moved(4), moved(6), moved(8), Excluded(steps=9)]
    difference = record(w0=[*went_on, joined(0, 9, 9)], w1=others).difference
    assert difference is not None and difference.round_id == RoundId(4, 0)


def test_what_a_cut_off_worker_recorded_is_kept_apart() -> None:
    said: list[Any] = [moved(2), Excluded(steps=3), Excluded(steps=3), moved(4, [1]), joined(0, 5, 4), moved(6)]
    (process,) = record(w0=said, w1=[]).processes[0]
    first, second = process.stretches
    assert (first.excluded, list(first.rounds)) == (3, [RoundId(2, 0)])
    assert (second.first, second.since, list(second.rounds)) == (5, 4, [RoundId(4, 0), RoundId(6, 0)])
    (process,) = record(w0=[moved(2), Excluded(steps=3), moved(4, [1])], w1=[]).processes[0]
    assert [stretch.excluded for stretch in process.stretches] == [None]  # it never came back


def test_a_process_that_joined_begins_anew_and_one_that_resumed_with_all_goes_on() -> None:
    first, again = [moved(2), moved(4)], began(0, checkpoint=3, joined=7)
    joined_anew, other = record(w0=[*first, again, moved(8)], w1=[]).processes[0]
    assert joined_anew.joined == 0 and (other.joined, other.checkpoint) == (7, 3)
    (resumed,) = record(w0=[*first, began(0, checkpoint=3), moved(4, [0])], w1=[]).processes[0]
    assert resumed.stretches[0].rounds == {RoundId(2, 0): moved(2), RoundId(4, 0): moved(4, [0])}
    (resumed,) = record(w0=[*first, again, moved(8), began(0, checkpoint=3)], w1=[]).processes[0]
    assert resumed.joined == 0 and list(resumed.stretches[0].rounds) == [RoundId(2, 0)]


def test_the_members_of_a_step_are_those_of_the_newest_view_that_had_begun() -> None:
    found = record(w0=[view(1, [0, 1], 0), view(2, [0], 10), view(4, [1], 8)], w1=[view(3, [0, 2], 12)])
    assert [found.members_at(step) for step in (1, 8, 9, 10, 13)] == [[0, 1], [0, 1], [1], [1], [1]]


def test_a_worker_that_took_part_must_have_a_record() -> None:
    found = RunRecord({0: [began(0), moved(2), moved(4, [0, 1])], 1: [began(1, joined=3), moved(4, [0, 1])]})
    with pytest.raises(DataError, match="step 2, fragment 0: worker 1 took part"):
        found.check_whole()
    RunRecord({0: [began(0), moved(2, [0]), moved(4)], 1: [began(1, joined=3)]}).check_whole()
