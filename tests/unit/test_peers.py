"""Sessions between processes of a run: real servers on loopback, with throw-away keys."""

import asyncio
import os
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Self

import pytest

from atoll.link.net.registry import INSECURE
from atoll.link.net.run_keys import KeyRing, throw_away
from atoll.link.net.views import Process
from peer_ends import End, Log, both, ends, has, has_exchanged, is_measured, run, until
from registries import Child, free_ports

pytestmark = pytest.mark.processes  # waits for connections more than it computes


@pytest.fixture(scope="module")
def keys() -> KeyRing:
    return throw_away(4, "x-1a2b3c4d")


@pytest.mark.parametrize("connections", [1, 3])
@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("listen", ["127.0.0.1:0", "[::1]:0"])
def test_messages_arrive_whole_and_in_order(keys: KeyRing, listen: str, secure: bool, connections: int) -> None:
    async def main() -> None:
        made = [End(n, keys.workers[n] if secure else INSECURE, connections=connections) for n in (0, 1)]
        async with ends(*made, listen=listen) as (zero, one):
            zero.meet(one)
            one.meet(zero, dial=False)
            await until(both(zero, one))
            bodies = [os.urandom(size) for size in (0, 1, 5 << 20, (1 << 20) + 1, 1 << 20, 17)]
            for n, body in enumerate(bodies):
                for here, there in ((zero, one), (one, zero)):
                    here.peers.send(there.me, b"before %d" % n)
                    here.peers.send_bulk(there.me, b"header %d" % n, body)
            for here, there in ((zero, one), (one, zero)):
                log = here.log
                await until(partial(has, log, bulk=len(bodies), control=len(bodies)))
                expected = [(there.me, b"header %d" % n, body) for n, body in enumerate(bodies)]
                got = log.of("bulk")
                assert got == expected or (connections > 1 and sorted(got) == sorted(expected))
                assert log.of("control") == [(there.me, b"before %d" % n) for n in range(len(bodies))]
                assert log.of("connected") == [(there.me, b"from %d" % there.me.seat)]
                await until(partial(has_exchanged, here, there, sum(map(len, bodies))))
                await until(partial(is_measured, here, there))
            assert not zero.log.of("lost") and not one.log.of("lost")

    run(main())


def test_bytes_are_counted_over_sessions(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            for turn in (1, 2):
                zero.meet(one)
                one.meet(zero, dial=False)
                await until(both(zero, one))
                zero.peers.send_bulk(one.me, b"", bytes(1000))
                await until(partial(has, one.log, bulk=turn))
                assert (zero.peers.lines()[1].sent, zero.peers.lines()[1].received) == (1000 * turn, 0)
                zero.peers.drop(one.me)
                await until(partial(has, one.log, lost=turn))
                assert (one.peers.lines()[0].sent, one.peers.lines()[0].received) == (0, 1000 * turn)
                assert one.peers.lines()[0].bytes_per_s is None

    run(main())


def test_dials_that_cross_make_one_session(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n], n + 1, connections=2) for n in (0, 1))) as (zero, one):
            for turn in range(40):
                zero.meet(one)
                if turn % 4:
                    await asyncio.sleep(0.001 * turn)
                one.meet(zero)
                await until(both(zero, one))
                await asyncio.sleep(0.05)
                assert both(zero, one)()
                for here in (zero, one):
                    assert [event[0] for event in here.log.events] == ["connected"], turn
                    here.log.events.clear()
                zero.peers.drop(one.me)
                await until(lambda: one.log.of("lost"))
                assert one.log.of("lost") == [(zero.me, "closed its connection")]
                assert not zero.log.events
                one.log.events.clear()

    run(main())


def test_all_of_several_meet(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in range(4))) as made:
            for here in made:
                for there in made:
                    if here is not there:
                        here.meet(there, dial=here.me < there.me)
            pairs = [(here, there) for here in made for there in made if here is not there]
            await until(lambda: all(here.peers.is_connected(there.me) for here, there in pairs))
            for here, there in pairs:
                here.peers.send(there.me, b"%d" % here.me.seat)
            await until(lambda: all(len(here.log.of("control")) == 3 for here in made))
            assert all(data == b"%d" % peer.seat for here in made for peer, data in here.log.of("control"))

    run(main())


