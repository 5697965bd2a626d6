"""How long the planner thinks: the papers' table, and a sweep over ten thousand settings.

    python benchmarks/plan.py

One core. The table must take less than 5 s and the sweep less than 30 s.
"""

import time

from atoll.plan.advise import advise, candidates, sweep
from atoll.plan.link import Link
from atoll.plan.method import Model
from atoll.plan.paper import MODELS, compare

SETTINGS = 10_000
PERIODS = tuple(sorted({round(5 * 200 ** (n / 89)) for n in range(90)}))
"""Five to a thousand steps, evenly by their logarithm."""


def main() -> None:
    began = time.perf_counter()
    cells = list(compare())
    exact = sum(cell.steps_apart == 0 for cell in cells)
    print(f"the papers' table: {len(cells)} cells, {exact} exact, in {time.perf_counter() - began:.2f} s")
    link = Link(1e9, latency_s=0.05)
    for name, model in MODELS.items():
        print(f"{name}: {_swept(model, link)}, and advice in {_advised(model, link):.2f} s")


def _swept(model: Model, link: Link) -> str:
    options = [method for n, method in enumerate(candidates(model, PERIODS)) if n < SETTINGS]
    began = time.perf_counter()
    found = sweep(model, 2, link, options)
    took = time.perf_counter() - began
    return f"{len(options):,} settings in {took:.1f} s, {int((found >= 0.95).sum()):,} of them at 95 % or more"


def _advised(model: Model, link: Link) -> float:
    began = time.perf_counter()
    advise(model, 2, link)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
