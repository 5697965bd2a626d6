"""Whole elastic runs of workers of several ranks: killed, stopped and cut off, and all end with the same model."""

import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from atoll import checkpoint
from atoll._util.disk import sha256_of
from atoll.errors import ConfigError
from atoll.runs.events import End, Eval, Joined, Lost, Members, Step, read
from atoll.runs.layout import ANCHORS
from atoll.train.replay.run import replay
from bitwise import bits
from elastic_fleet import STEP_S, Run, finish, running, status, when
from fleet import Worker, free_port

pytestmark = pytest.mark.processes

RANKS = 2
KINDS = ("ddp", "fsdp")
SYNCS = {
    "streaming": 'period = 8, delay = 3, fragments = "balanced:2", codec = "int8"',
    "eager": 'method = "eager", period = 8, codec = "e3m0"',
    "diloco": 'method = "diloco", period = 8, codec = "fp32"',
    "feedback": 'period = 8, delay = 3, fragments = "balanced:2", codec = "e3m0", feedback = true',
}


def case(kind: str, sync: str) -> Any:
    return pytest.param(kind, sync, id=f"{kind}-{sync}")


@contextmanager
def ranks_running(folder: Path, kind: str, sync: str, workers: int = 2, **options: Any) -> Iterator[Run]:
    """A run of workers of 2 ranks, which hold the model as `kind` says."""
    with running(folder, workers=workers, **options) as run:
        file = folder / "run.toml"
        text, found = re.subn(r"sync = {.*}", f"sync = {{workers = {workers}, {SYNCS[sync]}}}", file.read_text())
        text, also = re.subn(r"train = {", f'train = {{parallel = "{kind}", ', text)
        assert found == also == 1
        file.write_text(text.replace("feedforward = 16", "feedforward = 17"))  # so that shards differ in size
        yield run


def start(run: Run, worker: int, *options: str, pause_s: float = STEP_S) -> list[Worker]:
    return run.start_ranks(worker, RANKS, *options, pause_s=pause_s)


def check_anchors(run: Run) -> None:
    """All workers had the same anchors after every round, in every rank."""
    found = replay([run.folder / "runs" / "run"], check_only=True)
    assert found.difference is None and found.rounds > 6
    for rank in range(RANKS):
        folders = [run.place(worker) / (f"rank-{rank}" if rank else "") for worker in range(run.workers)]
        states = [checkpoint.load(place / "checkpoints")[1]["trainer"]["outer"][0]["fragments"] for place in folders]
        first, *others = (bits([fragment["anchor"] for fragment in state]) for state in states)
        assert others == [first] * len(others)


@pytest.mark.parametrize(
    ("kind", "sync"), [case(kind, sync) for kind in KINDS for sync in ("streaming", "eager", "diloco")]
)
def test_a_killed_rank_ends_its_worker_which_comes_back(tmp_path: Path, kind: str, sync: str) -> None:
    with ranks_running(tmp_path, kind, sync) as run:
        first, killed = start(run, 0), start(run, 1)
        when(lambda: run.step(1) >= 12)
        killed[1].kill()
        assert status(killed[0]) == 1 and "lost another rank of its worker" in killed[0].output
        when(lambda: run.has(0, Lost))
        lost_at = run.step(0)
        when(lambda: run.step(0) >= lost_at + 9)  # more than a period: nobody waits
        again = start(run, 1)
        finish(*first, *again)
        assert len(run.models()) == 1
        joined, views = run.has(1, Joined)[-1], run.has(0, Members)
        assert joined.worker == 1 and joined.at >= lost_at + 9
        assert [view.members for view in views[:2]] == [[0, 1], [0]] and views[-1].members == [0, 1], views
        check_anchors(run)
        assert not (run.place(1) / "rank-1" / ANCHORS).exists()
        with pytest.raises(ConfigError, match=r"had 2 ranks, .* --check-only compares"):
            replay([run.folder / "runs" / "run"])


def test_a_worker_killed_amid_its_first_save_comes_back(tmp_path: Path) -> None:
    with ranks_running(tmp_path, "ddp", "diloco") as run:
        first, killed = start(run, 0), start(run, 1)
        when(lambda: run.step(1) >= 12)
        for rank in killed:
            rank.kill()
        shutil.rmtree(run.place(1) / "rank-1" / "checkpoints")  # of step 10: the other rank has one
        finish(*first, *start(run, 1))
        assert len(run.models()) == 1
        check_anchors(run)


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    with ranks_running(tmp_path, "fsdp", "diloco") as run:
        first, (other,) = start(run, 0), run.start_ranks(1, 1)
        assert [status(rank) for rank in (*first, other)] == [1, 1, 1]
        assert "ranks that exchange: 1 against 2" in other.output or "ranks that exchange: 2 against 1" in other.output


