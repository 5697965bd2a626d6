"""The registry and the workers of a run of benchmarks/chaos.py as processes, and what must hold of what they write.

Workers are forked from a process that has imported torch, so one starts in milliseconds. With sites, each worker and
the registry are in network namespaces of their own, whose lines can be limited and cut.
"""

import ctypes
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import chaos_worker
from atoll.link.net.run_keys import throw_away
from chaos_worker import Strike, Task
from sites import Sites

PATIENCE_S = 120.0
"""For anything that must happen; only a run that fails takes as long."""
TOO_LATE = ("comes too late", "the others have gone on without")
"""What a worker says that was away while the others finished."""
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["atoll.train.run", "atoll.outer.loop", "pytest", "torch._dynamo"])
Event = dict[str, Any]


class Fleet:
    """Runs the registry and the workers of one run.

    Args:
        folder: For keys, events, logs, checkpoints and the registry's journal.
        task: What every worker does.
        sites: One for each worker and one for the registry; without, all are on loopback.
    """

    def __init__(self, folder: Path, task: Task, sites: Sites | None = None) -> None:
        self.folder, self.sites = folder, sites
        throw_away(task.workers).save(folder / "keys")
        host = "127.0.0.1" if sites is None else sites[task.workers].address
        self.task = replace(task, folder=str(folder), registry=f"{host}:{_free_port()}")
        self.registry: subprocess.Popen[bytes] | None = None
        self.workers: dict[int, BaseProcess] = {}
        self.last: int | None = None
        self.cut_off: list[tuple[int, float]] = []
        """Workers that were stopped or cut off, and when."""
        self._known: dict[int, tuple[int, list[Event]]] = {}  # worker -> bytes read, events

    def __enter__(self) -> Self:
        try:
            self.start_registry()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start_registry(self) -> None:
        """Start the registry, also again after it was killed, and wait until it listens."""
        command = [sys.executable, "-m", "atoll", "registry", str(self.folder / "registry")]
        command += ["--listen", self.task.registry, "--keys", str(self.folder / "keys" / "registry")]
        path = self.folder / "registry.log"
        said = path.read_text().count("listens on") if path.exists() else 0
        with path.open("ab") as log:
            if self.sites is None:
                self.registry = subprocess.Popen(command, stdout=log, stderr=log)
            else:
                self.registry = self.sites[self.task.workers].popen(command, stdout=log, stderr=log)
        self.wait_for("the registry", lambda: path.read_text().count("listens on") > said)

    def start(self, worker: int, strike: Strike | None = None) -> None:
        """Start a worker, also again."""
        namespace = None if self.sites is None else self.sites[worker].namespace
        listen = "127.0.0.1:0" if self.sites is None else f"{self.sites[worker].address}:0"
        task = replace(self.task, worker=worker, strike=strike, listen=listen)
        log = str(self.folder / f"worker-{worker}.log")
        process = _processes.Process(target=live, args=(task, log, namespace), daemon=True)
        process.start()
        self.workers[worker] = process

    def kill(self, worker: int) -> None:
        """Kill a worker with SIGKILL."""
        self.workers[worker].kill()
        self.workers[worker].join()

    def signal(self, worker: int, number: int) -> None:
        """Send a signal to a worker, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid(worker), number)

    def pid(self, worker: int) -> int:
        """Return the number of a worker's process."""
        pid = self.workers[worker].pid
        assert pid is not None
        return pid

    def ended(self, worker: int) -> bool:
        """Return whether a worker has ended."""
        return self.workers[worker].exitcode is not None

    def end_after(self, steps: int) -> None:
        """Let all workers finish once they are some steps further than the furthest now is."""
        newest = max(event["step"] for worker in self.workers for event in self.events(worker, "applied"))
        self.end_at(newest + steps)

    def end_at(self, step: int) -> None:
        """Let all workers finish after a step."""
        self.last = step
        part = self.folder / "last.part"
        part.write_text(str(self.last))
        part.rename(self.folder / "last")

    # ------------------------------------------------------------------ what the workers write down

    def events(self, worker: int, *kinds: str, after_s: float = 0.0) -> list[Event]:
        """Return what a worker has written down, of these kinds or of all."""
        read, known = self._known.setdefault(worker, (0, []))
        path = self.folder / f"worker-{worker}.jsonl"
        if path.exists() and path.stat().st_size > read:
            with path.open("rb") as file:
                file.seek(read)
                new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            known += [json.loads(line) for line in whole.splitlines()]
            self._known[worker] = read + len(whole), known
        return [event for event in known if event["t"] > after_s and (not kinds or event["kind"] in kinds)]

    def wait_for(
        self, what: str, met: Callable[[], object], away: Collection[int] = (), within_s: float = PATIENCE_S
    ) -> None:
        """Wait until a condition holds.

        Args:
            what: Named in the error.
            met: The condition.
            away: Workers that may fail meanwhile.
            within_s: Seconds to wait at most.

        Raises:
            TimeoutError: It does not, or a worker fails; the text has the output of all processes.
        """
        until = time.monotonic() + within_s
        while not met():
            failed = [w for w, process in self.workers.items() if (process.exitcode or 0) > 0 and w not in away]
            if failed or time.monotonic() > until:
                why = f"workers {failed} failed" if failed else f"not within {within_s:g} s"
                raise TimeoutError(f"{what}: {why}\n{self.output()}")
            time.sleep(0.01)

    def wait_applied(self, workers: Iterable[int], after_s: float, count: int, away: Collection[int] = ()) -> float:
        """Wait until each of these workers has applied `count` rounds after a time; return when the last had."""
        chosen = list(workers)

        def applied(worker: int) -> list[Event]:
            return self.events(worker, "applied", after_s=after_s)

        what = f"{count} rounds of workers {chosen}"
        self.wait_for(what, lambda: all(len(applied(worker)) >= count for worker in chosen), away)
        return max(float(applied(worker)[count - 1]["t"]) for worker in chosen)

    def complete_s(self, worker: int) -> float:
        """Return when a worker first applied a round that counted all; infinity before that."""
        rounds = self.events(worker, "applied")
        return next((e["t"] for e in rounds if len(e["members"]) == self.task.workers), float("inf"))

    def wait_complete(self) -> None:
        """Wait until all workers train together: on a busy machine, one may miss the first view and join later."""
        self.wait_for("all to train", lambda: all(self.complete_s(w) < float("inf") for w in self.workers))
        self.wait_applied(self.workers, max(map(self.complete_s, self.workers)), 2)

    def wait_ended(self, workers: Iterable[int], away: Collection[int] = (), within_s: float = PATIENCE_S) -> None:
        """Wait until these workers have ended."""
        chosen = list(workers)
        what = f"the end of workers {chosen}"
        self.wait_for(what, lambda: all(self.ended(worker) for worker in chosen), away, within_s)

    def output(self) -> str:
        """Return the last lines of all processes."""
        parts = []
        for path in sorted(self.folder.glob("*.log")):
            parts.append(f"--- {path.name}\n{path.read_text(errors='replace')[-2000:]}")
        for path in sorted(self.folder.glob("*.jsonl")):
            parts.append(f"--- {path.name}\n" + "\n".join(path.read_text().splitlines()[-5:]))
        return "\n".join(parts)

    def close(self) -> None:
        """Kill all that is left."""
        for process in self.workers.values():
            process.kill()
            process.join()
        if self.registry is not None:
            self.registry.kill()
            self.registry.wait()


