"""Decides who takes part in which round when members of a run come and go. Pure: no clock, no network.

The registry holds one numbered `View`: the members of a run. When it changes, the members of the new view *flush*: each
tells all others, once, which payloads it holds whole and which rounds it has completed (`Told`). `decide` is a function
of what was told, so all members come to the same decision without another message:

- A round in one shot counts the members that remain, and a lost member if somebody who remains holds its payload.
- A round in two shots stands if somebody who remains has completed it; otherwise those who remain make it again.
- Rounds after the newest step that any of them had opened belong to the new view.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from atoll.core.allreduce import shots
from atoll.link.base import RoundId


class Process(NamedTuple):
    """Names a process that has taken a seat; when a seat is taken again, its life is another."""

    seat: int
    life: int


@dataclass(frozen=True)
class View:
    """Names the members of a run, as the registry has accepted them."""

    number: int
    lives: Mapping[int, int]
    """Seat -> life, for every member."""
    following: frozenset[int] = frozenset()
    """Members that receive rounds and owe none: they have joined and are catching up."""
    late: Mapping[int, int] = field(default_factory=dict)
    """Seat -> step: members that rounds up to this step do not wait for."""
    over: bool = False
    """Whether the run is trained to its end: nobody can join any more."""

    @cached_property
    def members(self) -> tuple[Process, ...]:
        """All members, in seat order."""
        return tuple(Process(*item) for item in sorted(self.lives.items()))

    @cached_property
    def owing(self) -> tuple[Process, ...]:
        """The members that owe a payload to every round, in seat order."""
        return tuple(member for member in self.members if member.seat not in self.following)

    def has(self, process: Process) -> bool:
        """Return whether a process is a member."""
        return self.lives.get(process.seat) == process.life

    def without(self, seats: Iterable[int]) -> "View":
        """Return the next view: these seats have left or are lost."""
        gone = set(seats)
        lives = {seat: life for seat, life in self.lives.items() if seat not in gone}
        late = {seat: step for seat, step in self.late.items() if seat not in gone}
        return replace(self, number=self.number + 1, lives=lives, following=self.following - gone, late=late)

    def admitting(self, seat: int, life: int) -> "View":
        """Return the next view: a process takes a seat and follows."""
        late = {other: step for other, step in self.late.items() if other != seat}
        lives = {**self.lives, seat: life}
        return replace(self, number=self.number + 1, lives=lives, following=self.following | {seat}, late=late)

    def promoting(self, seat: int) -> "View":
        """Return the next view: a member that followed has caught up, and owes payloads."""
        return replace(self, number=self.number + 1, following=self.following - {seat})

    def ending(self) -> "View":
        """Return the next view: the run is over."""
        return replace(self, number=self.number + 1, over=True)

    def leaving_behind(self, late: Iterable[Process], step: int) -> "View":
        """Return the next view: rounds up to this step are completed without what these members have not sent."""
        return replace(self, number=self.number + 1, late={**self.late, **{member.seat: step for member in late}})


@dataclass(frozen=True, slots=True)
class Era:
    """Holds the members that rounds from `first_step` on have, until the next era."""

    view: int
    """Number of the view that it began with."""
    first_step: int
    owing: tuple[Process, ...]
    """Those that owe a payload, in seat order."""
    receiving: frozenset[Process]
    """Those that get every payload."""
    due: frozenset[int]
    """Seats of those that owed a payload when the era began; losses do not change it."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """Names the members between which a round is made: again, by a later view, if one was lost on the way."""

    view: int
    """Number of the view that decided on it: its era's, or the one after a loss."""
    members: tuple[Process, ...]

    @property
    def in_parts(self) -> bool:
        """Whether the round crosses the link in parts, in two shots, and not as whole payloads."""
        return len(self.members) > 0 and shots(len(self.members)) == 2


@dataclass(frozen=True, slots=True)
class RoundStatus:
    """Tells what one member has of one round."""

    attempt: Attempt
    held: frozenset[Process]
    """Whose payloads it holds whole; its own is one of them once it has opened the round."""
    done: bool
    """Whether it has all that completes the round: then the attempt's members are those that count."""


@dataclass(frozen=True, slots=True)
class Told:
    """Is what one member tells all others in a flush; it does nothing afterwards that would make it untrue."""

    view: int
    adopted: int
    """The last view whose decision it has carried out."""
    step: int
    """The newest step whose rounds it has opened."""
    applied: int | None
    """The step up to which it has applied all rounds; None as long as a joiner waits for the shared state."""
    since: int
    """The step after which it has applied rounds itself; a state that it was given holds those before."""
    eras: tuple[Era, ...]
    rounds: Mapping[RoundId, RoundStatus]


@dataclass(frozen=True, slots=True)
class Relay:
    """Names what a lost member's payload, or the result of a round, is missing for, and who has it."""

    round_id: RoundId
    owner: Process | None
    """Whose payload; None for the result of a round in two shots."""
    holder: Process
    receivers: frozenset[Process]


