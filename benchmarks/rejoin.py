"""Measures how long a killed worker takes to rejoin, and how much slower the others are meanwhile.

    python benchmarks/rejoin.py [--seats 2 3] [--rate 100mbit] [--width 1180] [--step-s 0.15]

Seats are network namespaces whose lines are limited both ways (benchmarks/sites.py; needs root). Workers train 7
million parameters by Streaming in e3m0 (benchmarks/chaos_worker.py). One is killed; once the others have gone on for a
while, the same seat is started again, as a new interpreter that imports torch. "back" is the time from that start until
it makes its first inner step. A joiner needs the anchor and the velocity, 8 bytes a parameter, so "state" is how long
those bytes take on the line alone.

"others" is by how many percent their inner steps took longer from the start to that first step than they did before it,
over as many seconds. A step lasts --step-s at least, most of which is sleep: two cores stand for all sites, and what
the joiner computes must not be taken for what its traffic costs. It exits with 1 if a median is over 10 s or 3 %.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import chaos_worker
from chaos_fleet import Fleet
from chaos_worker import Task
from sites import Sites, bits_per_second

BYTES_A_PARAMETER = 8
SETTLE_S = 12.0
"""Seconds for the others to go on without the killed worker, and to be measured."""
MOST_BACK_S, MOST_SLOWER = 10.0, 3.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seats", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--width", type=int, default=1180, help="of the model: 1180 makes 7 million parameters")
    parser.add_argument("--step-s", type=float, default=0.15)
    parser.add_argument("--times", type=int, default=3)
    arguments = parser.parse_args()
    missed = 0
    print("seats   parameters   back s   state s   others")
    for seats in arguments.seats:
        task = Task(workers=seats, width=arguments.width, step_s=arguments.step_s, period=32, delay=4)
        parameters = sum(parameter.numel() for parameter in chaos_worker.make_model(task).parameters())
        state_s = 8 * BYTES_A_PARAMETER * parameters / bits_per_second(arguments.rate)
        backs, slower = zip(*rejoins(task, arguments.rate, arguments.times), strict=True)
        print(
            f"{seats:5}   {parameters:10,}   {statistics.median(backs):6.1f}   {state_s:7.1f}"
            f"   {statistics.median(slower):+.1f} %   (back: {', '.join(f'{back:.1f}' for back in backs)})",
            flush=True,
        )
        missed += statistics.median(backs) > MOST_BACK_S or statistics.median(slower) > MOST_SLOWER
    return 1 if missed else 0


def rejoins(task: Task, rate: str, times: int) -> list[tuple[float, float]]:
    """Kill and restart the last worker repeatedly; return seconds to rejoin, and the others' slowdown in percent."""
    with ExitStack() as stack:
        sites = stack.enter_context(Sites(task.workers + 1, rate))
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-rejoin-"))
        fleet = stack.enter_context(Fleet(Path(folder), task, sites))
        for seat in range(task.workers):
            fleet.start(seat)
        fleet.wait_complete()
        victim, found, again = task.workers - 1, [], None
        for _ in range(times):
            if again is None:
                fleet.kill(victim)
            else:
                again.kill()
                again.wait()
            time.sleep(SETTLE_S)
            began = time.monotonic()
            again = start_anew(fleet, victim)
            fleet.wait_for("the worker to come back", lambda: fleet.events(victim, "joined", after_s=began))  # noqa: B023
            back = float(fleet.events(victim, "joined", after_s=began)[0]["t"])
            survivors = range(victim)
            before = statistics.mean(step_s(fleet, seat, began - (back - began), began) for seat in survivors)
            during = statistics.mean(step_s(fleet, seat, began, back) for seat in survivors)
            found.append((back - began, 100 * (during / before - 1)))
            time.sleep(SETTLE_S / 2)  # until it is a member, and has trained
        if again is not None:
            again.kill()
        return found


def start_anew(fleet: Fleet, seat: int) -> subprocess.Popen[bytes]:
    """Start a worker as a new interpreter, in its site."""
    assert fleet.sites is not None
    task = asdict(fleet.task) | {"worker": seat, "listen": f"{fleet.sites[seat].address}:0"}
    command = [sys.executable, chaos_worker.__file__, json.dumps(task)]
    with (fleet.folder / f"worker-{seat}.log").open("ab") as log:
        return fleet.sites[seat].popen(command, stdout=log, stderr=log)


def step_s(fleet: Fleet, seat: int, from_s: float, until_s: float) -> float:
    """Return how long an inner step of a worker took between two moments, by the rounds it applied."""
    applied = [event for event in fleet.events(seat, "applied", after_s=from_s) if event["t"] <= until_s]
    if len({event["step"] for event in applied}) < 2:
        raise RuntimeError(f"worker {seat} has applied too few rounds in {until_s - from_s:.1f} s to tell its speed")
    first, last = applied[0], applied[-1]
    return float(last["t"] - first["t"]) / int(last["step"] - first["step"])


if __name__ == "__main__":
    sys.exit(main())
