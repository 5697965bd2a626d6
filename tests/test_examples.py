"""The examples in Python run, each in seconds and in under 80 lines."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fleet import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"hf_trainer.py": ("transformers", "accelerate"), "lightning_trainer.py": ("lightning",)}


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert example.name in NEEDS, "say what it needs, and it is run"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 80


@pytest.mark.processes
@pytest.mark.parametrize("example", NEEDS)
def test_an_example_trains_one_model_in_two_processes(example: str, tmp_path: Path) -> None:
    for module in NEEDS[example]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(EXAMPLES / example)]
    workers = [
        subprocess.Popen(
            [*command, str(worker), address, "--steps", "30", "--out", str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            cwd=tmp_path,
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
    losses = [re.findall(r"held-out loss ([0-9.]+)", text) for text in told]
    assert losses[0] == losses[1] and len(losses[0]) == 1, "\n".join(told)
    assert float(losses[0][0]) < 5.5, "ln 256 is 5.55"
