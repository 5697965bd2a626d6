"""Parts of vectors and of payloads, and the mean that comes back in two shots."""

from collections.abc import Sequence
from fractions import Fraction
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from torch import Tensor

from atoll.core import allreduce as allreduce_module
from atoll.core import allreduce as shots_module
from atoll.core.allreduce import MOST_PARTS_EACH, PART_BYTES, Reduction, mean_between, part_of, sent_bytes, shots
from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.core.flat import PIECE
from atoll.core.outer_step import weighted_mean
from atoll.errors import ConfigError
from example_counts import examples

PLAIN = ["fp64", "fp32", "bf16", "fp16"]
BLOCKS = ["int8", "int4", "e3m0", "e2m1", "lloyd4"]
FORMATS = PLAIN + BLOCKS
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}

lengths = st.integers(0, 9 * BLOCK + 5) | st.sampled_from([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK])
members = st.integers(1, 9)


def parts(numel: int, count: int) -> list[slice]:
    return [part_of(numel, part, count) for part in range(count)]


def gaussian(numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Blocks of very different sizes, so that their units differ."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randint(-20, 10, (-(-numel // BLOCK),), generator=generator).repeat_interleave(BLOCK)[:numel]
    return torch.randn(numel, generator=generator, dtype=dtype) * 2.0**scales


def mean_by_parts(reduction: Reduction, payloads: list[Tensor], weights: list[float], count: int) -> Tensor:
    """As members that have a part each find it."""
    cuts = [[reduction.cut(payload, part, count) for payload in payloads] for part in range(count)]
    return reduction.joined([reduction.reduced(cut, weights, part, count) for part, cut in enumerate(cuts)])


def mean_of(reduction: Reduction, payloads: Sequence[Tensor], weights: Sequence[float], members: int) -> Tensor:
    """As so many members find it, none of whom keeps anything."""
    return mean_between(dict.fromkeys(range(members), reduction), payloads, weights)


def encoded_mean(reduction: Reduction, payloads: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Straight from the definition, with no parts at all."""
    decoded = [reduction.codec.decode(payload, reduction.numel, reduction.dtype) for payload in payloads]
    return reduction.codec.for_mean.encode(weighted_mean(decoded, weights), reduction.seed)


# ---------------------------------------------------------------------- parts


@given(lengths, members)
def test_parts_cover_the_vector_once_in_order_and_begin_on_block_boundaries(numel: int, count: int) -> None:
    cuts = parts(numel, count)
    assert len(cuts) == count
    assert [place for cut in cuts for place in range(cut.start, cut.stop)] == list(range(numel))
    assert all(cut.start % BLOCK == 0 for cut in cuts if cut.start < cut.stop)


@given(st.integers(0, 10**12), members)
def test_parts_are_as_equal_as_whole_blocks_allow(numel: int, count: int) -> None:
    blocks = [-(-(cut.stop - cut.start) // BLOCK) for cut in parts(numel, count)]
    assert max(blocks) - min(blocks) <= 1
    assert sum(blocks) == -(-numel // BLOCK)


def test_a_vector_of_fewer_blocks_than_members_leaves_some_with_nothing() -> None:
    assert parts(0, 4) == [slice(0, 0)] * 4
    assert parts(5, 4) == [slice(0, 0)] * 3 + [slice(0, 5)]
    assert parts(BLOCK + 1, 5) == [slice(0, 0)] * 2 + [slice(0, BLOCK)] + [slice(BLOCK, BLOCK)] + [
        slice(BLOCK, BLOCK + 1)
    ]


@given(st.integers(0, 10**12), members)
def test_members_have_equally_many_parts_and_several_only_where_they_are_large(numel: int, count: int) -> None:
    reduction = Reduction(Codec("int8"), numel)
    each, left = divmod(reduction.part_count(count), count)
    assert left == 0 and 1 <= each <= MOST_PARTS_EACH
    assert each == 1 or reduction.payload_bytes >= each * count * PART_BYTES
    assert each == MOST_PARTS_EACH or reduction.payload_bytes < (each + 1) * count * PART_BYTES


# ---------------------------------------------------------------------- payloads of parts


@pytest.mark.parametrize("name", FORMATS)
@given(numel=lengths, count=members, seed=st.integers(0, 99))
@examples(40)
def test_a_cut_payload_is_the_payload_of_the_cut_and_joins_to_the_whole(
    name: str, numel: int, count: int, seed: int
) -> None:
    reduction, vector = Reduction(Codec(name), numel), gaussian(numel, seed)
    payload = reduction.codec.encode(vector)
    cuts = [reduction.cut(payload, part, count) for part in range(count)]
    for part, (cut, place) in enumerate(zip(cuts, parts(numel, count), strict=True)):
        assert torch.equal(cut, reduction.codec.encode(vector[place]))
        assert cut.numel() == reduction.part_bytes(part, count)
    assert torch.equal(reduction.joined(cuts), payload)


@pytest.mark.parametrize("name", BLOCKS)
@given(numel=lengths, count=members, seed=st.integers(0, 99))
@examples(20)
def test_what_was_rounded_at_random_can_be_cut_and_joined_too(name: str, numel: int, count: int, seed: int) -> None:
    reduction, vector = Reduction(Codec(name, stochastic=True), numel), gaussian(numel, seed)
    payload = reduction.codec.encode(vector, seed)
    cuts = [reduction.cut(payload, part, count) for part in range(count)]
    decoded = [
        reduction.codec.decode(cut, place.stop - place.start)
        for cut, place in zip(cuts, parts(numel, count), strict=True)
    ]
    assert torch.equal(torch.cat(decoded), reduction.codec.decode(payload, numel))
    assert torch.equal(reduction.joined(cuts), payload)


@pytest.mark.parametrize("name", FORMATS)
@given(numel=st.integers(0, 10**10), count=members)
@examples(40)
def test_the_bytes_of_all_parts_are_those_of_the_payload(name: str, numel: int, count: int) -> None:
    reduction = Reduction(Codec(name), numel)
    assert sum(reduction.part_bytes(part, count) for part in range(count)) == reduction.payload_bytes


def test_a_cut_shares_no_memory_with_the_payload() -> None:
    """It is handed over to be sent; the payload may belong to the model's own memory."""
    reduction = Reduction(Codec("fp32"), 4 * BLOCK)
    payload = reduction.codec.encode(torch.zeros(4 * BLOCK))
    cut = reduction.cut(payload, 1, 4)
    payload.fill_(1)
    assert not cut.any()


# ---------------------------------------------------------------------- the mean


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMATS)
@given(
    numel=lengths,
    weights=st.lists(st.floats(0.1, 10), min_size=1, max_size=6),
    absent=st.integers(0, 3),
    seed=st.integers(0, 99),
)
@examples(25)
def test_the_mean_is_the_encoded_weighted_mean_of_what_was_decoded(
    name: str, dtype: str, numel: int, weights: list[float], absent: int, seed: int
) -> None:
    """Whoever reduces which part: also where some of the members' payloads are lost."""
    reduction = Reduction(Codec(name), numel, DTYPES[dtype])
    payloads = [reduction.codec.encode(gaussian(numel, seed + m, reduction.dtype)) for m in range(len(weights))]
    mean = mean_of(reduction, payloads, weights, len(weights) + absent)
    assert mean.numel() == reduction.payload_bytes
    assert torch.equal(mean, encoded_mean(reduction, payloads, weights))
    assert torch.equal(mean, mean_by_parts(reduction, payloads, weights, len(weights) + absent))


@given(
    st.lists(
        hnp.arrays(np.float64, 3 * BLOCK, elements=st.floats(-1e9, 1e9, allow_subnormal=False)), min_size=1, max_size=5
    )
)
@examples(25)
def test_the_mean_in_fp64_loses_nothing(vectors: list[NDArray[np.float64]]) -> None:
    reduction = Reduction(Codec("fp64"), 3 * BLOCK, torch.float64)
    payloads = [reduction.codec.encode(torch.from_numpy(vector)) for vector in vectors]
    mean = reduction.codec.for_mean.decode(
        mean_of(reduction, payloads, [1.0] * len(vectors), 5), 3 * BLOCK, torch.float64
    )
    exact = np.mean(vectors, axis=0)
    np.testing.assert_allclose(mean.numpy(), exact, rtol=1e-12, atol=1e-15 * np.abs(vectors).max())


def test_parts_longer_than_a_piece_have_the_same_mean() -> None:
    reduction = Reduction(Codec("int8"), 4 * PIECE + 3 * BLOCK + 7)
    payloads = [reduction.codec.encode(gaussian(reduction.numel, m)) for m in range(2)]
    assert parts(reduction.numel, 2)[0].stop > PIECE
    mean = mean_by_parts(reduction, payloads, [1.0, 3.0], 2)
    assert torch.equal(mean, encoded_mean(reduction, payloads, [1.0, 3.0]))
    assert torch.equal(mean, mean_of(reduction, payloads, [1.0, 3.0], 2))


@pytest.mark.parametrize("name", FORMATS)
def test_the_order_of_the_sum_is_the_order_given(name: str) -> None:
    """Not even a sum that rounds may depend on who reduces it, so it is taken in worker order."""
    reduction = Reduction(Codec(name), 1)
    payloads = [reduction.codec.encode(torch.tensor([value])) for value in (6e4, 1e-2, -6e4)]
    there, back = (mean_of(reduction, list(p), [1.0] * 3, 4) for p in (payloads, payloads[::-1]))
    assert torch.equal(there, encoded_mean(reduction, payloads, [1.0] * 3))
    assert torch.equal(back, encoded_mean(reduction, payloads[::-1], [1.0] * 3))


@pytest.mark.parametrize("name", BLOCKS)
@given(seed=st.integers(0, 2**31), count=st.integers(2, 5))
@examples(10)
def test_noise_depends_on_the_seed_and_on_the_part_and_on_nothing_else(name: str, seed: int, count: int) -> None:
    numel, ramp = count * BLOCK, torch.linspace(0.1, 1, BLOCK).repeat(count)
    payloads, weights = [Codec(name).encode(ramp), Codec(name).encode(1.7 * ramp)], [0.3, 0.4]
    reduction, again, other = (Reduction(Codec(name, stochastic=True), numel, seed=s) for s in (seed, seed, seed + 100))
    mean = mean_of(reduction, payloads, weights, count)
    assert torch.equal(mean, mean_of(again, payloads, weights, count))
    assert not torch.equal(mean, mean_of(other, payloads, weights, count))
    reduced = [reduction.cut(mean, part, count) for part in range(count)]
    # All blocks hold the same values, so parts that round alike have used the same noise.
    assert len({tuple(part.tolist()) for part in reduced}) == count


@pytest.mark.parametrize("name", FORMATS)
@given(numel=lengths, count=st.integers(1, 6), part_bytes=st.sampled_from([1, 50, 300]))
@examples(20)
def test_a_mean_in_several_parts_each_is_the_same(name: str, numel: int, count: int, part_bytes: int) -> None:
    reduction = Reduction(Codec(name), numel)
    payloads = [reduction.codec.encode(gaussian(numel, m)) for m in range(3)]
    weights = [1.0, 0.5, 2.0]
    with patch.object(allreduce_module, "PART_BYTES", part_bytes):
        assert torch.equal(mean_of(reduction, payloads, weights, count), encoded_mean(reduction, payloads, weights))


@pytest.mark.parametrize("name", BLOCKS)
def test_the_mean_is_right_on_average_when_rounded_at_random(name: str) -> None:
    numel, draws = 2 * BLOCK, 400
    payloads = [Codec(name).encode(torch.linspace(-1, 1, numel) * (m + 1)) for m in range(4)]
    exact = weighted_mean([Codec(name).decode(p, numel, torch.float64) for p in payloads], [1.0] * 4)
    means = []
    for draw in range(draws):
        reduction = Reduction(Codec(name, stochastic=True), numel, torch.float64, seed=4 * draw)
        means.append(reduction.codec.for_mean.decode(mean_of(reduction, payloads, [1.0] * 4, 4), numel, torch.float64))
    got = torch.stack(means)
    assert ((got.mean(0) - exact).abs() <= 5 * got.std(0) / draws**0.5 + 1e-6).all()


@pytest.mark.parametrize("numel", [0, 1, 3])
@pytest.mark.parametrize("name", FORMATS)
def test_vectors_with_fewer_values_than_members(name: str, numel: int) -> None:
    reduction = Reduction(Codec(name), numel)
    payloads = [reduction.codec.encode(torch.full((numel,), float(m))) for m in range(5)]
    mean = mean_of(reduction, payloads, [1.0] * 5, 5)
    assert mean.dtype == torch.uint8 and mean.numel() == reduction.payload_bytes
    assert torch.equal(mean, encoded_mean(reduction, payloads, [1.0] * 5))
    assert (reduction.codec.for_mean.decode(mean, numel) - 2).abs().le(0.25).all()


# ---------------------------------------------------------------------- how often, how many bytes


def test_up_to_three_go_in_one_shot_and_more_in_two() -> None:
    assert [shots(count) for count in range(1, 7)] == [0, 1, 1, 2, 2, 2]
    assert shots_module.ONE_SHOT_MEMBERS == 3


@given(st.integers(0, 10**9), members)
def test_sent_bytes_are_the_formula(payload: int, count: int) -> None:
    exact = Fraction(count - 1) if count <= 3 else Fraction(2 * (count - 1), count)
    assert 0 <= sent_bytes(payload, count) - exact * payload < 1


@pytest.mark.parametrize("name", FORMATS)
@given(numel=lengths, count=st.integers(4, 9))
@examples(20)
def test_sent_bytes_are_the_mean_over_members_of_what_they_really_send(name: str, numel: int, count: int) -> None:
    reduction = Reduction(Codec(name), numel)
    with patch.object(allreduce_module, "PART_BYTES", 100):
        parts_in_all = reduction.part_count(count)
    parts_bytes = [reduction.part_bytes(part, parts_in_all) for part in range(parts_in_all)]
    sizes = [sum(parts_bytes[member::count]) for member in range(count)]
    sent = [sum(sizes) - own + (count - 1) * own for own in sizes]  # the others' parts to them, the own mean to all
    assert 0 <= sent_bytes(reduction.payload_bytes, count) - Fraction(sum(sent), count) < 1
    received = [(count - 1) * own + sum(sizes) - own for own in sizes]
    assert sum(received) == sum(sent)


@pytest.mark.parametrize("count", [0, -1, 2.0])
def test_a_round_has_a_whole_number_of_members(count: int) -> None:
    with pytest.raises(ConfigError, match="members must be a whole number of at least 1"):
        sent_bytes(1, count)


def test_a_payload_has_no_less_than_no_bytes() -> None:
    with pytest.raises(ConfigError, match="payload_bytes must be a whole number of at least 0, got -1"):
        sent_bytes(-1, 4)


def test_a_reducer_sums_up_the_inner_products_of_what_it_reduces() -> None:
    reduction = Reduction(Codec("int8"), 5 * BLOCK)
    vectors = [gaussian(reduction.numel, m) for m in range(3)]
    payloads = [reduction.codec.encode(vector) for vector in vectors]
    inner = torch.zeros(3, 3, dtype=torch.float64)
    for part in range(4):
        reduction.reduced(
            [reduction.cut(payload, part, 4) for payload in payloads], [1.0] * 3, part, 4, (0, 1, 2, 3), inner
        )
    rows = torch.stack([reduction.codec.decode(payload, reduction.numel) for payload in payloads]).double()
    torch.testing.assert_close(inner, rows @ rows.T, rtol=1e-12, atol=0)
