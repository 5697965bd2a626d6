"""Outer loops over elastic links on loopback: workers are lost, join late and join again, and all have equal bits."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll import DiLoCo, Eager, OuterLoop, Streaming, Sync, local
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.core.schedule import Schedule
from atoll.link.base import Admission, Link, Offer, Pending, RoundId
from atoll.link.local import Absence, Faults, LocalLink, run_local
from atoll.link.net.elastic_link import ElasticLink
from atoll.link.net.event_loop import event_loop
from atoll.link.net.views import Decision
from atoll.outer.stats import Applied
from elastic_links import ElasticRun, elastic_run
from harness import Problem, Toy, bits, by_part, inner_step

pytestmark = pytest.mark.processes  # waits for connections more than it computes

SYNCS: dict[str, Sync] = {
    "streaming": Streaming(period=6, fragments=by_part(4), delay=2, codec=Codec("int8", feedback=True)),
    "eager": Eager(period=4, codec=Codec("e3m0", feedback=True)),
}
PAUSE_S = 0.004
WAIT_S = 35.0


@dataclass
class Seen:
    """What one worker had after its steps, and the rounds that it has applied."""

    after: dict[int, list[bytes]] = field(default_factory=dict)
    anchors: dict[RoundId, bytes] = field(default_factory=dict)
    members: dict[RoundId, tuple[int, ...]] = field(default_factory=dict)
    before: dict[RoundId, tuple[tuple[int, ...], bytes]] = field(default_factory=dict)
    """Members and anchors of rounds that it had applied when it was left behind and came again."""
    worker: int = 0
    joined_at: int | None = None
    rejoins: int = 0
    step: int = 0


@dataclass
class Trip:
    """One worker's training in a thread."""

    problem: Problem
    sync: Sync
    link: Link
    seen: Seen = field(default_factory=Seen)
    until: int = 10**6
    """After this step it stops without a word."""
    pause_s: float = 0.0
    joined: threading.Event = field(default_factory=threading.Event)
    """Set when it has joined a run under way."""
    awaited: "Trip | None" = None
    """One that joins late: past half of its steps, this worker trains slowly until it is there."""
    nap: "tuple[int, Trip, int] | None" = None
    """After the first step it sleeps until another worker has come to the second."""
    done: "Future[Seen]" = field(default_factory=Future)

    def make(self, *, late: bool = False) -> OuterLoop:
        start = self.problem.start[::-1].copy() if late else self.problem.start

        def observe(applied: Applied) -> None:
            anchor = loop._rounds.replicas[applied.round_id.fragment].anchor
            self.seen.anchors[applied.round_id] = anchor.numpy().tobytes()
            self.seen.members[applied.round_id] = applied.members

        join_again = self.link.rejoin

        def rejoin() -> Admission:
            self.seen.before |= {one: (self.seen.members[one], anchor) for one, anchor in self.seen.anchors.items()}
            self.seen.anchors, self.seen.members = {}, {}
            return join_again()

        self.seen.worker = self.link.worker
        self.link.rejoin = rejoin  # type: ignore[method-assign]
        model = Toy(start, self.problem.sizes, self.problem.dtype)
        loop = OuterLoop(model, self.sync, self.link, weight=1.0 + self.link.worker, observer=observe)
        return loop

    def train(self, loop: OuterLoop) -> Seen:
        while loop.steps < self.problem.steps:
            if loop.steps >= self.until:
                return self.seen
            inner_step(loop, self.problem.inner)
            loop.step()
            self.seen.after[loop.steps] = bits(loop)
            self.seen.step = loop.steps
            if self.nap is not None and loop.steps == self.nap[0]:
                self.nap[1].reach(self.nap[2])
            late = self.awaited
            is_early = late is None or late.joined.is_set() or late.done.done() or loop.steps < self.problem.steps // 2
            time.sleep(self.pause_s if is_early else 0.3)
        loop.finish()
        self.seen.after[-1] = bits(loop)
        self.seen.joined_at, self.seen.rejoins = loop.joined_at, loop.counters.rejoins
        return self.seen

    def start(self, *, late: bool = False) -> "Trip":
        def work() -> None:
            try:
                loop = self.make(late=late)
                if late:
                    loop.join()
                    self.joined.set()
                    self.seen.after[loop.steps] = bits(loop)
                self.done.set_result(self.train(loop))
            except BaseException as fault:
                self.done.set_exception(fault)

        threading.Thread(target=work, daemon=True).start()
        return self

    def reach(self, step: int) -> None:
        until = time.monotonic() + WAIT_S
        while self.seen.step < step:
            if self.done.done():
                self.done.result()
            assert time.monotonic() < until, self.seen.step
            time.sleep(0.002)


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ElasticRun]:
    with elastic_run(getattr(request, "param", 3), tmp_path) as made:
        yield made


