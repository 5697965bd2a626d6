"""Encodes vectors as bytes and decodes them, in every format that a delta can be sent in.

A payload is a uint8 tensor. Plain formats send the values themselves, little-endian. `block_formats` has the formats of
8 to 2 bits a value, and `top64` the one that sends the largest values alone. `docs/wire.md` describes every layout.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.core.block_formats import BLOCK, BLOCK_FORMATS, BlockFormat, bits, refuse
from atoll.core.flat import CPU, pieces
from atoll.core.top64 import CHUNK, Top64
from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Plain:
    """Sends every value as a float of `dtype`."""

    dtype: torch.dtype

    def payload_bytes(self, numel: int) -> int:
        return numel * self.dtype.itemsize

    def encode(self, vector: Tensor, generator: torch.Generator | None) -> Tensor:
        cast = vector.to(self.dtype)
        for piece in pieces(vector.numel(), vector.device):
            low, high = torch.aminmax(cast[piece])
            if not math.isfinite(low) or not math.isfinite(high):
                refuse(vector[piece], f"exceeds {self.dtype}, which ends at {torch.finfo(self.dtype).max:.5g}")
        return cast.view(torch.uint8)

    def decode(self, payload: Tensor, numel: int, piece: slice) -> Tensor:
        return self.sections(payload, numel, piece)[0].view(self.dtype)

    def sections(self, payload: Tensor, numel: int, cut: slice) -> list[Tensor]:
        size = self.dtype.itemsize
        return [payload[cut.start * size : cut.stop * size]]

    def largest(self, payload: Tensor, numel: int) -> slice:
        at = int(payload.view(self.dtype).abs().nan_to_num(torch.inf).argmax())
        return slice(at, at + 1)


_FORMATS: dict[str, _Plain | BlockFormat | Top64] = {
    "fp64": _Plain(torch.float64),
    "fp32": _Plain(torch.float32),
    "bf16": _Plain(torch.bfloat16),
    "fp16": _Plain(torch.float16),
    **BLOCK_FORMATS,
    "top64": Top64(),
}


_AT_RANDOM = ("int8", "int4", "e3m0", "e2m1", "lloyd4")  # formats with a level at zero, or next to it


def nearest_limit(name: str) -> int | None:
    """Return the number of units below which values round to a level, as fp32 bits; None without units."""
    form = _FORMATS[name]
    return bits(form.nearest_range) if isinstance(form, BlockFormat) else None


@dataclass(frozen=True, slots=True)
class Codec:
    """Encodes deltas in a format; optionally rounds at random or feeds back what encoding lost."""

    format: str = "fp32"
    """fp64, fp32, bf16, fp16, int8, int4, e3m0 (sign and exponent), e2m1 (one mantissa bit), lloyd4 (4 bit each),
    lloyd2 (2 bit), or top64 (the 64 largest of every 4096 values and their places: 0.22 bit a value)."""
    stochastic: bool = False
    """Round up or down at random so that the expected value is exact; for int8, int4, e3m0, e2m1 and lloyd4."""
    feedback: float = False
    """Error feedback: add this share of what encoding lost in one round to the next, at one more vector per fragment.
    True adds all of it. top64 needs feedback; 0.95, which forgets slowly, is the published value."""

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            allowed = ", ".join(_FORMATS)
            raise ConfigError(
                f"codec must be one of {allowed}; got {self.format!r}", setting="codec", value=self.format
            )
        if self.stochastic and self.format not in _AT_RANDOM:
            problem = f"codec {self.format!r} has no stochastic rounding; {', '.join(_AT_RANDOM)} have"
            advice = "choose one of these, or set stochastic=False"
            raise ConfigError(f"{problem}: {advice}", setting="stochastic", value=True)
        if not isinstance(self.feedback, (int, float)) or not 0 <= self.feedback <= 1:
            problem = f"feedback must be True, False or a number from 0 to 1, got {self.feedback!r}"
            raise ConfigError(problem, setting="feedback", value=self.feedback)
        if self.feedback in (0, 1):
            object.__setattr__(self, "feedback", bool(self.feedback))
        if self.format == "top64" and not self.feedback:
            problem = "codec 'top64' sends one value in 64 and needs feedback, which keeps the others for later rounds"
            advice = 'use Codec("top64", feedback=0.95) with outer=atoll.SGD(lr=1.0); DataParallel cannot use top64'
            raise ConfigError(f"{problem}: {advice}", setting="feedback", value=False)
        if self.feedback and self.format in ("fp64", "fp32"):
            problem = f"codec {self.format!r} loses nothing that feedback could return: set feedback=False"
            raise ConfigError(problem, setting="feedback", value=self.feedback)

    @property
    def for_mean(self) -> "Codec":
        """The codec in which the mean of decoded payloads is sent, in as many bytes.

        For 4 bits that is lloyd4: a mean is bell-shaped, and lloyd4 loses a third of what e3m0 would.
        """
        return replace(self, format="lloyd4") if self.format in ("int4", "e3m0", "e2m1") else self

    @property
    def grain(self) -> int:
        """Number of values at whose multiples a vector may be cut without changing how its values are encoded."""
        return CHUNK if self.format == "top64" else BLOCK

    def payload_bytes(self, numel: int) -> int:
        """Return the exact size of the payload of a vector [numel], bytes."""
        return _FORMATS[self.format].payload_bytes(numel)

    def encode(self, vector: Tensor, seed: int = 0) -> Tensor:
        """Return the payload [payload_bytes] uint8 of a vector [n]; `seed` feeds stochastic rounding.

        Raises NonFiniteError on a NaN, an infinity, or a value too large for the format. A plain format whose
        dtype is the vector's shares its memory.
        """
        generator = torch.Generator(CPU).manual_seed(seed) if self.stochastic else None
        return _FORMATS[self.format].encode(vector, generator)

    def decode_piece(self, payload: Tensor, numel: int, piece: slice) -> Tensor:
        """Return values [piece] of the vector [numel] behind a payload; `piece` begins on a multiple of `grain`."""
        return _FORMATS[self.format].decode(payload, numel, piece)

    def largest(self, payload: Tensor, numel: int) -> slice:
        """Return where the largest value of the vector [numel] behind a payload is.

        For formats with blocks or chunks, it is the whole block with the largest unit. It also works on a payload that
        must not be sent, and then finds a value that is too large or not finite.
        """
        return _FORMATS[self.format].largest(payload, numel)

    def cut(self, payload: Tensor, numel: int, part: slice) -> Tensor:
        """Return the payload of values [part] of the vector [numel]; `part` begins on a multiple of `grain`."""
        return torch.cat(_FORMATS[self.format].sections(payload, numel, part))

    def joined(self, payloads: Sequence[Tensor], numels: Sequence[int]) -> Tensor:
        """Join the payloads of consecutive parts of a vector into the payload of the whole: the inverse of `cut`.

        Part i has `numels[i]` values, a multiple of `grain` for all parts but the last that is not empty.
        """
        cuts = [_FORMATS[self.format].sections(p, n, slice(0, n)) for p, n in zip(payloads, numels, strict=True)]
        return torch.cat([section for sections in zip(*cuts, strict=True) for section in sections])

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the vector [numel] behind a payload."""
        vector = torch.empty(numel, dtype=dtype, device=payload.device)
        for piece in pieces(numel, payload.device):
            vector[piece] = self.decode_piece(payload, numel, piece)
        return vector
