"""The protocol between changing members keeps its laws under every schedule of faults.

`simulated_net` says what a schedule is and which laws are checked.
"""

from itertools import pairwise

import pytest

from simulated_net import Net

CHUNK = 250


@pytest.mark.parametrize("chunk", [pytest.param(n, marks=[pytest.mark.thorough] if n else []) for n in range(80)])
def test_schedules(chunk: int) -> None:
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        try:
            Net(seed).run()
        except Exception as fault:
            raise AssertionError(f"seed {seed}: {type(fault).__name__}: {fault}") from fault


@pytest.mark.thorough
def test_faults_of_every_kind_do_happen() -> None:
    """The simulation is worth nothing if the faults miss what they are to hit."""
    found = {"lost": 0, "joined": 0, "promoted": 0, "left behind": 0}
    for seed in range(120):
        net = Net(seed)
        net.run()
        for before, view in pairwise(net.views.values()):
            found["lost"] += len(view.lives) < len(before.lives)
            found["joined"] += len(view.lives) > len(before.lives)
            found["promoted"] += len(view.following) < len(before.following) and view.lives == before.lives
            found["left behind"] += view.late != before.late and view.lives == before.lives
    assert all(count >= 5 for count in found.values()), found
