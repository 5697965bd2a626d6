"""Workers that come and go over an elastic link, at the level of rounds: no model, no outer loop."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import ExcludedError, LinkError
from atoll.link.base import STEPS_MADE, Contribution, FragmentState, Link, Member, Round, RoundId
from atoll.link.net import member as member_module
from atoll.link.net.elastic_link import ElasticLink
from atoll.link.net.event_loop import event_loop
from elastic_links import ElasticRun, elastic_run

pytestmark = pytest.mark.processes  # waits for connections more than it computes

NUMEL = 1000
TERMS = {"period": "5"}


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ElasticRun]:
    with elastic_run(getattr(request, "param", 3), tmp_path) as made:
        yield made


def reduction(step: int) -> Reduction:
    return Reduction(Codec("fp32"), NUMEL, order=(step, 0, 0))


def offer(worker: int, step: int) -> Contribution:
    return Contribution(
        Member(worker, 1.0, step, 7), torch.full((NUMEL,), float(100 * step + worker)).view(torch.uint8)
    )


def save(step: int) -> Callable[[int], FragmentState]:
    """Return what a worker that has applied all rounds up to a step would give a joiner."""
    return lambda fragment: FragmentState(
        fragment, step, {"version": step}, {"anchor": torch.full((NUMEL,), float(step)), "velocity": torch.zeros(NUMEL)}
    )


def reached(step: int, worker: "Worker", running: "Future[None]") -> None:
    """Wait until a worker has come to a step."""
    while worker.step < step:
        if running.done():
            running.result()
        time.sleep(0.005)


class Worker:
    """Opens one round a step in its own thread, and keeps what it completes."""

    def __init__(self, link: ElasticLink, steps: int, pause_s: float = 0.0) -> None:
        self.link = link
        self.steps = steps
        self.pause_s = pause_s
        self.step = 0
        self.completed: dict[int, Round] = {}
        self.joined_at: int | None = None
        self.stop = threading.Event()

    def run(self) -> None:
        admission = self.link.join(TERMS, 1.0, {STEPS_MADE: "0"})
        if admission is not None:
            self.catch_up(admission)
        while self.step < self.steps and not self.stop.is_set():
            self.step += 1
            self.round(offer(self.link.worker, self.step))
            time.sleep(self.pause_s)

    def round(self, own: Contribution | None) -> None:
        pending = self.link.open(RoundId(self.step, 0), own, reduction(self.step))
        self.completed[self.step] = pending.wait()
        self.link.advanced(self.step, self.step, save(self.step))

    def catch_up(self, admission: Any) -> None:
        (state,) = admission.states(1)
        assert torch.equal(state.vectors["anchor"], torch.full((NUMEL,), float(state.applied)))
        assert state.counts == {"version": state.applied}
        self.step = state.applied
        while self.step < admission.newest_step():
            self.step += 1
            self.round(None)
        boundary = admission.promote()
        while self.step < boundary:
            self.step += 1
            self.round(None)
        self.joined_at = boundary


class Threads:
    """Runs functions in daemon threads: one that hangs fails its test, and no other."""

    def submit(self, act: Callable[[], None]) -> "Future[None]":
        done: Future[None] = Future()

        def run() -> None:
            try:
                act()
                done.set_result(None)
            except BaseException as error:
                done.set_exception(error)

        threading.Thread(target=run, daemon=True).start()
        return done


@pytest.fixture
def pool() -> Threads:
    return Threads()


def close(*links: Link) -> None:
    for link in links:
        link.close("the test has ended")


def members(completed: Round) -> list[int]:
    return [member.worker for member in completed.members]


def agree(workers: list[Worker]) -> None:
    """Check that every round is the same on all workers that completed it."""
    for step in {step for worker in workers for step in worker.completed}:
        rounds = [worker.completed[step] for worker in workers if step in worker.completed]
        for other in rounds[1:]:
            assert members(other) == members(rounds[0])
            assert other.complete == rounds[0].complete
            bits = zip(other.payloads, rounds[0].payloads, strict=True)
            assert all(torch.equal(a, b) for a, b in bits)
            assert other.reduced is None or (
                rounds[0].reduced is not None and torch.equal(other.reduced, rounds[0].reduced)
            )


@pytest.mark.parametrize("run", [2, 3, 4, 5], indirect=True)
def test_a_worker_joins_a_run_that_is_under_way(run: ElasticRun, pool: Threads) -> None:
    late = run.workers - 1
    first = [Worker(run.link(worker, join_s=0.5), 150, 0.01) for worker in range(late)]
    running = [pool.submit(worker.run) for worker in first]
    reached(10, first[0], running[0])
    joiner = Worker(run.link(late), 150)
    joiner.run()
    for one in running:
        one.result(30)
    assert joiner.joined_at is not None and joiner.joined_at >= 10
    agree([*first, joiner])
    for step, completed in first[0].completed.items():
        expected = list(range(run.workers if step > joiner.joined_at else late))
        assert members(completed) == expected and completed.complete
    close(*(worker.link for worker in first), joiner.link)


@pytest.mark.parametrize("run", [2, 3, 4, 5], indirect=True)
@pytest.mark.parametrize("victim", [0, 1])
def test_the_others_go_on_without_a_lost_worker(run: ElasticRun, pool: Threads, victim: int) -> None:
    workers = [Worker(run.link(worker), 80, 0.005) for worker in range(run.workers)]
    running = [pool.submit(worker.run) for worker in workers]
    reached(20, workers[victim], running[victim])
    workers[victim].stop.set()
    running[victim].result(30)
    vanish(workers[victim].link)
    rest = [worker for worker in workers if worker is not workers[victim]]
    for one in running:
        one.result(30)
    agree(workers)
    assert members(rest[0].completed[80]) == [worker.link.worker for worker in rest]
    close(*(worker.link for worker in rest))


def vanish(link: ElasticLink) -> None:
    """Close a link's connections as the kernel does for a killed process: nothing is said."""
    member = link._member
    assert member is not None
    event_loop().run(member.peers.close(""))
    event_loop().run(member.membership.close())


