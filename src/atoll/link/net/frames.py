"""Defines what two processes of a run send each other, parsed strictly and bounded. Pure: no clock, no network.

Control messages begin with a byte that says their kind. A bulk message is cut into frames of about 1 MiB, each with
its place in the message, so that they may come over several connections; `Assembly` puts them together.
"""

import struct
import zlib
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Annotated, Final, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.errors import printable

CONTROL_BYTES: Final = 1 << 20
"""Most bytes of a control message, and of a greeting."""
HEADER_BYTES: Final = 1 << 16
BODY_BYTES: Final = 1 << 40
CHUNK_BYTES: Final = 1 << 20
BACKGROUND_BYTES: Final = 1 << 18
"""Bytes of a chunk of a background message: another message waits for one of them at most."""
MESSAGE_BYTES: Final = 2 << 20
"""Most bytes that gRPC takes at once."""
UNFINISHED: Final = 128
"""Most messages of one lane that are unfinished at the receiver."""
ACK_BYTES: Final = 4 << 20
"""Bytes after which a receiver acknowledges what has come of a message that is not whole."""
CONNECTIONS: Final = 16
REASON_CHARACTERS: Final = 400
_FRAME = struct.Struct("<QQQII")
_ACK = struct.Struct("<QQQ")
_TIME = struct.Struct("<Q")
_FRAME_COST = 512  # bytes that a chunk takes besides its content, at most
_LONGEST_HELLO = 1024


class FrameError(ValueError):
    """A peer has sent what it must not; the text continues "it sent ..."."""


# ---------------------------------------------------------------------- control


class Kind(IntEnum):
    """Is the first byte of a control message."""

    HELLO = 1
    READY = 2
    PING = 3
    PONG = 4
    DATA = 5
    ACK = 6
    CLOSE = 7


