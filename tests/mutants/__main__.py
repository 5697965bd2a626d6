"""Seed known bugs, one at a time, into copies of the library: each must turn a test red.

    python tests/mutants [name of a mutant or of a catalogue ...]

One that survives, one whose text is no longer in the source, and tests that are red without any bug are errors.
"""

import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)

from mutants.seed import Mutant, Verdict, catalogues, run_tests  # noqa: E402 - once the folder above is on the path

Tests = tuple[str, ...]
CONTROL_S = 900.0


def controls_of(mutants: list[Mutant]) -> dict[Tests, Tests]:
    """For each list of tests, the list that is run without a bug in its stead: one that has all of its tests."""
    wanted = sorted({mutant.tests for mutant in mutants}, key=len, reverse=True)
    run: list[Tests] = []
    stands_for: dict[Tests, Tests] = {}
    for tests in wanted:
        stands_for[tests] = next((larger for larger in run if set(tests) <= set(larger)), tests)
        if stands_for[tests] == tests:
            run.append(tests)
    return stands_for


def judge(mutant: Mutant, control: Future[Verdict]) -> Verdict:
    """Whether a bug is found; one that makes tests hang is."""
    without = control.result()
    if without.outcome != "green":
        return Verdict("error", "its tests are red without it")
    return run_tests(mutant.tests, mutant, 60 + 4 * without.seconds)


def main(asked: list[str]) -> bool:
    """Whether all is as it should be."""
    known = [(name, mutant) for name, mutants in catalogues() for mutant in mutants]
    if strangers := set(asked) - {name for name, _ in known} - {mutant.name for _, mutant in known}:
        sys.exit(f"no mutant or catalogue has the name {', '.join(sorted(strangers))}")
    chosen = [mutant for name, mutant in known if not asked or name in asked or mutant.name in asked]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    stands_for = controls_of(chosen)
    bad = 0
    with ThreadPoolExecutor(cores) as pool:
        controls = {t: pool.submit(run_tests, t, None, CONTROL_S) for t in dict.fromkeys(stands_for.values())}
        judged = [(mutant, pool.submit(judge, mutant, controls[stands_for[mutant.tests]])) for mutant in chosen]
        for tests, control in controls.items():
            bad += show("green", f"(no bug) {' '.join(Path(t).name for t in tests)}", control.result())
        for mutant, future in judged:
            bad += show("red", mutant.name, future.result())
    print(f"{len(chosen)} mutants and {len(controls)} runs without one: {bad} not as they should be")
    return not bad


def show(wanted: str, name: str, verdict: Verdict) -> bool:
    """Print how a run came out; returns whether it should not have."""
    is_bad = verdict.outcome != wanted
    told = f"{'BAD' if is_bad else 'ok':3} {name:58} {verdict.outcome:5} {verdict.seconds:4.0f} s"
    print(f"{told}  {verdict.why if is_bad else verdict.why[:110]}", flush=True)
    return is_bad


if __name__ == "__main__":
    sys.exit(not main(sys.argv[1:]))
