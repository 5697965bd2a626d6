"""What must hold for every codec and every vector."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec, nearest_limit
from atoll.core.flat import PIECE
from atoll.errors import ConfigError, NonFiniteError
from example_counts import examples
from oracle import codecs

PLAIN = ["fp64", "fp32", "bf16", "fp16"]
BLOCKS = ["int8", "int4", "e3m0", "e2m1", "lloyd4"]
BITS = {"fp64": 64, "fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4, "e3m0": 4, "e2m1": 4, "lloyd4": 4}


def vectors(magnitude: float = 1e30) -> st.SearchStrategy[Tensor]:
    """fp32 vectors of awkward lengths with values of every size, zeros and denormals included."""
    limit = float(np.float32(magnitude))
    values = st.floats(-limit, limit, width=32) | st.sampled_from(
        [0.0, -0.0, float(np.float32(1e-40)), 1.5, float(np.float32(2**0.5)), -3.0, 7.0]
    )
    return hnp.arrays(np.float32, st.integers(1, 3 * BLOCK), elements=values).map(torch.from_numpy)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.parametrize("name", PLAIN + BLOCKS)
@given(vector=vectors(6e4))
@examples(40)
def test_size_idempotence_and_symmetry(name: str, vector: Tensor) -> None:
    codec = Codec(name)
    payload = codec.encode(vector)
    assert payload.dtype == torch.uint8
    assert payload.numel() == codec.payload_bytes(vector.numel())
    once = codec.decode(payload, vector.numel())
    assert same_bits(codec.decode(codec.encode(once), vector.numel()), once)
    assert same_bits(codec.decode(codec.encode(-vector), vector.numel()) + 0.0, -once + 0.0)
    assert once[vector == 0].abs().sum() == 0


@pytest.mark.parametrize("name", BLOCKS)
@given(vector=vectors())
@examples(60)
def test_block_formats_round_as_defined(name: str, vector: Tensor) -> None:
    if name == "lloyd4":  # it ends earlier
        vector = vector.clamp(-2e16, 2e16)
    decoded = Codec(name).decode(Codec(name).encode(vector), vector.numel())
    np.testing.assert_array_equal(decoded.double().numpy(), codecs.round_trip(vector.numpy(), name))


@pytest.mark.parametrize("name", BLOCKS)
def test_block_formats_round_as_defined_on_gaussians_longer_than_a_piece(name: str) -> None:
    vector = torch.randn(PIECE + 3 * BLOCK + 17, generator=torch.Generator().manual_seed(1)) * 1e-4
    decoded = Codec(name).decode(Codec(name).encode(vector), vector.numel())
    np.testing.assert_array_equal(decoded.double().numpy(), codecs.round_trip(vector.numpy(), name))


@pytest.mark.parametrize(
    ("name", "payload"),
    [
        ("fp32", "0000803f000000bf00004040000000000000c0c0"),
        ("bf16", "803f00bf40400000c0c0"),
        ("fp16", "003c00b80042000000c6"),
        ("int8", "7b10f83000a0"),
        ("int4", "7f01030a"),
        ("e3m0", "82b4060f"),
        ("e2m1", "7f92050f"),
        ("lloyd4", "9792050f"),
    ],
)
def test_every_byte_is_as_documented(name: str, payload: str) -> None:
    """Worked out by hand from docs/wire.md; a change here is a change of the format."""
    assert bytes(Codec(name).encode(torch.tensor([1.0, -0.5, 3.0, 0.0, -6.0])).tolist()).hex() == payload


@pytest.mark.parametrize("name", PLAIN)
def test_plain_formats_are_the_dtype(name: str) -> None:
    dtype = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[name]
    vector = torch.randn(PIECE + 5, dtype=torch.float64)
    decoded = Codec(name).decode(Codec(name).encode(vector), vector.numel(), torch.float64)
    assert torch.equal(decoded, vector.to(dtype).double())


@pytest.mark.parametrize("name", PLAIN + BLOCKS)
@given(numel=st.integers(1, 5000))
@examples(20)
def test_bits_per_value(name: str, numel: int) -> None:
    values = BITS[name] * numel
    scales = 8 * -(-numel // BLOCK) if name in BLOCKS else 0
    assert 8 * Codec(name).payload_bytes(numel) == -(-(values) // 8) * 8 + scales


def test_e3m0_costs_at_most_4_13_bits() -> None:
    assert all(8 * Codec("e3m0").payload_bytes(n) / n <= 4.13 for n in (128, 1000, 10_000, 10_000_001))


@pytest.mark.parametrize(
    ("name", "least"), [("int8", 0.9999), ("e3m0", 0.98), ("e2m1", 0.99), ("int4", 0.98), ("lloyd4", 0.994)]
)
def test_direction_is_kept(name: str, least: float) -> None:
    vector = torch.randn(300_000, generator=torch.Generator().manual_seed(0)) * 3e-5
    decoded = Codec(name).decode(Codec(name).encode(vector), vector.numel())
    assert torch.nn.functional.cosine_similarity(vector.double(), decoded.double(), dim=0) >= least


@pytest.mark.parametrize("name", BLOCKS)
@given(vector=vectors(1e3), seed=st.integers(0, 2**40))
@examples(30)
def test_stochastic_rounding_is_repeatable_and_never_skips_a_level(name: str, vector: Tensor, seed: int) -> None:
    codec = Codec(name, stochastic=True)
    payload = codec.encode(vector, seed)
    assert torch.equal(payload, codec.encode(vector, seed))
    decoded = codec.decode(payload, vector.numel()).double().numpy()
    x = vector.double().numpy()
    levels = codecs.LEVELS[name]
    for start in range(0, len(x), BLOCK):
        peak, unit = np.abs(x[start : start + BLOCK]).max(), 2.0**-120
        while peak > levels[-1] * unit:
            unit *= 2
        if name == "lloyd4":  # also half as much again as a power of two, and never the highest level
            unit = next(u for b in range(1, 256) if peak < 64 * (u := (2.0 + b % 2) * 2.0 ** (b // 2 - 80)))
        grid = levels * unit
        for value, got in zip(np.abs(x[start : start + BLOCK]), np.abs(decoded[start : start + BLOCK]), strict=True):
            below, above = grid[grid <= value].max(), grid[grid >= value].min()
            assert got in (below, above)


@pytest.mark.parametrize("name", BLOCKS)
def test_stochastic_rounding_is_right_on_average(name: str) -> None:
    codec = Codec(name, stochastic=True)
    vector = torch.linspace(-1, 1, BLOCK)
    draws = torch.stack([codec.decode(codec.encode(vector, seed), BLOCK) for seed in range(4000)]).double()
    error = (draws.mean(0) - vector).abs()
    assert (error <= 5 * draws.std(0) / 4000**0.5 + 1e-7).all()


@pytest.mark.parametrize(
    ("name", "top"), [("int8", 127.0), ("int4", 7.0), ("e2m1", 6.0), ("e3m0", 1.0), ("lloyd4", 48.0)]
)
def test_stochastic_rounding_leaves_the_highest_level_alone(name: str, top: float) -> None:
    """In fp32, 127 + 0.99999997 is 128: one value in some million would wrap around."""
    vector, codec = torch.full((1 << 22,), top), Codec(name, stochastic=True)
    assert codec.decode(codec.encode(vector, 0), vector.numel()).unique().tolist() == [top]


def test_e2m1_rounds_right_next_to_every_halfway_point() -> None:
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0])
    below = torch.nextafter(halfway, torch.tensor(0.0))
    vector = torch.cat([below, halfway[:-1]])
    decoded = Codec("e2m1").decode(Codec("e2m1").encode(vector), vector.numel())
    assert decoded.tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**-20])
def test_e3m0_rounds_what_is_below_the_lowest_level_as_documented(scale: float) -> None:
    lowest_unit = scale == 2.0**-126
    for part, rounded in ((0.414, 0.0), (0.4143, float(lowest_unit)), (0.707, float(lowest_unit)), (0.7072, 1.0)):
        vector = torch.zeros(BLOCK)
        vector[0], vector[1] = part * scale, 2**6 * scale
        assert Codec("e3m0").decode(Codec("e3m0").encode(vector), BLOCK)[0] == rounded * scale


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", PLAIN + BLOCKS)
def test_nan_and_infinity_are_refused(name: str, bad: float) -> None:
    vector = torch.zeros(2 * BLOCK + 3)
    vector[-1] = bad
    with pytest.raises(NonFiniteError, match=f"a value is {bad}"):
        Codec(name).encode(vector)


@pytest.mark.parametrize(
    ("name", "value"),
    [("fp16", 1e6), ("fp32", 1e300), ("bf16", 1e300), ("e3m0", -1e300), ("int8", 2.0**127), ("lloyd4", 2.8e16)],
)
def test_values_too_large_for_the_format_are_refused(name: str, value: float) -> None:
    with pytest.raises(NonFiniteError, match="exceeds"):
        Codec(name).encode(torch.tensor([1.0, value], dtype=torch.float64))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_largest_and_smallest_floats_survive(name: str) -> None:
    largest = torch.tensor([2.7e16 if name == "lloyd4" else 1.7014117e38, 1.0, 1e-45])
    assert torch.isfinite(Codec(name).decode(Codec(name).encode(largest), 3)).all()
    assert not Codec(name).decode(Codec(name).encode(torch.tensor([1e-45])), 1).any()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"format": "fp8"},
            "codec must be one of fp64, fp32, .*, e3m0, e2m1, lloyd4, lloyd2, top64; got 'fp8'",
        ),
        ({"format": "bf16", "stochastic": True}, "'bf16' has no stochastic rounding"),
        ({"format": "lloyd2", "stochastic": True}, "'lloyd2' has no stochastic rounding"),
        ({"format": "fp32", "feedback": True}, "'fp32' loses nothing that feedback could return"),
        ({"format": "e3m0", "feedback": 1.5}, "feedback must be True, False or a number from 0 to 1, got 1.5"),
        ({"format": "e3m0", "feedback": float("nan")}, "feedback must be True, False or a number"),
        ({"format": "e3m0", "feedback": "yes"}, "feedback must be True, False or a number from 0 to 1, got 'yes'"),
        ({"format": "top64"}, r'needs feedback, .* use Codec\("top64", feedback=0.95\) with outer=atoll.SGD\(lr=1.0\)'),
        ({"format": "top64", "feedback": 0.9, "stochastic": True}, "'top64' has no stochastic rounding"),
    ],
)
def test_refusals(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Codec(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PLAIN + BLOCKS)
@given(numel=st.integers(1, 3 * BLOCK), at=st.integers(0, 3 * BLOCK - 1))
def test_the_largest_value_is_found_in_a_payload(name: str, numel: int, at: int) -> None:
    at = min(at, numel - 1)
    vector = torch.ones(numel)
    vector[at] = -1000.0
    found = Codec(name).largest(Codec(name).encode(vector), numel)
    if name in PLAIN:
        assert found == slice(at, at + 1)
    else:
        first = at // BLOCK * BLOCK
        assert found == slice(first, min(first + BLOCK, numel))


def test_formats_with_levels_say_up_to_where_they_round() -> None:
    assert [nearest_limit(name) for name in PLAIN] == [None] * len(PLAIN)
    limits = [nearest_limit(name) for name in BLOCKS]
    assert all(limit is not None and limit > 0 for limit in limits)
