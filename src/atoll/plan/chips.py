"""Estimates the time of a step from a chip's peak, as its maker states it."""

from typing import NamedTuple

from atoll.errors import ConfigError

FLOPS_PER_PARAMETER = 6
"""Per parameter and token: 2 forward, 4 backward."""


class Chip(NamedTuple):
    """Holds what a maker states about a chip."""

    flops: float
    """Dense FLOP/s in bf16 (V100: fp16)."""
    memory_bytes: float
    """Memory of the largest version."""


CHIPS = {
    "v100": Chip(125e12, 32e9),
    "a100": Chip(312e12, 80e9),
    "h100": Chip(989e12, 80e9),
    "h100-pcie": Chip(756e12, 80e9),
    "h200": Chip(989e12, 141e9),
    "b200": Chip(2250e12, 180e9),
    "l4": Chip(121e12, 24e9),
    "l40s": Chip(362e12, 48e9),
    "a10": Chip(125e12, 24e9),
    "a6000": Chip(155e12, 48e9),
    "rtx3090": Chip(71e12, 24e9),
    "rtx4090": Chip(165e12, 24e9),
    "mi250x": Chip(383e12, 128e9),
    "mi300x": Chip(1307e12, 192e9),
    "tpu-v4": Chip(275e12, 32e9),
    "tpu-v5e": Chip(197e12, 16e9),
    "tpu-v5p": Chip(459e12, 95e9),
    "tpu-v6e": Chip(918e12, 32e9),
}


def chip_named(name: str) -> Chip:
    """Return a chip by its name, in any case."""
    if name.lower() not in CHIPS:
        raise ConfigError(f"chip must be one of {', '.join(CHIPS)}, got {name!r}; for another, give its --flops")
    return CHIPS[name.lower()]


def step_seconds(parameters: int, tokens: int, flops: float, mfu: float) -> float:
    """Return the seconds of a step of `tokens` on a worker that reaches `mfu` of its peak FLOP/s."""
    return FLOPS_PER_PARAMETER * parameters * tokens / (flops * mfu)
