"""Kills, stops and restarts workers of an elastic run at every moment, and measures what that costs the others.

    python benchmarks/chaos.py matrix                    # one fault in each run: faults x moments x workers
    python benchmarks/chaos.py matrix --faults kill --moments sending flushing --workers 3
    python benchmarks/chaos.py day --minutes 10 --count 60    # many random faults in one run

Every worker is a process (benchmarks/chaos_worker.py) with its own certificate; the registry is `atoll registry`. A
fault hits one worker (or the registry); a killed worker is started again and joins. What must hold in every run:

- every worker ends with exit code 0 and the same model;
- at every version of every fragment, the anchor has the same bits on all workers that applied it;
- no survivor loses a step: it never joins again and its steps are counted one by one.

"next round" is the time from the fault to the next round that the slowest survivor applies, less the usual time
between two rounds; with a stop, the time after which silence counts is in it (`silent_s`). "back" is the time from the
start of the killed worker's next process to its first inner step, importing torch included.
"""

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from atoll.link.net.run_keys import throw_away
from chaos_worker import Task

HERE = Path(__file__).parent
MOMENTS = ("joining", "between", "sending", "applying", "flushing", "admitting", "finishing")
FAULTS = ("kill", "stop", "registry")
Event = dict[str, Any]


class Fleet:
    """Runs the registry and the workers of one run as processes."""

    def __init__(self, folder: Path, task: Task) -> None:
        self.folder = folder
        self.task = task
        self.keys = folder / "keys"
        throw_away(task.workers).save(self.keys)
        self.registry: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{_free_port()}"
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.start_registry()

    def start_registry(self) -> None:
        """Start the registry, also again after it was killed."""
        command = [sys.executable, "-m", "atoll", "registry", str(self.folder / "registry"), "--listen", self.address]
        command += ["--keys", str(self.keys / "registry")]
        log = (self.folder / "registry.log").open("ab")
        self.registry = subprocess.Popen(command, stdout=log, stderr=log)

    def start(self, worker: int, die_at: str = "") -> None:
        """Start a worker, also again."""
        task = replace(
            self.task,
            worker=worker,
            registry=self.address,
            keys=str(self.keys / f"worker-{worker}"),
            events=str(self.folder / f"worker-{worker}.jsonl"),
            die_at=die_at,
        )
        log = (self.folder / f"worker-{worker}.log").open("ab")
        command = [sys.executable, str(HERE / "chaos_worker.py"), json.dumps(asdict(task))]
        self.workers[worker] = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    def events(self, worker: int) -> list[Event]:
        """Return what a worker has written down."""
        path = self.folder / f"worker-{worker}.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def wait_for(self, what: str, met: Callable[[], bool], within_s: float) -> float:
        """Wait until a condition holds, and return when that was; raise with the workers' output if it never does."""
        until = time.monotonic() + within_s
        while not met():
            if any((process.poll() or 0) > 0 for process in self.workers.values()) or time.monotonic() > until:
                raise TimeoutError(f"{what} did not happen within {within_s:g} s\n{self.output()}")
            time.sleep(0.01)
        return time.monotonic()

    def wait_applied(self, workers: Iterable[int], after_s: float, count: int, within_s: float) -> float:
        """Wait until each of these workers has applied `count` rounds after a time; return when the last had."""

        def times(worker: int) -> list[float]:
            return [event["t"] for event in self.events(worker) if event["kind"] == "applied" and event["t"] > after_s]

        chosen = list(workers)
        self.wait_for(
            f"{count} rounds of workers {chosen}", lambda: all(len(times(w)) >= count for w in chosen), within_s
        )
        return max(times(worker)[count - 1] for worker in chosen)

    def output(self) -> str:
        """Return the last lines of all processes."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}")
        for path in sorted(self.folder.glob("*.jsonl")):
            lines = path.read_text().splitlines()[-5:]
            parts.append(f"--- {path.name}\n" + "\n".join(lines))
        return "\n".join(parts)

    def close(self) -> None:
        """Kill all that is left."""
        for process in (*self.workers.values(), self.registry):
            if process is not None and process.poll() is None:
                process.kill()
                process.wait()


def check(fleet: Fleet, survivors: Sequence[int]) -> list[str]:
    """Return what is wrong with a run that has ended."""
    problems = []
    anchors: dict[tuple[int, int], dict[str, int]] = {}
    models = set()
    for worker in range(fleet.task.workers):
        for event in fleet.events(worker):
            if event["kind"] == "applied":
                key = event["round"][1], event["version"]
                anchors.setdefault(key, {})[event["anchor"]] = worker
            elif event["kind"] == "finished":
                models.add(event["model"])
                if event["steps"] != fleet.task.steps:
                    problems.append(f"worker {worker} ended after {event['steps']} steps")
            elif event["kind"] == "rejoined" and worker in survivors:
                problems.append(f"worker {worker}, a survivor, had to join again")
    for (fragment, version), found in sorted(anchors.items()):
        if len(found) > 1:
            problems.append(f"fragment {fragment} version {version}: workers {sorted(found.values())} differ")
    if len(models) != 1:
        problems.append(f"{len(models)} different final models")
    for worker, process in fleet.workers.items():
        if process.wait(60) != 0:
            problems.append(f"worker {worker} ended with {process.returncode}")
    return problems


def one_fault(task: Task, fault: str, moment: str, victim: int, folder: Path) -> dict[str, Any]:
    """Run once with one fault, and return what was measured."""
    fleet = Fleet(folder, task)
    seats = list(range(task.workers))
    survivors = [seat for seat in seats if seat != victim or fault == "registry"]
    result: dict[str, Any] = {"fault": fault, "moment": moment, "workers": task.workers, "victim": victim}
    try:
        dies = fault == "kill" and moment in ("sending", "applying", "flushing", "finishing")
        count = {"sending": 4, "applying": 4, "flushing": 1, "finishing": 1}.get(moment, 1)
        for seat in seats:
            fleet.start(seat, f"{moment}:{count}" if dies and seat == victim else "")
        if moment != "flushing":
            fleet.wait_applied(survivors, 0.0, 3, 60)
        if dies:
            process = fleet.workers[victim]
            fleet.wait_for(f"death of worker {victim}", lambda: process.poll() is not None, 60)
            at = max(event["t"] for event in fleet.events(victim) if event["kind"] == "dies")
        else:
            at = _inflict(fleet, fault, victim)
        if moment == "finishing":
            pass
        elif moment != "flushing":
            result["next_s"] = round(fleet.wait_applied(survivors, at, 1, 60) - at, 3)
        if fault == "kill":
            if moment in ("joining", "admitting"):
                fleet.start(victim, f"{moment}:1")
                process = fleet.workers[victim]
                fleet.wait_for(f"second death of worker {victim}", lambda: process.poll() is not None, 60)
            if moment != "finishing":
                result["back_s"] = round(_bring_back(fleet, victim), 2)
        for seat in survivors:
            ending = fleet.workers[seat]
            fleet.wait_for(f"end of worker {seat}", lambda: ending.poll() is not None, 120)  # noqa: B023 - used here
        if moment == "finishing" and fault == "kill":
            del fleet.workers[victim]
        result["problems"] = check(fleet, survivors)
    except TimeoutError as fault_:
        result["problems"] = [str(fault_)]
    finally:
        fleet.close()
    return result


def _inflict(fleet: Fleet, fault: str, victim: int) -> float:
    at = time.monotonic()
    if fault == "registry":
        assert fleet.registry is not None
        fleet.registry.kill()
        fleet.registry.wait()
        time.sleep(0.5)
        fleet.start_registry()
    elif fault == "stop":
        process = fleet.workers[victim]
        process.send_signal(signal.SIGSTOP)
        survivors = [seat for seat in fleet.workers if seat != victim]
        fleet.wait_applied(survivors, at + 0.5 * fleet.task.silent_s, 2, 60)
        process.send_signal(signal.SIGCONT)
    else:
        fleet.workers[victim].kill()
        fleet.workers[victim].wait()
    return at


def _bring_back(fleet: Fleet, victim: int) -> float:
    """Start a killed worker again; return the seconds until its first inner step."""
    began = time.monotonic()
    fleet.start(victim)

    def joined() -> list[float]:
        return [e["t"] for e in fleet.events(victim) if e["kind"] == "joined" and e["t"] > began]

    fleet.wait_for(f"return of worker {victim}", lambda: bool(joined()), 60)
    return joined()[0] - began


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def matrix(arguments: argparse.Namespace) -> int:
    """Run every cell, and print a table."""
    bad = 0
    print("| fault | moment | workers | seat | next round, s | back, s | |\n|---|---|---|---|---|---|---|")
    for workers in arguments.workers:
        for fault in arguments.faults:
            for moment in arguments.moments if fault == "kill" else ("between",):
                victim = random.Random(f"{fault} {moment} {workers} {arguments.seed}").randrange(workers)
                task = Task(worker=0, workers=workers, registry="", keys="", events="", **arguments.task)
                with ExitStack() as cleanup:
                    folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="atoll-chaos-")))
                    row = one_fault(task, fault, moment, victim, folder)
                problems = row["problems"]
                bad += bool(problems)
                shown = [fault, moment, workers, victim, row.get("next_s", ""), row.get("back_s", "")]
                print(f"| {' | '.join(map(str, shown))} | {problems or ''} |", flush=True)
    return 1 if bad else 0


def day(arguments: argparse.Namespace) -> int:
    """Run once with many random faults, and print what became of it."""
    task = Task(worker=0, workers=arguments.seats, registry="", keys="", events="", **arguments.task)
    task = replace(task, steps=int(60 * arguments.minutes / task.step_s), min_workers=1)
    chance = random.Random(arguments.seed)
    inflicted: list[str] = []
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="atoll-chaos-")))
        fleet = Fleet(folder, task)
        cleanup.callback(fleet.close)
        for seat in range(task.workers):
            fleet.start(seat)
        fleet.wait_applied(range(task.workers), 0.0, 3, 60)
        pause_s = 60 * arguments.minutes / (arguments.count + 3)
        try:
            while len(inflicted) < arguments.count and not _over(fleet):
                time.sleep(pause_s * chance.uniform(0.2, 1.0))
                inflicted.append(_random_fault(fleet, chance))
            for seat, process in fleet.workers.items():
                fleet.wait_for(f"end of worker {seat}", lambda: process.poll() is not None, 120)  # noqa: B023
            problems = check(fleet, ())
        except TimeoutError as fault:
            problems = [str(fault)]
        events = [event for seat in range(task.workers) for event in fleet.events(seat)]
        samples = [event for event in events if event["kind"] == "sample"]
        print(f"{len(inflicted)} faults: {dict(Counter(inflicted))}, {task.steps} steps of {task.workers} seats")
        for kind in ("joined", "rejoined", "view"):
            print(f"{kind}: {sum(event['kind'] == kind for event in events)}")
        for name in ("rss_kb", "threads", "files"):
            print(f"{name}: first {samples[0][name]}, last {samples[-1][name]}, most {max(e[name] for e in samples)}")
        print("loss:", sorted({event["loss"] for event in events if event["kind"] == "finished"}))
        print("problems:", problems or "none")
    return 1 if problems else 0


def _over(fleet: Fleet) -> bool:
    return any(process.poll() == 0 for process in fleet.workers.values())


def _random_fault(fleet: Fleet, chance: random.Random) -> str:
    fault = chance.choice(["kill", "kill", "stop", "registry"])
    victim = chance.randrange(fleet.task.workers)
    process = fleet.workers[victim]
    if fault == "registry":
        _inflict(fleet, fault, victim)
    elif fault == "stop":
        process.send_signal(signal.SIGSTOP)
        time.sleep(fleet.task.silent_s * chance.uniform(0.2, 3.0))
        process.send_signal(signal.SIGCONT)
    else:
        process.kill()
        process.wait()
        time.sleep(chance.uniform(0.0, 2.0))
        if not _over(fleet):
            fleet.start(victim)
    return fault


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("matrix")
    one.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 5])
    one.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    one.add_argument("--moments", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--task", type=json.loads, default={}, help="settings of chaos_worker.Task, as JSON")
    one.set_defaults(run=matrix)
    many = commands.add_parser("day")
    many.add_argument("--minutes", type=float, default=10.0)
    many.add_argument("--count", type=int, default=60, help="faults")
    many.add_argument("--seats", type=int, default=4)
    many.add_argument("--seed", type=int, default=0)
    many.add_argument("--task", type=json.loads, default={}, help="settings of chaos_worker.Task, as JSON")
    many.set_defaults(run=day)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
