"""`atoll replay`: a run whose members came and went is trained again in one process, and every anchor is equal."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.runs.events import Joined, Lost
from elastic_fleet import finish, running, when

pytestmark = pytest.mark.processes


def replayed(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code of `atoll replay`, run where the run was made, and its last line."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(cli.app, ["replay", *(options or ("runs/run",))])
    finally:
        os.chdir(before)
    return result.exit_code, result.output.splitlines()[-1] if result.exit_code < 2 else " ".join(result.output.split())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run: worker 2 comes late, worker 1 is killed and comes back, worker 0 is stopped for a while."""
    folder = tmp_path_factory.mktemp("made")
    with running(folder, steps=120, min_workers=2, join_s=3.0, silent_s=2.0) as run:
        stopped, killed = run.start(0), run.start(1)
        when(lambda: run.step(1) >= 12)
        late = run.start(2)
        when(lambda: run.has(2, Joined))
        killed.kill()
        again = run.start(1)
        when(lambda: any(event.worker == 1 for event in run.has(1, Joined)))
        stopped.signal(signal.SIGSTOP)
        try:
            when(lambda: any(event.worker == 0 for event in run.has(2, Lost)))
        finally:
            stopped.signal(signal.SIGCONT)
        finish(stopped, again, late)
        assert any(event.since is not None for event in run.has(0, Joined) if event.worker == 0)
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A copy of the run, to be changed; its texts and tokens stay where they were."""
    shutil.copytree(made / "runs", tmp_path / "runs")
    return tmp_path


def change(run: Path, workers: list[int], edit: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Edit the lines of these workers' records; None leaves one out."""
    for worker in workers:
        path = run / "runs" / "run" / f"worker-{worker}" / "anchors.jsonl"
        lines = [edit(json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines if line is not None))


def rounds(run: Path, worker: int) -> list[dict[str, Any]]:
    path = run / "runs" / "run" / f"worker-{worker}" / "anchors.jsonl"
    return [line for line in map(json.loads, path.read_text().splitlines()) if line["event"] == "anchor"]


def test_a_run_with_a_late_a_killed_and_a_stopped_worker_is_made_again(made: Path) -> None:
    assert replayed(made) == (0, "31 rounds of 3 workers: all anchors are equal, bit by bit")
    assert replayed(made, "runs/run/worker-2", "runs/run/worker-0", "--check-only") == (
        0,
        "31 rounds of 2 workers: the records agree",
    )


def test_a_tampered_anchor_of_one_worker_is_found_without_training(run: Path) -> None:
    def flip(line: dict[str, Any]) -> dict[str, Any]:
        is_it = line["event"] == "anchor" and line["last"] and line["fragment"] == 1
        return {**line, "fingerprint": f"{int(line['fingerprint'], 16) ^ 1:016x}"} if is_it else line

    change(run, [2], flip)
    for options in ((), ("runs/run", "--check-only")):
        code, said = replayed(run, *options)
        assert code == 1 and said.startswith("anchors differ at step 120, fragment 1, the last exchange: worker ")


def test_records_that_were_changed_alike_are_found_by_training(run: Path) -> None:
    step, fragment = next((line["step"], line["fragment"]) for line in rounds(run, 2) if len(line["members"]) > 1)

    def leave_out(line: dict[str, Any]) -> dict[str, Any]:
        is_it = line["event"] == "anchor" and (line["step"], line["fragment"]) == (step, fragment)
        return {**line, "members": line["members"][:-1]} if is_it else line

    change(run, [0, 1, 2], leave_out)
    assert replayed(run, "runs/run", "--check-only")[0] == 0
    code, said = replayed(run)
    assert code == 1 and said.startswith(f"anchors differ at step {step}, fragment {fragment}: recorded anchor ")


def test_a_record_that_is_not_whole_is_refused(run: Path) -> None:
    code, said = replayed(run, "runs/run/worker-1", "runs/run/worker-2")
    assert code == 1 and "worker 0 took part, and no folder tells how it trained" in said
    code, said = replayed(run, "runs/run/worker-1", "runs/run/worker-1")
    assert code == 2 and "worker 1 has been given already" in said
    (run / "runs" / "run" / "worker-1" / "anchors.jsonl").unlink()
    code, said = replayed(run)
    assert code == 1 and "only workers of an elastic run" in said


def test_runs_with_other_settings_or_on_a_gpu_are_refused(run: Path) -> None:
    files = [run / "runs" / "run" / f"worker-{worker}" / "run.toml" for worker in range(3)]
    seed = files[1].read_text()
    files[1].write_text(seed.replace("seed = 5", "seed = 6"))
    code, said = replayed(run)
    assert code == 2 and "differ in seed" in said
    for file in files:
        file.write_text(seed.replace('device = "cpu"', 'device = "cuda"'))
    code, said = replayed(run)
    assert code == 2 and "the run trained on cuda" in said
    assert replayed(run, "runs/run", "--check-only")[0] == 0
