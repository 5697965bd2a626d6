"""Every registry passes `RegistryContract`: a new one is tested by one subclass that makes it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import count
from pathlib import Path

import pytest

from atoll.errors import ConfigError, RegistryError
from atoll.link.net.embedded import RegistryServer
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.etcd import EtcdRegistry
from atoll.link.net.etcd_gateway import EtcdOptions
from atoll.link.net.identity import Authority
from atoll.link.net.registry import (
    INSECURE,
    PRESENCE_BYTES,
    VALUE_BYTES,
    VIEW,
    WORKERS,
    Entry,
    Lease,
    Registry,
    Update,
    presence_key,
)
from registries import Etcd

pytestmark = pytest.mark.processes  # waits for connections more than it computes

Three = tuple[Registry, Registry, Registry]
PATIENCE_S = 30.0
TTL_S = 2.0


async def until(happens: Callable[[], Awaitable[bool]]) -> None:
    """Wait until something is so."""
    async with asyncio.timeout(PATIENCE_S):
        while not await happens():
            await asyncio.sleep(0.02)


class Follower:
    """Collects what a watcher is told."""

    def __init__(self, registry: Registry, prefix: str, since: int = 0) -> None:
        self.updates: list[Update] = []
        self.state: dict[str, Entry] = {}
        self._watch = registry.watch(prefix, since)

    async def follow(self, more: int) -> list[Update]:
        """Wait for so many more updates, and return them."""
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(more):
                update = await anext(self._watch)
                self.updates.append(update)
                if update.is_snapshot:
                    self.state.clear()
                for key, entry in update.entries.items():
                    self.state.pop(key, None)
                    if entry is not None:
                        self.state[key] = entry
        return self.updates[-more:]

    async def close(self) -> None:
        await self._watch.aclose()


class RegistryContract:
    """What members rely on; subclasses make three connections, those of worker 0, 1 and 2, to an empty registry."""

    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[Three]:
        raise NotImplementedError
        yield

    @pytest.fixture
    def run(self, tmp_path: Path) -> Callable[[Callable[[Three], Awaitable[None]]], None]:
        """Run a test with three connections."""

        def run(test: Callable[[Three], Awaitable[None]]) -> None:
            async def main() -> None:
                async with self.make(tmp_path) as registries, asyncio.timeout(4 * PATIENCE_S):
                    await test(registries)

            asyncio.run(main())

        return run

    def test_compare_and_set_creates_and_changes(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, two, _ = all_
            assert await one.get(VIEW) is None
            first = await one.compare_and_set(VIEW, b"\x00\xff view", 0)
            assert first.accepted and first.entry is not None and first.entry.value == b"\x00\xff view"
            assert await two.get(VIEW) == first.entry
            second = await two.compare_and_set(VIEW, b"", first.entry.version)
            assert second.accepted and second.entry is not None and second.entry.version > first.entry.version
            assert await one.get(VIEW) == Entry(b"", second.entry.version) == second.entry

        run(test)

    def test_a_stale_version_is_refused_and_told_what_is_there(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, two, _ = all_
            absent = await one.compare_and_set(VIEW, b"never", 7)
            assert not absent.accepted and absent.entry is None and await one.get(VIEW) is None
            first = (await one.compare_and_set(VIEW, b"first", 0)).entry
            assert first is not None
            for version in (0, first.version - 1, first.version + 1):
                refused = await two.compare_and_set(VIEW, b"late", version)
                assert not refused.accepted and refused.entry == first
            assert await two.get(VIEW) == first

        run(test)

    def test_one_of_many_at_once_is_accepted(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            for number in range(5):
                there = await all_[0].get(VIEW)
                version = there.version if there else 0
                values = [f"{number} {n}".encode() for n in range(9)]
                outcomes = await asyncio.gather(
                    *(all_[n % 3].compare_and_set(VIEW, value, version) for n, value in enumerate(values))
                )
                accepted = [outcome.entry for outcome in outcomes if outcome.accepted]
                assert len(accepted) == 1 and {outcome.entry for outcome in outcomes} == {*accepted}
                assert await all_[1].get(VIEW) == accepted[0]

        run(test)

    def test_a_watcher_gets_a_snapshot_and_then_every_change_in_order(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, two, three = all_
            view = Follower(one, VIEW)
            (empty,) = await view.follow(1)
            assert empty.is_snapshot and empty.entries == {}
            version, written = 0, list[tuple[int, bytes]]()
            for number in range(30):
                entry = (await two.compare_and_set(VIEW, b"%d" % number, version)).entry
                assert entry is not None
                version = entry.version
                written.append((version, entry.value))
            changes = await view.follow(30)
            assert not any(change.is_snapshot for change in changes)
            assert [(change.version, change.entries[VIEW]) for change in changes] == [
                (version, Entry(value, version)) for version, value in written
            ]
            late = Follower(three, VIEW, since=written[9][0])
            again = await late.follow(20)
            assert [change.version for change in again] == [version for version, _ in written[10:]]
            now = Follower(three, "")
            (snapshot,) = await now.follow(1)
            assert snapshot.is_snapshot and snapshot.version >= version
            assert snapshot.entries == {VIEW: Entry(b"29", version)}
            for follower in (view, late, now):
                await follower.close()

        run(test)

    def test_a_presence_appears_is_renewed_and_disappears_when_withdrawn(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, two, three = all_
            seen = Follower(three, WORKERS)
            await seen.follow(1)
            first = await one.announce(presence_key(0), b"10.0.0.1:1", TTL_S)
            second = await two.announce(presence_key(1, 3), b"10.0.0.2:1", TTL_S)
            await seen.follow(2)
            assert {key: entry.value for key, entry in seen.state.items()} == {
                "workers/0": b"10.0.0.1:1",
                "workers/1/3": b"10.0.0.2:1",
            }
            before = await three.get(presence_key(0))
            await asyncio.sleep(2.5 * TTL_S)
            assert await three.get(presence_key(0)) == before is not None
            await first.close()
            (gone,) = await seen.follow(1)
            assert gone.entries == {"workers/0": None} and gone.version > before.version
            await second.close()
            await seen.follow(1)
            assert seen.state == {} and await one.get(presence_key(1, 3)) is None
            assert not first.is_replaced
            await seen.close()

        run(test)

    def test_a_presence_that_is_not_renewed_disappears(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, _, three = all_
            seen = Follower(three, WORKERS)
            await seen.follow(1)
            presence = await one.announce(presence_key(0), b"here", TTL_S)
            await seen.follow(1)
            presence._renewing.cancel()  # as if the process were dead
            (gone,) = await seen.follow(1)
            assert gone.entries == {"workers/0": None} and await three.get(presence_key(0)) is None
            await seen.close()

        run(test)

    def test_the_newest_process_has_the_key_and_the_other_learns_it(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, _, three = all_
            old = await one.announce(presence_key(0), b"old", TTL_S)
            new = await one.announce(presence_key(0), b"new", TTL_S)
            await asyncio.wait_for(old.wait_replaced(), PATIENCE_S)
            assert old.is_replaced and not new.is_replaced
            await old.close()
            await asyncio.sleep(TTL_S)
            entry = await three.get(presence_key(0))
            assert entry is not None and entry.value == b"new"
            await new.close()
            assert await three.get(presence_key(0)) is None

        run(test)

    def test_a_process_that_was_stopped_announces_itself_again_unless_replaced(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, two, three = all_
            seen = Follower(three, WORKERS)
            await seen.follow(1)
            stopped = await one.announce(presence_key(0), b"stopped", TTL_S)
            other = await two.announce(presence_key(1), b"other", TTL_S)
            await seen.follow(2)
            await one._withdraw(stopped._lease)  # what the registry does once the time is over
            await two._withdraw(other._lease)
            newer = await two.announce(presence_key(1), b"newer", TTL_S)
            await asyncio.wait_for(other.wait_replaced(), PATIENCE_S)

            async def back() -> bool:
                return await three.get(presence_key(0)) is not None

            await until(back)
            await seen.follow(4)
            assert {key: entry.value for key, entry in seen.state.items()} == {
                "workers/0": b"stopped",
                "workers/1": b"newer",
            }
            assert not stopped.is_replaced
            for presence in (stopped, other, newer):
                await presence.close()
            await seen.close()

        run(test)

    def test_an_announcement_whose_reply_was_lost_is_no_other_process(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            presence = await all_[0].announce(presence_key(0), b"here", TTL_S)
            assert await all_[0]._grant(presence._lease, if_absent=True)
            before = await all_[1].get(presence_key(0))
            other = Lease(presence_key(0), b"other", TTL_S, 99)
            assert not await all_[0]._grant(other, if_absent=True), "it is free only once the first is gone"
            assert await all_[1].get(presence_key(0)) == before is not None
            await asyncio.sleep(TTL_S)
            assert not presence.is_replaced
            await presence.close()

        run(test)

    def test_large_values_pass_and_larger_ones_do_not(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            one, two, _ = all_
            whole = bytes(range(256)) * (VALUE_BYTES // 256)
            first = await one.compare_and_set(VIEW, whole, 0)
            second = await one.compare_and_set(VIEW, whole[::-1], first.entry.version if first.entry else 0)
            assert second.accepted
            presence = await one.announce(presence_key(0), whole[:PRESENCE_BYTES], TTL_S)
            seen = Follower(two, "")
            (snapshot,) = await seen.follow(1)
            assert first.entry is not None and second.entry is not None
            assert snapshot.entries[VIEW] == second.entry and len(snapshot.entries) == 2
            late = Follower(two, VIEW, first.entry.version)
            assert (await late.follow(1))[0].entries == {VIEW: second.entry}
            with pytest.raises(ConfigError, match="bytes"):
                await one.compare_and_set(VIEW, whole + b"x", second.entry.version)
            with pytest.raises(ConfigError, match="bytes"):
                await one.announce(presence_key(0), whole[: PRESENCE_BYTES + 1], TTL_S)
            for closed in (presence, seen, late):
                await closed.close()

        run(test)

    @pytest.mark.parametrize(
        "key", ["", "views", "view/1", "workers", "workers/", "workers/01", "workers/1/", "../view"]
    )
    def test_other_keys_are_refused(self, run: "Run", key: str) -> None:
        async def test(all_: Three) -> None:
            with pytest.raises(ConfigError):
                await all_[0].get(key)
            with pytest.raises(ConfigError):
                await all_[0].compare_and_set(key, b"", 0)
            with pytest.raises(ConfigError):
                await all_[0].announce(key, b"", TTL_S)

        run(test)

    def test_presences_are_not_set_and_the_view_is_not_announced(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            with pytest.raises(ConfigError):
                await all_[0].compare_and_set(presence_key(0), b"", 0)
            with pytest.raises(ConfigError):
                await all_[0].announce(VIEW, b"", TTL_S)
            for ttl_s in (0.0, -1.0, 1e9, float("nan")):
                with pytest.raises(ConfigError):
                    await all_[0].announce(presence_key(0), b"", ttl_s)

        run(test)

    def test_a_version_that_the_registry_does_not_know_yet_is_an_error(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            async with aclosing(all_[0].watch(VIEW, since=1 << 40)) as watch:
                with pytest.raises(RegistryError, match="lost"):
                    await asyncio.wait_for(anext(watch), PATIENCE_S)

        run(test)

    def test_a_watcher_that_is_closed_leaves_nothing_behind(self, run: "Run") -> None:
        async def test(all_: Three) -> None:
            before = len(asyncio.all_tasks())
            for _ in range(100):  # more than one process may have at a time
                async with aclosing(all_[0].watch("")) as watch:
                    await asyncio.wait_for(anext(watch), PATIENCE_S)

            async def ended() -> bool:
                return len(asyncio.all_tasks()) <= before + 1

            await until(ended)

        run(test)


Run = Callable[[Callable[[Three], Awaitable[None]]], None]


class TestEmbedded(RegistryContract):
    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[Three]:
        authority = Authority.new()
        async with AsyncExitStack() as stack:
            server = await RegistryServer.start(folder / "registry", "127.0.0.1:0", authority.issue("registry"))
            stack.push_async_callback(server.close)
            made = [EmbeddedRegistry(server.address, authority.issue("worker", seat)) for seat in range(3)]
            for one in made:
                await stack.enter_async_context(one)
            yield made[0], made[1], made[2]


@pytest.mark.thorough
class TestEmbeddedInsecure(RegistryContract):
    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[Three]:
        async with AsyncExitStack() as stack:
            server = await RegistryServer.start(folder / "registry", "127.0.0.1:0", INSECURE)
            stack.push_async_callback(server.close)
            made = [await stack.enter_async_context(EmbeddedRegistry(server.address, INSECURE)) for _ in range(3)]
            yield made[0], made[1], made[2]


class EtcdContract(RegistryContract):
    """With a cluster for all tests of a class; each has a name of its own in it."""

    members = 1
    etcd: Etcd
    _numbers = count()

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def cluster(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with Etcd(tmp_path_factory.mktemp("etcd"), cls.members) as cls.etcd:
            yield

    @asynccontextmanager
    async def make(self, folder: Path) -> AsyncIterator[Three]:
        options = EtcdOptions.read(f"{self.etcd.url}/run{next(self._numbers)}", INSECURE)
        async with EtcdRegistry(options) as one, EtcdRegistry(options) as two, EtcdRegistry(options) as three:
            yield one, two, three


@pytest.mark.processes
class TestEtcd(EtcdContract):
    pass


@pytest.mark.processes
class TestThreeEtcds(EtcdContract):
    members = 3
