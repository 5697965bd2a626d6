"""Computes inner products of the vectors behind payloads from these alone, as `outer.stats.Products` sums them up.

In fp64, like there, but in another order: to a relative 1e-12 of the members' lengths.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.kernels.codec import codes_of, levels
from atoll.kernels.launch import launch

_MOST = 8
"""Members of a set, at most: a program keeps levels of all of them, and sums of all their pairs, in registers."""
_SHARE = 16384
"""Values of each member that one program works on, so that there are not many sums to keep."""
_WARPS = 4


@triton.jit
def _products(
    units, codes, parts, numel, members, sets, shares, units_stride, codes_stride,
    SIZE: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, EACH: tl.constexpr,
    SHARE: tl.constexpr,
):  # fmt: skip
    """Sum a share of the products of all pairs in a set of SIZE members, unpacking each member once.

    A set is two halves, and every two halves of all members are one: so are any two members. Where a set has more
    places than members are left, the last member stands there again. Sets that share a pair find the same sum.
    """
    count: tl.constexpr = TILE // BLOCK
    half: tl.constexpr = SIZE // 2
    program = tl.program_id(0).to(tl.int64)
    share, lower = program // sets, program % sets
    upper = tl.full([], 1, tl.int64)
    while lower >= upper:  # halves of sets in order: 0 and 1; 0 and 2, 1 and 2; 0 and 3, ...
        lower -= upper
        upper += 1
    rows = ()
    for place in tl.static_range(SIZE):
        row = (lower if place < half else upper - 1) * half + place
        rows += (tl.minimum(row, members - 1),)  # type: ignore[assignment]
    totals = (tl.zeros([count, BLOCK // EACH], tl.float64),) * (SIZE * (SIZE + 1) // 2)
    at = share * (SHARE // BLOCK)
    end = at + tl.cdiv(tl.minimum(numel - share * SHARE, SHARE), BLOCK)
    while at < end:
        tiles = ()
        for place in tl.static_range(SIZE):
            of_units, of_codes = units + rows[place] * units_stride, codes + rows[place] * codes_stride
            unpacked = levels(of_units, of_codes, at, numel, FORMAT, BLOCK, count)
            tiles += (unpacked,)  # type: ignore[assignment]
        sums = ()
        for one in tl.static_range(SIZE):
            for other in tl.static_range(one + 1):
                total = totals[len(sums)] + _product(tiles[one], tiles[other], FORMAT, EACH)
                sums += (total,)  # type: ignore[assignment]
        totals = sums
        at += count
    for one in tl.static_range(SIZE):
        for other in tl.static_range(one + 1):
            total = tl.sum(tl.sum(totals[one * (one + 1) // 2 + other], 1), 0)
            tl.store(parts + (rows[one] * members + rows[other]) * shares + share, total)
            tl.store(parts + (rows[other] * members + rows[one]) * shares + share, total)


@triton.jit
def _product(left, right, FORMAT: tl.constexpr, EACH: tl.constexpr):
    """Return the product, fp64 [blocks, BLOCK // EACH], of two members' levels and units, summed up by EACH values."""
    shape: tl.constexpr = [left[0].shape[0], left[0].shape[1] // EACH, EACH]
    if FORMAT == "plain":
        return tl.sum(tl.reshape(left[0].to(tl.float64) * right[0].to(tl.float64), shape), 2)
    # Without rounding in fp32; the exponents of both units make one of fp64, which holds them all.
    scale = (left[1] + right[1]).to(tl.int64) + (1023 - 2 * 127)
    return tl.sum(tl.reshape(left[0] * right[0], shape), 2).to(tl.float64) * (scale << 52).to(tl.float64, bitcast=True)


def tile(form: str) -> dict[str, int]:
    """Return how much a program and each of its threads work on at once.

    A thread has EACH values of each member side by side, so that their sum needs no other thread.
    """
    each = 4 if form == "plain" else 8
    return {"TILE": each * 32 * _WARPS, "EACH": each, "SHARE": _SHARE, "num_warps": _WARPS}


def inner_products(codec: Codec, payloads: Tensor, numel: int) -> Tensor:
    """Return the inner products, fp64 [members, members], of the vectors [numel] behind payloads [members, bytes].

    The same on every run: all sums are taken in one order.
    """
    members, shares = len(payloads), -(-numel // _SHARE)
    parts = torch.empty(members, members, shares, dtype=torch.float64, device=payloads.device)
    codes, form = codes_of(codec, payloads, numel)
    size = min(members, _MOST)
    halves = 2 if members == size else -(-members // (size // 2))
    sets = halves * (halves - 1) // 2
    if members:
        launch(
            _products, sets * shares, payloads, codes, parts, numel, members, sets, shares,
            payloads.stride(0), codes.stride(0),
            SIZE=size, FORMAT=form, BLOCK=BLOCK, **tile(form),
        )  # fmt: skip
    return parts.sum(2)
