"""A seeded bug, the catalogues of them in this folder, and what one must do to be found."""

import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "atoll"
NOT_CATALOGUES = ("seed", "__main__")


@dataclass(frozen=True)
class Mutant:
    """A bug: `old`, which occurs once in a file below src/atoll, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[str, str, str] | None = None
    """A second edit (file, old, new), for bugs that take two."""
    tests: tuple[str, ...] = ()
    """What must turn red; the catalogue's TESTS unless given."""

    @property
    def edits(self) -> list[tuple[str, str, str]]:
        """Each edit as (file, old, new)."""
        return [(self.file, self.old, self.new), *([self.also] if self.also else [])]

    def problems(self, package: Path = PACKAGE) -> list[str]:
        """Why this bug cannot be seeded into a package; nothing if it can."""
        found = []
        for file, old, _ in self.edits:
            source = (package / file).read_text() if (package / file).is_file() else ""
            if source.count(old) != 1:
                found.append(f"its text occurs {source.count(old)} times in {file}: {old!r}")
        return found

    def seed(self, package: Path) -> None:
        """Put the bug into a copy of the package."""
        for file, old, new in self.edits:
            (package / file).write_text((package / file).read_text().replace(old, new))


@dataclass(frozen=True)
class Verdict:
    """How the tests came out."""

    outcome: str
    """"red", "green", or "error": the tests did not run."""
    why: str
    seconds: float = 0.0


def catalogues() -> Iterator[tuple[str, list[Mutant]]]:
    """Every catalogue in this folder: its name, and its mutants with the tests that must turn red."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in NOT_CATALOGUES:
            catalogue = import_module(f"mutants.{module.name}")
            tests = tuple(catalogue.TESTS)
            yield module.name, [m if m.tests else replace(m, tests=tests) for m in catalogue.MUTANTS]


def run_tests(tests: tuple[str, ...], mutant: Mutant | None, limit_s: float) -> Verdict:
    """Run tests with a bug, or without one, in a process group that is ended with all that it started."""
    if mutant and (problems := mutant.problems()):
        return Verdict("error", "; ".join(problems))
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "atoll"
        shutil.copytree(PACKAGE, package)  # compiled files too: those of a changed file are made anew
        if mutant:
            mutant.seed(package)
        environment = {
            **os.environ,
            "PYTHONPATH": folder,  # also for the processes that tests start
            "OMP_NUM_THREADS": "1",
            "HYPOTHESIS_STORAGE_DIRECTORY": str(Path(folder) / "hypothesis"),
        }
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "--tb=line"]
        command += ["-p", "no:cacheprovider", "-p", "no:xdist", *tests]
        began = time.monotonic()
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True,
        ) as process:  # fmt: skip
            try:
                said, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return Verdict("red", f"hung: ended after {limit_s:.0f} s", time.monotonic() - began)
            finally:
                _end_group(process.pid)
        seconds = time.monotonic() - began
    lines = [line for line in said.splitlines() if line.startswith(("FAILED", "ERROR"))] or said.splitlines() or [""]
    if process.returncode not in (0, 1, 2):
        return Verdict("error", f"pytest ended with {process.returncode}: {lines[-1]}", seconds)
    return Verdict("green" if process.returncode == 0 else "red", lines[-1], seconds)


def _end_group(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
