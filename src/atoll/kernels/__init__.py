"""Triton twins of what `core` computes, for GPUs: one pass over memory where torch would take several.

Nothing here decides anything. Each function is the twin of a plain one, with the same bits or a stated bound; `usable`
says where they can run, and whoever calls keeps the plain one for everywhere else.
"""

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atoll.core.codec import Codec
    from atoll.core.flat import Window
    from atoll.kernels.fragment import Fused


def usable(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device: on a GPU, where Triton is installed."""
    return device.type == "cuda" and _triton_is_there()


@cache
def _triton_is_there() -> bool:
    return find_spec("triton") is not None


def fused(window: "Window", codec: "Codec") -> "Fused | None":
    """The kernels for a fragment with this codec, if there are any for its device."""
    if not usable(window.device) or window.dtype != torch.float32:
        return None
    from atoll.kernels.codec import has_twin  # needs Triton, like all that follows
    from atoll.kernels.fragment import Fused

    return Fused(window, codec) if has_twin(codec) else None
