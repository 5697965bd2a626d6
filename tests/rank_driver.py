"""What torchrun starts in test_ranks.py: several runs, one after the other, in the same processes.

Its argument is a file of cases, [{"name", "file", "fault", "resume"}]; each process leaves what became of them in
RANK.json next to it.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from atoll import Lockstep
from atoll.core.flat import local_part
from atoll.errors import AtollError, LinkError
from atoll.link.net.fixed_link import NetLink
from atoll.settings import config
from atoll.train.ranks import control, fsdp
from atoll.train.run import train
from atoll.train.trainer import Trainer

RANK = int(os.environ["RANK"])  # of all: worker 0 has ranks 0 and 1


class CutError(Exception):
    """Stands for whatever ends a process."""


def cut(patch: pytest.MonkeyPatch) -> None:
    """All processes end after step 7."""
    original = Trainer.step

    def step(self: Trainer) -> None:
        original(self)
        if self.steps == 7:
            raise CutError

    patch.setattr(Trainer, "step", step)


def stop(patch: pytest.MonkeyPatch) -> None:
    """The second rank of every worker is told to stop, the first ones are not."""
    original = Trainer.step

    def step(self: Trainer) -> None:
        original(self)
        if self.steps == 5 and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    patch.setattr(Trainer, "step", step)


def unlink(patch: pytest.MonkeyPatch) -> None:
    """The link of one process of worker 0 fails while it trains: of the one that has it, or of the second."""
    original = NetLink.check
    calls: list[None] = []

    def check(self: NetLink) -> None:
        original(self)
        if self._newest.startswith("after"):  # before the first round, while others are waited for, it is called often
            calls.append(None)
        if len(calls) == 4 and self.worker == 0 and self.seat.rank == self.seat.ranks - 1:
            raise LinkError("a cable was pulled")

    patch.setattr(NetLink, "check", check)


def disagree(patch: pytest.MonkeyPatch) -> None:
    """The second process of worker 0 fails where all compare their texts."""
    original = control._compare

    def compare(link: NetLink, key: str, *terms: Any, **options: Any) -> Any:
        said = original(link, key, *terms, **options)
        if RANK == 1 and key != "settings":
            raise LinkError("a page is missing")
        return said

    patch.setattr(control, "_compare", compare)


def spoil(patch: pytest.MonkeyPatch) -> None:
    """The gradient of one value, of the last process's part, becomes infinite at the 6th step."""
    original = fsdp.share_nonfinite
    calls: list[None] = []

    def share_nonfinite(model: Any) -> None:
        calls.append(None)
        if RANK == 3 and len(calls) == 6:
            local_part(next(model.parameters()).grad)[0, 0] = math.inf
        original(model)

    patch.setattr(fsdp, "share_nonfinite", share_nonfinite)


def blot(patch: pytest.MonkeyPatch) -> None:
    """A value of the last process's part becomes NaN between the 8th inner step and what is sent after it."""
    original = Lockstep.step

    def step(self: Lockstep) -> None:
        (loop,) = self.loops
        if RANK == 3 and loop.steps == 7:
            (sent,) = loop._due(8).send
            local_part(loop._windows[sent].parameters()[0]).view(-1)[0] = math.nan
        original(self)

    patch.setattr(Lockstep, "step", step)


FAULTS = {"cut": cut, "stop": stop, "unlink": unlink, "disagree": disagree, "spoil": spoil, "blot": blot}


def main() -> None:
    place = Path(sys.argv[1])
    became: dict[str, str] = {}
    for case in json.loads(place.read_text()):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here
            if case["fault"]:
                FAULTS[case["fault"]](patch)
            try:
                train(config.load(case["file"]), resume=case["resume"])
                became[case["name"]] = "done"
            except (AtollError, CutError, SystemExit) as end:
                became[case["name"]] = f"{type(end).__name__}: {end}"
    place.with_name(f"{RANK}.json").write_text(json.dumps(became))


if __name__ == "__main__":
    main()
