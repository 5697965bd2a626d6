"""Compares the papers' tables of bandwidths with the planner: table 4 of Streaming DiLoCo, table 5 of Eager Updates.

    python benchmarks/bandwidth_tables.py [--json]

Both tables say, for three models, which of 50 bandwidths between 0.1 and 1000 Gbit/s keeps a worker busy for 50 to 99 %
of its time. They come from a simulator that was not released. `plan.simulate` reproduces table 4 layer by layer, with
two workers, payloads of 16 and 4 bits, fragments of three layers, a period of 100, and a delay of 1 in rows that
overlap. One constant is fitted to all cells: STRETCH in `plan.paper_grid`. From 1.18 to 1.2, 65 cells or more are
exact.

Table 5 adds three rows, which `plan.simulate` does not reproduce. The rows that hide a round behind a whole period are
below the rate that the line must carry, bits / (period x step time). `two_periods` comes close. It simulates a run that
ends after two periods, so no worker waits for what was sent in the second; with a period of 30, a fragment is sent
after every step.
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

from atoll.core.codec import Codec
from atoll.plan.cost import Array
from atoll.plan.method import FRAGMENT_LAYERS, METHODS, Method, Model
from atoll.plan.paper_grid import GRID_BITS_PER_S, LEVELS, STRETCH, bandwidth_on_grid

WIDTH = 100

MODELS = {
    "1B": Model(parameters=10**9, layers=24, step_s=0.1),
    "10B": Model(parameters=10**10, layers=48, step_s=0.8),
    "100B": Model(parameters=10**11, layers=108, step_s=4.9),
}

TABLE_4 = {
    "data-parallel": "Data-parallel",
    "diloco": "DiLoCo",
    "streaming-blocking": "Streaming",
    "streaming-bf16": "+ overlap",
    "streaming": "+ overlap FP4",
}
"""The paper's names of methods, by ours; all have a period of 100."""


def _streaming(period: int, delay: int) -> Method:
    kind = "inner" if delay == 1 else "outer"
    codec = Codec("e3m0")
    return Method(name=f"{kind}-{period}", period=period, each=FRAGMENT_LAYERS, delay=delay, codec=codec)


TABLE_5 = {
    "1 inner step, H 30": _streaming(30, 1),
    "1 outer step, H 30": _streaming(30, 30),
    "1 outer step, H 100": _streaming(100, 100),
}
"""The methods that table 5 adds to table 4, all in 4 bits, by overlap and period."""

PRINTED: dict[str, dict[str, tuple[float, ...]]] = {
    "1B": {
        "data-parallel": (86.8, 152.6, 184.2, 222.3, 569.0),
        "diloco": (1.4, 6.2, 13.3, 23.3, 86.8),
        "streaming-blocking": (1.4, 5.2, 9.1, 16.0, 28.1),
        "streaming-bf16": (1.4, 4.3, 6.2, 9.1, 11.0),
        "streaming": (0.4, 0.9, 1.7, 2.0, 3.0),
        "inner-30": (2.4, 3.6, 4.3, 4.3, 4.3),
        "outer-30": (1.1, 2.0, 2.0, 2.0, 2.4),
        "outer-100": (0.1, 0.2, 0.2, 0.2, 0.2),
    },
    "10B": {
        "data-parallel": (104.8, 222.3, 222.3, 268.3, 471.5),
        "diloco": (1.7, 7.5, 16.0, 33.9, 104.8),
        "streaming-blocking": (1.7, 5.2, 9.1, 13.3, 19.3),
        "streaming-bf16": (1.7, 3.6, 5.2, 6.2, 7.5),
        "streaming": (0.4, 0.9, 1.4, 1.4, 1.7),
        "inner-30": (1.4, 2.4, 2.4, 3.0, 3.0),
        "outer-30": (0.7, 1.1, 1.4, 1.4, 1.4),
        "outer-100": (0.1, 0.2, 0.2, 0.3, 0.3),
    },
    "100B": {
        "data-parallel": (184.2, 323.8, 390.7, 390.7, 471.5),
        "diloco": (3.0, 11.0, 23.3, 49.4, 184.2),
        "streaming-blocking": (2.4, 6.2, 9.1, 11.0, 19.3),
        "streaming-bf16": (1.7, 3.6, 4.3, 5.2, 5.2),
        "streaming": (0.5, 0.9, 1.1, 1.1, 1.4),
        "inner-30": (0.9, 1.7, 2.0, 2.0, 2.0),
        "outer-30": (0.5, 0.8, 0.9, 0.9, 0.9),
        "outer-100": (0.2, 0.3, 0.3, 0.3, 0.4),
    },
}
"""Gbit/s by model, method and level, as printed."""


class Comparison(NamedTuple):
    """Compares one cell of a table with ours."""

    table: int
    """4 of Streaming DiLoCo, 5 of Eager Updates."""
    model: str
    method: str
    """Our name of the method."""
    row: str
    """The paper's name of it."""
    level: float
    printed_gbit_per_s: float
    """As the paper prints it."""
    paper: float
    """The grid point that it stands for, before rounding, in bits per second."""
    ours: float | None
    """None where no grid point reaches the level."""
    steps_apart: int | None
    """Grid points from the paper's to ours."""
    two_periods_apart: int | None
    """The same in a run of two periods; table 5 alone."""


