"""Defines where the events of a watched run come from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from atoll.runs.events import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """Holds what one process of a run has told since the last poll."""

    process: str
    """Tells the processes of a run apart, such as the name of a folder."""
    events: Sequence[Event] = ()
    """In the order in which they were written; a `Start` event begins the process anew."""
    heard: float
    """Unix time at which the process was last known to be alive: its file has grown, or it has answered."""
    trouble: str = ""
    """Why its events cannot be read any further, or it cannot be reached; empty if they can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Holds what is known of a run besides its events."""

    name: str
    """The name to show until a process has told its own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The table of run.toml; empty if it is not known."""


class Source(Protocol):
    """Finds the events of one run; one thread calls it."""

    def poll(self) -> Sequence[News]:
        """Returns what is new, a bounded part at a time; a process without news is told, too, until it is gone."""

    @property
    def share(self) -> float:
        """The share of the bytes that are there, 0 to 1, that `poll` has returned."""

    def about(self) -> About:
        """Returns what is known of the run now."""

    def close(self) -> None:
        """Ends connections; harmless when repeated."""
