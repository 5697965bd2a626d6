"""Trains all runs of the studies that come with atoll, and prints the tables of docs/studies.md.

    python benchmarks/studies.py [--jobs N]      from the repository's root; under an hour on two cores
    python benchmarks/studies.py --tables        the tables of results/studies.json alone

Runs go to runs/STUDY/RUN; finished ones are not trained again. Their losses, cosines and bytes go to
results/studies.json, with the settings in which the runs of a study differ.
"""

import argparse
import json
import os
import platform
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import torch

from atoll._util.disk import write_atomically
from atoll.cli.compare import run_all
from atoll.runs.events import End, RoundApplied, Start, read
from atoll.runs.layout import METRICS
from atoll.settings.study import read as read_study
from atoll.settings.study import shipped
from studies_table import RESULTS, TABLES, Result, Results, cosines, load, table


def collect(folder: Path) -> Results:
    """Read the finished runs of all studies from FOLDER/STUDY/RUN."""
    found = {}
    for study in shipped():
        settings = {
            name: dict(flat(run.model_dump(mode="json"))) for name, run in read_study([Path(study)]).runs.items()
        }
        keys = {key: None for one in settings.values() for key in one if key != "name"}
        varied = [key for key in keys if len({repr(one.get(key)) for one in settings.values()}) > 1]
        for run, one in settings.items():
            differs = {key: one[key] for key in varied if one.get(key) is not None}
            found[f"{study}/{run}"] = {"settings": differs} | summary(folder / study / run / METRICS)
    return found


def flat(table: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted names."""
    for key, value in table.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


def summary(metrics: Path) -> Result:
    """Return the losses, cosines and bytes of one run; cosines also by thirds of the run."""
    events = list(read(metrics))
    start, *_ = (event for event in events if isinstance(event, Start))
    *_, end = (event for event in events if isinstance(event, End))
    result: Result = {"loss": round(end.loss, 5), "tokens": end.tokens, "bytes_sent": round(mean(end.bytes_sent))}
    rounds = [event for event in events if isinstance(event, RoundApplied)]
    thirds: list[list[float]] = [[], [], []]
    for one in rounds:
        if one.cosine is not None:
            thirds[-(-3 * one.step // start.steps) - 1].append(one.cosine)
    if cosines := [*chain(*thirds)]:
        result["cosine"] = round(mean(cosines), 4)
        result["cosine_deviation"] = round(pstdev(cosines), 4)
        result["cosine_thirds"] = [round(mean(third), 4) for third in thirds]
        result["norm"] = round(mean(one.norm for one in rounds), 4)
    return result


def verdicts(results: Results) -> Iterator[tuple[bool, str]]:
    """Yield whether each claim of the studies holds, and the claim with the measured difference."""
    for study in shipped():
        for claim in read_study([Path(study)]).claims:
            one, other = (results[f"{study}/{run}"]["loss"] for run in (claim.run, claim.against))
            yield claim.holds(one / other - 1), f"{study}: {claim.say} ({one / other - 1:+z.1%})"


def write(about: Result, results: Results, path: Path = RESULTS) -> None:
    """Write the results, one line a run."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
    write_atomically(path, f'{{\n "about": {json.dumps(about)},\n "runs": {{\n{lines}\n }}\n}}\n'.encode())


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the studies that come with atoll, and prints their tables.")
    parser.add_argument("--jobs", type=int, help="runs at the same time; default: one a core")
    parser.add_argument("--tables", action="store_true", help="print the tables of earlier results, and train nothing")
    given = parser.parse_args()
    if not given.tables:
        for study in shipped():  # in the order of names, so that `start` finds the models of `pretrained`
            if failed := run_all(read_study([Path(study)]), jobs=given.jobs):
                raise SystemExit("\n".join(f"error: run {study}/{run} failed: {why}" for run, why in failed.items()))
        about = {"python": platform.python_version(), "torch": torch.__version__, "cores": os.cpu_count()}
        write(about, collect(Path("runs")))
    _, results = load()
    for rows in TABLES.values():
        print("\n".join([*table(rows, results), ""]))
    print("\n".join([*cosines(results), ""]))
    for holds, claim in verdicts(results):
        print("holds:" if holds else "does not hold:", claim)


if __name__ == "__main__":
    main()
