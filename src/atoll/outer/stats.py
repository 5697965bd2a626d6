"""Counts what one worker's loop does, and describes applied rounds: members, norm and cosine of their deltas."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll._util.device_values import DeviceValues
from atoll.core.flat import joined_sums
from atoll.core.outer_step import shares_of
from atoll.link.base import Round, RoundId, TransferStats


@dataclass(slots=True)
class Counters:
    """Counts what one worker's outer loop has done so far."""

    rounds_sent: int = 0
    """Rounds that this worker gave something to; with kernels, one that could not be sent is taken back later."""
    rounds_applied: int = 0
    rounds_missed: int = 0
    """Rounds that were completed without the payload this worker had sent."""
    rounds_left_out: int = 0
    """Rounds without this worker, because its loss or its delta was not finite, or its delta far too large."""
    rounds_outlier: int = 0
    """Rounds that left this worker's delta out because it was far too large."""
    outliers_seen: int = 0
    """Deltas of any worker that were left out of applied rounds for that reason."""
    roll_backs: int = 0
    """How often this worker gave up its work because something of it was not finite, or far too large."""
    rejoins: int = 0
    """How often this worker was cut off from the others and joined again."""
    rejoins_dropped: int = 0
    """How often its work was dropped then, because the others were more than a period ahead."""
    bytes_sent: int = 0
    """Payload bytes handed to the link, counted once however many workers receive them."""
    bytes_received: int = 0
    """Payload bytes of the other workers."""
    wait_s: float = 0.0
    """Seconds spent blocked on the link: the exposed part of what rounds take."""
    hidden_s: float = 0.0
    """Seconds for which rounds travelled while this worker trained, summed over rounds."""
    wire_sent: int = 0
    """Bytes put on the wire, headers included; inside one process 0, or what an emulated line carries."""
    wire_received: int = 0
    """Bytes that came from the wire."""

    def count_outliers(self, seen: int, *, own: bool) -> None:
        """Count the deltas that a round has left out for their size, with this worker's `own` or without."""
        self.outliers_seen += seen
        self.rounds_outlier += own
        self.rounds_left_out += own


@dataclass(frozen=True, slots=True, repr=False)
class Applied:
    """Describes one applied round. On a GPU, norm, cosine and sums wait until the device has computed them."""

    round_id: RoundId
    step: int
    """The inner step it was applied after."""
    members: tuple[int, ...]
    """Workers whose payloads arrived and counted."""
    transfer: TransferStats | None = field(default=None, compare=False)
    """When and how it travelled."""
    counted: DeviceValues | None = field(default=None, compare=False)
    """Where `sums` come from; None if nobody's payload arrived."""
    outliers: tuple[int, ...] = ()
    """Workers whose deltas arrived and were left out: they were many times larger than expected."""
    between: tuple[int, ...] = field(default=(), compare=False)
    """Workers between which an elastic link made the round."""
    version: int = field(default=0, compare=False)
    """Rounds applied to the anchor, with this one."""
    anchor_sums: DeviceValues | None = field(default=None, compare=False)
    """Where `fingerprint` comes from; None unless the link is elastic."""

    @property
    def fingerprint(self) -> int:
        """Hash of the anchor's bits after the round, the same on every worker; 0 unless the link is elastic."""
        return joined_sums(self.anchor_sums.values) if self.anchor_sums else 0

    @property
    def sums(self) -> tuple[float, ...]:
        """The squared norm of the mean, then the deltas' inner products in rows; those of ranks' parts add up."""
        return self.counted.values if self.counted else (0.0,)

    @property
    def norm(self) -> float:
        """Length of the mean delta, the outer gradient; the same on every worker, but for rounding on GPUs."""
        return sizes(self.sums)[0]

    @property
    def cosine(self) -> float | None:
        """Cosine similarity of two members' deltas, averaged over all pairs; None where no two were seen here."""
        return sizes(self.sums)[1]

    def __repr__(self) -> str:
        at = f"{self.round_id}, step={self.step}, members={self.members}"
        return f"Applied({at}, norm={self.norm}, cosine={self.cosine})"


Observer = Callable[[Applied], None]
_AT_ONCE = 1 << 20  # values, for in fp64 they take twice the room


class Products:
    """Sums up the inner products of the members' deltas and of their mean, piece by piece, in fp64."""

    def __init__(self) -> None:
        self._sums: list[Tensor] = []  # by piece: the mean's square, then [members, members] in rows; on their device

    def add(self, decoded: Sequence[Tensor], mean: Tensor) -> None:
        """Take in the same piece, [values], of every member's delta that was seen here and of their mean."""
        for parts in zip(*(vector.split(_AT_ONCE) for vector in (mean, *decoded)), strict=True):
            rows = torch.stack(parts).double()
            square = (rows[0] @ rows[0]).view(1)
            self._sums.append(torch.cat([square, (rows[1:] @ rows[1:].T).flatten()]) if decoded else square)

    def add_known(self, inner: Tensor, square: Tensor) -> None:
        """Take in all at once: products [members, members] of the deltas seen here, and the square of their mean."""
        self._sums.append(torch.cat([square.view(1), inner.flatten()]))

    def add_inner(self, inner: Tensor) -> None:
        """Take in products [members, members] that came with a mean whose pieces have been added alone."""
        square = torch.stack(self._sums).sum(0)[:1] if self._sums else torch.zeros_like(inner[0, :1])
        self._sums = [torch.cat([square, inner.to(square.device).flatten()])]

    def applied(self, completed: Round, step: int) -> Applied:
        """Return the description of the round that was summed up."""
        sums = torch.zeros(1 + len(completed.payloads) ** 2, dtype=torch.float64, device="cpu")
        if self._sums:
            sums = torch.stack(self._sums).sum(0)
        members, outliers = (tuple(m.worker for m in who) for who in (completed.members, completed.outliers))
        counted, between = DeviceValues(sums) if completed.members else None, completed.between
        return Applied(completed.round_id, step, members, completed.transfer, counted, outliers, between)


def mean_square(inner: Tensor, weights: Sequence[float]) -> Tensor:
    """Return the squared norm of a weighted mean, [], from the inner products [n, n] of its terms."""
    shares = torch.tensor(shares_of(weights), dtype=inner.dtype, device="cpu").to(inner.device, non_blocking=True)
    return (shares @ inner @ shares).clamp(min=0)  # where they cancel, rounding may take it below


def sizes(sums: Sequence[float]) -> tuple[float, float | None]:
    """Return norm and mean cosine of a round from `Applied.sums`."""
    square, *products = sums
    members = math.isqrt(len(products))
    if members < 2:
        return math.sqrt(square), None
    inner = torch.tensor(products, dtype=torch.float64, device="cpu").view(members, members)
    lengths = inner.diagonal().sqrt()
    cosines = inner / lengths.outer(lengths)
    pairs = cosines[torch.ones_like(cosines, dtype=torch.bool).triu(1)].nan_to_num()  # a worker that did not move
    return math.sqrt(square), float(pairs.mean())