@dataclass(frozen=True, slots=True)
class Decision:
    """Is what all members of a view do after a flush, the same on each."""

    view: View
    boundary: int
    """Rounds after this step belong to the new view."""
    eras: tuple[Era, ...]
    attempts: Mapping[RoundId, Attempt]
    """The members of every older round that somebody knew of."""
    relays: tuple[Relay, ...]
    applied: Mapping[Process, int]
    """The step up to which each member has applied all rounds; a joiner gets every round since it was admitted."""
    stranded: frozenset[Process]
    """Members that lack rounds which others have applied, and which nobody can pass on: they have to join anew."""
    left_behind: Mapping[RoundId, frozenset[Process]] = field(default_factory=dict)
    """Members that this view takes out of a round because they are late."""


def era_of(eras: Sequence[Era], step: int) -> Era:
    """Return the era that a step belongs to; the first, if it is older than all."""
    return next((era for era in reversed(eras) if era.first_step <= step), eras[0])


def attempt_of(eras: Sequence[Era], step: int) -> Attempt:
    """Return the first attempt at a round of a step, between the members of its era; nobody's before any view."""
    if not eras:
        return Attempt(0, ())
    era = era_of(eras, step)
    return Attempt(era.view, era.owing)


def decide(view: View, told: Mapping[Process, Told]) -> Decision:
    """Decide on all rounds that are not over.

    Args:
        view: The new view.
        told: What each of its members has told.
    """
    basis = max(told.values(), key=lambda one: one.adopted)  # all that have adopted a view know the same eras
    boundary = max(one.step for one in told.values())
    attempts: dict[RoundId, Attempt] = {}
    relays: list[Relay] = []
    left_behind: dict[RoundId, frozenset[Process]] = {}
    for round_id in sorted({round_id for one in told.values() for round_id in one.rounds}):
        if round_id.step <= boundary:
            status = {member: one.rounds[round_id] for member, one in told.items() if round_id in one.rounds}
            attempts[round_id] = _attempt(view, round_id, status)
            late = {*_newest(status).members} - {*attempts[round_id].members}
            if remaining := frozenset(filter(view.has, late)):
                left_behind[round_id] = remaining
            receiving = era_of(basis.eras, round_id.step).receiving & set(view.members)
            relays += _relays(view, receiving, round_id, attempts[round_id], status)
    eras = [
        replace(era, owing=tuple(member for member in era.owing if view.has(member)))  # for rounds nobody knows of yet
        for era in basis.eras
        if era.first_step <= boundary
    ]
    due = frozenset(member.seat for member in view.owing)
    new = Era(view.number, boundary + 1, view.owing, frozenset(view.members), due)
    applied = {}
    for member, one in told.items():
        admitted = next((era.first_step - 1 for era in (*eras, new) if member in era.receiving), boundary)
        applied[member] = admitted if one.applied is None else one.applied
    stranded = _stranded(basis.eras, told, applied)
    return Decision(view, boundary, (*eras, new), attempts, tuple(relays), applied, stranded, left_behind)


def _stranded(eras: Sequence[Era], told: Mapping[Process, Told], applied: Mapping[Process, int]) -> frozenset[Process]:
    """Return the members whose next rounds are among those that others have only as part of a state.

    Not a member that owed its payload to these rounds: they are in a state because it has applied them since it told.
    """
    least = newest = max((one.applied for one in told.values() if one.applied is not None), default=-1)
    while True:  # all rounds after `least`, up to the newest that was applied, are kept by somebody
        holding = [one.since for one in told.values() if one.applied is not None and one.applied >= least]
        if min(holding, default=newest) >= least:
            break
        least = min(holding)
    behind = {member: step for member, step in applied.items() if step < least}
    return frozenset(member for member, step in behind.items() if not _owes_all(eras, member, step + 1, least))


def _owes_all(eras: Sequence[Era], member: Process, first: int, last: int) -> bool:
    """Return whether a member owes its payload to all rounds between two steps; the first era has all older ones."""
    between = [era for era in eras if first < era.first_step <= last]
    return bool(eras) and all(member in era.owing for era in (era_of(eras, first), *between))


def _attempt(view: View, round_id: RoundId, status: Mapping[Process, RoundStatus]) -> Attempt:
    done = [one.attempt for one in status.values() if one.done]
    if done:
        return done[0]
    newest = _newest(status)
    held = {owner for one in status.values() for owner in one.held}

    def counts(member: Process) -> bool:
        if not view.has(member):
            return not newest.in_parts and member in held
        return member in held or view.late.get(member.seat, -1) < round_id.step

    counted = tuple(filter(counts, newest.members))
    return newest if counted == newest.members else Attempt(view.number, counted)


def _newest(status: Mapping[Process, RoundStatus]) -> Attempt:
    return max((one.attempt for one in status.values()), key=lambda attempt: attempt.view)


def _relays(
    view: View,
    receiving: frozenset[Process],
    round_id: RoundId,
    attempt: Attempt,
    status: Mapping[Process, RoundStatus],
) -> list[Relay]:
    """Return what must be passed on, each by one holder, for the round to be complete everywhere."""
    if attempt.in_parts:
        done = sorted(member for member, one in status.items() if one.done)
        lacking = receiving - set(done)
        return [Relay(round_id, None, done[0], lacking)] if done and lacking else []
    relays = []
    for owner in (member for member in attempt.members if not view.has(member)):
        holders = {member for member, one in status.items() if owner in one.held}
        if holders and (lacking := receiving - holders):
            relays.append(Relay(round_id, owner, min(holders), lacking))
    return relays
