"""Runs one process's part in a run of changing members: carries out what the protocol decides, in one event loop.

`Protocol` is pure. Here are its hands: peers that messages go to, the registry that views are offered to, threads that
reduce, and the rounds that the training thread waits for.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol as Interface

from atoll.errors import ExcludedError, LinkError
from atoll.link.base import FragmentState, RoundId, describe_differences
from atoll.link.net.actions import (
    Action,
    Adopt,
    Complete,
    Exclude,
    Message,
    Progress,
    Propose,
    Reduce,
    RoundMessage,
    Send,
)
from atoll.link.net.donor import Donor
from atoll.link.net.event_loop import event_loop
from atoll.link.net.greeting import Greeting
from atoll.link.net.held_bytes import MOST_HELD
from atoll.link.net.membership import Membership
from atoll.link.net.messages import (
    Ask,
    PartMean,
    decode_bulk,
    decode_control,
    encode_control,
    encode_round,
    encode_state,
)
from atoll.link.net.open_round import BadPayloadError, OpenRound
from atoll.link.net.peers import Peers
from atoll.link.net.protocol import Protocol
from atoll.link.net.round_table import RoundTable
from atoll.link.net.session import REFUSED
from atoll.link.net.traffic import Line
from atoll.link.net.views import Decision, Process, Told
from atoll.link.net.worker_status import MOST_ROUNDS, WorkerStatus

_LEAVE_S = 5.0  # in which others that may do without a lost member agree on a view
_DEAD_END_S = 20.0  # the same, if there may be no others
_OPENED_S = 0.005


@dataclass(frozen=True, slots=True)
class Span:
    """Holds the members that owe payloads from a step on, as they were when the span began."""

    first_step: int
    view: int
    weights: Mapping[int, float]
    """Worker -> weight."""


class Follower(Interface):
    """Is told what concerns a process that has joined, and does not yet send."""

    def adopt(self, decision: Decision) -> None:
        """Take a decision."""

    def take(self, state: FragmentState) -> None:
        """Take a fragment's state."""

    def fail(self, error: Exception) -> None:
        """End every wait with an error."""


