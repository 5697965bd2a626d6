"""Stands for a worker in the simulated network: opens rounds, applies them, joins, and gives its state to joiners.

It trains nothing: its payload is its name, and its anchor is the list of what was averaged into it. So a payload that
is counted twice, by some only, or not at all is seen at once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from atoll.link.base import RoundId
from atoll.link.net.actions import Action, Adopt, Complete, Exclude, Mean, Message, Propose, Reduce, Result, Send, Whole
from atoll.link.net.protocol import Protocol
from atoll.link.net.views import Decision, Process, Told, View

if TYPE_CHECKING:
    from simulated_net import Net

Applied = tuple[RoundId, tuple[Any, ...]]
"""A round and the payloads that were averaged in it."""


@dataclass(frozen=True)
class Payload:
    """Stands for a worker's delta."""

    round_id: RoundId
    owner: Process

    @property
    def whole(self) -> "Payload":
        """Itself."""
        return self

    def part_count(self, members: int) -> int:
        """One each."""
        return members

    def part(self, part: int, members: int) -> tuple["Payload", int, int]:
        """Names the part."""
        return (self, part, members)


@dataclass(frozen=True)
class State:
    """Is what a joiner gets: anchors with all rounds up to a step."""

    step: int
    anchors: dict[int, list[Applied]]


