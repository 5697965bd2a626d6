"""The `peer` mode of benchmarks/chaos.py: the same kills for torchft's DiLoCo and for atoll's, side by side.

Three workers train 0.8 million parameters by DiLoCo in fp32 on loopback, with the same period and batches. One is
killed, either between two exchanges or amid one, and started again as a new interpreter a while later. torchft
(0.2.0) is set up as its documentation has it, with a lighthouse of its own, at least two replicas and heartbeats that
may be 5 s late; atoll's `silent_s` is 5 s. Columns:

- next: seconds from the kill until the slowest survivor has applied an exchange;
- lost: inner steps of a survivor that no exchange carried, because one that had begun was given up;
- back: seconds from the start of the new interpreter until it has applied an exchange;
- stall: the longest that a survivor's inner step took meanwhile, in seconds.
"""

import argparse
import importlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.nn.functional import cross_entropy

import chaos_worker
from chaos_fleet import PATIENCE_S, Event, Fleet
from chaos_worker import Log, Strike, Task

TASK = Task(workers=3, method="diloco", codec="fp32", period=20, width=400, step_s=0.1)
HOST, LIGHTHOUSE_PORT = "127.0.0.1", 29510
TIMEOUT = timedelta(seconds=60)
APART_S = 10.0
"""Seconds between the survivors' next exchange and the start of the new interpreter."""


@dataclass(frozen=True)
class Row:
    """Holds what was measured of one kill."""

    next_s: float
    lost_steps: int
    back_s: float
    stall_s: float


def peer(arguments: argparse.Namespace) -> int:
    """Kill a worker of both, between and amid exchanges, and print a table."""
    if importlib.util.find_spec("torchft") is None:
        sys.exit("torchft is not installed: pip install torchft==0.2.0")
    print("| | killed | next, s | lost steps | back, s | stall, s |\n" + 6 * "|---" + "|")
    for name, run in (("atoll", run_atoll), ("torchft", run_torchft)):
        for moment in ("between", "sending"):
            row = run(moment)
            figures = f"{row.next_s:.2f} | {row.lost_steps} | {row.back_s:.1f} | {row.stall_s:.1f}"
            print(f"| {name} | {'amid' if moment == 'sending' else moment} | {figures} |", flush=True)
    return 0


# ---------------------------------------------------------------------- atoll


def run_atoll(moment: str) -> Row:
    """Kill a worker of an elastic run."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="atoll-peer-")))
        fleet = stack.enter_context(Fleet(folder, TASK))
        victim = TASK.workers - 1
        plan = Strike(moment=moment, count=2 if moment == "sending" else TASK.period // 2, signal=signal.SIGKILL)
        for seat in range(TASK.workers):
            fleet.start(seat, plan if seat == victim else None)
        fleet.wait_for("the kill", lambda: fleet.events(victim, "strikes"), [victim])
        at = float(fleet.events(victim, "strikes")[0]["t"])
        next_s = fleet.wait_applied(range(victim), at, 1, [victim]) - at
        time.sleep(APART_S)
        began = time.monotonic()
        task = asdict(fleet.task) | {"worker": victim}
        with (folder / f"worker-{victim}.log").open("ab") as log:
            command = [sys.executable, chaos_worker.__file__, json.dumps(task)]
            again = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
        stack.callback(again.kill)
        back = fleet.wait_applied([victim], began, 1, [victim])
        stall_s = max(longest(fleet.events(seat, "step"), began, back) for seat in range(victim))
        lost = sum(len(fleet.events(seat, "rejoined", "jumped", after_s=at)) for seat in range(victim))
        return Row(next_s, lost * TASK.period, back - began, stall_s)


def longest(steps: list[Event], from_s: float, until_s: float) -> float:
    """Return the longest time between two inner steps in a span."""
    times = [float(event["t"]) for event in steps if from_s - 1.0 <= event["t"] <= until_s]
    return max((after - before for before, after in pairwise(times)), default=0.0)


# ---------------------------------------------------------------------- torchft


def run_torchft(moment: str) -> Row:
    """Kill a replica of torchft's DiLoCo."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchft-peer-")))
        serve = (
            "import time; from torchft.coordination import LighthouseServer as L; "
            f"server = L(bind='127.0.0.1:{LIGHTHOUSE_PORT}', min_replicas={TASK.workers - 1}, join_timeout_ms=5000); "
            "time.sleep(3600)"
        )
        with (folder / "lighthouse.log").open("wb") as log:
            lighthouse = stack.enter_context(subprocess.Popen([sys.executable, "-c", serve], stdout=log, stderr=log))
        stack.callback(lighthouse.kill)
        time.sleep(5.0)  # it imports torch

        def start(seat: int, strike: str) -> None:
            task = {
                "seat": seat,
                "folder": str(folder),
                "lighthouse": f"http://127.0.0.1:{LIGHTHOUSE_PORT}",
                "strike": strike,
            }
            with (folder / f"worker-{seat}.log").open("ab") as log:
                command = [sys.executable, __file__, json.dumps(task)]
                replica = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log))
            stack.callback(replica.kill)

        def events(seat: int, kind: str, after_s: float = 0.0) -> list[Event]:
            path = folder / f"worker-{seat}.jsonl"
            lines = path.read_text().splitlines(keepends=True) if path.exists() else []
            found = [json.loads(line) for line in lines if line.endswith("\n")]
            return [event for event in found if event["kind"] == kind and event["t"] > after_s]

        def wait(what: str, seats: range | list[int], kind: str, after_s: float) -> float:
            until = time.monotonic() + PATIENCE_S
            while not all(events(seat, kind, after_s) for seat in seats):
                if time.monotonic() > until:
                    said = "\n".join(path.read_text(errors="replace")[-2000:] for path in folder.glob("*.log"))
                    raise TimeoutError(f"{what}: not within {PATIENCE_S:g} s\n{said}")
                time.sleep(0.02)
            return max(float(events(seat, kind, after_s)[0]["t"]) for seat in seats)

        victim = TASK.workers - 1
        for seat in range(TASK.workers):
            start(seat, moment if seat == victim else "")
        at = wait("the kill", [victim], "strikes", 0.0)
        next_s = wait("an exchange of the survivors", range(victim), "applied", at) - at
        lost = max(len(events(seat, "given up", at)) for seat in range(victim)) * TASK.period
        time.sleep(APART_S)
        began = time.monotonic()
        start(victim, "")
        back = wait("an exchange of the worker that is back", [victim], "applied", began)
        stall_s = max(longest(events(seat, "step"), began, back) for seat in range(victim))
        return Row(next_s, lost, back - began, stall_s)


