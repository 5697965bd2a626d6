"""Writes the settings of a run as text."""

from collections.abc import Mapping
from typing import Any

from atoll.report.load import plain_text


def flat_settings(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns the settings of run.toml as text, by their full names."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        name = plain_text(f"{prefix}{key}")
        flat |= flat_settings(value, f"{name}.") if isinstance(value, Mapping) else {name: value_text(value)}
    return flat


def value_text(value: Any) -> str:
    """Returns one setting, or a fact about a run, as one line of text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(value_text(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return ", ".join(f"{plain_text(str(k))} {value_text(v)}" for k, v in value.items())
    return plain_text(str(value))
