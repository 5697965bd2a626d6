"""Every link passes `LinkContract`: a new link is tested by one subclass that makes it."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from torch import distributed

from atoll import Shape, connect, local, shaped
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import LinkError
from atoll.link.base import Contribution, Link, Member, Round, RoundId
from atoll.link.elastic_ranks import ElasticRanksLink
from atoll.link.elastic_shards import ElasticShardsLink
from atoll.link.net.fixed_link import Limits
from atoll.link.net.run_keys import throw_away
from atoll.link.ranks import RankGroup, ReplicatedLink, ShardedLink
from elastic_links import elastic_run
from fleet import free_port

WORKERS, NUMEL = 3, 1000
REDUCTION = Reduction(Codec("fp32"), NUMEL)
TERMS = {"period": "5"}
Result = TypeVar("Result")


def together(links: Sequence[Link], act: Callable[[Link], Result]) -> list[Result]:
    """Call `act` for every worker in its own thread."""
    with ThreadPoolExecutor(len(links)) as pool:
        return [future.result(60) for future in [pool.submit(act, link) for link in links]]


def contribution(worker: int, step: int) -> Contribution:
    payload = torch.full((NUMEL,), float(10 * step + worker)).view(torch.uint8)
    return Contribution(Member(worker, 1.0 + worker, step, 7), payload)


class LinkContract:
    """What the outer loop relies on; subclasses make the links of three workers."""

    def make(self) -> Sequence[Link]:
        raise NotImplementedError

    @pytest.fixture
    def links(self) -> Iterator[Sequence[Link]]:
        links = self.make()
        yield links
        together(links, lambda link: link.close("the test has ended"))

    @pytest.fixture
    def joined(self, links: Sequence[Link]) -> Sequence[Link]:
        together(links, lambda link: link.join(TERMS, 1.0 + link.worker))
        return links

    def test_workers_are_numbered_in_order(self, links: Sequence[Link]) -> None:
        assert [link.worker for link in links] == list(range(WORKERS))
        assert {link.workers for link in links} == {WORKERS}

    def test_all_know_the_members_and_their_weights(self, joined: Sequence[Link]) -> None:
        for link in joined:
            assert link.present(1) and link.trains(1)
            assert dict(link.weights(1)) == {0: 1.0, 1: 2.0, 2: 3.0}
            link.check()

    def test_a_flag_of_one_rank_is_that_of_its_worker(self, joined: Sequence[Link]) -> None:
        assert [link.on_any_rank(link.worker == 1) for link in joined] == [False, True, False]

    def test_every_worker_gets_the_same_round_in_worker_order(self, joined: Sequence[Link]) -> None:
        def exchange(link: Link) -> list[Round]:
            rounds = [RoundId(step, 0) for step in (1, 2)]
            pending = [link.open(at, contribution(link.worker, at.step), REDUCTION) for at in rounds]
            return [one.wait() for one in reversed(pending)][::-1]  # in any order

        for completed in together(joined, exchange):
            for step, round_ in enumerate(completed, start=1):
                assert round_.round_id == RoundId(step, 0)
                assert [(m.worker, m.weight, m.anchor_version) for m in round_.members] == [
                    (worker, 1.0 + worker, step) for worker in range(WORKERS)
                ]
                for worker, payload in enumerate(round_.payloads):
                    assert torch.equal(payload, contribution(worker, step).payload)

    def test_a_worker_with_nothing_to_send_gets_the_result(self, joined: Sequence[Link]) -> None:
        def exchange(link: Link) -> Round:
            offer = None if link.worker == 1 else contribution(link.worker, 1)
            return link.open(RoundId(1, 0), offer, REDUCTION).wait()

        for completed in together(joined, exchange):
            assert [member.worker for member in completed.members] == [0, 2]

    def test_a_worker_that_leaves_fails_the_round_of_the_others(self, joined: Sequence[Link]) -> None:
        def leave_or_wait(link: Link) -> LinkError | None:
            if link.worker == 1:
                link.close("out of text")
                return None
            with pytest.raises(LinkError) as caught:
                link.open(RoundId(1, 0), contribution(link.worker, 1), REDUCTION).wait()
            return caught.value

        first, _, third = together(joined, leave_or_wait)
        for error in (first, third):
            assert error is not None and "worker 1" in str(error) and "out of text" in str(error)

    def test_a_worker_joins_once(self, joined: Sequence[Link]) -> None:
        with pytest.raises(LinkError, match="has joined already"):
            joined[0].join(TERMS, 1.0)

    def test_other_terms_are_refused(self, links: Sequence[Link]) -> None:
        def refused(link: Link) -> bool:
            try:
                link.join({"period": "5" if link.worker < 2 else "6"}, 1.0)
            except LinkError as error:
                return "period" in str(error) or "left" in str(error) or "closed" in str(error)
            return False

        assert any(together(links, refused))

    def test_workers_that_start_otherwise_are_refused(self, links: Sequence[Link]) -> None:
        def refused(link: Link) -> bool:
            try:
                link.join(TERMS, 1.0, {"inner steps made": "0" if link.worker < 2 else "5"})
            except LinkError as error:
                return "inner steps" in str(error) or "left" in str(error) or "closed" in str(error)
            return False

        assert any(together(links, refused))


class TestLocal(LinkContract):
    def make(self) -> Sequence[Link]:
        return local(WORKERS, timeout_s=30.0)


class TestShaped(LinkContract):
    def make(self) -> Sequence[Link]:
        return shaped(local(WORKERS, timeout_s=30.0), Shape(latency_s=0.001))


class TestNet(LinkContract):
    def make(self) -> Sequence[Link]:
        address, limits = f"127.0.0.1:{free_port()}", Limits(deadline_s=30.0, join_s=30.0, silent_s=20.0)
        return [connect(address, worker=w, workers=WORKERS, keys=self.keys(w), **limits) for w in range(WORKERS)]

    def keys(self, worker: int) -> str:
        return "none"


@pytest.mark.processes
class TestNetWithKeys(TestNet):
    @pytest.fixture(autouse=True)
    def bundles(self, tmp_path: Path) -> None:
        self.folder = tmp_path
        throw_away(WORKERS).save(tmp_path)

    def keys(self, worker: int) -> str:
        return str(self.folder / f"worker-{worker}")


@pytest.mark.processes
class TestElastic(LinkContract):
    @pytest.fixture(autouse=True)
    def run(self, tmp_path: Path) -> Iterator[None]:
        with elastic_run(WORKERS, tmp_path) as self.run_:
            yield

    def make(self) -> Sequence[Link]:
        return self.run_.links()

    def test_a_worker_that_leaves_fails_the_round_of_the_others(self, joined: Sequence[Link]) -> None:
        """The others go on without it instead."""

        def leave_or_wait(link: Link) -> Round | None:
            if link.worker == 1:
                link.close("out of text")
                return None
            return link.open(RoundId(1, 0), contribution(link.worker, 1), REDUCTION).wait()

        first, _, third = together(joined, leave_or_wait)
        for completed in (first, third):
            assert completed is not None and [member.worker for member in completed.members] == [0, 2]
            assert completed.complete is False


class RanksContract(LinkContract):
    """A worker of one rank: its collectives have nobody else to wait for."""

    @pytest.fixture(autouse=True)
    def group(self) -> Iterator[None]:
        distributed.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
        yield
        distributed.destroy_process_group()

    def rank_group(self) -> RankGroup:
        assert distributed.group.WORLD is not None
        return RankGroup(distributed.group.WORLD)


class TestSharded(RanksContract):
    def make(self) -> Sequence[Link]:
        return [ShardedLink(self.rank_group(), link) for link in local(WORKERS, timeout_s=30.0)]


class TestElasticRanks(RanksContract):
    def make(self) -> Sequence[Link]:
        links = local(WORKERS, timeout_s=30.0)
        return [ElasticRanksLink(self.rank_group(), link, link.worker, WORKERS) for link in links]


class TestElasticShards(RanksContract):
    def make(self) -> Sequence[Link]:
        groups, links = (self.rank_group(), self.rank_group()), local(WORKERS, timeout_s=30.0)
        return [ElasticShardsLink(*groups, link, link.worker, WORKERS) for link in links]


class TestReplicated(RanksContract):
    def make(self) -> Sequence[Link]:
        links = local(WORKERS, timeout_s=30.0)
        return [ReplicatedLink(self.rank_group(), link, link.worker, WORKERS) for link in links]
