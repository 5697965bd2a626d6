"""Workers of a run on one machine share its cpu_threads."""

from typing import Any

import pytest
import torch

from atoll.link.seat import Seat
from atoll.settings.config import RunConfig, parse
from atoll.train.ranks import cpu_threads
from atoll.train.ranks.control import ControlPlane


class Gathering:
    """A link on which the other workers say that they are on these machines."""

    def __init__(self, *machines: str) -> None:
        self._machines = machines

    def gather(self, key: str, mine: dict[str, Any], within_s: float | None) -> dict[Seat, Any]:
        said = [mine, *({"machine": name, "processes": 1} for name in self._machines)]
        return {Seat(worker, len(said)): each for worker, each in enumerate(said)}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What torch was told, on a machine with eight cpu_threads."""
    told: list[int] = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    return told


def share(link: Any, config: RunConfig | None = None, **environment: str) -> str | None:
    return cpu_threads.share_cores(ControlPlane(link=link), config or parse({}), environment)


def test_workers_on_one_machine_divide_its_cores_and_say_so(threads: list[int]) -> None:
    here = cpu_threads.machine_id()
    said = share(Gathering(here, "elsewhere"))
    assert threads == [4]
    assert said is not None
    assert said.startswith("2 processes of this run share this machine: this one computes with 4 of 8 threads")
    assert "OMP_NUM_THREADS" in said
    share(Gathering(*[here] * 20))
    assert threads == [4, 1]


def test_what_the_user_has_set_stays_and_a_machine_of_ones_own_is_not_divided(threads: list[int]) -> None:
    here = cpu_threads.machine_id()
    assert share(Gathering(here), OMP_NUM_THREADS="8") is None
    assert share(Gathering(here), parse({"threads": 8})) is None
    assert share(Gathering("elsewhere")) is None
    assert share(None) is None
    assert threads == []
