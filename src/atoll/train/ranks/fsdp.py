"""Models whose parameters are cut into one part a rank (FSDP): what a rank writes down, takes back, or gathers.

Everything here also takes ordinary tensors, and then does the ordinary thing.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.core.flat import local_part


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor, put together from the parts of all ranks, which must all ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own(value: Any) -> Any:
    """A nest of dicts, lists and tuples with every tensor in it as far as this rank holds it, to be saved."""
    if isinstance(value, DTensor):
        return local_part(value)
    if isinstance(value, dict):
        return {key: own(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(own(item) for item in value)
    return value


def load_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Take back what `own(model.state_dict())` gave."""
    live = model.state_dict()
    if not any(isinstance(tensor, DTensor) for tensor in live.values()):
        model.load_state_dict(saved)
        return
    if wrong := sorted(live.keys() ^ saved.keys()):
        raise KeyError(f"{wrong[0]} is in one of model and checkpoint only")
    for name, tensor in live.items():
        here = local_part(tensor)
        if here.shape != saved[name].shape:
            raise ValueError(f"{name} has shape {tuple(saved[name].shape)} there, {tuple(here.shape)} here")
        here.copy_(saved[name])


def load_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Take back what `own(optimizer.state_dict())` gave."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: {name: _like(value, parameters[number]) for name, value in slots.items()}
        for number, slots in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _like(value: Any, parameter: Tensor) -> Any:
    """A part of something of a parameter's shape, such as its momentum, as what it is a part of."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    here = parameter.to_local()
    if value.shape != here.shape:
        raise ValueError(f"a part of an optimizer's state has shape {tuple(value.shape)}, not {tuple(here.shape)}")
    return DTensor.from_local(
        value.to(here.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def gathered(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """The whole state dict on the CPU, tied parameters as one tensor; all ranks must ask, who keeps nothing gets {}."""
    found: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in found:
            all_of_it = whole(tensor.detach())
            found[id(tensor)] = all_of_it.cpu() if keep else torch.empty(0)
        tensors[name] = found[id(tensor)]
    return tensors if keep else {}


def alike(model: nn.Module) -> None:
    """Make a gradient that is not finite on some rank not finite on all: one rank's part must not decide alone.

    Whoever leaves itself out of a round, or is rolled back, then does so with all its parts.
    """
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    nothing = whole(nn.utils.get_total_norm(gradients)) * 0  # or NaN
    torch._foreach_add_([local_part(gradient) for gradient in gradients], nothing)
