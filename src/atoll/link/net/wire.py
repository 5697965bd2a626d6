"""Packs messages between workers, an 80-byte header and a payload, and sends them through a process group.

`docs/wire.md` has the layout. A received header is compared field by field with what is due before anything in it is
used; nothing in it decides how much is read, allocated or run. Messages travel in chunks that share a connection.
Receives are posted before sends: gloo announces a receive on the connection that carries data the other way, so one
posted late waits behind that data, and the two directions take turns.
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
from atoll.core.outliers import Size
from atoll.link.base import Contribution, Member, RoundId

MAGIC: Final = b"ATOL"
VERSION: Final = 3
HEADER_BYTES: Final = 80
MAX_WEIGHT: Final = 1e18
"""Largest weight of a worker in a mean."""
CODECS: Final = {"fp64": 1, "fp32": 2, "bf16": 3, "fp16": 4, "int8": 5, "int4": 6, "e3m0": 7, "e2m1": 8, "lloyd4": 9}
"""Codec format -> number on the wire; numbers are never reused."""

_NAMES: Final = {number: name for name, number in CODECS.items()}
_LAYOUT: Final = struct.Struct("<4sHBBQIHHdddQQQII")
_LAST, _EMPTY = 0x40, 0x80  # flags beside the kind
assert _LAYOUT.size == HEADER_BYTES
CHUNK_BYTES = 1 << 19
"""Size of every send and receive: gloo aborts the process if more arrives than was asked for."""
TAGS = 1 << 30
"""Tags of messages are below this."""

_FOREVER = timedelta(days=36500)  # closing the connections ends a wait
_JOIN_S = 1.0  # for threads whose connections are closed; gloo holds one that has received a part of a chunk


class MessageKind(IntEnum):
    """Tells what a message carries."""

    WHOLE = 0
    """A member's payload."""
    PART = 1
    """The part of a member's payload that the receiver reduces."""
    MEAN = 2
    """The encoded mean of the part that the sender has reduced."""


class BadMessage(ValueError):  # noqa: N818 - not yet an error of the run
    """A message differs from what was due; the text continues "worker 3 ..."."""


@dataclass(frozen=True, slots=True)
class MessageSpec:
    """Describes a message as both ends know it before it is sent."""

    kind: MessageKind
    round_id: RoundId
    sender: int
    codec: str
    length: int
    """Bytes of the payload."""
    part: int = 0
    """Which part, in two shots."""

    @classmethod
    def whole(cls, round_id: RoundId, sender: int, reduction: Reduction) -> "MessageSpec":
        """Describe a member's whole payload."""
        return cls(MessageKind.WHOLE, round_id, sender, reduction.codec.format, reduction.payload_bytes)

    @classmethod
    def of_part(cls, round_id: RoundId, sender: int, reduction: Reduction, part: int, count: int) -> "MessageSpec":
        """Describe one part of a payload, for the member that reduces it."""
        return cls(MessageKind.PART, round_id, sender, reduction.codec.format, reduction.part_bytes(part, count), part)

    @classmethod
    def of_mean(cls, round_id: RoundId, reduction: Reduction, part: int, count: int, members: int) -> "MessageSpec":
        """Describe the mean of one part, from its reducer, whose last mean carries inner products too."""
        length = reduction.part_bytes(part, count) + (products_bytes(members) if part + members >= count else 0)
        return cls(MessageKind.MEAN, round_id, part % members, reduction.codec.for_mean.format, length, part)

    @property
    def message_bytes(self) -> int:
        """Bytes of header and payload."""
        return HEADER_BYTES + self.length


def pack(spec: MessageSpec, contribution: Contribution | None, message: Tensor | None = None) -> Tensor:
    """Pack a message [message_bytes], uint8 on the CPU.

    Args:
        spec: What the message is.
        contribution: What it carries; None packs zeros of the same size, so that posted receives stay valid.
        message: A buffer that already holds the payload in its place; None allocates one.
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
    """Unpack a message [message_bytes] uint8; None if its sender had nothing to contribute.

    Args:
        message: The message; the contribution shares its memory.
        due: What the message must be.
        found: The `checksum` of its payload, if it was computed while the message arrived.

    Raises:
        BadMessage: The message differs from what was due.
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
    """Return the bytes of the members' inner products in a last mean: fp64, each pair once."""
    return 8 * members * (members + 1) // 2


def _compare_rounds(sent: RoundId, due: RoundId) -> None:
    advice = ": all workers must make the same number of steps" if sent.last != due.last else ""
    if sent != due:
        raise BadMessage(f"sent round {sent} where {due} was due{advice}")


