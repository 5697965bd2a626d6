"""Runs one process's part in a run whose members are fixed: a single view, and the loss of one ends the run on all."""

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from typing import NamedTuple

from atoll.errors import LinkError
from atoll.link.base import RoundId
from atoll.link.net.actions import Action, Complete, Mean, Part, Reduce, Result, RoundMessage, Whole
from atoll.link.net.greeting import Greeting
from atoll.link.net.identity import Identity
from atoll.link.net.member import Member
from atoll.link.net.membership import Membership
from atoll.link.net.messages import PartMean
from atoll.link.net.open_round import BadPayloadError, OpenRound
from atoll.link.net.peers import Peers
from atoll.link.net.protocol import Protocol
from atoll.link.net.registry import Insecure
from atoll.link.net.session import CLOSED
from atoll.link.net.views import Process, View

_LOOK_S = 0.1


class Fault(NamedTuple):
    """Tells why a run with fixed members cannot go on."""

    worker: int
    """The worker to blame, as far as this one can see."""
    why: str
    """Continues "worker 3 ..."."""
    closed: bool = False
    """It has only been seen to close its connection."""


class FixedMember(Member):
    """Drives one process among members that never change; every method runs in its event loop.

    Args:
        me: This process.
        workers: Number of workers.
        security: This process's identity, or "none" on a private cable.
        weight: This worker's share of every mean, before normalisation.
        silent_s: Seconds after which a worker that says nothing is lost.
        deadline_s: Seconds that a round may take.
        on_fault: Called with everything that ends the run.
    """

    def __init__(
        self,
        me: Process,
        workers: int,
        security: Identity | Insecure,
        weight: float,
        silent_s: float,
        deadline_s: float,
        on_fault: Callable[[Fault], None],
    ) -> None:
        greeting = Greeting(terms={}, start={}, weight=weight)
        peers = Peers(me, security, self, greeting=greeting.encode(), silent_s=silent_s)
        membership = Membership(None, me, lambda: None, lambda fault: None)
        super().__init__(Protocol(me, None, workers), membership, peers, greeting, workers, lambda decision: None)
        self._deadline_s = deadline_s
        self._on_fault = on_fault
        self._closed = False
        self._deadlines: dict[RoundId, asyncio.TimerHandle | None] = {}  # of the rounds that are not complete

    # ------------------------------------------------------------------ meet

    async def meet(self, others: Mapping[Process, str], within_s: float) -> None:
        """Connect to all other members.

        Args:
            others: The process of every other worker, and HOST:PORT where it listens.
            within_s: Seconds within which all must be connected.

        Raises:
            LinkError: One is not, or was lost.
        """
        me, until = self.protocol.me, time.monotonic() + within_s
        for peer, address in others.items():
            self.peers.meet(peer, [address], dial=peer < me)
        self._act(self.protocol.on_view(View(1, {process.seat: process.life for process in (me, *others)})))
        while not self.spans and self.error is None:
            if time.monotonic() > until:
                raise self._not_met(others, within_s)
            self.membership.changed.clear()
            try:
                async with asyncio.timeout(_LOOK_S):
                    await self.membership.changed.wait()
            except TimeoutError:
                continue
        if self.error is not None:
            raise self.error

    def _not_met(self, others: Mapping[Process, str], within_s: float) -> LinkError:
        missing = sorted(peer for peer in others if peer not in self.greetings) or sorted(others)
        names = ", ".join(f"worker {peer.seat}" for peer in missing)
        why = self.peers.problem(missing[0]) or "killed, stopped or cut off"
        problem = f"{names} did not open a connection within {within_s:g} s: {why}"
        problem = f"worker {self.protocol.me.seat} cannot connect to the other workers: {problem}"
        return LinkError(problem, worker=missing[0].seat)

    # ------------------------------------------------------------------ rounds

    def start(self, opened: OpenRound, staging: Executor) -> None:
        """Settle a round's offer, and open it; from the training thread."""
        self._deadlines[opened.round_id] = None
        super().start(opened, staging)

    def open(self, opened: OpenRound) -> None:
        """Start a round whose offer is settled, and its clock."""
        round_id = opened.round_id
        if self.error is None:
            late = asyncio.get_running_loop().call_later(self._deadline_s, self._too_late, round_id)
            self._deadlines[round_id] = late
        super().open(opened)

    def position(self) -> str | None:
        """Return the oldest round that is not complete; from any thread."""
        return str(min(waiting)) if (waiting := list(self._deadlines)) else None

    def _too_late(self, round_id: RoundId) -> None:
        me = self.protocol.me
        awaited = [peer for peer in self.protocol.awaited(round_id) if peer != me] or [me]
        cause = "it was stopped or cut off, or the link is too slow for this round"
        why = f"did not send its part within {self._deadline_s:g} s: {cause}"
        self._on_fault(Fault(awaited[0].seat, why))

    def _act(self, actions: list[Action]) -> None:
        complete = [action.round_id for action in actions if isinstance(action, Complete)]
        for round_id in complete:
            _cancel(self._deadlines.pop(round_id))
            self.protocol.forget(round_id)  # nobody asks for it again
        super()._act(actions)
        for round_id in complete:
            self.rounds.forget(round_id)

    def _reduced(self, reduce: Reduce, result: PartMean | Exception) -> None:
        if isinstance(result, Exception) and not isinstance(result, BadPayloadError):
            self._on_fault(Fault(self.protocol.me.seat, f"failed: {type(result).__name__}: {result}"))
        else:
            super()._reduced(reduce, result)

    # ------------------------------------------------------------------ what peers do

    def _check_and_receive(self, peer: Process, message: RoundMessage, view: int) -> None:
        try:
            self._check_sender(peer, message)
        except ValueError as fault:
            self._refuse(peer, f"it sent {fault}")
        else:
            super()._check_and_receive(peer, message, view)

    def _check_sender(self, peer: Process, message: RoundMessage) -> None:
        """Refuse what a member may not send; ValueError says what is wrong."""
        owner = peer
        if isinstance(message, Whole):
            owner = message.owner
        elif isinstance(message, Mean):
            owner = self.protocol.view.members[message.part % len(self.protocol.view.members)]
        if owner != peer or isinstance(message, Result):
            raise ValueError(f"a payload of {message.round_id} that only another worker may send")
        if isinstance(message, Whole | Part) and message.payload is not None:
            weight, agreed = message.payload.member.weight, self.greetings[peer].weight
            if weight != agreed:
                raise ValueError(f"a weight of {weight} where {agreed} was agreed at the start")

    def lost(self, peer: Process, why: str) -> None:
        """Note that a process is gone, which ends the run."""
        self._on_fault(Fault(peer.seat, why, closed=why.startswith(CLOSED)))

    def _refuse(self, peer: Process, why: str) -> None:
        self._on_fault(Fault(peer.seat, why.removeprefix("it ")))

    # ------------------------------------------------------------------ end

    def part(self, reason: str = "") -> None:
        """End the connections to all others at once; what is queued is lost.

        Args:
            reason: What they are told; continues "worker 0 ...".
        """
        for peer in [known for known in self.protocol.view.members if known != self.protocol.me]:
            self.peers.drop(peer, reason)

    async def close(self) -> None:
        """Close everything, unless it is closed."""
        if self._closed:
            return
        self._closed = True
        for late in self._deadlines.values():
            _cancel(late)
        await self.peers.close()
        await self.membership.close()
        self.rounds.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
