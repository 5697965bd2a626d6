"""What a process refuses: strangers, other seats and lives, and frames that no honest peer sends."""

import asyncio
import socket
import struct
import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from atoll.errors import ConfigError, LinkError
from atoll.link.net import frames
from atoll.link.net.credentials import channel_credentials
from atoll.link.net.frames import Ack, BulkHello, Hello, Kind, pack
from atoll.link.net.identity import Authority, Bearer, Identity
from atoll.link.net.registry import INSECURE
from atoll.link.net.revocations import Revocations, revoke
from atoll.link.net.run_keys import KeyRing, throw_away
from atoll.link.net.views import Process
from peer_ends import End, both, ends, run, until

pytestmark = pytest.mark.processes  # waits for connections more than it computes

SESSION = "0123456789abcdef" * 2
HEARTBEAT = frames.pack_time(Kind.PING, 1)


@pytest.fixture(scope="module")
def keys() -> KeyRing:
    return throw_away(4, "x-1a2b3c4d")


async def problem(here: End, peer: Process, address: str) -> str:
    """Why a dial fails."""
    here.peers.meet(peer, [address], dial=True)
    await until(lambda: here.peers.problem(peer))
    said = here.peers.problem(peer)
    here.peers.drop(peer)
    assert said is not None and "\n" not in said and not here.log.events
    return said


def test_another_seat_or_life_is_refused(keys: KeyRing) -> None:
    async def main() -> None:
        false = End(2, keys.workers[1])  # says that it is worker 2
        async with ends(End(0, keys.workers[0], 3), End(1, keys.workers[1], 5), false) as (zero, one, false):
            said = await problem(one, Process(0, 2), zero.address)
            assert "this is worker 0 (life 3), not worker 0 (life 2)" in said
            zero.peers.meet(Process(1, 4), [], dial=False)
            said = await problem(one, zero.me, zero.address)
            assert "worker 0 (life 3) does not expect worker 1 (life 5)" in said
            zero.peers.meet(Process(2, 1), [], dial=False)
            said = await problem(false, zero.me, zero.address)
            assert "worker 1 says that it is worker 2" in said
            said = await problem(zero, false.me, false.address)
            assert "shows the certificate of another seat" in said
            said = await problem(zero, Process(1, 6), one.address)
            assert "this is worker 1 (life 5), not worker 1 (life 6)" in said
            assert not zero.log.events
            with pytest.raises(LinkError, match="its own peer"):
                zero.peers.meet(Process(0, 4), [], dial=False)

    run(main())


