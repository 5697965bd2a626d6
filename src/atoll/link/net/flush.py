"""Keeps the views of a run as one member knows them, and brings each to its decision. Pure: no clock, no network."""

from typing import Final

from atoll.link.net.actions import Progress, RoundMessage
from atoll.link.net.views import Decision, Process, Told, View, decide

MOST_EARLY: Final = 1 << 14
"""Messages of one process that wait for a view."""
MOST_TOLD: Final = 64
"""Views for which is kept what one process has told."""

EarlyMessage = tuple[Process, RoundMessage | Progress, int]
"""A message of a view that is not adopted here, with its sender and the number of that view."""


class Flush:
    """Holds the newest view, what its members have told, who is lost, and messages that come before their view.

    Args:
        me: This process.
    """

    def __init__(self, me: Process) -> None:
        self._me = me
        self.view = View(0, {})
        """The newest view that is known here, adopted or not."""
        self.adopted = 0
        """Number of the last view that was adopted."""
        self.lost: set[Process] = set()
        self._told: dict[int, dict[Process, Told]] = {}  # by number of the view
        self._early: list[EarlyMessage] = []

    @property
    def is_under_way(self) -> bool:
        """Whether the newest view is not yet adopted here."""
        return self.view.number != self.adopted

    @property
    def is_due(self) -> bool:
        """Whether a flush is under way, or is to come because a member is lost."""
        return self.is_under_way or any(map(self.view.has, self.lost))

    @property
    def told(self) -> Told | None:
        """Return what this member has told the others of the newest view; None if that is adopted."""
        return self.told_of(self.view.number).get(self._me) if self.is_under_way else None

    def told_of(self, number: int) -> dict[Process, Told]:
        """Return what each member has told in the flush of a view."""
        return self._told.get(number, {})

    def begin(self, view: View) -> None:
        """Take a newer view: the flushes of older ones are over."""
        before, self.view = self.view, view
        if not view.has(self._me):  # this process does nothing any more
            return
        self.lost = {process for process in self.lost if view.has(process) or not before.has(process)}
        self._told = {number: known for number, known in self._told.items() if number >= view.number}

    def hear(self, sender: Process, told: Told) -> bool:
        """Note what a process tells, unless it is of an older view; return whether it was noted.

        It may tell of views that never come, so only its newest ones are kept.
        """
        if told.view < self.view.number:
            return False
        self._told.setdefault(told.view, {})[sender] = told
        numbers = sorted(number for number, known in self._told.items() if sender in known)
        for number in numbers[:-MOST_TOLD]:  # these are not adopted any more
            del self._told[number][sender]
            if not self._told[number]:
                del self._told[number]
        return True

    def decision(self) -> Decision | None:
        """Return what all members do, once all have told; None before, and once the view is adopted."""
        told = self.told_of(self.view.number)
        if not self.is_under_way or len(told) < len(self.view.members):  # short, for it is asked for every member
            return None
        if not self.view.has(self._me) or not told.keys() >= set(self.view.members):
            return None
        return decide(self.view, {member: told[member] for member in self.view.members})

    def lost_seats(self) -> set[int]:
        """Return the seats of members that are lost."""
        return {process.seat for process in self.lost if self.view.has(process)}

    def meet(self, process: Process) -> None:
        """Note that a process has connected: if it was lost before it became a member, it counts as never lost."""
        if not self.view.has(process):
            self.lost.discard(process)

    # ------------------------------------------------------------------ messages of a newer view

    def has_room_for(self, sender: Process, view: int) -> bool:
        """Return whether a message may be received: of views that are not adopted, only so many are kept."""
        if view <= self.adopted or len(self._early) < MOST_EARLY:
            return True
        return sum(known == sender for known, _, _ in self._early) < MOST_EARLY

    def keep(self, early: EarlyMessage) -> None:
        """Keep a message until its view is adopted."""
        self._early.append(early)

    def forget_early(self, applied: int) -> None:
        """Forget messages of rounds up to a step, which this member has applied: nothing would come of them."""
        self._early = [one for one in self._early if isinstance(one[1], Progress) or one[1].round_id.step > applied]

    def take_early(self) -> list[EarlyMessage]:
        """Return the messages that were kept, and keep them no longer."""
        early, self._early = self._early, []
        return early