def test_a_worker_that_is_stopped_leaves_in_order_and_comes_back(tmp_path: Path) -> None:
    with ranks_running(tmp_path, "ddp", "streaming", steps=100) as run:
        stopped, second = start(run, 0), start(run, 1)
        when(lambda: run.step(0) >= 12)
        stopped[1].signal(signal.SIGTERM)  # one is enough
        assert [status(rank) for rank in stopped] == [130, 130]
        assert "the same command comes back" in stopped[0].output and not stopped[1].output
        when(lambda: run.has(1, Lost))
        assert "was stopped" in run.has(1, Lost)[0].why
        again = start(run, 0)
        finish(*again, *second)
        assert len(run.models()) == 1
        assert run.has(1, Eval)  # while it was the lowest


def test_a_signal_ends_a_pause_on_all_ranks(tmp_path: Path) -> None:
    with ranks_running(tmp_path, "ddp", "streaming", min_workers=2) as run:
        first, second = start(run, 0), start(run, 1)
        when(lambda: run.step(0) >= 12)
        for rank in second:
            rank.kill()
        when(lambda: "paused until others come back" in first[0].output)
        at = -1
        while at != (at := run.step(0)):  # it waits for the next round
            time.sleep(1.0)
        for rank in first:
            rank.signal(signal.SIGTERM)
        assert [status(rank) for rank in first] == [130, 130]
        assert first[0].output.count("stopped while it waited for other workers") == 1 and not first[1].output


@pytest.mark.parametrize(("kind", "sync"), [case(kind, sync) for kind in KINDS for sync in ("streaming", "eager")])
def test_one_that_was_cut_off_joins_again_with_all_its_ranks(tmp_path: Path, kind: str, sync: str) -> None:
    with ranks_running(tmp_path, kind, sync, silent_s=2.0, steps=60) as run:
        first, cut = (start(run, worker) for worker in range(2))
        when(lambda: run.step(1) >= 12)
        cut[0].signal(signal.SIGSTOP)  # the one that speaks; the other waits for it
        try:
            when(lambda: any(event.worker == 1 for event in run.has(0, Lost)))
        finally:
            cut[0].signal(signal.SIGCONT)
        finish(*first, *cut)
        assert len(run.models()) == 1
        check_anchors(run)
        joined = [event for event in run.has(1, Joined) if event.worker == 1]
        assert joined and joined[0].since is not None and joined[0].since >= 12
        assert run.has(1, End)[0].step == 60


@pytest.mark.parametrize(("kind", "sync"), [case(kind, sync) for kind in KINDS for sync in ("streaming", "eager")])
def test_undisturbed_it_is_the_run_with_fixed_members(tmp_path: Path, kind: str, sync: str) -> None:
    check_undisturbed(tmp_path, kind, sync)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sync"), [case(kind, "feedback") for kind in KINDS])
def test_four_workers_in_two_shots_too(tmp_path: Path, kind: str, sync: str) -> None:
    check_undisturbed(tmp_path, kind, sync, workers=4)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "sync"), [case(kind, "feedback") for kind in KINDS])
def test_one_of_four_is_killed_and_comes_back(tmp_path: Path, kind: str, sync: str) -> None:
    with ranks_running(tmp_path, kind, sync, workers=4, steps=120) as run:
        fleet = [start(run, worker) for worker in range(4)]
        when(lambda: run.step(1) >= 20)
        for rank in fleet[1]:
            rank.kill()
        when(lambda: run.has(0, Lost))
        lost_at = run.step(0)
        when(lambda: run.step(0) >= lost_at + 9)
        finish(*fleet[0], *fleet[2], *fleet[3], *start(run, 1))
        assert len(run.models()) == 1
        check_anchors(run)


def check_undisturbed(folder: Path, kind: str, sync: str, workers: int = 2) -> None:
    with ranks_running(folder, kind, sync, workers=workers, steps=30) as run:
        finish(*(rank for worker in range(workers) for rank in start(run, worker, pause_s=0.0)))
        (elastic,) = run.models()
        text = (folder / "run.toml").read_text().partition("[link]")[0]
        keys = f"{folder}/logs/keys/worker-{{worker}}"
        link = f'[link]\naddress = "127.0.0.1:{free_port()}"\nkeys = "{keys}"\njoin_s = 60.0\nsilent_s = 20.0\n'
        (folder / "run.toml").write_text(text + link)
        finish(*(rank for worker in range(workers) for rank in start(run, worker, "--name", "fixed", pause_s=0.0)))
        places = [folder / "runs" / "fixed" / f"worker-{worker}" for worker in range(workers)]
        assert {sha256_of(place / "model" / "model.safetensors") for place in places} == {elastic}
        losses = [
            [event.loss for event in read(place / "metrics.jsonl") if isinstance(event, Step)] for place in places
        ]
        assert [[event.loss for event in run.has(worker, Step)] for worker in range(workers)] == losses
