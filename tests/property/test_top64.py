"""top64, the codec that sends the largest values alone: its bytes, its rounding, and parts of its payloads."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.core.allreduce import Reduction, part_of
from atoll.core.codec import Codec
from atoll.core.flat import PIECE
from atoll.core.top64 import CHUNK, KEEP_ONE_IN
from atoll.errors import NonFiniteError
from example_counts import examples
from oracle import codecs

TOP = Codec("top64", feedback=0.95)
lengths = st.integers(1, 3 * CHUNK) | st.sampled_from([1, 63, 64, 65, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK])


def vector_of(numel: int, seed: int, kind: str = "bell") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 2.0 ** float(torch.randint(-60, 60, (1,), generator=generator))
    if kind == "few":  # fewer than are kept
        values *= torch.rand(numel, generator=generator) < 0.004
    if kind == "alike":  # ties
        values = values.sign() * torch.randint(0, 3, (numel,), generator=generator)
    if kind == "wild":
        values *= torch.exp(4 * torch.randn(numel, generator=generator))
    clamped: Tensor = values.clamp(-1e38, 1e38)
    return clamped


kinds = st.sampled_from(["bell", "few", "alike", "wild"])


def round_trip(vector: Tensor) -> Tensor:
    return TOP.decode(TOP.encode(vector), vector.numel())


@given(lengths, st.integers(0, 9999), kinds)
@examples(60)
def test_it_rounds_as_defined(numel: int, seed: int, kind: str) -> None:
    vector = vector_of(numel, seed, kind)
    decoded = round_trip(vector)
    np.testing.assert_array_equal(decoded.double().numpy(), codecs.top64(vector.numpy()))
    assert torch.equal(round_trip(decoded), decoded), "a decoded vector is encoded as it is"
    assert torch.equal(round_trip(-vector), -decoded)
    assert int((decoded != 0).sum()) <= -(-numel // KEEP_ONE_IN) and not decoded[vector == 0].any()


def test_it_rounds_as_defined_where_a_vector_is_longer_than_a_piece() -> None:
    vector = vector_of(PIECE + CHUNK + 77, 3)
    np.testing.assert_array_equal(round_trip(vector).double().numpy(), codecs.top64(vector.numpy()))


@pytest.mark.parametrize("scale", [1.7e38, 2.0**-110, 2.0**-112, 1e-40, 1e-45])
def test_the_largest_and_smallest_floats_survive(scale: float) -> None:
    vector = torch.tensor([1.0, 0.75, *[0.0] * 126]) * scale
    np.testing.assert_array_equal(round_trip(vector).double().numpy(), codecs.top64(vector.numpy()))


def test_every_byte_is_as_documented() -> None:
    """Worked out by hand from docs/wire.md; a change here is a change of the format."""
    vector = torch.zeros(CHUNK + 130)
    vector[5], vector[300], vector[4095] = 1.0, -3.0, 0.5
    vector[CHUNK + 1], vector[CHUNK + 128] = -2.0, 2.0
    # Chunk 0: the largest, 3, has exponent 128; in 128ths of 2 the magnitudes are 64, 192 and 32, their mean is 96: so
    # levels 48 and 192. Three places, that of the largest 61 times more. Chunk 1 keeps three of 130: 128 and 128.
    heads = bytes([128, 48, 192, 128, 128, 128])
    low = bytes([5, *[300 & 255] * 62, 4095 & 255, 1, 1, 128])
    high = bytes([0x10, *[0x11] * 30, 0xF1, 0x00, 0x00])
    codes = bytes([0b11_11_11_00, *[0b11_11_11_11] * 14, 0b00_11_11_11, 0b00_01_11_11])
    assert bytes(TOP.encode(vector).tolist()) == heads + low + high + codes


def test_it_takes_less_than_a_quarter_of_a_bit() -> None:
    assert 8 * TOP.payload_bytes(10_000_000) / 10_000_000 < 0.225
    assert 20 * TOP.payload_bytes(10_000_000) > Codec("e3m0").payload_bytes(10_000_000) > 18 * TOP.payload_bytes(10**7)


@given(lengths, st.integers(1, 9), st.integers(0, 999))
@examples(40)
def test_a_cut_payload_is_the_payload_of_the_cut_and_joins_to_the_whole(numel: int, count: int, seed: int) -> None:
    reduction, vector = Reduction(TOP, numel), vector_of(numel, seed)
    payload = TOP.encode(vector)
    cuts = [reduction.cut(payload, part, count) for part in range(count)]
    places = [part_of(numel, part, count, CHUNK) for part in range(count)]
    assert [place for cut in places for place in range(cut.start, cut.stop)] == list(range(numel))
    for part, (cut, place) in enumerate(zip(cuts, places, strict=True)):
        assert torch.equal(cut, TOP.encode(vector[place])) and cut.numel() == reduction.part_bytes(part, count)
    assert torch.equal(reduction.joined(cuts), payload)
    assert sum(reduction.part_bytes(part, count) for part in range(count)) == reduction.payload_bytes


@given(lengths, st.integers(0, 999))
def test_the_largest_value_is_found_in_a_payload(numel: int, seed: int) -> None:
    vector, at = torch.ones(numel), seed * 37 % numel
    vector[at] = -1000.0
    found = TOP.largest(TOP.encode(vector), numel)
    assert found.start <= at < found.stop <= numel and found.start % CHUNK == 0


@pytest.mark.parametrize(("bad", "told"), [(float("nan"), "a value is nan"), (-torch.inf, "-inf"), (2e38, "exceeds")])
def test_what_cannot_be_sent_is_refused(bad: float, told: str) -> None:
    vector = torch.zeros(CHUNK + 3)
    vector[-1] = bad
    with pytest.raises(NonFiniteError, match=told):
        TOP.encode(vector)
