"""Seed known bugs, one at a time, into a copy of the library: each must turn a test red.

    python tests/mutants.py [name ...]

A mutant that survives, or a replacement that no longer applies to the source, is an error.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TESTS = [
    "tests/unit/test_laws.py",
    "tests/unit/test_resume.py",
    "tests/unit/test_outer.py",
    "tests/unit/test_flat.py",
    "tests/property/test_schedule.py",
    "tests/property/test_oracle.py",
]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str


MUTANTS = [
    Mutant("inverted modulo", "core/schedule.py", "since % self.period == 0", "since % self.period != 0"),
    Mutant("first round off by one", "core/schedule.py", "since >= self.period", "since > self.period"),
    Mutant("first round a period early", "core/schedule.py", "since >= self.period", "since >= 0"),
    Mutant("sign flipped", "loop.py", "torch.sub(self._start(fragment, piece), delta[piece], out=delta[piece])",
           "torch.sub(delta[piece], self._start(fragment, piece), out=delta[piece])"),
    Mutant("alpha swapped", "core/outer.py", "return alpha * local + (1 - alpha) * anchor",
           "return (1 - alpha) * local + alpha * anchor"),
    Mutant("heavy ball for Nesterov", "core/outer.py", "return delta + self.momentum * own", "return own"),
    Mutant("anchor taken from the merged value", "loop.py",
           "local[piece] = blend(local[piece], state.anchor[piece], alpha)",
           "local[piece] = state.anchor[piece] = blend(local[piece], state.anchor[piece], alpha)"),
    Mutant("stale own share in eager", "loop.py", "state.own[piece] - lost, newest)",
           "state.own[piece] - lost, state.own[piece])"),
    Mutant("own share counted whole", "core/outer.py", "(outer.lr * share)", "outer.lr"),
    Mutant("sum for mean", "core/outer.py", "[weight / sum(weights) for weight", "[weight for weight"),
    Mutant("own delta un-decoded", "loop.py", "                state.newest = sent.payload\n",
           "                state.newest = torch.cat([delta.float(), delta.float()]).view(torch.uint8)\n"),
    Mutant("last tensor skipped", "core/flat.py", "        part.copy_(piece.view(part.shape))",
           "        part.copy_(piece.view(part.shape)) if part is not parts[-1] or len(parts) == 1 else None"),
    Mutant("velocity not saved", "state.py", "            slot.copy_(state[\"slots\"][name])", "            pass"),
    Mutant("step inside the period forgotten", "loop.py", "        self.steps = state[\"steps\"]\n", ""),
    Mutant("rounds in flight not saved", "loop.py", "for saved in state[\"flights\"]", "for saved in []"),
    Mutant("own momentum not saved", "state.py", "        self.own = _copy(state[\"own\"])\n", ""),
    Mutant("a lost round merges anyway", "loop.py",
           "        if any(c.worker == self.link.worker for c in outcome.contributions):", "        if True:"),
    Mutant("weights ignored", "core/outer.py", "[weight / sum(weights) for weight", "[1 / len(weights) for weight"),
    Mutant("a joiner keeps its random parameters", "state.py", "        self.window.write(self.anchor)\n", ""),
    Mutant("residual kept when the payload is lost", "loop.py", "            state.residual.add_(flight.restore)",
           "            pass"),
]  # fmt: skip


def kills(mutant: Mutant | None) -> tuple[bool, str]:
    """Whether the tests turn red, and the line that says why."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "atoll"
        shutil.copytree(ROOT / "src" / "atoll", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            path = package / mutant.file
            source = path.read_text()
            if source.count(mutant.old) != 1:
                sys.exit(f"mutant {mutant.name!r}: its text occurs {source.count(mutant.old)} times in {mutant.file}")
            path.write_text(source.replace(mutant.old, mutant.new))
        environment = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *TESTS]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            return False, f"pytest ended with {done.returncode}: {done.stdout[-300:]}"
        lines = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
        return done.returncode == 1, (lines or done.stdout.splitlines())[-1][:110]


def main() -> None:
    chosen = [m for m in MUTANTS if not sys.argv[1:] or m.name in sys.argv[1:]]
    jobs: list[Mutant | None] = [None, *chosen]
    survivors = 0
    with ThreadPoolExecutor(2) as pool:
        for mutant, (red, why) in zip(jobs, pool.map(kills, jobs), strict=True):
            wanted = red == (mutant is not None)
            survivors += not wanted
            name = "(control: no bug)" if mutant is None else mutant.name
            print(f"{'ok  ' if wanted else 'BAD '} {name:42} {'red' if red else 'green':6} {why}", flush=True)
    print(f"{len(jobs) - survivors} passed, {survivors} failed")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