class Member:
    """Drives one process; every method runs in its event loop unless it says otherwise.

    Args:
        protocol: The protocol's state of this process.
        membership: This process's side of the registry.
        peers: Connections to the other processes.
        greeting: What this process has told the others of itself.
        workers: Number of seats.
        on_decision: Called with every decision after a change of the view.
    """

    def __init__(
        self,
        protocol: Protocol,
        membership: Membership,
        peers: Peers,
        greeting: Greeting,
        workers: int,
        on_decision: Callable[[Decision], None],
    ) -> None:
        self.protocol = protocol
        self.membership = membership
        self.peers = peers
        self.greetings: dict[Process, Greeting] = {protocol.me: greeting}
        """What every process that has been met has told of itself."""
        self.donor = Donor(protocol, self._give)
        self.rounds = RoundTable(workers, self._reduced)
        self.spans: list[Span] = []
        """Who owes payloads from which step on, since this process became a member."""
        self.error: Exception | None = None
        """Why this process cannot go on."""
        self.losses: dict[int, str] = {}
        """Seat -> why its last connection has ended; the text continues "worker 3 ..."."""
        self.follower: Follower | None = None
        """What this process does until it sends; None if it started with the others."""
        self._on_decision = on_decision
        peers.answer_observers(lambda: self.status().model_dump_json().encode())

    def status(self) -> WorkerStatus:
        """Return what an observer is told of this worker."""
        rates = self.peers.rates().values()
        rounds = [(round_id.step, round_id.fragment) for round_id in self.rounds.on_their_way()[:MOST_ROUNDS]]
        sent, received = sum(rate.sent for rate in rates), sum(rate.received for rate in rates)
        return WorkerStatus(step=max(0, self.protocol.step), sent_bytes=sent, received_bytes=received, rounds=rounds)

    async def lines(self) -> Mapping[int, Line]:
        """Return worker -> what this worker has exchanged with it."""
        return self.peers.lines()

    # ------------------------------------------------------------------ what the training thread does

    def start(self, opened: OpenRound, staging: Executor) -> None:
        """Open a round once its offer is settled, in another thread if that takes long; from the training thread."""
        event_loop().post(lambda: self.protocol.advance(opened.round_id.step))

        def settle() -> None:
            try:
                opened.settle()
            except Exception as fault:
                opened.fail(fault)
                raise
            event_loop().post(lambda: self.open(opened))

        if opened.is_settled:
            settle()
        else:
            staging.submit(settle)

    def open(self, opened: OpenRound) -> None:
        """Start a round whose offer is settled."""
        if self.error is not None:
            opened.fail(self.error)
            return
        self.rounds.add(opened)
        self._act(self.protocol.open(opened.round_id, opened))
        for peer, message, view in self.rounds.take_unchecked(opened.round_id.fragment):
            self._check_and_receive(peer, message, view)

    def advance(self, step: int, applied: int) -> None:
        """Note that this worker has made `step` inner steps, and has applied all rounds up to `applied`."""
        self.protocol.advance(step)
        if self.rounds.drop(applied) or not self.protocol.has_state:
            self._act(self.protocol.has_applied(applied))
        self.donor.give_settled()

    async def wait_opened(self, step: int) -> None:
        """Wait until it is certain who owes payloads to rounds of a step that this worker has opened."""
        while self.error is None and not self.protocol.has_opened(step):
            await asyncio.sleep(_OPENED_S)

    def leave_behind(self, round_id: RoundId) -> bool:
        """Return whether this worker proposes to complete a round, and those before it, without late members."""
        actions = self.protocol.leave_behind(round_id)
        self._act(actions)
        return bool(actions)

    # ------------------------------------------------------------------ what the registry tells

    def on_change(self) -> None:
        """Meet new processes, and take a new view."""
        me, view = self.protocol.me, self.membership.view
        for peer in self.peers.wanted:
            if not self.membership.is_present(peer) and not view.has(peer):
                self.peers.drop(peer)
        for seat, known in self.membership.present.items():
            if seat != me.seat:
                self.peers.meet(Process(seat, known.life), known.addresses, dial=seat < me.seat)
        if view.has(me) or self.protocol.view.has(me):  # it is a member, or was one
            self._act(self.protocol.on_view(view))
        self.membership.changed.set()

    # ------------------------------------------------------------------ what peers do

    def connected(self, peer: Process, greeting: bytes) -> None:
        """Take in what a process tells of itself, and send what waited for it."""
        try:
            theirs = Greeting.parse(greeting)
        except ValueError as fault:
            self._refuse(peer, f"it greets with {fault}")
            return
        own = self.greetings[self.protocol.me]
        if differs := describe_differences(own.terms, theirs.terms):
            problem = f"worker {self.protocol.me.seat} and worker {peer.seat} differ in {differs}"
            if self.protocol.adopted:
                self._refuse(peer, problem)
            else:
                self.fail(LinkError(problem, worker=peer.seat))
            return
        self.greetings[peer] = theirs
        self.protocol.flush.meet(peer)
        if (told := self.protocol.flush.told) is not None and self.protocol.view.has(peer):  # it was not connected then
            self.peers.send(peer, encode_control(told, self.protocol.adopted))
        self.membership.changed.set()

    def lost(self, peer: Process, why: str) -> None:
        """Note that a process is gone."""
        self.losses[peer.seat] = why
        if why.startswith(REFUSED):
            self.fail(LinkError(f"worker {peer.seat} {why}", worker=self.protocol.me.seat))
        else:
            self._act(self.protocol.lose(peer))
            self._watch_for_dead_end()
        self.membership.changed.set()

    def _watch_for_dead_end(self) -> None:
        """Leave, to join anew, or fail, if no view comes though the registry answers.

        A member that has just joined does not know all rounds that the lost ones may have completed, so it may not go
        on without them. Where two such members have lost each other, the others wait for both.
        """

        protocol, view = self.protocol, self.protocol.view.number

        def is_stuck() -> bool:
            return protocol.view.number == view and protocol.is_held_up and not protocol.has_caught_up

        def leave() -> None:
            if is_stuck() and protocol.is_dispensable:
                self.membership.propose(protocol.view.without([protocol.me.seat]))

        def look() -> None:
            if is_stuck():
                problem = f"worker {protocol.me.seat} had just joined, and has lost all workers that knew the whole run"
                self.fail(LinkError(f"{problem}: start them again", worker=protocol.me.seat))

        self.membership.when_reached(leave, _LEAVE_S)
        self.membership.when_reached(look, _DEAD_END_S)

    def control(self, peer: Process, data: bytes) -> None:
        """Take in a control message."""
        try:
            message, view = decode_control(data)
        except ValueError as fault:
            self._refuse(peer, f"it sent {fault}")
            return
        if isinstance(message, Ask):
            self.donor.ask(peer, message)
            return
        if isinstance(message, Told):
            self.rounds.note_step(message.step)
        self._receive(peer, message, view)
        if isinstance(message, Progress):
            self.donor.give_settled()

    def bulk(self, peer: Process, header: bytes, body: bytearray) -> None:
        """Take in a payload, or a fragment's state."""
        try:
            message = decode_bulk(header, body)
            if isinstance(message, FragmentState):
                if self.follower is not None:
                    self.follower.take(message)
                return
        except ValueError as fault:
            self._refuse(peer, f"it sent {fault}")
            return
        received, view = message
        if self.rounds.receive(peer, received.round_id, len(header) + len(body)):
            self._hold_no_more(peer)
            return
        self._check_and_receive(peer, received, view)

    def _check_and_receive(self, peer: Process, message: RoundMessage, view: int) -> None:
        try:
            usable = self.rounds.check(peer, message, view)
        except ValueError as fault:
            self._refuse(peer, f"it sent {fault}")
            return
        if usable:
            self._receive(peer, message, view)

    def _receive(self, peer: Process, message: Message, view: int) -> None:
        if self.protocol.flush.has_room_for(peer, view):
            self._act(self.protocol.receive(peer, message, view))
        else:
            self._refuse(peer, "it sent too many messages of views that this worker does not know")

    def _hold_no_more(self, peer: Process) -> None:
        """End the process that is at fault for what is held: one that has not caught up may be too slow itself."""
        if self.protocol.has_caught_up:
            self._refuse(peer, f"it sent more than {MOST_HELD} bytes ahead of what this worker has applied")
        else:
            seat = self.protocol.me.seat
            why = f"worker {seat} cannot keep up: it holds {MOST_HELD} bytes of rounds that it has not applied"
            self.fail(LinkError(why, worker=seat))

    def _refuse(self, peer: Process, why: str) -> None:
        """Go on without a process that does not behave."""
        self.peers.drop(peer, f"{REFUSED}{why}")
        self.lost(peer, why)

    def _give(self, to: Process, state: FragmentState) -> None:
        header, body = encode_state(state)
        self.peers.send_bulk(to, header, body.numpy().data, background=True)

    # ------------------------------------------------------------------ what the protocol asks for

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Send):
                self._send(action)
            elif isinstance(action, Propose):
                if self.error is None:  # one that cannot go on does not decide about others
                    self.membership.propose(action.view)
            elif isinstance(action, Reduce):
                self.rounds.reduce(action)
            elif isinstance(action, Complete):
                self.rounds.complete(action)
            elif isinstance(action, Adopt):
                self._adopt(action.decision)
            elif isinstance(action, Exclude):
                self._exclude(action)

    def _send(self, action: Send) -> None:
        message = action.message
        if isinstance(message, Progress | Told):
            self.peers.send(action.to, encode_control(message, action.view))
        else:
            header, body = encode_round(message, action.view)
            self.rounds.sent_bytes[message.round_id] += len(header) + body.numel()
            self.peers.send_bulk(action.to, header, body.numpy().data)

    def _reduced(self, reduce: Reduce, result: PartMean | Exception) -> None:
        if isinstance(result, BadPayloadError):
            self._refuse(result.sender, f"it {result}")
        elif isinstance(result, Exception):
            self.fail(result)
        else:
            self._act(self.protocol.reduced(reduce.round_id, reduce.attempt, reduce.part, result))

    def _adopt(self, decision: Decision) -> None:
        weights = {p.seat: self.greetings[p].weight for p in decision.view.owing}
        self.spans = [*self._spans_in_use(), Span(decision.boundary + 1, decision.view.number, weights)]
        for peer in [known for known in self.greetings if known != self.protocol.me]:
            life = decision.view.lives.get(peer.seat)
            if life is not None and life != peer.life:  # its seat was taken again
                self.peers.drop(peer)
                del self.greetings[peer]
        self.rounds.note_step(decision.boundary)
        self.donor.adopt(decision)
        self._on_decision(decision)
        if self.follower is not None:
            self.follower.adopt(decision)
        self.membership.changed.set()
        if self.protocol.is_held_up:
            self._watch_for_dead_end()

    def _exclude(self, action: Exclude) -> None:
        seat = self.protocol.me.seat
        seen = (
            "; ".join(f"worker {other} {why}" for other, why in sorted(self.losses.items()))
            or "it was cut off, or late"
        )
        why = f"the others have gone on without worker {seat} (view {action.view.number}): {seen}"
        self.fail(ExcludedError(why, worker=seat))

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of those that owe payloads to rounds of a step; from any thread."""
        spans = self.spans
        return next((span.weights for span in reversed(spans) if span.first_step <= step), spans[0].weights)

    def _spans_in_use(self) -> list[Span]:
        """Return the spans of rounds that somebody has not applied yet."""
        settled = self.protocol.settled_step
        old = [number for number, span in enumerate(self.spans) if span.first_step <= settled]
        return self.spans[old[-1] :] if old else self.spans

    # ------------------------------------------------------------------ failure

    def fail(self, error: Exception) -> None:
        """End every wait with an error; the first one counts."""
        if self.error is None:
            self.error = error
            self.rounds.fail(error)
            if self.follower is not None:
                self.follower.fail(error)
            self.membership.changed.set()
