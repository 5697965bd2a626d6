"""Counts what a process exchanges with each other worker, over all its connections to it."""

from collections import Counter
from dataclasses import dataclass, field

from atoll.link.net.outbox import Foreground


@dataclass(frozen=True, slots=True)
class Line:
    """Tells what has passed between this process and another worker, and how fast it can."""

    sent: int
    """Bytes of bulk messages since this process joined, over all connections."""
    received: int
    bytes_per_s: float | None
    """At which the worker receives while there is something to send; None: not measured, or not connected."""


@dataclass(slots=True)
class Traffic:
    """Outlives connections: a worker that is lost and comes back has another one."""

    foreground: Foreground = field(default_factory=Foreground)
    """What is on its way to all peers."""
    sent: Counter[int] = field(default_factory=Counter)
    """Worker -> bytes sent over connections that have ended."""
    received: Counter[int] = field(default_factory=Counter)

    def line(self, worker: int, sent: int = 0, received: int = 0, bytes_per_s: float | None = None) -> Line:
        """Return what has passed in all, given the counts of the connection that there is."""
        return Line(self.sent[worker] + sent, self.received[worker] + received, bytes_per_s)
