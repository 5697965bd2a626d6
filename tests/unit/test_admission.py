"""A worker that joins a run under way has the same bits as one that was absent and followed every round."""

import random
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed
from torch._C._distributed_c10d import HashStore

from atoll import DataParallel, Delayed, DiLoCo, Eager, OuterLoop, Streaming, Sync, local
from atoll.core.codec import Codec
from atoll.core.flat import fingerprint
from atoll.core.outer_step import Adam
from atoll.core.schedule import Schedule
from atoll.errors import ConfigError, LinkError
from atoll.link.base import FragmentState, Link, Member, Round, RoundId
from atoll.link.local import Absence, Faults, run_local
from atoll.link.ranks import RankGroup, ReplicatedLink, ShardedLink
from atoll.link.shaped import Shape, ShapedLink
from atoll.outer.flight import Flight
from atoll.outer.stats import Applied
from harness import Problem, Toy, bits, by_part, inner_step
from late_joiner import Board, LateLink, LocalAdmission

SYNCS: dict[str, Sync] = {
    "diloco": DiLoCo(period=4),
    "diloco e3m0": DiLoCo(period=5, codec=Codec("e3m0", feedback=True)),
    "adam": DiLoCo(period=3, outer=Adam()),
    "streaming, delay 0": Streaming(period=6, fragments=by_part(4), delay=0, codec="int8"),
    "streaming, delay 1": Streaming(period=6, fragments=by_part(4), delay=1),
    "streaming, delay 4": Streaming(period=6, fragments=by_part(4), delay=4, codec=Codec("int8", feedback=True)),
    "streaming, delay 6": Streaming(period=6, fragments=by_part(4), delay=6, codec="fp32"),
    "eager": Eager(period=4, codec=Codec("e3m0", feedback=True)),
    "streaming eager": Eager(period=6, fragments=by_part(4), codec="int8"),
    "delayed": Delayed(period=4, codec="fp32"),
}
STEPS = 26


@dataclass
class Seen:
    """What one worker had after every step, and the rounds that it applied."""

    after: dict[int, Any] = field(default_factory=dict)
    rounds: list[Applied] = field(default_factory=list)
    joined_at: int | None = None

    def note(self, loop: OuterLoop) -> None:
        state = loop.state_dict()
        counts = [(f["version"], f["step"], f["gap"], f["left_out"]) for f in state["fragments"]]
        flights = [(f["id"], f["applied"], f["payload"] is None, f["forgotten"]) for f in state["flights"]]
        self.after[loop.steps] = (bits(loop), counts, flights, deepcopy(loop._rounds.counted))


def make(
    problem: Problem, sync: Sync, link: Link, seen: Seen, *, start: np.ndarray[Any, Any] | None = None
) -> OuterLoop:
    model = Toy(problem.start if start is None else start, problem.sizes, problem.dtype)
    return OuterLoop(model, sync, link, weight=1.0 + link.worker, observer=seen.rounds.append)


def train_on(loop: OuterLoop, seen: Seen, steps: int, rate: float) -> Seen:
    while loop.steps < steps:
        inner_step(loop, rate)
        loop.step()
        seen.note(loop)
    loop.finish()
    seen.note(loop)
    seen.joined_at = loop.joined_at
    return seen


def absent(problem: Problem, sync: Sync, late: int, boundary: int) -> list[Seen]:
    """The oracle: the worker is absent, follows every round, and starts anew."""

    def work(link: Link) -> Seen:
        seen = Seen()
        loop = make(problem, sync, link, seen)
        if link.worker == late:
            while loop.steps < boundary:
                loop.step()
            for fragment, replica in enumerate(loop._rounds.replicas):
                schedule = Schedule(sync.period, len(loop.fragments), 0)
                coming = range(boundary + 1, boundary + sync.period)
                replica.left_out = any(schedule.is_send(fragment, step) for step in coming)
            seen.note(loop)
        return train_on(loop, seen, problem.steps, problem.inner)

    links = local(problem.workers, faults=problem.faults, timeout_s=30)
    for link in links:
        link.elastic = True  # then finish() always ends with an exchange
    return run_local(work, links)


def joining(
    problem: Problem,
    sync: Sync,
    board: Board,
    *,
    by_step: bool = False,
    around: Callable[[Link], Link] = lambda link: link,
) -> list[Seen]:
    """The same, but the worker comes late, with other parameters."""

    def work(link: Link) -> Seen:
        seen = Seen()
        if link.worker != board.late:
            return train_on(make(problem, sync, link, seen), seen, problem.steps, problem.inner)
        loop = make(problem, sync, link, seen, start=problem.start[::-1].copy())
        if by_step:
            inner_step(loop, problem.inner)
            loop.step()
        else:
            loop.join()
        assert loop.steps == board.boundary
        seen.note(loop)
        return train_on(loop, seen, problem.steps, problem.inner)

    bare = local(problem.workers, faults=problem.faults, timeout_s=30)
    links = [around(LateLink(link, board)) for link in bare]
    return run_local(work, links)  # type: ignore[arg-type]