def _compare(what: str, sent: object, due: object) -> None:
    if sent != due:
        raise BadMessage(f"sent {what} {sent} where {due} was due")


def checksum(body: Tensor, so_far: int = 0) -> int:
    """Return the CRC-32 of uint8 on the CPU; `so_far` continues the checksum of preceding bytes."""
    return zlib.crc32(body.numpy().data, so_far)


class PeerError(Exception):
    """A message to or from `worker` was lost; the text continues "worker 3 ..."."""

    def __init__(self, worker: int, why: str, *, closed: bool = False) -> None:
        super().__init__(why)
        self.worker = worker
        self.closed = closed
        """Only the closed connection is known; the cause may lie with another worker."""

    @classmethod
    def gone(cls, worker: int) -> "PeerError":
        """Make the error for a worker that closed its connection."""
        return cls(worker, "closed its connection", closed=True)


class IncomingMessage:
    """Receives a message chunk by chunk; its sender must have the agreed `weight`."""

    def __init__(self, spec: MessageSpec, weight: float, buffer: Tensor, works: Iterable[Any]) -> None:
        self.spec = spec
        self._weight = weight
        self._buffer = buffer
        self._works = deque(works)  # gloo hangs when the same work is waited for twice
        self._received_bytes = 0
        self._checksum = 0

    @property
    def left_bytes(self) -> int:
        """Bytes not yet waited for."""
        return self.spec.message_bytes - self._received_bytes

    def advance(self) -> None:
        """Wait for the next chunk, and checksum it while others arrive."""
        _wait_all(self.spec.sender, [self._works.popleft()])
        end = min(self._received_bytes + CHUNK_BYTES, self.spec.message_bytes)
        payload = self._buffer[max(self._received_bytes, HEADER_BYTES) : end]
        self._checksum, self._received_bytes = checksum(payload, self._checksum), end

    def wait(self) -> Contribution | None:
        """Wait for the whole message and unpack it; None if its sender had nothing to contribute."""
        while self._works:
            self.advance()
        try:
            contribution = unpack(self._buffer[: self.spec.message_bytes], self.spec, self._checksum)
        except BadMessage as bad:
            raise PeerError(self.spec.sender, str(bad)) from bad
        weight = None if contribution is None else contribution.member.weight
        if self.spec.kind is not MessageKind.MEAN and weight not in (None, self._weight):
            why = f"sent a weight of {weight!r} where {self._weight!r} was agreed at the start"
            raise PeerError(self.spec.sender, why)
        return contribution


@dataclass(frozen=True, slots=True)
class OutgoingMessage:
    """Sends a message; keeps its memory until it has left."""

    receiver: int
    works: tuple[Any, ...]

    def wait(self) -> None:
        """Wait until all of it has left."""
        _wait_all(self.receiver, self.works)


def _wait_all(worker: int, works: Iterable[Any]) -> None:
    for work in works:
        try:
            work.wait(_FOREVER)
        except RuntimeError as fault:
            raise PeerError.gone(worker) from fault


class PeerConnections:
    """Exchanges messages with the other workers over one gloo process group; a tag names the round.

    Args:
        group: The process group, rank = worker.
        peers: The other workers.
        weights: Worker -> agreed weight in every mean.
    """

    def __init__(self, group: Any, peers: Sequence[int], weights: Mapping[int, float]) -> None:
        self._group = group
        self._peers = peers
        self._weights = weights
        self._threads: list[threading.Thread] = []

    def watch(self, lost: Callable[[PeerError], None]) -> None:
        """Call `lost` when a connection closes, also between rounds."""
        for peer in self._peers:
            # A receive that nothing is ever sent to ends with the connection; gloo has no other notification.
            watch = self._expect(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, TAGS)
            self.start(_watch, peer, watch, lost)

    def expect(self, spec: MessageSpec, tag: int, *, pinned: bool = False) -> IncomingMessage:
        """Post the receives of a message, into pinned memory if it goes on to a GPU."""
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
        """Run a function that waits for messages in a daemon thread."""
        thread = threading.Thread(target=run, args=arguments, name=f"atoll {run.__name__}", daemon=True)
        self._threads = [thread, *(other for other in self._threads if other.is_alive())]
        thread.start()

    def close(self) -> None:
        """Close all connections: waits here end, and the other workers notice."""
        group, self._group = self._group, None
        for peer in self._peers if group is not None else ():
            with suppress(RuntimeError):  # only a timeout closes a gloo group's connections
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, TAGS + 1).wait(timedelta(milliseconds=1))

    def end(self) -> None:
        """Close and join the threads: one left at interpreter exit can crash the process."""
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
