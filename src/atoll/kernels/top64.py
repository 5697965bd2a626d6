"""Encodes the largest values of chunks, and decodes them into their mean, bit for bit as `core.top64`.

One program works on one chunk. What a chunk keeps is scattered through memory that the program has just written, which
is still in a cache, so that device memory sees every value once.
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
_DECODE_WARPS = 4
_CHUNKS = 8
"""Whose products one program sums up, so that there are not many sums to keep."""


def _sections(payload: Tensor, numel: int) -> list[Tensor]:
    """Return the heads, the low and high bits of places, and the codes of a payload."""
    return top64.Top64().sections(payload, numel, slice(0, numel))


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
    # By its bit: the sign of a level of zero counts too.
    level = (level.to(tl.int32, bitcast=True) | ((code & 2) << 30)).to(tl.float32, bitcast=True)
    return place, there & (chunk * CHUNK + place < numel), level, exponent


@triton.jit
def _decode_mean(heads, low, high, codes, shares, mean, numel, begin, end, stride, MEMBERS: tl.constexpr):
    """Write the mean of one chunk: zeros, then the members' values one after the other.

    A sum with a member that has nothing at a place is that with +0, which makes +0 of -0. Only where the first member
    has a value can -0 stand, so there all others add +0 too.
    """
    chunk = begin // CHUNK + tl.program_id(0).to(tl.int64)
    mean += chunk * CHUNK - begin
    at = tl.arange(0, CHUNK)
    if chunk * CHUNK + CHUNK <= end:  # a mask would part wide stores
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
        tl.debug_barrier()  # an entry may be there more than once: all are read before one is written
        tl.store(mean + first, without, first_inside)
        tl.debug_barrier()
        tl.store(mean + place, total, inside)


def decode_mean(payloads: Tensor, weights: Sequence[float], numel: int, piece: slice, mean: Tensor) -> None:
    """Write values [piece] of the weighted mean, fp32, of the vectors [numel] behind payloads [members, bytes].

    A piece begins on a chunk boundary. Summed in the order given, with the bits of `weighted_mean`.
    """
    shares = torch.tensor(shares_of(weights), dtype=torch.float32, device="cpu")
    launch(
        _decode_mean, -(-(piece.stop - piece.start) // top64.CHUNK),
        *_sections(payloads[0], numel), shares.to(payloads.device, non_blocking=True), mean, numel,
        piece.start, piece.stop, payloads.stride(0), MEMBERS=len(payloads), num_warps=_DECODE_WARPS, enable_fp_fusion=False,
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
    """Return whether an entry is not the one before once more; equal ones stand side by side."""
    number = tl.arange(0, KEPT)
    before = _places(low, high, chunk * KEPT + number - 1, number > 0)
    return (number == 0) | (place != before)


def inner_products(payloads: Tensor, numel: int) -> Tensor:
    """Return the inner products, fp64 [members, members], of the vectors [numel] behind payloads [members, bytes].

    The same on every run: all sums are taken in one order.
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
