"""An embedded registry: killed, stopped, locked, full, and asked by strangers."""

import asyncio
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import grpc
import grpc.aio
import pytest

from atoll.errors import ConfigError, RegistryError
from atoll.link.net import registry_messages as messages
from atoll.link.net.embedded import BEAT_S, WATCHERS_EACH, RegistryServer
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.identity import Authority, Identity, Role
from atoll.link.net.journal import HISTORY, JOURNAL, Journal
from atoll.link.net.registry import INSECURE, KEYS, VIEW, WORKERS, Entry, Insecure, Lease, Update, presence_key
from registries import RegistryProcess

pytestmark = pytest.mark.processes  # waits for connections more than it computes

PATIENCE_S = 60.0


def wrong_run() -> tuple[Authority, Authority]:
    """Two authorities for runs of the same name."""
    return Authority.new("same"), Authority.new("same")


@asynccontextmanager
async def serving(
    folder: Path, identity: Identity | Insecure, listen: str = "127.0.0.1:0"
) -> AsyncIterator[RegistryServer]:
    server = await RegistryServer.start(folder, listen, identity)
    try:
        yield server
    finally:
        await server.close()


# ---------------------------------------------------------------------- killed


@pytest.mark.processes
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
def test_killed_at_any_moment_it_loses_nothing(tmp_path: Path, seed: int) -> None:
    """A counter: what was acknowledged is there, each value is told once and in order, versions grow."""
    kills, authority, draw = 8, Authority.new(), random.Random(seed)
    authority.issue("registry").save(tmp_path / "keys")

    async def count_up(registry: EmbeddedRegistry, told: list[tuple[int, int]], enough: asyncio.Event) -> None:
        value, version, uncertain = 0, 0, [True]
        while not enough.is_set():
            try:
                outcome = await registry.compare_and_set(VIEW, b"%d" % (value + 1), version)
            except RegistryError as fault:
                uncertain.append(fault.uncertain)
                entry = await again(registry)
                found = int(entry.value) if entry else 0
                assert found in (value, value + 1), "an acknowledged value is lost"
                assert (entry.version if entry else 0) >= version
                value, version = found, entry.version if entry else 0
                continue
            assert outcome.accepted and outcome.entry is not None and outcome.entry.version > version
            value, version = value + 1, outcome.entry.version
            told.append((version, value))
        assert all(uncertain)

    async def again(registry: EmbeddedRegistry) -> Entry | None:
        while True:
            try:
                return await registry.get(VIEW)
            except RegistryError:
                await asyncio.sleep(0.02)

    async def follow(registry: EmbeddedRegistry, seen: list[Update], last: asyncio.Future[int]) -> None:
        async for update in registry.watch(VIEW):
            seen.append(update)
            if last.done() and update.version >= last.result():
                return

    async def main(process: RegistryProcess) -> None:
        worker, observer = authority.issue("worker", 1), authority.issue("observer")
        told, seen = list[tuple[int, int]](), list[Update]()
        last: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        enough = asyncio.Event()
        async with (
            EmbeddedRegistry(process.address, worker, timeout_s=2.0) as writer,
            EmbeddedRegistry(process.address, observer, timeout_s=2.0) as reader,
            asyncio.timeout(4 * PATIENCE_S),
        ):
            following = asyncio.create_task(follow(reader, seen, last))
            while not seen:  # it has the snapshot, which is empty
                await asyncio.sleep(0.01)
            counting = asyncio.create_task(count_up(writer, told, enough))
            for _ in range(kills):
                await asyncio.sleep(draw.uniform(0.05, 0.6))
                assert not counting.done() and not following.done()
                await asyncio.to_thread(process.kill)
                await asyncio.to_thread(process.start)
            enough.set()
            await counting
            entry = await again(writer)
            assert entry is not None
            last.set_result(entry.version)
            if seen[-1].version < entry.version:
                await following
            following.cancel()
            values = [int(update.entries[VIEW].value) for update in seen if update.entries.get(VIEW)]  # type: ignore[union-attr]
            assert values == list(range(values[0], int(entry.value) + 1)) and values[0] <= 1
            assert not any(update.is_snapshot for update in seen[1:])
            known = {update.version: int(update.entries[VIEW].value) for update in seen if update.entries.get(VIEW)}  # type: ignore[union-attr]
            assert all(known[version] == value for version, value in told if version in known)
            assert len(told) > kills

    with RegistryProcess(tmp_path / "registry", tmp_path / "keys") as process:
        asyncio.run(main(process))


