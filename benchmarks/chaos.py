"""Kills, stops, cuts off and restarts workers of an elastic run at every moment, and measures what the others lose.

    python benchmarks/chaos.py matrix                    # one fault in each run, at a random seat
    python benchmarks/chaos.py matrix --fault kill cut --moment sending flushing --workers 2 5 --seat all
    python benchmarks/chaos.py day --minutes 10 --count 60    # many random faults in one run
    python benchmarks/chaos.py peer                           # two kills, beside torchft under the same ones

Every worker is a process (benchmarks/chaos_worker.py) with its own certificate; the registry is `atoll registry`. A
fault hits one worker, its line or the registry; a killed worker is started again. What must hold in every run:

- all workers end, with exit code 0 and the same model; only one that was away at the end may come too late;
- at every version of every fragment, the anchor has the same bits on all workers that applied it (while a worker is
  cut off it is none of them: it takes over the others' state when it comes back);
- no step of a survivor is lost: it never joins again, and every round counts all survivors;
- survivors apply their next round at most 2 s after a kill, and `silent_s` + 2 s after a stop or a cut. While the
  registry is away, nobody comes or goes: after its kill they have 2 s from its return if the moment needs a new view.

"next round" is the time from the fault until the slowest survivor has applied a round ("finishing": has finished).
"back" is the time from the worker's start, or from the end of the stop or cut, until it has applied its first round.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chaos_day import day
from chaos_fleet import Fleet, problems
from chaos_peer import peer
from chaos_worker import Strike, Task
from sites import Sites, available

FAULTS = ("kill", "stop", "cut", "registry")
MOMENTS = ("joining", "between", "sending", "applying", "flushing", "admitting", "giving", "saving", "finishing")
COUNTS = {"between": 6, "sending": 4, "applying": 4, "flushing": 2, "saving": 7}
"""At which occurrence of a moment to strike: in the midst of a run, of a flush, of the second checkpoint."""
REGISTRY_AWAY_S = 0.5
MOST_S = 2.0
"""Seconds within which survivors go on, from when they can know of the fault."""


@dataclass(frozen=True)
class Cell:
    """Is one case of the matrix."""

    fault: str
    moment: str
    workers: int
    seat: int


@dataclass
class Outcome:
    """Holds what was measured in a cell."""

    next_s: float | None = None
    allowed_s: float = 0.0
    back_s: float | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def lateness(self) -> list[str]:
        """What the survivors' next round was late by: a matter of the machine, too."""
        if self.next_s is None or self.next_s <= self.allowed_s:
            return []
        return [f"{self.next_s:.2f} s, allowed are {self.allowed_s:.2f}"]


class Case:
    """Runs one cell.

    Args:
        cell: The case.
        fleet: Not started yet, but for its registry.
    """

    def __init__(self, cell: Cell, fleet: Fleet) -> None:
        self.cell, self.fleet = cell, fleet
        self.seats = list(range(cell.workers))
        # With two workers, only one that joins is in a flush that the other survives.
        self.is_joiner = cell.moment in ("joining", "admitting") or (cell.moment == "flushing" and cell.workers == 2)
        helps = cell.moment in ("flushing", "giving") and not self.is_joiner
        self.helper = (cell.seat + 1) % cell.workers if helps else None
        struck = cell.seat if self.is_joiner or cell.fault != "registry" else None
        self.survivors = [seat for seat in self.seats if seat not in (struck, self.helper)]
        self.away = [seat for seat in (cell.seat, self.helper) if seat is not None and seat not in self.survivors]
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """Run the cell, and return what was measured."""
        at = self._strike()
        self._suffer(at)
        if self.cell.moment != "finishing":
            self._recover()
            self.fleet.end_after(40)
        self.fleet.wait_ended(self.survivors, self.away)
        if self.cell.moment == "finishing" and self.cell.fault in ("stop", "cut"):
            self._release()
        self.fleet.wait_ended(self.seats, self.away)
        late = (self.cell.seat,) if self.cell.moment == "finishing" and self.cell.fault != "registry" else ()
        self.outcome.problems = problems(self.fleet, self.survivors, late)
        return self.outcome

    def _strike(self) -> float:
        """Bring the run to the moment; return when the strike fell."""
        fleet, seat = self.fleet, self.cell.seat
        for other in self.seats:
            fleet.start(other, self._plan() if other == seat and not self.is_joiner else None)
        if self.cell.moment not in ("between", "sending", "applying"):
            fleet.wait_complete()
        if self.is_joiner:
            fleet.kill(seat)
            fleet.start(seat, self._plan())
        elif self.helper is not None:
            fleet.kill(self.helper)
            fleet.start(self.helper)
        elif self.cell.moment == "finishing":
            fleet.end_after(20)
        fleet.wait_for(f"{self.cell.moment} of worker {seat}", lambda: fleet.events(seat, "strikes"), self.away)
        at = float(fleet.events(seat, "strikes")[0]["t"])
        if self.cell.fault in ("stop", "cut"):
            fleet.cut_off.append((seat, at))
        return at

    def _plan(self) -> Strike:
        cell, fleet = self.cell, self.fleet
        plan = Strike(moment=cell.moment, count=COUNTS.get(cell.moment, 1), while_joining=self.is_joiner)
        if cell.fault == "cut":
            assert fleet.sites is not None
            return replace(plan, command=fleet.sites[cell.seat].cutting)
        if cell.fault == "registry":
            assert fleet.registry is not None
            return replace(plan, signal=signal.SIGKILL, pid=fleet.registry.pid)
        return replace(plan, signal=signal.SIGKILL if cell.fault == "kill" else signal.SIGSTOP)

    def _suffer(self, at: float) -> None:
        """Wait until the survivors go on."""
        fleet, outcome, fault = self.fleet, self.outcome, self.cell.fault
        outcome.allowed_s = MOST_S + (fleet.task.silent_s if fault in ("stop", "cut") else 0.0)
        if fault == "registry":
            assert fleet.registry is not None
            fleet.registry.wait()
            time.sleep(REGISTRY_AWAY_S)
            fleet.start_registry()
            outcome.allowed_s += time.monotonic() - at if self.away else 0.0
        if self.cell.moment == "finishing":
            fleet.wait_for("the end", lambda: all(fleet.events(s, "finished") for s in self.survivors), self.away)
            done = max(fleet.events(survivor, "finished")[0]["t"] for survivor in self.survivors)
        else:
            done = fleet.wait_applied(self.survivors, at, 1, self.away)
        outcome.next_s = round(done - at, 3)

    def _recover(self) -> None:
        """Bring the struck worker back, and wait until all train."""
        fleet, seat = self.fleet, self.cell.seat
        if self.cell.fault in ("stop", "cut"):
            fleet.wait_applied(self.survivors, fleet.cut_off[0][1] + fleet.task.silent_s, 2, self.away)
        began = time.monotonic()
        if self.cell.fault == "kill":
            fleet.wait_for(f"death of worker {seat}", lambda: fleet.ended(seat), self.away)
            fleet.start(seat)
        elif self.cell.fault in ("stop", "cut"):
            self._release()
        self.outcome.back_s = round(fleet.wait_applied([seat], began, 1) - began, 2)
        fleet.wait_applied(self.seats, time.monotonic(), 4)

    def _release(self) -> None:
        if self.cell.fault == "stop":
            self.fleet.signal(self.cell.seat, signal.SIGCONT)
        else:
            assert self.fleet.sites is not None
            self.fleet.sites[self.cell.seat].mend()


