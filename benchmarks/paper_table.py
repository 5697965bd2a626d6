"""Table 4 of the Streaming DiLoCo paper beside the planner's own figures.

    python benchmarks/paper_table.py [--json]

The table says which bandwidth, of 50 between 0.1 and 1000 Gbit/s, keeps a worker busy for 50 to 99 % of its time, for
five methods and three models. It comes from a simulator that was not released. `plan.simulate` reproduces it layer by
layer, with two workers, payloads of 16 and 4 bits, fragments of three layers, a period of 100 and a delay of 1 where
anything is hidden. One constant is fitted, for all cells alike: STRETCH in `plan.paper_grid`. From 1.18 to 1.2, 65
cells or more are exact.
"""

import argparse
import json
import math
from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from atoll.plan.method import METHODS, Model
from atoll.plan.paper_grid import GRID_BITS_PER_S, LEVELS, bandwidth_on_grid

WIDTH = 100

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
    """As the paper prints it."""
    paper: float
    """The grid point that it stands for, before rounding, in bits per second."""
    ours: float | None
    """None where no grid point reaches the level."""
    steps_apart: int | None
    """Grid points from the paper's to ours."""


def compare() -> Iterator[Comparison]:
    """Yield all 75 cells, in the order of the table."""
    for name, model in MODELS.items():
        for method, row in ROWS.items():
            found = bandwidth_on_grid(model, METHODS[method])
            for level, printed in zip(LEVELS, PRINTED[name][method], strict=True):
                theirs, ours = _grid_point(1e9 * printed), found[level]
                apart = None if ours is None else _grid_point(ours) - theirs
                yield Comparison(name, method, row, level, printed, float(GRID_BITS_PER_S[theirs]), ours, apart)


def _grid_point(bits_per_s: float) -> int:
    return int(np.abs(np.log(GRID_BITS_PER_S / bits_per_s)).argmin())


def show(cells: list[Comparison]) -> None:
    """Print the table, and how many cells are the same."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("model", "method"):
        table.add_column(head)
    for level in LEVELS:
        table.add_column(f"{100 * level:.0f} %", justify="right", no_wrap=True)
    last = ""
    for (model, row), group in groupby(cells, key=lambda cell: (cell.model, cell.row)):
        if last not in ("", model):
            table.add_section()
        table.add_row("" if model == last else model, row, *map(_both, group))
        last = model
    console = Console(width=WIDTH)
    console.print(Text("Gbit/s for a compute utilisation: the paper's / ours where they differ", style="bold"))
    console.print(table)
    console.print(summary(cells))


def _both(cell: Comparison) -> Text:
    theirs = f"{cell.printed_gbit_per_s:.1f}"
    ours = "-" if cell.ours is None else f"{cell.ours / 1e9:.1f}"
    return Text(theirs) if cell.steps_apart == 0 else Text(f"{theirs} / {ours}", style="yellow")


def summary(cells: list[Comparison]) -> str:
    """Say in a line how many cells are the same."""
    exact = sum(cell.steps_apart == 0 for cell in cells)
    most = max((abs(cell.steps_apart) if cell.steps_apart is not None else math.inf) for cell in cells)
    within = "all within one" if most <= 1 else f"the furthest {most:g} apart"
    return f"{exact} of {len(cells)} on the exact grid point, {within}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print plain JSON")
    cells = list(compare())
    if parser.parse_args().json:
        print(json.dumps([cell._asdict() for cell in cells], indent=2, allow_nan=False))
    else:
        show(cells)


if __name__ == "__main__":
    main()