def trips(run: ElasticRun, problem: Problem, sync: Sync, workers: int, **more: Any) -> list[Trip]:
    """Make the trips of the first workers, which start together."""
    options = {"join_s": 30.0} if workers == run.workers else {"join_s": 1.0, "min_workers": workers}
    options |= {"silent_s": 20.0, **more}  # this machine may be busy
    return [Trip(problem, sync, run.link(worker, **options), pause_s=PAUSE_S) for worker in range(workers)]


class Silent(LocalLink):
    """A worker that sends nothing after a step, until it is known to be absent."""

    last: int

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        return super().open(round_id, offer if round_id.step <= self.last else None, reduction)


def oracle(
    problem: Problem,
    sync: Sync,
    prepare: Callable[[OuterLoop], None] = lambda loop: None,
    silent: Mapping[int, int] | None = None,
) -> list[Seen]:
    """Train in one process with the same members, known beforehand; `silent` ones send up to a step."""

    def work(link: Link) -> Seen:
        if link.worker in (silent or {}):
            link.__class__ = Silent
            link.last = (silent or {})[link.worker]  # type: ignore[attr-defined]
        trip = Trip(problem, sync, link)
        loop = trip.make()
        prepare(loop)
        return trip.train(loop)

    links = local(problem.workers, faults=problem.faults, timeout_s=30)
    for link in links:
        link.elastic = True  # then finish() always ends with an exchange
    return run_local(work, links)


def agree(seen: list[Seen]) -> None:
    """Check that all have applied the same rounds to the same anchors, and end with the same model."""
    for round_id in {round_id for one in seen for round_id in one.anchors}:
        having = [one for one in seen if round_id in one.anchors]
        assert len({one.members[round_id] for one in having}) == 1, round_id
        assert len({one.anchors[round_id] for one in having}) == 1, round_id
    for one in seen:
        agree_until_left_behind(one, [other for other in seen if other.worker != one.worker])
    finals = {one.after[-1][0] for one in seen if -1 in one.after}
    assert len(finals) == 1


def agree_until_left_behind(one: Seen, others: list[Seen]) -> None:
    """Check what a worker had applied when it was left behind.

    The others may have completed its newest rounds without it. It has dropped these, and all that followed from them.
    """
    apart = set()
    for round_id, applied in sorted(one.before.items()):
        for other in others:
            if round_id in other.anchors and one.worker not in other.members[round_id]:
                apart.add(round_id.fragment)
            elif round_id in other.anchors and round_id.fragment not in apart:
                assert (other.members[round_id], other.anchors[round_id]) == applied, round_id


def close(trips: list[Trip]) -> None:
    for trip in trips:
        trip.link.close("the test has ended")


