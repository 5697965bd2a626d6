"""The block formats in plain NumPy: what decode(encode(x)) must be, straight from their definitions."""

import numpy as np

LEVELS = {
    "e3m0": np.array([0.0, *(2.0**k for k in range(-6, 1))]),
    "e2m1": np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]),
    "int4": np.arange(8.0),
    "int8": np.arange(128.0),
    "lloyd4": np.array([0.0, 5.0, 11.0, 18.0, 26.0, 36.0, 48.0, 64.0]),
}


def boundaries(levels, log):
    """Where rounding switches to the next level; below the smallest power of two, log space ends at its sqrt(1/2)."""
    if log:
        return np.concatenate([[levels[1] / np.sqrt(2)], np.sqrt(levels[1:-1] * levels[2:])])
    return (levels[1:] + levels[:-1]) / 2


def lloyd4(x, block=128):
    """Nearest level, halves away from zero, in the unit 2 or 3 times a power of two that keeps all below the highest
    level, or in the next smaller one if the squared error is less there (values counted in whole sixteenths)."""
    out = np.zeros_like(x, dtype=np.float64)
    levels = LEVELS["lloyd4"]
    edges = (levels[1:] + levels[:-1]) / 2
    ladder = [(2.0 + b % 2) * 2.0 ** (b // 2 - 80) for b in range(256)]
    for start in range(0, len(x), block):
        values = np.abs(x[start : start + block].astype(np.float32).astype(np.float64))
        at = next(b for b in range(1, 256) if values.max() < 64 * ladder[b])
        grain = 2.0 ** ((at - 1) // 2 - 80) / 16
        best, least = None, np.inf
        for unit in (ladder[at], ladder[at - 1]):
            decoded = levels[np.searchsorted(edges, values / unit, side="right")] * unit
            lost = np.square(np.floor(values / grain) - decoded / grain).sum()
            if lost < least:
                best, least = decoded, lost
        out[start : start + block] = np.sign(x[start : start + block]) * best
    return out


class Wire:
    """What a format makes of a delta, and of a mean that comes back in two shots: lloyd4 where it has 4 bits."""

    def __init__(self, name):
        self.name = name

    def __call__(self, x):
        return round_trip(x, self.name)

    def mean(self, x):
        return lloyd4(x) if self.name in ("e3m0", "e2m1", "int4", "lloyd4") else round_trip(x, self.name)


def round_trip(x, name, block=128):
    """Nearest level (in log space for e3m0) in the smallest power-of-two unit in which the largest value has one."""
    if name == "lloyd4":
        return lloyd4(x, block)
    if name in ("lloyd2", "top64"):
        return {"lloyd2": lloyd2, "top64": top64}[name](x)
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


def lloyd2(x, block=128):
    """Sign and the nearer of 3 and 10 units, from halfway on the higher. The unit is 2 or 3 times a power of two: the
    smallest in which all are below the higher level, or one of the next four smaller ones, whichever has the least
    squared error (values counted in whole sixteenths of the power in the smallest), the largest of equals. A block that
    is all below the smallest units is zero."""
    out = np.zeros_like(x, dtype=np.float64)
    ladder = [0.0, *((2.0 + b % 2) * 2.0 ** (b // 2 - 80) for b in range(1, 256))]
    for start in range(0, len(x), block):
        values = np.abs(x[start : start + block].astype(np.float32).astype(np.float64))
        signs = 1 - 2.0 * np.signbit(x[start : start + block])
        at = next(b for b in range(1, 256) if values.max() < 10 * ladder[b])
        if at < 5:
            continue
        grain = 2.0 ** ((at - 4) // 2 - 80) / 16
        best, least = None, np.inf
        for unit in ladder[at : at - 5 : -1]:
            decoded = np.where(np.floor(values / grain) * grain >= 6.5 * unit, 10.0, 3.0) * unit
            lost = np.square(np.floor(values / grain) - decoded / grain).sum()
            if lost < least:
                best, least = decoded, lost
        out[start : start + block] = signs * best
    return out


def top64(x, chunk=4096, one_in=64):
    """Of every chunk the largest, one for every 64 values, the first of equals; each becomes the mean of those below
    the mean magnitude, or of those from it on, whichever is nearer (from halfway on the higher). Magnitudes are counted
    in whole 2^-15ths of the power of two in the largest, and means in whole 2^-7ths."""
    out = np.zeros_like(x, dtype=np.float64)
    for start in range(0, len(x), chunk):
        values = x[start : start + chunk].astype(np.float32).astype(np.float64)
        order = np.argsort(-np.abs(values), kind="stable")[: -(-len(values) // one_in)]
        kept = [i for i in order if values[i] != 0]
        if not kept:
            continue
        power = 2.0 ** max(np.floor(np.log2(np.abs(values).max())), 16 - 127)
        counted = {i: int(abs(values[i]) / power * 2**15) for i in kept}
        mean = sum(counted.values()) / len(kept)
        groups = [c for c in counted.values() if c < mean], [c for c in counted.values() if c >= mean]
        low, high = (min(255, (2 * sum(g) + 256 * len(g)) // (512 * len(g))) if g else None for g in groups)
        low = high if low is None else low
        for i, c in counted.items():
            level = high if 2 * c >= 256 * (low + high) else low
            out[start + i] = np.sign(values[i]) * level * power / 2**7
    return out
