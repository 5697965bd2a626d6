"""Computes the gradients of a batch: the forward and backward pass of one worker."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Loss
from atoll.train.step.inner_optimizer import InnerOptimizer


class LossFunction(Protocol):
    """Computes a model's loss such that its backward pass averages gradients over the worker's ranks."""

    def __call__(self, tokens: Tensor, *, last: bool = True) -> Loss:
        """Return the loss of tokens [rows, time + 1], int64; ranks exchange gradients after the `last` microbatch."""


def autocast(config: RunConfig) -> AbstractContextManager[Any]:
    """Return the context of a run's precision for its passes; `config` must be resolved."""
    bf16 = config.precision == "bf16"
    return torch.autocast(torch.device(config.device).type, torch.bfloat16) if bf16 else nullcontext()


class Backward:
    """Computes the gradients of batches into one worker's parameters; `config` must be resolved."""

    def __init__(self, loss: LossFunction, inner: InnerOptimizer, config: RunConfig) -> None:
        self._loss, self._inner, self._config = loss, inner, config

    def __call__(self, batch: Tensor) -> Tensor:
        """Take a batch [sequences, tokens + 1]; return its mean cross-entropy, a detached scalar."""
        accumulate = self._config.train.accumulate
        self._inner.zero_grad()
        cross_entropy = torch.zeros((), device=batch.device)
        for number, part in enumerate(batch.chunk(accumulate), 1):
            with autocast(self._config):
                loss = self._loss(part, last=number == accumulate)
            (loss.total / accumulate).backward()
            cross_entropy += loss.cross_entropy / accumulate
        return cross_entropy
