"""Bulk messages: cut, dealt to connections, paced in the background, and put together again."""

import asyncio
import os
import random
import sys
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from atoll.link.net import peers, session
from atoll.link.net.frames import BODY_BYTES, UNFINISHED, Arrived, Assembly, pack_frame
from atoll.link.net.outbox import Foreground, Outbox, Sending, _Bursts, _Meter
from atoll.link.net.run_keys import KeyRing, throw_away
from peer_ends import End, both, ends, run, until


def within(work: Coroutine[Any, Any, Any], seconds: float = 20.0) -> Any:
    async def bounded() -> Any:
        async with asyncio.timeout(seconds):
            return await work

    return asyncio.run(bounded())


@pytest.fixture(scope="module")
def keys() -> KeyRing:
    return throw_away(2, "x-1a2b3c4d")


@pytest.mark.parametrize("seed", range(20))
def test_frames_may_come_in_any_order(seed: int) -> None:
    draw = random.Random(seed)
    bodies = [draw.randbytes(draw.choice((0, 1, 10, 1000))) for _ in range(20)]
    frames = []
    for number, body in enumerate(bodies):
        cuts = sorted({0, *(draw.randrange(len(body)) for _ in range(5 if body else 0))})
        for begin, end in zip(cuts, [*cuts[1:], len(body)], strict=True):
            header = b"header %d" % number if begin == 0 else b""
            frames.append(pack_frame(2 * number, begin, len(body), header, memoryview(body)[begin:end]))
    draw.shuffle(frames)
    assembly = Assembly()
    arrived = [one for one in map(assembly.take, frames) if one is not None]
    assert sorted(arrived) == sorted(Arrived(b"header %d" % n, bytearray(body)) for n, body in enumerate(bodies))
    assert assembly.ack() == (sum(map(len, bodies)), len(bodies), 0)


def test_memory_grows_by_what_has_come_and_not_by_what_is_claimed() -> None:
    assembly = Assembly()
    for number in range(UNFINISHED):
        assert assembly.take(pack_frame(2 * number, 0, BODY_BYTES, b"", memoryview(b"a"))) is None
    bodies = [one.body for one in assembly._lanes[0].unfinished.values()]
    assert sum(map(sys.getsizeof, bodies)) < 100 * UNFINISHED


class Line:
    """The other end of an outbox: takes frames at a rate and acknowledges them."""

    def __init__(self, outbox: Outbox, bytes_per_s: float) -> None:
        self.outbox, self._bytes_per_s = outbox, bytes_per_s
        self.assembly = Assembly()
        self.order: list[bytes] = []
        self.times: list[tuple[float, int]] = []

    async def carry(self) -> None:
        while True:
            sending, frame = await self.outbox.take()
            self.times.append((time.monotonic(), len(frame)))
            await asyncio.sleep(len(frame) / self._bytes_per_s)
            self.outbox.written(sending)
            if (arrived := self.assembly.take(frame)) is not None:
                self.order.append(arrived.header)
            self.outbox.acknowledge(self.assembly.ack(), 0.0)


async def carried(line: Line, *sent: Sending) -> None:
    carrying = asyncio.create_task(line.carry())
    try:
        await asyncio.gather(*(one.done for one in sent))
        await until(lambda: line.outbox.is_empty)
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)


@pytest.mark.processes
def test_background_messages_yield_and_take_their_share() -> None:
    async def main() -> None:
        foreground = Foreground(1)  # to another peer
        line = Line(Outbox(foreground), 50e6)
        box = line.outbox
        await carried(line, box.add(b"first", memoryview(bytes(10 << 20)), background=False))
        assert box.rate is not None and 15e6 < box.rate < 60e6
        line.times.clear()
        began_s = time.monotonic()
        slow = box.add(b"slow", memoryview(bytes(8 << 20)), background=True)
        carrying = asyncio.create_task(carried(line, slow))
        await asyncio.sleep(0.1)
        fast = [box.add(b"fast %d" % n, memoryview(bytes(1 << 20)), background=False) for n in range(2)]
        await asyncio.gather(*(one.done for one in fast))
        assert not slow.done.done()
        await carrying
        assert line.order == [b"first", b"fast 0", b"fast 1", b"slow"]
        took_s = time.monotonic() - began_s
        assert took_s > 0.8 * (8 << 20) / (0.4 * 60e6)
        assert max(size for _, size in line.times if size < 1 << 20) < (1 << 18) + 100
        assert box.rate > 10e6  # what was paced is no measurement
        assert foreground.messages == 1

    within(main())


