"""Encodes deltas and decodes payloads into their mean in one pass each, bit for bit as `core.codec`.

Rounding at random has no twin here, and neither have fp64 and fp16.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from atoll.core.block_formats import BLOCK, TOO_LARGE, bits
from atoll.core.codec import Codec, nearest_limit
from atoll.core.outer_step import shares_of
from atoll.kernels.launch import TYPES, launch
from atoll.kernels.live import Live, addresses

_ENCODE = {"TILE": 2048, "num_warps": 8}  # values that one program works on, and by how many threads: as measured
_DECODE = {"TILE": 1024, "num_warps": 4}
_WIDEST = 16  # bytes that a thread loads or stores at once
_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16}
_ENDS = {**dict.fromkeys(_PLAIN, 0x7F80_0000), "lloyd2": bits(1.875 * 2.0**51)}  # bits of fp32; infinity for plain ones
FORMATS = (*_PLAIN, "e3m0", "e2m1", "int4", "int8", "lloyd2")
"""Formats that have a twin."""


def has_twin(codec: Codec) -> bool:
    """Whether the kernels know this codec."""
    return codec.format in FORMATS and not codec.stochastic


def room(codec: Codec, numel: int, members: int, device: torch.device) -> Tensor:
    """Allocate payloads [members, bytes] of vectors [numel], aligned for the kernels.

    Wherever payloads lie the result is the same; but only from multiples of 16 bytes on are codes read and written many
    at a time, and units, which come before them, are of any number.
    """
    size, lead = codec.payload_bytes(numel), -_units(codec, numel) % _WIDEST
    stride = lead + size + -(lead + size) % (4 * _WIDEST)  # so that in values, too, it is a multiple
    return torch.empty(members, stride, dtype=torch.uint8, device=device)[:, lead : lead + size]


def _units(codec: Codec, numel: int) -> int:
    """Return the number of bytes before the codes of a block format."""
    return 0 if nearest_limit(codec.format) is None else -(-numel // BLOCK)


def codes_of(codec: Codec, payloads: Tensor, numel: int) -> tuple[Tensor, str]:
    """Return the codes in payloads [..., bytes] of vectors [numel], and the kernels' FORMAT of them."""
    codes = payloads[..., _units(codec, numel) :]
    return (codes.view(_PLAIN[codec.format]), "plain") if codec.format in _PLAIN else (codes, codec.format)


# ---------------------------------------------------------------------- encode