def check_same(expected: Sequence[Seen], found: Sequence[Seen], board: Board) -> None:
    for worker, (theirs, mine) in enumerate(zip(expected, found, strict=True)):
        steps = theirs.after.keys() if worker != board.late else range(board.boundary, max(theirs.after) + 1)
        assert mine.after.keys() == set(steps)
        for step in steps:
            assert mine.after[step] == theirs.after[step], f"worker {worker} after step {step}"
        rounds = [(a.round_id, a.step, a.members) for a in mine.rounds]
        same = [(a.round_id, a.step, a.members) for a in theirs.rounds]
        if worker == board.late:
            applied = {fragment: state.applied for fragment, state in board.states.items()}
            same = [it for it in same if it[0].step > applied[it[0].fragment]]
            assert sorted(rounds) == sorted(same)
            assert mine.joined_at == board.boundary
        else:
            assert rounds == same and mine.joined_at is None


def case(name: str, seed: int) -> tuple[Problem, Sync, Board]:
    """A run with a late worker, by chance."""
    rng, sync = random.Random(f"{name} {seed}"), SYNCS[name]
    workers, boundary = rng.randint(2, 5), rng.randint(1, STEPS - 8)
    late = rng.randrange(workers)
    others = [worker for worker in range(workers) if worker != late]
    fragments = 4 if "streaming" in name else 1
    latest = max(0, boundary - sync.delays[0])
    donors = {fragment: (rng.choice(others), rng.randint(0, latest)) for fragment in range(fragments)}
    absences = (Absence(worker=late, first=1, last=boundary),)
    drop = rng.choice([0.0, 0.0, 0.2])
    problem = Problem(workers=workers, steps=STEPS, faults=Faults(absences=absences, drop=drop, seed=seed))
    return (
        replace(problem, sizes=rng.choice([(3, 1, 4, 2), (70, 80, 90, 100)])),
        sync,
        Board(late, boundary, donors, seed),
    )


@pytest.mark.thorough_after(30)
@pytest.mark.parametrize("name", SYNCS)
@pytest.mark.parametrize("seed", range(8))
def test_a_late_worker_has_the_bits_of_one_that_followed_from_the_start(name: str, seed: int) -> None:
    problem, sync, board = case(name, seed)
    check_same(
        absent(problem, sync, board.late, board.boundary), joining(problem, sync, board, by_step=seed % 2 == 1), board
    )
    assert board.told == sorted(board.told) and board.told[-1] == STEPS
    opened = [line.rsplit(" ", 1)[0] for line in board.log if line.startswith("open")]
    assert len(set(opened)) == len(opened)


def test_rounds_count_a_joiner_only_after_a_full_period() -> None:
    for boundary, members in ((8, [(0, 1), (0, 1)]), (9, [(0,), (0, 1)])):
        absences = (Absence(worker=1, first=1, last=boundary),)
        problem = Problem(workers=2, steps=17, faults=Faults(absences=absences))
        first, _ = joining(problem, SYNCS["diloco"], Board(1, boundary, {0: (0, 4)}))
        assert [a.members for a in first.rounds if boundary < a.round_id.step < 17] == members


@pytest.mark.parametrize("elastic", [True, False])
def test_an_elastic_round_tells_the_anchor_after_it(elastic: bool) -> None:
    problem = Problem(workers=2, steps=9)
    told: list[tuple[int, int, int, int]] = []

    def work(link: Link) -> None:
        def observe(applied: Applied) -> None:
            replica = loop._rounds.replicas[applied.round_id.fragment]
            told.append((applied.version, replica.version, applied.fingerprint, fingerprint(replica.anchor)))

        link.elastic = elastic
        loop = OuterLoop(Toy(problem.start, problem.sizes), SYNCS["diloco"], link, observer=observe)
        train_on(loop, Seen(), problem.steps, problem.inner)

    run_local(work, local(2, timeout_s=30))
    assert sorted(version for version, *_ in told) == [1, 1, 2, 2, 3, 3]
    for version, applied, found, anchor in told:
        assert version == applied and found == (anchor if elastic else 0)


# ---------------------------------------------------------------------- states that do not fit


def spoilt(**changes: Any) -> Callable[[FragmentState], FragmentState]:
    return lambda state: replace(state, **changes)


