"""The protocol between changing members keeps its laws under every schedule of faults.

`simulated_net` says what a schedule is and which laws are checked.
"""

from itertools import pairwise

import pytest

from atoll.link.base import RoundId
from atoll.link.net.actions import Progress, Propose, Result, Whole
from atoll.link.net.protocol import Protocol
from atoll.link.net.views import Attempt, Era, Process, RoundStatus, Told, View, decide
from simulated_net import Net

CHUNK = 250


@pytest.mark.parametrize("chunk", [pytest.param(n, marks=[pytest.mark.thorough] if n else []) for n in range(80)])
def test_schedules(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            Net(seed).run()
        except Exception as fault:
            raise AssertionError(f"seed {seed}: {type(fault).__name__}: {fault}") from fault


@pytest.mark.thorough
def test_faults_of_every_kind_do_happen() -> None:
    """The simulation is worth nothing if the faults miss what they are to hit."""
    found = {"lost": 0, "joined": 0, "promoted": 0, "left behind": 0}
    for seed in range(120):
        net = Net(seed)
        net.run()
        for before, view in pairwise(net.views.values()):
            found["lost"] += len(view.lives) < len(before.lives)
            found["joined"] += len(view.lives) > len(before.lives)
            found["promoted"] += len(view.following) < len(before.following) and view.lives == before.lives
            found["left behind"] += view.late != before.late and view.lives == before.lives
    assert all(count >= 5 for count in found.values()), found


@pytest.mark.parametrize("is_member", [False, True])
def test_a_process_that_connects_again_is_not_lost_unless_it_was_a_member(is_member: bool) -> None:
    me, other = Process(0, 1), Process(1, 7)
    protocol, view = Protocol(me), View(1, {0: 1, 1: 7})
    if is_member:
        protocol.on_view(view)
    protocol.lose(other)
    protocol.flush.meet(other)
    proposed = [action for action in protocol.on_view(View(2, view.lives)) if isinstance(action, Propose)]
    assert [action.view.lives for action in proposed] == ([{0: 1}] if is_member else [])


def test_steps_made_during_a_flush_count_after_it() -> None:
    """Rounds of these steps wait for the new view, so they must not belong to an older one, with other members."""
    me, other = Process(0, 1), Process(1, 7)
    protocol = Protocol(me)
    protocol.on_view(View(1, {0: 1}))
    protocol.advance(3)
    for number in (2, 3):
        protocol.on_view(View(number, {0: 1, 1: 7}, frozenset({1})))
        assert (told := protocol.flush.told) is not None and told.step == 3
        protocol.advance(9)
        assert not protocol.has_opened(3)
    protocol.receive(other, Told(3, 0, 0, None, 0, (), {}), 0)
    assert not protocol.is_flushing and protocol.has_opened(9) and not protocol.has_opened(10)
    protocol.on_view(View(4, {0: 1}))
    assert protocol.adopted == 4 and protocol.eras[-1].first_step == 10


def test_a_result_that_comes_during_a_flush_is_told_in_the_next() -> None:
    """The members of that result are those that count: another attempt would be completed with it, but not by all."""
    view, round_id = View(1, dict.fromkeys(range(5), 1)), RoundId(1, 0)
    me, *others = view.members
    protocol, attempt = Protocol(me), Attempt(1, view.members)
    protocol.on_view(view)
    for other in others:
        protocol.receive(other, Told(1, 0, 0, 0, 0, (), {}), 0)
    protocol.on_view(view.without([1]))
    protocol.receive(others[1], Result(round_id, attempt, (None,) * 5), 1)
    protocol.on_view(view.without([1]).without([2]))
    assert (told := protocol.flush.told) is not None
    assert told.rounds == {round_id: RoundStatus(attempt, frozenset(), done=True)}


def test_messages_of_a_view_that_never_comes_go_with_their_rounds() -> None:
    me, other = Process(0, 1), Process(1, 7)
    protocol = Protocol(me)
    protocol.on_view(View(1, {0: 1, 1: 7}))
    protocol.receive(other, Told(1, 0, 0, 0, 0, (), {}), 0)
    for step in range(1, 6):
        protocol.receive(other, Whole(RoundId(step, 0), other, "payload"), 1_000)
    protocol.receive(other, Progress(9), 1_000)
    protocol.has_applied(3)
    kept = [message for _, message, _ in protocol.flush._early]
    assert kept == [*(Whole(RoundId(step, 0), other, "payload") for step in (4, 5)), Progress(9)]


def test_a_process_that_is_no_member_adopts_nothing() -> None:
    protocol = Protocol(Process(2, 1))
    protocol.on_view(View(1, {0: 1}))
    assert protocol.receive(Process(0, 1), Told(1, 0, 0, 0, 0, (), {}), 0) == [] and protocol.is_flushing


def test_a_round_that_names_a_member_nobody_knows_does_not_stop_a_flush() -> None:
    me, other, gone = Process(0, 1), Process(1, 7), Process(2, 3)
    view, era = View(2, {0: 1, 1: 7}), Era(1, 1, (me, other), frozenset({me, other}), frozenset({0, 1}))
    status = RoundStatus(Attempt(1, (me, gone)), frozenset(), done=True)
    told = {me: Told(2, 1, 5, 0, 0, (era,), {}), other: Told(2, 1, 5, 0, 0, (era,), {RoundId(5, 0): status})}
    assert decide(view, told).relays == ()
