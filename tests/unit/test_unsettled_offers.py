"""What kernels still encode when it is sent: nobody waits for it, and what cannot be sent is acted on at the next due
step. By Triton's interpreter; test_cuda.py has the waiting itself, on a GPU."""

import copy
import gc
import pickle
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import harness

pytest.importorskip("triton", reason="Triton is not installed")

from atoll import Eager, Lockstep, OuterLoop, Streaming, Sync, connect, local
from atoll._util.device_values import DeviceValues
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import NonFiniteError
from atoll.link.base import Contribution, Link, Member, Round, RoundId
from atoll.link.local import Faults
from atoll.link.shaped import Shape, shaped
from atoll.outer.stats import Applied
from harness import PRESETS, Problem, bits, by_part, check_recovered, inner_step, spoil, toy, train

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(torch.cuda.is_available(), reason="kernels on a CPU need Triton's interpreter"),
    pytest.mark.filterwarnings("ignore:.* encountered in .*:RuntimeWarning"),
]

PROBLEM = Problem(sizes=(32, 16, 48, 16), dtype=torch.float32)  # parameters that fall into the kernels' stretches
ALONE = replace(PROBLEM, workers=1)
LATE = [name for name, sync in PRESETS.items() if min(sync.delays) > 0 or len(sync.delays) > 1]
QUICK = ("streaming", "eager", "unequal delays")
SOME = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in LATE]
"""Some presets always, and all of them in `make slow`: every launch takes Triton's interpreter milliseconds."""
STREAMING = Streaming(period=6, fragments=by_part(4), delay=2)


@pytest.fixture(autouse=True)
def _by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.kernels.usable", lambda device: True)


def tolerant(sync: Sync, observed: list[Applied] | None = None) -> list[OuterLoop]:
    return harness.tolerant(PROBLEM, sync, observed)


# ---------------------------------------------------------------------- what cannot be sent


@pytest.mark.parametrize("name", SOME)
def test_a_spoilt_worker_is_left_out_once_of_every_fragment(name: str) -> None:
    sync, observed = PRESETS[name], list[Applied]()
    loops = tolerant(sync, observed)
    train(loops, 7, PROBLEM.inner)
    spoil(loops[1])
    train(loops, 21, PROBLEM.inner)
    sent = [loop.counters.rounds_sent for loop in loops]
    # Where a fragment is all that is due, it is rolled back when it is sent again, with nothing to send.
    left_out = 2 if name in ("eager", "delayed") else len(loops[0].fragments)
    assert sent[0] - sent[1] == left_out and sent[0] == sent[2]
    for applied in observed:  # nobody has put in a vector of zeros
        products = np.array(applied.sums[1:]).reshape(len(applied.members), -1)
        assert (products.diagonal() > 0).all()
    check_recovered(loops, observed, left_out)


def test_it_is_rolled_back_at_the_next_step_where_something_is_due() -> None:
    (loop,) = harness.tolerant(ALONE, Streaming(period=12, fragments=by_part(4), delay=2))
    train([loop], 22, PROBLEM.inner)
    spoil(loop)  # fragment 0, which is sent after 24
    seen = {}
    for _ in range(6):
        train([loop], 1, PROBLEM.inner)
        seen[loop.steps] = loop.counters.roll_backs
    assert [step for step in seen if loop.is_due(step)] == [23, 24, 26, 27]
    assert seen == {23: 0, 24: 0, 25: 0, 26: 1, 27: 1, 28: 1}


def test_where_it_is_not_tolerated_the_next_due_step_names_the_parameter_every_time() -> None:
    (loop,) = ALONE.loops(STREAMING)
    train([loop], 5, PROBLEM.inner)
    spoil(loop)
    train([loop], 1, PROBLEM.inner)
    for _ in range(2):
        with pytest.raises(NonFiniteError, match=r"worker 0, step 6, fragment 0, parameter 'parts\.0\.values'"):
            loop.step()
    with pytest.raises(NonFiniteError, match="step 6, fragment 0"):
        loop.finish()
    loop.roll_back()
    train([loop], 12, PROBLEM.inner)
    assert loop.counters.roll_backs == 1 and np.isfinite(toy(loop).vector()).all()


def test_a_value_that_has_come_to_rights_meanwhile_is_refused_all_the_same() -> None:
    (loop,) = ALONE.loops(STREAMING)
    train([loop], 5, PROBLEM.inner)
    spoil(loop)
    train([loop], 1, PROBLEM.inner)
    with torch.no_grad():
        next(loop.model.parameters()).zero_()
    with pytest.raises(NonFiniteError, match=r"parameter 'parts\.0\.values': a value was not finite, or too large"):
        loop.step()


