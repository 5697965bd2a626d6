"""Inner products of the vectors behind payloads, straight from the payloads: a twin of what `applied.Products` sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.core.codec import BLOCK, Codec
from atoll.kernels.codec import codes_of, decoded
from atoll.kernels.launch import launch

_TILE = 1024


@triton.jit
def _products(
    units, codes, parts, numel, tiles, units_stride, codes_stride,
    MEMBERS: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What one tile adds to the product of one pair of members."""
    count: tl.constexpr = TILE // BLOCK
    program = tl.program_id(0).to(tl.int64)
    pair, first = program // tiles, program % tiles * count
    one, other = pair // MEMBERS, pair % MEMBERS
    if one <= other:
        left = decoded(units + one * units_stride, codes + one * codes_stride, first, numel, FORMAT, BLOCK, count)
        right = decoded(units + other * units_stride, codes + other * codes_stride, first, numel, FORMAT, BLOCK, count)
        tl.store(parts + program, tl.sum(tl.sum(left.to(tl.float64) * right.to(tl.float64), 1), 0))


def inner_products(codec: Codec, payloads: Tensor, numel: int) -> Tensor:
    """fp64 [members, members], of every two of the vectors [numel] behind payloads [members, bytes].

    The same on every run: tiles are summed up one by one, and their sums in one order.
    """
    members, tiles = len(payloads), -(-numel // _TILE)
    parts = torch.zeros(members, members, tiles, dtype=torch.float64, device=payloads.device)
    codes, form = codes_of(codec, payloads, numel)
    if members:
        launch(
            _products, parts.numel(), payloads, codes, parts, numel, tiles, payloads.stride(0), codes.stride(0),
            MEMBERS=members, FORMAT=form, BLOCK=BLOCK, TILE=_TILE,
        )  # fmt: skip
    upper = parts.sum(2)
    return upper + upper.triu(1).T
