"""Seed known bugs, one at a time, into copies of the library or of benchmarks/: each must turn a test red.

    python tests/mutants [name of a mutant or of a catalogue ...]
    python tests/mutants controls      # only that all those tests are green without a bug

Errors are: a mutant that survives, one whose text is no longer in the source, tests that are red without any bug.
Every run of tests is a fork of this process, which has imported what takes long: there are hundreds.
"""

import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import NoReturn

sys.path[0] = str(Path(__file__).resolve().parent.parent)
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["ATOLL_TESTS"] = "thorough"

import pytest  # noqa: E402
import torch.distributed.tensor  # noqa: E402, F401 - for the forks

from mutants.seed import BENCHMARKS, PACKAGE, ROOT, Mutant, catalogues  # noqa: E402 - once the folder above is on the path

Tests = tuple[str, ...]
CONTROL_S = 1200.0
BESIDE = (BENCHMARKS, "docs", "tests", "README.md", "pyproject.toml")
"""Paths that are also copied for bugs in benchmarks/, because tests look for them next to themselves."""
OPTIONS = ["-x", "-q", "-m", "not slow", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
OPTIONS += ["--hypothesis-profile", "any example"]


@dataclass(slots=True)
class Verdict:
    """How tests came out."""

    outcome: str
    """Red, green, or error: they did not run."""
    why: str
    seconds: float = 0.0


@dataclass(slots=True)
class Run:
    """Tests with a bug, or without one."""

    tests: Tests
    mutant: Mutant | None = None
    control: "Run | None" = None
    """The same without the bug, or more: it comes first, and says how long it may take."""
    is_in_package: bool = True
    """Whether the bug is in the package; otherwise benchmarks/ and the tests are copied as well."""
    verdict: Verdict | None = None
    pid: int = 0
    folder: Path = field(default_factory=Path)
    began_s: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        return self.mutant.name if self.mutant else f"(no bug) {' '.join(Path(test).name for test in self.tests)}"[:70]

    @property
    def is_bad(self) -> bool:
        """Whether it came out as it should not."""
        return self.verdict is None or self.verdict.outcome != ("red" if self.mutant else "green")

    def start(self) -> None:
        """Begin it, unless there is nothing to learn."""
        if self.mutant and (problems := self.mutant.problems()):
            self.verdict = Verdict("error", "; ".join(problems))
        elif self.control and self.control.is_bad:
            self.verdict = Verdict("error", "its tests are not green without it")
        else:
            self.folder = Path(tempfile.mkdtemp(prefix="mutant-"))
            for part in (PACKAGE, *(() if self.is_in_package else BESIDE)):
                _copy(ROOT / part, self.folder / part)
            if self.mutant:
                self.mutant.seed(self.folder)
            self.began_s = time.monotonic()
            self.pid = os.fork()
            if self.pid == 0:
                _run_tests(self.folder, ROOT if self.is_in_package else self.folder, self.tests)

    def look(self) -> None:
        """Find out whether it is over, or has taken too long."""
        limit_s = 60 + 4 * self.control.verdict.seconds if self.control and self.control.verdict else CONTROL_S
        seconds = time.monotonic() - self.began_s
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if not pid and seconds < limit_s:
            return
        with suppress(ProcessLookupError):  # with all that it has started
            os.killpg(self.pid, signal.SIGKILL)
        if not pid:
            os.waitpid(self.pid, 0)
            self.verdict = Verdict("red", f"hung: ended after {seconds:.0f} s", seconds)
        else:
            self.verdict = self._judged(os.waitstatus_to_exitcode(status), seconds)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _judged(self, code: int, seconds: float) -> Verdict:
        said = (self.folder / "said").read_text(errors="replace").splitlines()
        lines = [line for line in said if line.startswith(("FAILED", "ERROR"))] or said or [""]
        outcome = {0: "green", 1: "red", 2: "red"}.get(code, "red" if code < 0 else "error")  # 2: they do not import
        return Verdict(outcome, lines[-1], seconds)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target)  # compiled files too: a changed one is compiled anew
    else:
        shutil.copy(source, target)


def _run_tests(folder: Path, root: Path, tests: Tests) -> NoReturn:
    """In a fork: run the tests below `root` on the package in a folder, in a new session."""
    code = 3
    try:
        os.setsid()
        said = os.open(folder / "said", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(folder / "src")  # for the processes that tests start
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(folder / "hypothesis")
        sys.path.insert(0, str(folder / "src"))
        sys.argv = ["pytest"]
        sys.modules["__main__"] = ModuleType("__main__")  # multiprocessing would run this one in its children
        code = int(pytest.main([*OPTIONS, *tests]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def with_controls(mutants: Iterable[Mutant]) -> list[Run]:
    """A run for every mutant, and before them one without a bug for every list of tests that is in no larger one."""
    controls: list[Run] = []
    runs = [Run(mutant.tests, mutant, is_in_package=mutant.is_in_package) for mutant in mutants]
    for run in sorted(runs, key=lambda run: (sum("::" in test for test in run.tests), -len(run.tests))):
        same = [control for control in controls if control.is_in_package == run.is_in_package]
        run.control = next((control for control in same if covers(control.tests, run.tests)), None)
        if run.control is None:
            run.control = Run(run.tests, is_in_package=run.is_in_package)
            controls.append(run.control)
    return [*controls, *runs]


def covers(larger: Tests, smaller: Tests) -> bool:
    """Whether all of the smaller tests are among the larger ones, by themselves or with their file."""
    return all(test in larger or test.partition("::")[0] in larger for test in smaller)


def main(asked: list[str]) -> bool:
    """Whether all came out as it should."""
    known = [(name, mutant) for name, mutants in catalogues() for mutant in mutants]
    if controls_alone := asked == ["controls"]:
        asked = []
    if strangers := set(asked) - {name for name, _ in known} - {mutant.name for _, mutant in known}:
        sys.exit(f"no mutant or catalogue has the name {', '.join(sorted(strangers))}")
    runs = with_controls(mutant for name, mutant in known if not asked or name in asked or mutant.name in asked)
    if controls_alone:
        runs = [run for run in runs if run.mutant is None]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    left, running = list(runs), list[Run]()
    while left or running:
        ready = [run for run in left if run.control is None or run.control.verdict]
        for run in ready[: cores - len(running)]:
            left.remove(run)
            running.append(run)
            run.start()
        time.sleep(0.05)
        for run in list(running):
            if run.verdict is None:
                run.look()
            if run.verdict is not None:
                running.remove(run)
                mark, verdict = "BAD" if run.is_bad else "ok", run.verdict
                print(
                    f"{mark:3} {run.name:70} {verdict.outcome:5} {verdict.seconds:4.0f} s  {verdict.why[:240]}",
                    flush=True,
                )
    bad = [run.name for run in runs if run.is_bad]
    seeded = sum(run.mutant is not None for run in runs)
    print(f"{seeded} seeded bugs, {len(runs) - seeded} runs without one; {len(bad)} came out as they should not")
    print("\n".join(f"  {name}" for name in bad), end="\n" if bad else "")
    return not bad


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
