"""Encodes the 64 largest of every 4096 values: 12 bits for the place and 2 for the value.

A last chunk of fewer than CHUNK values keeps one value for every KEEP_ONE_IN. The 2 bits are the sign and a choice of
two levels, which are the means of the chunk's smaller and larger kept magnitudes. A payload begins with three bytes per
chunk: the exponent of its largest magnitude and the two levels as whole numbers. Then come, for all kept values,
the low eight bits of their places, the high four bits (two to a byte) and the codes (four to a byte).

All sums are of integers, so every processor finds the same bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.core.block_formats import TOO_LARGE, packed, power_of_two, refuse
from atoll.core.flat import PIECE, pieces

CHUNK = 4096
"""Consecutive values among which the largest are kept; a place in a chunk takes 12 bits."""
KEEP_ONE_IN = 64
"""One value is kept for this many values of a chunk."""
assert PIECE % CHUNK == 0, "a piece holds whole chunks"

KEPT = CHUNK // KEEP_ONE_IN
"""Values kept of a whole chunk."""
HEAD = 3
"""Bytes per chunk before the kept values: exponent, lower level, higher level."""
FINEST = 15
"""Magnitudes become whole numbers with this many bits below the leading bit of the largest."""
LOWEST = 1 + FINEST
"""Lowest biased exponent of a chunk; if its largest magnitude is smaller, this one is used."""
_NOWHERE = 1 << 20  # sorts after every place


@dataclass(frozen=True, slots=True)
class Top64:
    """Encodes the largest values of every chunk in 2 bits each, and drops the others."""

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of a payload of `numel` values."""
        kept = -(-numel // KEEP_ONE_IN)
        return HEAD * -(-numel // CHUNK) + kept + -(-kept // 2) + -(-kept // 4)

    def encode(self, vector: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the payload of a vector, uint8; rounding is never random."""
        numel = vector.numel()
        payload = torch.empty(self.payload_bytes(numel), dtype=torch.uint8, device=vector.device)
        for piece in pieces(numel, vector.device):
            for part, made in zip(self.sections(payload, numel, piece), _encoded(vector[piece]), strict=True):
                part.copy_(made)
        return payload

    def sections(self, payload: Tensor, numel: int, cut: slice) -> list[Tensor]:
        """Return the parts of a payload for a range of values: heads, low and high bits of places, codes."""
        chunks, kept = -(-numel // CHUNK), -(-numel // KEEP_ONE_IN)
        lengths = [HEAD * chunks, kept, -(-kept // 2), -(-kept // 4)]
        heads, low, high, codes = payload.split(lengths)
        first, last = cut.start // KEEP_ONE_IN, -(-cut.stop // KEEP_ONE_IN)
        return [
            heads[HEAD * (cut.start // CHUNK) : HEAD * -(-cut.stop // CHUNK)],
            low[first:last],
            high[first // 2 : -(-last // 2)],
            codes[first // 4 : -(-last // 4)],
        ]

    def largest(self, payload: Tensor, numel: int) -> slice:
        """Return the chunk with the largest exponent."""
        first = CHUNK * int(payload[: HEAD * -(-numel // CHUNK) : HEAD].argmax())
        return slice(first, min(first + CHUNK, numel))

    def decode(self, payload: Tensor, numel: int, piece: slice) -> Tensor:
        """Return the values of a piece, fp32; a piece begins on a chunk boundary."""
        heads, low, high, codes = self.sections(payload, numel, piece)
        size, kept = piece.stop - piece.start, low.numel()
        chunk = torch.arange(kept, device=payload.device) // KEPT
        place = low.long() + (_unpacked(high, 2)[:kept].long() << 8)
        code = _unpacked(codes, 4)[:kept]
        head = heads.view(-1, HEAD).int()[chunk]
        level = torch.where((code & 1).bool(), head[:, 2], head[:, 1])
        value = level * power_of_two(head[:, 0].clamp(min=LOWEST) + (8 - FINEST))
        value = torch.where((code & 2).bool(), -value, value)
        vector = torch.zeros(-(-size // CHUNK) * CHUNK, dtype=torch.float32, device=payload.device)
        # A chunk with fewer values than places repeats one of them; repeated writes are of the same value.
        return vector.index_put_((chunk * CHUNK + place,), value)[:size]


def _encoded(source: Tensor) -> list[Tensor]:
    """Return heads, low and high bits of places, and codes of a piece, uint8."""
    size = source.numel()
    fill = -size % CHUNK
    values = source.to(torch.float32)
    rows = (torch.nn.functional.pad(values, (0, fill)) if fill else values).view(-1, CHUNK)
    magnitude = (rows.view(torch.int32) & 0x7FFF_FFFF).long()
    if int(magnitude.max()) >= TOO_LARGE:
        refuse(source, "exceeds top64, which ends at 1.7e38")
    behind = torch.arange(CHUNK - 1, -1, -1, device=source.device)  # of equal magnitudes the first is kept
    best = ((magnitude << 12) | behind).topk(KEPT, dim=1).values
    place, bits = CHUNK - 1 - (best & (CHUNK - 1)), best >> 12
    last = -(-(size - CHUNK * (len(rows) - 1)) // KEEP_ONE_IN)
    within = torch.ones_like(place, dtype=torch.bool)
    within[-1, last:] = False
    counts = within & (bits > 0)
    exponent = (bits[:, :1] >> 23).clamp_(min=LOWEST)
    scale = power_of_two((127 + 127 + FINEST - exponent).int())
    whole = (bits.int().view(torch.float32) * scale).long() * counts  # 0 to 2 ** 16 - 1
    levels, high = _levels(whole, counts)
    negative = rows.gather(1, place).signbit()
    code = (negative.long() << 1) | high.long()
    # A value of zero has no level, so the place and code of the largest one are written once more instead.
    entry = torch.where(counts, (place << 2) | code, (place[:, :1] << 2) | code[:, :1])
    entry = torch.where(within, entry, _NOWHERE).sort(dim=1).values.view(-1)[: -(-size // KEEP_ONE_IN)]
    place = entry >> 2
    heads = torch.cat([exponent, levels], dim=1).to(torch.uint8).view(-1)
    return [heads, (place & 255).to(torch.uint8), packed(_filled(place >> 8, 2), 2), packed(_filled(entry & 3, 4), 4)]


def _levels(whole: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Return two levels [rows, 2], 0 to 255, and whether each magnitude [rows, kept] is nearer the higher.

    The levels are the means of the counted magnitudes below and above the mean of all counted ones.
    """
    number, total = counts.sum(1, keepdim=True), whole.sum(1, keepdim=True)
    above = counts & (whole * number >= total)
    below = counts & ~above
    means = []
    for group in (below, above):
        many = group.sum(1, keepdim=True)
        means.append(((whole * group).sum(1, keepdim=True) + 128 * many) // (256 * many.clamp(min=1)))
    low, high = (mean.clamp(max=255) for mean in means)
    low = torch.where(below.any(1, keepdim=True), low, high)
    return torch.cat([low, high], dim=1), 2 * whole >= 256 * (low + high)


def _filled(codes: Tensor, per_byte: int) -> Tensor:
    """Return codes as uint8, with zeros at the end up to a multiple of `per_byte`."""
    return torch.nn.functional.pad(codes.to(torch.uint8), (0, -codes.numel() % per_byte))


def _unpacked(bytes_: Tensor, per_byte: int) -> Tensor:
    """Return the codes that `packed` put into bytes, int32."""
    width = 8 // per_byte
    shifts = width * torch.arange(per_byte, dtype=torch.int32, device=bytes_.device)
    return ((bytes_.int()[:, None] >> shifts) & ((1 << width) - 1)).view(-1)
