"""Holds the options of `atoll plan`, refuses those that contradict each other, and parses their numbers."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError
from atoll.plan.chips import chip_named


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Holds the command line as it was typed; `cli.plan.command` explains each option."""

    run: Path | None = None
    changes: Sequence[str] = ()
    params: str | None = None
    layers: str | None = None
    preset: str | None = None
    workers: str | None = None
    link: str | None = None
    probe_link: str | None = None
    methods: Sequence[str] = ()
    period: str | None = None
    fragments: str | None = None
    step_time: str | None = None
    tokens: str | None = None
    chip: str | None = None
    flops: str | None = None
    chips: str | None = None
    mfu: str | None = None
    memory: str | None = None
    probe: bool = False
    steps: str | None = None
    tokens_total: str | None = None
    price: str | None = None
    target: str = "0.95"


_EXCLUSIVE = {
    "--step-time": ("--probe", "--chip", "--flops", "--mfu"),
    "--probe": ("--chip", "--flops", "--mfu"),
    "--chip": ("--flops",),
    "--steps": ("--tokens-total",),
    "--link": ("--probe-link",),
}


def check_options(options: PlanOptions) -> None:
    """Raise ConfigError for an unknown chip, and for options that would be ignored or say the same twice."""

    def given(*names: str) -> list[str]:
        values = [getattr(options, name.removeprefix("--").replace("-", "_")) for name in names]
        return [name for name, value in zip(names, values, strict=True) if value not in (None, False)]

    if options.chip is not None:
        chip_named(options.chip)
    for one, others in _EXCLUSIVE.items():
        if given(one) and (both := given(*others)):
            raise ConfigError(f"give {one} or {both[0]}, not both: they say the same in two ways")
    if options.chips is not None and not given("--chip", "--flops", "--memory"):
        raise ConfigError("--chips is for --chip, --flops or --memory, and none of them is given")
    streaming = not options.methods or any(method.startswith("streaming") for method in options.methods)
    if options.fragments is not None and not streaming:
        raise ConfigError("--fragments is for streaming, and --method names none of its methods")
    if options.period is not None and set(options.methods) == {"data-parallel"}:
        raise ConfigError("--period is for methods that have one, and data-parallel exchanges on every step")
    if options.changes and options.run is None:
        raise ConfigError("--set changes a run file, and none is given")


# ---------------------------------------------------------------------- numbers as people type them

_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3}
_BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12}


def _scaled(text: str, units: Mapping[str, float]) -> float:
    """Parse a number and its unit; return NaN if it is none."""
    match = re.fullmatch(r"\s*([+-]?[0-9_.]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*", text)
    try:
        return float(match[1]) * units[match[2]] if match else math.nan
    except (ValueError, KeyError):
        return math.nan


def count(name: str, text: str, most: int = 10**18, like: str = "10e9, 10B or 350M") -> int:
    """Parse '10e9', '10B' or '350M' as a whole number from 1 to `most`; `like` is an example for the error."""
    value = _scaled(text, _COUNTS)
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
    value = _scaled(text, _SECONDS)
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be a time above 0, like 0.8 (seconds) or 800ms, got {text!r}")
    return value


def size(name: str, text: str) -> float:
    """Parse '80GB' as bytes."""
    value = _scaled(text, _BYTES)
    if not 0 < value < math.inf:
        raise ConfigError(f"{name} must be that of one chip, like 80GB, got {text!r}")
    return value
