"""How long the planner thinks: the user's table, the papers' table, and a sweep over ten thousand settings.

    python benchmarks/plan.py

One core, user time. `atoll plan` must take less than 5 s from its start to its end, Python's imports and all; the
papers' table less than 5 s and the sweep less than 30 s.
"""

import os
import resource
import subprocess
import sys
import time

from atoll.plan.line import Line
from atoll.plan.method import Model
from atoll.plan.recommend import candidates, recommend, sweep
from bandwidth_tables import MODELS, compare

SETTINGS = 10_000
PERIODS = tuple(sorted({round(5 * 200 ** (n / 89)) for n in range(90)}))
"""Five to a thousand steps, evenly by their logarithm."""
ASKED = (
    "--layers 126",
    "--layers 126 --json",
    "--layers 126 --period 10000",
    "--layers 256 --workers 8 --link 1Gbit/s,40ms",
    "--layers 256 --workers 8 --link 1Gbit/s,40ms --steps 1e6",
    "--layers 256 --workers 5 --link 1Gbit/s,300s --steps 1e6 --period 300 --fragments 256",
)
"""Tables for a model of 10 billion parameters and 0.8 s a step; the last is about as bad as it gets."""


def main() -> None:
    for asked in ASKED:
        print(f"atoll plan {asked}: {_command(asked):.2f} s")
    began = time.perf_counter()
    cells = list(compare())
    exact = sum(cell.steps_apart == 0 for cell in cells)
    print(f"the papers' table: {len(cells)} cells, {exact} exact, in {time.perf_counter() - began:.2f} s")
    link = Line(1e9, latency_s=0.05)
    for name, model in MODELS.items():
        print(f"{name}: {_swept(model, link)}, and advice in {_advised(model, link):.2f} s")


def _command(asked: str) -> float:
    """Seconds of user time of a command of its own."""
    arguments = ["plan", "--params", "10e9", "--step-time", "0.8", *asked.split()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    command = [sys.executable, "-c", "from atoll.cli.main import main; main()", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


def _swept(model: Model, link: Line) -> str:
    options = [method for n, method in enumerate(candidates(model, PERIODS)) if n < SETTINGS]
    began = time.perf_counter()
    found = sweep(model, 2, link, options)
    took = time.perf_counter() - began
    return f"{len(options):,} settings in {took:.1f} s, {int((found >= 0.95).sum()):,} of them at 95 % or more"


def _advised(model: Model, link: Line) -> float:
    began = time.perf_counter()
    recommend(model, 2, link)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
