"""Starts kernels: on the device that their tensors are on."""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}
"""Of live parameters."""


def launch(kernel: Any, programs: int, *arguments: Any, **options: Any) -> None:
    """Run `programs` copies of a kernel; Triton by itself would take the current device, whatever it is given."""
    here = next(argument for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device_of(here):
        kernel[(programs,)](*arguments, **options)
