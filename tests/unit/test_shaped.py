"""The link behind a line: the same bits as without, later; errors instead of hangs. Times have lower bounds only."""

import copy
import gc
import math
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from atoll import DataParallel, DiLoCo, Eager, Lockstep, OuterLoop, Streaming, Sync, local
from atoll.core.allreduce import Reduction, sent_bytes
from atoll.core.codec import Codec
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Contribution, Link, Member, Offer, Pending, Round, RoundId, TransferStats
from atoll.link.local import Absence, Faults, run_local
from atoll.link.shaped import LineClock, Outage, Shape, ShapedLink, shaped
from atoll.outer.presets import Gradients
from atoll.outer.stats import Observer
from atoll.plan.cost import transfer_s
from atoll.plan.line import Line as PlannedLine
from harness import PRESETS, Problem, Toy, bits, by_part, inner_step, train, train_data_parallel

QUICK = Shape(bits_per_s=1e7, latency_s=2e-4, jitter_s=2e-4, loss=0.1)
REDUCTION = Reduction(Codec("fp32"), 1000)
SECOND = RoundId(2, 0)


def loops_on(
    problem: Problem, sync: Sync | Gradients, shape: Shape | None, observer: Observer | None = None
) -> list[OuterLoop]:
    links: Sequence[Link] = local(problem.workers, faults=problem.faults, timeout_s=30)
    if shape is not None:
        links = shaped(links, shape)
    model = Toy(problem.start, problem.sizes, problem.dtype)
    return [OuterLoop(copy.deepcopy(model), sync, link, observer=observer) for link in links]


def contribution(worker: int, value: int = 0) -> Contribution:
    return Contribution(Member(worker, 1.0, 0, 0), torch.full((REDUCTION.payload_bytes,), value, dtype=torch.uint8))


def joined(workers: int, shape: Shape, **options: Any) -> list[ShapedLink]:
    links = shaped(local(workers, **options), shape)
    for link in links:
        link.join({}, 1.0)
    return links


def couriers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("atoll-line-")}


# ---------------------------------------------------------------------- the same bits


@pytest.mark.parametrize("name", PRESETS)
def test_one_caller_gets_the_bits_of_the_plain_link(name: str) -> None:
    problem = Problem()
    plain, late = (loops_on(problem, PRESETS[name], shape) for shape in (None, QUICK))
    for loops in (plain, late):
        train(loops, problem.steps, problem.inner)
        Lockstep(loops).finish()
    assert [bits(loop) for loop in late] == [bits(loop) for loop in plain]


@pytest.mark.parametrize("name", ["diloco", "unequal delays", "stochastic"])
def test_two_shots_losses_absences_and_slow_workers_change_nothing(name: str) -> None:
    absences = (Absence(worker=1, first=3, last=9), Absence(worker=4, first=12))
    problem = Problem(workers=5, faults=Faults(drop=0.2, absences=absences, speeds={2: 0.5}))
    sync = replace(PRESETS[name], delay=(0, 3, 6, 3, 0)) if name == "unequal delays" else PRESETS[name]
    plain, late = (loops_on(problem, sync, shape) for shape in (None, QUICK))
    for loops in (plain, late):
        train(loops, problem.steps, problem.inner)
    assert [bits(loop) for loop in late] == [bits(loop) for loop in plain]


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_data_parallel_sends_before_the_others_have_joined(workers: int) -> None:
    problem = Problem(workers=workers)
    plain, late = (loops_on(problem, DataParallel(), shape) for shape in (None, QUICK))
    for loops in (plain, late):
        train_data_parallel(loops, 8, problem.inner)
    assert [bits(loop) for loop in late] == [bits(loop) for loop in plain]


def test_a_resumed_run_takes_up_its_rounds_in_flight() -> None:
    problem, sync = Problem(), PRESETS["several in flight"]
    plain, late = loops_on(problem, sync, None), loops_on(problem, sync, QUICK)
    train(plain, 12, problem.inner)
    train(late, 7, problem.inner)
    resumed = loops_on(problem, sync, QUICK)
    for before, after in zip(late, resumed, strict=True):
        after.model.load_state_dict(before.model.state_dict())
        after.load_state_dict(before.state_dict())
    train(resumed, 5, problem.inner)
    assert [bits(loop) for loop in resumed] == [bits(loop) for loop in plain]


