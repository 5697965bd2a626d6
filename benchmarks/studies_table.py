"""Turns the results of studies.py into the tables of docs/studies.md: losses and cosines of the runs."""

import json
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results" / "studies.json"
PERIODS = "004 008 016 032 096"
Result = dict[str, Any]
Results = dict[str, Result]
"""Results by STUDY/RUN."""


class Series(NamedTuple):
    """Names the runs of one study that share a row of a table."""

    label: str
    study: str
    run: str
    """Name of each run, with {} in place of a word of `varied`."""
    varied: str
    against: str = ""
    """Name of the run that each is compared to, also with {}; empty: the first of the row."""

    def of(self, results: Results, name: str = "") -> list[Result]:
        """Return the results of its runs, or of the runs with another name."""
        return [results[f"{self.study}/{(name or self.run).format(value)}"] for value in self.varied.split()]


TABLES = {
    "DiLoCo": [
        Series("mixed text: 1, 2, 4, 8 workers", "workers", "workers-{}", "1 2 4 8"),
        Series("one kind each, against mixed: 2, 4, 8 workers", "workers", "clusters-{}", "2 4 8", "workers-{}"),
        Series("mixed; one kind each; the same, equal weights", "noniid", "{}", "iid clusters equal-weights"),
        Series("mixed text: 0, 10, 30, 50 % lost", "drops", "drop-{}", "00 10 30 50"),
        Series("one kind each: 0, 10, 30, 50 % lost", "drops", "clusters-drop-{}", "00 10 30 50"),
        Series("halving, doubling", "compute", "{}", "halving doubling"),
        Series("ramp down, ramp up", "compute", "ramp-{}", "down up"),
        Series("1 worker, 8 workers", "compute", "constant-{}", "1 8"),
        Series("Nesterov, heavy ball, SGD at 1.0", "outer", "{}", "nesterov momentum sgd"),
        Series("Nesterov, Adam at 0.3, Adam at 0.02", "outer", "{}", "nesterov adam adam-tuned"),
        Series("period 4, 8, 16, 32, 96", "period", "diloco-{}", PERIODS),
        Series("AdamW at 0.002, 0.004, 0.008", "one-worker", "{}", "adamw adamw-lr-4e-3 adamw-lr-8e-3"),
        Series("DiLoCo, against AdamW at 0.002: period 4 to 96", "one-worker", "diloco-{}", PERIODS, "adamw"),
        Series("start after 0, 120, 240 of 480 steps", "start", "after-{}", "0 120 240"),
    ],
    "Streaming DiLoCo": [
        Series("period 4, 8, 16, 32, 96", "period", "period-{}", PERIODS),
        Series("fp32, bf16, int8, int4, e2m1, e3m0", "codecs", "{}", "fp32 bf16 int8 int4 e2m1 e3m0"),
        Series("alpha 0: delay 0, 1, 4, 8", "overlap", "delay{}-alpha0.0", "0 1 4 8"),
        Series("alpha 0.5, against 0: delay 1, 4, 8", "overlap", "delay{}-alpha0.5", "1 4 8", "delay{}-alpha0.0"),
        Series("alpha 0.9, against 0: delay 1", "overlap", "delay{}-alpha0.9", "1", "delay{}-alpha0.0"),
        Series("delays 1 and 1, 3, 5, 8, 12", "delays", "delay-1-{}", "1 3 5 8 12"),
        Series("1, 2, 3 blocks strided, whole", "fragments", "{}", "blocks-1 blocks-2-strided blocks-3-strided whole"),
        Series("2, 3 blocks sequential", "fragments", "blocks-{}-sequential", "2 3", "blocks-{}-strided"),
        Series("2, 4, 8 workers, batches of 8, 4, 2", "tokens", "batch-{}", "2 4 8"),
        Series("2, 4, 8 workers, 960, 480, 240 steps", "tokens", "{}", "steps-2 batch-4 steps-8"),
    ],
    "Eager Updates": [
        Series("DiLoCo: period 4, 8, 16, 32, 96", "eager", "diloco-{}", PERIODS),
        Series("Delayed, against DiLoCo", "eager", "delayed-{}", PERIODS, "diloco-{}"),
        Series("Eager, against DiLoCo", "eager", "eager-{}", PERIODS, "diloco-{}"),
        Series("Delayed at 0.35, against DiLoCo: period 8, 32", "eager", "delayed-{}-lr-0.35", "008 032", "diloco-{}"),
        Series("Delayed at 0.15, against DiLoCo: period 8, 32", "eager", "delayed-{}-lr-0.15", "008 032", "diloco-{}"),
    ],
    "Fewer than four bits": [
        Series("fp32, e3m0, lloyd2, lloyd2 with feedback", "sparse", "{}", "fp32 e3m0 lloyd2 lloyd2-feedback"),
        Series("outer SGD: fp32, top64 with feedback", "sparse", "{}", "fp32-sgd top64"),
    ],
}
COSINES = [
    Series("DiLoCo, mixed text: 2, 4, 8 workers", "workers", "workers-{}", "2 4 8"),
    Series("DiLoCo, one kind each: 2, 4, 8 workers", "workers", "clusters-{}", "2 4 8"),
    Series("DiLoCo: period 4, 8, 16, 32, 96", "period", "diloco-{}", PERIODS),
    Series("Streaming: period 4, 8, 16, 32, 96", "period", "period-{}", PERIODS),
]


def load(path: Path = RESULTS) -> tuple[Result, Results]:
    """Return the versions that the results were made with, and the results."""
    known = json.loads(path.read_text(encoding="utf-8"))
    return known["about"], known["runs"]


def table(rows: list[Series], results: Results) -> list[str]:
    """Return the lines of a table of losses, in Markdown."""
    lines = ["| study | runs | held-out loss |", "|---|---|---|"]
    for series in rows:
        runs = series.of(results)
        against = series.of(results, series.against) if series.against else runs[:1] * len(runs)
        cells = [loss(run, other) for run, other in zip(runs, against, strict=True)]
        lines.append(f"| `{series.study}` | {series.label} | {', '.join(cells)} |")
    return lines


def loss(run: Result, against: Result) -> str:
    """Return a loss, and how far it is above another's."""
    return f"{run['loss']:.3f}" + ("" if run is against else f" ({above(run, against)})")


def above(run: Result, against: Result) -> str:
    """Return by how much the loss of a run is above another's, in percent of that."""
    return f"{100 * (run['loss'] / against['loss'] - 1):+z.1f} %"


def cosines(results: Results) -> list[str]:
    """Return the lines of the table of cosines, in Markdown."""
    lines = ["| runs | whole run | first third | second third | last third |", "|---|---|---|---|---|"]
    for series in COSINES:
        runs = series.of(results)
        whole = [[run["cosine"]] + run["cosine_thirds"] for run in runs]
        cells = [", ".join(f"{value:z.2f}" for value in column) for column in zip(*whole, strict=True)]
        lines.append(f"| {series.label} | {' | '.join(cells)} |")
    return lines
