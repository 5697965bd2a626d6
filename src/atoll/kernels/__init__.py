"""Computes in Triton what `core` computes in plain torch: one pass over memory where torch would take several.

Nothing here decides anything. Each function is the twin of a plain one, with the same bits or a stated bound; `usable`
says where they can run, and the caller keeps the plain one for everywhere else.
"""

import warnings
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from atoll.core.codec import Codec
    from atoll.core.flat import Window
    from atoll.kernels.fragment import Fused


OLDEST = (8, 0)
"""Compute capability of the first GPUs with bf16."""


def usable(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device: on a GPU with bf16, where Triton is installed and works."""
    return device.type == "cuda" and _works(device)


@cache
def _works(device: torch.device) -> bool:
    if find_spec("triton") is None or torch.cuda.get_device_capability(device) < OLDEST:
        return False
    from atoll.kernels.fingerprint import sums_of_pieces

    try:  # Triton compiles what it runs, and not every machine has what that takes
        sums_of_pieces(torch.zeros(8, dtype=torch.int64, device=device), 8)
    except Exception as fault:
        warnings.warn(f"Triton does not work here, so plain torch is used, which is slower: {fault}", stacklevel=2)
        return False
    return True


def fused(window: "Window", codec: "Codec") -> "Fused | None":
    """Return the kernels for a fragment with this codec, if there are any for its device."""
    if not usable(window.device) or window.dtype != torch.float32:
        return None
    from atoll.kernels.codec import has_twin  # needs Triton, like all that follows
    from atoll.kernels.fragment import Fused, FusedTop64

    if codec.format == "top64":
        return FusedTop64(window, codec)
    return Fused(window, codec) if has_twin(codec) else None