def test_background_messages_take_more_while_nothing_else_is_sent_to_anybody() -> None:
    async def main() -> None:
        foreground = Foreground()
        one, two = Outbox(foreground), Outbox(foreground)
        assert foreground.share == 1.0
        sent = [two.add(b"", memoryview(b"body"), background=False) for _ in range(3)]
        two.add(b"", memoryview(b"body"), background=True)
        one.add(b"", memoryview(b"body"), background=True)
        assert foreground.messages == 3 and foreground.share == 0.4
        assembly = Assembly()
        for _ in sent[1:]:
            sending, frame = await two.take()
            two.written(sending)
            assembly.take(frame)
        two.acknowledge(assembly.ack(), 0.0)
        assert foreground.messages == 1
        two.close()  # its peer is lost
        assert two.add(b"", memoryview(b"body"), background=False).done.cancelled()
        assert foreground.messages == 0 and foreground.share == 1.0

    within(main())


@pytest.mark.processes
def test_background_messages_use_most_of_an_idle_line() -> None:
    async def main() -> None:
        line = Line(Outbox(Foreground()), 50e6)
        box = line.outbox
        await carried(line, box.add(b"first", memoryview(bytes(10 << 20)), background=False))
        assert box.rate is not None
        began_s = time.monotonic()
        await carried(line, box.add(b"state", memoryview(bytes(16 << 20)), background=True))
        assert (16 << 20) / box.rate < time.monotonic() - began_s < 2.5 * (16 << 20) / box.rate

    within(main())


def test_only_time_in_which_there_was_something_to_send_is_measured() -> None:
    meter = _Meter()
    meter.send(1_000_000, 100.0)
    meter.ran_dry = True
    meter.send(1_000_000, 105.0)  # a pause before the first was acknowledged
    meter.ack(2_000_000, 106.0, 0.0)
    assert meter.rate is None
    meter.send(1_000_000, 110.0)
    meter.send(3_000_000, 110.1)
    meter.ack(4_000_000, 111.5, 0.5)  # the round trip is no time of sending
    assert meter.rate == pytest.approx(2e6)
    meter.ack(6_000_000, 112.5, 0.5)
    assert meter.rate == pytest.approx(2e6)


def test_a_burst_in_the_background_must_arrive_before_the_next() -> None:
    async def main() -> None:
        outbox, assembly = Outbox(Foreground()), Assembly()
        outbox.add(b"", memoryview(bytes(64 << 20)), background=True)
        sizes = []
        for _ in range(3):
            taken = 0
            while True:
                try:
                    async with asyncio.timeout(0.3):
                        sending, frame = await outbox.take()
                except TimeoutError:
                    break
                outbox.written(sending)
                assembly.take(frame)
                taken += 1
            sizes.append(taken)
            outbox._bursts.began_s = time.monotonic() - 0.01  # what is taken here arrives at once
            outbox.acknowledge(assembly.ack(), 0.0)
        assert sizes == [4, 8, 16]

    within(main())


def test_bursts_follow_the_line() -> None:
    bursts, sent, now_s = _Bursts(), 0, 100.0

    def burst(took_s: float, share: float, round_trip_s: float = 0.0) -> float:
        nonlocal sent, now_s
        while bursts.wait_s(now_s) == 0.0:
            sent += 1 << 18
            bursts.deal(1 << 18, sent, now_s)
        assert bursts.wait_s(now_s) is None
        bursts.ack(sent - 1, now_s + took_s / 2, round_trip_s, share)
        assert bursts.wait_s(now_s + took_s / 2) is None  # its last byte has not arrived
        now_s += took_s
        bursts.ack(sent, now_s, round_trip_s, share)
        pause_s = bursts.wait_s(now_s)
        assert pause_s is not None
        now_s += pause_s + 1e-9
        return pause_s

    assert burst(0.2, 0.5) == pytest.approx(0.2)
    assert burst(0.09, 0.9) == pytest.approx(0.01)
    assert burst(0.12, 0.3) == pytest.approx(0.28)
    assert bursts.size == 1 << 20
    for _ in range(9):
        burst(0.01, 0.9)
    assert bursts.size == 16 << 20
    burst(0.15, 0.9, round_trip_s=0.1)
    burst(0.6, 0.9, round_trip_s=0.1)
    assert bursts.size == 16 << 20  # neither too short nor too long for this latency
    burst(0.9, 0.9, round_trip_s=0.1)
    assert bursts.size == 8 << 20
    assert burst(60.0, 0.9) == 2.0
    for _ in range(9):
        burst(1.0, 0.9)
    assert bursts.size == 1 << 20