def test_an_excluded_worker_joins_again(run: ElasticRun, pool: Threads) -> None:
    workers = [Worker(run.link(worker), 400, 0.005) for worker in range(3)]
    running = [pool.submit(worker.run) for worker in workers[:2]]
    cut_off = workers[2]

    def run_cut_off() -> None:
        with pytest.raises(ExcludedError, match="worker 2"):
            cut_off.run()
        sent = {worker: line.sent for worker, line in cut_off.link.lines().items()}
        cut_off.catch_up(cut_off.link.rejoin())
        assert min(sent.values()) > 0 and all(cut_off.link.lines()[worker].sent >= sent[worker] for worker in sent)
        while cut_off.step < cut_off.steps:
            cut_off.step += 1
            cut_off.round(offer(2, cut_off.step))

    running.append(pool.submit(run_cut_off))
    reached(20, cut_off, running[2])

    async def lose() -> None:
        member = workers[0].link._member
        assert member is not None
        peer = next(process for process in member.protocol.view.members if process.seat == 2)
        member.peers.drop(peer)
        member.lost(peer, "was silent for 2 s")

    event_loop().run(lose())
    for one in running:
        one.result(60)
    assert cut_off.joined_at is not None
    assert members(workers[0].completed[400]) == [0, 1, 2]
    agree(workers)
    close(*(worker.link for worker in workers))


def test_one_that_is_excluded_after_its_last_round_does_not_end_well(run: ElasticRun, pool: Threads) -> None:
    """The others may have completed that round without it: then it has a model that nobody else has."""
    links = run.links()
    for joined in [pool.submit(lambda link=link: link.join(TERMS, 1.0)) for link in links]:  # type: ignore[misc]
        joined.result(30)
    for pending in [link.open(RoundId(1, 0), offer(link.worker, 1), reduction(1)) for link in links]:
        pending.wait()
    links[2].advanced(1, 1, save(1))  # it knows that the others have applied the round only once they say so
    closing = pool.submit(links[2].close)
    member = links[0]._member
    assert member is not None
    event_loop().post(lambda: member.membership.propose(member.protocol.view.without({2})))
    with pytest.raises(ExcludedError, match="its model may differ") as caught:
        closing.result(30)
    assert caught.value.worker == 2
    for link in links[:2]:
        link.advanced(1, 1, save(1))
    for closed in [pool.submit(link.close) for link in links[:2]]:
        closed.result(30)


