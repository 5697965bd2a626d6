"""64 seats as processes of their own agree on views: all join, one is killed, and it comes back. Nobody trains."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.link.base import STEPS_MADE, FragmentState
from atoll.link.net.elastic_link import ElasticLink, ElasticOptions
from atoll.link.net.identity import Identity
from atoll.link.net.run_keys import throw_away
from atoll.link.net.views import Decision
from fleet import Fleet, Me
from registries import RegistryProcess

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SEATS = 64


def _state(fragment: int) -> FragmentState:
    return FragmentState(fragment, 0, {"version": 0}, {"anchor": torch.zeros(8), "velocity": torch.zeros(8)})


def seat(me: Me, registry: str, keys: str) -> None:
    """Be a member that never makes a step, and tell of every view; ends when it is told to."""
    identity = Identity.load(Path(keys) / f"worker-{me.worker}")
    options = ElasticOptions(registry=registry, security=identity, listen="127.0.0.1:0", silent_s=60.0, join_s=600.0)
    link = ElasticLink(me.worker, me.workers, options)

    def tell(decision: Decision) -> None:
        view = decision.view
        me.say((view.number, sorted(view.lives.items()), sorted(view.following), time.monotonic()))

    link.hooks.on_decision = tell
    admission = link.join({"period": "5"}, 1.0, {STEPS_MADE: "0"})
    if admission is not None:
        assert [state.applied for state in admission.states(1)] == [0]
        assert admission.promote() == 0
    assert me.pipe is not None
    while not me.pipe.poll(0.2):
        link.advanced(0, 0, _state)  # gives joiners what they ask for
    link.close("the test has ended")


def memory_mb(fleet: Fleet) -> float:
    """The memory that the processes of a fleet have; what several share counts once."""
    maps = [Path(f"/proc/{worker.pid}/smaps_rollup").read_text() for worker in fleet.crew]
    return sum(int(line.split()[1]) for text in maps for line in text.splitlines() if line.startswith("Pss:")) / 1000


def agreed(fleet: Fleet, seats: set[int], number: int) -> tuple[Any, float]:
    """Wait until these seats have adopted a view; return it, and when the last had."""
    views, last = [], 0.0
    for worker in sorted(seats):
        told = fleet[worker].said()
        while told[0] < number:
            told = fleet[worker].said()
        views.append(told[:3])
        last = max(last, told[3])
    assert views == views[:1] * len(views)
    return views[0], last


def test_64_seats_agree_on_views(tmp_path: Path) -> None:
    throw_away(SEATS).save(tmp_path / "keys")
    everyone = set(range(SEATS))
    with (
        RegistryProcess(tmp_path / "registry", tmp_path / "keys" / "registry") as registry,
        Fleet(tmp_path / "fleet", SEATS) as fleet,
    ):
        arguments = registry.address, str(tmp_path / "keys")
        began = time.monotonic()
        fleet.start(seat, *arguments)
        (number, lives, following), at = agreed(fleet, everyone, 1)
        assert number == 1 and {worker for worker, _ in lives} == everyone and not following
        print(f"{SEATS} seats agree {at - began:.1f} s after the first was started, in {memory_mb(fleet):.0f} MB")

        killed = SEATS // 2
        began = time.monotonic()
        fleet[killed].kill()
        (number, lives, following), at = agreed(fleet, everyone - {killed}, 2)
        assert number == 2 and {worker for worker, _ in lives} == everyone - {killed} and not following
        print(f"{SEATS - 1} seats agree {at - began:.2f} s after a kill")

        began = time.monotonic()
        fleet.crew[killed].close()
        fleet.crew[killed] = fleet.add(killed, seat, *arguments)
        fleet.crew.pop()
        (number, lives, following), at = agreed(fleet, everyone, 3)
        assert number == 3 and {worker for worker, _ in lives} == everyone and following == [killed]
        (number, lives, following), at = agreed(fleet, everyone, 4)
        assert number == 4 and {worker for worker, _ in lives} == everyone and not following
        print(f"{SEATS} seats agree that it trains {at - began:.1f} s after it was started again")
        for worker in fleet.crew:
            worker.tell()
        assert not any(worker.ending().error for worker in fleet.crew)
