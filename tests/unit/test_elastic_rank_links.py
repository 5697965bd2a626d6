"""The links of a worker of two ranks that comes and goes: rank 0 has a link, and all that it hears reaches both."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import AtollError, ExcludedError, LinkError
from atoll.link.base import Contribution, FragmentState, Link, Member, Offer, Pending, Round, RoundId
from atoll.link.elastic_ranks import MOST_STEPS, ElasticRanksLink
from atoll.link.elastic_shards import ElasticShardsLink
from atoll.link.ranks import RankGroup
from fleet import Fleet, Me

pytestmark = pytest.mark.processes
CODEC = Codec("fp32")


@dataclass
class Echo(Link):
    """Rank 0's link in these tests: a round brings back what was put in, and joiners ask when a test says so."""

    worker: int = 1
    workers: int = 3
    elastic: bool = True
    joined: list[Any] = field(default_factory=list)
    opened: list[RoundId] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    """Values of the vectors behind the payloads of these rounds."""
    wanted: list[int] = field(default_factory=list)
    """Fragments that a joiner waits for."""
    given: list[FragmentState] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    """Steps whose weights were asked for."""
    came: dict[int, float] = field(default_factory=dict)
    """Workers that have joined since."""
    error: AtollError | None = None
    save: Callable[[int], FragmentState] | None = None
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        self.joined.append([dict(terms), weight, dict(start or {})])

    def rejoin(self) -> Any:
        return EchoAdmission(self)

    def weights(self, step: int) -> Mapping[int, float]:
        self.asked.append(step)
        return {0: 1.0, 1: 2.0, 2: float(step), **self.came}

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        self.opened.append(round_id)
        self.sizes.append(reduction.numel)
        settled = self.thread.submit(lambda: None if offer is None else offer.settled())
        return EchoPending(self, round_id, settled)

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        self.save = save
        self.give()

    def give(self) -> None:
        wanted, self.wanted = self.wanted, []
        for fragment in wanted:
            assert self.save is not None
            try:
                self.given.append(self.save(fragment))
            except IndexError:
                self.given.append(FragmentState(fragment, -1, {}, {}))

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self, reason: str | None = None) -> None:
        self.thread.shutdown()


@dataclass
class EchoPending:
    link: Echo
    round_id: RoundId
    settled: "Future[Contribution | None]"

    def wait(self) -> Round:
        self.link.give()
        there = [made for made in [self.settled.result()] if made is not None]
        return Round(self.round_id, tuple(c.member for c in there), tuple(c.payload for c in there), complete=True)


@dataclass
class EchoAdmission:
    link: Echo

    def states(self, fragments: int) -> Iterator[FragmentState]:
        yield from self.link.given

    def newest_step(self) -> int:
        return 17

    def promote(self) -> int:
        raise ExcludedError("gone again")


@dataclass(frozen=True)
class Failing:
    payload: torch.Tensor

    def settled(self) -> Contribution:
        raise ArithmeticError("the device is gone")


def two_ranks(folder: Path, act: Callable[..., Any], kind: str) -> list[Any]:
    """What each rank's `act` returns."""
    with Fleet(folder / "logs", 2, keys="none") as ranks:
        return ranks.start(_as_rank, act, kind).results()


def _as_rank(me: Me, act: Callable[..., Any], kind: str) -> Any:
    distributed.init_process_group("gloo", init_method=f"tcp://{me.address}", rank=me.worker, world_size=2)
    group, offers = (RankGroup(distributed.new_group(backend="gloo")) for _ in range(2))
    echo = Echo() if me.worker == 0 else None
    link: ElasticRanksLink = ElasticRanksLink(group, echo, 1, 3)
    if kind == "shards":
        link = ElasticShardsLink(group, offers, echo, 1, 3)
    found = act(me.worker, link, echo)
    distributed.barrier()
    link.close()
    distributed.destroy_process_group()
    return found


def contribution(rank: int, value: float) -> Contribution:
    payload = torch.full((3 + rank,), value).view(torch.uint8)
    return Contribution(Member(1, 2.0, 4, 1 << 63 | rank), payload)


def reduction(rank: int) -> Reduction:
    return Reduction(CODEC, 3 + rank)