@pytest.mark.parametrize("name", ["eager", "unequal delays"])
def test_threads_get_the_bits_of_one_caller_even_if_they_end_with_rounds_in_flight(name: str) -> None:
    """run_local closes the link of a worker whose work has ended: what it sent last must still arrive."""
    problem = Problem()
    plain = loops_on(problem, PRESETS[name], None)
    train(plain, problem.steps, problem.inner)

    def work(link: Any) -> OuterLoop:
        loop = OuterLoop(Toy(problem.start, problem.sizes, problem.dtype), PRESETS[name], link)
        for _ in range(problem.steps):
            inner_step(loop, problem.inner)
            loop.step()
        return loop

    links = shaped(local(problem.workers, timeout_s=30), QUICK)
    late = run_local(work, cast(Any, links))
    assert [bits(loop) for loop in late] == [bits(loop) for loop in plain]


# ---------------------------------------------------------------------- later


@pytest.mark.parametrize("workers", [2, 4])
def test_diloco_waits_for_the_line(workers: int) -> None:
    problem, seen = Problem(workers=workers), list[TransferStats]()
    sync = DiLoCo(period=2)
    payload_bytes = sync.codec.payload_bytes(sum(problem.sizes))
    line = PlannedLine(5_000, 0.02)
    round_s = transfer_s(payload_bytes, workers, line)
    shape = Shape(bits_per_s=line.bits_per_s, latency_s=line.latency_s)
    loops = loops_on(problem, sync, shape, lambda applied: seen.append(cast(TransferStats, applied.transfer)))
    began = time.perf_counter()
    train(loops, 4, problem.inner)
    assert time.perf_counter() - began >= 2 * round_s
    assert len(seen) == 2 * workers
    for transfer in seen:
        assert transfer.done_s - transfer.opened_s >= round_s
        assert transfer.sent_bytes == transfer.received_bytes == sent_bytes(payload_bytes, workers)
    assert sum(loop.counters.wait_s for loop in loops) > 0
    assert loops[0].counters.wire_sent == 2 * seen[0].sent_bytes


@pytest.mark.parametrize("sync", [Eager(period=3), Streaming(period=4, fragments=by_part(4), delay=3)])
def test_rounds_travel_while_workers_train(sync: Sync) -> None:
    problem, latency_s = Problem(workers=2), 0.1
    loops = loops_on(problem, sync, Shape(latency_s=latency_s))
    crew = Lockstep(loops)
    for _ in range(10):
        time.sleep(0.05)
        for loop in loops:
            inner_step(loop, problem.inner)
        crew.step()
    for loop in loops:
        assert loop.counters.rounds_applied
        # Each travels for 0.1 s or more, and 0.15 s or more pass before it is applied; noise may eat half of it.
        assert loop.counters.hidden_s >= loop.counters.rounds_applied * latency_s / 2


def test_opening_does_not_wait_and_rounds_share_the_line() -> None:
    links = joined(2, Shape(bits_per_s=8 * REDUCTION.payload_bytes / 0.05))
    began = time.perf_counter()
    pending = [[link.open(RoundId(1, f), contribution(link.worker, f), REDUCTION) for f in range(3)] for link in links]
    completed = [p.wait() for p in pending[1]]
    assert time.perf_counter() - began >= 3 * 0.05
    for fragment, one in enumerate(completed):
        assert one.transfer is not None and one.round_id == RoundId(1, fragment)
        assert one.transfer.done_s - began >= (fragment + 1) * 0.05
        assert [int(payload[0]) for payload in one.payloads] == [fragment, fragment]


def test_what_others_send_is_late_not_what_one_has() -> None:
    """The sender is delayed: a worker with a slow line holds up the other, whose own is quick."""
    quick, slow = local(2)
    links = [ShapedLink(quick, Shape()), ShapedLink(slow, Shape(latency_s=0.2))]
    for link in links:
        link.join({}, 1.0)
    completed = [p.wait() for p in [link.open(SECOND, contribution(link.worker), REDUCTION) for link in links]]
    for one in completed:
        assert one.transfer is not None and one.transfer.done_s - one.transfer.opened_s >= 0.19


def test_nothing_leaves_in_an_outage() -> None:
    began = time.perf_counter()
    (link, other) = joined(2, Shape(outages=(Outage(start_s=0, length_s=0.3),)))
    pending = [end.open(SECOND, contribution(end.worker), REDUCTION) for end in (link, other)]
    pending[0].wait()
    assert time.perf_counter() - began >= 0.3


