"""docs/machines.md, followed to the letter on two machines: namespaces with a folder and a line of their own each."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from sites import Site, Sites, available

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "machines.md").read_text()
FIXED, _, REST = PAGE.partition("## Members that come and go")
ELASTIC = REST.partition("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    return [line for block in blocks(text, "sh") for line in block.split("\n") if line]


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
    keys, first, second, sample, report, again = commands(FIXED)
    with Sites(count=2, rate="100mbit") as sites:
        folders = [tmp_path / "machine-0", tmp_path / "machine-1"]
        for folder in folders:
            folder.mkdir()
            (folder / "run.toml").write_text(blocks(FIXED, "toml")[0].replace("10.0.0.1", sites[0].address))
        subprocess.run(command(keys), cwd=folders[0], capture_output=True, timeout=60, check=True)
        (folders[1] / "runs/run/keys").mkdir(parents=True)
        shutil.move(folders[0] / "runs/run/keys/worker-1", folders[1] / "runs/run/keys/worker-1")
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


def when(happens: Callable[[], object]) -> None:
    until = time.monotonic() + 200
    while not happens():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_worker_dies_and_comes_back(tmp_path: Path) -> None:
    with Sites(count=2, rate="100mbit") as sites, ExitStack() as ended:
        folders = [tmp_path / "machine-0", tmp_path / "machine-1"]
        outputs: list[Path] = []

        def run(number: int, line: str) -> "subprocess.Popen[bytes]":
            outputs.append(tmp_path / f"output-{len(outputs)}.txt")
            told = command(line.replace("10.0.0.1", sites[0].address))
            with outputs[-1].open("wb") as out:
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                process = sites[number].popen(
                    told, cwd=folders[number], env=environment, stdout=out, stderr=subprocess.STDOUT
                )
            ended.callback(process.wait)
            ended.callback(process.kill)
            return process

        for folder in folders:
            folder.mkdir()
            (folder / "elastic.toml").write_text(blocks(ELASTIC, "toml")[0].replace("10.0.0.1", sites[0].address))
        keys, registry, first, second, again, status, watch, replay = commands(ELASTIC)
        assert run(0, keys).wait(60) == 0
        (folders[1] / "runs/elastic/keys").mkdir(parents=True)
        shutil.move(folders[0] / "runs/elastic/keys/worker-1", folders[1] / "runs/elastic/keys/worker-1")
        run(0, registry)
        survivor, killed = run(0, first), run(1, second)
        places = [folder / "runs" / "elastic" / f"worker-{k}" for k, folder in enumerate(folders)]
        when(lambda: any((places[1] / "checkpoints").glob("step-*[0-9]")))
        page = run(0, watch)
        served = outputs[-1]
        when(lambda: "the page is at http://127.0.0.1:8420/" in served.read_text())
        asked = "from urllib.request import urlopen; assert urlopen('http://127.0.0.1:8420/healthz').read() == b'ok\\n'"
        assert sites[0].popen([sys.executable, "-c", asked]).wait(60) == 0
        page.kill()
        killed.kill()
        back = run(1, again)
        assert [survivor.wait(400), back.wait(60)] == [0, 0], [path.read_text() for path in outputs]
        assert run(0, status).wait(60) == 0
        said, shown = outputs[2].read_text(), outputs[-1].read_text()
        shutil.copytree(places[1], places[0].parent / "worker-1")
        assert run(0, f"{replay} --check-only").wait(100) == 0, outputs[-1].read_text()
        assert outputs[-1].read_text().endswith("rounds of 2 workers: the records agree\n")
    assert "worker 1 is gone: " in said and re.search(r"view \d+ from step \d+: worker 0\n", said), said
    assert "worker 1 has joined at step" in said and "workers 0, 1" in said
    assert "the run is finished" in shown
    models = [place / "model" / "model.safetensors" for place in places]
    assert models[0].read_bytes() == models[1].read_bytes()
