"""Brings a process into the view: with all others at the start of a run, or alone into one that is under way."""

import asyncio
import time
from collections.abc import Callable

from atoll.errors import LinkError
from atoll.link.base import describe_differences
from atoll.link.net.greeting import Greeting
from atoll.link.net.member import Member
from atoll.link.net.views import Process, View

_LOOK_S = 0.2
_AFTER_S = 5.0  # for those that are there to agree on a view
_SOON_S = 2.0  # of waiting, after which the user is told for which worker


class Entrance:
    """Decides when a process proposes which view; used in one event loop.

    A run starts when all seats are taken, or after `join_s` if at least `min_workers` are: then the lowest seat
    proposes the first view. A process that finds members at work connects to all of them, and proposes the view in
    which it follows.

    Args:
        member: This process.
        workers: Number of seats.
        min_workers: Least number of workers that start a run.
        join_s: Seconds to wait for the others.
        on_wait: Called with a line that says what is waited for, if that takes more than a moment.
    """

    def __init__(
        self, member: Member, workers: int, min_workers: int, join_s: float, on_wait: Callable[[str], None]
    ) -> None:
        self._member = member
        self._me = member.protocol.me
        self._workers = workers
        self._min_workers = min_workers
        self._join_s = join_s
        self._on_wait = on_wait
        self._proposed = 0  # number of the last view that was proposed here

    async def enter(self) -> None:
        """Wait until this process is a member.

        Raises:
            LinkError: It cannot reach a member within `join_s`, or differs from the others.
        """
        began, told = time.monotonic(), False
        while not self._member.spans:
            if self._member.error is not None:
                raise self._member.error
            waited_s = time.monotonic() - began
            problem = self._propose(waited_s > self._join_s)
            if problem and waited_s > self._join_s + _AFTER_S:
                raise LinkError(f"{problem} within {self._join_s:g} s", worker=self._me.seat)
            if problem and not told and waited_s > _SOON_S:
                told = True
                self._on_wait(f"{problem}; waiting at most {self._join_s:g} s")
            self._member.membership.changed.clear()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self._member.membership.changed.wait()
            except TimeoutError:
                continue

    def _propose(self, late: bool) -> str:
        """Propose a view, if it is time; return what is missing."""
        membership, view = self._member.membership, self._member.membership.view
        if view.over:
            raise run_is_over(self._me.seat)
        if view.has(self._me):
            return f"the members of view {view.number} have not all answered"
        if any(membership.is_present(process) for process in view.members if process.seat != self._me.seat):
            return self._join(view)
        return self._start(view, late)

    def _join(self, view: View) -> str:
        """Join the members that are at work."""
        others = [process for process in view.members if process.seat != self._me.seat]
        if missing := self._not_connected(others):
            return missing
        self._offer(view.admitting(self._me.seat, self._me.life))
        return ""

    def _start(self, view: View, late: bool) -> str:
        """Start with all that are present."""
        present = {Process(seat, known.life) for seat, known in self._member.membership.present.items()} | {self._me}
        if len(present) < self._workers and not (late and len(present) >= self._min_workers):
            here = {process.seat for process in present}
            return f"{_workers([seat for seat in range(self._workers) if seat not in here])} did not come"
        if missing := self._not_connected(present - {self._me}):
            return missing
        starting = self._starting(present)
        if self._me in starting and min(starting) == self._me:
            self._offer(View(view.number + 1, {process.seat: process.life for process in starting}))
        return ""

    def _starting(self, present: set[Process]) -> set[Process]:
        """Return the processes that start together: most of those that resume, or else those that are furthest.

        The others are new, or behind, as after a crash that some had not saved for, and join once these have begun.

        Raises:
            LinkError: Processes that begin a run from nothing differ.
        """
        groups: dict[tuple[tuple[str, str], ...], set[Process]] = {}
        for process in present:
            greeting = self._member.greetings[process]
            if not greeting.steps and (differs := self._difference(greeting)):
                problem = f"worker {self._me.seat} and worker {process.seat} differ in {differs}"
                raise LinkError(problem, worker=process.seat)
            groups.setdefault(tuple(sorted(greeting.start.items())), set()).add(process)
        steps = {start: self._member.greetings[min(group)].steps for start, group in groups.items()}

        def rank(start: tuple[tuple[str, str], ...]) -> tuple[bool, int, int, int]:
            return steps[start] > 0, len(groups[start]), steps[start], -min(groups[start]).seat

        return groups[max(groups, key=rank)]

    def _difference(self, theirs: Greeting) -> str | None:
        own = self._member.greetings[self._me]
        return None if own.steps else describe_differences(own.start, theirs.start)

    def _not_connected(self, processes: "set[Process] | list[Process]") -> str:
        """Return which processes this one has not met, and why; empty if it has met all."""
        missing = sorted(process for process in processes if process not in self._member.greetings)
        if not missing:
            return ""
        why = self._member.peers.problem(missing[0])
        advice = "check that one of the two can reach the other, or put both on an overlay network"
        return f"worker {self._me.seat} and {_workers([p.seat for p in missing])} cannot connect ({why}): {advice}"

    def _offer(self, view: View) -> None:
        if view.number > self._proposed:
            self._proposed = view.number
            self._member.membership.propose(view)


def run_is_over(worker: int) -> LinkError:
    """Return the error of a worker that comes after the others have finished."""
    advice = "copy the model from the folder of another worker; another run needs a registry with another folder"
    return LinkError(f"worker {worker} comes too late: the others have finished the run; {advice}", worker=worker)


def _workers(seats: list[int]) -> str:
    shown = ", ".join(map(str, seats[:10])) + (" ..." if len(seats) > 10 else "")
    return f"worker{'s' if len(seats) > 1 else ''} {shown}"