@pytest.mark.parametrize("dead", [0, 1])
def test_one_end_that_can_be_reached_is_enough(keys: KeyRing, dead: int) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as both_ends:
            blind, other = both_ends[dead], both_ends[1 - dead]
            with socket.socket() as silent:  # accepts nothing, refuses nothing
                silent.bind(("127.0.0.1", 0))
                silent.listen(0)
                blind.peers.meet(other.me, [f"127.0.0.1:{silent.getsockname()[1]}"], dial=True)
                other.meet(blind)
                await until(both(blind, other), 5.0)

    run(main())


def test_the_next_address_is_tried(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            (port,) = free_ports(1)
            zero.peers.meet(one.me, [f"127.0.0.1:{port}", one.address], dial=True)
            one.peers.meet(zero.me, [], dial=False)
            await until(both(zero, one), 5.0)

    run(main())


def test_without_a_dial_of_the_other_end_this_one_dials_too(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            zero.meet(one, dial=False)
            one.peers.meet(zero.me, [], dial=False)
            began_s = time.monotonic()
            await until(both(zero, one), 5.0)
            assert time.monotonic() - began_s > 0.9

    run(main())


# ---------------------------------------------------------------------- ends


def test_who_closes_says_why_after_all_that_was_queued(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            zero.meet(one)
            one.meet(zero)
            await until(both(zero, one))
            for n in range(30):
                one.peers.send(zero.me, b"%d" % n)
                one.peers.send_bulk(zero.me, b"%d" % n, bytes(1_000_000))
            await one.peers.close("has finished\nits steps \x1b[1m")
            assert [event[0] for event in one.log.events] == ["connected"]
            await until(lambda: zero.log.of("lost"))
            assert zero.log.of("lost") == [(one.me, "has finished its steps \\x1b[1m")]
            assert zero.log.events[-1][0] == "lost"
            assert has(zero.log, control=30, bulk=30)

    run(main())


@pytest.mark.parametrize("who", [0, 1])
def test_a_dropped_peer_is_told_why_and_nobody_reconnects(keys: KeyRing, who: int) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as made:
            here, there = made[who], made[1 - who]
            here.meet(there)
            there.meet(here)
            await until(both(here, there))
            sending = here.peers.send_bulk(there.me, b"", bytes(100 << 20))
            here.peers.drop(there.me, "has a newer view")
            assert not here.peers.is_connected(there.me)
            here.peers.send(there.me, b"ignored")
            later = here.peers.send_bulk(there.me, b"", b"ignored")
            with pytest.raises(asyncio.CancelledError):
                await sending.done
            assert later.done.cancelled()
            await until(lambda: there.log.of("lost"))
            assert there.log.of("lost") == [(here.me, "has a newer view")]
            await asyncio.sleep(1.3)
            assert not here.peers.is_connected(there.me) and not there.peers.is_connected(here.me)
            assert not here.log.of("lost") and not there.log.of("control")
            here.meet(there)
            await asyncio.sleep(0.3)
            assert not here.peers.is_connected(there.me)
            there.meet(here)
            await until(both(here, there))

    run(main())


def test_no_longer_wanted_is_no_longer_dialled(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            zero.meet(one)
            await asyncio.sleep(0.2)
            zero.peers.drop(one.me)
            one.peers.meet(zero.me, [], dial=False)
            await asyncio.sleep(0.5)
            assert not zero.log.events and not one.log.events

    run(main())


def test_a_dial_is_not_begun_anew_when_it_is_asked_for_again(keys: KeyRing) -> None:
    """The other end may have taken the first just now, and would take its end for a loss."""

    async def main() -> None:
        dials: list[asyncio.StreamWriter] = []
        deaf = await asyncio.start_server(lambda _, writer: dials.append(writer), "127.0.0.1", 0)
        address = f"127.0.0.1:{deaf.sockets[0].getsockname()[1]}"
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            zero.peers.meet(one.me, [address], dial=True)
            await until(lambda: dials)
            for _ in range(5):
                zero.peers.meet(one.me, [address], dial=True)
                await asyncio.sleep(0.1)
            assert len(dials) == 1
            zero.peers.meet(one.me, [one.address], dial=True)
            one.peers.meet(zero.me, [], dial=False)
            await until(both(zero, one))
            for writer in dials:
                writer.close()
            deaf.close()

    run(main())


def test_a_busy_process_does_not_lose_its_peers(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n], silent_s=0.3) for n in (0, 1))) as (zero, one):
            zero.meet(one)
            one.meet(zero)
            await until(both(zero, one))
            for busy_s in (1.0, 0.5, 0.35):
                time.sleep(busy_s)
                await asyncio.sleep(0.2)
            await asyncio.sleep(0.5)
            assert not zero.log.of("lost") and not one.log.of("lost")

    run(main())


def test_a_handler_that_fails_ends_that_session_only(keys: KeyRing, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        class Failing(Log):
            def control(self, peer: Process, data: bytes) -> None:
                raise KeyError(data)

        made = [End(n, keys.workers[n]) for n in (0, 1, 2)]
        made[0].peers._handler = made[0].log = log = Failing()
        async with ends(*made) as (zero, one, two):
            for other in (one, two):
                zero.meet(other)
                other.meet(zero)
                await until(both(zero, other))
            one.peers.send(zero.me, b"unknown")
            await until(lambda: one.log.of("lost"))
            ((peer, why),) = log.of("lost")
            assert peer == one.me and "KeyError" in why and "cannot handle" in caplog.text
            assert zero.peers.is_connected(two.me)

    run(main())


# ---------------------------------------------------------------------- processes


STARTING_S = 80.0  # imports take long where many tests run


class Other:
    """A peer in a process of its own."""

    def __init__(self, folder: Path, address: str, silent_s: float) -> None:
        script = Path(__file__).parent.parent / "peer_process.py"
        command = [sys.executable, str(script), str(folder), "1", "0", address, str(silent_s)]
        self.child = Child(command, folder / "child.log")

    async def said(self, what: str) -> str:
        await until(lambda: what in self.child.said() or self.child.process.poll() is not None, STARTING_S)
        (line, *_) = [line for line in self.child.said().splitlines() if line.startswith(what)]
        return line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.child.end()


async def connect(zero: End, other: Other, *, dial: bool) -> Process:
    address = (await other.said("listens")).split()[1]
    zero.peers.meet(Process(1, 1), [address] if dial else [], dial=dial)
    await until(lambda: zero.peers.is_connected(Process(1, 1)))
    zero.peers.send(Process(1, 1), b"are you there?")
    await until(lambda: zero.log.of("control"))
    return Process(1, 1)


@pytest.mark.processes
@pytest.mark.parametrize("dial", [True, False])
def test_a_killed_process_is_lost_at_once(keys: KeyRing, tmp_path: Path, dial: bool) -> None:
    async def main() -> None:
        keys.save(tmp_path)
        async with ends(End(0, keys.workers[0])) as (zero,):
            with Other(tmp_path, "-" if dial else zero.address, 5.0) as other:
                peer = await connect(zero, other, dial=dial)
                sending = zero.peers.send_bulk(peer, b"", bytes(500 << 20))
                await asyncio.sleep(0.1)
                other.child.kill()
                killed_s = time.monotonic()
                await until(lambda: zero.log.of("lost"))
                assert time.monotonic() - killed_s < 1.0  # much less than the silence
                assert zero.log.of("lost") == [(peer, "closed its connection")]
                assert sending.done.cancelled()

    run(main())


@pytest.mark.processes
@pytest.mark.parametrize("dial", [True, False])
def test_a_stopped_process_is_lost_after_the_silence(keys: KeyRing, tmp_path: Path, dial: bool) -> None:
    async def main() -> None:
        keys.save(tmp_path)
        async with ends(End(0, keys.workers[0], silent_s=1.0)) as (zero,):
            with Other(tmp_path, "-" if dial else zero.address, 1.0) as other:
                peer = await connect(zero, other, dial=dial)
                await asyncio.sleep(0.5)
                other.child.kill(signal.SIGSTOP)
                stopped_s = time.monotonic()
                zero.peers.send_bulk(peer, b"", bytes(100 << 20))
                await until(lambda: zero.log.of("lost"))
                assert 0.7 < time.monotonic() - stopped_s < 1.7
                assert zero.log.of("lost") == [(peer, "was silent for 1 s: stopped, or cut off")]
                other.child.kill(signal.SIGCONT)
                line = await other.said("lost")
                assert line == "lost 0 heard nothing from worker 1 for 1 s"

    run(main())
