"""State dicts and gradients of models sharded over ranks (FSDP); ordinary tensors are taken as they are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from atoll.core.flat import local_part
from atoll.core.fragments import Fragment
from atoll.errors import ConfigError


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a tensor from the shards of all ranks, which must all call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_state(value: Any) -> Any:
    """Replace every DTensor in nested dicts, lists and tuples by this rank's shard, to be saved."""
    if isinstance(value, DTensor):
        return local_part(value)
    if isinstance(value, dict):
        return {key: local_state(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(local_state(item) for item in value)
    return value


def load_model(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Load what `local_state(model.state_dict())` returned."""
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
    """Load what `local_state(optimizer.state_dict())` returned."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {
        number: {name: _sharded_like(value, parameters[number]) for name, value in slots.items()}
        for number, slots in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": state})


def _sharded_like(value: Any, parameter: Tensor) -> Any:
    """Return a shard of optimizer state, such as a momentum, as a DTensor laid out like its parameter."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor) or value.dim() == 0:
        return value
    here = parameter.to_local()
    if value.shape != here.shape:
        raise ValueError(f"a shard of optimizer state has shape {tuple(value.shape)}, not {tuple(here.shape)}")
    return DTensor.from_local(
        value.to(here.device),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def check_fragments(model: nn.Module, fragments: Sequence[Fragment], ranks: int) -> None:
    """Refuse fragments of which some rank would hold nothing."""
    sizes = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
    for fragment in fragments:
        rows = max(sizes[name] for name in fragment.parameters)
        if -(-rows // ranks) * (ranks - 1) >= rows:
            raise ConfigError(
                f"train.parallel: {ranks} ranks are too many, the last one would hold nothing of fragment "
                f'"{fragment.name}", whose largest dimension to shard is {rows}: use fewer, or "ddp"'
            )


def full_state_dict(model: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Gather the state dict on the CPU, tied parameters as one tensor; {} on ranks that do not `keep` it."""
    gathered: dict[int, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in gathered:
            full = full_tensor(tensor.detach())  # on all ranks
            gathered[id(tensor)] = full.cpu() if keep else torch.empty(0)
        tensors[name] = gathered[id(tensor)]
    return tensors if keep else {}


def share_nonfinite(model: nn.Module) -> None:
    """Make the gradient non-finite on all ranks if it is on one, so that all are rolled back or none."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    zero_or_nan = full_tensor(nn.utils.get_total_norm(gradients)) * 0
    torch._foreach_add_([local_part(gradient) for gradient in gradients], zero_or_nan)
