"""What one member has of one round: only what its members owe completes it."""

from dataclasses import dataclass
from typing import Any

from atoll.link.base import RoundId
from atoll.link.net.actions import Mean, Part, Result, Whole
from atoll.link.net.round_state import RoundState
from atoll.link.net.views import Attempt, Process

ROUND = RoundId(5, 0)
FIVE = Attempt(1, tuple(Process(seat, 1) for seat in range(5)))
ME, STRANGER = FIVE.members[0], Process(7, 1)


@dataclass(frozen=True)
class OneEach:
    """An offer of as many parts as members."""

    whole: Any = "whole"

    def part_count(self, members: int) -> int:
        return members

    def part(self, part: int, members: int) -> Any:
        return f"part {part} of {members}"


def opened(attempt: Attempt = FIVE) -> RoundState:
    return RoundState(ME, attempt, OneEach())


def test_a_mean_of_no_part_of_the_round_does_not_complete_it() -> None:
    state = opened()
    for part in (0, 1, 2, 3, 7):
        state.add(FIVE.members[part % 5], Mean(ROUND, FIVE.view, part, part))
    assert not state.gather() and state.awaited() == [*FIVE.members]
    state.add(FIVE.members[4], Mean(ROUND, FIVE.view, 4, 4))
    assert state.gather() and state.result == (0, 1, 2, 3, 4)


def test_a_part_of_a_process_outside_the_round_is_not_reduced_and_holds_nothing_up() -> None:
    state = opened()
    for sender in (STRANGER, *FIVE.members):
        assert state.payloads_to_reduce(0) is None
        state.add(sender, Part(ROUND, FIVE.view, 0, sender.seat))
    assert state.payloads_to_reduce(0) == {member: member.seat for member in FIVE.members}
    assert state.payloads_to_reduce(0) is None


def test_a_result_for_members_whose_payloads_travel_whole_is_not_taken() -> None:
    state = opened()
    state.add(FIVE.members[1], Result(ROUND, Attempt(1, (ME,)), ("mean",)))
    assert state.attempt == FIVE and state.result is None
    state.add(FIVE.members[1], Result(ROUND, FIVE, tuple("means")))
    assert state.gather() and state.payloads() is None


def test_whole_payloads_complete_a_round_of_few_members() -> None:
    two = Attempt(1, FIVE.members[:2])
    state = opened(two)
    state.add(ME, Whole(ROUND, ME, "mine"))
    assert not state.gather() and state.awaited() == state.missing() == [two.members[1]]
    state.add(two.members[1], Whole(ROUND, two.members[1], "other"))
    assert state.gather() and state.payloads() == {ME: "mine", two.members[1]: "other"}
