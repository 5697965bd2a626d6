"""A message as bytes: a header of 80 that says what follows and proves it, then a payload.

`docs/wire.md` has the layout. What comes from the network is compared with what is due, field by field, before any of
it is used; nothing in it decides how much is read, allocated or run.
"""

import math
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import torch
from torch import Tensor

from atoll.core.allreduce import Cargo
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


class Kind(IntEnum):
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
class Envelope:
    """What a message is, as both ends know it before it is sent."""

    kind: Kind
    round_id: RoundId
    sender: int
    codec: str
    length: int
    """Bytes of the payload."""
    part: int = 0
    """Which one, in two shots."""

    @classmethod
    def whole(cls, round_id: RoundId, sender: int, cargo: Cargo) -> "Envelope":
        """Of a member's payload."""
        return cls(Kind.WHOLE, round_id, sender, cargo.codec.format, cargo.payload_bytes)

    @classmethod
    def of_part(cls, round_id: RoundId, sender: int, cargo: Cargo, part: int, count: int) -> "Envelope":
        """Of one part of a payload, for the member that reduces it."""
        return cls(Kind.PART, round_id, sender, cargo.codec.format, cargo.part_bytes(part, count), part)

    @classmethod
    def of_mean(cls, round_id: RoundId, cargo: Cargo, part: int, count: int, members: int) -> "Envelope":
        """Of the mean of one part, from the member that has reduced it; its last one brings inner products too."""
        length = cargo.part_bytes(part, count) + (products_bytes(members) if part + members >= count else 0)
        return cls(Kind.MEAN, round_id, part % members, cargo.codec.for_mean.format, length, part)

    @property
    def message_bytes(self) -> int:
        """Header and payload."""
        return HEADER_BYTES + self.length


def seal(envelope: Envelope, contribution: Contribution | None, message: Tensor | None = None) -> Tensor:
    """The message [message_bytes] uint8, on the CPU; None takes as many bytes, and says that they mean nothing.

    A message of the same size whatever happened keeps the receives that were posted for it valid. If `message` is
    given, the payload is already in its place there.
    """
    if message is None:
        message = torch.empty(envelope.message_bytes, dtype=torch.uint8, device="cpu")
        if contribution is not None:
            message[HEADER_BYTES:].copy_(contribution.payload)
    body, flags = message[HEADER_BYTES:], int(envelope.kind) | (_LAST if envelope.round_id.last else 0)
    member = Member(envelope.sender, 0.0, 0, 0)
    if contribution is None:
        flags |= _EMPTY
        body.zero_()
    else:
        member = contribution.member
    fields = (
        *(MAGIC, VERSION, CODECS[envelope.codec], flags),
        *(envelope.round_id.step, envelope.round_id.fragment, envelope.sender, envelope.part),
        *(member.weight, *member.size, member.anchor_version, member.anchor_fingerprint),
        *(envelope.length, checksum(body)),
    )
    header = bytearray(_LAYOUT.pack(*fields, 0))
    header[-4:] = zlib.crc32(header[:-4]).to_bytes(4, "little")
    message[:HEADER_BYTES] = torch.frombuffer(header, dtype=torch.uint8)
    return message


def unseal(message: Tensor, due: Envelope, found: int | None = None) -> Contribution | None:
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
    if due.kind is not Kind.MEAN and not (math.isfinite(weight) and 0 < weight <= MAX_WEIGHT):
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
