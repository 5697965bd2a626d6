"""Holds what one member has of one round that not all members have applied, and says what it lacks."""

from dataclasses import dataclass, field
from typing import Any
from typing import Protocol as Interface

from atoll.link.net.actions import Mean, Part, RoundMessage, Whole
from atoll.link.net.views import Attempt, Process, RoundStatus


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

    me: Process
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

    @property
    def status(self) -> RoundStatus:
        """Return what this member tells the others of the round in a flush."""
        return RoundStatus(self.attempt, frozenset(self.held), self.done or self.result is not None)

    def reducer(self, part: int) -> Process:
        """Return the member that takes the mean of a part."""
        members = self.attempt.members
        return members[part % len(members)]

    def add(self, sender: Process, message: RoundMessage) -> None:
        """Add what a message of this round carries."""
        if isinstance(message, Whole):
            self.held.setdefault(message.owner, message.payload)
        elif isinstance(message, Part):
            self.parts.setdefault((message.attempt, message.part), {})[sender] = message.payload
        elif isinstance(message, Mean):
            self.means[message.attempt, message.part] = message.payload
        elif not self.done and message.attempt.in_parts:
            self.attempt, self.result = message.attempt, message.means

    def missing(self) -> list[Process]:
        """Return the members whose payloads, or parts that this member reduces, are not here."""
        here = self._own_parts() if self.attempt.in_parts and self.offer is not None else [self.held]
        return [member for member in self.attempt.members if not all(member in arrived for arrived in here)]

    def awaited(self) -> list[Process]:
        """Return the members that an open round waits for: for their payloads, or else for means of their parts."""
        if not self.is_open:
            return []
        if (missing := self.missing()) or not self.attempt.in_parts:
            return missing
        lacking = (part for part in self._all_parts() if (self.attempt.view, part) not in self.means)
        return sorted({self.reducer(part) for part in lacking})

    def payloads_to_reduce(self, part: int) -> dict[Process, Any] | None:
        """Return all members' payloads of a part once they are here, in seat order; each part only once."""
        key = self.attempt.view, part
        here = self.parts.get(key, {})
        if key in self.reducing or not self.attempt.in_parts or not here.keys() >= {*self.attempt.members}:
            return None
        self.reducing.add(key)
        return {member: here[member] for member in self.attempt.members}

    def gather(self) -> bool:
        """Gather the means of an open round into its result; return whether all that completes the round is here."""
        if not self.attempt.in_parts:
            return self.held.keys() >= {*self.attempt.members}
        if self.result is None:
            keys = [(self.attempt.view, part) for part in self._all_parts()]
            if any(key not in self.means for key in keys):
                return False
            self.result = tuple(self.means[key] for key in keys)
        return True

    def payloads(self) -> dict[Process, Any] | None:
        """Return all members' whole payloads, in seat order; None for a round in two shots, which has a result."""
        return None if self.attempt.in_parts else {member: self.held[member] for member in self.attempt.members}

    def _all_parts(self) -> range:
        assert self.offer is not None
        return range(self.offer.part_count(len(self.attempt.members)))

    def _own_parts(self) -> list[dict[Process, Any]]:
        """Return what has come of each part that this member reduces."""
        own = [part for part in self._all_parts() if self.reducer(part) == self.me]
        return [self.parts.get((self.attempt.view, part), {}) for part in own]