def vanish(link: Link) -> None:
    """Close a link's connections as the kernel does for a killed process: nothing is said."""
    assert isinstance(link, ElasticLink)
    member = link._member
    assert member is not None
    event_loop().run(member.peers.close(""))
    event_loop().run(member.membership.close())


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("run", [2, 3, 5], indirect=True)
def test_a_late_worker_has_the_bits_of_one_that_followed_from_the_start(run: ElasticRun, name: str) -> None:
    problem, sync, late = Problem(workers=run.workers, steps=130), SYNCS[name], run.workers - 1
    joiner = Trip(problem, sync, run.link(late, silent_s=20.0), pause_s=PAUSE_S)
    crew = trips(run, problem, sync, late)
    for trip in crew:
        trip.awaited = joiner
        trip.start()
    crew[0].reach(15)
    crew.append(joiner.start(late=True))
    found = [trip.done.result(WAIT_S) for trip in crew]
    close(crew)
    agree(found)
    assert not any(one.rejoins for one in found)
    boundary = found[late].joined_at
    assert boundary is not None and 15 <= boundary < problem.steps - 10

    def prepare(loop: OuterLoop) -> None:
        if loop.link.worker == late:
            while loop.steps < boundary:
                loop.step()
            schedule = Schedule(sync.period, len(loop.fragments), 0)
            for fragment, replica in enumerate(loop._rounds.replicas):
                coming = range(boundary + 1, boundary + sync.period)
                replica.left_out = any(schedule.is_send(fragment, step) for step in coming)

    away = Faults(absences=(Absence(worker=late, first=1, last=boundary),))
    expected = oracle(Problem(workers=run.workers, steps=130, faults=away), sync, prepare)
    for worker, (theirs, mine) in enumerate(zip(expected, found, strict=True)):
        for step in theirs.after:
            if worker != late or step > boundary or step == -1:
                assert mine.after[step] == theirs.after[step], f"worker {worker} after step {step}"
        assert mine.members.items() <= theirs.members.items()


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_run_whose_last_round_has_no_delay_ends(run: ElasticRun) -> None:
    crew = trips(run, Problem(workers=2, steps=20), DiLoCo(period=5), 2)
    found = [trip.done.result(WAIT_S) for trip in [trip.start() for trip in crew]]
    close(crew)
    agree(found)
    assert {RoundId(20, 0), RoundId(20, 0, last=True)} <= found[0].members.keys()


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("run", [2, 3, 5], indirect=True)
def test_the_others_go_on_as_if_a_lost_worker_had_left(run: ElasticRun, name: str) -> None:
    """Until they know of the loss, they expect it; so does the oracle, in which it is silent up to there."""
    problem, sync, lost, last = Problem(workers=run.workers, steps=60), SYNCS[name], 1, 21
    if run.workers > 3:
        sync = replace(sync, codec=Codec("int8"))  # a round that is cut anew does without what was lost to rounding
    crew = trips(run, problem, sync, run.workers)
    crew[lost].until = last
    decisions: list[Decision] = []
    first = crew[0].link
    assert isinstance(first, ElasticLink)
    first.hooks.on_decision = decisions.append
    for trip in crew:
        trip.start()
    crew[lost].done.result(WAIT_S)
    time.sleep(0.5)  # what it has sent arrives
    vanish(crew[lost].link)
    found = [trip.done.result(WAIT_S) for trip in crew]
    close([trip for trip in crew if trip is not crew[lost]])
    agree(found)
    assert [sorted(decision.view.lives) for decision in decisions[:2]] == [
        list(range(run.workers)),
        [worker for worker in range(run.workers) if worker != lost],
    ]
    away = Faults(absences=(Absence(worker=lost, first=decisions[1].boundary + 1),))
    expected = oracle(Problem(workers=run.workers, steps=60, faults=away), sync, silent={lost: last})
    for worker, (theirs, mine) in enumerate(zip(expected, found, strict=True)):
        if worker != lost:
            assert mine.members == theirs.members
            assert mine.after == theirs.after