# ---------------------------------------------------------------------- what must hold


def problems(fleet: Fleet, survivors: Collection[int], late: Collection[int] = ()) -> list[str]:
    """Return what is wrong with a run that has ended.

    Args:
        fleet: The run.
        survivors: Workers that were never lost: none of their steps may be.
        late: Workers that may come too late for the end.
    """
    found = [*_differences(fleet)]
    for worker in survivors:
        found += _lost_steps(fleet, worker, survivors)
    models = set()
    for worker, process in fleet.workers.items():
        finished = fleet.events(worker, "finished") if process.exitcode == 0 else []
        models |= {event["model"] for event in finished}
        found += [
            f"worker {worker} ended after {event['steps']} steps of {fleet.last}"
            for event in finished
            if event["steps"] != fleet.last
        ]
        told = (fleet.folder / f"worker-{worker}.log").read_text(errors="replace")
        too_late = worker in late and process.exitcode == 1 and any(line in told for line in TOO_LATE)
        killed = worker in late and process.exitcode == -signal.SIGKILL
        if process.exitcode != 0 and not (too_late or killed):
            found.append(f"worker {worker} ended with {process.exitcode}: {told[-1000:]}")
    if len(models) != 1:
        found.append(f"{len(models)} different final models")
    return found


def _differences(fleet: Fleet) -> Iterable[str]:
    """Yield every version of a fragment at which anchors differ.

    A worker that is cut off may still apply rounds whose payloads it has, and the others complete these without it.
    That is why it takes over their state when it comes back; until then, its anchors do not count.
    """
    anchors: dict[tuple[int, int], dict[str, int]] = {}
    for worker in range(fleet.task.workers):
        alone = [(from_s, _back_s(fleet, worker, from_s)) for cut, from_s in fleet.cut_off if cut == worker]
        for event in fleet.events(worker, "applied"):
            if not any(from_s <= event["t"] <= until_s for from_s, until_s in alone):
                anchors.setdefault((event["round"][1], event["version"]), {})[event["anchor"]] = worker
    for (fragment, version), found in sorted(anchors.items()):
        if len(found) > 1:
            yield f"fragment {fragment} version {version}: workers {sorted(found.values())} differ"


def _back_s(fleet: Fleet, worker: int, from_s: float) -> float:
    """Return when a worker that was cut off at a time had taken over the others' state."""
    back = fleet.events(worker, "rejoined", "joined", after_s=from_s)
    return float(back[0]["t"]) if back else float("inf")


def _lost_steps(fleet: Fleet, worker: int, survivors: Collection[int]) -> Iterable[str]:
    """Yield what a survivor has lost since all trained: a step, or the place of a survivor's payload in a round."""
    since_s = fleet.complete_s(worker)
    if since_s == float("inf"):
        yield f"worker {worker} has never trained with all others"
    for event in fleet.events(worker, "rejoined", "jumped", after_s=since_s):
        yield f"worker {worker}, a survivor, went from step {event['before']} to {event['steps']}"
    for event in fleet.events(worker, "applied", after_s=since_s):
        if missing := sorted({*survivors} - {*event["members"]}):
            yield f"round {event['round']} of worker {worker} does not count {missing}, survivors"


# ---------------------------------------------------------------------- processes


def live(task: Task, log: str, namespace: str | None) -> None:
    """Be a worker; runs in a process of its own."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if namespace is not None:
        with open(f"/run/netns/{namespace}") as place:  # Python has os.setns only since 3.12
            if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NETWORK):
                raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    chaos_worker.main(task)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
