"""Keeps the streams between two processes once they have met: control, heartbeats, and bulk messages.

Control has a TCP connection to itself, so heartbeats do not wait behind payloads. A session ends once: when the peer
closes it, says nothing for too long, or sends what it must not; or when this process ends it.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol

import grpc
import grpc.aio

from atoll.link.net.frames import (
    ACK_BYTES,
    CONTROL_BYTES,
    Ack,
    Assembly,
    FrameError,
    Kind,
    is_background,
    one_line,
    pack,
    pack_reason,
    pack_time,
    read_reason,
    read_time,
)
from atoll.link.net.held_bytes import MOST_HELD
from atoll.link.net.outbox import Foreground, Outbox
from atoll.link.net.views import Process

BROKEN: Final = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""Errors of a stream whose other end has gone."""
CLOSED: Final = "closed its connection"
REFUSED: Final = "refuses this worker: "
"""Begins the reason that a worker is given whose connection is closed for what it did or is."""
QUEUED: Final = 1 << 14
"""Most control messages that wait for a peer to read them."""
_LINGER_S: Final = 1.0  # for the peer to read why a session ends
_QUIET = (  # say no more than that the other end has gone
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)
_log = logging.getLogger(__name__)


class Handler(Protocol):
    """Is told what happens with the peers of a process; all calls are made in the event loop."""

    def connected(self, peer: Process, greeting: bytes) -> None:
        """A session with this peer has begun."""

    def lost(self, peer: Process, why: str) -> None:
        """A session has ended, not by this process; `why` continues "worker 3 ..."."""

    def control(self, peer: Process, data: bytes) -> None:
        """A control message has arrived; they come in the order of sending."""

    def bulk(self, peer: Process, header: bytes, body: bytearray) -> None:
        """A bulk message has arrived whole."""


class Stream(Protocol):
    """Is one end of a bidirectional RPC, at the side that dialled or at the other."""

    async def read(self) -> Any:
        """Return the next message, or grpc.aio.EOF."""

    async def write(self, data: bytes) -> None:
        """Send a message."""


class Owner(Protocol):
    """Is told that a session is alive, or has ended."""

    def heard(self, session: "Session") -> None:
        """Note that something has come from the peer."""

    def ended(self, session: "Session", why: str | None) -> None:
        """Forget a session; without a reason, nobody else is told."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Holds the streams of a session."""

    control: Stream
    bulks: Sequence[Stream]
    channels: Sequence[grpc.aio.Channel] = ()
    """At the end that dialled."""
    generation: int = 0
    """The least that the generation of the peer's certificate can be."""


@dataclass(slots=True)
class _Pulse:
    """Follows the heartbeats of a peer."""

    heard_s: float = field(default_factory=time.monotonic)
    round_trip_s: float | None = None
    acked: int = 0
    """Bytes that were acknowledged to the peer."""