def test_who_was_rolled_back_meanwhile_is_not_rolled_back_again() -> None:
    loops = tolerant(STREAMING)
    train(loops, 5, PROBLEM.inner)
    spoil(loops[1])
    train(loops, 1, PROBLEM.inner)
    loops[1].roll_back()
    train(loops, 20, PROBLEM.inner)
    assert loops[1].counters.roll_backs == 1
    assert loops[1].counters.rounds_left_out == 1 + 4  # the one that was spoilt, and the next of every fragment


def test_who_is_left_out_anyway_is_asked_at_once() -> None:
    (loop,) = harness.tolerant(ALONE, STREAMING)
    train([loop], 7, PROBLEM.inner)
    loop.roll_back()
    train([loop], 4, PROBLEM.inner)
    spoil(loop)  # sent after 12, or it would have been: nobody carries it
    train([loop], 1, PROBLEM.inner)
    assert loop.counters.roll_backs == 2 and np.isfinite(toy(loop).vector()).all()


@pytest.mark.parametrize(("sync", "sent"), [(STREAMING, 7), (Eager(period=6), 6)], ids=["streaming", "eager"])
@pytest.mark.parametrize(
    ("codec", "value"), [("e3m0", torch.nan), ("int8", torch.inf), ("fp32", -torch.inf), ("int4", 3e38)]
)
def test_the_parameter_is_named_that_was_spoilt_when_it_was_sent(
    sync: Sync, sent: int, codec: str, value: float
) -> None:
    problem = replace(ALONE, sizes=(128, 256, 128, 128))  # so that no block holds values of two
    (loop,) = problem.loops(replace(sync, codec=Codec(codec)))
    train([loop], sent - 1, problem.inner)
    spoil(loop, value, part=1)
    loop.step()
    with torch.no_grad():
        for parameter in loop.model.parameters():  # as after another step
            parameter.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match=r"parameter 'parts\.1\.values': a value was not finite"):
        train([loop], 6, problem.inner)


@pytest.mark.parametrize("sync", [STREAMING, Eager(period=4)], ids=["streaming", "eager"])
@pytest.mark.parametrize("spoilt", [True, False])
def test_a_state_saved_before_it_is_known_goes_on_to_the_bit(sync: Sync, spoilt: bool) -> None:
    def until_sent() -> list[OuterLoop]:
        loops = tolerant(sync)
        train(loops, 11, PROBLEM.inner)
        if spoilt:
            spoil(loops[1])
        train(loops, 1, PROBLEM.inner)
        return loops

    whole, saved, resumed = until_sent(), until_sent(), tolerant(sync)
    for loop, old in zip(resumed, saved, strict=True):
        loop.model.load_state_dict(old.model.state_dict())
        loop.load_state_dict(old.state_dict())
    assert [loop.counters.roll_backs for loop in saved] == [0, 0, 0]  # saving has changed nothing
    for loops in (whole, saved, resumed):
        train(loops, 9, PROBLEM.inner)
        assert loops[1].counters.roll_backs == spoilt
    for one, other, third in zip(whole, saved, resumed, strict=True):
        assert bits(one) == bits(other) == bits(third)
        assert replace(one.counters, wait_s=0, hidden_s=0) == replace(third.counters, wait_s=0, hidden_s=0)


