"""Finds the optimizers that train a model, so that a worker that is rolled back can reset them."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook


class InnerOptimizers:
    """Notes which torch optimizers step the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        me = weakref.ref(self)  # torch keeps the hook for ever, unless it is removed

        def notice(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if (watching := me()) is not None:
                watching._notice(optimizer)

        weakref.finalize(self, register_optimizer_step_post_hook(notice).remove)

    @property
    def found(self) -> bool:
        """Whether a torch optimizer has stepped the model."""
        return bool(self._found)

    def _notice(self, optimizer: Optimizer) -> None:
        if optimizer in self._found or optimizer in self._others:
            return
        model = self._model()
        ours = set() if model is None else {id(p) for p in model.parameters()}
        trains = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
        (self._found if trains else self._others).add(optimizer)

    def reset(self) -> None:
        """Let every optimizer found forget what it remembers of the parameters, as before its first step."""
        model = self._model()
        for optimizer in self._found:
            for parameter in () if model is None else model.parameters():
                if isinstance(optimizer, torch.optim.Adagrad):  # makes its state once, when it is made
                    for value in optimizer.state[parameter].values():
                        value.zero_()
                else:
                    optimizer.state.pop(parameter, None)
