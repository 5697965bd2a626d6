"""From a batch to gradients: the forward and backward pass of one worker."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Loss
from atoll.train.step.optimizer import InnerOptimizer


class Pass(Protocol):
    """A forward pass through a model, whatever it takes to get the gradients of all ranks in the backward pass."""

    def __call__(self, tokens: Tensor, *, last: bool = True) -> Loss:
        """The loss of [rows, time + 1], int64; gradients are exchanged with the `last` of the parts of a batch."""


def autocast(config: RunConfig) -> AbstractContextManager[Any]:
    """The precision that a run's passes are computed in; `config` must be resolved."""
    bf16 = config.precision == "bf16"
    return torch.autocast(torch.device(config.device).type, torch.bfloat16) if bf16 else nullcontext()


class Backward:
    """Leaves the gradients of batches in the parameters of one worker; `config` must be resolved."""

    def __init__(self, forward: Pass, inner: InnerOptimizer, config: RunConfig) -> None:
        self._forward, self._inner, self._config = forward, inner, config

    def __call__(self, batch: Tensor) -> Tensor:
        """Of a batch [sequences, tokens + 1]; returns its mean cross-entropy, a detached scalar."""
        accumulate = self._config.train.accumulate
        self._inner.zero_grad()
        cross_entropy = torch.zeros((), device=batch.device)
        for number, part in enumerate(batch.chunk(accumulate), 1):
            with autocast(self._config):
                loss = self._forward(part, last=number == accumulate)
            (loss.total / accumulate).backward()
            cross_entropy += loss.cross_entropy / accumulate
        return cross_entropy
