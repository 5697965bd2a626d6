"""Runs many rounds between two workers over an elastic link with TLS, and prints what each process uses.

    python benchmarks/soak.py                    # 25,000 rounds
    python benchmarks/soak.py --rounds 3000

The workers are those of benchmarks/chaos.py, on loopback, without faults and without pauses; every inner step opens a
round of a small fragment. Resident memory may grow by less than 1 MB after the first 1,000 rounds, but for one jump
of the allocator's, and the number of open files may not grow, that of threads not in both halves.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path

from chaos_fleet import Event, Fleet, problems
from chaos_worker import Task

FIRST = 1000
"""Rounds after which caches are warm and pools have their size."""
MOST_GROWTH_KB = 1000
LEAK_KB = 250
"""What leaks grows by so much at least in each half of the rounds after the first ones."""


def soak(folder: Path, rounds: int, workers: int = 2) -> tuple[list[list[Event]], list[str]]:
    """Run rounds without faults.

    Returns:
        What each worker uses, every 100 rounds; and what is wrong.
    """
    task = Task(workers=workers, period=4, width=16, step_s=0.0, silent_s=60.0)
    with Fleet(folder, task) as fleet:
        fleet.end_at(rounds)
        for worker in range(workers):
            fleet.start(worker)
        fleet.wait_ended(range(workers), within_s=60 + 0.2 * rounds)
        found = problems(fleet, range(workers))
        samples = [fleet.events(worker, "sample") for worker in range(workers)]
    return samples, found + [problem for worker in range(workers) for problem in _growth(worker, samples[worker])]


def _growth(worker: int, samples: list[Event]) -> list[str]:
    first, last = _at(samples, FIRST), samples[-1]
    half = _at(samples, (first["step"] + last["step"]) // 2)
    halves = half["rss_kb"] - first["rss_kb"], last["rss_kb"] - half["rss_kb"]
    found = []
    if sum(halves) >= MOST_GROWTH_KB and min(halves) >= LEAK_KB:
        found.append(f"worker {worker}: resident memory grew from {first['rss_kb']} to {last['rss_kb']} kB")
    if last["threads"] > half["threads"] > first["threads"]:  # pools make a thread when they need it first
        found.append(f"worker {worker}: threads grew from {first['threads']} to {last['threads']}")
    if last["files"] > first["files"]:
        found.append(f"worker {worker}: files grew from {first['files']} to {last['files']}")
    return found


def _at(samples: list[Event], step: int) -> Event:
    return next(sample for sample in samples if sample["step"] >= step)


def main() -> int:
    """Run, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25_000)
    arguments = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="atoll-soak-") as folder:
        samples, found = soak(Path(folder), arguments.rounds)
    print(f"{arguments.rounds} rounds in {time.monotonic() - began:.0f} s\n")
    print("| worker | rounds | resident, kB | threads | open files |\n|---|---|---|---|---|")
    for worker, taken in enumerate(samples):
        rows = [_at(taken, step) for step in (FIRST, arguments.rounds // 2)] + [taken[-1]]
        for row in rows:
            print(f"| {worker} | {row['step']} | {row['rss_kb']} | {row['threads']} | {row['files']} |")
    print("\nproblems:", "; ".join(found) or "none")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
