"""Names the files in the folder of a run, out/name/.

run.toml        every setting, also those that the run file left out; once it is there, the run has begun
about.json      versions, seed, device, sizes
metrics.jsonl   events (atoll.runs.events)
anchors.jsonl   of an elastic run: members of every round and the anchor after it (atoll.runs.evidence)
checkpoints/    the latest whole states of the run
best/           the outer parameters with the lowest held-out loss, exported like model/
model/          the final model, exported
log.txt         output of a process that `atoll launch` or `atoll compare` has started
worker-1/       all of the above for one worker that has its own process; best/ with worker 0 only
  rank-1/       run.toml, about.json and checkpoints/ of another rank of that worker
"""

import re
from pathlib import Path
from typing import Final

RUN: Final = "run.toml"
ABOUT: Final = "about.json"
METRICS: Final = "metrics.jsonl"
ANCHORS: Final = "anchors.jsonl"
LOG: Final = "log.txt"
CHECKPOINTS: Final = "checkpoints"
BEST: Final = "best"
MODEL: Final = "model"


def worker_folder(worker: int) -> str:
    """Returns the name of one worker's folder."""
    return f"worker-{worker}"


def worker_of(folder: Path) -> int | None:
    """Returns the worker of a folder by its name; None if it is the folder of a whole run."""
    found = re.fullmatch(r"worker-(0|[1-9][0-9]{0,8})", folder.resolve().name)
    return int(found[1]) if found else None


def worker_folders(run: Path) -> list[Path]:
    """Returns the folders of workers that have begun, in worker order."""
    there = {worker_of(file.parent): file.parent for file in run.glob(f"worker-*/{RUN}")}
    return [there[worker] for worker in sorted(worker for worker in there if worker is not None)]


def rank_folder(rank: int) -> str:
    """Returns the name of another rank's folder, inside that of its worker."""
    return f"rank-{rank}"