class Message(BaseModel):
    """Is the base of what opens a stream."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


AnyMessage = TypeVar("AnyMessage", bound=Message)


class Hello(Message):
    """Opens a control stream, from either end; the greeting follows it."""

    seat: Annotated[int, Field(ge=0, lt=10**6)]
    life: Annotated[int, Field(ge=0, lt=1 << 63)]
    wanted_seat: Annotated[int, Field(ge=0, lt=10**6)]
    wanted_life: Annotated[int, Field(ge=0, lt=1 << 63)]
    session: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", max_length=32)]
    """Drawn by the end that dials."""
    connections: Annotated[int, Field(ge=1, le=CONNECTIONS)]
    """Bulk streams of the session, as the end that dials has it."""

    def pack(self, greeting: bytes) -> bytes:
        """Return the message, with the greeting."""
        return bytes((Kind.HELLO,)) + self.model_dump_json().encode() + b"\n" + greeting

    @classmethod
    def read(cls, data: bytes) -> "tuple[Hello, bytes]":
        """Parse a hello and its greeting."""
        head, newline, greeting = data[1 : 1 + _LONGEST_HELLO].partition(b"\n")
        if data[:1] != bytes((Kind.HELLO,)) or not newline:
            raise FrameError("no hello")
        greeting = data[1 + len(head) + 1 :]
        if len(greeting) > CONTROL_BYTES:
            raise FrameError(f"a greeting of {len(greeting)} bytes; allowed are {CONTROL_BYTES}")
        return _parse(cls, head), greeting


class BulkHello(Message):
    """Opens a bulk stream of a session."""

    session: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", max_length=32)]
    index: Annotated[int, Field(ge=0, lt=CONNECTIONS)]

    def pack(self) -> bytes:
        """Return the message."""
        return self.model_dump_json().encode()

    @classmethod
    def read(cls, data: bytes) -> "BulkHello":
        """Parse the message."""
        return _parse(cls, data[:_LONGEST_HELLO])


def _parse(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    try:
        return kind.model_validate_json(data)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise FrameError(f"no {kind.__name__}: {where[:60]}: {first['msg'][:200]}") from None


def pack(kind: Kind, data: bytes = b"") -> bytes:
    """Return a control message."""
    return bytes((kind,)) + data


def pack_time(kind: Kind, time_ns: int) -> bytes:
    """Return a heartbeat, or its echo."""
    return pack(kind, _TIME.pack(time_ns))


def read_time(data: bytes) -> int:
    """Return the time that a heartbeat carries."""
    if len(data) != 1 + _TIME.size:
        raise FrameError(f"a heartbeat of {len(data)} bytes")
    return int(_TIME.unpack_from(data, 1)[0])


def one_line(reason: str) -> str:
    """Return a reason that may come from another machine, safe to print in one line."""
    return printable(" ".join(reason[:REASON_CHARACTERS].split()))


def pack_reason(reason: str) -> bytes:
    """Return the last message of a session."""
    return pack(Kind.CLOSE, one_line(reason).encode("utf-8", "replace"))


def read_reason(data: bytes) -> str:
    """Return why a session ends; empty if the peer does not say."""
    return one_line(data[1 : 1 + 4 * REASON_CHARACTERS].decode("utf-8", "replace"))


class Ack(NamedTuple):
    """Tells how much of the bulk messages has arrived."""

    received: int
    """Bytes, since the session began."""
    next_number: int
    """The first message that is not whole yet."""
    next_background: int

    def pack(self) -> bytes:
        """Return the control message."""
        return pack(Kind.ACK, _ACK.pack(*self))

    @classmethod
    def read(cls, data: bytes) -> "Ack":
        """Parse the control message."""
        if len(data) != 1 + _ACK.size:
            raise FrameError(f"an acknowledgement of {len(data)} bytes")
        return cls(*_ACK.unpack_from(data, 1))


# ---------------------------------------------------------------------- bulk


def pack_frame(message: int, offset: int, total: int, header: bytes, chunk: memoryview) -> bytes:
    """Return one frame: the only copy that a sender makes.

    Args:
        message: Twice the number of the message in its lane, and 1 more for a background message.
        offset: Where the chunk begins in the body.
        total: Bytes of the body.
        header: The message's, where offset is 0.
        chunk: The bytes.
    """
    checksum = zlib.crc32(chunk, zlib.crc32(header))
    return b"".join((_FRAME.pack(message, offset, total, len(header), checksum), header, chunk))


def is_background(frame: bytes) -> bool:
    """Return whether a frame is of a background message."""
    return bool(_read_frame(frame)[0] & 1)


class Arrived(NamedTuple):
    """Is a bulk message that has arrived whole."""

    header: bytes
    body: bytearray


@dataclass(slots=True)
class _Unfinished:
    """Holds what has come of one message."""

    total: int
    header: bytes | None = None
    body: bytearray = field(default_factory=bytearray)
    ahead: dict[int, memoryview] = field(default_factory=dict)
    """Offset -> chunk, for chunks that came before those in front of them."""
    came: int = 0
    cost: int = 0
    """Bytes that it takes here, at most."""

    def take(self, offset: int, chunk: memoryview) -> None:
        """Put a chunk in its place; the body grows by what has come, never by what is claimed."""
        if offset < len(self.body) or offset in self.ahead:
            raise FrameError(f"the chunk at byte {offset} twice")
        self.came += len(chunk)
        if self.came > self.total:
            raise FrameError(f"{self.came} bytes of a message that has {self.total}")
        if offset > len(self.body):
            self.ahead[offset] = chunk
            return
        self.body += chunk
        while self.ahead:
            following = self.ahead.pop(len(self.body), None)
            if following is None:
                if min(self.ahead) < len(self.body):
                    raise FrameError(f"chunks that overlap at byte {min(self.ahead)}")
                return
            self.body += following


@dataclass(slots=True)
class _Lane:
    """Follows the messages of one kind, which are numbered from 0."""

    next: int = 0
    """All messages before this one are finished."""
    finished: set[int] = field(default_factory=set)
    unfinished: dict[int, _Unfinished] = field(default_factory=dict)

    def finish(self, number: int) -> None:
        """Forget a message that has been handed on, but for its number."""
        del self.unfinished[number]
        self.finished.add(number)
        while self.next in self.finished:
            self.finished.remove(self.next)
            self.next += 1


class Assembly:
    """Puts the frames of one peer together.

    Args:
        most: Bytes that messages which are not whole may take.
    """

    def __init__(self, most: int = BODY_BYTES) -> None:
        self._most, self._cost = most, 0
        self.received = 0
        """Bytes of all bodies so far."""
        self._lanes = (_Lane(), _Lane())

    def ack(self) -> Ack:
        """Return what has arrived."""
        return Ack(self.received, self._lanes[0].next, self._lanes[1].next)

    def take(self, frame: bytes) -> Arrived | None:
        """Take one frame; return the message that is whole with it.

        Raises:
            FrameError: It cannot follow what came before.
        """
        message, offset, total, header_bytes, checksum = _read_frame(frame)
        rest = memoryview(frame)[_FRAME.size :]
        chunk = rest[header_bytes:]
        if total > BODY_BYTES or offset + len(chunk) > total or (not chunk and total):
            raise FrameError(f"{len(chunk)} bytes at byte {offset} of {total}")
        if header_bytes and offset:
            raise FrameError(f"a header at byte {offset}")
        if zlib.crc32(rest) != checksum:
            raise FrameError("a frame whose checksum is wrong")
        lane, number = self._lanes[message & 1], message >> 1
        found = self._find(lane, number, total)
        if offset == 0 and found.header is not None:
            raise FrameError("the beginning of a message twice")
        found.cost += len(frame) + _FRAME_COST
        self._cost += len(frame) + _FRAME_COST
        if self._cost > self._most:
            raise FrameError(f"{self._cost} bytes of messages that are not whole; allowed are {self._most}")
        if offset == 0:
            found.header = bytes(rest[:header_bytes])
        if chunk:
            found.take(offset, chunk)
        self.received += len(chunk)
        if len(found.body) < total:
            return None
        lane.finish(number)
        self._cost -= found.cost
        return Arrived(found.header or b"", found.body)

    @staticmethod
    def _find(lane: _Lane, number: int, total: int) -> _Unfinished:
        if number < lane.next or number in lane.finished:
            raise FrameError(f"more of message {number}, which was whole")
        if number >= lane.next + UNFINISHED:
            raise FrameError(f"message {number} before message {lane.next} is whole; allowed are {UNFINISHED} at once")
        found = lane.unfinished.setdefault(number, _Unfinished(total))
        if found.total != total:
            raise FrameError(f"a message of {total} bytes that had {found.total} before")
        return found


def _read_frame(frame: bytes) -> tuple[int, int, int, int, int]:
    if len(frame) < _FRAME.size:
        raise FrameError(f"a frame of {len(frame)} bytes")
    message, offset, total, header_bytes, checksum = _FRAME.unpack_from(frame)
    if header_bytes > HEADER_BYTES or header_bytes > len(frame) - _FRAME.size:
        raise FrameError(f"a header of {header_bytes} bytes; allowed are {HEADER_BYTES}")
    return message, offset, total, header_bytes, checksum
