"""Formats numbers for people: decimal units, three digits, "-" where there is no number."""

import math


def bytes_text(count: float) -> str:
    """Format a number of bytes: 1234567 -> '1.23 MB'."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB", "PB")) if math.isfinite(count) else "-"


def count_text(count: float) -> str:
    """Format a count for tables and axes: 213504 -> '214 k'."""
    if not math.isfinite(count):
        return "-"
    for unit in ("", " k", " M", " G", " T"):
        if abs(count) < 999.5 or unit == " T":
            break
        count /= 1000
    return f"{count:.3g}{unit}"


def count_words(count: float) -> str:
    """Format a count for sentences: 213504 -> '214 thousand'; small numbers in full."""
    if count < 10_000:
        return f"{count:,.0f}"
    return _scaled(count, ("", "thousand", "million", "billion", "trillion"))


def seconds_text(seconds: float) -> str:
    """Format seconds in the unit that fits: '340 ms', '12.3 s', '4.1 min', '3.2 h', '5.4 days'."""
    for least, unit_s, unit in _TIMES:
        if seconds >= least:
            return f"{_digits(seconds / unit_s)} {unit}"
    return "0 s" if seconds <= 0 else f"{_digits(seconds * 1e3)} ms"


_TIMES = [  # least seconds, the unit in seconds, its name
    (730 * 86400.0, 365 * 86400.0, "years"),
    (48 * 3600.0, 86400.0, "days"),
    (5400.0, 3600.0, "h"),
    (90.0, 60.0, "min"),
    (1.0, 1.0, "s"),
]


def clock_text(seconds: float | None) -> str:
    """Format a running clock: '1:23', '4:05:06' or '3 d 7 h'."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def loss_text(loss: float | None) -> str:
    """Format a loss in nats per token: '2.345'."""
    return number_text(loss, 3)


def ratio_text(fewer: float | None) -> str:
    """Format how many times fewer (or more) bytes a run sends than another."""
    if fewer is None:
        return "-"
    if 0.95 < fewer < 1.05:
        return "the same"
    times, which = (fewer, "fewer") if fewer > 1 else (1 / fewer, "more")
    return f"{times:,.0f}x {which}" if times >= 9.95 else f"{times:.1f}x {which}"


def percent_text(share: float | None) -> str:
    """Format a signed difference: 0.0634 -> '+6.3 %'; what rounds to zero is '+0.0 %'."""
    if share is None:
        return "-"
    return f"{round(share * 100, 1) + 0.0:+.1f} %"


def share_text(share: float) -> str:
    """Format a part of a whole: '70 %', and '99.8 %' where rounding would give 100."""
    if 0 < share < 0.005:
        return "<1 %"
    return f"{min(share * 100, 99.9):.1f} %" if 0.99 <= share < 1 else f"{share * 100:.0f} %"


def number_text(value: float | None, decimals: int) -> str:
    """Format a plain number: '1,234.50'."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{decimals}f}"


def _scaled(value: float, units: tuple[str, ...]) -> str:
    at = 0
    while value >= 999.5 and at < len(units) - 1:
        value, at = value / 1000, at + 1
    return f"{_digits(value) if at else f'{value:.0f}'} {units[at]}".strip()


def _digits(value: float) -> str:
    """Format with three digits and no exponent."""
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
