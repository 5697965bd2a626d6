"""docs/machines.md, followed to the letter on two machines: namespaces with a folder and a line of their own each."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from sites import Site, Sites, available

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "machines.md").read_text()
RUN_FILE = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)[0]
COMMANDS = [
    line
    for block in re.findall(r"^```sh\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.split("\n")
    if line
]

pytestmark = pytest.mark.skipif(available() is not None, reason=f"no network namespaces here: {available()}")


def command(line: str) -> list[str]:
    first, *rest = shlex.split(line)
    assert first == "atoll"
    return [sys.executable, "-m", "atoll", *rest]


def start(site: Site, folder: Path, line: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return site.popen(
        command(line), cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.slow
def test_two_machines_from_nothing_to_a_finished_run(tmp_path: Path) -> None:
    first, second, sample, report, again = COMMANDS
    with Sites(count=2, rate="100mbit") as sites:
        folders = [tmp_path / "machine-0", tmp_path / "machine-1"]
        for folder in folders:
            folder.mkdir()
            (folder / "run.toml").write_text(RUN_FILE.replace("10.0.0.1", sites[0].address))
        running = [
            start(site, folder, line) for site, folder, line in zip(sites, folders, (first, second), strict=True)
        ]
        said = [process.communicate(timeout=200)[0] for process in running]
        assert [process.returncode for process in running] == [0, 0], said
    models = [
        folder / "runs" / "run" / f"worker-{k}" / "model" / "model.safetensors" for k, folder in enumerate(folders)
    ]
    assert models[0].read_bytes() == models[1].read_bytes()
    for line, words in ((sample, "def "), (report, "wrote"), (again, "finished already")):
        shown = subprocess.run(command(line), cwd=folders[0], capture_output=True, text=True, timeout=100, check=True)
        assert words in shown.stdout
