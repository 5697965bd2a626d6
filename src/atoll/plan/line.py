"""Describes a worker's line to the others, and parses it as people write it: '1 Gbit/s, 50 ms'."""

import math
import re
from dataclasses import dataclass

from atoll.errors import ConfigError

_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?)"
_HOW = "write it like '100 Mbit/s', '20 MB/s' or '1 Gbit/s, 50 ms'"

LEAST_BITS_PER_S, MOST_BITS_PER_S = 1.0, 1e18
"""Rates that are accepted; faster and slower lines do not exist."""
MOST_LATENCY_S = 1e6

GOODPUT = 0.87
"""Part of a line's rate that payloads get between machines: packet headers take 0.046, pauses the rest.

`benchmarks/wire.py` measured 0.82 to 0.94 with two to four members at 20 and 100 Mbit/s.
"""


@dataclass(frozen=True, slots=True)
class Line:
    """Describes the line of one worker to the others."""

    bits_per_s: float
    """Bits per second, in each direction, from 1 to 1e18; math.inf is allowed."""
    latency_s: float = 0.0
    """Seconds from the last bit's departure to its arrival: one way, half of what ping shows."""
    goodput: float = GOODPUT
    """Part of the rate that payloads get; 1 for an emulated line, which has neither packets nor pauses. `stops` and
    `time_of` of `plan.simulate` ignore it."""

    def __post_init__(self) -> None:
        if not self.bits_per_s > 0:
            raise ConfigError(f"a link needs a rate above 0 bit/s, got {self.bits_per_s:g}: nothing would ever arrive")
        if not LEAST_BITS_PER_S <= self.bits_per_s <= MOST_BITS_PER_S and not math.isinf(self.bits_per_s):
            span = f"{LEAST_BITS_PER_S:g} to {MOST_BITS_PER_S:.0e} bit/s"
            raise ConfigError(f"a link's rate must be from {span}, got {self.bits_per_s:.3g}")
        if not 0 <= self.latency_s <= MOST_LATENCY_S:
            raise ConfigError(f"a link's latency must be from 0 to {MOST_LATENCY_S:.0e} s, got {self.latency_s:g}")

    def __str__(self) -> str:
        prefix = next((p for p in "TGMk" if _PREFIXES[p.lower()] <= self.bits_per_s < math.inf), "")
        rate = f"{self.bits_per_s / _PREFIXES[prefix.lower()]:.4g} {prefix}bit/s"
        return f"{rate}, {self.latency_s * 1e3:.4g} ms" if self.latency_s else rate


def parse_line(text: str) -> Line:
    """Parse '100Mbit/s', '20 MB/s' or '1 Gbit/s, 50ms': a rate, then a latency if there is one.

    Raises:
        ConfigError: The text is not a rate and a latency, a unit is ambiguous, or a number is out of its range.
    """
    rate, comma, latency = text.partition(",")
    bits_per_s = _parse_rate(text, rate.strip())
    latency_s = _parse_latency(text, latency.strip()) if comma else 0.0
    try:
        return Line(bits_per_s, latency_s)
    except ConfigError as error:
        raise ConfigError(f"link {text!r}: {error}") from None


def _parse_rate(text: str, rate: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*([A-Za-z/]*)", rate)
    if match is None:
        raise ConfigError(f"link {text!r}: {rate!r} is not a rate; {_HOW}")
    number, unit = float(match[1]), re.fullmatch(r"(?i:([kmgt]?)(bit(?:s?(?:/s)?|ps)|b(?:/s|ps)?))", match[2])
    if unit is None:
        raise ConfigError(f"link {text!r}: unknown unit {match[2]!r} of the rate; {_HOW}")
    if unit[2].lower().startswith("bit") or unit[2] == "bps":
        scale = _PREFIXES[unit[1].lower()]
    elif unit[2] in ("B/s", "Bps"):
        scale = 8 * _PREFIXES[unit[1].lower()]
    else:
        prefix = unit[1].upper().replace("K", "k")
        raise ConfigError(f"link {text!r}: {match[2]!r} is ambiguous; say {prefix}bit/s (bits) or {prefix}B/s (bytes)")
    if not math.isfinite(number * scale):
        raise ConfigError(f"link {text!r}: {match[1]} is too large for a rate")
    return number * scale


def _parse_latency(text: str, latency: str) -> float:
    match = re.fullmatch(_NUMBER + r"\s*([a-z]+)", latency)
    if match is None or match[2] not in _SECONDS:
        raise ConfigError(
            f"link {text!r}: {latency!r} is not a latency; write it like '50 ms' or '0.05 s', one way: half of ping"
        )
    return float(match[1]) * _SECONDS[match[2]]
