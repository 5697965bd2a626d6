"""Ten thousand broken messages: each is refused, or is the very message that was sent."""

import random
import tracemalloc
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.link.base import Contribution, Member, RoundId
from atoll.link.net.wire import CODECS, HEADER_BYTES, MAGIC, VERSION, BadMessage, MessageKind, MessageSpec, pack, unpack

BROKEN = 10_000


def envelopes(random: random.Random) -> MessageSpec:
    reduction = Reduction(Codec(random.choice(list(CODECS))), random.randrange(1, 400))
    at = RoundId(random.randrange(2**20), random.randrange(8), random.random() < 0.1)
    kind = random.choice(list(MessageKind))
    if kind is MessageKind.WHOLE:
        return MessageSpec.whole(at, random.randrange(4), reduction)
    if kind is MessageKind.PART:
        return MessageSpec.of_part(at, random.randrange(4), reduction, random.randrange(4), 4)
    return MessageSpec.of_mean(at, reduction, random.randrange(4), 4, 4)


def broken(message: bytearray, random: random.Random) -> bytearray:
    """A message with something wrong with it, if chance does not undo it."""
    how = random.randrange(7)
    if how == 0:
        return message[: random.randrange(len(message))]
    if how == 1:
        return message + random.randbytes(random.randrange(1, 100))
    if how == 2:
        return bytearray(random.randbytes(len(message)))
    if how == 3:
        for _ in range(random.randrange(1, 4)):
            message[random.randrange(len(message))] ^= 1 << random.randrange(8)
        return message
    # What a program that knows the layout could send: any fields at all, with the right magic and checksum.
    start, size = random.choice([(6, 1), (7, 1), (8, 8), (16, 4), (20, 2), (20, 4), (24, 8), (32, 8), (40, 8), (48, 8)])
    value = random.choice(
        [bytes(size), b"\xff" * size, random.randbytes(size), b"\xf0\x7f".rjust(size, b"\x00")[-size:]]
    )
    if how == 4:
        message[start : start + size] = value
    elif how == 5:
        message[6:60] = random.randbytes(54)
    else:
        message[:HEADER_BYTES] = MAGIC + VERSION.to_bytes(2, "little") + random.randbytes(HEADER_BYTES - 6)
    message[60:64] = zlib.crc32(message[:60]).to_bytes(4, "little")
    return message


def test_ten_thousand_broken_messages_are_refused_or_are_what_was_sent() -> None:
    chance = random.Random(0)
    refused = 0
    tracemalloc.start()
    for _ in range(BROKEN):
        due = envelopes(chance)
        payload = torch.frombuffer(bytearray(chance.randbytes(due.length) or b"\0"), dtype=torch.uint8)[: due.length]
        sent = Contribution(Member(due.sender, 1.5, chance.randrange(100), chance.randrange(2**64)), payload)
        message = broken(bytearray(pack(due, sent).numpy().tobytes()), chance)
        received = torch.frombuffer(message, dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        try:
            got = unpack(received, due)
        except BadMessage:
            refused += 1
            continue
        # Only what is not known beforehand may differ: where the sender stands, and whether it has anything to give.
        if got is not None:
            assert got.member.worker == due.sender and torch.equal(got.payload, payload)
            assert due.kind is MessageKind.MEAN or 0 < got.member.weight <= 1e18
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert refused > 0.7 * BROKEN
    assert most < 20_000_000  # lengths that are claimed allocate nothing


@given(st.binary(max_size=3 * HEADER_BYTES))
def test_any_bytes_at_all_are_refused(data: bytes) -> None:
    due = MessageSpec.whole(RoundId(1, 0), 1, Reduction(Codec("fp32"), 8))
    with pytest.raises(BadMessage):
        unpack(torch.tensor(list(data), dtype=torch.uint8), due)
