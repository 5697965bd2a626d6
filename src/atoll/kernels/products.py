"""Computes inner products of the vectors behind payloads, straight from the payloads: what `applied.Products` sums up.

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

_TILE = 1024
_TILES = 16
"""That one program does, so that there are not many sums to keep."""


@triton.jit
def _products(
    units, codes, parts, numel, shares, units_stride, codes_stride,
    MEMBERS: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sum a share of all tiles of the product of one pair of members."""
    count: tl.constexpr = TILE // BLOCK
    program = tl.program_id(0).to(tl.int64)
    pair, share = program // shares, program % shares
    one, other = pair // MEMBERS, pair % MEMBERS
    if one <= other:
        total = tl.zeros([count], tl.float64)
        for tile in range(TILES):
            at = (share * TILES + tile) * count
            if at * BLOCK < numel:
                left, left_unit = levels(
                    units + one * units_stride, codes + one * codes_stride, at, numel, FORMAT, BLOCK, count
                )
                right, right_unit = levels(
                    units + other * units_stride, codes + other * codes_stride, at, numel, FORMAT, BLOCK, count
                )
                if FORMAT == "plain":
                    total += tl.sum(left.to(tl.float64) * right.to(tl.float64), 1)
                else:
                    # Without rounding in fp32; the exponents of both units make one of fp64, which holds them all.
                    scale = tl.reshape(left_unit + right_unit, [count]).to(tl.int64) + (1023 - 2 * 127)
                    total += tl.sum(left * right, 1).to(tl.float64) * (scale << 52).to(tl.float64, bitcast=True)
        tl.store(parts + program, tl.sum(total, 0))


def inner_products(codec: Codec, payloads: Tensor, numel: int) -> Tensor:
    """Return the inner products, fp64 [members, members], of the vectors [numel] behind payloads [members, bytes].

    The same on every run: all sums are taken in one order.
    """
    members, shares = len(payloads), -(-numel // (_TILE * _TILES))
    parts = torch.zeros(members, members, shares, dtype=torch.float64, device=payloads.device)
    codes, form = codes_of(codec, payloads, numel)
    if members:
        launch(
            _products, parts.numel(), payloads, codes, parts, numel, shares, payloads.stride(0), codes.stride(0),
            MEMBERS=members, FORMAT=form, BLOCK=BLOCK, TILE=_TILE, TILES=_TILES,
        )  # fmt: skip
    upper = parts.sum(2)
    return upper + upper.triu(1).T
