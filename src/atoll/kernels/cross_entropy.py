"""Loss and gradient of logits in one kernel, in place: a head of many tokens has its logits in memory once."""

import triton
import triton.language as tl
from torch import Tensor

from atoll.kernels.launch import launch

_TILE, _WARPS = 4096, 8


@triton.jit
def _cross_entropy(
    logits, targets, losses, log_totals, stride, scale, z_loss,
    VOCABULARY: tl.constexpr, GRADIENTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    top = tl.max(tl.load(logits + tl.arange(0, TILE), tl.arange(0, TILE) < VOCABULARY, float("-inf")).to(tl.float32), 0)
    total = tl.zeros([TILE], tl.float32)
    for first in range(0, VOCABULARY, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(logits + at, at < VOCABULARY, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        total = total * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    log_total = top + tl.log(tl.sum(total, 0))
    target = tl.load(targets + row)
    tl.store(losses + row, log_total - tl.load(logits + target).to(tl.float32))
    tl.store(log_totals + row, log_total)
    if GRADIENTS:
        tl.debug_barrier()  # the target's logit has been read by all before it is written over
        for first in range(0, VOCABULARY, TILE):
            at = first + tl.arange(0, TILE)
            value = tl.load(logits + at, at < VOCABULARY, 0.0).to(tl.float32)
            gradient = tl.exp(value - log_total) * (1 + 2 * z_loss * log_total)
            gradient = tl.where(at == target, gradient - 1, gradient) * scale
            tl.store(logits + at, gradient.to(logits.dtype.element_ty), at < VOCABULARY)


def cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, log_totals: Tensor, *, scale: float, z_loss: float, gradients: bool
) -> None:
    """Write the cross-entropy [rows] and the logsumexp [rows], fp32, of logits [rows, vocabulary] for int64 targets.

    With `gradients`, the logits become `scale` times those of cross_entropy + z_loss * logsumexp^2, by row.
    """
    launch(
        _cross_entropy, len(logits), logits, targets, losses, log_totals, logits.stride(0), scale, z_loss,
        VOCABULARY=logits.shape[1], GRADIENTS=gradients, TILE=_TILE, num_warps=_WARPS,
    )  # fmt: skip
