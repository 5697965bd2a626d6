"""Refuses invalid arguments, with a ConfigError that names the setting, its value and what is allowed."""

import math

from atoll.errors import ConfigError


def config_error(setting: str, value: object, allowed: str, why: str = "") -> ConfigError:
    """Return the error for a setting whose value is not `allowed`; `why` ends the sentence."""
    return ConfigError(
        f"{setting} must be {allowed}, got {value!r:.100}{why and ': '}{why}", setting=setting, value=value
    )


def check_whole(
    setting: str, value: object, *, least: int = 1, most: int | None = None, why: str = "it counts things"
) -> None:
    """Refuse a value that is not an int from `least` to `most`; a bool is refused too."""
    if type(value) is not int or value < least:
        raise config_error(setting, value, f"a whole number of at least {least}", why)
    if most is not None and value > most:
        shown = value if value < 10**30 else f"a number of {value.bit_length()} bits"
        problem = f"{setting} must be at most {most}, got {shown}: no machine holds more"
        raise ConfigError(problem, setting=setting, value=value)


def check_number(setting: str, value: object, *, least: float, why: str) -> None:
    """Refuse a value that is not a finite number of at least `least`."""
    if not isinstance(value, int | float) or not least <= value < math.inf:
        raise config_error(setting, value, f"a finite number of at least {least}", why)
