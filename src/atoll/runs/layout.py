"""The folder of a run, out/name/: what is in it, and what it is called.

run.toml        every setting, also those that the run file left out; once it is there, the run has begun
about.json      versions, seed, device, sizes
metrics.jsonl   what happened (atoll.runs.events)
checkpoints/    the latest whole states of the run
best/           the outer parameters with the lowest held-out loss, exported like model/
model/          the final model, exported
log.txt         all that a process said that `atoll launch` or `atoll compare` has started
worker-1/       all of the above for one worker, where workers have processes of their own; best/ with worker 0 only
  rank-1/       of a further rank of that worker: run.toml, about.json and checkpoints/
"""

import re
from pathlib import Path
from typing import Final

RUN: Final = "run.toml"
ABOUT: Final = "about.json"
METRICS: Final = "metrics.jsonl"
LOG: Final = "log.txt"
CHECKPOINTS: Final = "checkpoints"
BEST: Final = "best"
MODEL: Final = "model"


def worker_folder(worker: int) -> str:
    """What the folder of one worker of a run is called."""
    return f"worker-{worker}"


def worker_of(folder: Path) -> int | None:
    """Whose folder it is, by its name; None if it is that of a whole run."""
    found = re.fullmatch(r"worker-(0|[1-9][0-9]{0,8})", folder.resolve().name)
    return int(found[1]) if found else None


def worker_folders(run: Path) -> list[Path]:
    """The folders of workers that have begun in the folder of a run, in worker order."""
    there = {worker_of(file.parent): file.parent for file in run.glob(f"worker-*/{RUN}")}
    return [there[worker] for worker in sorted(worker for worker in there if worker is not None)]


def rank_folder(rank: int) -> str:
    """What the folder of a further rank of a worker is called, inside that of the worker."""
    return f"rank-{rank}"
