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
    if isinstance(value, float):
        if not math.isfinite(value):
            return None
        return round(value, decimals) if abs(value) >= 1 else float(f"{value:.{decimals}g}")
    if isinstance(value, dict):
        return {key: _rounded(item, decimals) for key, item in value.items()}
    return [_rounded(item, decimals) for item in value] if isinstance(value, list | tuple) else value
