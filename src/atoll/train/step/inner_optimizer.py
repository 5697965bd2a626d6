"""Defines the inner optimizer of one worker and its learning-rate schedule."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from atoll.core.fragments import find_blocks
from atoll.errors import ConfigError
from atoll.settings.run_settings import TrainSection
from atoll.train.ranks import fsdp


def learning_rate(step: int, settings: TrainSection) -> float:
    """Return the learning rate of an inner step, counted from 1: linear warm-up, then cosine to `final_lr * lr`."""
    steps, warmup, peak = settings.steps, settings.warmup, settings.lr
    assert steps is not None and warmup is not None and peak is not None  # resolved
    if step <= warmup:
        return peak * step / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return peak * (settings.final_lr + (1 - settings.final_lr) * (1 + math.cos(math.pi * progress)) / 2)


class InnerOptimizer:
    """Applies AdamW to all parameters, or Muon to matrices inside blocks and AdamW to the rest.

    Muon's step is scaled to the size of AdamW's, so one learning rate serves both. Parameters with fewer
    than two dimensions (norm gains) have no weight decay.
    """

    def __init__(self, model: nn.Module, settings: TrainSection) -> None:
        self._model = model
        self._settings = settings
        self._optimizers = self._make()

    def _make(self) -> list[torch.optim.Optimizer]:
        named = [(name, p) for name, p in self._model.named_parameters() if p.requires_grad]
        decay = self._settings.weight_decay
        assert decay is not None and self._settings.lr is not None  # resolved
        in_blocks = tuple(f"{block}." for block in find_blocks(self._model))
        matrices: list[Tensor] = []
        if self._settings.optimizer == "muon":
            matrices = [p for name, p in named if p.dim() == 2 and name.startswith(in_blocks)]
            if not matrices:
                problem = 'train.optimizer: "muon" is for the matrices of repeated blocks'
                raise ConfigError(f'{problem}, and this model has none; use "adamw"')
        taken = {id(p) for p in matrices}
        rest = [p for _, p in named if id(p) not in taken]
        groups = [
            {"params": [p for p in rest if p.dim() >= 2], "weight_decay": decay},
            {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
        ]
        groups = [group for group in groups if group["params"]]
        made: list[torch.optim.Optimizer] = []
        if groups:
            lr, betas = self._settings.lr, self._settings.betas
            made.append(torch.optim.AdamW(groups, lr=lr, betas=betas, fused=True))
        if matrices:
            made.append(
                torch.optim.Muon(matrices, lr=self._settings.lr, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
            )
        return made

    def zero_grad(self) -> None:
        """Clear the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def clip(self) -> Tensor:
        """Clip the gradients to `train.clip`, and return their norm before clipping, a scalar."""
        return fsdp.full_tensor(nn.utils.clip_grad_norm_(self._model.parameters(), self._settings.clip or math.inf))

    def step(self, rate: float) -> None:
        """Take one step at this learning rate."""
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the part of the optimizers' state that this rank holds."""
        return {"optimizers": [fsdp.local_state(optimizer.state_dict()) for optimizer in self._optimizers]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            fsdp.load_optimizer(optimizer, saved)
