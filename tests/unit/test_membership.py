"""One process's side of a real registry on loopback: who is announced, and which view counts."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from atoll.errors import LinkError, RegistryError
from atoll.link.net.event_loop import event_loop
from atoll.link.net.membership import Announcement, Membership
from atoll.link.net.open_registry import open_registry
from atoll.link.net.registry import VIEW, Entry
from atoll.link.net.view_record import encode_view
from atoll.link.net.views import Process, View
from elastic_links import ElasticRun, elastic_run

pytestmark = pytest.mark.processes  # waits for connections more than it computes

FIRST, AGAIN, OTHER = Process(1, 10), Process(1, 20), Process(2, 30)


class Side:
    """A membership, and the faults that it has told of."""

    def __init__(self, run: ElasticRun, me: Process) -> None:
        self.faults: list[LinkError] = []
        self.changes = 0
        registry = open_registry(run.server.address, run.keys.workers[me.seat])
        self.membership = Membership(registry, me, self.change, self.faults.append)

    def change(self) -> None:
        self.changes += 1


@asynccontextmanager
async def sides(run: ElasticRun, *processes: Process) -> AsyncIterator[list[Side]]:
    made = [Side(run, process) for process in processes]
    try:
        yield made
    finally:
        for side in made:
            await side.membership.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


def on_a_registry(folder: Path, work: Callable[[ElasticRun], Awaitable[None]]) -> None:
    async def run_work(run: ElasticRun) -> None:
        await work(run)

    with elastic_run(3, folder) as run:
        event_loop().run(run_work(run))


def test_processes_come_and_go(tmp_path: Path) -> None:
    async def work(run: ElasticRun) -> None:
        async with sides(run, FIRST, OTHER) as (one, two):
            await one.membership.announce(["127.0.0.1:5"], 5.0)
            await two.membership.announce([], 5.0)
            await until(lambda: one.membership.present.keys() == {1, 2} == two.membership.present.keys())
            assert two.membership.present[1].addresses == ["127.0.0.1:5"]
            assert two.membership.is_present(FIRST) and not two.membership.is_present(AGAIN)
            await one.membership.close()
            await until(lambda: two.membership.present.keys() == {2})
            assert not two.membership.is_present(FIRST) and two.changes and not two.faults

    on_a_registry(tmp_path, work)


def test_a_process_whose_seat_is_taken_learns_it(tmp_path: Path) -> None:
    async def work(run: ElasticRun) -> None:
        async with sides(run, FIRST, AGAIN) as (one, two):
            await one.membership.announce([], 1.0)
            await two.membership.announce([], 1.0)
            await until(lambda: bool(one.faults))
            assert "worker 1 was started again elsewhere" in str(one.faults[0]) and one.faults[0].worker == 1
            await until(lambda: two.membership.is_present(AGAIN))
            assert not two.faults

    on_a_registry(tmp_path, work)


def test_it_learns_so_at_once(tmp_path: Path) -> None:
    async def work(run: ElasticRun) -> None:
        async with sides(run, FIRST, AGAIN) as (one, two):
            await one.membership.announce([], 3600.0)  # is renewed every 20 minutes
            await two.membership.announce([], 3600.0)
            await until(lambda: bool(one.faults))
            assert "start it only once" in str(one.faults[0])
            await until(lambda: two.membership.is_present(AGAIN))
            assert not two.faults

    on_a_registry(tmp_path, work)


def test_one_of_two_views_is_accepted(tmp_path: Path) -> None:
    async def work(run: ElasticRun) -> None:
        async with sides(run, FIRST, OTHER) as (one, two):
            for side in (one, two):
                await side.membership.announce([], 5.0)
            offers = [View(1, {1: 10}), View(1, {2: 30})]
            for side, view in zip((one, two), offers, strict=True):
                side.membership.propose(view)
                side.membership.propose(View(3, {}))  # not the next one: nobody hears of it
            await until(lambda: one.membership.view.number == two.membership.view.number == 1)
            assert one.membership.view == two.membership.view and one.membership.view in offers
            two.membership.propose(two.membership.view.ending())
            await until(lambda: one.membership.view.number == 2)
            assert one.membership.view.over

    on_a_registry(tmp_path, work)


def test_a_view_is_offered_until_the_registry_answers(tmp_path: Path) -> None:
    with elastic_run(3, tmp_path) as run:

        async def start() -> Side:
            side = Side(run, FIRST)
            await side.membership.announce([], 5.0)
            return side

        side = event_loop().run(start())
        address = run.server.address
        event_loop().run(run.server.close())

        async def propose() -> None:
            side.membership.propose(View(1, {1: 10}))
            await until(lambda: not side.membership.reaches_registry)

        event_loop().run(propose())
        run.server = event_loop().run(type(run.server).start(run.folder, address, run.keys.registry))
        event_loop().run(until(lambda: side.membership.view.number == 1))
        assert side.membership.reaches_registry
        event_loop().run(side.membership.close())


def test_an_older_view_does_not_come_back(tmp_path: Path) -> None:
    async def work(run: ElasticRun) -> None:
        async with sides(run, FIRST) as (one,):
            membership = one.membership
            membership._take_view(Entry(encode_view(View(5, {1: 10})), 7))
            for number, version in ((4, 8), (6, 7), (6, 6)):
                membership._take_view(Entry(encode_view(View(number, {})), version))
            assert membership.view == View(5, {1: 10}) and not one.faults
            membership._take_view(Entry(b"nonsense", 9))
            assert isinstance(one.faults[0], RegistryError) and one.faults[0].key == VIEW

    on_a_registry(tmp_path, work)


def test_nothing_is_offered_after_closing(tmp_path: Path) -> None:
    async def work(run: ElasticRun) -> None:
        async with sides(run, FIRST) as (one,):
            await one.membership.close()
            one.membership.propose(View(1, {1: 10}))
            assert not one.membership._tasks

    on_a_registry(tmp_path, work)


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"{}",
        b"\xff",
        b'{"life": 0, "addresses": []}',
        b'{"life": 1, "addresses": ["a"], "more": 1}',
        b'{"life": 1, "addresses": ["%s"]}' % (b"a" * 301),
        b'{"life": 1, "addresses": [%s"a"]}' % (b'"a",' * 8),
    ],
)
def test_an_announcement_that_cannot_be_read_is_of_nobody(value: bytes) -> None:
    assert Announcement.parse(value) is None