def test_an_early_dial_is_no_lost_time(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(End(0, keys.workers[0]), End(1, keys.workers[1])) as (zero, one):
            one.meet(zero)
            await asyncio.sleep(1.1)  # a dial that was refused at once would be tried again after another 0.5 s
            zero.peers.meet(one.me, [], dial=False)
            await until(both(zero, one), 0.3)

    run(main())


def test_an_answer_of_another_process_is_refused() -> None:
    async def main() -> None:
        async def control(_: Any, context: Any) -> None:
            hello, _ = Hello.read(await context.read())
            changed = hello.model_copy(update={"seat": 1, "life": 7, "wanted_seat": 0, "wanted_life": 1})
            await context.write(changed.pack(b""))
            await context.read()

        server = grpc.aio.server()
        methods = {"Control": grpc.stream_stream_rpc_method_handler(control)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("atoll.Peer", methods),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with ends(End(0, INSECURE)) as (zero,):
            said = await problem(zero, Process(1, 8), f"127.0.0.1:{port}")
            assert "it is worker 1 (life 7), not worker 1 (life 8)" in said
            await server.stop(0)

    run(main())


def test_strangers_and_deaf_addresses(keys: KeyRing) -> None:
    async def main() -> None:
        other = throw_away(2, "y-1a2b3c4d").workers
        made = (End(0, keys.workers[0]), End(1, other[1]), End(1, INSECURE), End(1, keys.workers[1]))
        async with ends(*made) as (zero, foreign, plain, one):
            zero.peers.meet(Process(1, 1), [], dial=False)
            assert "another run" in await problem(zero, foreign.me, foreign.address)
            assert "does not speak TLS" in await problem(zero, plain.me, plain.address)
            assert "another run" in await problem(foreign, zero.me, zero.address)
            assert "cannot be reached" in await problem(plain, zero.me, zero.address)
            with socket.create_server(("127.0.0.1", 0)) as gone:
                address = f"127.0.0.1:{gone.getsockname()[1]}"
            assert f"worker 1 at {address} cannot be reached" in await problem(zero, one.me, address)
            zero.peers.meet(one.me, [], dial=False)
            one.meet(zero)
            await until(both(zero, one))

    run(main())


def test_a_revoked_certificate_opens_nothing() -> None:
    async def main() -> None:
        authority = Authority.new("x-1a2b3c4d")
        revoked = revoke(authority, Revocations(authority.run), Bearer(authority.run, "worker", 1))
        made = (End(0, authority.issue("worker", 0), revocations=revoked), End(1, authority.issue("worker", 1)))
        async with ends(*made) as (zero, one):
            zero.peers.meet(one.me, [], dial=False)
            assert "is revoked" in await problem(one, zero.me, zero.address)
            one.peers.meet(zero.me, [], dial=False)
            assert "revoked" in await problem(zero, one.me, one.address)

    run(main())


def test_an_observer_is_no_peer(keys: KeyRing) -> None:
    async def main() -> None:
        async with ends(End(0, keys.workers[0]), End(1, keys.observer)) as (zero, one):
            zero.peers.meet(one.me, [], dial=False)
            assert "only a worker may" in await problem(one, zero.me, zero.address)

    run(main())


def test_addresses_that_cannot_be_listened_at() -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE)) as (zero,):
            for listen in ("", "localhost", "127.0.0.1:x", "127.0.0.1:65536", zero.address, "192.0.2.1:0"):
                with pytest.raises(ConfigError, match="cannot listen") as caught:
                    await End(1, INSECURE).peers.start(listen)
                assert caught.value.setting == "listen" and caught.value.value == listen

    run(main())


def test_arguments_are_bounded() -> None:
    async def main() -> None:
        for options in ({"connections": 0}, {"connections": 17}, {"silent_s": 0.0}, {"greeting": bytes((1 << 20) + 1)}):
            with pytest.raises(ConfigError):
                End(0, INSECURE, **options)
        peers = End(0, INSECURE).peers
        with pytest.raises(LinkError, match="1048576"):
            peers.send(Process(1, 1), bytes((1 << 20) + 1))
        with pytest.raises(LinkError, match="65536"):
            peers.send_bulk(Process(1, 1), bytes((1 << 16) + 1), b"")

    run(main())


# ---------------------------------------------------------------------- a peer that does not keep to the protocol


@dataclass
class Raw:
    """Worker 1, in the hands of somebody."""

    control: Any
    bulk: Any

    async def close_reason(self) -> str:
        while (data := await self.control.read()) is not grpc.aio.EOF:
            if data[:1] == bytes((Kind.CLOSE,)):
                return frames.read_reason(data)
        return ""


@asynccontextmanager
async def raw(zero: End) -> AsyncIterator[Raw]:
    async with grpc.aio.insecure_channel(zero.address) as channel:
        control, bulk = channel.stream_stream("/atoll.Peer/Control")(), channel.stream_stream("/atoll.Peer/Bulk")()
        hello = Hello(seat=1, life=1, wanted_seat=0, wanted_life=1, session=SESSION, connections=1)
        await control.write(hello.pack(b"raw"))
        assert Hello.read(await control.read())[1] == b"from 0"
        await bulk.write(BulkHello(session=SESSION, index=0).pack())
        assert await bulk.read() == b"1"
        assert await control.read() == pack(Kind.READY)
        await control.write(HEARTBEAT)
        await until(lambda: zero.log.of("connected"))
        yield Raw(control, bulk)


def frame(message: int, offset: int, total: int, chunk: bytes, header: bytes = b"", flip: int = 0) -> bytes:
    checksum = zlib.crc32(header + chunk) ^ flip
    return struct.pack("<QQQII", message, offset, total, len(header), checksum) + header + chunk


