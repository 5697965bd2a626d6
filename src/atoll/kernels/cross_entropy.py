"""Computes loss and gradient of logits in one kernel, in place: a head of many tokens has its logits in memory once.

The twin of `train.head.loss_of_logits`, to a relative 1e-5 and the rounding of the logits' dtype.
"""

import triton
import triton.language as tl
from torch import Tensor

from atoll.kernels.launch import launch

_LARGEST = 4096
"""Logits that a program takes at a time."""
_EACH = 8
"""Of these, how many a thread does: 16 bytes in bf16, the most that it loads at once."""


@triton.jit
def _cross_entropy(
    logits, targets, losses, log_totals, stride, scale, z_loss,
    VOCABULARY: tl.constexpr, GRADIENTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Compute one row in three passes; the second and third should find it in a cache."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    known = (target >= 0) & (target < VOCABULARY)
    targeted = tl.load(logits + target, known, float("nan")).to(tl.float32)
    tops = tl.full([TILE], float("-inf"), tl.float32)
    for first in range(0, VOCABULARY, TILE):
        tops = tl.maximum(tops, _some(logits, first, VOCABULARY, TILE))
    top = tl.max(tops, 0)
    parts = tl.zeros([TILE], tl.float32)
    for first in range(0, VOCABULARY, TILE):
        parts += tl.exp(_some(logits, first, VOCABULARY, TILE) - top)
    log_total = top + tl.log(tl.sum(parts, 0))
    tl.store(losses + row, log_total - targeted)
    tl.store(log_totals + row, log_total)
    if GRADIENTS:
        tl.debug_barrier()  # the target's logit has been read by all before it is written over
        slope = tl.where(known, 1 + 2 * z_loss * log_total, float("nan"))
        for first in range(0, VOCABULARY, TILE):
            gradient = tl.exp(_some(logits, first, VOCABULARY, TILE) - log_total) * slope
            at = first + tl.arange(0, TILE)
            gradient = tl.where(at == target, gradient - 1, gradient) * scale
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), at < VOCABULARY)


@triton.jit
def _some(logits, first, VOCABULARY: tl.constexpr, TILE: tl.constexpr):
    at = first + tl.arange(0, TILE)
    return tl.load(logits + at, at < VOCABULARY, float("-inf")).to(tl.float32)


def cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, log_totals: Tensor, *, scale: float, z_loss: float, gradients: bool
) -> None:
    """Write the cross-entropy [rows] and the logsumexp [rows], fp32, of logits [rows, vocabulary] for int64 targets.

    With `gradients`, the logits become `scale` times those of cross_entropy + z_loss * logsumexp^2, by row.
    A target that is not in the vocabulary makes both NaN, and so does a logit of +inf.
    """
    tile = min(triton.next_power_of_2(logits.shape[1]), _LARGEST)
    launch(
        _cross_entropy, len(logits), logits, targets, losses, log_totals, logits.stride(0), scale, z_loss,
        VOCABULARY=logits.shape[1], GRADIENTS=gradients, TILE=tile,
        num_warps=max(1, tile // _EACH // 32),
    )  # fmt: skip