@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("run", [3, 4], indirect=True)
def test_workers_that_are_lost_come_late_and_come_again_end_with_the_same_model(run: ElasticRun, name: str) -> None:
    problem, sync = Problem(workers=run.workers, steps=250), SYNCS[name]
    crew = trips(run, problem, sync, run.workers, connections=3)
    crew[1].until = 20
    again = Trip(problem, sync, run.link(1, silent_s=20.0), pause_s=PAUSE_S)
    for trip in crew:
        trip.awaited = again
        trip.start()
    crew[1].done.result(WAIT_S)
    vanish(crew[1].link)
    crew[0].reach(40)

    async def lose() -> None:
        link = crew[0].link
        assert isinstance(link, ElasticLink) and link._member is not None
        peer = next(process for process in link._member.protocol.view.members if process.seat == 2)
        link._member.peers.drop(peer)
        link._member.lost(peer, "was silent for 2 s")

    event_loop().run(lose())
    crew[0].reach(60)
    crew.append(again.start(late=True))
    found = [trip.done.result(WAIT_S) for trip in crew]
    close([crew[0], *crew[2:]])
    agree(found)
    # Each of the two takes the other for lost, and the registry accepts one of their views.
    returned = [one for one in (found[0], found[2]) if one.rejoins]
    assert len(returned) == 1 and returned[0].rejoins == 1 and returned[0].joined_at is not None
    assert found[-1].joined_at is not None
    assert sum(-1 in one.after for one in found) == run.workers
    last = max(found[-1].members)
    assert found[-1].members[last] == tuple(range(run.workers))
    assert np.isfinite(np.frombuffer(found[0].after[-1][0])).all()


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded(Faults):
    """Loses the payloads of the workers that a recorded round has done without."""

    members: Mapping[RoundId, tuple[int, ...]]

    def lost(self, worker: int, round_id: RoundId) -> bool:
        return worker not in self.members[round_id]


@pytest.mark.parametrize("name", SYNCS)
def test_rounds_do_without_a_worker_that_is_late_and_its_next_delta_has_its_work(run: ElasticRun, name: str) -> None:
    """As if its payloads had been lost on the way, in one process."""
    problem, sync = Problem(workers=3, steps=60), SYNCS[name]
    crew = trips(run, problem, sync, 3, grace_s=0.5)
    crew[1].nap = 20, crew[0], 20 + 2 * sync.period
    for trip in crew:
        trip.start()
    found = [trip.done.result(WAIT_S) for trip in crew]
    close(crew)
    agree(found)
    late = [round_id for round_id, members in found[0].members.items() if 1 not in members and round_id.step > 20]
    assert late and any(1 in members for round_id, members in found[0].members.items() if round_id > min(late))
    assert found[1].members == found[0].members
    assert not any(one.rejoins for one in found)
    expected = oracle(Problem(workers=3, steps=60, faults=Recorded(members=found[0].members)), sync)
    for theirs, mine in zip(expected, found, strict=True):
        assert mine.members == theirs.members
        assert mine.after == theirs.after


@pytest.mark.parametrize("run", [5], indirect=True)
def test_rounds_in_parts_do_without_a_worker_that_is_late(run: ElasticRun) -> None:
    problem, sync = Problem(workers=5, steps=60), SYNCS["streaming"]
    crew = trips(run, problem, sync, 5, grace_s=0.3)
    crew[1].nap = 20, crew[0], 32
    for trip in crew:
        trip.start()
    found = [trip.done.result(WAIT_S) for trip in crew]
    close(crew)
    agree(found)
    assert any(1 not in members for members in found[0].members.values()) and found[1].members == found[0].members
    assert not any(one.rejoins for one in found)


def test_a_worker_that_is_far_behind_joins_again(run: ElasticRun) -> None:
    problem, sync = Problem(workers=3, steps=150), SYNCS["eager"]
    crew = trips(run, problem, sync, 3, grace_s=0.3)
    crew[1].nap = 20, crew[0], 60
    lost: list[tuple[int, str]] = []
    for trip in crew:
        trip.awaited = None if trip is crew[1] else crew[1]
        assert isinstance(trip.link, ElasticLink)
        trip.link.hooks.on_lost = lambda worker, why: lost.append((worker, why))
        trip.start()
    until = time.monotonic() + WAIT_S
    while not lost or 1 not in crew[0].link.weights(10**6):
        assert time.monotonic() < until
        time.sleep(0.01)
    crew[1].joined.set()
    found = [trip.done.result(WAIT_S) for trip in crew]
    close(crew)
    agree(found)
    assert (1, "was more than 4 rounds of a fragment behind") in lost
    assert found[1].rejoins >= 1
    assert found[0].members[max(found[0].members)] == (0, 1, 2)