def saved(rank: int, fragment: int) -> FragmentState:
    """What a rank has of a fragment; there are two."""
    anchor = [torch.arange(3.0), torch.arange(5, dtype=torch.float64)][fragment] + 100 * rank
    return FragmentState(fragment, 6 + rank, {"version": 10 * fragment + rank}, {"anchor": anchor, "velocity": -anchor})


# ---------------------------------------------------------------------- rounds


def _rounds(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    link.join({"period": "8"}, 2.0, {"step": "0"})
    offers = {RoundId(8, 0): 1.0, RoundId(8, 1): None, RoundId(16, 0): 2.0, RoundId(16, 0, last=True): 3.0}
    waiting = []
    for round_id, value in offers.items():
        offer = None if value is None else contribution(rank, 10 * rank + value)
        waiting.append(link.open(round_id, offer, reduction(rank)))
    rounds = [pending.wait() for pending in waiting]
    assert link.weights(16) == {0: 1.0, 1: 2.0, 2: 16.0}
    came = [(r.round_id, r.members, [p.view(torch.float32).tolist() for p in r.payloads]) for r in rounds]
    return came, link.on_any_rank(rank == 1), echo and (echo.opened, echo.asked, echo.sizes)


def test_replicas_exchange_once_and_all_get_the_result(tmp_path: Path) -> None:
    (first, _, (opened, asked, sizes)), (second, _, _) = two_ranks(tmp_path, _rounds, "replicas")
    assert sizes == [3] * 4
    assert asked == [8, 8, 16, 16]  # with each round, and not again: the leader may ask alone
    assert first == second and opened == [RoundId(8, 0), RoundId(8, 1), RoundId(16, 0), RoundId(16, 0, last=True)]
    assert [values for _, _, values in first] == [[[1.0] * 3], [], [[2.0] * 3], [[3.0] * 3]]


def test_every_shard_is_a_round_of_its_own(tmp_path: Path) -> None:
    (first, any_first, (opened, asked, sizes)), (second, any_second, _) = two_ranks(tmp_path, _rounds, "shards")
    assert asked == [8, 8, 16, 16] and sizes == [3, 4] * 4
    ids = [RoundId(8, 0), RoundId(8, 1), RoundId(16, 0), RoundId(16, 0, last=True)]
    on_wire = [RoundId(r.step, 2 * r.fragment + rank, r.last) for r in ids for rank in range(2)]
    assert opened == on_wire and len(set(on_wire)) == 8
    for rank, came in enumerate((first, second)):
        assert [round_id for round_id, _, _ in came] == ids
        values = [[] if v is None else [[10.0 * rank + v] * (3 + rank)] for v in (1, None, 2, 3)]
        assert [values for _, _, values in came] == values
        assert [m.anchor_fingerprint for _, members, _ in came for m in members] == [1 << 63 | rank] * 3
    assert any_first and any_second


def _failing(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    link.join({}, 2.0)
    made: Offer = contribution(rank, 1.0)
    pending = link.open(RoundId(8, 0), Failing(made.payload) if rank else made, reduction(rank))
    with pytest.raises(LinkError) as error:
        pending.wait()
    after = link.open(RoundId(9, 0), made, reduction(rank)).wait()
    return str(error.value), len(after.members)


def test_a_shard_that_cannot_be_sent_fails_the_round_on_all_ranks(tmp_path: Path) -> None:
    told = two_ranks(tmp_path, _failing, "shards")
    assert told == [("rank 1 of this worker could not send its shard: ArithmeticError: the device is gone", 1)] * 2


# ---------------------------------------------------------------------- joining, and those that join


def _join(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    link.join({"layout": f"of rank {rank}"}, 2.0, {"start": f"of rank {rank}"})
    link.unfinished = True
    return echo and (echo.joined, echo.unfinished)


def test_others_can_tell_whether_the_other_ranks_differ(tmp_path: Path) -> None:
    ((terms, weight, start),), unfinished = two_ranks(tmp_path, _join, "shards")[0]
    assert terms["layout"] == start["start"] == "of rank 0" and weight == 2.0 and unfinished
    assert terms["terms of rank 1"].startswith("checksum") and start["start of rank 1"].startswith("checksum")
    assert terms["terms of rank 1"] != start["start of rank 1"]


def _differ(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    with pytest.raises(LinkError) as error:
        link.join({"layout": f"of rank {rank}"}, 2.0)
    return str(error.value), echo and echo.joined


def test_replicas_that_differ_do_not_join(tmp_path: Path) -> None:
    why = "worker 1: rank 1 and rank 0 differ in layout: of rank 1 against of rank 0"
    assert two_ranks(tmp_path, _differ, "replicas") == [(why, []), (why, None)]


def plain(state: FragmentState) -> dict[str, tuple[str, list[float]]]:
    return {name: (str(vector.dtype), vector.tolist()) for name, vector in state.vectors.items()}


def _donate(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    def save(fragment: int) -> FragmentState:
        return [saved(rank, 0), saved(rank, 1)][fragment]

    link.join({}, 2.0)
    link.advanced(8, 6, save)
    pending = link.open(RoundId(8, 0), contribution(rank, 1.0), reduction(rank))
    if echo is not None:
        echo.wanted = [0, 7]  # while it waits, and one that there is not
    completed = pending.wait()
    if echo is not None:
        assert [state.applied for state in echo.given] == [6 + (type(link) is ElasticShardsLink), -1]
        del echo.given[1]
        echo.wanted = [1]
    link.advanced(9, 6, save)
    admission = link.rejoin()
    states = [(s.fragment, s.applied, dict(s.counts), plain(s)) for s in admission.states(2)]
    with pytest.raises(ExcludedError, match="gone again"):
        admission.promote()
    return len(completed.members), admission.newest_step(), states


@pytest.mark.parametrize("kind", ["replicas", "shards"])
def test_a_joiner_gets_what_all_ranks_have(tmp_path: Path, kind: str) -> None:
    for rank, (members, newest, states) in enumerate(two_ranks(tmp_path, _donate, kind)):
        assert (members, newest) == (1, 17)
        shard = rank if kind == "shards" else 0
        for fragment, (number, applied, counts, vectors) in enumerate(states):
            due = saved(shard, fragment)
            assert (number, counts) == (fragment, due.counts) and applied == (7 if kind == "shards" else 6)
            assert vectors == plain(due)


def _foreign(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    return _refused(link, echo, "2/anchor")


def _of_one_rank(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    return _refused(link, echo, "0/anchor")


def _refused(link: ElasticRanksLink, echo: Echo | None, vector: str) -> str:
    if echo is not None:
        echo.given = [FragmentState(0, 6, {}, {vector: torch.zeros(2)})]
    with pytest.raises(LinkError) as error:
        list(link.rejoin().states(1))
    return str(error.value)


def test_a_state_of_another_number_of_ranks_is_refused_on_all(tmp_path: Path) -> None:
    told = two_ranks(tmp_path, _foreign, "shards")
    assert told == ["fragment 0: another worker's state of it is not that of 2 ranks: it holds 2/anchor"] * 2
    told = two_ranks(tmp_path, _of_one_rank, "shards")
    assert told == ["fragment 0: another worker's state of it is not that of 2 ranks: it holds 0/anchor"] * 2


# ---------------------------------------------------------------------- errors, weights


def _errors(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    told = []
    for error in (ExcludedError("cut off"), LinkError("over")):
        if echo is not None:
            echo.error = error
        with pytest.raises(LinkError) as raised:
            link.check()
        told.append((type(raised.value).__name__, str(raised.value)))
    return told


def test_an_exclusion_is_one_on_every_rank(tmp_path: Path) -> None:
    told = two_ranks(tmp_path, _errors, "replicas")
    assert told == [[("ExcludedError", "cut off"), ("LinkError", "over")]] * 2


def _weights(rank: int, link: ElasticRanksLink, echo: Echo | None) -> Any:
    steps = [*range(1, MOST_STEPS + 10)]
    for step in steps:
        link.weights(step)
    pending = [link.open(RoundId(step, 0), contribution(rank, 1.0), reduction(rank)) for step in (3, steps[-1])]
    if echo is not None:
        echo.came = {4: 4.0}
    completed = [one.wait() for one in pending]  # the first was sent long ago
    asked = [sorted(link.weights(each.round_id.step).items()) for each in completed]
    return asked, echo and (len(echo.asked) - len(steps), echo.asked[-2:])


def test_weights_are_asked_once_and_again_with_a_round(tmp_path: Path) -> None:
    (first, asked), (second, _) = two_ranks(tmp_path, _weights, "replicas")
    newest = MOST_STEPS + 9
    assert first == second == [[(0, 1.0), (1, 2.0), (2, float(step)), (4, 4.0)] for step in (3, newest)]
    assert asked == (2, [3, newest])
