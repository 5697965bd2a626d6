"""Compares nested values and tensors to the bit."""

import struct
from typing import Any

import torch
from torch import Tensor

DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn,
    torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
]  # fmt: skip
"""What a checkpoint must hold."""


def raw_bytes(tensor: Tensor) -> list[int]:
    dense = tensor.detach().clone(memory_format=torch.contiguous_format)
    return dense.reshape(-1).view(torch.uint8).tolist()


def bits(value: Any) -> Any:
    """`value` as something that == compares by type, order and bit."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, raw_bytes(value)
    if isinstance(value, dict):
        return dict, [(key, type(key), bits(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [bits(item) for item in value]
    return type(value), struct.pack(">d", value) if isinstance(value, float) else value