def test_absent_and_lonely_workers_wait_for_no_line() -> None:
    forever = Shape(latency_s=1e6)
    links = joined(2, forever, faults=Faults(absences=(Absence(worker=0, first=2, last=2),)))
    (lonely,) = joined(1, forever)
    for link in (links[1], lonely):
        pending = link.open(SECOND, contribution(link.worker), REDUCTION)
        absent = links[0].open(SECOND, None, REDUCTION)
        completed = pending.wait()
        assert [m.worker for m in completed.members] == [link.worker]
        assert (
            completed.transfer is not None and completed.transfer.sent_bytes == completed.transfer.received_bytes == 0
        )
    seen = absent.wait().transfer
    assert seen is not None and (seen.sent_bytes, seen.received_bytes) == (0, REDUCTION.payload_bytes)


def test_an_absent_worker_sends_nothing_and_hears_of_all() -> None:
    links = joined(3, Shape(), faults=Faults(absences=(Absence(worker=0, first=2, last=2),)))
    pending = [link.open(SECOND, contribution(link.worker) if link.worker else None, REDUCTION) for link in links]
    seen = [one.wait().transfer for one in pending]
    size = REDUCTION.payload_bytes
    assert [(one.sent_bytes, one.received_bytes) for one in seen if one is not None] == [
        (0, 2 * size),
        (size, size),
        (size, size),
    ]


def test_what_has_passed_before_an_outage_has_passed() -> None:
    line = LineClock(Shape(bits_per_s=8.0, outages=(Outage(start_s=1.0, length_s=2.0),)))
    assert line.carry(0.0, 2, 1, random.Random(0)) == (0.0, 4.0, 4.0)


def test_luck_depends_on_the_seed_the_worker_and_the_round() -> None:
    def luck(seed: int, worker: int, step: int, fragment: int = 0) -> float:
        return Shape(seed=seed).rng(worker, RoundId(step, fragment)).random()

    drawn = [luck(0, 0, 1), luck(1, 0, 1), luck(0, 1, 1), luck(0, 0, 2), luck(0, 0, 1, 1)]
    assert len(set(drawn)) == 5 and luck(0, 0, 1) == drawn[0]


# ---------------------------------------------------------------------- the inner link


class Stub(Link):
    """An inner link with trouble of its own."""

    worker, workers = 0, 2

    def __init__(
        self, join: Exception | None = None, open_: Exception | None = None, transfer: TransferStats | None = None
    ):
        self.join_error, self.open_error, self.transfer = join, open_, transfer
        self.check_error: Exception | None = None
        self.threads: list[threading.Thread] = []
        self.closed: list[str | None] = []
        self.blocked = threading.Event()
        self.blocked.set()

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        self.threads.append(threading.current_thread())
        if self.join_error:
            raise self.join_error

    def present(self, step: int) -> bool:
        return step > 1

    def trains(self, step: int) -> bool:
        return step > 2

    def weights(self, step: int) -> Mapping[int, float]:
        return {0: 1.0, 1: 3.0}

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        self.blocked.wait()
        self.threads.append(threading.current_thread())
        if self.open_error:
            raise self.open_error
        return cast(Pending, Done(Round(round_id, (), (), transfer=self.transfer)))

    def on_any_rank(self, so: bool) -> bool:
        return so

    def check(self) -> None:
        if self.check_error:
            raise self.check_error

    def close(self, reason: str | None = None) -> None:
        self.closed.append(reason)


class Done:
    def __init__(self, completed: Round) -> None:
        self.completed = completed

    def wait(self) -> Round:
        return self.completed


def test_all_calls_that_note_their_thread_come_from_one() -> None:
    stub = Stub()
    link = ShapedLink(stub, Shape())
    link.join({}, 1.0)
    for step in range(2, 4):
        link.open(RoundId(step, 0), None, REDUCTION).wait()
    (thread,) = set(stub.threads)
    assert thread is not threading.current_thread() and thread.daemon
    assert (link.worker, link.workers, link.weights(1)) == (0, 2, {0: 1.0, 1: 3.0})
    assert [link.present(2), link.trains(2), link.present(1), link.trains(3)] == [True, False, False, True]
    link.close()
    link.close("again")
    thread.join(20)
    assert not thread.is_alive() and stub.closed == [None]


