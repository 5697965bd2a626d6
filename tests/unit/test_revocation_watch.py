"""Lists of revoked certificates that appear while a run is under way."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from atoll.errors import ConfigError, LinkError, RegistryError
from atoll.link.base import STEPS_MADE
from atoll.link.net import revocation_watch
from atoll.link.net.credentials import Gate
from atoll.link.net.elastic_link import ElasticLink, ElasticOptions, elastic
from atoll.link.net.embedded import RegistryServer
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.event_loop import event_loop
from atoll.link.net.identity import Bearer, Identity
from atoll.link.net.registry import VIEW, Update, presence_key
from atoll.link.net.revocation_watch import list_of, watch_revocations
from atoll.link.net.revocations import REVOKED, Revocations
from atoll.link.net.run_keys import RunKeys
from peer_ends import End, both, ends, run, until

pytestmark = pytest.mark.processes  # waits for connections more than it computes


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revocation_watch, "LOOK_S", 0.05)


@pytest.fixture
def keys(tmp_path: Path) -> RunKeys:
    return RunKeys.new(tmp_path, 3)


def bundle(keys: RunKeys, name: str) -> Identity:
    return Identity.load(keys.folder / name)


def worker(keys: RunKeys, seat: int) -> Bearer:
    return Bearer(bundle(keys, f"worker-{seat}").bearer.run, "worker", seat)


async def meet(here: End, there: End, dials: int) -> None:
    """Let one of two ends dial, and never the other."""
    dialling, other = (here, there) if dials == 0 else (there, here)
    other.peers.meet(dialling.me, [], dial=False)
    dialling.meet(other)
    await until(both(here, there))


@pytest.mark.parametrize("dials", [0, 1])
def test_a_session_ends_when_its_peer_is_revoked_and_the_others_stay(keys: RunKeys, dials: int) -> None:
    async def main() -> None:
        made = [End(seat, bundle(keys, f"worker-{seat}")) for seat in range(3)]
        async with ends(*made) as (zero, one, two):
            for here, there in ((zero, one), (zero, two), (one, two)):
                await meet(here, there, dials)
            keys.revoke(worker(keys, 1))
            await until(lambda: zero.log.of("lost") and two.log.of("lost") and len(one.log.of("lost")) == 2)
            lost = [(one.me, "has a certificate that is revoked")]
            assert zero.log.of("lost") == two.log.of("lost") == lost
            told = [why for _, why in one.log.of("lost")]
            assert all(why.startswith("refuses this worker: its certificate is revoked; for a new one") for why in told)
            assert both(zero, two)()
            renewed = End(1, Identity.load(keys.issue(worker(keys, 1))), life=2)
            renewed.address = await renewed.peers.start("127.0.0.1:0")
            await meet(zero, renewed, dials)
            await asyncio.sleep(0.3)
            assert both(zero, renewed)()
            await renewed.peers.close()

    run(main())


def test_a_list_that_comes_during_a_handshake_counts(keys: RunKeys) -> None:
    async def main() -> None:
        zero, one = (End(seat, bundle(keys, f"worker-{seat}")) for seat in range(2))
        own = zero.peers._own
        assert own.least_generation(one.me) == 0
        keys.revoke(worker(keys, 1))
        assert zero.peers.gate is not None
        zero.peers.gate.update(list_of(bundle(keys, "worker-0")))
        assert own.least_generation(one.me) == 1
        async with ends(zero, one):
            one.peers.meet(zero.me, [], dial=False)
            zero.meet(one)
            await until(lambda: "revoked" in (zero.peers.problem(one.me) or ""))

    run(main())


def test_a_bad_or_shorter_list_changes_nothing(keys: RunKeys, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        identity = bundle(keys, "worker-0")
        path, taken = keys.folder / "worker-0" / REVOKED, list[Revocations]()
        gate = Gate(identity.bearer.run, list_of(identity))
        watching = asyncio.create_task(watch_revocations(identity, gate, lambda: taken.append(gate.revocations)))
        once = keys.revoke(worker(keys, 1))
        await until(lambda: len(taken) == 1)
        twice = keys.revoke(worker(keys, 2))
        await until(lambda: len(taken) == 2)
        path.write_bytes(once.content)
        await asyncio.sleep(0.3)
        path.write_bytes(b"nonsense")
        await until(lambda: "the list that was read before counts" in caplog.text)
        path.unlink()
        await asyncio.sleep(0.3)
        assert gate.revocations == twice == taken[-1] and len(taken) == 2
        watching.cancel()

    run(main())


def test_the_registry_ends_what_a_revoked_seat_has_and_serves_a_renewed_one(keys: RunKeys, tmp_path: Path) -> None:
    async def main() -> None:
        server = await RegistryServer.start(tmp_path / "registry", "127.0.0.1:0", bundle(keys, "registry"))
        stolen = EmbeddedRegistry(server.address, bundle(keys, "worker-1"), timeout_s=5.0)
        other = EmbeddedRegistry(server.address, bundle(keys, "worker-0"), timeout_s=5.0)
        watched, kept = stolen.watch(""), other.watch("")
        await anext(watched)
        await anext(kept)
        presence = await stolen.announce(presence_key(1), b"", 0.5)
        keys.revoke(worker(keys, 1))
        with pytest.raises(RegistryError, match="is revoked"):
            await asyncio.wait_for(_to_its_end(watched), 20)
        with pytest.raises(RegistryError, match="is revoked"):
            await stolen.compare_and_set(VIEW, b"mine", 0)
        renewed = EmbeddedRegistry(server.address, Identity.load(keys.issue(worker(keys, 1))), timeout_s=5.0)
        assert (await renewed.compare_and_set(VIEW, b"view", 0)).accepted
        async with asyncio.timeout(20):
            while VIEW not in (update := await anext(kept)).entries:
                pass
        assert update.entries[VIEW] is not None
        for closing in (watched, kept):
            await closing.aclose()
        await presence.close()
        for client in (stolen, other, renewed):
            await client.close()
        await server.close()

    run(main())


async def _to_its_end(updates: AsyncIterator[Update]) -> None:
    async for _ in updates:
        pass


def test_a_stolen_registry_is_not_trusted(keys: RunKeys, tmp_path: Path) -> None:
    async def reads(identity: Identity) -> bool:
        """Serve with an identity, and let a worker read."""
        server = await RegistryServer.start(tmp_path / "registry", "127.0.0.1:0", identity)
        try:
            async with EmbeddedRegistry(server.address, bundle(keys, "worker-0"), timeout_s=2.0) as client:
                return await client.get(VIEW) is None
        except RegistryError:
            return False
        finally:
            await server.close()

    async def main() -> None:
        thief = bundle(keys, "registry")
        assert await reads(thief)
        keys.revoke(thief.bearer)
        assert not await reads(thief)
        assert await reads(Identity.load(keys.issue(thief.bearer)))

    run(main())


def test_the_others_train_on_without_a_revoked_worker(keys: RunKeys, tmp_path: Path) -> None:
    server = event_loop().run(RegistryServer.start(tmp_path / "registry", "127.0.0.1:0", bundle(keys, "registry")))
    links = [
        ElasticLink(
            seat,
            3,
            ElasticOptions(
                registry=server.address, security=bundle(keys, f"worker-{seat}"), listen="127.0.0.1:0", join_s=20.0
            ),
        )
        for seat in range(3)
    ]
    joining = [threading.Thread(target=partial(link.join, {}, 1.0, {STEPS_MADE: "0"})) for link in links]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join(30)
    keys.revoke(worker(keys, 1))

    def seats(link: ElasticLink) -> list[int]:
        assert link._member is not None
        return sorted(link._member.protocol.view.lives)

    wait(lambda: seats(links[0]) == seats(links[2]) == [0, 2])
    wait(lambda: links[1]._member is not None and links[1]._member.error is not None)
    with pytest.raises(LinkError, match="refuses this worker: its certificate is revoked; for a new one"):
        links[1].check()
    with pytest.raises(ConfigError, match="is revoked"):
        elastic(server.address, worker=1, workers=3, keys=keys.folder / "worker-1")
    for link in links:
        link.close("the test has ended")
    event_loop().run(server.close())


def wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)
