"""The block formats in plain NumPy: what decode(encode(x)) must be, straight from their definitions."""

import numpy as np

LEVELS = {
    "e3m0": np.array([0.0, *(2.0**k for k in range(-6, 1))]),
    "e2m1": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
    "int4": np.arange(8.0),
    "int8": np.arange(128.0),
}


def boundaries(levels, log):
    """Where rounding switches to the next level; below the smallest power of two, log space ends at its sqrt(1/2)."""
    if log:
        return np.concatenate([[levels[1] / np.sqrt(2)], np.sqrt(levels[1:-1] * levels[2:])])
    return (levels[1:] + levels[:-1]) / 2


def round_trip(x, name, block=128):
    """Nearest level (in log space for e3m0) in the smallest power-of-two unit in which the largest value has one."""
    out = np.zeros_like(x, dtype=np.float64)
    levels = LEVELS[name]
    edges = boundaries(levels, log=name == "e3m0")
    beyond = levels[-1] * np.sqrt(2) if name == "e3m0" else {"e2m1": 7.0, "int4": 7.5, "int8": 127.5}[name]
    for start in range(0, len(x), block):
        values = x[start : start + block].astype(np.float32).astype(np.float64)
        peak = np.abs(values).max()
        unit = 2.0**-120
        while peak >= beyond * unit:
            unit *= 2
        if name.startswith("int"):
            level = np.rint(np.abs(values) / unit).astype(int)  # halves to even
        else:
            level = np.searchsorted(edges, np.abs(values) / unit, side="right")  # halves away from zero
        out[start : start + block] = np.sign(values) * levels[level] * unit
    return out
