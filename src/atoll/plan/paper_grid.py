"""Answers as table 4 of the Streaming DiLoCo paper does: the first bandwidth of its grid that is enough.

The table is for two workers without latency that send layer by layer. `benchmarks/bandwidth_tables.py` compares all of
its cells with ours. One constant is fitted to it: steps take STRETCH times as long as its captions say. The paper gives
a model FLOPs utilisation of 60 % in one place and 40 % in another; 1.2 is what 50 % makes of the captions' 60 %.
"""

from dataclasses import replace

import numpy as np

from atoll.plan.cost import Array
from atoll.plan.forecast import utilisation
from atoll.plan.method import Method, Model

GRID_BITS_PER_S: Array = np.logspace(-1, 3, 50) * 1e9
LEVELS = (0.5, 0.8, 0.9, 0.95, 0.99)
"""The paper's levels of compute utilisation."""
STRETCH = 1.2
WORKERS = 2

ASSUMPTIONS = (
    f"the Streaming paper's grid and assumptions, not the given link: {WORKERS} workers, no latency, steps {STRETCH} "
    "times as long, every layer sent as soon as it can be"
)
"""What `bandwidth_on_grid` assumes, for readers of the JSON."""


def bandwidth_on_grid(model: Model, method: Method) -> dict[float, float | None]:
    """Return the bits per second that the paper's table would have for every level; None beyond its grid."""
    stretched = replace(model, step_s=STRETCH * model.step_s)
    reached = utilisation(stretched, method, WORKERS, GRID_BITS_PER_S, layered=True)
    found: dict[float, float | None] = {}
    for level in LEVELS:
        enough = np.flatnonzero(reached >= level - 1e-12)
        found[level] = float(GRID_BITS_PER_S[enough[0]]) if enough.size else None
    return found
