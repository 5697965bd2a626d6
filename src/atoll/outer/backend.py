"""Does the arithmetic of one fragment with torch operations or fused Triton kernels: chosen here and nowhere else.

Both backends give the same bits. Vectors are worked on in pieces, so that temporaries stay in a core's cache and no
full mean is ever stored.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll._util.device_values import DeviceValues
from atoll.core.codec import Codec
from atoll.core.flat import Window, pieces
from atoll.core.outer_step import Adam, OuterOptimizer, blend, weighted_mean
from atoll.errors import NonFiniteError
from atoll.kernels import fused
from atoll.link.base import Contribution, Round
from atoll.outer.stats import Products, mean_square

if TYPE_CHECKING:
    from atoll.kernels.fragment import Fused


def backend_for(window: Window, codec: Codec) -> "Backend":
    """Return the kernels for a fragment where its device has any, and plain torch elsewhere."""
    kernels = fused(window, codec)
    return Backend(window, codec) if kernels is None else KernelBackend(window, codec, kernels)


class Backend:
    """Computes with plain torch operations, on any device."""

    def __init__(self, window: Window, codec: Codec) -> None:
        self.window = window
        self.codec = codec

    def encode_live(
        self, start: Callable[[], Tensor], anchor: Tensor, made: Contribution, floor: float
    ) -> "Encoding | None":
        """Encode start - parameters without waiting for the device; None if this backend cannot."""
        return None

    def encode(self, vector: Tensor, seed: int) -> Tensor:
        """Return the payload of a vector [numel], uint8; NonFiniteError names the parameter that cannot be sent."""
        try:
            return self.codec.encode(vector, seed)
        except NonFiniteError as error:
            worst = int(vector.abs().nan_to_num(torch.inf).argmax())
            raise NonFiniteError(f"parameter {self.window.locate(worst)!r}: {error}") from error

    def decode(self, payload: Tensor) -> Tensor:
        """Return the vector [numel] behind a payload."""
        return self.codec.decode(payload.to(self.window.device), self.window.numel, self.window.dtype)

    def decode_piece(self, payload: Tensor, piece: slice) -> Tensor:
        """Return one of the `pieces` of the vector behind a payload."""
        values = self.codec.decode_piece(payload, self.window.numel, piece)
        return values.to(self.window.device, self.window.dtype)

    def means(self, completed: Round, products: Products | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mean of a round with members, piece by piece; `products` sums up inner products on the way."""
        weights = [member.weight for member in completed.members]
        for piece in pieces(self.window.numel, self.window.device):
            decoded: list[Tensor] = []
            if completed.reduced is None or (products is not None and completed.inner is None):
                decoded = [self.decode_piece(payload, piece) for payload in completed.payloads]
            if completed.reduced is None:
                mean = weighted_mean(decoded, weights)
            else:
                values = self.codec.for_mean.decode_piece(completed.reduced, self.window.numel, piece)
                mean = values.to(self.window.device, self.window.dtype)
            if products is not None:
                products.add(decoded, mean)
            yield piece, mean
        if products is not None and completed.inner is not None:
            products.add_inner(completed.inner)

    def outer_step(
        self,
        outer: OuterOptimizer,
        anchor: Tensor,
        slots: Sequence[Tensor],
        means: Iterator[tuple[slice, Tensor]],
        count: int,
        alpha: float | None,
    ) -> None:
        """Let mean deltas move the anchor and the slots in place; blend the result into the parameters.

        Args:
            outer: The outer optimizer.
            anchor: The outer parameters, [numel].
            slots: The outer optimizer's vectors, each [numel].
            means: What `means` yields.
            count: The number of this round, from 1.
            alpha: How much of the live parameters stays; None leaves them alone.
        """
        for piece, mean in means:
            parts = tuple(slot[piece] for slot in slots)
            anchor[piece], moved = outer.step(anchor[piece], parts, mean, count)
            for part, new in zip(parts, moved, strict=True):
                part.copy_(new)
        if alpha is not None:
            self.blend(anchor, alpha)

    def blend(self, anchor: Tensor, alpha: float) -> None:
        """Mix the anchor into the live parameters, of which `alpha` stays."""
        if alpha == 0:
            self.window.write(anchor)
            return
        local = self.window.read()
        for piece in pieces(local.numel(), local.device):
            local[piece] = blend(local[piece], anchor[piece], alpha)
        self.window.write(local)


