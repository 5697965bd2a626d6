"""Deals the bulk messages for one peer to the connections that are free, chunk by chunk.

Messages are dealt in order. Background messages, such as the state for a joiner, are dealt only while no other message
waits, and at a share of the rate at which the peer was measured to receive.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from atoll.link.net.frames import (
    ACK_BYTES,
    BACKGROUND_BYTES,
    CHUNK_BYTES,
    UNFINISHED,
    Ack,
    FrameError,
    pack_frame,
)

_MOST_BLIND: Final = 2 * ACK_BYTES  # bytes on the way in the background before any rate was measured
_LEAST_SAMPLE: Final = 1 << 16
_REMEMBERED: Final = (256 << 20, 20.0)  # bytes and seconds after which older measurements count half


class Sending:
    """Is a bulk message on its way to a peer.

    Args:
        number: Its place in its lane.
        header: At most 64 KiB.
        body: Must not change before `done`.
        background: Whether it is in the lane that yields to the other.
    """

    def __init__(self, number: int, header: bytes, body: memoryview, *, background: bool) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Is done once gRPC has all bytes, so that the body may be used again; cancelled if the session ends before."""
        self.number = number
        self.background = background
        self._header, self._body = header, body
        self._dealt = self._written = 0
        self._frames = 0  # dealt and not written

    @property
    def is_dealt(self) -> bool:
        """Whether all chunks are with connections."""
        return self._dealt == len(self._body) and (self._frames > 0 or self._written > 0)

    def deal(self) -> tuple[bytes, int]:
        """Return the next frame, and the bytes of the body that are in it."""
        offset, size = self._dealt, BACKGROUND_BYTES if self.background else CHUNK_BYTES
        chunk = self._body[offset : offset + size]
        self._dealt += len(chunk)
        self._frames += 1
        header = b"" if offset else self._header
        return pack_frame(2 * self.number + self.background, offset, len(self._body), header, chunk), len(chunk)

    def written(self) -> None:
        """Note that a frame is with gRPC."""
        self._frames -= 1
        self._written += 1
        if self.is_dealt and not self._frames:
            self._body = memoryview(b"")
            if not self.done.done():
                self.done.set_result(None)


@dataclass(slots=True)
class _Meter:
    """Measures the rate at which a peer receives, from its acknowledgements."""

    sent: int = 0
    acked: int = 0
    since_s: float = 0.0
    """When the last acknowledgement came, or when sending began after a pause."""
    began_idle: bool = True
    ran_dry: bool = False
    """Whether there was nothing to send, since the last chunk."""
    is_unfair: bool = False
    """Whether there was nothing to send for a part of the time since `since_s`: then it is no measurement."""
    bytes: float = 0.0
    seconds: float = 0.0

    @property
    def rate(self) -> float | None:
        """Bytes per second; None before the first measurement."""
        return self.bytes / self.seconds if self.seconds > 0 else None

    def send(self, size: int, now_s: float) -> None:
        """Note that a chunk is sent."""
        if self.sent == self.acked:
            self.since_s, self.began_idle, self.is_unfair = now_s, True, False
        elif self.ran_dry:
            self.is_unfair = True
        self.ran_dry = False
        self.sent += size

    def ack(self, received: int, now_s: float, round_trip_s: float) -> None:
        """Note what has arrived."""
        size, elapsed_s = received - self.acked, now_s - self.since_s
        if self.began_idle:
            elapsed_s -= min(round_trip_s, elapsed_s / 2)
        if size >= _LEAST_SAMPLE and not self.is_unfair and elapsed_s > 0:
            self.bytes += size
            self.seconds += elapsed_s
            if self.bytes > _REMEMBERED[0] or self.seconds > _REMEMBERED[1]:
                self.bytes /= 2
                self.seconds /= 2
        self.acked, self.since_s = received, now_s
        self.began_idle = self.is_unfair = False