BULK = {
    "a frame of 31 bytes": [bytes(31)],
    "checksum": [frame(0, 0, 3, b"abc", flip=1)],
    "4 bytes at byte 0 of 3": [frame(0, 0, 3, b"abcd")],
    "3 bytes at byte 1 of 3": [frame(0, 1, 3, b"abc")],
    "0 bytes at byte 1 of 3": [frame(0, 1, 3, b"")],
    "of 1099511627777": [frame(0, 0, (1 << 40) + 1, b"abc")],
    "bytes at byte 18446744073709551615": [frame(0, (1 << 64) - 1, 1 << 40, b"a")],
    "a header of 65537 bytes": [frame(0, 0, 1, b"a", bytes((1 << 16) + 1))],
    "a header of 4294967295 bytes": [struct.pack("<QQQII", 0, 0, 1, (1 << 32) - 1, 0)],
    "a header at byte 1": [frame(0, 1, 3, b"bc", b"header")],
    "the chunk at byte 2 twice": [frame(0, 2, 3, b"c"), frame(0, 2, 3, b"c")],
    "the beginning of a message twice": [frame(0, 0, 3, b"a"), frame(0, 0, 3, b"a")],
    "the chunk at byte 1 twice": [frame(0, 0, 4, b"ab"), frame(0, 1, 4, b"b")],
    "chunks that overlap at byte 2": [frame(0, 2, 9, b"cd"), frame(0, 1, 9, b"bc"), frame(0, 0, 9, b"a")],
    "4 bytes of a message that has 3": [frame(0, 1, 3, b"bc"), frame(0, 2, 3, b"c"), frame(0, 0, 3, b"a")],
    "of 4 bytes that had 3": [frame(0, 0, 3, b"a"), frame(0, 1, 4, b"b")],
    "more of message 0, which was whole": [frame(0, 0, 1, b"a"), frame(0, 0, 1, b"a")],
    "more of message 1, which was whole": [frame(2, 0, 0, b""), frame(2, 0, 0, b"")],  # while 0 is not
    "message 128 before message 0": [frame(256, 0, 3, b"a")],
    "message 129 before message 1": [frame(1, 0, 0, b""), frame(257, 0, 3, b"a"), frame(259, 0, 3, b"a")],
}


@pytest.mark.parametrize("said", BULK)
def test_a_frame_that_cannot_be_ends_its_session_at_both_ends(said: str) -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE), End(2, INSECURE)) as (zero, two):
            zero.meet(two)
            two.meet(zero)
            await until(both(zero, two))
            zero.peers.meet(Process(1, 1), [], dial=False)
            async with raw(zero) as peer:
                for one in BULK[said]:
                    await peer.bulk.write(one)
                await until(lambda: zero.log.of("lost"))
                ((process, why),) = zero.log.of("lost")
                assert process == Process(1, 1) and why.startswith("sent ") and said in why
                reason = await peer.close_reason()
                assert reason.startswith("cannot use what worker 1 sends") and said in reason
            assert zero.peers.is_connected(two.me) and not two.log.of("lost")

    run(main())


CONTROL = {
    "a control message of kind 0": b"",
    "a control message of kind 9": b"\x09abc",
    "a control message of kind 1": pack(Kind.HELLO, b"{}"),
    "a control message of kind 2": pack(Kind.READY),
    "a control message of 1048577 bytes": pack(Kind.DATA, bytes((1 << 20) + 1)),
    "a heartbeat of 3 bytes": pack(Kind.PING, b"ab"),
    "a heartbeat of 10 bytes": pack(Kind.PONG, bytes(9)),
    "an acknowledgement of 1 bytes": pack(Kind.ACK),
    "an acknowledgement of 1 bytes where": Ack(1, 0, 0).pack(),
    "an acknowledgement of 1 messages": Ack(0, 1, 0).pack(),
    "an acknowledgement of 2 messages": Ack(0, 0, 2).pack(),
}


