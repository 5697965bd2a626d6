"""What numbers must be, refused in one voice wherever they come from."""

import math

from atoll.errors import ConfigError


def check_whole(
    setting: str, value: object, *, least: int = 1, most: int | None = None, why: str = "it counts things"
) -> None:
    """Refuse what is no whole number from `least` to `most`; True is none."""
    if type(value) is not int or value < least:
        raise ConfigError(f"{setting} must be a whole number of at least {least}, got {value!r}: {why}")
    if most is not None and value > most:
        given = value if value < 10**30 else f"a number of {value.bit_length()} bits"
        raise ConfigError(f"{setting} must be at most {most}, got {given}: no machine holds more")


def check_number(setting: str, value: object, *, least: float, why: str) -> None:
    """Refuse what is no finite number of at least `least`."""
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise ConfigError(f"{setting} must be a finite number of at least {least}, got {value!r}: {why}")
