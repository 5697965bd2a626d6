"""Two processes that train by turns with a trainer and with a plain loop, and what they train with.

They do one thing after another, for a trainer's packages take seconds to import, its runs less.
"""

import hashlib
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
from torch import nn

import atoll
from fleet import Fleet, Me, free_port

STEPS, SAVED, EPOCH, RATE = 14, 5, 20, 3e-3
METHODS: dict[str, Callable[[], atoll.Sync]] = {
    "diloco": partial(atoll.DiLoCo, period=4),
    "streaming": partial(atoll.Streaming, period=4, delay=1, fragments=atoll.Blocks(each=1)),
    "eager": partial(atoll.Eager, period=4),
}
EVERY = [pytest.param(method, accumulate, id=f"{method}-{accumulate}") for method in METHODS for accumulate in (1, 3)]
every_method = pytest.mark.parametrize(("method", "accumulate"), EVERY)
"""Runs a test with each method, without and with gradient accumulation."""


def digest(model: nn.Module) -> str:
    return hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()[:16]


class Pair:
    """Two workers, each in a process; gone when the block is left."""

    def __init__(self, folder: Path, modules: str) -> None:
        self._fleet = Fleet(folder, 2, keys="none").start(serve, modules)
        assert [worker.said() for worker in self._fleet.crew] == ["ready", "ready"]  # a busy machine imports for long

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fleet.__exit__(kind, error, trace)

    def results(self, act: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What `act(me, *arguments)` returns on both."""
        outcomes = self.outcomes(act, *arguments)
        assert all(kind == "done" for kind, _ in outcomes), "\n".join(str(told) for _, told in outcomes)
        return [told for _, told in outcomes]

    def errors(self, act: Callable[..., Any], *arguments: Any) -> list[str]:
        """The last line of what `act` raises on both."""
        outcomes = self.outcomes(act, *arguments)
        assert all(kind == "failed" for kind, _ in outcomes), outcomes
        return [told.strip().splitlines()[-1] for _, told in outcomes]

    def outcomes(self, act: Callable[..., Any], *arguments: Any) -> list[tuple[str, Any]]:
        port = free_port()
        for worker in self._fleet.crew:
            worker.tell((act, port, arguments))
        return [worker.said() for worker in self._fleet.crew]


def serve(me: Me, modules: str) -> None:
    """Do what the test says, until it is over."""
    for module in modules.split():
        __import__(module)
    me.say("ready")
    while True:
        act, port, arguments = me.hear()
        try:
            me.say(("done", act(replace(me, port=port), *arguments)))
        except BaseException:
            me.say(("failed", traceback.format_exc()))
