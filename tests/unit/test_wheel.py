"""The wheel works alone: installed into an empty environment with what it declares, and used in an empty folder."""

import email
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from resolve import PYTHONS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "atoll"
OPTIONAL = (
    "atoll.evaluation.",
    "atoll.integrations.",
    "atoll.kernels.",
    "atoll.watch.connections",
    "atoll.watch.guard",
    "atoll.watch.server",
)
"""Modules that may need what only an extra brings, or Triton."""


def run(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command without this process's Python settings; its output."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture
def wheel(built: Path) -> Path:
    (wheel,) = built.glob("atoll-*-py3-none-any.whl")
    return wheel


@pytest.fixture
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (path,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(path))


def needed(metadata: Message, *, by_extras: bool) -> set[str]:
    """Names of the packages that the wheel asks for by itself, or in its extras."""
    requirements = [Requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    return {canonicalize_name(one.name) for one in requirements if ("extra ==" in str(one.marker)) == by_extras}


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Path, wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        there = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert there == {path.relative_to(SOURCE.parent).as_posix() for path in files}
    assert {"atoll/cli/demo.toml", "atoll/watch/page/app.js", "atoll/py.typed", "atoll/studies/drops.toml"} < there
    (source,) = built.glob("atoll-*.tar.gz")
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"docs/loop.md", "CHANGELOG.md", "tests/unit/test_wheel.py", "examples/sites/slurm.sbatch"} < inside


def test_the_description_has_no_link_that_leads_nowhere(metadata: Message) -> None:
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown" and "docs/loop.md" in text
    targets: list[str] = re.findall(r"\]\(([^)]*)\)", text)
    assert all(target.startswith("https://") for target in targets)


def test_the_pythons_of_the_metadata_are_those_that_the_set_up_resolves_for(metadata: Message) -> None:
    named = re.findall(r"Python :: (3\.\d+)", " ".join(metadata.get_all("Classifier", [])))
    assert tuple(named) == PYTHONS and metadata["Requires-Python"] == f">={PYTHONS[0]}"


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Iterator[Path]:
    """The programs of an empty environment into which pip has installed the wheel, with what it asks for."""
    run(sys.executable, "-m", "venv", tmp_path / "environment", cwd=tmp_path)
    programs = tmp_path / "environment" / "bin"
    pip: tuple[str | Path, ...] = (programs / "python", "-m", "pip", "--disable-pip-version-check")
    run(*pip, "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel, cwd=tmp_path)
    run(*pip, "check", cwd=tmp_path)
    yield programs
    shutil.rmtree(tmp_path / "environment")  # a gigabyte


@pytest.mark.timeout(1800)  # torch for GPUs is gigabytes
def test_it_is_installed_with_what_it_declares_and_works(installed: Path, metadata: Message, tmp_path: Path) -> None:
    where = tmp_path / "empty"
    where.mkdir()

    def atoll(*arguments: str) -> str:
        return run(installed / "atoll", *arguments, cwd=where, HOME=str(tmp_path))

    brings_nothing_of_an_extra(installed, metadata, where)
    imports_alone(installed, where)
    trains(atoll, where)
    compares(atoll, where)


def brings_nothing_of_an_extra(installed: Path, metadata: Message, where: Path) -> None:
    extras = (
        needed(metadata, by_extras=True) - needed(metadata, by_extras=False) - {"triton"}
    )  # torch brings it for GPUs
    assert {"transformers", "accelerate", "lightning", "datasets", "pyarrow", "tensorboard", "wandb"} <= extras
    listed = json.loads(run(installed / "python", "-m", "pip", "list", "--format=json", cwd=where).splitlines()[-1])
    names = {canonicalize_name(one["name"]) for one in listed}
    assert "torch" in names and not names & extras


def imports_alone(installed: Path, where: Path) -> None:
    paths = (path.relative_to(SOURCE.parent).with_suffix("") for path in SOURCE.rglob("*.py"))
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    alone = [name for name in modules if not name.startswith(OPTIONAL) and name != "atoll.__main__"]
    assert len(alone) > 150
    program = f"import importlib\nfor name in {sorted(alone)!r}: importlib.import_module(name)"
    run(installed / "python", "-W", "error", "-c", program, cwd=where)


def trains(atoll: Callable[..., str], where: Path) -> None:
    atoll("init")
    atoll("train", "run.toml", "--set", "train.steps=20", "--set", "train.eval_tokens=1024")
    atoll("report", "runs/run")
    assert 'id="frozen">{"title":"Run run"' in (where / "runs" / "run" / "report.html").read_text(encoding="utf-8")
    assert len(atoll("sample", "runs/run", "--tokens", "20")) > 5


def compares(atoll: Callable[..., str], where: Path) -> None:
    assert "atoll compare drops " in atoll("compare")
    told = atoll("compare", "drops", "--steps", "20", "--set", "train.eval_tokens=1024")
    assert "What do lost messages cost?" in told and "Losing half" in told
    assert (where / "runs" / "drops" / "report.html").is_file()