def test_a_peer_is_never_sent_more_unfinished_messages_than_it_takes() -> None:
    async def main() -> None:
        outbox, assembly = Outbox(Foreground()), Assembly()
        sent = [outbox.add(b"%d" % n, memoryview(b"body"), background=False) for n in range(3 * UNFINISHED)]
        late, late_frame = await outbox.take()  # on a connection that stalls
        for _ in range(UNFINISHED - 1):
            sending, frame = await outbox.take()
            outbox.written(sending)
            assert assembly.take(frame)
            outbox.acknowledge(assembly.ack(), 0.0)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await outbox.take()
        outbox.written(late)
        assert assembly.take(late_frame)
        outbox.acknowledge(assembly.ack(), 0.0)
        sending, _ = await outbox.take()
        assert sending is sent[UNFINISHED] and sent[0].done.done() and not sent[UNFINISHED].done.done()
        outbox.close()
        assert all(one.done.done() for one in sent)

    within(main())


@pytest.mark.processes
def test_a_large_state_arrives_in_the_background(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            zero.meet(one)
            one.meet(zero)
            await until(both(zero, one))
            body = os.urandom(1 << 20) * 24
            zero.peers.send_bulk(one.me, b"state", body, background=True)
            await until(lambda: one.log.of("bulk"))
            assert one.log.of("bulk")[0][-1] == body

    run(main())


@pytest.mark.processes
def test_control_does_not_wait_behind_payloads(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(*(End(n, keys.workers[n]) for n in (0, 1))) as (zero, one):
            zero.meet(one)
            one.meet(zero)
            await until(both(zero, one))
            body = os.urandom(1 << 20) * 100
            sent = [zero.peers.send_bulk(one.me, b"%d" % n, body) for n in range(2)]
            zero.peers.send(one.me, b"first")
            await until(lambda: one.log.of("control"))
            assert not sent[0].done.done() and not one.log.of("bulk")
            await until(lambda: len(one.log.of("bulk")) == 2)
            rate = zero.peers.rates()[one.me]
            assert rate.bytes_per_s is not None and 1e6 < rate.bytes_per_s < 1e11
            assert rate.round_trip_s is not None and rate.silent_s < 5.0
            assert one.log.of("bulk")[1] == (zero.me, b"1", body)

    run(main())


def test_messages_that_are_not_whole_take_bounded_memory() -> None:
    """Also in many small chunks, and in many messages; what is whole does not count any more."""
    assembly, chunk = Assembly(10_000), memoryview(bytes(1000))
    for number in range(50):
        assert assembly.take(pack_frame(2 * number, 0, 1000, b"x", chunk)) is not None
    for number in range(50, 55):
        assert assembly.take(pack_frame(2 * number, 0, 5000, b"x", chunk)) is None
    assembly.take(pack_frame(2 * 55, 0, 5000, b"x", chunk))
    with pytest.raises(ValueError, match="bytes of messages that are not whole; allowed are 10000"):
        assembly.take(pack_frame(2 * 56, 0, 5000, b"x", chunk))
    assembly = Assembly(10_000)
    for offset in range(2, 38, 2):
        assert assembly.take(pack_frame(0, offset, 5000, b"", chunk[:1])) is None
    with pytest.raises(ValueError, match="that are not whole"):
        assembly.take(pack_frame(0, 38, 5000, b"", chunk[:1]))


def test_a_peer_that_takes_nothing_is_lost(keys: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MOST_HELD", 10_000_000)
    monkeypatch.setattr(session, "QUEUED", 100)

    async def main() -> None:
        for how in ("bulk", "control"):
            async with ends(*(End(seat, keys.workers[seat]) for seat in range(2))) as (zero, one):
                one.peers.meet(zero.me, [], dial=False)
                zero.meet(one)
                await until(both(zero, one))
                for _ in range(15 if how == "bulk" else 150):  # all at once: nothing is sent meanwhile
                    if how == "bulk":
                        zero.peers.send_bulk(one.me, b"", bytes(1_000_000))
                    else:
                        zero.peers.send(one.me, b"again")
                await until(lambda: zero.log.of("lost"))
                why = "takes what it is sent too slowly: " if how == "bulk" else "does not read what it is sent"
                assert zero.log.of("lost")[0][1].startswith(why)

    run(main())