@pytest.mark.parametrize(
    "spoil",
    [
        spoilt(fragment=1),
        spoilt(applied=-1),
        spoilt(counts={"version": 1, "step": 4}),
        spoilt(counts={"version": 1, "step": 4, "gap": 0, "more": 1}),
        spoilt(counts={"version": -1, "step": 4, "gap": 0}),
        lambda state: replace(state, vectors={"anchor": state.vectors["anchor"]}),
        lambda state: replace(state, vectors={**state.vectors, "more": state.vectors["anchor"]}),
        lambda state: replace(state, vectors={name: v[:-1] for name, v in state.vectors.items()}),
        lambda state: replace(state, vectors={name: v.float() for name, v in state.vectors.items()}),
    ],
)
def test_a_state_that_does_not_fit_is_refused_before_anything_is_taken_over(
    spoil: Callable[[FragmentState], FragmentState],
) -> None:
    problem = Problem(workers=1)
    donor, joiner = problem.loops(SYNCS["diloco"])[0], problem.loops(SYNCS["diloco"])[0]
    inner_step(donor, 0.1)
    donor._rounds.replicas[0].anchor.add_(1)
    before = bits(joiner)
    with pytest.raises(LinkError, match="fragment 0"):
        joiner._rounds.take_shared(0, spoil(donor._rounds.shared(0, 4)))
    assert bits(joiner) == before


def test_a_state_is_a_copy() -> None:
    loop = Problem(workers=1).loops(SYNCS["diloco"])[0]
    state = loop._rounds.shared(0, 0)
    before = state.vectors["anchor"].clone()
    loop._rounds.replicas[0].anchor.add_(1)
    assert (state.vectors["anchor"] == before).all()


def test_a_joiner_is_not_taken_in_before_rounds_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(workers=2, steps=9, faults=Faults(absences=(Absence(worker=1, first=1, last=8),)))
    monkeypatch.setattr(LocalAdmission, "promote", lambda _: 7)
    with pytest.raises(LinkError, match="step 7"):
        joining(problem, SYNCS["diloco"], Board(1, 8, {0: (0, 8)}))


def test_a_joiner_of_a_run_that_ends_starts_at_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member that finishes applies all its rounds at once, and gives the state away while it waits for the last."""
    problem = Problem(workers=2, steps=9, faults=Faults(absences=(Absence(worker=1, first=1, last=9),)))
    states = LocalAdmission.states
    monkeypatch.setattr(LocalAdmission, "states", lambda *args: (replace(one, applied=9) for one in states(*args)))
    board = Board(1, 9, {0: (0, 4)})
    _, late = joining(problem, SYNCS["delayed"], board)
    assert late.joined_at == 9 and board.told == [9, 9]
    assert [line for line in board.log if line.startswith("open")] == ["open 9 0 False"]  # the last exchange


# ---------------------------------------------------------------------- what else the loop does


@pytest.mark.parametrize(
    ("sync", "setting"), [(DataParallel(), "sync"), (Streaming(period=6, delay=(0, 3), fragments=by_part(4)), "delay")]
)
def test_an_elastic_link_needs_an_algorithm_that_workers_can_join(sync: Sync, setting: str) -> None:
    link = LateLink(local(2)[0], Board(1, 4, {}))
    with pytest.raises(ConfigError) as error:
        OuterLoop(Toy(Problem().start, Problem().sizes), sync, link)
    assert error.value.setting == setting


def test_a_joiner_behind_an_emulated_line() -> None:
    problem, sync, board = case("streaming, delay 1", 0)
    expected = absent(problem, sync, board.late, board.boundary)
    shape = Shape(latency_s=0.001)
    found = joining(problem, sync, board, around=lambda link: ShapedLink(link, shape))
    check_same(expected, found, board)


def test_a_round_that_knows_whether_it_is_complete_is_believed() -> None:
    loop = Problem(workers=2).loops(SYNCS["diloco"])[0]
    completed = Round(RoundId(4, 0), (), ())
    exchange = loop._rounds.exchange
    assert exchange.is_complete(replace(completed, complete=True))
    assert not exchange.is_complete(replace(completed, complete=False))


def test_what_a_returning_worker_still_has_to_learn_survives_a_save() -> None:
    payload = torch.arange(5, dtype=torch.uint8)
    saved = Flight(keeps=True, owed=payload).state_dict()
    again = Flight.from_state_dict(saved, Member(0, 1.0, 0, 0), torch.device("cpu"))
    assert again.keeps and again.owed is not None and again.owed.equal(payload) and again.owed is not payload
    del saved["keeps"], saved["owed"]  # as older versions have saved it
    assert not Flight.from_state_dict(saved, Member(0, 1.0, 0, 0), torch.device("cpu")).keeps


@pytest.fixture
def one_rank() -> Iterator[RankGroup]:
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        assert distributed.group.WORLD is not None
        yield RankGroup(distributed.group.WORLD)
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("sharded", [True, False])
def test_a_worker_of_several_ranks_cannot_join_a_run_under_way(one_rank: RankGroup, sharded: bool) -> None:
    faults = Faults(absences=(Absence(worker=1, first=1, last=4),))
    late = LateLink(local(2, faults=faults)[1], Board(1, 4, {}))
    link = ShardedLink(one_rank, late) if sharded else ReplicatedLink(one_rank, late, 1, 2)
    with pytest.raises(LinkError, match="ranks") as error:
        link.join({}, 1.0)
    assert error.value.worker == 1
