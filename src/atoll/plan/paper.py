"""The Streaming DiLoCo paper's table 4, and the scale on which it is printed.

The table says which bandwidth, of 50 between 0.1 and 1000 Gbit/s, keeps a worker busy for 50 to 99 % of its time: five
methods, three models. It comes from a simulator that was not released. `plan.simulate` reproduces it layer by layer,
with two members, payloads of 16 and 4 bits, fragments of three layers, a period of 100 and a delay of 1 where anything
is hidden. One constant is fitted, for all cells alike: steps take STRETCH times as long as the table's captions say.
The paper gives a model FLOPs utilisation of 60 % in one place and 40 % in another; 1.2 is what 50 % would make of the
60 % behind the captions. From 1.18 to 1.2, 65 cells or more are exact.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from atoll.plan.cost import Array
from atoll.plan.method import METHODS, Method, Model
from atoll.plan.outlook import steady_utilisation

GRID_BITS_PER_S: Array = np.logspace(-1, 3, 50) * 1e9
"""The bandwidths that the paper tried."""
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""Its levels of compute utilisation."""
STRETCH = 1.2
MEMBERS = 2

MODELS = {
    "1B": Model(parameters=10**9, layers=24, step_s=0.1),
    "10B": Model(parameters=10**10, layers=48, step_s=0.8),
    "100B": Model(parameters=10**11, layers=108, step_s=4.9),
}

ROWS = {
    "data-parallel": "Data-parallel",
    "diloco": "DiLoCo",
    "streaming-blocking": "Streaming",
    "streaming-bf16": "+ overlap",
    "streaming": "+ overlap FP4",
}
"""Our names, and the paper's."""

PRINTED: dict[str, dict[str, tuple[float, ...]]] = {
    "1B": {
        "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming-blocking": (1.4, 5.2, 9.1, 16.0, 28.1),
        "streaming-bf16": (1.4, 4.3, 6.2, 9.1, 11.0),
        "streaming": (0.4, 0.9, 1.7, 2.0, 3.0),
    },
    "10B": {
        "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming-blocking": (1.7, 5.2, 9.1, 13.3, 19.3),
        "streaming-bf16": (1.7, 3.6, 5.2, 6.2, 7.5),
        "streaming": (0.4, 0.9, 1.4, 1.4, 1.7),
    },
    "100B": {
        "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming-blocking": (2.4, 6.2, 9.1, 11.0, 19.3),
        "streaming-bf16": (1.7, 3.6, 4.3, 5.2, 5.2),
        "streaming": (0.5, 0.9, 1.1, 1.1, 1.4),
    },
}
"""Gbit/s by model, method and level, as printed."""


class Comparison(NamedTuple):
    """One cell of the table, and ours."""

    model: str
    method: str
    """Our name of it."""
    row: str
    """The paper's."""
    level: float
    printed_gbit_per_s: float
    """What the paper prints."""
    paper_bits_per_s: float
    """The grid point that it stands for, before rounding."""
    bits_per_s: float | None
    """Ours; None where no grid point reaches the level."""
    steps_apart: int | None
    """Grid points from the paper's to ours."""


ASSUMED = (
    f"the Streaming paper's grid and assumptions, not the given link: {MEMBERS} workers, no latency, steps {STRETCH} "
    "times as long, every layer sent as soon as it can be"
)
"""What `on_the_grid` takes for granted."""


def on_the_grid(model: Model, method: Method) -> dict[float, float | None]:
    """Bits per second for every level, as the paper's table would have them; None beyond its grid."""
    stretched = replace(model, step_s=STRETCH * model.step_s)
    reached = steady_utilisation(stretched, method, MEMBERS, GRID_BITS_PER_S, layered=True)
    found: dict[float, float | None] = {}
    for level in LEVELS:
        enough = np.flatnonzero(reached >= level - 1e-12)
        found[level] = float(GRID_BITS_PER_S[enough[0]]) if enough.size else None
    return found


def compare() -> Iterator[Comparison]:
    """All 75 cells, in the order of the table."""
    for name, model in MODELS.items():
        for method, row in ROWS.items():
            ours = on_the_grid(model, METHODS[method])
            for level, printed in zip(LEVELS, PRINTED[name][method], strict=True):
                theirs = _grid_point(1e9 * printed)
                found = ours[level]
                apart = None if found is None else _grid_point(found) - theirs
                yield Comparison(name, method, row, level, printed, float(GRID_BITS_PER_S[theirs]), found, apart)


def _grid_point(bits_per_s: float) -> int:
    return int(np.abs(np.log(GRID_BITS_PER_S / bits_per_s)).argmin())