class Replica:
    """Trains as one replica of torchft's DiLoCo."""

    def __init__(self, task: dict[str, Any]) -> None:
        torchft: Any = importlib.import_module("torchft")
        self.seat, self.strike = int(task["seat"]), str(task["strike"])
        self.log = Log(Path(task["folder"], f"worker-{self.seat}.jsonl"), self.seat)
        socket.gethostname = lambda: HOST  # its transport of state advertises this
        self.model = chaos_worker.make_model(TASK)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        self.outer = torch.optim.SGD(self.model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        self._store = distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        self.manager = torchft.Manager(
            pg=torchft.ProcessGroupGloo(timeout=TIMEOUT),
            load_state_dict=self._load,
            state_dict=self._state,
            min_replica_size=TASK.workers - 1,
            use_async_quorum=False,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            connect_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            store_addr=HOST,
            store_port=self._store.port,
            lighthouse_addr=task["lighthouse"],
            replica_id=f"seat{self.seat}",
            hostname=HOST,
        )

    def _state(self) -> dict[str, Any]:
        states: dict[str, Any] = {"model": self.model, "inner": self.inner, "outer": self.outer}
        return {name: one.state_dict() for name, one in states.items()}

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.outer.load_state_dict(state["outer"])

    def run(self) -> None:
        """Train until it is killed."""
        table, steps, rounds = chaos_worker.chances(), 0, 0
        exchange = self.manager.allreduce
        if self.strike == "sending":
            self.manager.allreduce = lambda *args, **options: self._die_amid(exchange, rounds, args, options)
        with importlib.import_module("torchft.local_sgd").DiLoCo(
            self.manager, [self.model], self.inner, self.outer, sync_every=TASK.period
        ):
            while True:
                began = time.monotonic()
                before, after = chaos_worker.batch(table, self.seat, steps + 1)
                self.inner.zero_grad()
                cross_entropy(self.model(chaos_worker.pairs(before)), after).backward()
                time.sleep(max(0.0, TASK.step_s - (time.monotonic() - began)))
                committed = self.manager.current_step()
                self.inner.step()
                steps += 1
                self.log.write("step")
                if steps % TASK.period == 0:
                    rounds += 1
                    self.log.write("applied" if self.manager.current_step() > committed else "given up")
                if self.strike == "between" and rounds == 2 and steps % TASK.period == TASK.period // 2:
                    self._die()

    def _die_amid(self, exchange: Any, rounds: int, args: Any, options: Any) -> Any:
        if rounds == 2:
            threading.Timer(0.003, self._die).start()  # as long after as the other waits, too
        return exchange(*args, **options)

    def _die(self) -> None:
        self.log.write("strikes")
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    torch.set_num_threads(1)
    Replica(json.loads(sys.argv[1])).run()
