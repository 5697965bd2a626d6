"""What the payloads of a round are made of, and how they are summed up in two shots (`core.shots`).

Parts end on block boundaries, so encoding a part gives the same bytes as cutting the encoded whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.codec import BLOCK, Codec
from atoll.core.flat import CPU, pieces
from atoll.core.outer import weighted_mean

PART_BYTES = 1 << 16
"""Of the payload of a part, at least, where a member reduces several."""
MOST_PARTS_EACH = 64


def part_of(numel: int, part: int, count: int) -> slice:
    """One of `count` parts of a vector [numel]: whole blocks, as equal as can be; some may be empty."""
    blocks = -(-numel // BLOCK)
    start, end = (min(numel, BLOCK * (blocks * edge // count)) for edge in (part, part + 1))
    return slice(start, end)


@dataclass(frozen=True, slots=True)
class Cargo:
    """What a round carries, for a link to take apart and put together: it does no arithmetic of its own."""

    codec: Codec
    numel: int
    """Values of the vector behind a payload."""
    dtype: torch.dtype = torch.float32
    """Of that vector, and of the mean."""
    seed: int = 0
    """Feeds stochastic rounding of the mean; another one for every round."""
    device: torch.device = CPU
    """Where payloads come from and are to be used; links that go through the host's memory bring them back there."""

    @property
    def payload_bytes(self) -> int:
        """Of every member's contribution."""
        return self.codec.payload_bytes(self.numel)

    def part_count(self, members: int) -> int:
        """Parts in two shots: a multiple of the members, of which member m reduces m, m + members, and so on.

        Several each, where they are large: the mean of one is on its way while the next is still being gathered.
        """
        return members * max(1, min(MOST_PARTS_EACH, self.payload_bytes // (members * PART_BYTES)))

    def part_bytes(self, part: int, count: int) -> int:
        """Of a payload's part, and of the mean of such parts."""
        cut = part_of(self.numel, part, count)
        return self.codec.payload_bytes(cut.stop - cut.start)

    def cut(self, payload: Tensor, part: int, count: int) -> Tensor:
        """The payload of one part of the vector."""
        return self.codec.cut(payload, self.numel, part_of(self.numel, part, count))

    def reduced(self, payloads: Sequence[Tensor], weights: Sequence[float], part: int, count: int) -> Tensor:
        """The encoded mean of the members' payloads of one part, summed in the order given."""
        cut = part_of(self.numel, part, count)
        size = cut.stop - cut.start
        mean = torch.empty(size, dtype=self.dtype, device=payloads[0].device)
        for piece in pieces(size, mean.device):
            decoded = [self.codec.decode_piece(payload, size, piece).to(self.dtype) for payload in payloads]
            mean[piece] = weighted_mean(decoded, weights)
        return self.codec.encode(mean, self.seed + part)

    def joined(self, reduced: Sequence[Tensor]) -> Tensor:
        """The payload of the whole vector from those of all its parts, in order."""
        cuts = [part_of(self.numel, part, len(reduced)) for part in range(len(reduced))]
        return self.codec.joined(reduced, [cut.stop - cut.start for cut in cuts])

    def mean_of(self, payloads: Sequence[Tensor], weights: Sequence[float], members: int) -> Tensor:
        """The encoded mean of whole payloads, as `members` would reduce it between them."""
        if not self.codec.stochastic:  # parts end where blocks do, so they are rounded as in the whole
            return self.reduced(payloads, weights, 0, 1)
        count = self.part_count(members)
        return self.joined(
            [
                self.reduced([self.cut(payload, part, count) for payload in payloads], weights, part, count)
                for part in range(count)
            ]
        )
