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
    "tests/unit/test_local.py",
    "tests/unit/test_loop.py",
    "tests/unit/test_fragments.py",
    "tests/unit/test_checkpoint.py",
    "tests/property/test_schedule.py",
    "tests/property/test_codec.py",
    "tests/property/test_shots.py",
    "tests/property/test_oracle.py",
    "tests/unit/test_kernels.py",
    "tests/unit/test_late.py",
]


@dataclass(frozen=True)
class Mutant:
    name: str
    file: str
    old: str
    new: str
    also: tuple[str, str, str] | None = None
    """A second edit (file, old, new), for bugs that take two."""


MUTANTS = [
    # schedule
    Mutant("inverted modulo", "core/schedule.py", "since % self.period == 0", "since % self.period != 0"),
    Mutant("first round off by one", "core/schedule.py", "since >= self.period", "since > self.period"),
    Mutant("first round a period early", "core/schedule.py", "since >= self.period", "since >= 0"),
    # the algorithms
    Mutant("sign flipped", "core/flat.py", "here.sub_(part.to(vector.dtype))",
           "here.copy_(part.to(vector.dtype) - here)"),
    Mutant("the rounded start taken for work", "core/flat.py", "here.copy_(here.to(part.dtype))", "pass"),
    Mutant("alpha swapped", "core/outer.py", "return (alpha * local).add_((1 - alpha) * anchor)",
           "return ((1 - alpha) * local).add_(alpha * anchor)"),
    Mutant("heavy ball for Nesterov", "core/outer.py",
           "includes `delta`.\"\"\"\n        return (self.momentum * own).add_(delta)",
           "includes `delta`.\"\"\"\n        return own"),
    Mutant("anchor taken from the merged value", "state.py",
           "local[piece] = blend(local[piece], self.anchor[piece], alpha)",
           "local[piece] = self.anchor[piece] = blend(local[piece], self.anchor[piece], alpha)"),
    Mutant("sum for mean", "core/outer.py", "[weight / sum(weights) for weight", "[weight for weight"),
    Mutant("weights ignored", "core/outer.py", "[weight / sum(weights) for weight", "[1 / len(weights) for weight"),
    Mutant("stale own share in eager", "replica.py", "remember(known, newest)", "remember(known, state.own[piece])"),
    Mutant("own share counted whole", "core/outer.py", "(outer.lr * share)", "outer.lr"),
    Mutant("own delta un-decoded", "rounds.py", "state.newest = sent.payload\n", "state.newest = delta.clone()\n",
           ("exchange.py", "        return self.codec.decode_piece(",
            "        if payload.dtype != torch.uint8:\n            return payload[piece]\n"
            "        return self.codec.decode_piece(")),
    # faults
    Mutant("a lost round merges anyway", "rounds.py",
           "lost = missed and not flight.forgotten", "lost = False"),
    Mutant("who was away when a round was sent does not merge it", "rounds.py",
           "missed = flight.offer is not None and all(", "missed = all("),
    Mutant("what was lost while a worker was away is waited for", "rounds.py",
           "lost = missed and not flight.forgotten", "lost = missed"),
    Mutant("what was blended away is sent again at the end", "rounds.py", "flight.held *= keep", "pass"),
    Mutant("a lost eager delta is forgotten", "replica.py",
           "if lost and lost.offer else None", "if False else None"),
    Mutant("a joiner keeps its random parameters", "state.py",
           "        self.newest = None\n        self.window.write(self.anchor)\n", "        self.newest = None\n"),
    Mutant("a joiner keeps its old momentum", "state.py",
           "for vector in (self.residual, self.own):", "for vector in (self.residual,):"),
    Mutant("residual kept when the payload is lost", "state.py", "self.residual.add_(lost.restore)", "pass"),
    Mutant("residual undone under eager too", "state.py", "undoes = self.residual - lost if self.own is None else None",
           "undoes = self.residual - lost",
           ("replica.py", "        local = torch.empty_like(state.anchor)\n",
            "        local = torch.empty_like(state.anchor)\n        if lost and lost.restore is not None:\n"
            "            state.residual.add_(lost.restore)\n")),
    Mutant("finish sends twice what is in flight", "replica.py", "alpha=lost - held)", "alpha=lost - 0.0)"),
    Mutant("finish forgets what was lost last", "loop.py", "return recent_gap or not", "return not"),
    # resume
    Mutant("velocity not saved", "state.py", "            slot.copy_(state[\"slots\"][name])", "            pass"),
    Mutant("step inside the period forgotten", "loop.py", "        self.steps = state[\"steps\"]\n", ""),
    Mutant("rounds in flight not saved", "rounds.py", "for saved in flights:", "for saved in []:"),
    Mutant("own momentum not saved", "state.py", "            \"own\": _copy(self.own),",
           "            \"own\": None if self.own is None else torch.zeros_like(self.own),"),
    # vectors, bytes, members
    Mutant("last tensor skipped", "core/flat.py", "        part.copy_(piece.view(part.shape))",
           "        part.copy_(piece.view(part.shape)) if part is not parts[-1] or len(parts) == 1 else None"),
    Mutant("nibbles swapped", "core/codec.py", "(both | (both >> 4)).to(torch.uint8)",
           "((both << 4) | (both >> 8)).to(torch.uint8)"),
    Mutant("unit one too small", "core/codec.py", ".add_(1 + 127)", ".add_(127)"),
    Mutant("rounded down instead of to nearest", "core/codec.py", "((quarters + 1) >> 1)", "(quarters >> 1)"),
    Mutant("the highest level wraps around", "core/codec.py", ".floor_().clamp_(max=127)", ".floor_()"),
    Mutant("fingerprint says nothing", "core/flat.py", "    return total\n", "    return 0\n"),
    Mutant("members in order of arrival", "link/local.py", "in sorted(posted.items()) if offer",
           "in posted.items() if offer"),
    # two shots
    Mutant("the mean of many not rounded again", "link/local.py", "if arrived and shots(len(members)) == 2 and",
           "if False and"),
    Mutant("shots counted by who arrived", "link/local.py", "shots(len(members)) == 2", "shots(len(arrived)) == 2"),
    Mutant("shots counted by who could be there", "link/local.py", "shots(len(members)) == 2",
           "shots(self.workers) == 2"),
    Mutant("parts across blocks", "core/cargo.py", "BLOCK * (blocks * edge // count)", "numel * edge // count"),
    Mutant("one noise for all parts of a mean", "core/cargo.py", "self.codec.encode(mean, self.seed + part)",
           "self.codec.encode(mean, self.seed)"),
    Mutant("a mean rounded with a member's noise", "exchange.py", "seed = 2**31 + ", "seed = 2**32 + "),
    Mutant("one noise for parts of two rounds", "exchange.py", "MOST_PARTS_EACH * self._seed(round_id)",
           "self._seed(round_id)"),
    Mutant("embeddings in no fragment", "core/fragments.py", "    if rest:\n        groups.append",
           "    if False:\n        groups.append"),
    Mutant("checkpoint data not checked", "checkpoint.py", "if sha256_of(data) != manifest", "if False and manifest"),
    # kernels, as Triton's interpreter runs them
    Mutant("a kernel's unit is one too small", "kernels/codec.py", "((peak - LIMIT) >> 23) + 128",
           "((peak - LIMIT) >> 23) + 127"),
    Mutant("a kernel packs halves the other way round", "kernels/codec.py", "even | (odd << 4)", "odd | (even << 4)"),
    Mutant("a kernel weighs all members like the first", "kernels/codec.py", "tl.load(shares + member)",
           "tl.load(shares)"),
    Mutant("a kernel's NaN goes unnoticed", "kernels/codec.py", "tl.atomic_max(worst, tl.max(peak, 0))", "pass"),
    Mutant("a kernel's Nesterov is heavy ball", "kernels/outer.py",
           'move = momentum * speed + move if KIND == "nesterov" else speed', "move = speed"),
    Mutant("a kernel blends by the wrong share", "kernels/outer.py", "keep * tl.load(local, inside, 0.0)",
           "take * tl.load(local, inside, 0.0)"),
    Mutant("a table of parameters that have moved", "kernels/live.py",
           "return [t.data_ptr() for t in tensors] == [t.data_ptr() for t in self.tensors]", "return True"),
    Mutant("a kernel multiplies without units", "kernels/products.py", "+ (1023 - 2 * 127)", "* 0 + 1023"),
    Mutant("rolled back, a worker puts in zeros", "loop.py", ".left_out = round_id.fragment in sending",
           ".left_out = False"),
    Mutant("who is left out is never asked", "replica.py", "now = wait or state.left_out or state",
           "now = wait or state"),
    Mutant("what could not be sent is forgotten by a save", "state.py",
           'Unsent() if state.get("unsent") else None', "None"),
    Mutant("rolled back twice for one loss", "loop.py", "if flight.offer and not flight.forgotten]",
           "if flight.offer]"),
    Mutant("an offer is waited for where it is made", "replica.py", "offer = encoding.settled() if now else encoding",
           "offer = encoding.settled()"),
]  # fmt: skip


def edit(package: Path, name: str, file: str, old: str, new: str) -> None:
    source = (package / file).read_text()
    if source.count(old) != 1:
        sys.exit(f"mutant {name!r}: its text occurs {source.count(old)} times in {file}")
    (package / file).write_text(source.replace(old, new))


def kills(mutant: Mutant | None) -> tuple[bool, str]:
    """Whether the tests turn red, and the line that says why."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "atoll"
        shutil.copytree(ROOT / "src" / "atoll", package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            edit(package, mutant.name, mutant.file, mutant.old, mutant.new)
            if mutant.also:
                edit(package, mutant.name, *mutant.also)
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