@pytest.mark.processes
@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_presences_outlast_a_registry_that_was_away_for_longer(tmp_path: Path, how: str) -> None:
    ttl_s = 1.0

    async def main(process: RegistryProcess) -> None:
        async with EmbeddedRegistry(process.address, INSECURE, timeout_s=2.0) as registry:
            presence = await registry.announce(presence_key(0), b"here", ttl_s)
            dead = await registry.announce(presence_key(1), b"dead", ttl_s)
            before = await registry.get(presence_key(0))
            watch = registry.watch(WORKERS)
            assert (await anext(watch)).is_snapshot
            dead._renewing.cancel()
            if how == "killed":
                await asyncio.to_thread(process.kill)
                await asyncio.sleep(2 * ttl_s)
                await asyncio.to_thread(process.start)
            else:
                assert process.child is not None
                process.child.kill(signal.SIGSTOP)
                await asyncio.sleep(3 * ttl_s)
                process.child.kill(signal.SIGCONT)
            back_s = time.monotonic()
            update = await asyncio.wait_for(anext(watch), PATIENCE_S)
            assert update.entries == {"workers/1": None}, "the one that renews is still there"
            assert time.monotonic() - back_s > 0.5 * ttl_s, "the other has its full time after the restart"
            assert await registry.get(presence_key(0)) == before
            await presence.close()
            assert (await asyncio.wait_for(anext(watch), PATIENCE_S)).entries == {"workers/0": None}
            await watch.aclose()

    with RegistryProcess(tmp_path / "registry", None) as process:
        asyncio.run(main(process))


def test_a_presence_whose_caller_has_gone_disappears(tmp_path: Path) -> None:
    """The caller gives up while the disk is slow; the key is written, and nobody renews it."""

    async def main() -> None:
        async with serving(tmp_path, INSECURE) as server:
            server._thread.submit(time.sleep, 0.5)
            async with EmbeddedRegistry(server.address, INSECURE, timeout_s=0.2) as hasty:
                with pytest.raises(RegistryError) as caught:
                    await hasty.announce(presence_key(0), b"", 1.0)
                assert caught.value.uncertain and caught.value.key == presence_key(0)
            async with EmbeddedRegistry(server.address, INSECURE) as patient, asyncio.timeout(PATIENCE_S):
                async for update in patient.watch(WORKERS):
                    if update.entries == {"workers/0": None}:
                        break

    asyncio.run(main())


# ---------------------------------------------------------------------- locked, full, broken


@pytest.mark.processes
def test_a_second_registry_on_one_journal_is_refused(tmp_path: Path) -> None:
    with RegistryProcess(tmp_path / "registry", None) as process:
        with pytest.raises(ConfigError, match="another registry") as caught:
            Journal(tmp_path / "registry")
        assert caught.value.setting == "folder"
        second = RegistryProcess(tmp_path / "registry", None)
        second.log = tmp_path / "second.log"
        with pytest.raises(AssertionError, match="is used by another registry"):
            second.start()
        assert second.child is not None and second.child.process.wait(PATIENCE_S) == 2
        process.kill()
        Journal(tmp_path / "registry").close()


