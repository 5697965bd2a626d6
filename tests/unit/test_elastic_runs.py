"""Whole runs whose workers come and go: killed, stopped, late and cut off, all end with the same model."""

import itertools
import json
import shutil
import signal
import time
from pathlib import Path

import pytest

from atoll.runs.events import End, Eval, Joined, Lost, Members, Step
from atoll.runs.lines import Lines
from elastic_fleet import finish, running, status, when

pytestmark = pytest.mark.processes


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
        lines = run.has(0, Lines)
        assert lines[-1].sent_bytes[0] == 0 < min(lines[-1].sent_bytes[1:] + lines[-1].received_bytes[1:]), lines
        assert all(a.sent_bytes[1] <= b.sent_bytes[1] for a, b in itertools.pairwise(lines)), lines
        jump = steps.index(own.at + 1)  # it restored a checkpoint, and goes on where the run is
        assert steps[:jump] == list(range(1, 11)) and steps[jump:] == list(range(own.at + 1, 61))


def test_one_worker_tells_that_another_is_lost_and_that_it_is_back(tmp_path: Path) -> None:
    told = tmp_path / "told.jsonl"
    command = f"log.alert=sh -c 'cat >> {told}; echo >> {told}'"
    options = ("--set", command, "--set", "log.lost_s=0.5")

    def alerts() -> list[tuple[str, bool, int, int]]:
        lines = told.read_text().splitlines() if told.exists() else []
        return [(a["kind"], a["recovered"], a["about"], a["worker"]) for a in map(json.loads, lines)]

    with running(tmp_path, steps=200) as run:
        workers = [run.start(worker, *options) for worker in range(3)]
        when(lambda: run.step(0) >= 12)
        workers[0].kill()
        when(lambda: len(alerts()) == 1)
        workers[0] = run.start(0, *options)
        when(lambda: len(alerts()) == 2)
        finish(*workers)
    assert alerts() == [("lost", False, 0, 1), ("lost", True, 0, 1)], "by the lowest of those that train"


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
