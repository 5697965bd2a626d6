"""Averages a round between its members: in one shot up to three of them, in two shots between more.

One shot: every member sends its payload to every other. Two shots: the vector is cut into parts, one or more per
member; each member gets everybody's payload of its own parts, takes their mean, encodes that like a delta, and sends it
to all (a reduce-scatter and an all-gather). It costs 2 (M-1)/M payloads instead of M-1, and all decode the same bytes.
Parts end where blocks or chunks do, so encoding a part gives the same bytes as cutting the encoded whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from atoll._util.checks import check_whole
from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.core.flat import CPU, pieces
from atoll.core.outer_step import weighted_mean

ONE_SHOT_MEMBERS = 3
"""Up to here one shot costs no more bytes than 1.5 times two, takes one latency instead of two, and rounds once."""
PART_BYTES = 1 << 17
"""Of the payload of a part, at least, where a member reduces several."""
MOST_PARTS_EACH = 64


def shots(members: int) -> int:
    """Return how often a round of this many members crosses the link: 0 for one alone, 1 or 2."""
    return 0 if members == 1 else 1 if members <= ONE_SHOT_MEMBERS else 2


def sent_bytes(payload_bytes: int, members: int) -> int:
    """Return the bytes that one member puts on its link in a round, headers aside.

    More than three: a slice for every other one to reduce, then a reduced slice to all; together 2 (M-1)/M payloads,
    here rounded up to a whole byte.
    """
    check_whole("members", members)
    check_whole("payload_bytes", payload_bytes, least=0)
    if shots(members) < 2:
        return (members - 1) * payload_bytes
    return -(-2 * (members - 1) * payload_bytes // members)


def part_of(numel: int, part: int, count: int, grain: int = BLOCK) -> slice:
    """Return one of `count` parts of a vector [numel], as equal as multiples of `grain` allow; some may be empty."""
    grains = -(-numel // grain)
    start, end = (min(numel, grain * (grains * edge // count)) for edge in (part, part + 1))
    return slice(start, end)


class MeanResidual:
    """Keeps what a reducer's rounding lost of its parts of a mean, for the next round of the fragment.

    Rounds are known by their `order`, which grows. Those that are still in flight may be reduced again after a resume,
    so what they left is kept beside what they found.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, ...], tuple[tuple[int, ...], dict[int, Tensor]]] = {}

    def before(self, order: tuple[int, ...], members: tuple[int, ...], part: int) -> Tensor | None:
        """Return what the last round before this one lost of a part; None if other members had cut it differently."""
        dealt, parts = self._kept.get(self._newest_before(order), ((), {}))
        return parts.get(part) if dealt == members else None

    def note(self, order: tuple[int, ...], members: tuple[int, ...]) -> None:
        """Note a round that was cut between these members, whether or not this worker has reduced a part of it.

        What was kept of a round that is cut anew, between others, is forgotten.
        """
        if self._kept.get(order, ((), {}))[0] != members:
            self._kept[order] = members, {}

    def keep(self, order: tuple[int, ...], members: tuple[int, ...], part: int, lost: Tensor) -> None:
        """Note what a round between these members lost of a part."""
        self.note(order, members)
        self._kept[order][1][part] = lost

    def drop(self, oldest: tuple[int, ...] | None) -> None:
        """Forget what no round from the `oldest` in flight on needs; None if none is in flight."""
        newest = self._newest_before(oldest)
        for order in list(self._kept):
            if order < newest:
                del self._kept[order]

    def state_dict(self, oldest: tuple[int, ...] | None) -> dict[str, Any]:
        """Return copies of what the oldest round in flight starts from: it and all after it are reduced again."""
        order = self._newest_before(oldest)
        members, parts = self._kept.get(order, ((), {}))
        return {"order": order, "members": members, "parts": {part: lost.clone() for part, lost in parts.items()}}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from what state_dict gave."""
        parts = {part: lost.to(device, copy=True) for part, lost in state["parts"].items()}
        self._kept = {tuple(state["order"]): (tuple(state["members"]), parts)} if state["order"] else {}

    def _newest_before(self, order: tuple[int, ...] | None) -> tuple[int, ...]:
        return max((known for known in list(self._kept) if order is None or known < order), default=())


@dataclass(frozen=True, slots=True)
class Reduction:
    """Reduces the payloads of one round for a link, which only moves bytes."""

    codec: Codec
    numel: int
    """Values of the vector behind a payload."""
    dtype: torch.dtype = torch.float32
    """Of that vector, and of the mean."""
    seed: int = 0
    """Feeds stochastic rounding of the mean; another one for every round."""
    device: torch.device = CPU
    """Where payloads come from and are to be used; links that go through the host's memory bring them back there."""
    order: tuple[int, ...] = ()
    """Which round of its fragment it is; later ones are greater."""
    residual: MeanResidual | None = None
    """What this worker's reducing has lost so far, with error feedback."""
    outlier_ratio: float | None = None
    """How many times larger than expected a delta is left out; None for gradients, or if the user wants all."""

    @property
    def payload_bytes(self) -> int:
        """The size of every member's payload, bytes."""
        return self.codec.payload_bytes(self.numel)

    def part_count(self, members: int) -> int:
        """Return the number of parts in two shots: member m reduces parts m, m + members, and so on.

        Several each, where they are large: the mean of one is on its way while the next is still being gathered.
        """
        return members * max(1, min(MOST_PARTS_EACH, self.payload_bytes // (members * PART_BYTES)))

    def _part(self, part: int, count: int) -> slice:
        return part_of(self.numel, part, count, self.codec.grain)

    def part_bytes(self, part: int, count: int) -> int:
        """Return the bytes of one part of a payload, and of the mean of such parts."""
        cut = self._part(part, count)
        return self.codec.payload_bytes(cut.stop - cut.start)

    def cut(self, payload: Tensor, part: int, count: int) -> Tensor:
        """Return the payload of one part of the vector."""
        return self.codec.cut(payload, self.numel, self._part(part, count))

    def reduced(
        self,
        payloads: Sequence[Tensor],
        weights: Sequence[float],
        part: int,
        count: int,
        members: tuple[int, ...] = (),
        inner: Tensor | None = None,
    ) -> Tensor:
        """Return the encoded mean of the payloads of one part of `count`, summed in the order given.

        With error feedback, it includes what the last round between the same `members` lost of this part. The inner
        products of what is behind the payloads are added to `inner`, fp64 [payloads, payloads].
        """
        cut = self._part(part, count)
        size = cut.stop - cut.start
        mean = torch.empty(size, dtype=self.dtype, device=payloads[0].device)
        for piece in pieces(size, mean.device):
            decoded = [self.codec.decode_piece(payload, size, piece).to(self.dtype) for payload in payloads]
            mean[piece] = weighted_mean(decoded, weights)
            if inner is not None:
                rows = torch.stack(decoded).double()
                inner += rows @ rows.T
        codec, residual = self.codec.for_mean, self.residual
        if residual is None:
            return codec.encode(mean, self.seed + part)
        if (lost := residual.before(self.order, members, part)) is not None:
            mean.add_(lost.to(mean.device), alpha=float(codec.feedback))
        payload = codec.encode(mean, self.seed + part)
        residual.keep(self.order, members, part, mean - codec.decode(payload, size, self.dtype))
        return payload

    def joined(self, reduced: Sequence[Tensor]) -> Tensor:
        """Return the payload of the whole vector from those of all its parts, in order."""
        cuts = [self._part(part, len(reduced)) for part in range(len(reduced))]
        return self.codec.for_mean.joined(reduced, [cut.stop - cut.start for cut in cuts])


def mean_between(reductions: Mapping[int, Reduction], payloads: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the encoded mean of whole payloads, as the workers with these reductions reduce it between them.

    Payloads, which may be fewer, are summed in the order given.
    """
    members, reduction = tuple(reductions), next(iter(reductions.values()))
    if (
        not reduction.codec.stochastic and reduction.residual is None
    ):  # parts end where blocks do, so they round as the whole
        return reduction.reduced(payloads, weights, 0, 1)
    count = reduction.part_count(len(members))
    reduced = []
    for part in range(count):
        cuts = [reduction.cut(payload, part, count) for payload in payloads]
        reduced.append(reductions[members[part % len(members)]].reduced(cuts, weights, part, count, members))
    return reduction.joined(reduced)
