"""Makes whole runs whose workers come and go: with a registry, keys, and processes that can be killed."""

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from atoll._util.disk import sha256_of
from atoll.cli import main as cli
from atoll.link.net.run_keys import throw_away_folder
from atoll.runs.events import Event, Step, read
from fleet import Fleet, Me, Worker, free_port
from registries import RegistryProcess

Kind = TypeVar("Kind")

RUN = """
seed = 5
device = "cpu"
threads = 1
model = {{layers = 2, width = 16, heads = 1, head_width = 16, feedforward = 16, context = 16}}
data = {{source = '{folder}/texts', cache = '{folder}/tokens'}}
train = {{steps = {steps}, batch = 2, eval_every = 10, eval_tokens = 32, log_every = 1, save_every = 10}}
sync = {{workers = {workers}, period = 8, delay = 3, fragments = "balanced:2", codec = "int8"}}

[link]
elastic = true
registry = "{registry}"
keys = "{keys}/worker-{{worker}}"
listen = "127.0.0.1:0"
join_s = {join_s}
silent_s = {silent_s}
min_workers = {min_workers}
"""
PATIENCE_S = 200.0
STEP_S = 0.04
"""That every inner step of a slow worker takes at least, so that it can be caught in time."""


@dataclass
class Run:
    """A run with a registry and keys, and its processes."""

    folder: Path
    fleet: Fleet
    workers: int
    registry: RegistryProcess
    keys: Path

    def start(self, worker: int, *options: str, pause_s: float = STEP_S) -> Worker:
        """Start a worker, also one that has been started before."""
        return self.fleet.add(worker, _train, self.folder / "run.toml", options, pause_s)

    def start_ranks(self, worker: int, ranks: int, *options: str, pause_s: float = STEP_S) -> list[Worker]:
        """Start all ranks of a worker, as torchrun does."""
        port = free_port()
        file = self.folder / "run.toml"
        return [
            self.fleet.add(worker, _train_rank, file, options, pause_s, (rank, ranks, port)) for rank in range(ranks)
        ]

    def place(self, worker: int) -> Path:
        return self.folder / "runs" / "run" / f"worker-{worker}"

    def events(self, worker: int) -> list[Event]:
        path = self.place(worker) / "metrics.jsonl"
        return read(path) if path.exists() else []

    def has(self, worker: int, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events(worker) if isinstance(event, kind)]

    def step(self, worker: int) -> int:
        return max((event.step for event in self.has(worker, Step)), default=0)

    def models(self) -> set[str]:
        """The final models of all workers, which should be one."""
        return {sha256_of(self.place(worker) / "model" / "model.safetensors") for worker in range(self.workers)}


@contextmanager
def running(
    folder: Path,
    workers: int = 3,
    steps: int = 60,
    *,
    min_workers: int = 1,
    join_s: float = 60.0,
    silent_s: float = 20.0,
) -> Iterator[Run]:
    (folder / "texts").mkdir()
    for number in range(8):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} reef lagoon islet " * 20)
    with ExitStack() as opened:
        keys = opened.enter_context(throw_away_folder(workers))
        registry = opened.enter_context(RegistryProcess(folder / "registry", keys / "registry"))
        settings = {"workers": workers, "steps": steps, "min_workers": min_workers, "join_s": join_s}
        text = RUN.format(folder=folder, registry=registry.address, keys=keys, silent_s=silent_s, **settings)
        (folder / "run.toml").write_text(text)
        yield Run(folder, opened.enter_context(Fleet(folder / "logs", workers)), workers, registry, keys)


def _train(me: Me, file: Path, options: tuple[str, ...], pause_s: float) -> None:
    """`atoll train --worker`, in this process."""
    from atoll.train.trainer import Trainer

    step = Trainer.step

    def slower(trainer: Trainer) -> None:
        step(trainer)
        time.sleep(pause_s)

    pytest.MonkeyPatch().setattr(Trainer, "step", slower)
    faulthandler.register(signal.SIGUSR1)
    os.chdir(file.parent)
    sys.argv = ["atoll", "train", str(file), "--worker", str(me.worker), "--view", "lines", *options]
    cli.main()


def _train_rank(me: Me, file: Path, options: tuple[str, ...], pause_s: float, place: tuple[int, int, int]) -> None:
    """One rank of a worker, in this process."""
    rank, ranks, port = place
    os.environ |= {"TORCHELASTIC_RUN_ID": "ranks", "RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    _train(me, file, options, pause_s)


def status(worker: Worker) -> int:
    """Its exit status, as a shell would see it."""
    kind, _, code = worker.ending().error.partition(": ")
    assert kind in ("SystemExit", "Stopped"), f"{kind}: {code}\n{worker.ending().trace}\n{worker.output}"
    return int(code.replace("None", "0"))


def when(happens: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.01)


def finish(*workers: Worker) -> None:
    try:
        when(lambda: all(worker.process.exitcode is not None for worker in workers))
    except AssertionError:
        for worker in workers:
            if worker.process.exitcode is None:
                worker.signal(signal.SIGUSR1)
        time.sleep(1.0)
        raise AssertionError("they do not end:\n" + "\n\n".join(worker.output for worker in workers)) from None
    assert [status(worker) for worker in workers] == [0] * len(workers), "\n\n".join(w.output for w in workers)
