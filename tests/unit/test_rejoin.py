"""A worker that was cut off and joins again: each of its inner steps enters the anchor once, or is known to be lost.

Worker j trains by subtracting 1 from value j of every fragment, and the outer optimizer is plain SGD at rate 1. So what
has entered the anchor can be counted in steps.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from atoll import DiLoCo, Eager, OuterLoop, Streaming, Sync, local
from atoll.core.fragments import Whole
from atoll.core.outer_step import SGD, Blend
from atoll.errors import ExcludedError, LinkError
from atoll.link.base import Link, RoundId
from atoll.link.local import Absence, Faults, run_local
from atoll.outer.admission import ATTEMPTS
from atoll.outer.stats import Applied, Counters
from harness import Toy, by_part
from late_joiner import Board, LateLink

PARTS = 4
SYNCS: dict[str, Sync] = {
    "diloco": DiLoCo(period=4, outer=SGD(1.0)),
    "streaming": Streaming(period=6, fragments=by_part(PARTS), delay=0, codec="fp32", merge=Blend(0.0), outer=SGD(1.0)),
    "eager": Eager(period=4, codec="fp32", outer=SGD(1.0)),
    "streaming eager": Eager(period=6, fragments=by_part(PARTS), codec="fp32", outer=SGD(1.0)),
}
"""Under these, all that a worker trains is sent: no merge drops what was trained since a send."""
SHORT = DiLoCo(period=6, delay=2, outer=SGD(1.0))


@dataclass
class Case:
    sync: Sync
    cut: tuple[str, int]
    """Which call of the link says that worker 1 is out."""
    last: int
    """The last step whose rounds wait for it."""
    boundary: int
    """The last step whose rounds do without it; after that, it is back."""
    applied: tuple[int, ...] = (0,) * PARTS
    """By fragment, the step up to which a member had applied all rounds when it gave it away."""
    swallowed: int = 1000
    """Its rounds from this step on, up to `last`, do not reach the others."""
    steps: int = 30
    workers: int = 3
    again: int = 1
    """How often it is told that it is out."""

    @property
    def fragments(self) -> int:
        return 1 if isinstance(self.sync.fragments, Whole) else PARTS


@dataclass
class Seen:
    """What one worker has seen."""

    ticks: int = 0
    """Inner steps that it has made."""
    entered: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))
    """By fragment, the inner steps of worker 1 that have entered the anchor."""
    unsent: dict[int, list[float]] = field(default_factory=dict)
    """By step, what the anchor and the live parameters differ by in worker 1's values, in inner steps."""
    anchors: dict[int, bytes] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    joined_at: int | None = None


def play(case: Case) -> list[Seen]:
    donors = {fragment: (2 * (fragment % 2), case.applied[fragment]) for fragment in range(case.fragments)}
    board = Board(1, case.boundary, donors if case.workers > 2 else {f: (0, at) for f, (_, at) in donors.items()})
    away = () if case.boundary == case.last else (Absence(worker=1, first=case.last + 1, last=case.boundary),)
    start = np.zeros(PARTS * case.workers)

    def work(link: Link) -> Seen:
        seen = Seen()
        before: defaultdict[int, float] = defaultdict(float)

        def observe(applied: Applied) -> None:
            fragment = applied.round_id.fragment
            now = mine(loop._rounds.replicas[fragment].anchor)
            seen.entered[fragment] += (before[fragment] - now) * len(applied.members)
            before[fragment] = now

        def mine(vector: torch.Tensor) -> float:
            return float(vector.view(-1, case.workers)[0, 1])

        loop = OuterLoop(Toy(start, (case.workers,) * PARTS), case.sync, link, observer=observe)
        while loop.steps < case.steps:
            seen.ticks += 1
            with torch.no_grad():
                for parameter in loop.model.parameters():
                    parameter[link.worker] -= 1
            loop.step()
            replicas = loop._rounds.replicas
            seen.unsent[loop.steps] = [mine(r.anchor - r.window.read()) for r in replicas]
            seen.anchors[loop.steps] = b"".join(r.anchor.numpy().tobytes() for r in replicas)
        loop.finish()
        seen.counters, seen.joined_at = loop.counters, loop.joined_at
        seen.anchors[-1] = b"".join(r.anchor.numpy().tobytes() for r in loop._rounds.replicas)
        return seen

    links = [LateLink(link, board) for link in local(case.workers, faults=Faults(absences=away), timeout_s=30)]
    links[1].cuts = {case.cut: case.again}
    lost = range(case.swallowed, case.last + 1)
    links[1].swallowed = frozenset(RoundId(step, fragment) for step in lost for fragment in range(PARTS))
    return run_local(work, links)  # type: ignore[arg-type]


def check_anchors(workers: list[Seen], boundary: int) -> None:
    first, back, *_ = workers
    assert all(back.anchors[step] == first.anchors[step] for step in back.anchors if step < 0 or step >= boundary)
    assert back.joined_at == boundary and first.joined_at is None
    assert back.counters.rejoins == 1 and first.counters.rejoins == 0


