"""Breaks a simulated network: at random times, and at the moments at which a protocol is easiest to break.

A *trap* waits for the n-th time that some process comes to a moment (it tells, adopts, passes on, completes ...) and
then strikes that process: it dies between two of its next messages, stops, is cut off or becomes slow. Faults come in
pairs often enough that a second one hits the flush of the first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from atoll.link.net.views import Process
from simulated_worker import Worker

if TYPE_CHECKING:
    from simulated_net import Net

MOMENTS = (
    "tells",
    "adopts",
    "passes on",
    "sends a mean",
    "completes",
    "opens",
    "promotes",
    "gives state",
    "takes state",
)
MOST_SEATS = 8


@dataclass
class Trap:
    """Strikes at a moment, the `left`-th time."""

    moment: str
    left: int
    strike: Callable[[Worker], None]


class Faults:
    """Draws the faults of one schedule, and carries them out."""

    def __init__(self, net: "Net") -> None:
        self.net = net
        self.random = net.random
        self.hit: set[Process] = set()
        self.last_s = net.plan.steps * 0.04
        """No fault begins later."""
        self.traps: list[Trap] = []
        themes = {
            "none": self._plan_none,
            "any": self._plan_any,
            "relays": self._plan_relays,
            "joins": self._plan_joins,
        }
        themes[net.plan.theme]()

    # -------------------------------------------------------------- themes

    def _plan_none(self) -> None:
        """Let everything go well."""

    def _plan_any(self) -> None:
        """Draw any faults, at any time and at any moment."""
        timed = [self.kill, self.kill, self.stop, self.cut_off, self.lose_registry, self.hurry, self.slow, self.grow]
        for _ in range(self.random.randint(0, 4)):
            self.net.after(self.random.uniform(0.0, self.last_s), self.random.choice(timed))
        strikes = [self.die_soon, self.die_soon, self.die_soon, self.stop, self.cut_off, self.slow, self.hurry_all]
        for _ in range(self.random.randint(0, 5)):
            left = self.random.choice([1, 2, 3, 5, 8, 13])
            self.traps.append(Trap(self.random.choice(MOMENTS), left, self.random.choice(strikes)))

    def _plan_relays(self) -> None:
        """Let one process alone have a result, and die while it passes it on; some follow meanwhile."""
        self.net.after(self.random.uniform(0.0, 0.1), self.grow)
        left = self.random.randint(10, 150)
        self.traps.append(Trap("sends a mean", left, self.die_at_once))
        self.traps.append(Trap("passes on", 1, self.die_at_once))
        if self.random.random() < 0.5:
            self.net.after(
                self.random.uniform(0.0, self.last_s), self.random.choice([self.kill, self.hurry, self.grow])
            )

    def _plan_joins(self) -> None:
        """Let processes join one after the other, and die while they and the others tell and adopt."""
        for _ in range(self.random.randint(1, 3)):
            self.net.after(self.random.uniform(0.0, self.last_s / 2), self.grow)
        for _ in range(self.random.randint(1, 2)):
            self.net.after(self.random.uniform(0.0, self.last_s), self.kill)
        for moment in self.random.sample(["opens", "adopts", "tells", "gives state"], k=2):
            self.traps.append(Trap(moment, self.random.randint(1, 20), self.die_at_once))

    def at(self, moment: str, worker: Worker) -> None:
        """Let the traps of a moment strike."""
        if self.net.now > self.last_s:
            return
        for trap in [trap for trap in self.traps if trap.moment == moment]:
            trap.left -= 1
            if trap.left == 0:
                self.traps.remove(trap)
                trap.strike(worker)
                if self.random.random() < 0.5:
                    second = self.random.choice([self.kill, self.kill, self.cut_off, self.slow, self.hurry, self.grow])
                    self.net.after(self.random.uniform(0.0, 6 * self.net.slowness), second)

    # -------------------------------------------------------------- victims

    def _victim(self, chosen: Worker | None = None) -> Worker | None:
        """Return a process, any if none is given, as long as one that trains and has the shared state is left."""
        net, view = self.net, self.net.registry.view
        alive = [w for w in net.workers if w.alive and not w.finished]
        sound = [w for w in alive if w.protocol.has_caught_up or not (w.joins or w.protocol.view.number)]
        sound = [w for w in sound if w.me in view.owing and w.sends_left is None and net.now >= w.stopped_until]
        if chosen is None and alive:
            chosen = self.random.choice(alive)
        if chosen is None or not chosen.alive or not [w for w in sound if w is not chosen]:
            return None
        self.hit.add(chosen.me)
        return chosen

    # -------------------------------------------------------------- ends

    def kill(self) -> None:
        """End a process at any moment; what it had sent arrives up to some message."""
        victim = self._victim()
        if victim is not None:
            self.die(victim)

    def die_soon(self, worker: Worker) -> None:
        """End a process between two of its next messages."""
        if self._victim(worker) is not None:
            worker.sends_left = self.random.randint(0, 6)

    def die_at_once(self, worker: Worker) -> None:
        """End a process after one or two messages more."""
        if self._victim(worker) is not None:
            worker.sends_left = self.random.randint(0, 2)

    def die(self, worker: Worker) -> None:
        """End a process."""
        worker.alive = False
        for other in self.net.workers:
            self._break(worker.me, other)
        self.net.replace(worker)

    def _break(self, gone: Process, other: Worker) -> None:
        """Cut the connection after some of what is on its way; the other notices later."""
        moment = self.random.uniform(0.0, 3 * self.net.slowness)
        self.net.after(moment, lambda: self.net.cut.add((gone, other.me)))
        self.net.after(moment + self.net.latency(), partial(other.lose, gone))

    # -------------------------------------------------------------- hindrances

    def stop(self, worker: Worker | None = None) -> None:
        """Stop a process for a while; the others take it for dead if it is long."""
        victim = self._victim(worker)
        if victim is None:
            return
        seconds = self.random.choice([0.05, 0.5, 2.0])
        victim.stopped_until = self.net.now + seconds
        if seconds > 0.3:
            for other in self.net.workers:
                if other is not victim:
                    self.net.after(0.3 + self.net.latency(), partial(other.lose, victim.me))

    def cut_off(self, worker: Worker | None = None) -> None:
        """Cut the line between two processes; each takes the other for dead."""
        victim = self._victim(worker)
        others = [w for w in self.net.workers if w.alive and w is not victim]
        if victim is None or not others:
            return
        for other in others if self.random.random() < 0.5 else [self.random.choice(others)]:
            self.hit.add(other.me)
            self._break(victim.me, other)
            self._break(other.me, victim)

    def slow(self, worker: Worker | None = None) -> None:
        """Make the lines of payloads from a process slow, to one other or to all; control messages pass."""
        alive = [w for w in self.net.workers if w.alive]
        sender = worker or self.random.choice(alive)
        receivers = alive if self.random.random() < 0.3 else [self.random.choice(alive)]
        until = self.net.now + self.random.choice([0.1, 0.5, 1.0])
        for receiver in receivers:
            self.net.slow[sender.me, receiver.me] = until

    def lose_registry(self) -> None:
        """Have no registry for a while."""
        self.net.registry.away_until = self.net.now + self.random.choice([0.05, 0.5])

    def hurry(self) -> None:
        """Let workers that wait complete their round without those that are late."""
        for worker in self.net.workers:
            waits = worker.has_state and not worker.running and not worker.finished and bool(worker.protocol.eras)
            for round_id in worker.due(worker.step - self.net.plan.delay) if waits else []:
                worker.hurry(round_id)

    def hurry_all(self, _: Worker) -> None:
        """Hurry, whichever process has come to the moment."""
        self.net.after(0.0, self.hurry)

    def grow(self) -> None:
        """Let a process take a seat that nobody had."""
        seat = len({w.me.seat for w in self.net.workers})
        if seat < MOST_SEATS:
            self.net.join(seat)