@pytest.mark.parametrize("said", CONTROL)
def test_a_control_message_that_cannot_be_ends_its_session(said: str) -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE)) as (zero,):
            zero.peers.meet(Process(1, 1), [], dial=False)
            async with raw(zero) as peer:
                await peer.control.write(CONTROL[said])
                await until(lambda: zero.log.of("lost"))
                ((_, why),) = zero.log.of("lost")
                assert why.startswith("sent ") and said in why
                assert said in await peer.close_reason()

    run(main())


def test_a_peer_that_sends_payloads_and_no_heartbeats_is_silent() -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE, silent_s=0.3)) as (zero,):
            zero.peers.meet(Process(1, 1), [], dial=False)
            async with raw(zero) as peer:
                for number in range(100):
                    if not zero.log.of("lost"):
                        await peer.bulk.write(frame(2 * number, 0, 1, b"a"))
                        await asyncio.sleep(0.02)
                assert zero.log.of("lost") == [(Process(1, 1), "was silent for 0.3 s: stopped, or cut off")]
                assert zero.log.of("bulk")

    run(main())


def test_a_message_that_is_too_long_for_grpc_ends_its_session() -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE)) as (zero,):
            zero.peers.meet(Process(1, 1), [], dial=False)
            async with raw(zero) as peer:
                await peer.bulk.write(bytes((2 << 20) + 1))
                await until(lambda: zero.log.of("lost"))

    run(main())


def test_the_second_of_two_dials_that_get_through_is_refused() -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE)) as (zero,), grpc.aio.insecure_channel(zero.address) as channel:
            zero.peers.meet(Process(1, 1), [], dial=False)
            sessions = ("a" * 32, "b" * 32)
            controls = [channel.stream_stream("/atoll.Peer/Control")() for _ in sessions]
            for control, session in zip(controls, sessions, strict=True):
                await control.write(GOOD.model_copy(update={"session": session}).pack(b""))
                await control.read()
            bulks = [channel.stream_stream("/atoll.Peer/Bulk")() for _ in sessions]
            for bulk, session in zip(bulks, sessions, strict=True):
                await bulk.write(BulkHello(session=session, index=0).pack())
                assert await bulk.read() == b"1"
            assert await controls[0].read() == pack(Kind.READY)
            await controls[0].write(HEARTBEAT)
            with pytest.raises(grpc.aio.AioRpcError, match="there is a session already"):
                await controls[1].read()
            late = channel.stream_stream("/atoll.Peer/Control")()
            await late.write(GOOD.model_copy(update={"session": "c" * 32}).pack(b""))
            with pytest.raises(grpc.aio.AioRpcError, match="there is a session already"):
                await late.read()
            await until(lambda: zero.log.of("connected"))
            assert len(zero.log.of("connected")) == 1 and not zero.log.of("lost")

    run(main())


def test_a_dial_that_is_given_up_when_it_is_taken_is_no_loss() -> None:
    """The end that chooses has taken it, and the other has not heard of that: both meet as if it had never been."""

    async def main() -> None:
        async with ends(End(0, INSECURE), End(1, INSECURE)) as (zero, one):
            zero.peers.meet(one.me, [one.address], dial=False)
            async with grpc.aio.insecure_channel(zero.address) as channel:
                control, bulk = (channel.stream_stream(f"/atoll.Peer/{name}")() for name in ("Control", "Bulk"))
                await control.write(GOOD.pack(b"gives up"))
                await control.read()
                await bulk.write(BulkHello(session=SESSION, index=0).pack())
                assert await control.read() == pack(Kind.READY)
                assert not zero.peers.is_connected(one.me)
            one.peers.meet(zero.me, [], dial=False)
            await until(both(zero, one))
            assert zero.log.events == [("connected", one.me, b"from 1")]

    run(main())


