"""Encodes the largest values of chunks, and decodes payloads into their mean, with the bits of `core.top64`.

One program works on one chunk. Triton cannot scatter in shared memory, so kept values are scattered through global
memory that the program has just written. That memory is still in a cache, so device memory moves every value once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.core import top64
from atoll.core.outer_step import shares_of
from atoll.kernels.launch import launch

CHUNK, KEPT, HEAD = (tl.constexpr(value) for value in (top64.CHUNK, top64.KEPT, top64.HEAD))
FINEST, LOWEST = (tl.constexpr(value) for value in (top64.FINEST, top64.LOWEST))
_ENCODE_WARPS, _DECODE_WARPS = 8, 4
_CHUNKS = 8
"""Chunks whose products one program sums, which keeps the number of partial sums small."""


def _sections(payload: Tensor, numel: int) -> list[Tensor]:
    """Return the heads, the low and high bits of places, and the codes of a payload."""
    return top64.Top64().sections(payload, numel, slice(0, numel))


# ---------------------------------------------------------------------- encode


@triton.jit
def _threshold(magnitude, peak, kept):
    """Return a magnitude, as bits, that at least `kept` values of a chunk [CHUNK] reach.

    Exactly `kept` values reach it, or more if several are equal to it.
    """
    # Every one of KEPT groups has a value of at least the smallest of their peaks, so there are KEPT of them.
    low = tl.min(tl.max(tl.reshape(magnitude, [KEPT, CHUNK // KEPT]), 1), 0)
    high = peak + 1
    many = tl.sum((magnitude >= low).to(tl.int32), 0)
    while (many > kept) & (high - low > 1):
        middle = low + (high - low) // 2
        found = tl.sum((magnitude >= middle).to(tl.int32), 0)
        enough = found >= kept
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
        many = tl.where(enough, found, many)
    return low


@triton.jit
def _mean_level(whole, group):
    """Return the mean of the magnitudes of a group in 256ths, rounded, 0 to 255; 0 if it is empty."""
    many = tl.sum(group.to(tl.int32), 0)
    mean = (tl.sum(tl.where(group, whole, 0), 0) + 128 * many) // (256 * tl.maximum(many, 1))
    return tl.minimum(mean, 255)


@triton.jit
def _encode(vector, heads, low, high, codes, entries, worst, numel):
    """Encode one chunk: find the kept values, write them to `entries` in the order of their places, and pack those."""
    chunk = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, CHUNK)
    if chunk * CHUNK + CHUNK <= numel:  # a mask would split wide loads
        value = tl.load(vector + chunk * CHUNK + place)
    else:
        value = tl.load(vector + chunk * CHUNK + place, chunk * CHUNK + place < numel, 0.0)
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    peak = tl.max(magnitude, 0)
    tl.atomic_max(worst, peak)
    size = tl.minimum(numel - chunk * CHUNK, CHUNK).to(tl.int32)
    kept = (size + (CHUNK // KEPT - 1)) // (CHUNK // KEPT)

    # Of the values equal to the threshold, the first ones fill the remaining places; zeros are not kept.
    threshold = _threshold(magnitude, peak, kept)
    larger, equal = magnitude > threshold, (magnitude == threshold) & (magnitude > 0)
    missing = kept - tl.sum(larger.to(tl.int32), 0)
    before = tl.cumsum(larger.to(tl.int32) + (equal.to(tl.int32) << 16), 0)  # two counts in one pass
    counts = larger | (equal & ((before >> 16) <= missing))
    number = (before & 0xFFFF) + tl.minimum(before >> 16, missing) - 1

    exponent = tl.maximum(peak >> 23, LOWEST)
    scale = ((127 + 127 - exponent + FINEST) << 23).to(tl.float32, bitcast=True)
    whole = (tl.abs(value) * scale).to(tl.int32)
    many = tl.sum(counts.to(tl.int32), 0)
    is_above = whole * many >= tl.sum(tl.where(counts, whole, 0), 0)
    above, below = counts & is_above, counts & (is_above == 0)
    higher = _mean_level(whole, above)
    lower = tl.where(tl.sum(below.to(tl.int32), 0) > 0, _mean_level(whole, below), higher)
    heads += chunk * HEAD
    tl.store(heads, exponent.to(tl.uint8))
    tl.store(heads + 1, lower.to(tl.uint8))
    tl.store(heads + 2, higher.to(tl.uint8))

    sign = (value.to(tl.int32, bitcast=True) >> 30) & 2
    entry = (place << 2) | sign | (2 * whole >= 256 * (lower + higher)).to(tl.int32)
    largest = tl.min(tl.where(magnitude == peak, entry, 4 * CHUNK), 0)
    # Where fewer values count than there are places, the largest is repeated in the others.
    number += tl.where(entry > largest, kept - many, 0)
    entries += chunk * KEPT
    tl.store(entries + tl.arange(0, KEPT), tl.full([KEPT], 0, tl.int16) + largest.to(tl.int16))
    tl.debug_barrier()
    tl.store(entries + number, entry.to(tl.int16), counts)
    tl.debug_barrier()
    _pack(entries, low + chunk * KEPT, high + chunk * (KEPT // 2), codes + chunk * (KEPT // 4), kept)


@triton.jit
def _pack(entries, low, high, codes, kept):
    """Write the places and codes of a chunk's entries, one, two and four to a byte."""
    one = tl.arange(0, KEPT)
    tl.store(low + one, (tl.load(entries + one) >> 2).to(tl.uint8), one < kept)
    pair = tl.arange(0, KEPT // 2)
    both = tl.zeros([KEPT // 2], tl.int32)
    for number in tl.static_range(2):
        at = 2 * pair + number
        both |= (tl.load(entries + at, at < kept, 0).to(tl.int32) >> 10) << (4 * number)
    tl.store(high + pair, both.to(tl.uint8), 2 * pair < kept)
    four = tl.arange(0, KEPT // 4)
    all_four = tl.zeros([KEPT // 4], tl.int32)
    for number in tl.static_range(4):
        at = 4 * four + number
        all_four |= (tl.load(entries + at, at < kept, 0).to(tl.int32) & 3) << (2 * number)
    tl.store(codes + four, all_four.to(tl.uint8), 4 * four < kept)


def encode(vector: Tensor, payload: Tensor, worst: Tensor) -> None:
    """Write the payload of a vector, fp32 [numel].

    `worst`, int32 [1], becomes at least the bits of the largest magnitude; if it reaches TOO_LARGE, the payload must
    not be sent.
    """
    chunks = -(-vector.numel() // top64.CHUNK)
    entries = torch.empty(chunks * top64.KEPT, dtype=torch.int16, device=vector.device)
    launch(
        _encode, chunks, vector, *_sections(payload, vector.numel()), entries, worst, vector.numel(),
        num_warps=_ENCODE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


# ---------------------------------------------------------------------- decode


@triton.jit
def _places(low, high, entry, there):
    """Return the places, int32, of entries with these numbers in a payload."""
    upper = tl.load(high + entry // 2, there, 0).to(tl.int32) >> ((entry % 2) * 4).to(tl.int32)
    return tl.load(low + entry, there, 0).to(tl.int32) | ((upper & 15) << 8)


@triton.jit
def _entries(heads, low, high, codes, chunk, numel):
    """Return places [KEPT] of a chunk, whether each is inside, signed levels fp32 [KEPT], and their biased exponent."""
    entry = chunk * KEPT + tl.arange(0, KEPT)
    there = entry * (CHUNK // KEPT) < numel
    place = _places(low, high, entry, there)
    code = tl.load(codes + entry // 4, there, 0).to(tl.int32) >> ((entry % 4) * 2).to(tl.int32)
    heads += chunk * HEAD
    exponent = tl.maximum(tl.load(heads).to(tl.int32), LOWEST) + (8 - FINEST)
    level = tl.where((code & 1) != 0, tl.load(heads + 2), tl.load(heads + 1)).to(tl.float32)
    # The sign is set by its bit, so that a level of zero has one too.
    level = (level.to(tl.int32, bitcast=True) | ((code & 2) << 30)).to(tl.float32, bitcast=True)
    return place, there & (chunk * CHUNK + place < numel), level, exponent


@triton.jit
def _decode_mean(heads, low, high, codes, shares, mean, numel, begin, end, stride, MEMBERS: tl.constexpr):
    """Write the mean of one chunk: zeros, then the members' values one after the other.

    A dense sum adds +0 for a member without a value at a place, which turns -0 into +0. A -0 can only come from a
    value of the first member, so all others add +0 at its places too.
    """
    chunk = begin // CHUNK + tl.program_id(0).to(tl.int64)
    mean += chunk * CHUNK - begin
    at = tl.arange(0, CHUNK)
    if chunk * CHUNK + CHUNK <= end:  # a mask would split wide stores
        tl.store(mean + at, tl.zeros([CHUNK], tl.float32))
    else:
        tl.store(mean + at, tl.zeros([CHUNK], tl.float32), chunk * CHUNK + at < end)
    first, first_inside, level, exponent = _entries(heads, low, high, codes, chunk, numel)
    first_inside &= chunk * CHUNK + first < end
    value = level * (exponent << 23).to(tl.float32, bitcast=True) * tl.load(shares)
    tl.debug_barrier()  # all zeros are written before any value
    tl.store(mean + first, value, first_inside)
    for member in tl.static_range(1, MEMBERS):
        heads += stride
        low += stride
        high += stride
        codes += stride
        place, inside, level, exponent = _entries(heads, low, high, codes, chunk, numel)
        inside &= chunk * CHUNK + place < end
        value = level * (exponent << 23).to(tl.float32, bitcast=True) * tl.load(shares + member)
        tl.debug_barrier()
        total = tl.load(mean + place, inside, 0.0) + value
        without = tl.load(mean + first, first_inside, 0.0) + 0.0
        tl.debug_barrier()  # an entry may be repeated: all are read before any is written
        tl.store(mean + first, without, first_inside)
        tl.debug_barrier()
        tl.store(mean + place, total, inside)


def decode_mean(payloads: Tensor, weights: Sequence[float], numel: int, piece: slice, mean: Tensor) -> None:
    """Write values [piece] of the weighted mean, fp32, of the vectors [numel] behind payloads [members, bytes].

    A piece begins on a chunk boundary. Payloads are summed in the order given, with the bits of `weighted_mean`.
    """
    shares = torch.tensor(shares_of(weights), dtype=torch.float32, device="cpu")
    launch(
        _decode_mean, -(-(piece.stop - piece.start) // top64.CHUNK),
        *_sections(payloads[0], numel), shares.to(payloads.device, non_blocking=True), mean, numel,
        piece.start, piece.stop, payloads.stride(0),
        MEMBERS=len(payloads), num_warps=_DECODE_WARPS, enable_fp_fusion=False,
    )  # fmt: skip


# ---------------------------------------------------------------------- inner products


@triton.jit
def _products(
    heads, low, high, codes, parts, numel, shares, stride, MEMBERS: tl.constexpr, CHUNKS: tl.constexpr
):  # fmt: skip
    """Sum a share of all chunks of the product of one pair of members."""
    program = tl.program_id(0).to(tl.int64)
    pair, share = program // shares, program % shares
    one, other = pair // MEMBERS * stride, pair % MEMBERS * stride
    if one <= other:
        total = tl.zeros([KEPT], tl.float64)
        for number in range(CHUNKS):
            chunk = share * CHUNKS + number
            if chunk * CHUNK < numel:
                left_place, left_inside, left, left_exponent = _entries(
                    heads + one, low + one, high + one, codes + one, chunk, numel
                )
                right_place, right_inside, right, right_exponent = _entries(
                    heads + other, low + other, high + other, codes + other, chunk, numel,
                )  # fmt: skip
                left_inside &= _first_of_equals(low + one, high + one, chunk, left_place)
                right_inside &= _first_of_equals(low + other, high + other, chunk, right_place)
                same = (left_place[:, None] == right_place[None, :]) & left_inside[:, None] & right_inside[None, :]
                # Levels are whole numbers below 256, so fp32 sums them without rounding.
                product = tl.sum(tl.where(same, left[:, None] * right[None, :], 0.0), 1).to(tl.float64)
                scale = (left_exponent + right_exponent).to(tl.int64) + (1023 - 2 * 127)
                total += product * (scale << 52).to(tl.float64, bitcast=True)
        tl.store(parts + program, tl.sum(total, 0))


@triton.jit
def _first_of_equals(low, high, chunk, place):
    """Return whether each entry differs from the one before; repeated entries stand side by side."""
    number = tl.arange(0, KEPT)
    before = _places(low, high, chunk * KEPT + number - 1, number > 0)
    return (number == 0) | (place != before)


def inner_products(payloads: Tensor, numel: int) -> Tensor:
    """Return the inner products, fp64 [members, members], of the vectors [numel] behind payloads [members, bytes].

    All sums are taken in one order, so every run gives the same bits.
    """
    members, shares = len(payloads), -(-numel // (top64.CHUNK * _CHUNKS))
    parts = torch.zeros(members, members, shares, dtype=torch.float64, device=payloads.device)
    if members:
        launch(
            _products, parts.numel(), *_sections(payloads[0], numel), parts, numel, shares, payloads.stride(0),
            MEMBERS=members, CHUNKS=_CHUNKS,
        )  # fmt: skip
    upper = parts.sum(2)
    return upper + upper.triu(1).T
