"""Messages between workers: a header of 80 bytes that says what follows and proves it, then a payload.

`docs/wire.md` has the layout. What comes from the network is compared with what is due, field by field, before any of
it is used; nothing in it decides how much is read, allocated or run. Messages travel through a process group, in chunks
that share a connection. Receives are posted before sends: gloo announces a receive on the same connection that carries
data the other way, so one that is posted late waits behind it, and the two directions take turns.
"""

import math
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import IntEnum
from typing import Any, Final

import torch
from torch import Tensor

from atoll.core.allreduce import Reduction
from atoll.core.guard import Size
from atoll.link.base import Contribution, Member, RoundId

MAGIC: Final = b"ATOL"
VERSION: Final = 3
HEADER_BYTES: Final = 80
MAX_WEIGHT: Final = 1e18
"""Of a worker in a mean."""
CODECS: Final = {"fp64": 1, "fp32": 2, "bf16": 3, "fp16": 4, "int8": 5, "int4": 6, "e3m0": 7, "e2m1": 8, "lloyd4": 9}
"""Format -> its number on the wire; numbers are never reused."""

_NAMES: Final = {number: name for name, number in CODECS.items()}
_LAYOUT: Final = struct.Struct("<4sHBBQIHHdddQQQII")
_LAST, _EMPTY = 0x40, 0x80  # flags beside the kind
assert _LAYOUT.size == HEADER_BYTES
CHUNK_BYTES = 1 << 19
"""Of one send; also of every receive, for gloo ends the process if more comes than was asked for."""
TAGS = 1 << 30
"""Tags of messages are below."""

_FOREVER = timedelta(days=36500)  # who waits is let go by closing the connections
_JOIN_S = 1.0  # for all threads whose connections are closed; gloo lets none go that had received a part of a chunk


class MessageKind(IntEnum):
    """What a message carries."""

    WHOLE = 0
    """A member's payload."""
    PART = 1
    """The part of a member's payload that the receiver reduces."""
    MEAN = 2
    """The encoded mean of the part that the sender has reduced."""


class BadMessage(ValueError):  # noqa: N818 - it is a message, not yet an error of the run
    """What arrived is not what was due, in words that follow "worker 3"."""


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """What a message is, as both ends know it before it is sent."""

    kind: MessageKind
    round_id: RoundId
    sender: int
    codec: str
    length: int
    """Bytes of the payload."""
    part: int = 0
    """Which one, in two shots."""

    @classmethod
    def whole(cls, round_id: RoundId, sender: int, reduction: Reduction) -> "MessageSpec":
        """Of a member's payload."""
        return cls(MessageKind.WHOLE, round_id, sender, reduction.codec.format, reduction.payload_bytes)

    @classmethod
    def of_part(cls, round_id: RoundId, sender: int, reduction: Reduction, part: int, count: int) -> "MessageSpec":
        """Of one part of a payload, for the member that reduces it."""
        return cls(MessageKind.PART, round_id, sender, reduction.codec.format, reduction.part_bytes(part, count), part)

    @classmethod
    def of_mean(cls, round_id: RoundId, reduction: Reduction, part: int, count: int, members: int) -> "MessageSpec":
        """Of the mean of one part, from the member that has reduced it; its last one brings inner products too."""
        length = reduction.part_bytes(part, count) + (products_bytes(members) if part + members >= count else 0)
        return cls(MessageKind.MEAN, round_id, part % members, reduction.codec.for_mean.format, length, part)

    @property
    def message_bytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.length


