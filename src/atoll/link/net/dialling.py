"""Dials another process of a run."""

import asyncio
import secrets
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio

from atoll.link.net.credentials import channel_credentials, channel_options, refusal
from atoll.link.net.frames import MESSAGE_BYTES, BulkHello, FrameError, Hello, Kind, one_line
from atoll.link.net.handshake import ACCEPTED, HANDSHAKE_S, SERVICE, Begin, Own, RefusedError, name
from atoll.link.net.identity import Bearer
from atoll.link.net.registry import INSECURE
from atoll.link.net.session import BROKEN, Streams
from atoll.link.net.views import Process

_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),  # every channel has a TCP connection to itself
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.min_reconnect_backoff_ms", int(1000 * HANDSHAKE_S)),  # the longest that connecting may take
]


class Unreachable(Exception):  # noqa: N818 - nothing is wrong: the next dial may get through
    """A dial has failed; the text is one line for the user."""


async def dial(own: Own, peer: Process, address: str, begin: Begin) -> None:
    """Dial a process, and begin the session unless another dial between both was faster.

    Raises:
        Unreachable: It did not come about.
    """
    try:
        async with AsyncExitStack() as stack, asyncio.timeout(HANDSHAKE_S):
            streams, greeting = await _open(own, peer, address, stack)
            if not own.chooses(peer):
                await _ready(streams.control)
            begin(peer, streams, greeting)
            stack.pop_all()  # the session closes the channels
    except TimeoutError:
        raise Unreachable(f"worker {peer.seat} at {address} does not answer within {HANDSHAKE_S:g} s") from None
    except (RefusedError, FrameError) as fault:
        raise Unreachable(f"worker {peer.seat} at {address}: {fault}") from None
    except BROKEN as fault:
        raise Unreachable(_why(own, peer, address, fault)) from None


async def _open(own: Own, peer: Process, address: str, stack: AsyncExitStack) -> tuple[Streams, bytes]:
    """Open all streams, and exchange hellos."""
    session, generation = secrets.token_hex(16), own.least_generation(peer)
    channels = [_channel(own, peer, address) for _ in range(1 + own.connections)]
    for channel in channels:
        stack.push_async_callback(channel.close)
    control = channels[0].stream_stream(f"/{SERVICE}/Control")()
    await control.write(own.hello(peer, session, own.connections))
    answer = await control.read()
    hello, greeting = Hello.read(b"" if answer is grpc.aio.EOF else answer)
    own.check_wanted(hello)
    if (hello.seat, hello.life) != peer:
        raise RefusedError(f"it is {name(Process(hello.seat, hello.life))}, not {name(peer)}")
    bulks = [channel.stream_stream(f"/{SERVICE}/Bulk")() for channel in channels[1:]]
    for index, bulk in enumerate(bulks):
        await bulk.write(BulkHello(session=session, index=index).pack())
    for bulk in bulks:
        if await bulk.read() != ACCEPTED:
            raise FrameError("no answer on a bulk stream")
    return Streams(control, bulks, channels, generation), greeting


async def _ready(control: Any) -> None:
    """Wait until the other end takes this dial."""
    message = await control.read()
    if message is grpc.aio.EOF or message != bytes((Kind.READY,)):
        raise FrameError("no word that the session begins")


def _channel(own: Own, peer: Process, address: str) -> grpc.aio.Channel:
    if own.security == INSECURE or own.gate is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    bearer = Bearer(own.security.bearer.run, "worker", peer.seat)
    options = [*_OPTIONS, *channel_options(bearer, own.gate.revocations)]
    return grpc.aio.secure_channel(address, channel_credentials(own.security), options=options)


def _why(own: Own, peer: Process, address: str, fault: BaseException) -> str:
    """Return why a dial failed, in one line."""
    who = f"worker {peer.seat} at {address}"
    if not isinstance(fault, grpc.aio.AioRpcError):
        return f"{who} closed the connection"
    if own.security != INSECURE:
        bearer = Bearer(own.security.bearer.run, "worker", peer.seat)
        if (known := refusal(fault, own.security, bearer, address)) is not None:
            return str(known)
    details = one_line(fault.details() or fault.code().name)
    if fault.code() is grpc.StatusCode.UNAVAILABLE:
        return f"{who} cannot be reached: {details}"
    return f"{who} refuses: {details}"
