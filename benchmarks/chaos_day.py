"""The `day` mode of benchmarks/chaos.py: many random faults in one run, and the same tokens again without any."""

import argparse
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from chaos_fleet import Event, Fleet, problems
from chaos_worker import SAMPLE_STEPS, Task
from sites import Sites, available

SETTINGS: dict[str, Any] = {"width": 128, "step_s": 0.04, "silent_s": 3.0}
MOST_DIFFERENCE = 0.01
"""Part of the undisturbed run's held-out loss by which the other's may differ."""
MOST_MORE = {"rss_kb": 20_000, "threads": 8, "files": 30}
"""What a process may use more at its end than at its first sample: connections to all others, and their buffers."""


def day(arguments: argparse.Namespace) -> int:
    """Run with many random faults and without, and print what became of both."""
    if arguments.rate != "none" and (missing := available()):
        sys.exit(f"no lines can be made here: {missing}; use --rate none")
    task = Task(workers=arguments.seats, **{**SETTINGS, **arguments.task})
    with ExitStack() as stack:
        rate = None if arguments.rate == "none" else arguments.rate
        sites = stack.enter_context(Sites(task.workers + 1, rate)) if rate else None
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-day-")))
        fleet = stack.enter_context(Fleet(folder, task, sites))
        inflicted = _Day(fleet, random.Random(arguments.seed)).run(60 * arguments.minutes, arguments.count)
        found = problems(fleet, ())
        steps = sum(_trained(fleet, seat) for seat in range(task.workers))
        found += _print_run(fleet, inflicted, steps)
        loss = fleet.events(0, "finished")[-1]["loss"] if not found else float("nan")
    if not found:
        found += _compare(task, steps, loss)
    print("problems:", "; ".join(found) or "none")
    return 1 if found else 0


class _Day:
    """Inflicts faults on a run, one after the other."""

    def __init__(self, fleet: Fleet, chance: random.Random) -> None:
        self._fleet, self._chance = fleet, chance

    def run(self, seconds: float, count: int) -> Counter[str]:
        """Inflict at least `count` faults, for at least some seconds, and let the run end."""
        fleet, seats = self._fleet, range(self._fleet.task.workers)
        for seat in seats:
            fleet.start(seat)
        fleet.wait_complete()
        inflicted: Counter[str] = Counter()
        began = time.monotonic()
        while (total := inflicted.total()) < count or time.monotonic() < began + seconds:
            due_s = began + seconds * (total + self._chance.uniform(0.0, 0.9)) / count
            time.sleep(max(0.0, due_s - time.monotonic()))
            victim = self._chance.choice(seats)
            # One that joins must find another that knows the whole run, whatever happens to a third.
            fleet.wait_for("two that train", lambda: len(self._training({victim})) >= 2)  # noqa: B023 - waits here
            fault = self._chance.choice(["kill", "kill", "stop", "registry", *(["cut"] if fleet.sites else [])])
            self._inflict(fault, victim)
            inflicted[fault] += 1
        fleet.wait_for("all that train", lambda: len(self._training(set())) == len(seats))
        fleet.end_after(100)
        fleet.wait_ended(seats)
        return inflicted

    def _training(self, but: set[int]) -> list[int]:
        """Return the workers that have applied a round just now, and have been back for longer."""
        now_s, found = time.monotonic(), []
        for seat in {*range(self._fleet.task.workers)} - but:
            back = self._fleet.events(seat, "starts", "joined", "rejoined")
            recent = self._fleet.events(seat, "applied", after_s=now_s - 1.0)
            if back and back[-1]["kind"] != "starts" and back[-1]["t"] < now_s - 1.0 and recent:
                found.append(seat)
        return found

    def _inflict(self, fault: str, victim: int) -> None:
        fleet = self._fleet
        away_s = fleet.task.silent_s * self._chance.uniform(0.2, 2.0)
        if fault == "registry":
            assert fleet.registry is not None
            fleet.registry.kill()
            fleet.registry.wait()
            time.sleep(self._chance.uniform(0.0, 2.0))
            fleet.start_registry()
        elif fault == "kill":
            fleet.kill(victim)
            time.sleep(self._chance.uniform(0.0, 2.0))
            fleet.start(victim)
        else:
            fleet.cut_off.append((victim, time.monotonic()))
            if fault == "stop":
                fleet.signal(victim, signal.SIGSTOP)
                time.sleep(away_s)
                fleet.signal(victim, signal.SIGCONT)
            else:
                assert fleet.sites is not None
                fleet.sites[victim].cut()
                time.sleep(away_s)
                fleet.sites[victim].mend()


def _lives(fleet: Fleet, seat: int) -> Iterator[list[Event]]:
    """Yield the events of each process of a seat."""
    life: list[Event] = []
    for event in fleet.events(seat):
        if event["kind"] == "starts" and life:
            yield life
            life = []
        life.append(event)
    yield life


def _trained(fleet: Fleet, seat: int) -> int:
    """Return the inner steps that a seat has made, as far as it has written down."""
    steps = 0
    for life in _lives(fleet, seat):
        at: int | None = None
        for event in life:
            if event["kind"] in ("joined", "rejoined"):
                at = event["steps"]
            elif event["kind"] == "applied" and at is not None and event["step"] > at:
                steps, at = steps + event["step"] - at, event["step"]
    return steps


def _print_run(fleet: Fleet, inflicted: Counter[str], steps: int) -> list[str]:
    seats = range(fleet.task.workers)
    events = [event for seat in seats for event in fleet.events(seat)]
    kinds = Counter(event["kind"] for event in events)
    print(
        f"{inflicted.total()} faults: {dict(inflicted)}; {steps} inner steps of {len(seats)} seats until {fleet.last}"
    )
    print(
        f"{kinds['joined']} joins, {kinds['rejoined']} of workers that were cut off; {kinds['applied']} rounds applied"
    )
    lives = [[e for e in life if e["kind"] == "sample"] for seat in seats for life in _lives(fleet, seat)]
    lives = [samples for samples in lives if len(samples) > 1]
    found = []
    for name, most in MOST_MORE.items():
        more = [(samples[-1][name] - samples[0][name], samples) for samples in lives]
        worst, samples = max(more, key=lambda one: one[0])
        span = f"{samples[0][name]} to {samples[-1][name]} in {len(samples) * SAMPLE_STEPS} steps"
        print(f"{name}: of {len(lives)} processes, the one that grew most went from {span}")
        if worst > most:
            found.append(f"{name} grew by {worst}")
    return found


def _compare(task: Task, steps: int, loss: float) -> list[str]:
    """Train as many steps without faults, on loopback and without pauses, and compare the losses."""
    task = replace(task, step_s=0.0, silent_s=60.0)
    with tempfile.TemporaryDirectory(prefix="atoll-day-") as folder, Fleet(Path(folder), task) as fleet:
        fleet.end_at(max(1, steps // task.workers))
        for seat in range(task.workers):
            fleet.start(seat)
        fleet.wait_ended(range(task.workers), within_s=60 + 0.1 * steps)
        undisturbed = float(fleet.events(0, "finished")[-1]["loss"])
        found = problems(fleet, range(task.workers))
    difference = loss / undisturbed - 1
    print(f"held-out loss: {loss:.4f}; undisturbed, after as many tokens: {undisturbed:.4f}; {100 * difference:+.2f} %")
    if abs(difference) > MOST_DIFFERENCE:
        found.append(f"the loss differs by {100 * difference:.2f} %")
    return found
