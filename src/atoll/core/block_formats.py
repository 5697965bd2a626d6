"""Encodes values in 8, 4 or 2 bits; blocks of 128 values share one unit.

A payload begins with one byte per block, its unit: a power of two, or for lloyd4 and lloyd2 also 1.5 times one. Then
come the codes, two to a byte for 4-bit formats and four for 2 bits, the first value in the lowest bits.

The work is done in cache-sized pieces and on the bits of the floats, where a power of two is an integer shift and
rounding is an integer addition. That is exact, the same on every processor, and an order of magnitude faster than
logarithms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from atoll.core.flat import CPU, PIECE, pieces
from atoll.errors import NonFiniteError

BLOCK = 128
"""Consecutive values that share one unit."""
assert PIECE % BLOCK == 0, "a piece holds whole blocks"

_EXPONENT = 23  # fp32: where the exponent starts
_MAGNITUDE = 0x7FFF_FFFF  # fp32: all but the sign
TOO_LARGE = 0x7F00_0000
"""Bits of fp32 2 ** 127: in block formats, rounding what lies beyond could give infinity."""
_SQRT2 = 1.4142136573791504  # the smallest fp32 number above the square root of 2
_LOWEST_UNIT, _HIGHEST_UNIT = 7, 254  # biased exponents: every level of every format is then a normal number


Quantise = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(values [rows, BLOCK] fp32, units [rows, 1] as biased exponents, uniform noise or None) -> codes uint8."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Gives every block of values one unit: the smallest power of two that keeps the largest value in range."""

    quantise: Quantise
    levels: tuple[float, ...] | None
    """What each 4 or 2-bit code stands for, in units; None for int8, whose codes are the numbers themselves."""
    nearest_range: float
    """Values below this many units round to a level; for larger ones the unit must double."""
    exact_range: float
    """The highest level, in units; stochastic rounding cannot round up from above it."""

    def payload_bytes(self, numel: int) -> int:
        """Return the bytes of a payload of `numel` values."""
        return -(-numel // BLOCK) + -(-numel // self._per_byte)

    @property
    def _per_byte(self) -> int:
        """Number of codes in a byte."""
        return 1 if self.levels is None else 2 if len(self.levels) == 16 else 4

    def encode(self, vector: Tensor, generator: torch.Generator | None) -> Tensor:
        """Return the payload of a vector, uint8; a generator makes rounding random."""
        numel, blocks = vector.numel(), -(-vector.numel() // BLOCK)
        payload = torch.empty(self.payload_bytes(numel), dtype=torch.uint8, device=vector.device)
        units, codes = payload[:blocks], payload[blocks:]
        # Where rounding is random, pieces are the same on all devices, so that they draw the same numbers.
        for piece in pieces(numel, vector.device if generator is None else CPU):
            values = _rows(vector[piece])
            noise = None
            if generator is not None:
                noise = torch.rand(values.shape, generator=generator, dtype=torch.float32, device=CPU).to(values.device)
            unit = self._unit(vector[piece], values, stochastic=noise is not None)
            units[_block_range(piece)] = unit.view(-1)
            code = self.quantise(values, unit, noise).view(-1)
            where = self._code_range(piece)
            codes[where] = packed(code, self._per_byte)[: where.stop - where.start]
        return payload

    def sections(self, payload: Tensor, numel: int, cut: slice) -> list[Tensor]:
        """Return the parts of a payload for a range of values: units and codes."""
        blocks = -(-numel // BLOCK)
        return [payload[:blocks][_block_range(cut)], payload[blocks:][self._code_range(cut)]]

    def largest(self, payload: Tensor, numel: int) -> slice:
        """Return the block with the largest unit."""
        first = BLOCK * int(payload[: -(-numel // BLOCK)].argmax())
        return slice(first, min(first + BLOCK, numel))

    def decode(self, payload: Tensor, numel: int, piece: slice) -> Tensor:
        """Return the values of a piece, fp32; a piece begins on a block boundary."""
        units, code = self.sections(payload, numel, piece)
        unit = self.scale(units.view(-1, 1).int())
        if self.levels is None:
            values = code.view(torch.int8).to(torch.float32)
        else:
            values = _levels_of_bytes(self.levels, payload.device).index_select(0, code.int()).view(-1)
            values = values.view(torch.float32)
        size = piece.stop - piece.start
        padded = torch.nn.functional.pad(values[:size], (0, -size % BLOCK)) if size % BLOCK else values[:size]
        return padded.view(-1, BLOCK).mul_(unit).view(-1)[:size]

    def scale(self, unit: Tensor) -> Tensor:
        """Return the units [rows, 1] as fp32 numbers, from the int32 bytes that stand for them."""
        return power_of_two(unit)

    def _code_range(self, piece: slice) -> slice:
        return slice(piece.start // self._per_byte, -(-piece.stop // self._per_byte))

    def _unit(self, source: Tensor, values: Tensor, *, stochastic: bool) -> Tensor:
        """Return biased exponents [rows, 1] int32 of the smallest unit with max |value| inside the range."""
        peak = (values.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
        if int(peak.max()) >= TOO_LARGE:
            refuse(source, "exceeds this codec, which ends at 1.7e38")
        # Bits of positive floats are ordered like the floats, and doubling adds 1 << _EXPONENT. So the number of
        # doublings that bring `limit` above `peak` (for nearest) or up to it (for exact) is a subtraction and a shift.
        limit = bits(self.exact_range) + 1 if stochastic else bits(self.nearest_range)
        return ((peak - limit) >> _EXPONENT).add_(1 + 127).clamp_(_LOWEST_UNIT, _HIGHEST_UNIT)


class _Lloyd4(BlockFormat):
    """Uses levels that Lloyd's algorithm placed for bell-shaped values, in the unit that loses least.

    The byte b of a unit stands for (2 + b % 2) * 2 ** (b // 2 - 80). It is the smallest unit in which all values are
    below the highest level, or the next smaller one, which clips some. Errors are compared as integers, so all
    processors agree.
    """

    def scale(self, unit: Tensor) -> Tensor:
        """Return the units [rows, 1] as fp32 numbers, from the int32 bytes that stand for them."""
        return _lloyd_scale(unit)

    def _unit(self, source: Tensor, values: Tensor, *, stochastic: bool) -> Tensor:
        """Return the bytes [rows, 1] int32 of the unit in which the squared error is least."""
        peak = (values.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
        # In unit b the highest level, 64, is 1 or 1.5 times 2 ** (b // 2 - 80 + 7), which the peak must stay below.
        whole = 2 * ((peak >> _EXPONENT) - 127 + 80 - 7) + 1 + ((peak & 0x7F_FFFF) >= 0x40_0000).int()
        if int(whole.max()) > 255:
            refuse(source, "exceeds lloyd4, which ends at 2.7e16")
        whole = whole.clamp_(min=1)
        if stochastic:  # its expected value is exact only where nothing is clipped
            return whole
        smaller = whole - 1
        exponent = smaller >> 1
        sixteenths, (_, lost) = _sixteenths(values, exponent), _lloyd_tables(values.device)
        losses = []
        for unit in (whole, smaller):
            multiple = (2 + (unit & 1)) << ((unit >> 1) - exponent)
            losses.append(_looked_up(lost, sixteenths, multiple).sum(1, keepdim=True))
        return torch.where(losses[1] < losses[0], smaller, whole)


class _Lloyd2(BlockFormat):
    """Uses four levels that Lloyd's algorithm placed for bell-shaped values, in the unit that loses least.

    No level is zero. Units are those of lloyd4, except that the byte 0 stands for a block of zeros. The unit is the
    smallest in which all values are below the highest level, or one of the next four smaller ones, which clip some.
    """

    def scale(self, unit: Tensor) -> Tensor:
        """Return the units [rows, 1] as fp32 numbers, from the int32 bytes that stand for them."""
        return _lloyd_scale(unit) * (unit > 0)

    def _unit(self, source: Tensor, values: Tensor, *, stochastic: bool) -> Tensor:
        """Return the bytes [rows, 1] int32 of the unit in which the squared error is least."""
        peak = (values.view(torch.int32) & _MAGNITUDE).amax(1, keepdim=True)
        # In unit b the highest level, 10, is 1.25 or 1.875 times 2 ** (b // 2 - 80 + 4): the peak must stay below.
        mantissa = peak & 0x7F_FFFF
        whole = 2 * ((peak >> _EXPONENT) - 127 + 80 - 4) + (mantissa >= 0x20_0000).int() + (mantissa >= 0x70_0000).int()
        if int(whole.max()) > 255:
            refuse(source, "exceeds lloyd2, which ends at 4.2e15")
        first = (whole - 4).clamp(min=1)  # the smallest unit to try
        sixteenths = _sixteenths(values, first >> 1)
        filled = -source.numel() % BLOCK  # zeros at the end of the last row, which lose nothing
        best, least = first, torch.full_like(first, torch.iinfo(torch.int32).max)
        for more in (4, 3, 2, 1, 0):
            unit = first + more
            multiple = (2 + (unit & 1)) << ((unit >> 1) - (first >> 1))
            level = (sixteenths >= 104 * multiple).int().mul_(112).add_(48).mul_(multiple)
            lost = level.sub_(sixteenths).square_()
            lost[-1, BLOCK - filled :] = 0
            total = lost.sum(1, keepdim=True).int()
            best, least = torch.where(total < least, unit, best), torch.minimum(total, least)
        return best * (whole >= 5)


def _rows(values: Tensor) -> Tensor:
    """Return values as fp32 [rows, BLOCK], the last row filled up with zeros."""
    values = values.to(torch.float32)
    fill = -values.numel() % BLOCK
    return (torch.nn.functional.pad(values, (0, fill)) if fill else values).view(-1, BLOCK)


def _block_range(piece: slice) -> slice:
    return slice(piece.start // BLOCK, -(-piece.stop // BLOCK))


def bits(value: float) -> int:
    """Return the bits of a number in fp32."""
    return int(torch.tensor(value, dtype=torch.float32, device=CPU).view(torch.int32))


def power_of_two(biased: Tensor) -> Tensor:
    """Return fp32 2 ** (biased - 127) from int32 biased exponents 1 to 254."""
    return (biased << _EXPONENT).view(torch.float32)


def packed(codes: Tensor, per_byte: int) -> Tensor:
    """Pack codes of 8, 4 or 2 bits into bytes, the first lowest: [n] uint8 -> [n / per_byte] uint8."""
    if per_byte == 4:
        four = codes.view(torch.int32)
        return (four | (four >> 6) | (four >> 12) | (four >> 18)).to(torch.uint8)
    if per_byte == 2:
        both = codes.view(torch.int16)
        return (both | (both >> 4)).to(torch.uint8)
    return codes


@cache
def _levels_of_bytes(levels: tuple[float, ...], device: torch.device) -> Tensor:
    """Return [256, n] int64: the fp32 levels of each packed byte side by side."""
    table = torch.tensor(levels, dtype=torch.float32, device=device)
    count, width = (2, 16) if len(levels) == 16 else (4, 4)
    columns = [table.repeat_interleave(width**n).repeat(256 // width ** (n + 1)) for n in range(count)]
    return torch.stack(columns, dim=1).view(torch.int64)


def _sign(values: Tensor) -> Tensor:
    """Return 8 where the sign bit is set and 0 elsewhere, uint8."""
    return (values.view(torch.int32) >> 28).to(torch.uint8).bitwise_and_(8)


def _to_e3m0(values: Tensor, unit: Tensor, noise: Tensor | None) -> Tensor:
    """Return the sign, and 0 or 1 + the exponent above the smallest of seven powers of two."""
    magnitude = values.view(torch.int32) & _MAGNITUDE
    smallest = unit - 6
    if noise is None:
        # Nearest in log space: the exponent goes up from mantissa sqrt(2) on.
        exponent = magnitude.add_((1 << _EXPONENT) - (bits(_SQRT2) & 0x7F_FFFF))
        code = (exponent >> _EXPONENT).sub_(smallest - 1).clamp_(0, 7)
    else:
        # The mantissa is linear between two powers of two, so adding uniform bits carries with the right chance.
        carried = magnitude + (noise * (1 << _EXPONENT)).int()
        above = (carried >> _EXPONENT).sub_(smallest - 1).clamp_(max=7)
        below = (values.abs() * power_of_two(254 - smallest) + noise).int()
        code = torch.where(magnitude >= smallest << _EXPONENT, above, below)
    return _sign(values).bitwise_or_(code.to(torch.uint8))


def _to_e2m1(values: Tensor, unit: Tensor, noise: Tensor | None) -> Tensor:
    """Return the sign and the number of the level among 0, 0.5, 1, 1.5, 2, 3, 4, 6."""
    scaled = values.abs().mul_(power_of_two(254 - unit))
    # min(2x, x + 2, x/2 + 4) turns the uneven levels into the whole numbers 0 to 7. Nearest is computed in quarters,
    # on whose multiples all halfway points lie, so that no rounding of floats can move a value across one.
    if noise is None:
        quarters = scaled.mul_(4).to(torch.int8)
        code = ((quarters + 1) >> 1).minimum(((quarters + 2) >> 2) + 2).minimum(((quarters + 4) >> 3) + 4)
    else:
        even = torch.minimum(torch.minimum(scaled * 2, scaled + 2), scaled.mul_(0.5).add_(4))
        code = even.add_(noise).clamp_(max=7).to(torch.int8)
    return _sign(values).bitwise_or_(code.view(torch.uint8))


_E3M0 = (0.0, *(2.0**k for k in range(-6, 1)))
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LLOYD = (0, 5, 11, 18, 26, 36, 48, 64)
_TABLE = 16 * 4 * _LLOYD[-1] + 1  # sixteenths up to the highest level, where a unit is up to 4 times its power of two


def _lloyd_scale(unit: Tensor) -> Tensor:
    return power_of_two((unit >> 1) + (127 - 80)) * (2 + (unit & 1))


def _sixteenths(values: Tensor, exponent: Tensor) -> Tensor:
    """Return magnitudes [rows, BLOCK] in sixteenths of 2 ** (exponent - 80), rounded down, int32."""
    return (values.abs() * power_of_two(127 + 4 + 80 - exponent)).int()


@cache
def _lloyd_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return level numbers and squared errors, int32, by sixteenths, in units of 2, 3 and 4 powers of two."""
    codes, lost = [], []
    for multiple in (2, 3, 4):
        levels = 16 * multiple * torch.tensor(_LLOYD, dtype=torch.int32, device=device)
        value = torch.arange(_TABLE, dtype=torch.int32, device=device)
        code = torch.bucketize(value, (levels[1:] + levels[:-1]) // 2, right=True)  # halves go up
        codes.append(code.int())
        lost.append((value - levels[code]).square())
    return torch.cat(codes), torch.cat(lost)


def _looked_up(table: Tensor, sixteenths: Tensor, multiple: Tensor) -> Tensor:
    """Look up sixteenths [rows, BLOCK] in a table of _lloyd_tables; units are `multiple` powers of two [rows, 1]."""
    return table.index_select(0, (sixteenths + _TABLE * (multiple - 2)).view(-1)).view(sixteenths.shape)


def _lloyd_at_random(values: Tensor, unit: Tensor, noise: Tensor) -> Tensor:
    """Return the number of one of the two nearest levels, int32, drawn so that the expected value is exact."""
    scale, magnitude = _lloyd_scale(unit), values.abs()
    code = torch.zeros(values.shape, dtype=torch.int32, device=values.device)
    for low, high in pairwise(_LLOYD):
        code += magnitude >= (low + (high - low) * (1 - noise)) * scale
    return code


def _to_lloyd4(values: Tensor, unit: Tensor, noise: Tensor | None) -> Tensor:
    """Return the sign and the number of the level among _LLOYD."""
    if noise is None:
        codes, _ = _lloyd_tables(values.device)
        code = _looked_up(codes, _sixteenths(values, unit >> 1), 2 + (unit & 1))
    else:
        code = _lloyd_at_random(values, unit, noise)
    return _sign(values).bitwise_or_(code.to(torch.uint8))


def _to_lloyd2(values: Tensor, unit: Tensor, noise: Tensor | None) -> Tensor:
    """Return 2 for a negative value, and 1 for the higher level."""
    # 6.5 units are whole sixteenths, so this is the comparison by which the unit was chosen.
    higher = values.abs() >= 6.5 * _lloyd_scale(unit)
    return (_sign(values) >> 2).bitwise_or_((higher & (unit > 0)).to(torch.uint8))


def _to_integer(values: Tensor, unit: Tensor, noise: Tensor | None) -> Tensor:
    """Return the nearest whole number of units, as a two's complement byte."""
    scaled = values * power_of_two(254 - unit)
    # Noise may round a sum up to the next whole number; the highest level must not.
    whole = scaled.round_() if noise is None else scaled.add_(noise).floor_().clamp_(max=127)
    return whole.to(torch.int8).view(torch.uint8)


def _to_int4(values: Tensor, unit: Tensor, noise: Tensor | None) -> Tensor:
    return _to_integer(values, unit, noise).view(torch.int8).clamp_(max=7).view(torch.uint8) & 15


def _with_signs(magnitudes: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(sign * float(m) for sign in (1, -1) for m in magnitudes)


BLOCK_FORMATS: dict[str, BlockFormat] = {
    "int8": BlockFormat(_to_integer, None, nearest_range=127.5, exact_range=127.0),
    "int4": BlockFormat(
        _to_int4, (*map(float, range(8)), *map(float, range(-8, 0))), nearest_range=7.5, exact_range=7.0
    ),
    "e3m0": BlockFormat(_to_e3m0, _with_signs(_E3M0), nearest_range=_SQRT2, exact_range=1.0),
    "e2m1": BlockFormat(_to_e2m1, _with_signs(_E2M1), nearest_range=7.0, exact_range=6.0),
    "lloyd4": _Lloyd4(_to_lloyd4, _with_signs(_LLOYD), nearest_range=64.0, exact_range=64.0),
    "lloyd2": _Lloyd2(_to_lloyd2, (3.0, 10.0, -3.0, -10.0), nearest_range=10.0, exact_range=10.0),
}


def refuse(values: Tensor, reason: str) -> None:
    """Raise the NonFiniteError that says what is wrong with the first bad value of this piece."""
    bad = values[~torch.isfinite(values)]
    if bad.numel():
        raise NonFiniteError(f"a value is {float(bad[0])}")
    raise NonFiniteError(f"the value {float(values[values.abs().argmax()]):.5g} {reason}")
