"""Computes `core.flat.fingerprint` on a GPU: the sums of all pieces in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.kernels.launch import launch

_TILE = 4096
"""Divides a piece, so that a tile lies in one."""


@triton.jit
def _sums(words, sums, numel, PIECE: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    word = tl.load(words + at, at < numel, 0)
    # As core.flat.fingerprint has it.
    place = (at % PIECE + 1) * -7046029254386353131
    factor = (place ^ (place >> 29)) | 1
    tl.atomic_add(sums + tile * TILE // PIECE, tl.sum((word ^ (word >> 32)) * factor, 0))


def sums_of_pieces(words: Tensor, piece: int) -> Tensor:
    """Return, for int64 words [n], for each piece, the wrapping sum of its words by place, int64 [pieces]."""
    sums = torch.zeros(-(-words.numel() // piece), dtype=torch.int64, device=words.device)
    launch(_sums, -(-words.numel() // _TILE), words, sums, words.numel(), PIECE=piece, TILE=_TILE)
    return sums
