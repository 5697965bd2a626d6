"""A message as bytes: what is sent arrives, and whatever else arrives is refused in words."""

import math
import struct
import zlib
from dataclasses import replace

import pytest
import torch

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.core.outliers import Size
from atoll.link.base import Contribution, Member, RoundId
from atoll.link.net import wire
from atoll.link.net.wire import CODECS, HEADER_BYTES, BadMessage, MessageKind, MessageSpec, pack, unpack

REDUCTION = Reduction(Codec("int8"), 300)
DUE = MessageSpec.whole(RoundId(12, 3), 2, REDUCTION)
SENT = Contribution(Member(2, 0.75, 7, 2**63 + 5), REDUCTION.codec.encode(torch.linspace(-1, 1, 300)))


def same(a: Contribution | None, b: Contribution | None) -> bool:
    if a is None or b is None:
        return a is b
    return a.member == b.member and torch.equal(a.payload, b.payload)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("last", [False, True])
def test_what_is_sealed_is_unsealed_for_every_codec_and_kind(name: str, last: bool) -> None:
    reduction, at = Reduction(Codec(name), 300), RoundId(2**40, 2**15, last)
    for due in (
        MessageSpec.whole(at, 65_535, reduction),
        MessageSpec.of_part(at, 1, reduction, 3, 4),
        MessageSpec.of_mean(at, reduction, 1, 8, 4),
        MessageSpec.of_mean(at, reduction, 5, 8, 4),
    ):
        payload = torch.randint(0, 256, (due.length,), dtype=torch.uint8)
        sent = Contribution(Member(due.sender, 1e18, 2**62, 2**64 - 1, Size(1e40, 0.5)), payload)
        assert same(unpack(pack(due, sent), due), sent)
        assert unpack(pack(due, None), due) is None
        assert pack(due, None).numel() == pack(due, sent).numel() == HEADER_BYTES + due.length


def test_the_header_has_the_bytes_that_are_documented() -> None:
    """The first of docs/wire.md: other programs may rely on them, and a change needs another version."""
    message = pack(DUE, SENT)
    header = message[:HEADER_BYTES].numpy().tobytes()
    assert header[:4] == b"ATOL"
    assert struct.unpack_from("<H", header, 4) == (wire.VERSION,)
    assert struct.unpack_from("<Q", header, 8) == (12,)
    assert header[-4:] == zlib.crc32(header[:-4]).to_bytes(4, "little")
    assert len(header) == 80
    assert torch.equal(message[HEADER_BYTES:], SENT.payload)


def test_codecs_on_the_wire_have_different_numbers_and_all_formats_have_one() -> None:
    assert len(set(CODECS.values())) == len(CODECS)
    for name in CODECS:
        Codec(name)


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (replace(DUE, sender=1), "sent worker 1 where 2 was due"),
        (replace(DUE, round_id=RoundId(13, 3)), "sent round step 13, fragment 3 where step 12, fragment 3 was due"),
        (replace(DUE, round_id=RoundId(12, 4)), "sent round step 12, fragment 4 where"),
        (
            replace(DUE, round_id=RoundId(12, 3, last=True)),
            "the last exchange where step 12, fragment 3 was due: all workers must make the same number of steps",
        ),
        (replace(DUE, kind=MessageKind.PART), "sent kind of message 1 where 0 was due"),
        (replace(DUE, codec="int4"), "sent codec int4 where int8 was due"),
        (replace(DUE, part=2), "sent part 2 where 0 was due"),
    ],
)
def test_a_message_that_is_not_due_is_refused_with_the_difference(other: MessageSpec, told: str) -> None:
    with pytest.raises(BadMessage, match=told):
        unpack(pack(other, SENT), DUE)


def test_another_length_than_is_due_is_refused() -> None:
    longer = MessageSpec.whole(DUE.round_id, 2, Reduction(Codec("int8"), 301))
    sent = Contribution(SENT.member, torch.zeros(longer.length, dtype=torch.uint8))
    with pytest.raises(BadMessage, match=f"payload bytes {longer.length} where {DUE.length} was due"):
        unpack(pack(longer, sent), DUE)


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, 1e19])
def test_a_weight_that_cannot_be_is_refused(weight: float) -> None:
    with pytest.raises(BadMessage, match="sent a weight of"):
        unpack(pack(DUE, replace(SENT, member=replace(SENT.member, weight=weight))), DUE)


@pytest.mark.parametrize("size", [Size(-1.0, 0.0), Size(math.nan, 0.0), Size(0.0, math.inf)])
def test_a_norm_that_cannot_be_is_refused(size: Size) -> None:
    with pytest.raises(BadMessage, match="sent a norm of"):
        unpack(pack(DUE, replace(SENT, member=replace(SENT.member, size=size))), DUE)


def test_every_flipped_bit_is_noticed() -> None:
    message = pack(DUE, SENT)
    for byte in range(message.numel()):
        for bit in (1, 128):
            broken = message.clone()
            broken[byte] ^= bit
            with pytest.raises(BadMessage):
                unpack(broken, DUE)


def test_every_truncation_is_noticed() -> None:
    message = pack(DUE, SENT)
    for size in range(message.numel()):
        with pytest.raises(BadMessage):
            unpack(message[:size], DUE)


def test_another_version_is_named_even_if_the_rest_of_its_header_is_different() -> None:
    message = pack(DUE, SENT)
    message[4:6] = torch.tensor([9, 0])
    message[20:60] = 0
    with pytest.raises(BadMessage, match=f"speaks version 9 of the wire format, this is {wire.VERSION}"):
        unpack(message, DUE)