@pytest.mark.parametrize("name", SOME)
def test_payloads_that_are_lost_are_lost_as_without_kernels(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = replace(PROBLEM, faults=Faults(drop=0.3, seed=3), steps=25)
    sync = PRESETS[name]
    if sync.codec.format == "bf16":  # which the interpreter does not round
        sync = replace(sync, codec=Codec("int8"))

    def trained() -> list[list[bytes]]:
        loops = problem.loops(sync)
        train(loops, problem.steps, problem.inner)
        assert any(loop.counters.rounds_missed for loop in loops)
        Lockstep(loops).finish()
        return [bits(loop) for loop in loops]

    by_kernels = trained()
    monkeypatch.setattr("atoll.kernels.usable", lambda device: False)
    assert trained() == by_kernels


# ---------------------------------------------------------------------- nobody waits


class Slow:
    """An offer that is not known before it is let go."""

    def __init__(self, worker: int, reduction: Reduction, *, sound: bool = True) -> None:
        payload = reduction.codec.encode(torch.full((reduction.numel,), 1.0 + worker))
        self._made = Contribution(Member(worker, 1.0, 0, 0), payload) if sound else None
        self.payload = payload
        self.known, self.asked = threading.Event(), threading.Event()

    def settled(self) -> Contribution | None:
        self.asked.set()
        assert self.known.wait(30)
        return self._made


REDUCTION = Reduction(Codec("int8"), 1000, torch.float32, 0, torch.device("cpu"))
AT = RoundId(1, 0)


def ends(kind: str) -> list[AbstractContextManager[Link]]:
    if kind == "local":
        return [nullcontext(link) for link in local(2)]
    with socket.create_server(("127.0.0.1", 0)) as probe:
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    return [connect(address, worker=worker, workers=2, keys="none") for worker in range(2)]


def test_where_a_block_is_of_two_parameters_both_are_named() -> None:
    (loop,) = ALONE.loops(Eager(period=2))
    train([loop], 1, PROBLEM.inner)
    spoil(loop, part=1)
    train([loop], 1, PROBLEM.inner)
    with pytest.raises(NonFiniteError, match=r"parameter 'parts\.0\.values' or 'parts\.3\.values': a value"):
        train([loop], 2, PROBLEM.inner)


@pytest.mark.parametrize("kind", ["local", "dist"])
@pytest.mark.parametrize("sound", [True, False])
def test_a_round_is_opened_before_its_offer_is_known(kind: str, sound: bool) -> None:
    offers = [Slow(0, REDUCTION), Slow(1, REDUCTION, sound=sound)]
    opened = threading.Barrier(3)

    def work(end: AbstractContextManager[Link]) -> Round:
        with end as link:
            link.join({}, 1.0)
            pending = link.open(AT, offers[link.worker], REDUCTION)
            opened.wait(30)
            return pending.wait()

    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(work, end) for end in ends(kind)]
        opened.wait(30)
        offers[0].known.set()
        assert not any(one.done() for one in waiting)
        offers[1].known.set()
        for completed in (one.result(30) for one in waiting):
            assert [member.worker for member in completed.members] == ([0, 1] if sound else [0])
            assert torch.equal(completed.payloads[0], offers[0].payload)


def test_who_waits_for_an_offer_keeps_nobody_from_opening_a_round() -> None:
    here, there = local(2)
    for link in (here, there):
        link.join({}, 1.0)
    offers = [Slow(0, REDUCTION), Slow(1, REDUCTION)]
    offers[0].known.set()
    pending = [link.open(AT, offer, REDUCTION) for link, offer in zip((here, there), offers, strict=True)]
    with ThreadPoolExecutor(2) as threads:
        waiting = threads.submit(pending[0].wait)
        assert offers[1].asked.wait(30)
        threads.submit(there.open, RoundId(2, 0), None, REDUCTION).result(30)
        offers[1].known.set()
        assert len(waiting.result(30).members) == 2


def test_a_link_does_not_keep_a_model_for_what_it_has_sent() -> None:
    links = local(1)
    (loop,) = ALONE.loops(STREAMING, links)
    train([loop], 6, PROBLEM.inner)
    model = weakref.ref(loop.model)
    del loop
    gc.collect()
    assert model() is None


def test_an_emulated_line_takes_what_is_there() -> None:
    """Its transfer begins when there is something to carry: the line is not blamed for what was not ready."""
    (link,) = shaped(local(1), Shape(latency_s=1e-3))
    link.join({}, 1.0)
    offer = Slow(0, REDUCTION)
    known_s = []

    def tell() -> None:
        known_s.append(time.perf_counter())
        offer.known.set()

    threading.Timer(0.1, tell).start()
    transfer = link.open(AT, offer, REDUCTION).wait().transfer
    assert transfer is not None and transfer.opened_s >= known_s[0]
    link.close()


def test_numbers_may_be_asked_for_by_several_threads_and_again() -> None:
    late = DeviceValues(torch.arange(5))
    found: list[Any] = []
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda _: late.values, range(64)))
    assert found == [(0, 1, 2, 3, 4)] * 64
    for copied in (pickle.loads(pickle.dumps(late)), copy.deepcopy(DeviceValues(torch.arange(5)))):
        assert copied.values == (0, 1, 2, 3, 4)


def test_an_inner_step_is_made_before_anybody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    (loop,) = ALONE.loops(STREAMING)
    asked: list[int] = []
    values = DeviceValues.values
    assert isinstance(values, property) and values.fget is not None
    read = values.fget
    monkeypatch.setattr(DeviceValues, "values", property(lambda self: asked.append(loop.steps) or read(self)))
    for _ in range(9):
        inner_step(loop, PROBLEM.inner)
        loop.step()
    assert asked and min(asked) == 6 and 7 in asked  # sent after 6 and 7: first asked for in steps 7 and 8
