"""Computes outer step and blend as `core.outer_step`, bit for bit: one pass over anchor, velocity and parameters."""

import triton
import triton.language as tl
from torch import Tensor

from atoll.core.block_formats import BLOCK
from atoll.core.outer_step import SGD, Adam, Momentum, Nesterov, OuterOptimizer
from atoll.kernels.launch import TYPES, launch
from atoll.kernels.live import Live, addresses

_TILE = 1024


@triton.jit
def _outer_merge(
    anchor, velocity, mean, table, begin, numel, lr, momentum, keep, take,
    KIND: tl.constexpr, BLEND: tl.constexpr, LOCAL: tl.constexpr, GRAIN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    stretches: tl.constexpr = TILE // GRAIN
    first = tl.program_id(0).to(tl.int64) * TILE
    stretch = tl.arange(0, stretches)
    at = first + stretch[:, None] * GRAIN + tl.arange(0, GRAIN)[None, :]
    inside = at < numel
    move = tl.load(mean + at, inside, 0.0)
    if KIND != "sgd":
        speed = momentum * tl.load(velocity + begin + at, inside, 0.0) + move
        tl.store(velocity + begin + at, speed, inside)
        move = momentum * speed + move if KIND == "nesterov" else speed
    agreed = tl.load(anchor + begin + at, inside, 0.0) - lr * move
    tl.store(anchor + begin + at, agreed, inside)
    if LOCAL is not None:
        there = first + stretch * GRAIN < numel
        where = (begin + first) // GRAIN + stretch
        local = addresses(table, where, there, LOCAL)[:, None] + tl.arange(0, GRAIN)[None, :]
        if BLEND:
            agreed = keep * tl.load(local, inside, 0.0).to(tl.float32) + take * agreed
        tl.store(local, agreed.to(LOCAL), inside)


def outer_merge(
    outer: OuterOptimizer,
    anchor: Tensor,
    velocity: Tensor | None,
    mean: Tensor,
    piece: slice,
    local: Live | None,
    alpha: float,
) -> None:
    """Let the mean delta [piece] of a round move the anchor and velocity, fp32 [numel], in place.

    With `local`, the live parameters become alpha * themselves + (1 - alpha) * anchor, rounded to their dtype. A piece
    begins on a block boundary.
    """
    assert not isinstance(outer, Adam)
    kind = "nesterov" if isinstance(outer, Nesterov) else "momentum" if isinstance(outer, Momentum) else "sgd"
    size = piece.stop - piece.start
    launch(
        _outer_merge, -(-size // _TILE),
        anchor, velocity, mean, None if local is None else local.table, piece.start, size, outer.lr,
        0.0 if isinstance(outer, SGD) else outer.momentum, alpha, 1 - alpha,
        KIND=kind, BLEND=alpha != 0, LOCAL=None if local is None else TYPES[local.dtype],
        GRAIN=BLOCK if local is None else local.grain, TILE=_TILE, enable_fp_fusion=False,
    )  # fmt: skip
