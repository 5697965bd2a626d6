"""Whole runs with a process a worker: killed, interrupted and resumed, they end with the bits of one that was not."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from atoll._util import disk
from atoll._util.disk import sha256_of
from atoll.cli import main as cli
from atoll.errors import ConfigError
from atoll.link.net.meeting_client import MeetingClient
from atoll.settings import config
from atoll.train.folder import RunFolder
from atoll.train.run import train as run_train
from fleet import PATIENCE_S, Fleet, Me, Worker

pytestmark = pytest.mark.processes

RUN = """
seed = 5
device = "cpu"
threads = 1
model = {{layers = 2, width = 16, heads = 1, head_width = 16, feedforward = 16, context = 16}}
data = {{source = '{source}', cache = '{cache}'}}
train = {{steps = {steps}, batch = 2, eval_every = 1000, eval_tokens = 32, log_every = 1, save_every = 10, keep = 100}}
sync = {{workers = {workers}, period = 8, delay = 3, fragments = "balanced:2", codec = "int8"}}
link = {{deadline_s = 20.0, join_s = 30.0, silent_s = 20.0}}
"""
STEPS = 40


def write_run(folder: Path, workers: int = 2, steps: int = STEPS) -> Path:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"{number} reef lagoon islet " * 20)
    file = folder / "run.toml"
    file.write_text(RUN.format(source=texts, cache=folder / "tokens", workers=workers, steps=steps))
    return file


def command(me: Me, file: Path, *options: str, pause_s: float = 0.0) -> None:
    """`atoll train --worker`, in this process; it may take a breath after each step, to be caught in time."""
    if pause_s:
        from atoll.train.trainer import Trainer

        step = Trainer.step

        def slower(trainer: Trainer) -> None:
            step(trainer)
            time.sleep(pause_s)

        pytest.MonkeyPatch().setattr(Trainer, "step", slower)
    out = str(file.parent / "runs")
    place = ["--worker", str(me.worker), "--address", me.address, "--keys", me.bundle, "--out", out, "--view", "lines"]
    sys.argv = ["atoll", "train", str(file), *place, *options]
    cli.main()


def train(file: Path, workers: int, *options: str, pause_s: float = 0.0, folder: Path | None = None) -> Fleet:
    fleet = Fleet(folder or file.parent / f"logs-{time.monotonic_ns()}", workers)
    for worker in range(workers):
        fleet.add(worker, _command, file, options, pause_s)
    return fleet


def _command(me: Me, file: Path, options: tuple[str, ...], pause_s: float) -> None:
    command(me, file, *options, pause_s=pause_s)


def status(worker: Worker) -> int:
    """Its exit status, as a shell would see it."""
    kind, _, code = worker.ending().error.partition(": ")
    assert kind in ("SystemExit", "Stopped"), f"{kind}: {code}\n{worker.ending().trace}\n{worker.output}"
    return int(code.replace("None", "0"))


def models(file: Path, workers: int) -> set[str]:
    """The final models of all workers, which should be one."""
    places = [file.parent / "runs" / "run" / f"worker-{worker}" for worker in range(workers)]
    return {sha256_of(place / "model" / "model.safetensors") for place in places}


def checkpoints(file: Path, worker: int) -> list[int]:
    folder = file.parent / "runs" / "run" / f"worker-{worker}" / "checkpoints"
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*[0-9]"))


def when(happens: Callable[[], object]) -> None:
    until = time.monotonic() + PATIENCE_S
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.005)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    """Workers -> the final model of a run in one process."""
    result = {}
    for workers in (2, 4):
        file = write_run(tmp_path_factory.mktemp("undisturbed"), workers)
        with Fleet(file.parent / "logs", 1) as fleet:
            fleet.add(0, _alone, file)
            assert status(fleet[0]) == 0, fleet[0].output
        result[workers] = sha256_of(file.parent / "runs" / "run" / "model" / "model.safetensors")
    return result


def _alone(me: Me, file: Path) -> None:
    sys.argv = ["atoll", "train", str(file), "--out", str(file.parent / "runs"), "--view", "none"]
    cli.main()


@pytest.mark.parametrize("workers", [2, 4])
def test_a_process_a_worker_gives_the_bits_of_one_process(
    workers: int, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    file = write_run(tmp_path, workers)
    with train(file, workers) as fleet:
        assert [status(worker) for worker in fleet.crew] == [0] * workers
    assert models(file, workers) == {undisturbed[workers]}


def resume(file: Path, workers: int, *options: str) -> list[str]:
    """Go on to the end; returns what each said."""
    with train(file, workers, "--resume", *options) as fleet:
        for worker in fleet.crew:
            assert status(worker) == 0, worker.output
        return [worker.output for worker in fleet.crew]


def kill_one(file: Path, workers: int, victim: int, saved: int = 10) -> None:
    """Run until the victim has saved a step, kill it, and see the others end."""
    with train(file, workers, pause_s=0.02) as fleet:
        when(lambda: saved in checkpoints(file, victim))
        fleet[victim].kill()
        for survivor in fleet.others(victim):
            assert status(survivor) == 1
            said = survivor.output.splitlines()[-1]
            assert said.startswith("error: ") and f"worker {victim} closed its connection without a word" in said, said
            assert said.endswith("to go on, start every worker again with the same command and --resume")


@pytest.mark.parametrize(("workers", "victim"), [(2, 0), (4, 3)])
def test_a_run_goes_on_after_kill_9_as_if_nothing_had_been(
    workers: int, victim: int, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    file = write_run(tmp_path, workers)
    kill_one(file, workers, victim)
    resume(file, workers)
    assert models(file, workers) == {undisturbed[workers]}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_run_is_killed_at_any_moment_and_goes_on(seed: int, undisturbed: dict[int, str], tmp_path: Path) -> None:
    chance = random.Random(seed)
    workers = chance.choice([2, 4])
    victim = chance.randrange(workers)
    file = write_run(tmp_path, workers)
    options = ["--set", "link.join_s=8.0"]  # who is killed before it has joined is waited for
    for _ in range(2):
        with train(file, workers, *options, pause_s=0.02) as fleet:
            when(lambda: (file.parent / "runs" / "run" / f"worker-{victim}").exists())
            time.sleep(chance.uniform(0.0, 2.0))
            with suppress(ProcessLookupError):  # it may have come to its end
                fleet[victim].kill()
            assert all(status(survivor) in (0, 1) for survivor in fleet.others(victim))
        options = ["--set", "link.join_s=8.0", "--resume"]
    resume(file, workers)
    assert models(file, workers) == {undisturbed[workers]}


def _falling(me: Me, file: Path, moment: str) -> None:
    """`command`, in which worker 1 is killed at some moment, or finds the store slow to answer when it is to stop."""

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    change, put, say = pytest.MonkeyPatch(), disk._put_in_place, MeetingClient.say
    if me.worker == 1:
        match moment:
            case "before the first save":
                change.setattr(RunFolder, "save", die)
            case "in the save of step 20":
                change.setattr(disk, "_put_in_place", lambda *of: die() if of[1].name == "step-000000020" else put(*of))
            case "a slow store":

                def slow(self: MeetingClient, name: str, value: object, within_s: float) -> None:
                    time.sleep(1.5 if name.startswith("stop/") else 0.0)
                    say(self, name, value, within_s)

                change.setattr(MeetingClient, "say", slow)
    command(me, file, pause_s=0.01 + 0.05 * me.worker if moment == "a slow store" else 0.0)


def fall(file: Path, moment: str) -> Fleet:
    fleet = Fleet(file.parent / "first", 2)
    for worker in range(2):
        fleet.add(worker, _falling, file, moment)
    return fleet


def test_who_is_killed_before_its_first_save_comes_back_to_a_run_that_begins_again(
    undisturbed: dict[int, str], tmp_path: Path
) -> None:
    file = write_run(tmp_path)
    with fall(file, "before the first save") as fleet:
        assert status(fleet[0]) == 1  # at once, not after the minutes that workers have to come
        assert "worker 1 closed its connection without a word" in fleet[0].output
    assert [checkpoints(file, worker) for worker in (0, 1)] == [[0], []]
    resume(file, 2)
    assert models(file, 2) == {undisturbed[2]}


@pytest.mark.slow
def test_one_checkpoint_to_keep_is_enough_for_data_parallel_workers_that_are_killed(tmp_path: Path) -> None:
    file = write_run(tmp_path, steps=24)
    settings = [line for line in file.read_text().splitlines() if not line.startswith("sync")]
    sync = 'sync = {workers = 2, method = "data-parallel"}'
    file.write_text("\n".join([*settings, sync]).replace("keep = 100", "keep = 1"))
    with fall(file, "in the save of step 20") as fleet:
        assert status(fleet[0]) == 1
    assert [checkpoints(file, worker)[-1] for worker in (0, 1)] == [20, 10]
    resume(file, 2)
    assert len(models(file, 2)) == 1


@pytest.mark.slow
def test_ctrl_c_on_all_stops_them_together_where_answers_take_seconds(tmp_path: Path) -> None:
    file = write_run(tmp_path, steps=400)
    with fall(file, "a slow store") as fleet:
        when(lambda: all(10 in checkpoints(file, worker) for worker in range(2)))  # not before all have begun
        for worker in fleet.crew:
            worker.signal(signal.SIGINT)
        assert [status(worker) for worker in fleet.crew] == [130, 130]
    assert checkpoints(file, 0)[-1] == checkpoints(file, 1)[-1]


def test_workers_resume_from_the_newest_step_that_all_have(undisturbed: dict[int, str], tmp_path: Path) -> None:
    file = write_run(tmp_path)
    kill_one(file, 2, 1, saved=20)
    newest = min(checkpoints(file, 0)[-1], checkpoints(file, 1)[-1])
    shutil.rmtree(tmp_path / "runs" / "run" / "worker-1" / "checkpoints" / f"step-{newest:09}")
    kept = checkpoints(file, 1)[-1]
    said = resume(file, 2)
    assert models(file, 2) == {undisturbed[2]}
    assert kept < newest and all(f"{kept}" in text for text in said)


def test_without_a_step_that_all_have_nothing_is_resumed(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    kill_one(file, 2, 1)
    shutil.rmtree(tmp_path / "runs" / "run" / "worker-1" / "checkpoints")
    with train(file, 2, "--resume") as fleet:
        for worker in fleet.crew:
            assert status(worker) == 1
            assert (
                "no checkpoint exists on every worker, so none can be resumed from: worker 0 has step" in worker.output
            )
            assert "worker 1 has none" in worker.output


@pytest.mark.parametrize("workers", [2, 4])
def test_ctrl_c_on_all_saves_the_same_step_everywhere(
    workers: int, undisturbed: dict[int, str], tmp_path: Path
) -> None:
    file = write_run(tmp_path, workers)
    with train(file, workers, pause_s=0.02) as fleet:
        when(lambda: all(10 in checkpoints(file, worker) for worker in range(workers)))  # not before all have begun
        for worker in fleet.crew:
            worker.signal(signal.SIGINT)
        assert [status(worker) for worker in fleet.crew] == [130] * workers
        for worker in fleet.crew:
            assert "and saved; continue with: the same command and --resume, on every worker" in worker.output
            assert "error" not in worker.output and "Traceback" not in worker.output
    assert len({checkpoints(file, worker)[-1] for worker in range(workers)}) == 1
    resume(file, workers)
    assert models(file, workers) == {undisturbed[workers]}


def test_ctrl_c_on_one_saves_there_and_the_others_are_told_that_it_left(
    undisturbed: dict[int, str], tmp_path: Path
) -> None:
    file = write_run(tmp_path)
    with train(file, 2, "--set", "link.deadline_s=6.0", pause_s=0.02) as fleet:  # less than it waits for others to stop
        when(lambda: 10 in checkpoints(file, 1))
        fleet[1].signal(signal.SIGINT)
        assert status(fleet[1]) == 130 and "and saved; continue with" in fleet[1].output
        assert status(fleet[0]) == 1
        assert "worker 1 left: it was interrupted" in fleet[0].output.splitlines()[-1]
    resume(file, 2)
    assert models(file, 2) == {undisturbed[2]}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.lr=0.123", "differ in train.lr: "),
        (
            "train={steps=9,batch=4,lr=0.1,save_every=10}",
            r"differ in train.steps: .*; train.batch: .*; train.lr: .*left out",
        ),
        ("sync.workers=4", "differ in sync.workers: 4 against 3"),
        ("sync.period=9", "differ in sync.period: "),
        ("seed=6", "differ in seed: "),
    ],
)
def test_settings_that_differ_are_refused_on_all_workers_before_anything_is_written(
    change: str, told: str, tmp_path: Path
) -> None:
    file = write_run(tmp_path, 3)
    with Fleet(tmp_path / "logs", 3) as fleet:
        for worker in range(3):
            fleet.add(worker, _command, file, ("--set", change) if worker == 1 else (), 0.0)
        for worker, child in enumerate(fleet.crew):
            assert status(child) in (1, 2)
            assert re.search(told, child.output) and "worker 1" in child.output, child.output
            assert not (tmp_path / "runs" / "run" / f"worker-{worker}" / "run.toml").exists()


def test_a_worker_that_fails_before_the_first_step_is_not_waited_for(tmp_path: Path) -> None:
    file = write_run(tmp_path)
    with Fleet(tmp_path / "logs", 2, join_s=600.0) as fleet:
        fleet.add(0, _command, file, (), 0.0)
        fleet.add(1, _command, file, ("--set", "data.source=/nowhere"), 0.0)
        assert status(fleet[1]) in (1, 2)
        assert status(fleet[0]) == 1
        assert "worker 1 left: " in fleet[0].output and "/nowhere" in fleet[0].output


def test_a_worker_without_keys_is_told_how_to_make_them(tmp_path: Path) -> None:
    run = config.load(write_run(tmp_path), (), {"link.address": "127.0.0.1:1", "out": str(tmp_path / "runs")})
    with pytest.raises(ConfigError, match=r"link\.keys: is left out: make keys with `atoll keys new .* --workers 2`"):
        run_train(run, worker=0)
    with pytest.raises(ConfigError, match=r"link\.keys: there is no folder /nowhere/worker-0"):
        run_train(run.changed(**{"link.keys": "/nowhere/worker-{worker}"}), worker=0)


@pytest.mark.slow
def test_launch_names_the_worker_that_was_killed_and_resumes(undisturbed: dict[int, str], tmp_path: Path) -> None:
    """Through the command itself, with nothing replaced; a longer run, so that it can be caught."""
    file = write_run(tmp_path)
    launch = [sys.executable, "-m", "atoll", "launch", str(file), "--out", str(tmp_path / "runs")]
    first = subprocess.Popen(launch, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    when(lambda: checkpoints(file, 1))
    children = Path(f"/proc/{first.pid}/task/{first.pid}/children").read_text().split()
    victims = [int(pid) for pid in children if b"--worker\x001\x00" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    said, _ = first.communicate(timeout=100)
    if first.returncode:  # it was not done already
        assert first.returncode == 1
        assert "worker 1 failed first (killed by SIGKILL" in said, said
        done = subprocess.run([*launch, "--resume"], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, done.stdout + done.stderr
    assert models(file, 2) == {undisturbed[2]}
