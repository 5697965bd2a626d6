"""Parses numbers as people type them."""

import math
import re

from atoll.errors import ConfigError

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}


def count(name: str, text: str, most: int = 10**18, like: str = "10e9, 10B or 350M") -> int:
    """Parse '10e9', '10B' or '350M' as a whole number from 1 to `most`; `like` is an example for the error."""
    match = re.fullmatch(r"\s*([+-]?[0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([kMBGT]?)\s*", text)
    try:
        value = float(match[1]) * _PREFIXES[match[2]] if match else math.nan
    except ValueError:
        value = math.nan
    if not 1 <= value <= most or abs(value - round(value)) > 1e-9 * value:
        largest = f"{most:,}" if most < 10**6 else f"{most:.0e}".replace("e+", "e")
        raise ConfigError(f"{name} must be a whole number from 1 to {largest}, like {like}, got {text!r}")
    return round(value)


def number(name: str, text: str, must: str) -> float:
    """Parse '0.95'; `must` tells the error what the number has to be."""
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name} must be {must}, got {text!r}") from None


def seconds(name: str, text: str) -> float:
    """Parse '0.8', '0.8 s' or '800ms' as seconds."""
    match = re.fullmatch(r"\s*([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)\s*(s|ms|)\s*", text)
    try:
        value = float(match[1]) * (1e-3 if match[2] == "ms" else 1.0) if match else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a time above 0, like 0.8 (seconds) or 800ms, got {text!r}")
    return value


def size(name: str, text: str) -> float:
    """Parse '80GB' as bytes."""
    match = re.fullmatch(r"\s*([0-9.]+)\s*(GB|MB|TB)\s*", text)
    try:
        value = float(match[1]) * {"MB": 1e6, "GB": 1e9, "TB": 1e12}[match[2]] if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be that of one chip, like 80GB, got {text!r}")
    return value