def test_one_process_cannot_open_a_journal_twice(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)), pytest.raises(ConfigError, match="another registry"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_full_disk_is_an_error_to_the_caller(small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("3m")
    ballast = disk / "ballast"

    async def main() -> None:
        async with (
            serving(disk / "registry", INSECURE) as server,
            EmbeddedRegistry(server.address, INSECURE) as registry,
        ):
            first = (await registry.compare_and_set(VIEW, b"first", 0)).entry
            assert first is not None
            dead = await registry.announce(presence_key(1), b"dead", 0.5)
            dead._renewing.cancel()
            ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
            for _ in range(3):
                with pytest.raises(RegistryError, match="disk"):
                    await registry.compare_and_set(VIEW, bytes(100_000), first.version)
                with pytest.raises(RegistryError, match="disk"):
                    await registry.announce(presence_key(0), bytes(16_000), 1.0)
            await asyncio.sleep(1.0)
            assert await registry.get(VIEW) == first and await registry.get(presence_key(0)) is None
            ballast.unlink()
            second = await registry.compare_and_set(VIEW, b"second", first.version)
            assert second.accepted and second.entry is not None and second.entry.version > first.version
            async with asyncio.timeout(PATIENCE_S):
                while await registry.get(presence_key(1)) is not None:
                    await asyncio.sleep(0.05)
        with closing(Journal(disk / "registry")) as journal:
            assert journal.get(VIEW) == second.entry and journal.get(presence_key(1)) is None

    asyncio.run(main())


@pytest.mark.parametrize("content", [b"no database", bytes(5000), b"SQLite format 3\x00" + bytes(200)])
def test_another_file_is_no_journal(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        Journal(tmp_path)
    assert caught.value.setting == "folder" and (tmp_path / JOURNAL).read_bytes() == content


@pytest.mark.parametrize("listen", ["", "nowhere", ":1", "127.0.0.1:", "127.0.0.1:70000", "192.0.2.1:9999"])
def test_an_address_that_cannot_be_used_is_refused(tmp_path: Path, listen: str) -> None:
    with pytest.raises(ConfigError) as caught:
        asyncio.run(RegistryServer.start(tmp_path, listen, INSECURE))
    assert (caught.value.setting, caught.value.value) == ("listen", listen)
    Journal(tmp_path).close()


def test_two_servers_do_not_share_a_port(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path / "a", INSECURE) as server:
            second = serving(tmp_path / "b", INSECURE, server.address)
            with pytest.raises(ConfigError, match="another program"):
                await second.__aenter__()

    asyncio.run(main())


def test_a_watcher_is_told_that_the_registry_is_there(tmp_path: Path) -> None:
    """Also while keys change that are none of its business: then it is told how far it has come."""

    async def main() -> None:
        async with (
            serving(tmp_path, INSECURE) as server,
            grpc.aio.insecure_channel(server.address) as channel,
            EmbeddedRegistry(server.address, INSECURE) as registry,
        ):

            async def read() -> messages.WatchReply:
                return messages.parse(messages.WatchReply, await asyncio.wait_for(call.read(), 3 * BEAT_S))

            async def announce() -> None:
                for number in range(1, 1000):
                    await registry._grant(Lease(presence_key(0), b"", 5.0, number), if_absent=False)
                    await asyncio.sleep(0.1)

            request = messages.WatchRequest(prefix=VIEW, since=0).encode()
            call = channel.unary_stream(f"/{messages.SERVICE}/Watch")(request)
            assert (await read()).is_snapshot
            announcing = asyncio.create_task(announce())
            first, second = await read(), await read()
            assert first.changes == second.changes == [] and 1 < first.version < second.version
            announcing.cancel()
            call.cancel()

    asyncio.run(main())


# ---------------------------------------------------------------------- bounds


def test_a_watcher_that_was_away_for_too_long_gets_a_snapshot(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal._base.execute("PRAGMA synchronous=OFF")
        version = first = journal.version
        for number in range(HISTORY + 5):
            outcome = journal.compare_and_set(VIEW, b"%d" % number, 0 if number == 0 else version)
            assert outcome.accepted and outcome.entry is not None
            version = outcome.entry.version
        (kept,) = journal._base.execute("SELECT count(*) FROM changes").fetchone()
        assert kept == HISTORY
        snapshot = journal.page("", first)
        assert snapshot.is_snapshot and snapshot.version == version
        assert [(change.key, change.version) for change in snapshot.changes] == [(VIEW, version)]
        assert journal.page("", version - HISTORY - 1).is_snapshot
        oldest = journal.page("", version - HISTORY)
        assert not oldest.is_snapshot and oldest.changes[0].version == version - HISTORY + 1
    with closing(Journal(tmp_path)) as journal:
        assert journal.version == version and journal.page("", first).is_snapshot
        assert not journal.page("", version - HISTORY).is_snapshot


def test_the_history_is_bounded_in_bytes(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal._base.execute("PRAGMA synchronous=OFF")
        version = 0
        for _ in range(80):
            entry = journal.compare_and_set(VIEW, bytes(1 << 20), version).entry
            assert entry is not None
            version = entry.version
        assert journal._sum("changes") <= 1 << 26
        assert journal.page("", version - 70).is_snapshot and not journal.page("", version - 60).is_snapshot


def test_keys_and_bytes_are_bounded(tmp_path: Path) -> None:
    with closing(Journal(tmp_path)) as journal:
        journal._base.execute("PRAGMA synchronous=OFF")
        for seat in range(KEYS):
            assert journal.grant(Lease(presence_key(seat), b"", 60.0, 1), if_absent=False)
        with pytest.raises(RegistryError, match="no room") as caught:
            journal.grant(Lease(presence_key(KEYS), b"", 60.0, 1), if_absent=False)
        assert caught.value.key == presence_key(KEYS) and journal.get(presence_key(KEYS)) is None
        assert journal.withdraw(presence_key(0), 1)
        for seat in range(1, 1100):
            if journal._bytes + (1 << 14) > 1 << 24:
                break
            journal.grant(Lease(presence_key(seat), bytes(1 << 14), 60.0, 1), if_absent=False)
        version = journal.version
        with pytest.raises(RegistryError, match="no room"):
            journal.compare_and_set(VIEW, bytes(1 << 20), 0)
        assert journal.version == version and journal.get(VIEW) is None


def test_watchers_of_one_certificate_are_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        authority = Authority.new()
        async with (
            serving(tmp_path, authority.issue("registry")) as server,
            EmbeddedRegistry(server.address, authority.issue("worker", 0)) as greedy,
            EmbeddedRegistry(server.address, authority.issue("worker", 1)) as other,
        ):
            watches = [greedy.watch("") for _ in range(WATCHERS_EACH)]
            for watch in watches:
                await asyncio.wait_for(anext(watch), PATIENCE_S)
            one_more = greedy.watch("")
            with pytest.raises(RegistryError, match="too many watchers"):
                await asyncio.wait_for(anext(one_more), PATIENCE_S)
            others = other.watch("")
            assert (await asyncio.wait_for(anext(others), PATIENCE_S)).is_snapshot
            for watch in (*watches, others):
                await watch.aclose()

    asyncio.run(main())


@pytest.mark.processes
def test_strangers_cost_few_files_and_keep_nobody_out(tmp_path: Path) -> None:
    """Connections that say nothing: most are refused at once, the others after seconds."""
    authority, files = Authority.new(), 200
    authority.issue("registry").save(tmp_path / "keys")

    async def main(process: RegistryProcess) -> None:
        assert process.child is not None
        handles = Path(f"/proc/{process.child.process.pid}/fd")
        host, port = process.address.split(":")
        async with EmbeddedRegistry(process.address, authority.issue("worker", 0)) as known:
            assert await known.get(VIEW) is None
            strangers = [socket.create_connection((host, int(port))) for _ in range(3 * files)]
            try:
                await asyncio.sleep(1.0)
                assert len(os.listdir(handles)) < files
                assert (await known.compare_and_set(VIEW, b"still here", 0)).accepted
                async with EmbeddedRegistry(process.address, authority.issue("worker", 1), timeout_s=30.0) as late:
                    assert await late.get(VIEW) is not None
            finally:
                for stranger in strangers:
                    stranger.close()

    with RegistryProcess(tmp_path / "registry", tmp_path / "keys", files=files) as process:
        asyncio.run(main(process))


# ---------------------------------------------------------------------- strangers


def test_a_certificate_says_what_its_bearer_may_do(tmp_path: Path) -> None:
    async def main() -> None:
        authority = Authority.new()
        async with serving(tmp_path, authority.issue("registry")) as server:

            def connected(role: Role, seat: int = 0) -> EmbeddedRegistry:
                return EmbeddedRegistry(server.address, authority.issue(role, seat), timeout_s=5.0)

            async with connected("worker", 3) as worker, connected("observer") as observer:
                await worker.compare_and_set(VIEW, b"view", 0)
                mine = await worker.announce(presence_key(3), b"", 1.0)
                for seat in (0, 30, 33):
                    with pytest.raises(RegistryError, match="may not"):
                        await worker.announce(presence_key(seat), b"", 1.0)
                entry = await observer.get(VIEW)
                assert entry is not None and entry.value == b"view"
                assert len((await anext(observer.watch(""))).entries) == 2
                for refused in (
                    observer.compare_and_set(VIEW, b"", entry.version),
                    observer.announce(presence_key(0), b"", 1.0),
                    observer._withdraw(mine._lease),
                    observer._renew(mine._lease),
                ):
                    with pytest.raises(RegistryError, match="may not") as caught:
                        await refused
                    assert not caught.value.uncertain or caught.value.key
                await mine.close()
            server_only = EmbeddedRegistry(server.address, authority.issue("registry"), timeout_s=1.0)
            async with server_only as other:  # a certificate for servers does not get past the handshake
                with pytest.raises(RegistryError, match="cannot be reached"):
                    await other.get(VIEW)

    asyncio.run(main())


def test_without_a_certificate_of_the_run_there_is_no_answer(tmp_path: Path) -> None:
    async def main() -> None:
        right, wrong = wrong_run()
        async with serving(tmp_path, right.issue("registry")) as server:
            true = right.issue("worker", 0)
            false = wrong.issue("worker", 0)
            mixed = Identity(false.bearer, true.run_certificate, false.certificate, false.key)
            for identity in (false, mixed):
                async with EmbeddedRegistry(server.address, identity, timeout_s=1.0) as registry:
                    with pytest.raises(RegistryError, match="cannot be reached"):
                        await registry.get(VIEW)
            async with EmbeddedRegistry(server.address, INSECURE, timeout_s=1.0) as registry:
                with pytest.raises(RegistryError, match="cannot be reached"):
                    await registry.get(VIEW)
            async with EmbeddedRegistry(server.address, true) as registry:
                assert await registry.get(VIEW) is None

    asyncio.run(main())


def test_a_server_with_another_certificate_is_no_registry(tmp_path: Path) -> None:
    async def main() -> None:
        authority = Authority.new()
        async with serving(tmp_path, authority.issue("worker", 0)) as server:
            identity = authority.issue("worker", 1)
            async with EmbeddedRegistry(server.address, identity, timeout_s=1.0) as registry:
                with pytest.raises(RegistryError, match="cannot be reached"):
                    await registry.get(VIEW)
            async with EmbeddedRegistry(server.address, identity, role="worker") as registry:
                assert await registry.get(VIEW) is None

    asyncio.run(main())


GARBAGE = [
    b"",
    b"\x80\x04garbage",
    b"[]",
    b"{}",
    b'{"key": "view", "more": 1}',
    b'{"key": 1}',
    b'{"key": "../view"}',
    b'{"key": "view", "value": "x", "version": -1}',
    b'{"key": "view", "value": "", "version": 1e9}',
    b'{"key": "view", "value": "", "version": "0"}',
    b'{"key": "view", "value": "", "version": 9223372036854775808}',
    b'{"key": "workers/0", "value": "", "ttl_s": NaN, "number": 1, "if_absent": false}',
    b'{"key": "workers/0", "value": "", "ttl_s": 0, "number": 1, "if_absent": false}',
    b'{"prefix": "", "since": -1}',
    b'{"prefix": "\\u0000", "since": 0}',
    b"[" * 100_000,
]


def test_garbage_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            serving(tmp_path, INSECURE) as server,
            grpc.aio.insecure_channel(server.address) as channel,
            EmbeddedRegistry(server.address, INSECURE) as registry,
        ):
            for method in ("Get", "Set", "Grant", "Renew", "Withdraw", "Watch"):
                for data in GARBAGE:
                    fault = await refusal(channel, method, data)
                    assert fault.code() is grpc.StatusCode.INVALID_ARGUMENT, (method, data[:80])
                    assert len(fault.details()) < 400
            for method, code in (("Nothing", "UNIMPLEMENTED"), ("Set", "RESOURCE_EXHAUSTED")):
                assert (await refusal(channel, method, bytes(5 << 20))).code().name == code
            snapshot = await anext(registry.watch(""))
            assert snapshot.entries == {} and snapshot.version == 1

    asyncio.run(main())


async def refusal(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.aio.AioRpcError:
    """How the server refuses what a client of this library never sends."""
    path = f"/{messages.SERVICE}/{method}"
    if method == "Watch":
        answer = channel.unary_stream(path)(data, timeout=10).read()
    else:
        answer = channel.unary_unary(path)(data, timeout=10)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await answer
    return caught.value
