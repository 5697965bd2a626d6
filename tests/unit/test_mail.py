"""Messages that arrive in chunks: whole, checked on the way, and blamed on their sender."""

from datetime import timedelta

import pytest
import torch

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.link.base import Contribution, Member, RoundId
from atoll.link.net.wire import CHUNK_BYTES, HEADER_BYTES, IncomingMessage, MessageSpec, PeerError, pack

REDUCTION = Reduction(Codec("fp32"), 300_000)
ENVELOPE = MessageSpec.whole(RoundId(7, 2), 3, REDUCTION)


class Work:
    """What a process group gives for one receive; it may end with the connection."""

    def __init__(self, closed: bool = False) -> None:
        self._closed = closed

    def wait(self, within: timedelta) -> None:
        if self._closed:
            raise RuntimeError("Connection closed by peer")


def arriving(message: torch.Tensor, *works: Work) -> IncomingMessage:
    buffer = torch.zeros(len(works) * CHUNK_BYTES, dtype=torch.uint8)
    buffer[: message.numel()] = message
    return IncomingMessage(ENVELOPE, 2.5, buffer, works)


def sealed() -> tuple[Contribution, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    payload = torch.randint(256, (REDUCTION.payload_bytes,), dtype=torch.uint8, generator=generator)
    sent = Contribution(Member(3, 2.5, 4, 99), payload)
    return sent, pack(ENVELOPE, sent)


def test_a_message_of_several_chunks_is_whole_and_good() -> None:
    sent, message = sealed()
    incoming = arriving(message, Work(), Work(), Work())
    assert incoming.left_bytes == HEADER_BYTES + REDUCTION.payload_bytes > 2 * CHUNK_BYTES
    incoming.advance()
    assert incoming.left_bytes == message.numel() - CHUNK_BYTES
    came = incoming.wait()
    assert came is not None and came.member == sent.member and torch.equal(came.payload, sent.payload)
    assert incoming.left_bytes == 0


@pytest.mark.parametrize("place", [HEADER_BYTES, CHUNK_BYTES - 1, CHUNK_BYTES, -1])
def test_damage_in_any_chunk_is_its_senders(place: int) -> None:
    _, message = sealed()
    message[place] ^= 1
    with pytest.raises(PeerError, match="damaged on the way") as lost:
        arriving(message, Work(), Work(), Work()).wait()
    assert lost.value.worker == 3 and not lost.value.closed


def test_a_connection_that_closes_in_the_middle_is_its_senders() -> None:
    _, message = sealed()
    incoming = arriving(message, Work(), Work(closed=True), Work())
    with pytest.raises(PeerError, match="closed its connection") as lost:
        incoming.wait()
    assert lost.value.worker == 3 and lost.value.closed