def test_bytes_that_the_inner_link_has_counted_stay() -> None:
    counted = TransferStats(1.0, math.inf, sent_bytes=0, received_bytes=7)
    link = ShapedLink(Stub(transfer=counted), Shape())
    link.join({}, 1.0)
    before = time.perf_counter()
    transfer = link.open(SECOND, None, REDUCTION).wait().transfer
    assert transfer is not None and (transfer.sent_bytes, transfer.received_bytes, transfer.done_s) == (0, 7, math.inf)
    assert before <= transfer.opened_s <= time.perf_counter()
    bare = ShapedLink(Stub(), Shape())
    bare.join({}, 1.0)
    filled = bare.open(SECOND, contribution(0), REDUCTION).wait().transfer
    assert filled is not None and (filled.sent_bytes, filled.received_bytes) == (REDUCTION.payload_bytes, 0)
    assert filled.opened_s <= filled.done_s <= time.perf_counter()


def test_errors_of_the_inner_link_reach_the_caller() -> None:
    refused = ShapedLink(Stub(join=LinkError("differ in period")), Shape())
    with pytest.raises(LinkError, match="differ in period"):
        refused.join({}, 1.0)
    stub = Stub(open_=OSError("no route"))
    link = ShapedLink(stub, Shape())
    link.join({}, 1.0)
    link.check()
    pending = link.open(SECOND, None, REDUCTION)
    with pytest.raises(OSError, match="no route"):
        pending.wait()
    with pytest.raises(OSError, match="no route"):
        link.check()
    stub.open_error = None
    assert link.open(RoundId(3, 0), None, REDUCTION).wait().round_id == RoundId(3, 0)


def test_a_failure_while_nobody_waits_is_asked_for() -> None:
    stub = Stub()
    link = ShapedLink(stub, Shape())
    link.join({}, 1.0)
    stub.check_error = LinkError("worker 1 has gone")
    with pytest.raises(LinkError, match="worker 1 has gone"):
        link.check()


def test_workers_with_different_settings_are_told_what_differs_and_may_try_again() -> None:
    links = shaped(local(2), Shape())
    links[0].join({"period": "5"}, 1.0)
    with pytest.raises(LinkError, match="worker 1 and worker 0 differ in period: 6 against 5"):
        links[1].join({"period": "6"}, 1.0)
    links[1].join({"period": "5"}, 2.0)
    assert links[0].weights(1) == {0: 1.0, 1: 2.0}


def test_a_worker_that_never_comes_is_named() -> None:
    (link, _) = shaped(local(2, timeout_s=0.05), Shape())
    link.join({}, 1.0)
    with pytest.raises(LinkError, match=r"nothing from worker 1 in 0.05 s"):
        link.open(SECOND, contribution(0), REDUCTION).wait()


# ---------------------------------------------------------------------- the end


def test_the_inner_link_learns_that_finish_was_not_called() -> None:
    inner = local(1)
    (link,) = shaped(inner, Shape(bits_per_s=1e9))
    link.unfinished = True  # as an outer loop sets it
    link.close()
    assert inner[0].unfinished


def test_a_closed_link_lets_everybody_go() -> None:
    links = joined(2, Shape(latency_s=1e6))
    pending = [link.open(SECOND, contribution(link.worker), REDUCTION) for link in links]
    errors: list[str] = []

    def work() -> None:
        try:
            pending[0].wait()
        except LinkError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=work)
    waiting.start()
    links[0].close("the show is over")
    links[0].close("twice")
    waiting.join(20)
    assert errors == ["the link of worker 0 is closed: the show is over"]
    for call in (
        pending[0].wait,
        lambda: links[0].open(RoundId(3, 0), None, REDUCTION),
        lambda: links[0].join({}, 1.0),
    ):
        with pytest.raises(LinkError, match="the link of worker 0 is closed: the show is over"):
            call()
    links[1].close()
    with pytest.raises(LinkError, match="the link of worker 1 is closed: it has left"):
        pending[1].wait()


def test_what_was_opened_before_closing_still_arrives() -> None:
    """Worker 1's two rounds would take weeks; they are handed over when it leaves, and worker 0 has both."""
    ends = local(2, timeout_s=20)
    links = [ShapedLink(ends[0], Shape()), ShapedLink(ends[1], Shape(latency_s=1e6))]
    for link in links:
        link.join({}, 1.0)
    pending = [[link.open(RoundId(step, 0), contribution(link.worker), REDUCTION) for step in (1, 2)] for link in links]
    links[1].close("it has had enough")
    assert [[m.worker for m in p.wait().members] for p in pending[0]] == [[0, 1], [0, 1]]
    with pytest.raises(LinkError, match="worker 1 left without sending: it has had enough"):
        links[0].open(RoundId(3, 0), contribution(0), REDUCTION).wait()


