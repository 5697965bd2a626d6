"""Whole runs whose workers come and go: killed, stopped, late and cut off, all end with the same model."""

import faulthandler
import os
import shutil
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
from atoll.runs.events import End, Eval, Event, Joined, Lost, Members, Step, read
from fleet import Fleet, Me, Worker
from registries import RegistryProcess

Kind = TypeVar("Kind")
pytestmark = pytest.mark.processes

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
PATIENCE_S = 60.0
STEP_S = 0.04
"""That every inner step of a slow worker takes at least, so that it can be caught in time."""


@dataclass
class Run:
    """A run with a registry and keys, and its processes."""

    folder: Path
    fleet: Fleet
    workers: int
    registry: RegistryProcess

    def start(self, worker: int, *options: str, pause_s: float = STEP_S) -> Worker:
        """Start a worker, also one that has been started before."""
        return self.fleet.add(worker, _train, self.folder / "run.toml", options, pause_s)

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
        yield Run(folder, opened.enter_context(Fleet(folder / "logs", workers)), workers, registry)


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


def test_a_killed_worker_is_not_waited_for_and_comes_back(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        first, killed, third = (run.start(worker) for worker in range(3))
        when(lambda: run.step(1) >= 12)
        killed.kill()
        when(lambda: run.has(0, Lost))
        lost_at = run.step(0)
        when(lambda: run.step(0) >= lost_at + 12)  # more than a period: nobody waits
        again = run.start(1)
        finish(first, again, third)
        assert len(run.models()) == 1
        told = run.has(0, Lost)
        assert {lost.worker for lost in told} == {1} and all(lost.why for lost in told), told
        views = run.has(0, Members)
        assert [view.members for view in views[:2]] == [[0, 1, 2], [0, 2]] and views[-1].members == [0, 1, 2], views
        assert [1] in [view.following for view in views], views
        assert [view.view for view in views] == sorted({view.view for view in views})
        joined, own = run.has(0, Joined)[-1], run.has(1, Joined)[-1]
        assert joined.worker == own.worker == 1 and joined.at == own.at > lost_at + 12
        steps = [event.step for event in run.has(1, Step)]
        jump = steps.index(own.at + 1)  # it restored a checkpoint, and goes on where the run is
        assert steps[:jump] == list(range(1, 11)) and steps[jump:] == list(range(own.at + 1, 61))


def test_a_worker_that_is_stopped_leaves_in_order_and_the_lowest_of_the_others_evaluates(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        stopped, second, third = (run.start(worker) for worker in range(3))
        when(lambda: run.step(0) >= 12)
        stopped.signal(signal.SIGINT)
        assert status(stopped) == 130 and "the same command comes back" in stopped.output
        finish(second, third)
        (lost,) = run.has(1, Lost)
        assert "was stopped" in lost.why
        left = run.step(0)
        assert [event.step for event in run.has(0, Eval)] == list(range(10, left + 1, 10))
        assert [event.step for event in run.has(1, Eval)] == [*range(left // 10 * 10 + 10, 60, 10), 60]
        assert not run.has(2, Eval)
        late = run.start(0)
        assert status(late) == 1
        assert "worker 0 comes too late: the others have finished the run" in late.output
        assert late.output.count("error:") == 1
        again = run.start(1)
        assert status(again) == 0 and "is finished already" in again.output


def test_the_others_say_who_was_late_and_all_end_with_the_same_model(tmp_path: Path) -> None:
    with running(tmp_path, steps=30) as run:
        grace = ("--set", "link.grace=0.2", "--set", "link.connections=2")
        first, slow, third = (run.start(worker, *grace, pause_s=0.4 if worker == 1 else 0.0) for worker in range(3))
        finish(first, slow, third)
        assert len(run.models()) == 1
        late = [view.late for view in run.has(0, Members) if 1 in view.late]
        assert late and [one[1] for one in late] == sorted(one[1] for one in late)
        assert f"worker 1 is late, rounds without it so far: {late[-1][1]}" in first.output


def test_a_worker_joins_late(tmp_path: Path) -> None:
    with running(tmp_path, min_workers=2, join_s=3.0) as run:
        first, second = run.start(0), run.start(1)
        when(lambda: run.step(0) >= 10)
        late = run.start(2, pause_s=0.0)
        finish(first, second, late)
        assert len(run.models()) == 1
        (joined,) = run.has(2, Joined)
        assert joined.at >= 10 and joined.since is None
        steps = [event.step for event in run.has(2, Step)]
        assert steps == list(range(joined.at + 1, 61))


def test_one_that_was_cut_off_joins_again(tmp_path: Path) -> None:
    with running(tmp_path, silent_s=2.0, steps=100) as run:
        workers = [run.start(worker) for worker in range(3)]
        when(lambda: run.step(2) >= 12)
        workers[2].signal(signal.SIGSTOP)
        try:
            when(lambda: any(event.worker == 2 for event in run.has(0, Lost)))
        finally:
            workers[2].signal(signal.SIGCONT)
        finish(*workers)
        assert len(run.models()) == 1
        joined = [event for event in run.has(2, Joined) if event.worker == 2]
        assert joined and joined[0].since is not None and joined[0].since >= 12
        (end,) = run.has(2, End)
        assert end.step == 100


@pytest.mark.parametrize("new", [(), (1, 2)], ids=["all have saved", "two have lost their folders"])
def test_all_are_killed_and_start_again(tmp_path: Path, new: tuple[int, ...]) -> None:
    with running(tmp_path) as run:
        workers = [run.start(worker) for worker in range(3)]
        when(lambda: min(map(run.step, range(3))) >= 22)
        for worker in workers:
            worker.signal(signal.SIGKILL)
        for worker in workers:
            worker.process.join()
        for number in new:
            shutil.rmtree(run.place(number))
        finish(*(run.start(worker) for worker in range(3)))
        assert len(run.models()) == 1
        for number in range(3):
            steps = [event.step for event in run.has(number, Step)]
            assert steps == sorted(set(steps)) and steps[-1] == 60
            assert steps[0] > 20 if number in new else steps[:10] == list(range(1, 11))


def test_one_with_other_settings_is_refused_and_the_others_go_on(tmp_path: Path) -> None:
    with running(tmp_path, min_workers=2, join_s=3.0) as run:
        first, second = run.start(0), run.start(1)
        when(lambda: run.step(0) >= 5)
        wrong = run.start(2, "--set", "sync.period=9")
        assert status(wrong) == 1 and "sync.period: 9 against 8" in wrong.output
        finish(first, second)


def test_too_few_pause_and_say_so_and_a_signal_ends_the_pause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path, workers=2, min_workers=2) as run:
        first, second = run.start(0), run.start(1)
        when(lambda: run.step(0) >= 12)
        second.kill()
        when(lambda: "paused until others come back: 1 worker, and link.min_workers is 2" in first.output)
        time.sleep(0.5)
        paused_at = run.step(0)
        time.sleep(0.5)
        assert run.step(0) == paused_at
        first.signal(signal.SIGTERM)
        assert status(first) == 130 and "stopped while it waited for other workers" in first.output


def test_training_goes_on_while_the_registry_is_gone(tmp_path: Path) -> None:
    with running(tmp_path, workers=2, steps=200) as run:
        first, second = run.start(0), run.start(1)
        when(lambda: run.step(0) >= 5)
        run.registry.kill()
        before = run.step(0)
        when(lambda: run.step(0) >= before + 40)  # several periods
        second.kill()
        time.sleep(1.0)
        waiting = run.step(0)
        assert not run.has(0, Lost)  # it cannot know that the others have not gone on without it
        run.registry.start()
        when(lambda: run.has(0, Lost) and run.step(0) > waiting)
        again = run.start(1, pause_s=0.0)
        finish(first, again)
        assert len(run.models()) == 1
