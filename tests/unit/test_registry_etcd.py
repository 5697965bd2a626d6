"""A registry in etcd: members killed and stopped, TLS and users, compaction, and replies that are none."""

import asyncio
import base64
import json
import signal
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from atoll.errors import ConfigError, RegistryError
from atoll.link.net.etcd import EtcdRegistry
from atoll.link.net.etcd_gateway import EtcdOptions
from atoll.link.net.identity import CERTIFICATE_PEM, KEY_PEM, RUN_PEM, Authority
from atoll.link.net.registry import INSECURE, VIEW, WORKERS, Entry, Update, presence_key
from registries import Etcd

PATIENCE_S = 60.0


def ask(etcd: Etcd, path: str, body: dict[str, object]) -> dict[str, object]:
    """Call a member of the cluster without the library."""
    url = f"http://127.0.0.1:{etcd.ports[0]}/v3/{path}"
    with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=10) as answer:
        return dict(json.load(answer))


@pytest.mark.processes
@pytest.mark.parametrize("how", ["killed", pytest.param("stopped", marks=pytest.mark.thorough)])
def test_three_members_survive_the_loss_of_any(tmp_path: Path, how: str) -> None:
    """A counter and its watcher go on while each member in turn is away; a presence stays."""

    async def count_up(registry: EtcdRegistry, enough: asyncio.Event) -> Entry:
        entry = None
        while not enough.is_set() or entry is None:
            value, version = (int(entry.value), entry.version) if entry else (0, 0)
            try:
                outcome = await registry.compare_and_set(VIEW, b"%d" % (value + 1), version)
                assert outcome.accepted and outcome.entry is not None
                entry = outcome.entry
            except RegistryError:
                entry = await registry.get(VIEW)
                found = int(entry.value) if entry else 0
                assert found in (value, value + 1) and (entry is None or entry.version >= version)
            await asyncio.sleep(0.01)
        return entry

    async def follow(registry: EtcdRegistry, seen: list[Update]) -> None:
        async for update in registry.watch(VIEW):
            seen.append(update)

    async def main(etcd: Etcd) -> None:
        options = EtcdOptions.read(f"{etcd.url}/run", INSECURE, timeout_s=10.0)
        turned = EtcdOptions(options.endpoints[1:] + options.endpoints[:1], INSECURE, "run", timeout_s=10.0)
        seen, enough = list[Update](), asyncio.Event()
        async with EtcdRegistry(options) as writer, EtcdRegistry(turned) as reader, asyncio.timeout(4 * PATIENCE_S):
            presence = await reader.announce(presence_key(0), b"here", 30.0)
            before = await reader.get(presence_key(0))
            counting = asyncio.create_task(count_up(writer, enough))
            following = asyncio.create_task(follow(reader, seen))
            for number in range(3):
                await asyncio.sleep(0.5)
                told = len(seen)
                if how == "killed":
                    await asyncio.to_thread(etcd.kill, number)
                else:
                    etcd.signal(number, signal.SIGSTOP)
                while len(seen) < told + 20:  # it goes on without that member
                    assert not counting.done() and not following.done()
                    await asyncio.sleep(0.05)
                if how == "killed":
                    etcd.start(number)
                else:
                    etcd.signal(number, signal.SIGCONT)
                await asyncio.to_thread(etcd.wait, number)
            enough.set()
            last = await counting
            while seen[-1].version < last.version:
                await asyncio.sleep(0.05)
            following.cancel()
            values = [int(update.entries[VIEW].value) for update in seen if update.entries.get(VIEW)]  # type: ignore[union-attr]
            assert values == list(range(values[0], int(last.value) + 1)) and values[0] <= 2
            assert not any(update.is_snapshot for update in seen[1:])
            assert await reader.get(presence_key(0)) == before
            await presence.close()

    with Etcd(tmp_path, 3) as etcd:
        asyncio.run(main(etcd))


@pytest.mark.processes
def test_after_a_compaction_a_watcher_gets_a_snapshot(tmp_path: Path) -> None:
    async def main(etcd: Etcd) -> None:
        async with EtcdRegistry(EtcdOptions.read(f"{etcd.url}/run", INSECURE)) as registry:
            versions = [0]
            for number in range(10):
                outcome = await registry.compare_and_set(VIEW, b"%d" % number, versions[-1])
                assert outcome.entry is not None
                versions.append(outcome.entry.version)
            ask(etcd, "kv/compaction", {"revision": str(versions[8])})
            watch = registry.watch(VIEW, since=versions[2])
            update = await asyncio.wait_for(anext(watch), PATIENCE_S)
            assert update.is_snapshot and update.entries == {VIEW: Entry(b"9", versions[10])}
            await watch.aclose()
            watch = registry.watch(VIEW, since=versions[8])
            update = await asyncio.wait_for(anext(watch), PATIENCE_S)
            assert not update.is_snapshot and update.version == versions[9]
            await watch.aclose()

    with Etcd(tmp_path) as etcd:
        asyncio.run(main(etcd))


