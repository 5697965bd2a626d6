"""Rounds that do without members that are late: who proposes it, when, and how often."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.link.base import STEPS_MADE, Contribution, Member, RoundId
from atoll.link.net.actions import Action, Adopt, Complete, Propose, Reduce, Send
from atoll.link.net.elastic_link import ElasticLink
from atoll.link.net.embedded import RegistryServer
from atoll.link.net.event_loop import event_loop
from atoll.link.net.protocol import Protocol
from atoll.link.net.views import Process, View
from elastic_links import elastic_run
from simulated_worker import Payload

FIRST, SECOND = RoundId(5, 0), RoundId(10, 0)


class Crew:
    """Members whose messages arrive at once, unless the sender is mute."""

    def __init__(self, count: int, min_workers: int = 1) -> None:
        self.members = {Process(seat, 1): Protocol(Process(seat, 1), 0, min_workers) for seat in range(count)}
        self.completed: dict[tuple[int, RoundId], list[int]] = {}
        self.mute: set[int] = set()
        self.proposed: list[View] = []
        self.left_behind: list[tuple[RoundId, list[int]]] = []  # as the first member has adopted it
        self.view(View(1, dict.fromkeys(range(count), 1)))

    def at(self, seat: int) -> Protocol:
        return next(member for process, member in self.members.items() if process.seat == seat)

    def view(self, view: View) -> None:
        for me, member in self.members.items():
            self.act(me, member.on_view(view))

    def open(self, seat: int, round_id: RoundId) -> None:
        me = self.at(seat).me
        self.at(seat).advance(round_id.step)
        self.act(me, self.at(seat).open(round_id, Payload(round_id, me)))

    def leave_behind(self, seat: int, round_id: RoundId) -> list[View]:
        """Let a member propose; its view is accepted."""
        before = len(self.proposed)
        self.act(Process(seat, 1), self.at(seat).leave_behind(round_id))
        for view in (new := self.proposed[before:]):
            self.view(view)
        return new

    def act(self, me: Process, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send) and (me.seat not in self.mute or hasattr(action.message, "adopted")):
                self.act(action.to, self.members[action.to].receive(me, action.message, action.view))
            elif isinstance(action, Propose):
                self.proposed.append(action.view)
            elif isinstance(action, Adopt) and me.seat == 0:
                self.left_behind += [(r, [m.seat for m in some]) for r, some in action.decision.left_behind.items()]
            elif isinstance(action, Reduce):
                mean = tuple(action.payloads)
                self.act(me, self.members[me].reduced(action.round_id, action.attempt, action.part, mean))
            elif isinstance(action, Complete):
                self.completed[me.seat, action.round_id] = [member.seat for member in action.attempt.members]


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_a_round_is_completed_without_members_that_have_not_opened_it(count: int) -> None:
    crew, late = Crew(count), count - 1
    for seat in range(late):
        crew.open(seat, FIRST)
    assert not crew.completed
    (view,) = crew.leave_behind(0, FIRST)
    assert view.late == {late: 5} and view.lives == dict.fromkeys(range(count), 1)
    assert crew.left_behind == [(FIRST, [late])]
    crew.open(late, FIRST)
    assert crew.completed == {(seat, FIRST): [*range(late)] for seat in range(count)}
    for seat in range(count):  # the next one waits for all
        crew.open(seat, SECOND)
    assert crew.completed[0, SECOND] == [*range(count)]


def test_all_rounds_up_to_the_newest_that_is_late_are_completed_at_once() -> None:
    crew = Crew(3)
    for seat in (0, 1):
        crew.open(seat, FIRST)
        crew.open(seat, SECOND)
    assert len(crew.leave_behind(0, SECOND)) == 1
    assert crew.completed == {(seat, round_id): [0, 1] for seat in (0, 1) for round_id in (FIRST, SECOND)}
    decided = {(1, FIRST), (1, SECOND)}
    assert decided <= crew.completed.keys() and not crew.leave_behind(1, SECOND)


def test_what_is_on_its_way_counts_and_is_waited_for_without_another_view() -> None:
    crew = Crew(3)
    crew.mute = {2}
    for seat in range(3):
        crew.open(seat, FIRST)
    assert len(crew.leave_behind(0, FIRST)) == 1
    assert crew.completed == {(2, FIRST): [0, 1, 2]}
    assert not crew.leave_behind(0, FIRST) and not crew.leave_behind(1, FIRST)


@pytest.mark.parametrize(("min_workers", "proposed"), [(2, 1), (3, 0)])
def test_no_round_is_left_with_fewer_than_min_workers(min_workers: int, proposed: int) -> None:
    crew = Crew(3, min_workers)
    for seat in (0, 1):
        crew.open(seat, FIRST)
    assert len(crew.leave_behind(0, FIRST)) == proposed


def test_an_older_round_keeps_min_workers_too() -> None:
    """Worker 2 has opened neither of two rounds; the older lost worker 3 too, and the newer has its successor."""
    crew = Crew(4, 3)
    for seat in (0, 1):
        crew.open(seat, FIRST)
    del crew.members[Process(3, 1)]
    crew.view(View(2, {0: 1, 1: 1, 2: 1}))
    crew.members[Process(3, 2)] = Protocol(Process(3, 2), 0, 3)
    crew.view(View(3, {0: 1, 1: 1, 2: 1, 3: 2}))
    for seat in (0, 1, 3):
        crew.open(seat, SECOND)
    assert not crew.leave_behind(0, SECOND) and not crew.left_behind
    crew.open(2, FIRST)
    assert crew.completed[0, FIRST] == [0, 1, 2]
    (view,) = crew.leave_behind(0, SECOND)
    assert view.late == {2: 10} and crew.completed[0, SECOND] == [0, 1, 3]


def test_the_others_are_told_of_members_that_are_far_behind() -> None:
    crew = Crew(3, 2)
    for number in range(1, 7):
        round_id = RoundId(5 * number, 1)
        for seat in (0, 1):
            crew.open(seat, RoundId(5 * number, 0))
            crew.open(seat, round_id)
        crew.leave_behind(0, round_id)
        for seat in (0, 1):
            crew.act(Process(seat, 1), crew.at(seat).has_applied(round_id.step))
        far = [crew.at(seat).far_behind(4) for seat in range(3)]
        assert far == ([[Process(2, 1)], [Process(2, 1)], []] if number > 4 else [[], [], []])
    assert Crew(2).at(0).far_behind(0) == []
    for seat in (0, 1):  # at the end of a run, it is waited for
        crew.open(seat, RoundId(31, 0, last=True))
    assert crew.at(0).far_behind(4) == []


def test_nobody_is_far_behind_where_too_few_would_remain() -> None:
    crew = Crew(2, 2)
    for number in range(1, 4):
        for seat in (0, 1):
            crew.open(seat, RoundId(5 * number, 0))
    assert crew.at(0).far_behind(1) == []
    crew.at(0)._min_workers = 1
    assert crew.at(0).far_behind(1) == [Process(1, 1)]


# ---------------------------------------------------------------------- over real links

NUMEL = 100


def in_thread(work: Callable[[], Any]) -> "Future[Any]":
    done: Future[Any] = Future()

    def act() -> None:
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)

    threading.Thread(target=act, daemon=True).start()
    return done


def open_round(link: ElasticLink, step: int, *, last: bool = False) -> "Future[Any]":
    offer = Contribution(Member(link.worker, 1.0, 0, 7), torch.ones(NUMEL).view(torch.uint8))
    reduction = Reduction(Codec("fp32"), NUMEL, order=(step, 0, 0))
    return in_thread(link.open(RoundId(step, 0, last), offer, reduction).wait)


@pytest.mark.processes
def test_while_the_registry_is_away_one_proposal_waits_and_the_round_too(tmp_path: Path) -> None:
    with elastic_run(3, tmp_path) as run:
        links = run.links(grace_s=0.1)
        for joined in [in_thread(partial(link.join, {}, 1.0, {STEPS_MADE: "0"})) for link in links]:
            joined.result(20)
        address = run.server.address
        event_loop().run(run.server.close())
        waiting = [open_round(link, 1) for link in links[:2]]
        membership = links[0]._member.membership  # type: ignore[union-attr]
        end = time.monotonic() + 20
        while len(membership._tasks) < 4:  # those that watch the registry, its seat and late members; the proposal
            assert time.monotonic() < end
            time.sleep(0.01)
        time.sleep(0.5)
        assert len(membership._tasks) == 4 and not any(one.done() for one in waiting)
        run.server = event_loop().run(RegistryServer.start(tmp_path, address, run.keys.registry))
        assert [[member.worker for member in one.result(20).members] for one in waiting] == [[0, 1], [0, 1]]
        assert [member.worker for member in open_round(links[2], 1).result(20).members] == [0, 1]
        for link in links:
            link.close("the test has ended")


@pytest.mark.processes
@pytest.mark.parametrize(("grace_s", "last"), [(None, False), (60.0, False), (0.1, True)])
def test_without_grace_or_within_it_or_at_the_end_all_wait(tmp_path: Path, grace_s: float | None, last: bool) -> None:
    with elastic_run(2, tmp_path) as run:
        links = run.links(grace_s=grace_s)
        for joined in [in_thread(partial(link.join, {}, 1.0, {STEPS_MADE: "0"})) for link in links]:
            joined.result(20)
        waiting = open_round(links[0], 1, last=last)
        time.sleep(0.7)
        assert not waiting.done()
        for one in (open_round(links[1], 1, last=last), waiting):
            assert [member.worker for member in one.result(20).members] == [0, 1]
        for link in links:
            link.close("the test has ended")