def compare() -> Iterator[Comparison]:
    """Yield the 75 cells of table 4, then the 45 that table 5 adds, in the order of the tables."""
    for name in MODELS:
        for ours, row in TABLE_4.items():
            yield from _cells(4, name, row, METHODS[ours], None)
    for name, model in MODELS.items():
        for row, method in TABLE_5.items():
            yield from _cells(5, name, row, method, _first_enough(two_periods(model, method)))


def _cells(table: int, name: str, row: str, method: Method, short: list[int] | None) -> Iterator[Comparison]:
    found = bandwidth_on_grid(MODELS[name], method)
    for number, (level, printed) in enumerate(zip(LEVELS, PRINTED[name][method.name], strict=True)):
        theirs, ours = _grid_point(1e9 * printed), found[level]
        yield Comparison(
            table=table,
            model=name,
            method=method.name,
            row=row,
            level=level,
            printed_gbit_per_s=printed,
            paper=float(GRID_BITS_PER_S[theirs]),
            ours=ours,
            steps_apart=None if ours is None else _grid_point(ours) - theirs,
            two_periods_apart=None if short is None else short[number] - theirs,
        )


def two_periods(model: Model, method: Method) -> Array:
    """Return the utilisation of a run of two periods at every rate of the grid, sending after the step.

    With a period of 30, a fragment leaves after every step; with 100, the fragments are spread over the period.
    """
    fragments = len(method.layers(model))
    gap = 1.0 if method.period == 30 else method.period / fragments
    carried_s = 8 * max(method.payload_bytes(model)) / GRID_BITS_PER_S
    steps, step_s = 2 * method.period, STRETCH * model.step_s
    clock, free = np.zeros_like(carried_s), np.zeros_like(carried_s)
    complete: dict[int, Array] = {}  # by the step after which the worker waits for it
    sends = [int(gap * number) for number in range(1, int(steps / gap) + 1)]
    for step in range(1, steps + 1):
        clock = clock + step_s
        if step in sends:
            free = np.maximum(free, clock) + carried_s
            complete[step + method.delay] = free
        if step in complete:
            clock = np.maximum(clock, complete[step])
    utilisation: Array = steps * step_s / clock
    return utilisation


def _first_enough(reached: Array) -> list[int]:
    return [int(np.flatnonzero(reached >= level - 1e-12)[0]) for level in LEVELS]


def _grid_point(bits_per_s: float) -> int:
    return int(np.abs(np.log(GRID_BITS_PER_S / bits_per_s)).argmin())


def show(cells: list[Comparison]) -> None:
    """Print the tables, and how many cells agree."""
    console = Console(width=WIDTH)
    for number, paper in ((4, "table 4 of Streaming DiLoCo"), (5, "what table 5 of Eager Updates adds")):
        found = [cell for cell in cells if cell.table == number]
        title = f"Gbit/s for a compute utilisation, {paper}: the paper's / ours where they differ"
        console.print(Text(title, style="bold"))
        console.print(_table(found))
        for line in summary(found):
            console.print(line)
        console.print()


def _table(cells: list[Comparison]) -> Table:
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
    return table


def _both(cell: Comparison) -> Text:
    theirs = f"{cell.printed_gbit_per_s:.1f}"
    ours = "-" if cell.ours is None else f"{cell.ours / 1e9:.1f}"
    return Text(theirs) if cell.steps_apart == 0 else Text(f"{theirs} / {ours}", style="yellow")


def summary(cells: list[Comparison]) -> list[str]:
    """Return how many cells agree, in one line; for table 5 a second line has those of a run of two periods."""
    lines = [_agreement([cell.steps_apart for cell in cells])]
    if cells[0].table == 5:
        short = [cell.two_periods_apart for cell in cells]
        below = sum(cell.printed_gbit_per_s < _line_gbit_per_s(cell) for cell in cells if "outer" in cell.method)
        lines[0] += f"; {below} of 30 cells of one outer step lie below level x bits / (period x step time)"
        lines.append(f"in a run of two periods, a fragment after every step where H is 30: {_agreement(short)}")
    return lines


def _line_gbit_per_s(cell: Comparison) -> float:
    """Return the rate at which a line carries every payload, at a step time that is stretched by waiting."""
    model, method = MODELS[cell.model], next(m for m in TABLE_5.values() if m.name == cell.method)
    return cell.level * 4 * model.parameters / (method.period * STRETCH * model.step_s) / 1e9


def _agreement(apart: list[int | None]) -> str:
    most = max(math.inf if steps is None else abs(steps) for steps in apart)
    within = "all within one" if most <= 1 else f"the furthest {most:g} apart"
    return f"{apart.count(0)} of {len(apart)} on the exact grid point, {within}"


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
