"""Computes the loss from the last layer's output: the output matrix, cross-entropy and z-loss.

With a vocabulary of 32,000 the logits of a batch are its largest tensor by far. On a GPU they are computed in parts, in
the precision of the matmul, and overwritten by their gradients.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from atoll import kernels

LOGITS_BYTES = 1 << 30
"""Most bytes of logits at a time, on a GPU."""


def head_loss(hidden: Tensor, matrix: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return cross-entropy plus z-loss, and detached cross-entropy: means over all tokens, in nats.

    Args:
        hidden: Output of the last layer [batch, time, width].
        matrix: Output matrix [vocabulary, width].
        targets: Tokens to predict [batch, time], int64.
        z_loss: Weight of the squared log-partition.
    """
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    # Not in fp16, in which the gradients of single logits would vanish.
    if kernels.usable(hidden.device) and dtype in (torch.float32, torch.bfloat16):
        total, cross_entropy = _InParts.apply(  # type: ignore[no-untyped-call]
            hidden.flatten(0, 1), matrix, targets.flatten(), z_loss, dtype, torch.is_grad_enabled()
        )
        return total, cross_entropy
    return loss_of_logits(functional.linear(hidden, matrix), targets, z_loss)


def loss_of_logits(logits: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    """Return what `head_loss` returns, from logits [batch, time, vocabulary]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 is too coarse for the sums below
    log_total = logits.logsumexp(-1)
    cross_entropy = (log_total - logits.gather(-1, targets[..., None]).squeeze(-1)).mean()
    return cross_entropy + z_loss * log_total.square().mean(), cross_entropy.detach()


class _InParts(torch.autograd.Function):
    """Computes gradients in the forward pass, while a part's logits exist."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, matrix: Tensor, targets: Tensor, z_loss: float, dtype: torch.dtype, gradients: bool
    ) -> tuple[Tensor, Tensor]:
        from atoll.kernels.cross_entropy import cross_entropy_  # needs Triton

        tokens, vocabulary = len(hidden), len(matrix)
        with torch.autocast(hidden.device.type, enabled=False):
            inputs, weights = hidden.to(dtype), matrix.to(dtype)
            losses = torch.empty(2, tokens, dtype=torch.float32, device=hidden.device)
            to_hidden = torch.empty_like(inputs) if gradients else None
            to_matrix: Tensor | None = None
            rows = max(1024, LOGITS_BYTES // (vocabulary * dtype.itemsize) // 1024 * 1024)  # whole tiles of a matmul
            for first in range(0, tokens, rows):
                part = slice(first, first + rows)
                logits = inputs[part] @ weights.T
                cross_entropy_(
                    logits, targets[part], losses[0, part], losses[1, part],
                    scale=1 / tokens, z_loss=z_loss, gradients=gradients,
                )  # fmt: skip
                if to_hidden is not None:
                    torch.mm(logits, weights, out=to_hidden[part])
                    to_matrix = _added(to_matrix, logits.T, inputs[part])
                del logits  # before the next part's are allocated
        if gradients:
            ctx.save_for_backward(to_hidden, to_matrix)
            ctx.dtypes = hidden.dtype, matrix.dtype
        cross_entropy = losses[0].mean()
        ctx.mark_non_differentiable(cross_entropy)
        return cross_entropy + z_loss * losses[1].square().mean(), cross_entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        scale = gradients[0]
        (to_hidden, to_matrix), dtypes = ctx.saved_tensors, ctx.dtypes
        return (to_hidden * scale).to(dtypes[0]), (to_matrix * scale).to(dtypes[1]), None, None, None, None


def _added(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return total + left @ right in fp32, perhaps in place: sums in bf16 would lose small parts."""
    if left.dtype == torch.float32:
        return left @ right if total is None else total.addmm_(left, right)
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32)