GOOD = Hello(seat=1, life=1, wanted_seat=0, wanted_life=1, session=SESSION, connections=1)
HELLOS = [
    b"",
    b"\x01",
    b"\x01{}\n",
    b"\x01" + b"[" * 100_000 + b"\n",
    b"\x02" + GOOD.pack(b"")[1:],
    GOOD.pack(b"")[:-1],
    GOOD.pack(b"").replace(b'"seat":1', b'"seat":"1"'),
    GOOD.pack(b"").replace(b'"seat":1', b'"seat":-1'),
    GOOD.pack(b"").replace(b'"life":1', b'"life":1,"more":1'),
    GOOD.pack(b"").replace(b'"connections":1', b'"connections":17'),
    GOOD.pack(b"").replace(b'"connections":1', b'"connections":0'),
    GOOD.pack(b"").replace(SESSION.encode(), b"x" * 32),
    GOOD.pack(bytes((1 << 20) + 1)),
]


@pytest.mark.parametrize("data", HELLOS, ids=range(len(HELLOS)))
def test_a_hello_that_cannot_be_is_refused(data: bytes) -> None:
    async def main() -> None:
        async with ends(End(0, INSECURE)) as (zero,), grpc.aio.insecure_channel(zero.address) as channel:
            zero.peers.meet(Process(1, 1), [], dial=False)
            call = channel.stream_stream("/atoll.Peer/Control")(timeout=10)
            await call.write(data)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT and len(caught.value.details()) < 400
            assert not zero.log.events

    run(main())


def test_a_bulk_stream_belongs_to_a_session(keys: KeyRing) -> None:
    async def main() -> None:
        def dialled(identity: Identity) -> grpc.aio.Channel:
            options = [("grpc.ssl_target_name_override", "worker-0-0.x-1a2b3c4d.atoll")]
            return grpc.aio.secure_channel(zero.address, channel_credentials(identity), options=options)

        async def answer(channel: grpc.aio.Channel, data: bytes) -> Any:
            call = channel.stream_stream("/atoll.Peer/Bulk")(timeout=10)
            await call.write(data)
            return await call.read()

        async with ends(End(0, keys.workers[0])) as (zero,):
            zero.peers.meet(Process(1, 1), [], dial=False)
            async with dialled(keys.workers[1]) as one, dialled(keys.workers[2]) as two:
                control = one.stream_stream("/atoll.Peer/Control")()
                await control.write(GOOD.model_copy(update={"connections": 2}).pack(b""))
                await control.read()
                good = BulkHello(session=SESSION, index=0)
                for channel, data in (
                    (two, good.pack()),
                    (one, good.model_copy(update={"index": 2}).pack()),
                    (one, good.model_copy(update={"session": "f" * 32}).pack()),
                    (one, b""),
                    (one, bytes(100_000)),
                ):
                    with pytest.raises(grpc.aio.AioRpcError):
                        await answer(channel, data)
                kept = one.stream_stream("/atoll.Peer/Bulk")()
                await kept.write(good.pack())
                assert await kept.read() == b"1"
                with pytest.raises(grpc.aio.AioRpcError, match="has it already"):
                    await answer(one, good.pack())
                assert not zero.log.events
                await one.stream_stream("/atoll.Peer/Bulk")().write(good.model_copy(update={"index": 1}).pack())
                await control.write(HEARTBEAT)
                await until(lambda: zero.log.of("connected"))

    run(main())


def test_dials_that_never_end_keep_nobody_out(keys: KeyRing) -> None:
    async def main() -> None:
        options = [("grpc.ssl_target_name_override", "worker-0-0.x-1a2b3c4d.atoll")]
        async with ends(End(0, keys.workers[0]), End(2, keys.workers[2])) as (zero, two):
            credentials = channel_credentials(keys.workers[1])
            port = int(zero.address.rpartition(":")[2])
            strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(100)]
            async with grpc.aio.secure_channel(zero.address, credentials, options=options) as channel:
                calls = [channel.stream_stream("/atoll.Peer/Control")() for _ in range(70)]
                ended = [asyncio.ensure_future(call.code()) for call in calls]
                await until(lambda: sum(one.done() for one in ended) == 70 - 51)
                assert {one.result() for one in ended if one.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
                zero.meet(two)
                two.meet(zero)
                await until(both(zero, two), 5.0)
                for call in calls:
                    call.cancel()
                await asyncio.gather(*ended)
            for stranger in strangers:
                stranger.close()

    run(main())
