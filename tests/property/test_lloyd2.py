"""lloyd2, the codec with four levels: its bytes, its rounding and its unit."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.core.flat import PIECE
from atoll.errors import NonFiniteError
from example_counts import examples
from oracle import codecs

TWO = Codec("lloyd2")
SPECIAL = [0.0, -0.0, 1.25, 1.875, 3.0, 6.5, -10.0, 2.0**-90, 2.0**-70]
values = st.floats(-(2.0**51), 2.0**51, width=32) | st.sampled_from(SPECIAL)
vectors = hnp.arrays(np.float32, st.integers(1, 3 * BLOCK), elements=values).map(torch.from_numpy)


def round_trip(vector: Tensor) -> Tensor:
    return TWO.decode(TWO.encode(vector), vector.numel())


@given(vectors, st.integers(-60, 40))
@examples(80)
def test_it_rounds_as_defined(vector: Tensor, exponent: int) -> None:
    vector = (vector * 2.0**exponent).clamp(-2e15, 2e15)
    decoded = round_trip(vector)
    np.testing.assert_array_equal(decoded.double().numpy(), codecs.lloyd2(vector.numpy()))
    assert TWO.encode(vector).numel() == TWO.payload_bytes(vector.numel())
    assert torch.equal(round_trip(decoded), decoded), "a decoded vector is encoded as it is"
    assert torch.equal(round_trip(-vector), -decoded)


@given(st.integers(1, 5 * BLOCK), st.integers(0, 999))
@examples(60)
def test_bell_shaped_blocks_of_any_length_round_as_defined(numel: int, seed: int) -> None:
    vector = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 2.0 ** (seed % 41 - 20)
    np.testing.assert_array_equal(round_trip(vector).double().numpy(), codecs.lloyd2(vector.numpy()))


def test_a_vector_longer_than_a_piece_keeps_its_direction() -> None:
    vector = torch.randn(PIECE + 3 * BLOCK + 17, generator=torch.Generator().manual_seed(1)) * 1e-4
    decoded = round_trip(vector)
    np.testing.assert_array_equal(decoded.double().numpy(), codecs.lloyd2(vector.numpy()))
    assert torch.cosine_similarity(vector.double(), decoded.double(), dim=0) > 0.936


def test_every_byte_is_as_documented() -> None:
    """Worked out by hand from docs/wire.md; a change here is a change of the format."""
    # 10 units are above 6 from a unit of 0.75 on, byte 157, where the squared errors add up to 12.5. In smaller ones
    # they add up to 6.75 (0.5, byte 156), 7.3, 13.2 and 18.8. In 0.5 the values are 1.5, -1.5, 1.5, 1.5 and -5.
    assert bytes(TWO.encode(torch.tensor([1.0, -0.5, 3.0, 0.0, -6.0])).tolist()).hex() == "9c0803"


def test_zeros_stay_zeros() -> None:
    vector = torch.zeros(2 * BLOCK + 5)
    vector[BLOCK] = 1.0
    decoded = round_trip(vector)
    assert not decoded[:BLOCK].any() and not decoded[2 * BLOCK :].any() and decoded[BLOCK : 2 * BLOCK].all()


@pytest.mark.parametrize(("bad", "told"), [(float("nan"), "a value is nan"), (-torch.inf, "-inf"), (4.3e15, "exceeds")])
def test_what_cannot_be_sent_is_refused(bad: float, told: str) -> None:
    vector = torch.zeros(BLOCK + 3)
    vector[-1] = bad
    with pytest.raises(NonFiniteError, match=told):
        TWO.encode(vector)