class Session:
    """Carries messages between this process and one peer.

    Args:
        peer: The other end.
        streams: All open, with hellos exchanged.
        owner: Told of the end.
        handler: Told of messages.
        silent_s: The peer is lost if nothing comes on control for this long.
        foreground: Counts what this process sends to all its peers.
    """

    def __init__(
        self, peer: Process, streams: Streams, owner: Owner, handler: Handler, silent_s: float, foreground: Foreground
    ) -> None:
        self.peer = peer
        self.outbox = Outbox(foreground)
        self.assembly = Assembly(MOST_HELD)
        self.pulse = _Pulse()
        self.over = asyncio.Event()
        """Set once nothing more is read or written: the streams may be closed."""
        self.closing: asyncio.Task[None] | None = None
        """Tells the peer why the session ends; None as long as it lives."""
        self._streams = streams
        self._owner, self._handler = owner, handler
        self._silent_s = silent_s
        self._queue = _Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def generation(self) -> int:
        """The least that the generation of the peer's certificate can be."""
        return self._streams.generation

    def start(self) -> None:
        """Begin to read and write."""
        work = [self._hear(), self._speak(), self._beat()]
        for stream in self._streams.bulks:
            work += [self._receive(stream), self._transmit(stream)]
        self._tasks += [asyncio.create_task(self._guard(one), name=f"session {self.peer.seat}") for one in work]

    def put(self, message: bytes, *, first: bool = False) -> None:
        """Queue a control message; heartbeats go first."""
        if len(self._queue) >= QUEUED:
            end = partial(self.end, "does not read what it is sent", f"has sent {QUEUED} messages that were not read")
            asyncio.get_running_loop().call_soon(end)
            return
        self._queue.put(message, first=first)

    def end(self, why: str | None, tell: str | None = None) -> None:
        """End the session, unless it has ended.

        Args:
            why: Continues "worker 3 ...", for the owner; None if it knows.
            tell: Continues "worker 0 ...", for the peer; None if it has gone.
        """
        if self.closing is not None:
            return
        self.outbox.close()
        self.closing = asyncio.create_task(self._close(tell), name=f"end of session {self.peer.seat}")
        self._owner.ended(self, why)

    async def _close(self, tell: str | None) -> None:
        """Let the peer read why, then stop; its end of control closes when it has."""
        if tell is not None and self._tasks:
            self._queue.put(pack_reason(tell))
            self._queue.put(None)
            await asyncio.wait(self._tasks[:2], timeout=_LINGER_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.over.set()
        for channel in self._streams.channels:
            await channel.close()

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except FrameError as fault:
            self.end(f"sent {fault}", f"cannot use what worker {self.peer.seat} sends: {fault}")
        except BROKEN as fault:
            self.end(_why(fault))
        except Exception as fault:  # the handler's
            _log.exception("worker %d sent what this process cannot handle", self.peer.seat)
            self.end(f"sent what this process cannot handle: {one_line(repr(fault))}", "failed on a message")

    # ------------------------------------------------------------------ control

    async def _hear(self) -> None:
        while True:
            data = await self._streams.control.read()
            if data is grpc.aio.EOF:
                self.end(CLOSED)
                return
            self.pulse.heard_s = time.monotonic()
            if self.closing is None:
                self._owner.heard(self)
                self._take(data)
            elif data[:1] == bytes((Kind.CLOSE,)):  # both ends close at once
                return

    def _take(self, data: bytes) -> None:
        kind = data[0] if data else 0
        if kind == Kind.PING:
            self.put(pack_time(Kind.PONG, read_time(data)), first=True)
        elif kind == Kind.PONG:
            self.pulse.round_trip_s = max(0, time.monotonic_ns() - read_time(data)) / 1e9
        elif kind == Kind.DATA:
            if len(data) > 1 + CONTROL_BYTES:
                raise FrameError(f"a control message of {len(data) - 1} bytes; allowed are {CONTROL_BYTES}")
            self._handler.control(self.peer, data[1:])
        elif kind == Kind.ACK:
            self.outbox.acknowledge(Ack.read(data), self.pulse.round_trip_s or 0.0)
        elif kind == Kind.CLOSE:
            self.end(read_reason(data) or CLOSED)
        else:
            raise FrameError(f"a control message of kind {kind}")

    async def _speak(self) -> None:
        while (message := await self._queue.get()) is not None:
            await self._streams.control.write(message)

    async def _beat(self) -> None:
        tick_s = self._silent_s / 5
        while True:
            self.put(pack_time(Kind.PING, time.monotonic_ns()), first=True)
            wake_s = min(time.monotonic() + tick_s, self.pulse.heard_s + self._silent_s)
            await asyncio.sleep(wake_s - time.monotonic())
            late_s = time.monotonic() - wake_s
            if late_s > tick_s:  # this process was stopped or busy: what came meanwhile is not read yet
                self.pulse.heard_s += late_s
            if time.monotonic() >= self.pulse.heard_s + self._silent_s:
                silent = f"for {self._silent_s:g} s"
                why = f"was silent {silent}: stopped, or cut off"
                self.end(why, f"heard nothing from worker {self.peer.seat} {silent}")
                return

    # ------------------------------------------------------------------ bulk

    async def _receive(self, stream: Stream) -> None:
        while True:
            frame = await stream.read()
            if frame is grpc.aio.EOF:
                self.end(CLOSED)
                return
            if self.closing is not None:
                continue
            self._owner.heard(self)
            arrived = self.assembly.take(frame)
            due = arrived is not None or self.assembly.received >= self.pulse.acked + ACK_BYTES
            if due or is_background(frame):  # whose sender waits for it
                self.pulse.acked = self.assembly.received
                self.put(self.assembly.ack().pack())
            del frame
            if arrived is not None:
                self._handler.bulk(self.peer, *arrived)
                del arrived

    async def _transmit(self, stream: Stream) -> None:
        while True:
            sending, frame = await self.outbox.take()
            await stream.write(frame)
            self.outbox.written(sending)
            del sending, frame


class _Queue:
    """Holds control messages until they are written."""

    def __init__(self) -> None:
        self._messages: deque[bytes | None] = deque()
        self._filled = asyncio.Event()

    def put(self, message: bytes | None, *, first: bool = False) -> None:
        """Queue a message, or None for the end; heartbeats go first."""
        if first:
            self._messages.appendleft(message)
        else:
            self._messages.append(message)
        self._filled.set()

    def __len__(self) -> int:
        return len(self._messages)

    async def get(self) -> bytes | None:
        """Wait for the next message."""
        while not self._messages:
            self._filled.clear()
            await self._filled.wait()
        return self._messages.popleft()


def _why(fault: BaseException) -> str:
    """Return why a stream broke."""
    if isinstance(fault, grpc.aio.AioRpcError) and fault.code() not in _QUIET:
        return f"{CLOSED} ({fault.code().name}: {one_line(fault.details() or '')})"
    return CLOSED


def pack_data(data: bytes) -> bytes:
    """Return a control message of the owner's."""
    return pack(Kind.DATA, data)
