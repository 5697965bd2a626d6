"""Workers' machines and their lines: when what is handed to a line has passed it, and everybody has everybody's.

A line carries one thing after the other, each way on its own. Arrays are [workers, rates], with one row while workers
are alike, as in `plan.simulate`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll._util.checks import check_number
from atoll.core.allreduce import shots
from atoll.errors import ConfigError

Array = NDArray[np.float64]
Exchange = Literal["shots", "ring", "all-to-all"]
"""How members exchange: in one or two shots as atoll does, around a ring, or each with each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One worker's machine and its line to the others."""

    up_bits_per_s: float
    """What it can send."""
    down_bits_per_s: float
    """What it can receive."""
    latency_s: float = 0.0
    """Seconds from a bit's departure to its arrival, once for every crossing of an exchange."""
    jitter_s: float = 0.0
    """The most seconds by which an exchange arrives later at this worker; all delays up to it are equally likely."""
    pace: float = 1.0
    """How long its steps take, in the job's: 2 is half as fast."""
    outages: tuple[tuple[float, float], ...] = ()
    """Times in which its line carries nothing: (from, to) in seconds since the start, apart and in order."""

    def __post_init__(self) -> None:
        for name in ("up_bits_per_s", "down_bits_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be above 0, got {getattr(self, name)!r}: nothing would ever arrive")
        check_number("latency_s", self.latency_s, least=0, why="it is a delay in seconds")
        check_number("jitter_s", self.jitter_s, least=0, why="it is a delay in seconds")
        if not 0 < self.pace < float("inf"):
            raise ConfigError(f"pace must be a finite number above 0, got {self.pace!r}: it multiplies step times")
        edges = [edge for outage in self.outages for edge in outage]
        if edges != sorted(edges) or any(not 0 <= edge < float("inf") for edge in edges):
            raise ConfigError(f"outages must be (from, to) in seconds, apart and in order, got {self.outages!r}")

    @property
    def steady(self) -> bool:
        """Whether workers at places like this are in step with each other for ever."""
        return not self.jitter_s and not self.outages


class Lines:
    """Every worker's line: when what is sent has passed it, in the order in which it was handed over."""

    def __init__(
        self, workers: int, places: Sequence[Place], rates: Sequence[float] | Array | None, exchange: Exchange
    ) -> None:
        self.copies, self.crossings = _exchanged(exchange, workers)
        up, down = ([getattr(p, f"{way}_bits_per_s") for p in places] for way in ("up", "down"))
        given = np.asarray(rates, dtype=float)[None, :] if rates is not None else None
        self.up, self.down = (np.array(r)[:, None] if given is None else given for r in (up, down))
        self.rates = self.up.shape[1]
        self.up_free, self.down_free = (np.zeros((len(places), self.rates)) for _ in "ud")
        self.latency = np.array([place.latency_s for place in places])[:, None] * self.crossings
        # One worker alone needs no line: nothing can befall it there.
        self.jitter = np.array([place.jitter_s if workers > 1 else 0.0 for place in places])
        self.outages = [place.outages if workers > 1 else () for place in places]

    def sent(self, size: float) -> float:
        """Bytes that each worker puts on its line for a payload of so many."""
        return self.copies * size

    def carry(
        self, size: float, ready: Array, lost: NDArray[np.bool_] | None, dice: np.random.Generator
    ) -> tuple[Array, Array, Array]:
        """A payload of everybody's, each ready at its time: when its line took it up, was done, and has all others'."""
        begun = np.maximum(self.up_free, ready)
        self.up_free = self._worked(begun, 8 * self.sent(size) / self.up)
        sent = self.up_free if lost is None else np.where(lost[:, None], -np.inf, self.up_free)
        # What others send begins to come in when the first of them is ready, and is all there when the last has sent.
        coming = np.maximum(self.down_free, _first_of_others(ready))
        self.down_free = self._worked(coming, 8 * self.sent(size) / self.down)
        arrival = np.maximum(np.maximum(sent.max(axis=0), self.down_free), self.up_free) + self.latency
        if self.jitter.any():
            arrival = arrival + (self.jitter * dice.random(len(self.jitter)))[:, None]
        return begun, self.up_free, arrival

    def _worked(self, begin: Array, seconds: Array) -> Array:
        """When lines that begin then have worked so long, outages aside."""
        end = begin + seconds
        for row, outages in enumerate(self.outages):
            for off, on in outages:
                hit = ((end[row] > off) | (begin[row] >= off)) & (begin[row] < on)
                end[row] += np.where(hit, on - np.maximum(begin[row], off), 0.0)
        return end


def _first_of_others(ready: Array) -> Array:
    """For every worker the earliest time of another; for one that stands for all, its own."""
    if len(ready) == 1:
        return ready
    first, second = np.partition(ready, 1, axis=0)[:2]
    others: Array = np.where(np.arange(len(ready))[:, None] == ready.argmin(axis=0), second, first)
    return others


def _exchanged(exchange: Exchange, workers: int) -> tuple[float, int]:
    """Payloads that a worker sends in a round, and how often one after the other they cross the distance."""
    if workers == 1:
        return 0.0, 0
    halves = 2 * (workers - 1) / workers
    match exchange:
        case "ring":
            return halves, 2 * (workers - 1)
        case "all-to-all":
            return workers - 1.0, 1
        case "shots":
            return (workers - 1.0 if shots(workers) == 1 else halves), shots(workers)
    raise ConfigError(f"exchange must be shots, ring or all-to-all, got {exchange!r}")
