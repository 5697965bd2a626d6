"""Bundles the kernels of one fragment for `outer.backend`."""

import math
import struct
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from atoll.core.codec import Codec
from atoll.core.flat import PIECE, Window, joined_sums, local_part, words_of
from atoll.core.outer_step import OuterOptimizer, Slots
from atoll.kernels import codec as coding
from atoll.kernels import outer as stepping
from atoll.kernels import top64
from atoll.kernels.fingerprint import sums_of_pieces
from atoll.kernels.live import Live, live
from atoll.kernels.products import inner_products


class Fused:
    """Runs the kernels for the fragment behind a window with an fp32 anchor and a codec that has kernels."""

    def __init__(self, window: Window, codec: Codec) -> None:
        self._window = window
        self._codec = codec
        self._live: Live | None = None
        self.for_mean = self if codec.for_mean == codec else Fused(window, codec.for_mean)
        """Decodes what a mean travels in."""
        self.read = partial(_read, codec)
        """The anchor's fingerprint and the delta's norm from what `encode` found; None if a value cannot be sent."""

    def live(self) -> Live | None:
        """Return the addresses of the live parameters; None if the kernels cannot use their layout."""
        tensors = [local_part(parameter) for parameter in self._window.parameters()]
        if tensors[0].device != self._window.device:
            return None  # the model was moved after its anchors were made
        if self._live is None or not self._live.is_of(tensors):
            self._live = live(tensors)
        return self._live

    def encode(self, start: Tensor, local: Live, anchor: Tensor) -> tuple[Tensor, Tensor]:
        """Encode start - local without waiting; return the payload and int64 numbers for `read`."""
        payload = coding.room(self._codec, start.numel(), 1, start.device)[0]
        worst = torch.zeros(1, dtype=torch.int32, device=start.device)
        coding.encode(self._codec, start, local, payload, worst)
        square = self.inner_products(payload[None]).view(1).view(torch.int64)
        return payload, torch.cat([worst, square, sums_of_pieces(words_of(anchor), PIECE)])

    def encode_vector(self, vector: Tensor) -> Tensor | None:
        """Return the payload of a vector; None where only live parameters are encoded, or a value cannot be sent."""
        return None

    def stacked(self, payloads: Sequence[Tensor]) -> Tensor:
        """Copy payloads from any device into [members, bytes] where the kernels decode them fastest."""
        stack = coding.room(self._codec, self._window.numel, len(payloads), self._window.device)
        for row, payload in zip(stack, payloads, strict=True):
            row.copy_(payload)
        return stack

    def mean(self, payloads: Tensor, weights: Sequence[float], piece: slice) -> Tensor:
        """Return values [piece] of the weighted mean of the vectors behind payloads [members, bytes]."""
        mean = torch.empty(piece.stop - piece.start, dtype=torch.float32, device=payloads.device)
        coding.decode_mean(self._codec, payloads, weights, self._window.numel, piece, mean)
        return mean

    def inner_products(self, payloads: Tensor) -> Tensor:
        """Return the inner products of the vectors behind payloads [members, bytes], fp64 [members, members]."""
        return inner_products(self._codec, payloads, self._window.numel)

    def step(
        self, outer: OuterOptimizer, anchor: Tensor, slots: Slots, mean: Tensor, piece: slice, local: Live | None,
        alpha: float,
    ) -> None:  # fmt: skip
        """Let a mean delta [piece] move anchor and velocity, in place, and blend the anchor into `local`, if given."""
        stepping.outer_merge(outer, anchor, slots[0] if slots else None, mean, piece, local, alpha)
        if local is not None:
            torch.autograd.graph.increment_version(local.tensors)  # as any write by torch would have


class FusedTop64(Fused):
    """Runs the kernels for a fragment in top64, whose deltas are written down: they carry what earlier rounds lost."""

    def encode_vector(self, vector: Tensor) -> Tensor | None:
        """Return the payload of a vector, once the device has encoded it; None if a value cannot be sent."""
        payload = coding.room(self._codec, vector.numel(), 1, vector.device)[0]
        worst = torch.zeros(1, dtype=torch.int32, device=vector.device)
        top64.encode(vector, payload, worst)
        return None if coding.is_bad(self._codec, int(worst)) else payload

    def mean(self, payloads: Tensor, weights: Sequence[float], piece: slice) -> Tensor:
        """Return values [piece] of the weighted mean of the vectors behind payloads [members, bytes]."""
        mean = torch.empty(piece.stop - piece.start, dtype=torch.float32, device=payloads.device)
        top64.decode_mean(payloads, weights, self._window.numel, piece, mean)
        return mean

    def inner_products(self, payloads: Tensor) -> Tensor:
        """Return the inner products of the vectors behind payloads [members, bytes], fp64 [members, members]."""
        return top64.inner_products(payloads, self._window.numel)


def _read(codec: Codec, found: Sequence[int]) -> tuple[int, float] | None:
    worst, square, *sums = found
    if coding.is_bad(codec, worst):
        return None
    (squared,) = struct.unpack("<d", struct.pack("<q", square))
    return joined_sums(sums), math.sqrt(squared)
