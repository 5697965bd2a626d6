"""The examples in Python run, each in seconds and in under 80 lines."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from atoll import checkpoint
from fleet import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS: dict[str, tuple[str, ...]] = {
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_trainer.py": ("lightning",),
    "plain_loop.py": (),
}
"""Modules that an example imports besides atoll's own; without them its test is skipped."""


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert example.name in NEEDS, "say what it needs, and it is run"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 80


def losses(example: str, folder: Path) -> list[str]:
    """Runs an example in two processes, and returns the losses that both print at their end."""
    for module in NEEDS[example]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(EXAMPLES / example)]
    workers = [
        subprocess.Popen(
            [*command, str(worker), address, "--steps", "30", "--out", str(folder)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for worker in range(2)
    ]
    try:
        told = [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(told)
    ends = [re.findall(r"held-out loss ([0-9.]+)", text) for text in told]
    assert ends[0] == ends[1] and len(ends[0]) == 1, "\n".join(told)
    return ends[0]


@pytest.mark.processes
@pytest.mark.parametrize("example", [name for name in NEEDS if name != "plain_loop.py"])
def test_an_example_trains_one_model_in_two_processes(example: str, tmp_path: Path) -> None:
    assert float(losses(example, tmp_path)[0]) < 5.5, "ln 256 is 5.55"


@pytest.mark.processes
def test_the_plain_loop_continues_from_what_both_have(tmp_path: Path) -> None:
    whole = losses("plain_loop.py", tmp_path)
    assert float(whole[0]) < 5.5, "ln 256 is 5.55"
    folders = [tmp_path / f"worker-{worker}" / "checkpoints" for worker in range(2)]
    assert [checkpoint.steps(folder) for folder in folders] == [(18, 24)] * 2
    shutil.rmtree(folders[1] / "step-000000024")  # as if worker 1 had been killed earlier
    assert losses("plain_loop.py", tmp_path) == whole
