"""Holds what one member has of one round that not all members have applied."""

from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as Interface

from atoll.link.net.views import Attempt, Process


class Offer(Interface):
    """Holds what this member puts into a round; it may be empty."""

    @property
    def whole(self) -> Any:
        """The payload."""

    def part_count(self, members: int) -> int:
        """Return the number of parts between so many members; part p is reduced by the member at p modulo that."""

    def part(self, part: int, members: int) -> Any:
        """Return one part of the payload."""


@dataclass(slots=True)
class RoundState:
    """Holds what one member has of one round."""

    attempt: Attempt
    offer: Offer | None = None
    """What this member put in when it opened the round; None until then."""
    done: bool = False
    held: dict[Process, Any] = field(default_factory=dict)
    """Whole payloads."""
    parts: dict[tuple[int, int], dict[Process, Any]] = field(default_factory=dict)
    """(attempt, part) -> payloads of a part."""
    means: dict[tuple[int, int], Any] = field(default_factory=dict)
    """(attempt, part) -> mean."""
    reducing: set[tuple[int, int]] = field(default_factory=set)
    """(attempt, part) whose means this member has asked for."""
    result: tuple[Any, ...] | None = None

    @property
    def is_open(self) -> bool:
        """Whether this member has opened the round and waits for it."""
        return self.offer is not None and not self.done
