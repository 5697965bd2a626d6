"""Loss and gradient of logits in one kernel, in place: a head of many tokens has its logits in memory once."""

import triton
import triton.language as tl
from torch import Tensor

from atoll.kernels.launch import launch

_LARGEST = 4096
"""Logits that a program holds at a time."""
_EACH = 16
"""Of these, how many a thread holds."""


@triton.jit
def _cross_entropy(
    logits, targets, losses, log_totals, stride, scale, z_loss,
    VOCABULARY: tl.constexpr, GRADIENTS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    target = tl.load(targets + row)
    targeted = tl.load(logits + target).to(tl.float32)
    at = tl.arange(0, TILE)
    value = tl.load(logits + at, at < VOCABULARY, float("-inf")).to(tl.float32)
    top = tl.max(value, 0)
    part = tl.exp(value - top)
    for first in range(TILE, VOCABULARY, TILE):
        at = first + tl.arange(0, TILE)
        value = tl.load(logits + at, at < VOCABULARY, float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(value, 0))
        part = part * tl.exp(top - higher) + tl.exp(value - higher)
        top = higher
    total = tl.sum(part, 0)
    log_total = top + tl.log(total)
    tl.store(losses + row, log_total - targeted)
    tl.store(log_totals + row, log_total)
    if GRADIENTS:
        tl.debug_barrier()  # the target's logit has been read by all before it is written over
        slope = 1 + 2 * z_loss * log_total
        if VOCABULARY <= TILE:  # all of it is still there
            _store(logits, tl.arange(0, TILE), target, part * (slope / total), scale, VOCABULARY)
        else:
            for first in range(0, VOCABULARY, TILE):
                at = first + tl.arange(0, TILE)
                value = tl.load(logits + at, at < VOCABULARY, 0.0).to(tl.float32)
                _store(logits, at, target, tl.exp(value - log_total) * slope, scale, VOCABULARY)


@triton.jit
def _store(logits, at, target, gradient, scale, VOCABULARY: tl.constexpr):
    gradient = tl.where(at == target, gradient - 1, gradient) * scale
    tl.store(logits + at, gradient.to(logits.dtype.element_ty), at < VOCABULARY)


def cross_entropy_(
    logits: Tensor, targets: Tensor, losses: Tensor, log_totals: Tensor, *, scale: float, z_loss: float, gradients: bool
) -> None:
    """Write the cross-entropy [rows] and the logsumexp [rows], fp32, of logits [rows, vocabulary] for int64 targets.

    With `gradients`, the logits become `scale` times those of cross_entropy + z_loss * logsumexp^2, by row.
    """
    tile = min(triton.next_power_of_2(logits.shape[1]), _LARGEST)
    launch(
        _cross_entropy, len(logits), logits, targets, losses, log_totals, logits.stride(0), scale, z_loss,
        VOCABULARY=logits.shape[1], GRADIENTS=gradients, TILE=tile,
        num_warps=max(1, tile // _EACH // 32),
    )  # fmt: skip
