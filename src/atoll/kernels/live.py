"""Addresses live parameters as one vector without copying them: a table says where each stretch lies in memory."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.core.block_formats import BLOCK

_SHORTEST = 16  # below, the table would cost a good part of the traffic that it saves


@dataclass(frozen=True, slots=True)
class Live:
    """Lists tensors of one dtype, end to end, as stretches of `grain` values each."""

    table: Tensor
    """[numel / grain] int64: the address of each stretch."""
    grain: int
    dtype: torch.dtype
    numel: int
    tensors: tuple[Tensor, ...]
    """What the addresses are of; kept, so that nobody else gets the memory."""

    def is_of(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors still lie where the table says."""
        return [t.data_ptr() for t in tensors] == [t.data_ptr() for t in self.tensors]


@triton.jit
def addresses(table, stretch, there, DTYPE: tl.constexpr):
    """Return pointers to values of DTYPE, where these stretches of a table begin."""
    # Said of the pointers: said of the numbers that they are made from, it would be forgotten, and loads be narrow.
    return tl.multiple_of(tl.load(table + stretch, there, 0).to(tl.pointer_type(DTYPE)), 16)


def live(tensors: Sequence[Tensor]) -> Live | None:
    """Make the table of some tensors; None if they differ in device or dtype, or do not fall into stretches."""
    dtypes, devices = {tensor.dtype for tensor in tensors}, {tensor.device for tensor in tensors}
    if len(devices) != 1 or len(dtypes) != 1 or not dtypes <= {torch.float32, torch.bfloat16}:
        return None
    if not all(tensor.is_contiguous() and tensor.data_ptr() % 16 == 0 for tensor in tensors):
        return None
    grain = BLOCK  # at most: values that share a unit lie in one row
    while any(tensor.numel() % grain for tensor in tensors):
        grain //= 2
    if grain < _SHORTEST:
        return None
    dtype = dtypes.pop()
    stretch_bytes = grain * dtype.itemsize
    addresses = torch.cat(
        [
            torch.arange(t.numel() // grain, dtype=torch.int64, device="cpu") * stretch_bytes + t.data_ptr()
            for t in tensors
        ]
    )
    numel = sum(tensor.numel() for tensor in tensors)
    return Live(addresses.to(tensors[0].device), grain, dtype, numel, tuple(tensors))
