"""Some cells of benchmarks/chaos.py's matrix: a fault at a chosen moment, and what must hold in every run.

Times are benchmarks/chaos.py's to say; here a run must end, and end well.
"""

from pathlib import Path

import pytest

from chaos import Cell, run_cell
from chaos_fleet import Fleet, problems
from chaos_worker import Task
from sites import available
from soak import _growth, soak

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CELLS = [
    Cell("kill", "sending", workers=2, seat=0),
    Cell("kill", "saving", workers=3, seat=2),
    Cell("kill", "flushing", workers=5, seat=1),
    Cell("stop", "applying", workers=4, seat=3),
    Cell("registry", "admitting", workers=3, seat=1),
    Cell("cut", "giving", workers=3, seat=0),
    Cell("cut", "finishing", workers=2, seat=1),
]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.fault} while {cell.moment}, {cell.workers} workers")
def test_a_fault_costs_the_others_no_step_and_no_bit(cell: Cell) -> None:
    if cell.fault == "cut" and (missing := available()):
        pytest.skip(missing)
    outcome = run_cell(cell, {"silent_s": 10.0})  # a busy machine may keep a process waiting for seconds
    assert not outcome.problems, "\n".join(outcome.problems)
    assert outcome.next_s is not None
    print(f"{cell}: next round after {outcome.next_s} s, back after {outcome.back_s} s")


def test_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    samples, found = soak(tmp_path, rounds=3000)
    assert not found, found
    assert all(taken[-1]["step"] == 3000 for taken in samples)


# ---------------------------------------------------------------------- the checks can fail


def test_memory_that_grows_on_is_told_from_a_jump() -> None:
    def samples(*rss_kb: int) -> list[dict[str, int]]:
        return [{"step": 1000 * n, "rss_kb": kb, "threads": 9, "files": 30} for n, kb in enumerate(rss_kb, 1)]

    assert _growth(0, samples(300_000, 301_100, 301_120)) == []
    assert _growth(0, samples(300_000, 300_020, 301_120)) == []
    assert _growth(0, samples(300_000, 300_400, 300_900)) == []
    assert _growth(1, samples(300_000, 300_500, 301_000)) == ["worker 1: resident memory grew from 300000 to 301000 kB"]


def test_threads_that_grow_on_are_told_from_a_pool_s_first_use() -> None:
    def samples(*threads: int) -> list[dict[str, int]]:
        return [{"step": 1000 * n, "rss_kb": 9, "threads": count, "files": 30} for n, count in enumerate(threads, 1)]

    assert _growth(0, samples(10, 11, 11)) == [] == _growth(0, samples(10, 10, 11))
    assert _growth(0, samples(10, 11, 12)) == ["worker 0: threads grew from 10 to 12"]


def test_what_goes_wrong_is_seen(tmp_path: Path) -> None:
    """The harness is given events as a run that breaks every law would write them."""
    fleet = Fleet(tmp_path, Task(workers=2))
    fleet.last = 9

    def write(worker: int, *events: str) -> None:
        path = tmp_path / f"worker-{worker}.jsonl"
        path.write_text("".join(f'{{"t": {at}.0, "kind": {event}}}\n' for at, event in enumerate(events, 1)))

    applied = '"applied", "round": [4, 0, false], "version": 1, "members": %s, "anchor": "%s"'
    write(0, applied % ([0, 1], "a"), '"jumped", "before": 4, "steps": 6', applied % ([1], "a"))
    write(1, applied % ([1], "b"))
    found = "\n".join(problems(fleet, [0, 1]))
    assert "fragment 0 version 1: workers [0, 1] differ" in found
    assert "worker 0, a survivor, went from step 4 to 6" in found
    assert "round [4, 0, False] of worker 0 does not count [0]" in found
    assert "worker 1 has never trained with all others" in found
    assert "0 different final models" in found
    fleet.cut_off.append((1, 0.5))
    assert "differ" not in "\n".join(problems(fleet, [])).replace("different", "")