@pytest.mark.processes
def test_thousands_of_large_changes_are_told_in_order(tmp_path: Path) -> None:
    """etcd tells a late watcher of many revisions at a time, in fragments."""
    etcd_number, size = 1200, 3000

    async def main(etcd: Etcd) -> None:
        async with EtcdRegistry(EtcdOptions.read(f"{etcd.url}/run", INSECURE)) as registry:
            first = await registry.compare_and_set(VIEW, b"first", 0)
            assert first.entry is not None
            key = base64.b64encode(b"/atoll/run/view").decode()
            for number in range(etcd_number):
                value = base64.b64encode((b"%d " % number).ljust(size)).decode()
                await asyncio.to_thread(ask, etcd, "kv/put", {"key": key, "value": value})
            watch = registry.watch(VIEW, since=first.entry.version)
            numbers = list[int]()
            async with asyncio.timeout(PATIENCE_S):
                while len(numbers) < etcd_number:
                    entry = (await anext(watch)).entries[VIEW]
                    assert entry is not None
                    numbers.append(int(entry.value))
            assert numbers == list(range(etcd_number))
            await watch.aclose()

    with Etcd(tmp_path, more=("--unsafe-no-fsync",)) if _has_no_fsync() else Etcd(tmp_path) as etcd:
        asyncio.run(main(etcd))


def _has_no_fsync() -> bool:
    try:
        said = subprocess.run(["etcd", "--help"], capture_output=True, text=True, check=False)
    except OSError:
        return False
    return "--unsafe-no-fsync" in said.stdout + said.stderr


@contextmanager
def secured(folder: Path, *more: str) -> Iterator[tuple[Etcd, ssl.SSLContext, ssl.SSLContext]]:
    """A cluster with TLS, how a client trusts it, and how a client also proves itself."""
    authority = Authority.new()
    server, client = folder / "server", folder / "client"
    authority.issue("worker", 1).save(server)
    authority.issue("worker", 0).save(client)
    own = (f"--cert-file={server / CERTIFICATE_PEM}", f"--key-file={server / KEY_PEM}")
    contexts = [ssl.create_default_context(cafile=str(server / RUN_PEM)) for _ in range(2)]
    for context in contexts:
        context.check_hostname = False  # the certificate has no address
    contexts[1].load_cert_chain(client / CERTIFICATE_PEM, client / KEY_PEM)
    with Etcd(folder, more=(*own, *more), scheme="https") as etcd:
        yield etcd, contexts[0], contexts[1]


async def is_refused(options: EtcdOptions, why: str | None = None) -> bool:
    async with EtcdRegistry(options) as stranger:
        with pytest.raises(RegistryError, match=why):
            await stranger.get(VIEW)
    return True


@pytest.mark.processes
def test_client_certificates(tmp_path: Path) -> None:
    async def main(etcd: Etcd, trusting: ssl.SSLContext, proving: ssl.SSLContext) -> None:
        url = f"{etcd.url}/run"
        async with EtcdRegistry(EtcdOptions.read(url, proving)) as registry:
            outcome = await registry.compare_and_set(VIEW, b"view", 0)
            watch = registry.watch("")
            assert (await asyncio.wait_for(anext(watch), PATIENCE_S)).entries == {VIEW: outcome.entry}
            await watch.aclose()
        for security in (trusting, ssl.create_default_context(), INSECURE):
            assert await is_refused(EtcdOptions.read(url, security, timeout_s=1.0))

    trusted = f"--trusted-ca-file={tmp_path / 'server' / RUN_PEM}"
    with secured(tmp_path, "--client-cert-auth", trusted) as (etcd, trusting, proving):
        asyncio.run(main(etcd, trusting, proving))