def pack(spec: MessageSpec, contribution: Contribution | None, message: Tensor | None = None) -> Tensor:
    """The message [message_bytes] uint8, on the CPU; None takes as many bytes, and says that they mean nothing.

    A message of the same size whatever happened keeps the receives that were posted for it valid. If `message` is
    given, the payload is already in its place there.
    """
    if message is None:
        message = torch.empty(spec.message_bytes, dtype=torch.uint8, device="cpu")
        if contribution is not None:
            message[HEADER_BYTES:].copy_(contribution.payload)
    body, flags = message[HEADER_BYTES:], int(spec.kind) | (_LAST if spec.round_id.last else 0)
    member = Member(spec.sender, 0.0, 0, 0)
    if contribution is None:
        flags |= _EMPTY
        body.zero_()
    else:
        member = contribution.member
    fields = (
        *(MAGIC, VERSION, CODECS[spec.codec], flags),
        *(spec.round_id.step, spec.round_id.fragment, spec.sender, spec.part),
        *(member.weight, *member.size, member.anchor_version, member.anchor_fingerprint),
        *(spec.length, checksum(body)),
    )
    header = bytearray(_LAYOUT.pack(*fields, 0))
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    message[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
    return message


def unpack(message: Tensor, due: MessageSpec, found: int | None = None) -> Contribution | None:
    """What a message [message_bytes] uint8 carries, sharing its memory; None if its sender had nothing to give.

    `found` is the `checksum` of its payload, if that was taken while it arrived. BadMessage says how it differs from
    what was due.
    """
    header = message[:HEADER_BYTES].numpy().tobytes()
    if len(header) < HEADER_BYTES or header[:4] != MAGIC:
        raise BadMessage("sent something that is not a message of atoll")
    (_, version, codec, flags, step, fragment, sender, part, *standing, length, proof, own) = _LAYOUT.unpack(header)
    if version != VERSION:
        raise BadMessage(f"speaks version {version} of the wire format, this is {VERSION}: use one atoll on all")
    if zlib.crc32(header[:-4]) != own:
        raise BadMessage("sent a header that was damaged on the way: its checksum is wrong")
    _compare("worker", sender, due.sender)
    _compare_rounds(RoundId(step, fragment, bool(flags & _LAST)), due.round_id)
    _compare("kind of message", flags & ~(_LAST | _EMPTY), int(due.kind))
    _compare("part", part, due.part)
    _compare("codec", _NAMES.get(codec, codec), due.codec)
    _compare("payload bytes", length, due.length)
    body = message[HEADER_BYTES:]
    if body.numel() != due.length or (checksum(body) if found is None else found) != proof:
        raise BadMessage("sent a payload that was damaged on the way: its checksum is wrong")
    if flags & _EMPTY:
        return None
    weight, norm, usual, anchor_version, anchor_fingerprint = standing
    if due.kind is not MessageKind.MEAN and not (math.isfinite(weight) and 0 < weight <= MAX_WEIGHT):
        raise BadMessage(f"sent a weight of {weight}")
    if not all(math.isfinite(size) and size >= 0 for size in (norm, usual)):
        raise BadMessage(f"sent a norm of {norm} where {usual} is usual")
    return Contribution(Member(sender, weight, anchor_version, anchor_fingerprint, Size(norm, usual)), body)


def products_bytes(members: int) -> int:
    """Size of the inner products of the members' deltas in the last mean of a member: fp64, each pair once."""
    return 8 * members * (members + 1) // 2


def _compare_rounds(sent: RoundId, due: RoundId) -> None:
    advice = ": all workers must make the same number of steps" if sent.last != due.last else ""
    if sent != due:
        raise BadMessage(f"sent round {sent} where {due} was due{advice}")


def _compare(what: str, sent: object, due: object) -> None:
    if sent != due:
        raise BadMessage(f"sent {what} {sent} where {due} was due")


def checksum(body: Tensor, so_far: int = 0) -> int:
    """CRC-32 of bytes, uint8 on the CPU; of those that follow others, with what was found so far."""
    return zlib.crc32(body.numpy().data, so_far)


class PeerError(Exception):
    """A message that did not come or could not be sent: from or to whom, and in words that follow "worker 3"."""

    def __init__(self, worker: int, why: str, *, closed: bool = False) -> None:
        super().__init__(why)
        self.worker = worker
        self.closed = closed
        """All that is known is that it has closed the connection, which may have reasons that lie elsewhere."""

    @classmethod
    def gone(cls, worker: int) -> "PeerError":
        """Of a worker that has closed its connection."""
        return cls(worker, "closed its connection", closed=True)


class IncomingMessage:
    """A message that is due, chunk by chunk; its sender counts with `weight`, as all have agreed."""

    def __init__(self, spec: MessageSpec, weight: float, buffer: Tensor, works: Iterable[Any]) -> None:
        self.spec = spec
        self._weight = weight
        self._buffer = buffer
        self._works = deque(works)  # gloo waits for ever when it is asked twice about the same one
        self._here_bytes = 0
        self._checksum = 0

    @property
    def left_bytes(self) -> int:
        """What has not been waited for."""
        return self.spec.message_bytes - self._here_bytes

    def advance(self) -> None:
        """Wait for the next chunk, and take its checksum while others arrive."""
        _settle(self.spec.sender, [self._works.popleft()])
        end = min(self._here_bytes + CHUNK_BYTES, self.spec.message_bytes)
        payload = self._buffer[max(self._here_bytes, HEADER_BYTES) : end]
        self._checksum, self._here_bytes = checksum(payload, self._checksum), end

    def wait(self) -> Contribution | None:
        """What it brings, or None if its sender had nothing."""
        while self._works:
            self.advance()
        try:
            brought = unpack(self._buffer[: self.spec.message_bytes], self.spec, self._checksum)
        except BadMessage as bad:
            raise PeerError(self.spec.sender, str(bad)) from bad
        if brought is not None and self.spec.kind is not MessageKind.MEAN and brought.member.weight != self._weight:
            why = f"sent a weight of {brought.member.weight!r} where {self._weight!r} was agreed at the start"
            raise PeerError(self.spec.sender, why)
        return brought


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """A message on its way."""

    receiver: int
    works: tuple[Any, ...]

    def wait(self) -> None:
        """Until all of it has left; it keeps the message's memory."""
        _settle(self.receiver, self.works)


def _settle(worker: int, works: Iterable[Any]) -> None:
    for work in works:
        try:
            work.wait(_FOREVER)
        except RuntimeError as fault:
            raise PeerError.gone(worker) from fault


class PeerConnections:
    """Messages to and from the others through one process group; `tag` tells those of different rounds apart.

    `weights` are those of all workers in every mean, as they were agreed on.
    """

    def __init__(self, group: Any, peers: Sequence[int], weights: Mapping[int, float]) -> None:
        self._group = group
        self._peers = peers
        self._weights = weights
        self._threads: list[threading.Thread] = []

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """Let `lost` be told when a connection closes, also between rounds."""
        for peer in self._peers:
            # Nothing is ever sent there, so it ends with the connection; gloo tells nobody who waits for nothing.
            watch = self._expect(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, TAGS)
            self.start(_watch, peer, watch, lost)

    def expect(self, spec: MessageSpec, tag: int, *, pinned: bool = False) -> IncomingMessage:
        """Post the receives of a message; into pinned memory, if it goes on to a GPU."""
        chunks = -(-spec.message_bytes // CHUNK_BYTES)
        buffer = torch.empty(chunks * CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        works = [self._expect(chunk, spec.sender, tag) for chunk in buffer.split(CHUNK_BYTES)]
        return IncomingMessage(spec, self._weights[spec.sender], buffer, works)

    def send(self, message: Tensor, receiver: int, tag: int) -> OutgoingMessage:
        """Start sending a message."""
        group = self._open(receiver)
        try:
            return OutgoingMessage(
                receiver, tuple(group.send([chunk], receiver, tag) for chunk in message.split(CHUNK_BYTES))
            )
        except RuntimeError as fault:
            raise PeerError.gone(receiver) from fault

    def start(self, run: Callable[..., None], *arguments: Any) -> None:
        """Begin what waits for messages, in a thread."""
        thread = threading.Thread(target=run, args=arguments, name=f"atoll {run.__name__}", daemon=True)
        self._threads = [thread, *(other for other in self._threads if other.is_alive())]
        thread.start()

    def close(self) -> None:
        """Close all connections: whoever waits here is let go, and the others notice."""
        group, self._group = self._group, None
        for peer in self._peers if group is not None else ():
            with suppress(RuntimeError):  # a wait that runs out closes all connections of a group; nothing else does
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, TAGS + 1).wait(timedelta(milliseconds=1))

    def end(self) -> None:
        """Close, and see the threads to their ends: one that is left when Python ends can take the process down."""
        self.close()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _expect(self, buffer: Tensor, sender: int, tag: int) -> Any:
        try:
            return self._open(sender).recv([buffer], sender, tag)
        except RuntimeError as fault:
            raise PeerError.gone(sender) from fault

    def _open(self, peer: int) -> Any:
        if self._group is None:
            raise PeerError.gone(peer)
        return self._group


def _watch(peer: int, work: Any, lost: Callable[[PeerError], None]) -> None:
    with suppress(RuntimeError):
        work.wait(_FOREVER)
    lost(PeerError.gone(peer))