@dataclass(slots=True)
class _Lane:
    """Holds the messages of one kind."""

    waiting: deque[Sending] = field(default_factory=deque)
    """Not dealt yet; the first may be dealt in part."""
    writing: set[Sending] = field(default_factory=set)
    added: int = 0
    whole: int = 0
    """Messages before this one are whole at the peer."""

    @property
    def has_next(self) -> bool:
        """Whether a chunk may be dealt now."""
        return bool(self.waiting) and self.waiting[0].number < self.whole + UNFINISHED


class Outbox:
    """Holds the bulk messages for one peer until they are written.

    Args:
        share: Part of the measured rate that background messages may take.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._lanes = (_Lane(), _Lane())
        self._meter = _Meter()
        self._background_s = 0.0  # when the next background chunk may be dealt
        self._changed = asyncio.Event()
        self._is_closed = False
        self.waiting = 0
        """Bytes that were added and not dealt."""

    @property
    def sent(self) -> int:
        """Bytes that were dealt."""
        return self._meter.sent

    @property
    def rate(self) -> float | None:
        """Bytes per second at which the peer receives when there is something to send."""
        return self._meter.rate

    @property
    def is_empty(self) -> bool:
        """Whether the peer has received all."""
        return all(lane.whole == lane.added for lane in self._lanes)

    def add(self, header: bytes, body: memoryview, *, background: bool) -> Sending:
        """Queue a message."""
        lane = self._lanes[background]
        sending = Sending(lane.added, header, body, background=background)
        if self._is_closed:
            sending.done.cancel()
            return sending
        lane.added += 1
        lane.waiting.append(sending)
        self.waiting += len(body)
        self._wake()
        return sending

    async def take(self) -> tuple[Sending, bytes]:
        """Wait for the next frame that a connection shall send."""
        while True:
            changed, delay_s = self._changed, None
            if self._lanes[0].has_next:
                return self._deal(self._lanes[0])
            if self._lanes[1].has_next and not self._lanes[0].waiting:
                delay_s = self._delay_s()
                if delay_s == 0.0:
                    return self._deal(self._lanes[1])
            self._meter.ran_dry = True
            try:
                async with asyncio.timeout(delay_s):
                    await changed.wait()
            except TimeoutError:
                pass

    def written(self, sending: Sending) -> None:
        """Note that a frame is with gRPC."""
        sending.written()
        if sending.done.done():
            self._lanes[sending.background].writing.discard(sending)

    def acknowledge(self, ack: Ack, round_trip_s: float) -> None:
        """Note what the peer has received.

        Raises:
            FrameError: It cannot have.
        """
        told = (ack.next_number, ack.next_background)
        for lane, whole in zip(self._lanes, told, strict=True):
            if not lane.whole <= whole <= lane.added:
                raise FrameError(f"an acknowledgement of {whole} messages where {lane.added} were sent")
        if not self._meter.acked <= ack.received <= self._meter.sent:
            raise FrameError(f"an acknowledgement of {ack.received} bytes where {self._meter.sent} were sent")
        self._meter.ack(ack.received, time.monotonic(), round_trip_s)
        for lane, whole in zip(self._lanes, told, strict=True):
            lane.whole = whole
        self._wake()

    def close(self) -> None:
        """Cancel what is not written."""
        self._is_closed = True
        for lane in self._lanes:
            for sending in (*lane.waiting, *lane.writing):
                sending.done.cancel()
            lane.waiting.clear()
            lane.writing.clear()

    def _deal(self, lane: _Lane) -> tuple[Sending, bytes]:
        sending = lane.waiting[0]
        frame, size = sending.deal()
        if sending.is_dealt:
            lane.waiting.popleft()
        lane.writing.add(sending)
        self.waiting -= size
        now_s = time.monotonic()
        self._meter.send(size, now_s)
        if sending.background and self._meter.rate:
            self._background_s = max(now_s, self._background_s) + size / (self._share * self._meter.rate)
        return sending, frame

    def _delay_s(self) -> float | None:
        """Return how long a background chunk must wait; None: until something changes."""
        if self._meter.rate is None:
            return 0.0 if self._meter.sent - self._meter.acked < _MOST_BLIND else None
        return max(0.0, self._background_s - time.monotonic())

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