@pytest.mark.processes
def test_tls_and_a_user_with_a_password(tmp_path: Path) -> None:
    async def main(etcd: Etcd, trusting: ssl.SSLContext) -> None:
        url = f"{etcd.url}/run"
        async with EtcdRegistry(EtcdOptions.read(url, trusting)) as first:
            for path, body in _USERS:
                await first._gateway.call(path, dict(body))
        user = {"user": "seats", "password": "correct horse"}
        async with EtcdRegistry(EtcdOptions.read(url, trusting, **user)) as registry:
            assert (await registry.compare_and_set(VIEW, b"view", 0)).accepted
            presence = await registry.announce(presence_key(0), b"here", 30.0)
            watch = registry.watch(WORKERS)
            assert set((await asyncio.wait_for(anext(watch), PATIENCE_S)).entries) == {"workers/0"}
            registry._gateway._token = "stale.1"
            assert await registry.get(presence_key(0)) is not None
            await asyncio.sleep(5.0)  # without calls, the token expires
            await presence.close()
            assert (await asyncio.wait_for(anext(watch), PATIENCE_S)).entries == {"workers/0": None}
            await watch.aclose()
            registry._gateway._token = "stale.2"
            watch = registry.watch("")
            assert set((await asyncio.wait_for(anext(watch), PATIENCE_S)).entries) == {VIEW}
            await watch.aclose()
        assert await is_refused(EtcdOptions.read(url, trusting, user="seats", password="wrong"))
        assert await is_refused(EtcdOptions.read(url, trusting))
        assert await is_refused(EtcdOptions.read(f"{etcd.url}/other", trusting, **user), "permission")

    with secured(tmp_path, "--auth-token-ttl=3") as (etcd, trusting, _):
        asyncio.run(main(etcd, trusting))


def _b64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


_ALLOWED = {"permType": "READWRITE", "key": _b64("/atoll/run/"), "range_end": _b64("/atoll/run0")}
_USERS: list[tuple[str, dict[str, object]]] = [
    ("auth/role/add", {"name": "root"}),
    ("auth/user/add", {"name": "root", "password": "root"}),
    ("auth/user/grant", {"user": "root", "role": "root"}),
    ("auth/role/add", {"name": "run"}),
    ("auth/role/grant", {"name": "run", "perm": _ALLOWED}),
    ("auth/user/add", {"name": "seats", "password": "correct horse"}),
    ("auth/user/grant", {"user": "seats", "role": "run"}),
    ("auth/enable", {}),
]


# ---------------------------------------------------------------------- without etcd


@pytest.mark.parametrize(
    "url",
    [
        *["", "etcd://", "http://h:1/x", "etcd://h/x", "etcd://h:1", "etcd://h:1/", "etcd://h:0/x", "etcd://h:1,/x"],
        *["etcd://h:99999999/x", "etcd://h:1/../x", "etcd://h:1/a b", "etcd://h:1/" + "x" * 101],
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EtcdOptions.read(url, INSECURE)
    assert (caught.value.setting, caught.value.value) == ("registry", url)


def test_a_url_names_members_and_run() -> None:
    options = EtcdOptions.read("etcd://a.example:2379,[fd00::1]:2380/run_1-x", INSECURE, user="u", password="secret")
    assert options.endpoints == (("a.example", 2379), ("fd00::1", 2380)) and options.name == "run_1-x"
    assert "secret" not in repr(options)


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """A server that answers every connection with these bytes; yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(reply)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


def _http(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize(
    "reply",
    [
        *[
            b"",
            b"no HTTP\r\n\r\n",
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{",
            _http(b""),
            _http(b"[]"),
            _http(b"{"),
        ],
        *[_http(b'{"kvs": 1}'), _http(b'{"kvs": [1]}'), _http(b'{"kvs": [{"value": "!"}]}'), _http(b"[" * 100_000)],
        *[_http(b'{"kvs": [{"mod_revision": "x"}]}'), _http(b'{"error": []}')],
    ],
)
def test_a_reply_that_is_none_of_etcds_is_an_error(reply: bytes) -> None:
    async def main() -> None:
        with answering(reply) as port:
            options = EtcdOptions((("127.0.0.1", port),), INSECURE, "run", timeout_s=0.3)
            async with EtcdRegistry(options) as registry:
                with pytest.raises(RegistryError):
                    await registry.get(VIEW)

    asyncio.run(main())


def test_nobody_there_is_an_error_that_is_certain() -> None:
    async def main() -> None:
        options = EtcdOptions((("127.0.0.1", 9), ("127.0.0.1", 10)), INSECURE, "run", timeout_s=0.5)
        async with EtcdRegistry(options) as registry:
            with pytest.raises(RegistryError) as caught:
                await registry.compare_and_set(VIEW, b"", 0)
            assert not caught.value.uncertain

    asyncio.run(main())


def test_a_change_whose_reply_was_lost_is_uncertain_and_not_sent_again() -> None:
    async def main() -> None:
        with answering(b"") as port, answering(_http(b'{"succeeded": true, "header": {"revision": "5"}}')) as other:
            options = EtcdOptions((("127.0.0.1", port), ("127.0.0.1", other)), INSECURE, "run", timeout_s=5.0)
            async with EtcdRegistry(options) as registry:
                with pytest.raises(RegistryError) as caught:
                    await registry.compare_and_set(VIEW, b"", 0)
                assert caught.value.uncertain
                assert (await registry.compare_and_set(VIEW, b"", 0)).accepted  # the other's turn

    asyncio.run(main())
