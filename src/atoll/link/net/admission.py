"""Leads a process that follows the members of a run to where it sends as they do."""

from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from atoll.link.base import FragmentState
from atoll.link.net.member import Member
from atoll.link.net.messages import Ask, encode_control
from atoll.link.net.views import Decision, Process

Result = TypeVar("Result")


class Runner(Protocol):
    """Runs work in the event loop of the link."""

    def __call__(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it and wait for its result, in the training thread."""


class NetAdmission:
    """Collects the shared state from donors, and promotes this process when its training thread has caught up.

    Args:
        member: This process, which follows.
        boundary: The step after which all rounds reach it.
        run: Runs work in the event loop; for the training thread.
    """

    def __init__(self, member: Member, boundary: int, run: Runner) -> None:
        self._member = member
        self._boundary = boundary
        self._run = run
        self._states: dict[int, Future[FragmentState]] = {}
        self._asked: dict[int, Process] = {}  # fragment -> donor
        self._promoting = False
        self._promoted: Future[int] = Future()
        member.follower = self

    # ------------------------------------------------------------------ the training thread

    def states(self, fragments: int) -> Iterator[FragmentState]:
        """Yield what the members have alike of every fragment, from several donors at a time."""
        self._run(self._ask_for(fragments))
        for fragment in range(fragments):
            yield self._states[fragment].result()

    def newest_step(self) -> int:
        """Return the newest step up to which a member has applied all rounds.

        Later rounds may wait for more members to train, and so for this one to be promoted.
        """
        return max(self._boundary, self._member.protocol.newest_applied)

    def promote(self) -> int:
        """Become a member that sends, and return the last step whose rounds do without this worker."""
        self._run(self._promote())
        return self._promoted.result()

    # ------------------------------------------------------------------ the event loop

    def adopt(self, decision: Decision) -> None:
        """Ask other donors for what a lost one has not given; offer the promotion again if another view came first."""
        me = self._member.protocol.me
        if me in decision.view.owing:
            if not self._promoted.done():
                self._promoted.set_result(decision.boundary)
            return
        self._ask_again()
        if self._promoting:
            self._member.membership.propose(decision.view.promoting(me.seat))

    def fail(self, error: Exception) -> None:
        """Raise this error in the training thread."""
        for state in self._states.values():
            if not state.done():
                state.set_exception(error)
        if not self._promoted.done():
            self._promoted.set_exception(error)

    async def _ask_for(self, fragments: int) -> None:
        self._states = {fragment: Future() for fragment in range(fragments)}
        if self._member.error is not None:
            self.fail(self._member.error)
        self._ask_again()

    async def _promote(self) -> None:
        self._promoting = True
        if self._member.error is not None:
            self.fail(self._member.error)
        protocol = self._member.protocol
        self._member.membership.propose(protocol.view.promoting(protocol.me.seat))

    def _ask_again(self) -> None:
        """Ask for every fragment that no donor is about to give."""
        donors = [process for process in self._member.protocol.view.owing if process != self._member.protocol.me]
        asks: dict[Process, list[int]] = {}
        for fragment, state in self._states.items():
            if not state.done() and donors and self._asked.get(fragment) not in donors:
                donor = self._asked[fragment] = donors[fragment % len(donors)]
                asks.setdefault(donor, []).append(fragment)
        for donor, fragments in asks.items():
            ask = Ask(tuple(fragments), self._boundary)
            self._member.peers.send(donor, encode_control(ask, self._member.protocol.adopted))

    def take(self, state: FragmentState) -> None:
        """Take a fragment's state from a donor."""
        waiting = self._states.get(state.fragment)
        if waiting is not None and not waiting.done() and state.applied >= self._boundary:
            waiting.set_result(state)
