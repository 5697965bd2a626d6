"""Writes sections as JSON that may stand in a page."""

import json
import math
from typing import Any


def to_json(value: Any, decimals: int = 4) -> bytes:
    """Returns a section as JSON in one line; numbers that are not finite are null, and no text can end a script."""
    text = json.dumps(_rounded(value, decimals), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode(errors="replace")


def _rounded(value: Any, decimals: int) -> Any:
    """Returns a value with so many decimals, or digits below 1: what a curve shows, in a third of the bytes."""
    if isinstance(value, list | tuple):
        # Most items are floats, or nothing to round: a call for each would double the time.
        return [
            (round(item, decimals) if abs(item) >= 1 else float(f"{item:.{decimals}g}"))
            if item.__class__ is float and math.isfinite(item)
            else item
            if item is None or item.__class__ is int or item.__class__ is str
            else _rounded(item, decimals)
            for item in value
        ]
    if isinstance(value, dict):
        return {key: _rounded(item, decimals) for key, item in value.items()}
    if isinstance(value, float):
        return _rounded([value], decimals)[0] if math.isfinite(value) else None
    return value
