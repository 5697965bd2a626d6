"""`atoll replay`: runs whose members came and went are trained again in one process, and anchors are equal."""

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.runs.events import Joined, Lost
from test_elastic_runs import finish, running, when

pytestmark = pytest.mark.processes


def replayed(folder: Path, *options: str) -> tuple[int, str]:
    """The exit code and the output of `atoll replay`, run where the run was made."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        result = CliRunner().invoke(cli.app, ["replay", "runs/run", *options], catch_exceptions=False)
    finally:
        os.chdir(before)
    return result.exit_code, " ".join(result.output.split())


def test_a_run_with_a_killed_a_late_and_a_returning_worker_is_made_again(tmp_path: Path) -> None:
    with running(tmp_path) as run:
        first, killed, third = (run.start(worker) for worker in range(3))
        when(lambda: run.step(1) >= 12)
        killed.kill()
        when(lambda: any(event.worker == 1 for event in run.has(0, Lost)))
        again = run.start(1, pause_s=0.0)
        finish(first, again, third)
        assert run.has(1, Joined)
    print(replayed(tmp_path, "--check-only"))
    print(replayed(tmp_path))
    assert 0
