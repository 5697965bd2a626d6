"""Strangers at the ports of a run: thousands of connections, silence, garbage and the certificates of another run.

Nothing of that may change a bit of the model, end a worker, or cost it what is not bounded.
"""

import asyncio
import os
import random
import socket
import ssl
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest

from atoll.link.net import embedded, peers
from atoll.link.net.credentials import channel_credentials
from atoll.link.net.identity import Identity
from atoll.link.net.run_keys import throw_away
from chaos_fleet import Fleet, problems
from chaos_worker import Task

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CONNECTIONS = 10_000
AT_ONCE = 300
"""Connections that strangers hold open at a time, so that the machine keeps ports for others."""
MOST_MORE_KB = 50_000
TASK = Task(workers=2, silent_s=60.0)
ALLOWED = {"worker": peers.MOST_CONNECTIONS, "registry": embedded.CONNECTIONS}
"""Most connections at once."""


def client_hello() -> bytes:
    """How a TLS client begins."""
    out = ssl.MemoryBIO()
    context = ssl.create_default_context()
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out, server_hostname="worker-0").do_handshake()
    return out.read()


def garbage() -> list[bytes]:
    chance = random.Random(3)
    long_record = b"\x16\x03\x01\xff\xff" + chance.randbytes(65_535)  # a TLS record is at most 16 KiB
    long_frame = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01" + bytes(100_000)
    short = [b"", b"\x00", b"GET / HTTP/1.1\r\n\r\n", chance.randbytes(4096), client_hello()[:-1]]
    return [*short, long_record, long_frame]


def connect(address: tuple[str, int]) -> socket.socket | None:
    try:
        return socket.create_connection(address, 10)
    except OSError:  # refused: that is an answer, too
        return None


def flood(address: tuple[str, int], count: int) -> None:
    """Connect many times, some saying nothing and some nonsense, and hold the newest few hundred open."""
    said, held = garbage(), list[socket.socket]()
    for number in range(count):
        if (one := connect(address)) is not None:
            held.append(one)
            with suppress(OSError):
                one.setblocking(False)
                one.send(said[number % len(said)])
        while len(held) > AT_ONCE:
            held.pop(0).close()
    for one in held:
        one.close()


def dawdle(address: tuple[str, int], over: threading.Event) -> None:
    """Shake hands as slowly as can be, with a dozen connections; come again when they are closed."""
    hello = client_hello()
    held: dict[socket.socket, int] = {}
    while not over.wait(0.05):
        if len(held) < 12 and (one := connect(address)) is not None:
            held[one] = 0
        for one, sent in list(held.items()):
            try:
                one.send(hello[sent : sent + 1])
                held[one] = sent + 1
            except OSError:
                del held[one]
                one.close()
    for one in held:
        one.close()


async def knock(address: str, identity: Identity, name: str) -> None:
    """Call with a certificate of another run; no call may get past the handshake."""
    options = [("grpc.ssl_target_name_override", name), ("grpc.enable_retries", 0)]
    for _ in range(20):
        async with grpc.aio.secure_channel(address, channel_credentials(identity), options=options) as channel:
            call = channel.stream_stream("/atoll.Peer/Control")(timeout=30)
            assert await call.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def uses(pid: int) -> tuple[int, int]:
    """The open files and resident kB of a process."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return len(os.listdir(f"/proc/{pid}/fd")), int(status["VmRSS"].split()[0])


def watch(pids: dict[str, int], most: dict[str, list[int]], over: threading.Event) -> None:
    while not over.wait(0.05):
        for name, pid in pids.items():
            most[name] = [max(pair) for pair in zip(most[name], uses(pid), strict=True)]


def trained(fleet: Fleet) -> str:
    """Let the run end, and return the fingerprint of its model."""
    fleet.wait_ended(range(2))
    assert not (found := problems(fleet, range(2))), found
    return str(fleet.events(0, "finished")[0]["model"])


def besiege(fleet: Fleet, addresses: list[str], pids: dict[str, int]) -> dict[str, list[int]]:
    """Let strangers at all addresses while a run trains; return the most that its processes have used."""
    most, over = {name: [0, 0] for name in pids}, threading.Event()
    places = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
    slow = [threading.Thread(target=dawdle, args=(place, over)) for place in places]
    slow.append(threading.Thread(target=watch, args=(pids, most, over)))
    for thread in slow:
        thread.start()
    try:
        for place, share in zip(places, (0.7, 0.3), strict=True):
            flood(place, int(share * CONNECTIONS))
        for address, name in zip(addresses, ("worker-0", "registry"), strict=True):
            known = Identity.load(fleet.folder / "keys" / name)
            stranger = replace(throw_away(2).workers[1], run_certificate=known.run_certificate)
            asyncio.run(knock(address, stranger, known.bearer.host_name))
    finally:
        over.set()
        for thread in slow:
            thread.join()
    return most


def test_strangers_change_nothing_and_cost_little(tmp_path: Path) -> None:
    with Fleet(tmp_path / "besieged", TASK) as fleet:
        for worker in range(2):
            fleet.start(worker)
        fleet.wait_complete()
        assert fleet.registry is not None
        pids = {"worker": fleet.pid(0), "registry": fleet.registry.pid}
        before = {name: uses(pid) for name, pid in pids.items()}
        began = time.monotonic()
        most = besiege(fleet, [fleet.events(0, "joined")[0]["address"], fleet.task.registry], pids)
        fleet.wait_applied(range(2), time.monotonic(), 4)
        print(f"{CONNECTIONS} connections in {time.monotonic() - began:.0f} s")
        for name, pid in pids.items():
            fleet.wait_for("closed connections", lambda: uses(pid)[0] <= before[name][0] + 5)  # noqa: B023 - waits here
            print(f"{name}: files and kB {before[name]}, at most {most[name]}, then {uses(pid)}")
            assert most[name][0] < ALLOWED[name] + before[name][0]
            assert most[name][1] < before[name][1] + MOST_MORE_KB
        fleet.end_after(40)
        last, model = fleet.last, trained(fleet)
    assert last is not None
    with Fleet(tmp_path / "undisturbed", TASK) as fleet:
        fleet.end_at(last)
        for worker in range(2):
            fleet.start(worker)
        assert trained(fleet) == model