def test_of_two_that_have_just_joined_and_lose_each_other_one_leaves(
    run: ElasticRun, pool: Threads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither knows all rounds of the lost one, so neither may go on without it; but worker 0 can."""
    monkeypatch.setattr(member_module, "_LEAVE_S", 0.5)
    first = Worker(run.link(0, join_s=0.5), 100, 0.01)
    running = pool.submit(first.run)
    reached(5, first, running)
    joiners = [run.link(worker) for worker in (1, 2)]
    admissions = [link.join(TERMS, 1.0) for link in joiners]
    for admission in admissions:
        assert admission is not None and list(admission.states(1))
    for admission in admissions:
        assert admission is not None and admission.promote() >= 5

    async def cut() -> None:
        one, two = (link._member for link in joiners)
        assert one is not None and two is not None
        one.peers.drop(two.protocol.me)
        one.lost(two.protocol.me, "was silent for 2 s")

    event_loop().run(cut())
    until = time.monotonic() + 30
    while not (out := [link for link in joiners if link._member is not None and link._member.error is not None]):
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(ExcludedError):
        out[0].check()
    close(*joiners)
    running.result(30)
    assert members(first.completed[100]) == [0]
    close(first.link)


def test_rounds_go_on_while_the_registry_is_away(run: ElasticRun, pool: Threads) -> None:
    workers = [Worker(run.link(worker), 200, 0.005) for worker in range(3)]
    running = [pool.submit(worker.run) for worker in workers]
    reached(20, workers[0], running[0])
    run.restart_registry()
    for one in running:
        one.result(60)
    assert members(workers[0].completed[200]) == [0, 1, 2]
    close(*(worker.link for worker in workers))


def test_fewer_than_min_workers_pause(run: ElasticRun, pool: Threads) -> None:
    workers = [Worker(run.link(worker, min_workers=2, join_s=0.5), 300, 0.005) for worker in range(2)]
    running = [pool.submit(worker.run) for worker in workers]
    reached(20, workers[0], running[0])
    workers[1].stop.set()
    running[1].result(30)
    vanish(workers[1].link)
    time.sleep(0.5)
    paused_at = workers[0].step
    time.sleep(0.5)
    assert workers[0].step == paused_at < 300
    back = Worker(run.link(1, min_workers=2), 300)
    running.append(pool.submit(back.run))
    running[0].result(30)
    running[2].result(30)
    agree([workers[0], back])
    close(workers[0].link, back.link)


def test_a_worker_with_other_terms_is_refused_and_the_others_go_on(run: ElasticRun, pool: Threads) -> None:
    workers = [Worker(run.link(worker, join_s=0.5), 100, 0.01) for worker in range(2)]
    running = [pool.submit(worker.run) for worker in workers]
    reached(5, workers[0], running[0])
    stranger = run.link(2)
    with pytest.raises(LinkError, match="period: "):
        stranger.join({"period": "6"}, 1.0)
    for one in running:
        one.result(30)
    assert members(workers[0].completed[100]) == [0, 1]
    close(*(worker.link for worker in workers), stranger)


LARGE = 700_000


@pytest.mark.parametrize("run", [3, 4], indirect=True)
def test_payloads_cross_several_connections(run: ElasticRun, pool: Threads) -> None:
    """In one shot and in two; the end that dials says how many, and several rounds are on their way at once."""
    links = [run.link(worker, connections=1 + worker) for worker in range(run.workers)]
    steps = range(1, 5)
    values = torch.arange(LARGE, dtype=torch.float32)

    def train(link: ElasticLink, found: dict[int, Round]) -> None:
        link.join(TERMS, 1.0, {STEPS_MADE: "0"})
        pending = {}
        for step in steps:
            own = Contribution(
                Member(link.worker, 1.0, 0, 7), ((1 + link.worker) * values + step).contiguous().view(torch.uint8)
            )
            pending[step] = link.open(RoundId(step, 0), own, Reduction(Codec("fp32"), LARGE, order=(step, 0, 0)))
        found |= {step: one.wait() for step, one in pending.items()}

    rounds: list[dict[int, Round]] = [{} for _ in links]
    running = [
        pool.submit(lambda link=link, found=found: train(link, found))  # type: ignore[misc]
        for link, found in zip(links, rounds, strict=True)
    ]
    for one in running:
        one.result(60)
    used = {len(session._streams.bulks) for link in links for session in inside(link).peers._sessions.values()}
    assert len(used) > 1 and used <= {1 + worker for worker in range(run.workers)}
    for step in steps:
        for found in rounds:
            if run.workers == 3:
                sent = [payload.view(torch.float32) for payload in found[step].payloads]
                assert all(torch.equal(one, (1 + worker) * values + step) for worker, one in enumerate(sent))
            else:
                reduced, first = found[step].reduced, rounds[0][step].reduced
                assert reduced is not None and first is not None and torch.equal(reduced, first)
                torch.testing.assert_close(reduced.view(torch.float32), 2.5 * values + step)
    close(*links)


def inside(link: ElasticLink) -> Any:
    assert link._member is not None
    return link._member