def test_an_inner_link_that_blocks_does_not_hold_up_whoever_waits_for_a_closed_one() -> None:
    stub = Stub()
    stub.blocked.clear()
    link = ShapedLink(stub, Shape())
    link.join({}, 1.0)
    pending = link.open(SECOND, None, REDUCTION)
    link.close("enough")
    with pytest.raises(LinkError, match="closed: enough"):
        pending.wait()
    stub.blocked.set()


def test_a_link_needs_to_be_joined_once() -> None:
    (link,) = shaped(local(1), Shape())
    with pytest.raises(LinkError, match="step 2, fragment 0: worker 0 has not joined yet"):
        link.open(SECOND, None, REDUCTION)
    link.check()
    link.join({}, 1.0)
    with pytest.raises(LinkError, match="worker 0 has joined already"):
        link.join({}, 1.0)
    (unused,) = shaped(local(1), Shape())
    unused.close()


def test_a_dropped_link_ends_its_thread_unless_somebody_may_wait() -> None:
    gc.collect()
    before = couriers()
    links = joined(2, Shape(latency_s=0.1))
    mine = couriers() - before
    pending = [link.open(SECOND, contribution(link.worker), REDUCTION) for link in links]
    gone = [weakref.ref(link) for link in links]
    del links
    assert len(mine) == 2 and len(pending[0].wait().members) == 2
    del pending
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    for thread in mine:
        thread.join(20)
        assert not thread.is_alive()


def test_payloads_are_let_go_once_handed_over() -> None:
    links = joined(2, Shape())
    sent = [contribution(0), contribution(1)]
    pending = [link.open(SECOND, one, REDUCTION) for link, one in zip(links, sent, strict=True)]
    assert len([p.wait() for p in pending]) == 2
    payload = weakref.ref(sent[0].payload)
    del sent
    deadline = time.monotonic() + 20
    while payload() is not None and time.monotonic() < deadline:
        time.sleep(0.01)  # the threads may still be on their way to the next round
    assert payload() is None and pending


def test_a_process_ends_with_rounds_under_way() -> None:
    script = """
import torch, atoll
from atoll.link.shaped import Shape, shaped
links = shaped(atoll.local(2), Shape(latency_s=1e6))
loops = [atoll.OuterLoop(torch.nn.Linear(2, 2, bias=False).requires_grad_(), atoll.Eager(period=1), l) for l in links]
with torch.no_grad():
    loops[1].model.weight.copy_(loops[0].model.weight)
loops[1] = atoll.OuterLoop(loops[1].model, atoll.Eager(period=1), links[1])
atoll.Lockstep(loops).step()
print("trained")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shape(bits_per_s=0), "bits_per_s must be a number above 0, got 0"),
        (lambda: Shape(bits_per_s=math.nan), "bits_per_s must be a number above 0, got nan"),
        (lambda: Shape(bits_per_s="fast"), "bits_per_s must be a number above 0, got 'fast'"),  # type: ignore[arg-type]
        (lambda: Shape(latency_s=-1), "latency_s must be a finite number of at least 0, got -1"),
        (lambda: Shape(latency_s=math.inf), "latency_s must be a finite number"),
        (lambda: Shape(jitter_s=math.nan), "jitter_s must be a finite number of at least 0, got nan"),
        (lambda: Shape(loss=1), "loss must be a probability of at least 0 and below 1, got 1"),
        (lambda: Shape(loss=-0.1), "loss must be a probability"),
        (lambda: Shape(outages=[Outage(start_s=0, length_s=1)]), "outages must be a tuple"),  # type: ignore[arg-type]
        (lambda: Shape(outages=((0, 1),)), "outages must be a tuple of Outage"),  # type: ignore[arg-type]
        (lambda: Shape(seed=0.5), "seed must be a whole number of at least 0, got 0.5"),  # type: ignore[arg-type]
        (lambda: Outage(start_s=-1, length_s=1), "an outage's start_s must be a finite number of at least 0, got -1"),
        (lambda: Outage(start_s=0, length_s=math.inf), "an outage's length_s must be a finite number"),
        (lambda: shaped(local(2), {"loss": 0.1}), "shape must be a Shape"),  # type: ignore[arg-type]
        (lambda: ShapedLink(local(2), Shape()), "needs the link of one worker, got list"),  # type: ignore[arg-type]
    ],
)
def test_refusals(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
