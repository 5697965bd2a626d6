"""Deals the bulk messages for one peer to the connections that are free, chunk by chunk.

Messages are dealt in order. Background messages, such as the state for a joiner, are dealt only while no other message
waits, in bursts with pauses between them: they take a share of the line, and a small one while this process sends other
messages to anybody, for all peers may share one line.
"""

import asyncio
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from atoll.link.net.frames import (
    BACKGROUND_BYTES,
    CHUNK_BYTES,
    UNFINISHED,
    Ack,
    FrameError,
    pack_frame,
)

_BUSY_SHARE: Final = 0.4
_IDLE_SHARE: Final = 1.0
_BURSTS: Final = (4 * BACKGROUND_BYTES, 64 * BACKGROUND_BYTES)  # bytes of one, least and most
_BURST_S: Final = 0.05  # a shorter burst is too short: waiting for it to arrive would take as long
_LONGEST_PAUSE_S: Final = 2.0
_LEAST_SAMPLE: Final = 1 << 16
_REMEMBERED: Final = (256 << 20, 20.0)  # bytes and seconds after which older measurements count half


@dataclass(slots=True)
class Foreground:
    """Counts the messages of a process, to all its peers, that are not in the background and have not arrived."""

    messages: int = 0

    @property
    def share(self) -> float:
        """Part of the measured rate that background messages may take."""
        return _BUSY_SHARE if self.messages else _IDLE_SHARE


class Sending:
    """Tracks one bulk message until gRPC has written it.

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
class _Bursts:
    """Paces background messages: each burst must arrive, and a pause follow, before the next.

    A pause lasts as long as the burst took, times (1 / share - 1). So the rate follows that of the line.
    """

    size: int = _BURSTS[0]
    left: int = 0
    """Bytes that may be dealt before it must arrive."""
    is_out: bool = False
    last: int = 0
    """Bytes that had been sent in all, with its last chunk."""
    began_s: float = 0.0
    next_s: float = 0.0

    def wait_s(self, now_s: float) -> float | None:
        """Return how long the next chunk must wait; None: until the burst has arrived."""
        if self.left > 0:
            return 0.0
        return None if self.is_out else max(0.0, self.next_s - now_s)

    def deal(self, size: int, sent: int, now_s: float) -> None:
        """Note that a chunk is sent."""
        if not self.is_out:
            self.is_out, self.left, self.began_s = True, self.size, now_s
        self.left -= size
        self.last = sent

    def ack(self, acked: int, now_s: float, round_trip_s: float, share: float) -> None:
        """Note what has arrived; the next burst is longer or shorter if this one was too short or too long."""
        if not self.is_out or self.left > 0 or acked < self.last:
            return
        took_s, short_s = now_s - self.began_s, max(_BURST_S, 2 * round_trip_s)
        self.is_out = False
        self.next_s = now_s + min(took_s * (1 / share - 1), _LONGEST_PAUSE_S)
        if took_s < short_s:
            self.size = min(2 * self.size, _BURSTS[1])
        elif took_s > 4 * short_s:
            self.size = max(self.size // 2, _BURSTS[0])


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
        foreground: Counts what this process sends to all its peers.
    """

    def __init__(self, foreground: Foreground) -> None:
        self._foreground = foreground
        self._lanes = (_Lane(), _Lane())
        self._meter = _Meter()
        self._bursts = _Bursts()
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
        self._foreground.messages += not background
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
                delay_s = self._bursts.wait_s(time.monotonic())
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
        now_s = time.monotonic()
        self._meter.ack(ack.received, now_s, round_trip_s)
        self._bursts.ack(ack.received, now_s, round_trip_s, self._foreground.share)
        self._foreground.messages -= ack.next_number - self._lanes[0].whole
        for lane, whole in zip(self._lanes, told, strict=True):
            lane.whole = whole
        self._wake()

    def close(self) -> None:
        """Cancel what is not written; once."""
        self._is_closed = True
        self._foreground.messages -= self._lanes[0].added - self._lanes[0].whole
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
        if sending.background:
            self._bursts.deal(size, self._meter.sent, now_s)
            if not lane.waiting:  # or the last one would have to wait for a message that is yet to come
                self._bursts.left = 0
        return sending, frame

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