class Worker:
    """Is one process of a run."""

    def __init__(self, net: "Net", me: Process, *, joins: bool) -> None:
        self.net, self.me, self.plan = net, me, net.plan
        told = joins or net.random.random() < 0.5  # a process that starts with others need not say so
        self.protocol = Protocol(me, None if told else 0, net.plan.min_workers)
        self.step = 0
        self.anchors: dict[int, list[Applied]] = {f: [] for f in range(self.plan.fragments)}
        self.completed: dict[RoundId, tuple[Any, ...]] = {}
        self.reducing: set[tuple[RoundId, int, int]] = set()
        self.joins = joins
        self.has_state = not joins
        self.start_step = 0
        self.applied = 0
        self.alive = True
        self.finished = False
        self.stopped_until = 0.0
        self.sends_left: int | None = None
        """The process is killed after this many messages more."""
        self.lost: set[Process] = set()
        self.asleep: list[Callable[[], None]] = []
        self.donating: dict[Process, int] = {}
        self.donations: dict[Process, State] = {}
        self.running = False
        self.seen = 0

    # -------------------------------------------------------------- the process

    def wake(self, act: Callable[[], None]) -> None:
        """Act now, or when the process goes on."""
        if not self.alive:
            return
        if self.net.now < self.stopped_until:
            self.asleep.append(act)
            if len(self.asleep) == 1:
                self.net.after(self.stopped_until - self.net.now, self._go_on)
            return
        act()

    def _go_on(self) -> None:
        if self.alive and self.net.now < self.stopped_until:
            self.net.after(self.stopped_until - self.net.now, self._go_on)
            return
        asleep, self.asleep = self.asleep, []
        for act in asleep:
            if self.alive:
                act()

    def on_view(self, view: View) -> None:
        """Hear from the registry; what is older than the last word does not count."""
        if view.number <= self.seen:
            return
        self.seen = view.number
        if view.has(self.me) or self.protocol.view.number or not self.joins:
            self.do(self.protocol.on_view(view))

    def lose(self, process: Process) -> None:
        """Notice that another process does not answer."""

        def notice() -> None:
            self.lost.add(process)
            self.do(self.protocol.lose(process))
            self.net.after(1.0, lambda: self.wake(lambda: self.leave(process)))

        self.wake(notice)

    def leave(self, lost: Process) -> None:
        """Leave if nobody removes a lost process that this one may not remove."""
        view = self.protocol.view
        if view.has(lost) and view.has(self.me):
            if not self.protocol.has_caught_up:
                self.net.faults.hit.add(self.me)
                self.net.registry.propose(view.without([self.me.seat]))
            self.net.after(1.0, lambda: self.wake(lambda: self.leave(lost)))

    def hurry(self, round_id: RoundId) -> None:
        """Do without those that a round waits for."""
        self.wake(lambda: self.do(self.protocol.leave_behind(round_id)))

    def do(self, actions: list[Action]) -> None:
        """Carry out what the protocol asks for."""
        for action in actions:
            match action:
                case Send():
                    self.send(action)
                case Propose(view):
                    self.net.laws.check_proposal(self, view)
                    self.net.registry.propose(view)
                case Reduce(round_id, attempt, part, payloads):
                    assert (round_id, attempt, part) not in self.reducing, "a part is reduced twice"
                    self.reducing.add((round_id, attempt, part))
                    assert {(p.round_id, n) for p, n, _ in payloads.values()} == {(round_id, part)}
                    assert [p.owner for p, _, _ in payloads.values()] == list(payloads)
                    mean = tuple(payload for payload, _, _ in payloads.values())
                    self.net.after(self.net.reducing(), partial(self.reduced, round_id, attempt, part, mean))
                case Complete():
                    self.complete(action)
                case Adopt(decision):
                    self.adopted(decision)
                case Exclude():
                    self.alive = False
                    self.net.replace(self)
            if not self.alive:
                return
        self.go_on()

    def send(self, action: Send) -> None:
        """Send a message, unless the process is killed before it."""
        message = action.message
        if (moment := _moment(self.me, message)) is not None:
            self.net.faults.at(moment, self)
        if self.sends_left is not None:
            self.sends_left -= 1
            if self.sends_left < 0:
                self.net.faults.die(self)
                return
        self.net.send(self.me, action.to, message, action.view)

    def reduced(self, round_id: RoundId, attempt: int, part: int, mean: tuple[Payload, ...]) -> None:
        """Give the protocol a mean that it has asked for."""
        self.wake(lambda: self.do(self.protocol.reduced(round_id, attempt, part, mean)))

    def complete(self, action: Complete) -> None:
        """Take the payloads that are averaged in a round."""
        self.completed[action.round_id] = self.net.laws.check_round(self, action)
        self.net.faults.at("completes", self)

    # -------------------------------------------------------------- training

    def due(self, step: int) -> list[RoundId]:
        """Rounds that are sent after a step."""
        return self.plan.due(step)

    def go_on(self) -> None:
        """Apply what is due as soon as it is complete; then make the next step."""
        if self.has_state and self.alive:
            self.net.laws.check_settled(self)
            self.donate()
        if self.running or not self.has_state or not self.protocol.eras or not self.alive or self.finished:
            return
        sent = self.step - self.plan.delay
        due = [r for r in self.due(sent) if sent > self.start_step]
        if not all(r in self.completed for r in due):
            self.promote()
            return
        for round_id in due:
            self.anchors[round_id.fragment].append((round_id, self.completed.pop(round_id)))
        self.running = True
        if sent > self.start_step:
            self.applied = sent
            self.do(self.protocol.has_applied(sent))
        if self.step >= self.plan.steps + self.plan.delay:
            self.finished = True
            return
        catching_up = self.me.seat in self.protocol.view.following
        self.net.after(0.001 if catching_up else self.net.compute(self.me.seat), lambda: self.wake(self._step))

    def _step(self) -> None:
        self.step += 1
        due = self.due(self.step) if self.step <= self.plan.steps else []
        if due:  # the payload may take a while to be computed
            self.protocol.advance(self.step)
            self.net.after(self.net.between_opens(), lambda: self.wake(lambda: self._open(due)))
        else:
            self._open([])

    def _open(self, rounds: list[RoundId]) -> None:
        """Open rounds one after the other; anything may happen between two of them."""
        if rounds:
            self.net.faults.at("opens", self)
            self.do(self.protocol.open(rounds[0], Payload(rounds[0], self.me)))
        if len(rounds) > 1:
            self.net.after(self.net.between_opens(), lambda: self.wake(lambda: self._open(rounds[1:])))
            return
        self.running = False
        self.go_on()

    # -------------------------------------------------------------- joining

    def ask_to_join(self) -> None:
        """Offer the registry a view with this process; again until one is accepted."""
        if not self.alive or self.protocol.view.number:
            return
        registry = self.net.registry
        if self.me in registry.admitted and not registry.view.has(self.me):  # lost before it knew that it was in
            self.alive = False
            self.net.replace(self)
            return
        if not registry.view.has(self.me):
            registry.propose(registry.view.admitting(*self.me))
        self.net.after(1.0 + self.net.latency(), lambda: self.wake(self.ask_to_join))

    def promote(self) -> None:
        """Having caught up, owe payloads from now on."""
        view = self.protocol.view
        if self.me.seat in view.following and view.number == self.protocol.adopted:
            self.net.faults.at("promotes", self)
            self.net.registry.propose(view.promoting(self.me.seat))

    def adopted(self, decision: Decision) -> None:
        """The first member in seat order gives the shared state to those that follow."""
        view = decision.view
        self.net.laws.check_decision(self, decision)
        self.net.faults.at("adopts", self)
        if self.has_state and view.owing and view.owing[0] == self.me:
            for member in view.members:
                if member.seat in view.following:
                    self.donating[member] = decision.boundary

    def donate(self) -> None:
        """Copy the shared state once it has all rounds that the receiver will not see; send it when it is settled."""
        for follower, boundary in list(self.donating.items()):
            if self.applied >= boundary:
                anchors = {fragment: list(rounds) for fragment, rounds in self.anchors.items()}
                self.donations.setdefault(follower, State(self.applied, anchors))
                del self.donating[follower]
        for follower, state in list(self.donations.items()):
            if self.protocol.is_settled(state.step):
                self.net.faults.at("gives state", self)
                self.net.send(self.me, follower, state)
                del self.donations[follower]

    def take_state(self, state: State) -> None:
        """Continue from what a donor gave."""
        if self.has_state:
            return
        self.net.faults.at("takes state", self)
        self.has_state = True
        self.step = self.start_step = self.applied = state.step
        self.anchors = {f: list(rounds) for f, rounds in state.anchors.items()}
        self.completed = {r: p for r, p in self.completed.items() if r.step > state.step}
        self.do(self.protocol.has_applied(state.step))


def _moment(me: Process, message: Message) -> str | None:
    """Return what a process is about to do with a message, if a fault may strike just then."""
    if isinstance(message, Told):
        return "tells"
    if isinstance(message, Mean):
        return "sends a mean"
    passes_on = isinstance(message, Result) or (isinstance(message, Whole) and message.owner != me)
    return "passes on" if passes_on else None
