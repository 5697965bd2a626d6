"""Defines what members of a run send each other, and what the protocol asks its driver to do."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from atoll.link.base import RoundId
from atoll.link.net.views import Attempt, Decision, Process, Told, View

# ---------------------------------------------------------------------- messages


@dataclass(frozen=True, slots=True)
class Whole:
    """Carries a member's payload of a round, from itself or passed on after it was lost."""

    round_id: RoundId
    owner: Process
    payload: Any


@dataclass(frozen=True, slots=True)
class Part:
    """Carries one part of the sender's payload to the member that reduces it."""

    round_id: RoundId
    attempt: int
    part: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Mean:
    """Carries the mean of one part, from the member that has reduced it."""

    round_id: RoundId
    attempt: int
    part: int
    payload: Any


@dataclass(frozen=True, slots=True)
class Result:
    """Passes on the means of all parts of a round, and between which members they were taken."""

    round_id: RoundId
    attempt: Attempt
    means: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Progress:
    """Tells that the sender has applied all rounds up to a step."""

    applied: int


RoundMessage = Whole | Part | Mean | Result
Message = RoundMessage | Progress | Told

# ---------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Asks the driver to send a message."""

    to: Process
    message: Message
    view: int
    """Number of the view that the sender has adopted."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Asks the driver to offer a view to the registry, in place of the one before it."""

    view: View


@dataclass(frozen=True, slots=True)
class Reduce:
    """Asks the driver for the mean of one part; `Protocol.reduced` takes it."""

    round_id: RoundId
    attempt: int
    part: int
    payloads: Mapping[Process, Any]
    """Member -> its payload of the part, in seat order."""


@dataclass(frozen=True, slots=True)
class Complete:
    """Gives the driver a round that is complete."""

    round_id: RoundId
    attempt: Attempt
    payloads: Mapping[Process, Any] | None
    """Member -> payload, in seat order; None in two shots."""
    means: tuple[Any, ...] | None
    """The means of all parts, in order; None in one shot."""
    due: frozenset[int]
    """Seats of the members that owed a payload when the round's era began, lost ones included."""


@dataclass(frozen=True, slots=True)
class Adopt:
    """Tells the driver that a view holds from now on."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Exclude:
    """Tells the driver that the others go on without this process: it has to join anew."""

    view: View


Action = Send | Propose | Reduce | Complete | Adopt | Exclude