def run_cell(cell: Cell, settings: dict[str, Any]) -> Outcome:
    """Run one cell in a folder, and in sites, of its own."""
    task = Task(workers=cell.workers, save_every=10 if cell.moment == "saving" else 0, **settings)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-chaos-")))
        sites = stack.enter_context(Sites(cell.workers + 1)) if cell.fault == "cut" else None
        case = Case(cell, stack.enter_context(Fleet(folder, task, sites)))
        try:
            return case.run()
        except TimeoutError as fault:
            case.outcome.problems.append(str(fault))
            return case.outcome


def cells(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Yield the cells that were asked for."""
    for workers in arguments.workers:
        for fault in arguments.fault:
            for moment in arguments.moment:
                if moment == "giving" and workers == 2:
                    continue  # a joiner whose only donor dies has nobody to join
                chance = random.Random(f"{fault} {moment} {workers} {arguments.seed}").randrange(workers)
                chosen = {"all": range(workers), "random": [chance]}
                for seat in chosen.get(arguments.seat) or [min(int(arguments.seat), workers - 1)]:
                    yield Cell(fault, moment, workers, seat)


def matrix(arguments: argparse.Namespace) -> int:
    """Run every cell, and print a table of them and one of the worst."""
    if "cut" in arguments.fault and (missing := available()):
        sys.exit(f"no line can be cut here: {missing}; choose other faults with --fault")
    worst: dict[str, tuple[float, float, str]] = {}
    bad, count = 0, Counter[str]()
    print("| fault | moment | workers | seat | next round, s | allowed, s | back, s | |\n" + 8 * "|---" + "|")
    for cell in cells(arguments):
        outcome = run_cell(cell, arguments.task)
        found = outcome.problems + outcome.lateness
        bad += bool(found)
        count[cell.fault] += 1
        where = [cell.fault, cell.moment, cell.workers, cell.seat]
        figures = [outcome.next_s, round(outcome.allowed_s, 2), outcome.back_s]
        shown = ["" if value is None else value for value in (*where, *figures)]
        print(f"| {' | '.join(map(str, shown))} | {'; '.join(found)} |", flush=True)
        if outcome.next_s is not None:
            place = f"{cell.moment}, {cell.workers} workers, seat {cell.seat}"
            row = outcome.next_s, outcome.allowed_s, place
            worst[cell.fault] = max(worst.get(cell.fault, row), row)
    print("\n| fault | cells | worst next round, s | allowed, s | where |\n|---|---|---|---|---|")
    for fault, (next_s, allowed_s, text) in worst.items():
        print(f"| {fault} | {count[fault]} | {next_s} | {allowed_s:.2f} | {text} |")
    print(f"\n{bad} of {count.total()} cells have problems")
    return 1 if bad else 0


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("matrix")
    one.add_argument("--workers", type=int, nargs="+", default=[2, 3, 4, 5])
    one.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    one.add_argument("--moment", nargs="+", choices=MOMENTS, default=list(MOMENTS))
    one.add_argument("--seat", default="random", help="a number, all or random")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--task", type=json.loads, default={}, help="settings of chaos_worker.Task, as JSON")
    one.set_defaults(run=matrix)
    many = commands.add_parser("day")
    many.add_argument("--minutes", type=float, default=10.0)
    many.add_argument("--count", type=int, default=60, help="faults")
    many.add_argument("--seats", type=int, default=4)
    many.add_argument("--rate", default="100mbit", help="of each worker's line; none for loopback without cuts")
    many.add_argument("--seed", type=int, default=0)
    many.add_argument("--task", type=json.loads, default={}, help="settings of chaos_worker.Task, as JSON")
    many.set_defaults(run=day)
    other = commands.add_parser("peer")
    other.set_defaults(run=peer)
    arguments = parser.parse_args()
    return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