class KernelBackend(Backend):  # pragma: no cover (needs Triton: tests/unit/test_kernels.py, test_cuda.py)
    """Computes with Triton kernels: one pass over memory where torch takes several."""

    def __init__(self, window: Window, codec: Codec, kernels: "Fused") -> None:
        super().__init__(window, codec)
        self._kernels = kernels

    def encode_live(
        self, start: Callable[[], Tensor], anchor: Tensor, made: Contribution, floor: float
    ) -> "Encoding | None":
        """Encode start - parameters without waiting for the device; None if the parameters are not laid out for it."""
        live = self._kernels.live()
        if live is None:
            return None
        payload, found = self._kernels.encode(start(), live, anchor)
        return Encoding(replace(made, payload=payload), DeviceValues(found), self._kernels.read, floor)

    def encode(self, vector: Tensor, seed: int) -> Tensor:
        """Return the payload of a vector [numel], uint8; NonFiniteError names the parameter that cannot be sent."""
        payload = self._kernels.encode_vector(vector)
        return super().encode(vector, seed) if payload is None else payload  # also to say why it cannot be sent

    def decode(self, payload: Tensor) -> Tensor:
        """Return the vector [numel] behind a payload."""
        return self.decode_piece(payload, slice(0, self.window.numel))

    def decode_piece(self, payload: Tensor, piece: slice) -> Tensor:
        """Return one of the `pieces` of the vector behind a payload."""
        return self._kernels.mean(payload.to(self.window.device)[None], [1.0], piece)

    def means(self, completed: Round, products: Products | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yield the mean of a round with members, piece by piece; `products` sums up inner products on the way."""
        weights = [member.weight for member in completed.members]
        averaged, kernels = completed.payloads, self._kernels
        if completed.reduced is not None:
            averaged, weights, kernels = (completed.reduced,), [1.0], self._kernels.for_mean
        stacked = kernels.stacked(averaged)
        if products is not None and self.window.numel:
            inner = kernels.inner_products(stacked)
            of_deltas = inner if completed.reduced is None else self._inner_products(completed)
            products.add_known(of_deltas, mean_square(inner, weights))
        for piece in pieces(self.window.numel, self.window.device):
            yield piece, kernels.mean(stacked, weights, piece)

    def _inner_products(self, completed: Round) -> Tensor:
        """Return the inner products of the members' deltas: as they came with the mean, or of the payloads."""
        if completed.inner is None:
            return self._kernels.inner_products(self._kernels.stacked(completed.payloads))
        return completed.inner.to(self.window.device, non_blocking=True)

    def outer_step(
        self,
        outer: OuterOptimizer,
        anchor: Tensor,
        slots: Sequence[Tensor],
        means: Iterator[tuple[slice, Tensor]],
        count: int,
        alpha: float | None,
    ) -> None:
        """Let mean deltas move the anchor and the slots in place, and blend it into the parameters in one pass."""
        if isinstance(outer, Adam):  # has no kernel
            super().outer_step(outer, anchor, slots, means, count, alpha)
            return
        live = None if alpha is None else self._kernels.live()
        used = tuple(slots) if outer.slot_names else ()
        for piece, mean in means:
            self._kernels.step(outer, anchor, used, mean, piece, live, alpha or 0.0)
        if alpha is not None and live is None:
            self.blend(anchor, alpha)


class Encoding:  # pragma: no cover (made by kernels alone)
    """Offers a payload that a device still encodes: whether it can be sent is known once that is done."""

    def __init__(
        self,
        made: Contribution,
        found: DeviceValues,
        read: Callable[[Sequence[int]], tuple[int, float] | None],
        floor: float,
    ) -> None:
        self._made = made
        self._found = found
        self._floor = floor  # norms up to this are of rounding alone
        self._read = read  # not the kernels themselves: links keep offers, and would keep the model

    @property
    def payload(self) -> Tensor:
        """The payload, uint8, once the device has encoded it."""
        return self._made.payload

    def settled(self) -> Contribution | None:
        """Wait for the device; None if a value of the delta was not finite, or too large."""
        read = self._read(self._found.values)
        if read is None:
            return None
        anchor_fingerprint, norm = read
        member = self._made.member
        size = member.size.of(norm, self._floor)
        return replace(self._made, member=replace(member, anchor_fingerprint=anchor_fingerprint, size=size))