def kept_cases() -> Iterator[tuple[str, Case]]:
    """All ways of being cut off, with others that have gone on for up to a period."""
    for name, sync in SYNCS.items():
        rng = random.Random(name)
        delay = sync.delays[0]
        for call in ("check", "open", "wait", "applied"):
            for number in range(6):
                last = rng.randint(sync.period, 2 * sync.period + 3)
                sends = [step for step in range(1, last + 1) if step % sync.period == 0]
                at = last + 1 if call == "check" else max(0, last - delay)
                if call in ("open", "wait"):
                    last = sends[-1] - (call == "open")
                    at = sends[-1] - (delay if call == "wait" else 0)
                    if at < sync.period:  # nothing is due yet
                        last, at = last + sync.period, at + sync.period
                made = last + (call == "open")
                boundary = max(last, made + rng.randint(0, sync.period))
                applied = tuple(rng.randint(0, max(0, boundary - delay)) for _ in range(PARTS))
                in_flight = at if call == "wait" else made - delay + 1
                swallowed = rng.choice([1000, rng.randint(min(in_flight, last + 1), last + 1)])
                steps = max(boundary, last) + rng.choice([1, 2, 4, 9])
                yield (
                    f"{name}, {call}, {number}",
                    Case(sync, (call, at), last, boundary, applied, swallowed, steps, rng.randint(2, 5)),
                )


KEPT = dict(kept_cases())


@pytest.mark.thorough_after(120)
@pytest.mark.parametrize("name", KEPT)
def test_every_inner_step_of_a_worker_that_was_cut_off_enters_once(name: str) -> None:
    workers = play(KEPT[name])
    check_anchors(workers, KEPT[name].boundary)
    assert workers[1].counters.rejoins_dropped == 0
    for seen in (workers[0], *workers[2:]):
        entered = {fragment: round(steps, 3) for fragment, steps in seen.entered.items()}
        assert entered == dict.fromkeys(entered, workers[1].ticks) and entered


def case(call: str, at: int, *, swallowed: int = 1000, steps: int = 20, boundary: int, again: int = 1) -> Case:
    """A cut-off under SHORT: sent after steps 6, 12 and 18, applied two steps later, when what is newer is dropped."""
    last = at - 1 if call == "check" else at + 2
    return Case(SHORT, (call, at), last, boundary, (0,), swallowed, steps, again=again)


@pytest.mark.parametrize(
    ("cut_off", "after"),
    [
        # 9, 10 and 11 were trained since the round of step 6 was applied; that of step 12 is in flight at the boundary.
        (case("check", 11, boundary=13), {13: 3, 14: 4, 15: 5, 18: 8, 20: 0}),
        # 7 and 8 were trained since the send; the round of step 6 was counted, ...
        (case("wait", 6, boundary=9), {9: 2, 10: 3}),
        # ... or was not.
        (case("wait", 6, swallowed=6, boundary=9), {9: 8, 10: 9}),
        # It is in flight at the boundary, and is counted later, ...
        (case("check", 8, boundary=7), {7: 2, 8: 3, 9: 4}),
        # ... or is not.
        (case("check", 8, swallowed=6, boundary=7), {7: 2, 8: 9, 9: 10}),
    ],
)
def test_merges_leave_work_that_was_put_back(cut_off: Case, after: dict[int, int]) -> None:
    workers = play(cut_off)
    check_anchors(workers, cut_off.boundary)
    assert {step: round(workers[1].unsent[step][0], 3) for step in after} == after


@pytest.mark.parametrize(("boundary", "given_up"), [(12, 2), (13, 2 + 3), (10, 2 + 2)])
def test_work_that_is_older_than_a_period_is_dropped_and_counted(boundary: int, given_up: int) -> None:
    """Cut off with steps 5 and 6 unsent; rounds count it again once it has trained for a full period."""
    workers = play(Case(SYNCS["diloco"], ("check", 6), 5, boundary, swallowed=1000, steps=21))
    check_anchors(workers, boundary)
    assert workers[1].counters.rejoins_dropped == 1
    assert round(workers[0].entered[0], 3) == workers[1].ticks - given_up


def test_a_period_after_the_cut_work_is_still_kept() -> None:
    workers = play(Case(SYNCS["diloco"], ("check", 6), 5, 9, steps=21))
    assert workers[1].counters.rejoins_dropped == 0 and round(workers[0].entered[0], 3) == workers[1].ticks


@pytest.mark.parametrize("call", ["wait", "applied"])
def test_a_worker_that_is_cut_off_while_it_catches_up_tries_again(call: str) -> None:
    """The first time in step 8, then as it follows the rounds."""
    workers = play(Case(SYNCS["diloco"], (call, 8), 8, 11, swallowed=8, steps=21, again=3))
    check_anchors(workers, 11)
    assert round(workers[0].entered[0], 3) == workers[1].ticks


def test_a_worker_that_is_always_cut_off_gives_up() -> None:
    with pytest.raises(LinkError, match="ExcludedError: worker 1 is out: wait 8"):
        play(Case(SYNCS["diloco"], ("wait", 8), 8, 11, swallowed=8, steps=21, again=1 + ATTEMPTS))


def test_finish_passes_on_that_the_worker_is_out() -> None:
    with pytest.raises(LinkError, match="ExcludedError: worker 1 is out: check 10"):
        play(Case(SYNCS["diloco"], ("check", 10), 9, 9, steps=9))


def test_a_link_with_fixed_members_cannot_be_joined_again() -> None:
    link = local(1)[0]
    with pytest.raises(LinkError) as error:
        link.rejoin()
    assert error.value.worker == 0 and not isinstance(error.value, ExcludedError)