@triton.jit
def _encode(
    start, table, units, codes, worst, numel,
    FORMAT: tl.constexpr, LIMIT: tl.constexpr, LOCAL: tl.constexpr,
    GRAIN: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Encode a tile [stretches, GRAIN] of `start` minus the live parameters at `table`: codes, and units by block."""
    stretches: tl.constexpr = TILE // GRAIN
    rows: tl.constexpr = TILE // BLOCK
    first = tl.program_id(0).to(tl.int64) * TILE
    stretch = tl.arange(0, stretches)
    at = first + stretch[:, None] * GRAIN + tl.arange(0, GRAIN)[None, :]
    value = tl.load(start + at, at < numel, 0.0)
    there = first + stretch * GRAIN < numel
    local = addresses(table, first // GRAIN + stretch, there, LOCAL)[:, None] + tl.arange(0, GRAIN)[None, :]
    now = tl.load(local, there[:, None], 0.0)
    if LOCAL is not tl.float32:
        value = value.to(LOCAL).to(tl.float32)
    value = value - now.to(tl.float32)
    if LIMIT is None:
        cast = value.to(codes.dtype.element_ty)
        tl.store(codes + at, cast, at < numel)
        tl.atomic_max(worst, tl.max(tl.max(cast.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1), 0))
    else:
        peak = tl.max(value.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
        tl.atomic_max(worst, tl.max(peak, 0))
        if GRAIN < BLOCK:
            peak = tl.max(tl.reshape(peak, [rows, BLOCK // GRAIN]), 1)
        if FORMAT == "lloyd2":
            unit = _lloyd2_unit(value, there, peak, GRAIN, BLOCK)
        else:
            unit = ((peak - LIMIT) >> 23) + 128
            unit = tl.minimum(tl.maximum(unit, 7), 254)  # as core.codec has its lowest and highest
        row = first // BLOCK + tl.arange(0, rows)
        tl.store(units + row, unit.to(tl.uint8), row * BLOCK < numel)
        code = _code(value, _of_stretches(unit, GRAIN, BLOCK)[:, None], FORMAT, LIMIT)
        if FORMAT == "int8":
            tl.store(codes + at, code.to(tl.int8).to(tl.uint8, bitcast=True), at < numel)
        elif FORMAT == "lloyd2":
            even, odd = tl.split(tl.reshape(code, [stretches, GRAIN // 4, 2, 2]))
            both, later = tl.split(even | (odd << 2))
            four = first // 4 + stretch[:, None] * (GRAIN // 4) + tl.arange(0, GRAIN // 4)[None, :]
            tl.store(codes + four, (both | (later << 4)).to(tl.uint8), there[:, None])
        else:
            even, odd = tl.split(tl.reshape(code & 15, [stretches, GRAIN // 2, 2]))
            pair = first // 2 + stretch[:, None] * (GRAIN // 2) + tl.arange(0, GRAIN // 2)[None, :]
            tl.store(codes + pair, (even | (odd << 4)).to(tl.uint8), there[:, None])


@triton.jit
def _of_stretches(per_row, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Return a block's number [rows] for each of its stretches [stretches]."""
    if GRAIN == BLOCK:
        return per_row
    split: tl.constexpr = BLOCK // GRAIN
    return tl.reshape(tl.broadcast_to(per_row[:, None], [per_row.shape[0], split]), [per_row.shape[0] * split])


@triton.jit
def _code(value, unit, FORMAT: tl.constexpr, LIMIT: tl.constexpr):
    """Return the codes [stretches, GRAIN], int32, of values in units [stretches, 1]."""
    bits = value.to(tl.int32, bitcast=True)
    if FORMAT == "e3m0":
        # Nearest in log space: the exponent goes up from the mantissa of sqrt(2) on.
        code = (((bits & 0x7FFFFFFF) + (0x800000 - (LIMIT & 0x7FFFFF))) >> 23) - (unit - 7)
        return tl.minimum(tl.maximum(code, 0), 7) | ((bits >> 28) & 8)
    if FORMAT == "lloyd2":
        scale = (((unit >> 1) + (127 - 80)) << 23).to(tl.float32, bitcast=True) * (2 + (unit & 1)).to(tl.float32)
        return ((tl.abs(value) >= 6.5 * scale) & (unit > 0)).to(tl.int32) | ((bits >> 30) & 2)
    scaled = value * ((254 - unit) << 23).to(tl.float32, bitcast=True)
    if FORMAT == "e2m1":
        quarters = (tl.abs(scaled) * 4).to(tl.int32)
        code = tl.minimum((quarters + 1) >> 1, ((quarters + 2) >> 2) + 2)
        return tl.minimum(code, ((quarters + 4) >> 3) + 4) | ((bits >> 28) & 8)
    # In this range fp32 has no fractions: adding rounds to the nearest whole number, halves to even.
    return ((scaled + 12582912.0) - 12582912.0).to(tl.int32)


@triton.jit
def _lloyd2_unit(value, there, peak, GRAIN: tl.constexpr, BLOCK: tl.constexpr):
    """Return the bytes [rows] of the units in which values [stretches, GRAIN] lose least, as `core.block_formats`."""
    mantissa = peak & 0x7FFFFF
    whole = (mantissa >= 0x200000).to(tl.int32) + (mantissa >= 0x700000).to(tl.int32)
    whole += 2 * ((peak >> 23) - 127 + 80 - 4)
    first = tl.maximum(whole - 4, 1)
    begin = _of_stretches(first, GRAIN, BLOCK)[:, None]
    sixteenths = (tl.abs(value) * ((127 + 4 + 80 - (begin >> 1)) << 23).to(tl.float32, bitcast=True)).to(tl.int32)
    best, least = first, tl.full(first.shape, 0x7FFFFFFF, tl.int32)
    for less in tl.static_range(5):
        unit = begin + (4 - less)
        multiple = (2 + (unit & 1)) << ((unit >> 1) - (begin >> 1))
        lost = (48 + 112 * (sixteenths >= 104 * multiple).to(tl.int32)) * multiple - sixteenths
        total = tl.sum(tl.where(there[:, None], lost * lost, 0), 1)
        if GRAIN < BLOCK:
            total = tl.sum(tl.reshape(total, [first.shape[0], BLOCK // GRAIN]), 1)
        best = tl.where(total < least, first + (4 - less), best)
        least = tl.minimum(total, least)
    return tl.where(whole < 5, 0, tl.where(whole > 255, 255, best))


def encode(codec: Codec, start: Tensor, local: Live, payload: Tensor, worst: Tensor) -> None:
    """Write the payload of `start` minus `local`, where `start` is fp32 [numel].

    A start is first rounded as the live parameters would have rounded it. `worst`, int32 [1], becomes at least the
    bits of the largest magnitude; if `is_bad` says so of it, the payload is not to be sent.
    """
    numel = start.numel()
    codes, _ = codes_of(codec, payload, numel)
    launch(
        _encode, -(-numel // _ENCODE["TILE"]),
        start, local.table, payload, codes, worst, numel,
        FORMAT=codec.format, LIMIT=nearest_limit(codec.format), LOCAL=TYPES[local.dtype],
        GRAIN=local.grain, BLOCK=BLOCK, enable_fp_fusion=False, **_ENCODE,
    )  # fmt: skip


def is_bad(codec: Codec, worst: int) -> bool:
    """Whether a value was not finite, or too large for the format."""
    return worst >= _ENDS.get(codec.format, TOO_LARGE)


# ---------------------------------------------------------------------- decode


@triton.jit
def levels(units, codes, first, numel, FORMAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the fp32 levels [ROWS, BLOCK] from block `first` on, and their units' exponents [ROWS, 1].

    Levels are multiples of one power of two, so few that fp32 sums up products of a block's without rounding. Beyond
    the end they are zeros. A plain format has no units: values are levels, of any number.
    """
    rows = first + tl.arange(0, ROWS)
    whole = (first + ROWS) * BLOCK <= numel
    at = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    if FORMAT == "plain":
        return _loaded(codes + at, at < numel, whole).to(tl.float32), tl.full([ROWS, 1], 127, tl.int32)
    unit = tl.load(units + rows, rows * BLOCK < numel, 127).to(tl.int32)[:, None]
    if FORMAT == "int8":
        return _loaded(codes + at, at < numel, whole).to(tl.int8, bitcast=True).to(tl.float32), unit
    if FORMAT == "lloyd2":
        four = rows[:, None] * (BLOCK // 4) + tl.arange(0, BLOCK // 4)[None, :]
        byte = _loaded(codes + four, four * 4 < numel, whole).to(tl.int32)
        code = tl.reshape(tl.join(tl.join(byte, byte >> 4), tl.join(byte >> 2, byte >> 6)), [ROWS, BLOCK])
        level = tl.where((unit > 0) & (at < numel), (3 + 7 * (code & 1)) * (2 + (unit & 1)), 0)  # no code is zero
        return _signed(level, code << 30), (unit >> 1) + (127 - 80)
    pair = rows[:, None] * (BLOCK // 2) + tl.arange(0, BLOCK // 2)[None, :]
    both = _loaded(codes + pair, pair * 2 < numel, whole).to(tl.int32)
    # A code in the highest four bits, anything below. An arithmetic shift takes it to where fp32 has sign, exponent and
    # mantissa: a small float, which is the level but for a factor.
    high = tl.reshape(tl.join(both << 28, both << 24), [ROWS, BLOCK])
    if FORMAT == "lloyd4":
        # Eight levels of a byte each in one number; twice or three times as much, by the lowest bit of the unit.
        level = (0x4030241A120B0500 >> (((high >> 28) & 7) * 8).to(tl.int64)) & 0xFF
        return _signed(level.to(tl.int32) * (2 + (unit & 1)), high), (unit >> 1) + (127 - 80)
    if FORMAT == "int4":
        return (high >> 28).to(tl.float32), unit
    if FORMAT == "e3m0":
        return ((high >> 5) & -0x7C800000).to(tl.float32, bitcast=True) * 1.329227995784916e36, unit  # 2 ** 120
    return ((high >> 6) & -0x7E400000).to(tl.float32, bitcast=True) * 8.507059173023462e37, unit  # 2 ** 126


@triton.jit
def _signed(level, signs):
    """Return levels, fp32, with the highest bits of `signs`, also those of zero."""
    return (level.to(tl.float32).to(tl.int32, bitcast=True) | (signs & -0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def decoded(units, codes, first, numel, FORMAT: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr):
    """Return the fp32 values [ROWS, BLOCK] from block `first` on behind a payload; zeros beyond its end."""
    level, unit = levels(units, codes, first, numel, FORMAT, BLOCK, ROWS)
    if FORMAT == "plain":
        return level
    return level * (unit << 23).to(tl.float32, bitcast=True)


@triton.jit
def _loaded(pointers, there, whole):
    # A mask would part wide loads into bytes.
    return tl.load(pointers) if whole else tl.load(pointers, there, 0)


@triton.jit
def _decode_mean(
    units, codes, shares, mean, numel, begin, end, units_stride, codes_stride,
    MEMBERS: tl.constexpr, FORMAT: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    count: tl.constexpr = TILE // BLOCK
    first = begin // BLOCK + tl.program_id(0).to(tl.int64) * count
    total = decoded(units, codes, first, numel, FORMAT, BLOCK, count) * tl.load(shares)
    for member in tl.static_range(1, MEMBERS):
        units += units_stride
        codes += codes_stride
        total += decoded(units, codes, first, numel, FORMAT, BLOCK, count) * tl.load(shares + member)
    at = first * BLOCK + tl.arange(0, count)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(mean + at - begin, total, at < end)


def decode_mean(
    codec: Codec, payloads: Tensor, weights: Sequence[float], numel: int, piece: slice, mean: Tensor
) -> None:
    """Write values [piece] of the weighted mean, fp32, of the vectors [numel] behind payloads [members, bytes].

    A piece begins on a block boundary. Summed in the order given, with the bits of `weighted_mean`.
    """
    codes, form = codes_of(codec, payloads, numel)
    shares = torch.tensor(shares_of(weights), dtype=torch.float32, device="cpu")
    size = piece.stop - piece.start
    launch(
        _decode_mean, -(-size // _DECODE["TILE"]),
        payloads, codes, shares.to(payloads.device, non_blocking=True), mean, numel, piece.start, piece.stop,
        payloads.stride(0), codes.stride(0), MEMBERS=len(payloads), FORMAT=form, BLOCK=BLOCK,
        enable_fp_fusion=False, **_DECODE,
    )  # fmt: skip
