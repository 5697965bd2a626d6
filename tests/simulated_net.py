"""Runs members' protocol in a simulated network with a virtual clock, and checks the laws.

One schedule is one seed: how many workers, fragments and steps; who is killed, stopped, cut off or late, and when; how
long every message takes, and in which order messages come. `simulated_worker` is a member, `simulated_faults` says what
happens to it, and `simulated_laws` what must hold.
"""

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from atoll.link.base import RoundId
from atoll.link.net.actions import Progress
from atoll.link.net.views import Process, Told, View
from simulated_faults import Faults
from simulated_laws import Laws
from simulated_worker import State, Worker

PATIENCE_S = 60.0
"""Virtual seconds after the last fault in which everybody has to have all rounds."""


@dataclass
class Plan:
    """Holds the sizes that one seed stands for."""

    theme: str
    """The kind of faults that happen."""
    seats: int
    fragments: int
    together: bool
    """Whether all fragments are sent after the same steps."""
    period: int
    delay: int
    steps: int
    min_workers: int

    def due(self, step: int) -> list[RoundId]:
        """Return the rounds that are sent after a step."""
        offsets = [0 if self.together else f * self.period // self.fragments for f in range(self.fragments)]
        return [RoundId(step, f) for f, offset in enumerate(offsets) if step > 0 and (step + offset) % self.period == 0]


def drawn_plan(draw: random.Random) -> Plan:
    """Draw the sizes of a schedule."""
    theme = draw.choice(["any"] * 5 + ["relays", "joins", "joins", "joins", "none"])
    period = draw.randint(2, 6)
    return Plan(
        theme=theme,
        seats=draw.choice([5, 6, 6]) if theme == "relays" else draw.choice([2, 3, 3, 4, 4, 5, 5, 6]),
        fragments=draw.randint(1, min(3, period)),
        together=draw.random() < 0.5,
        period=period,
        delay=draw.randint(0, period),
        steps=draw.randint(3, 8) * period,
        min_workers=draw.randint(1, 2),
    )


class Registry:
    """Accepts one view after another; can be away for a while."""

    def __init__(self, net: "Net", first: View) -> None:
        self.net = net
        self.view = first
        self.admitted = set(first.members)
        self.away_until = 0.0
        self.lives = 1

    def propose(self, view: View) -> None:
        """Compare and set, after the time that the message takes."""
        self.net.after(self.net.latency(), lambda: self._set(view))

    def _set(self, view: View) -> None:
        if self.net.now < self.away_until:
            self.net.after(self.away_until - self.net.now + self.net.latency(), lambda: self._set(view))
        elif view.number == self.view.number + 1:
            self.view = view
            self.admitted.update(view.members)
            self.net.views[view.number] = view
            for worker in self.net.workers:
                self.tell(worker)

    def tell(self, worker: Worker) -> None:
        """Let a worker know of the newest view, some time later."""
        view = self.view
        self.net.after(self.net.latency(), lambda: worker.wake(lambda: worker.on_view(view)))


class Net:
    """Delivers messages, each after some time; breaks them off when asked to."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.count = 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.arrival: dict[tuple[Process, Process, bool], float] = {}
        self.cut: set[tuple[Process, Process]] = set()  # lines that carry nothing any more
        self.slow: dict[tuple[Process, Process], float] = {}  # lines of payloads that are slow, and until when
        self.slowness = self.random.choice([0.001, 0.01, 0.05])
        self.in_order = self.random.choice(["all", "payloads", "nothing"])
        self.between_opens_s = self.random.choice([1.0, 10.0]) * self.slowness
        self.reduce_s = self.random.choice([0.1, 0.1, 5.0]) * self.slowness
        self.plan = drawn_plan(self.random)
        self.pace = [self.random.choice([0.01, 0.02, 0.05]) for _ in range(self.plan.seats)]
        self.joining = 0
        self.faults = Faults(self)
        self.laws = Laws(self)
        first = View(1, dict.fromkeys(range(self.plan.seats), 1))
        self.registry = Registry(self, first)
        self.views = {1: first}
        self.workers = [Worker(self, process, joins=False) for process in first.members]
        for worker in self.workers:
            self.registry.tell(worker)

    # -------------------------------------------------------------- time and messages

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        self.count += 1
        heapq.heappush(self.queue, (self.now + seconds, self.count, act))

    def latency(self) -> float:
        """Draw how long a message takes."""
        return self.random.expovariate(1 / self.slowness)

    def compute(self, seat: int) -> float:
        """Draw how long an inner step takes."""
        return self.random.expovariate(1 / self.pace[seat % len(self.pace)])

    def between_opens(self) -> float:
        """Draw how long a worker takes from one round of a step to the next."""
        return self.random.expovariate(1 / self.between_opens_s)

    def reducing(self) -> float:
        """Draw how long the mean of a part takes."""
        return self.random.expovariate(1 / self.reduce_s)

    def send(self, sender: Process, receiver: Process, message: Any, view: int = 0) -> None:
        """Deliver a message some time later, and now and then once more."""
        if (sender, receiver) in self.cut:
            return
        moment = self._arrival(sender, receiver, message)
        self.after(moment - self.now, lambda: self._deliver(sender, receiver, message, view))
        if self.random.random() < 0.02:
            again = moment - self.now + self.random.choice([5, 50]) * self.latency()
            self.after(again, lambda: self._deliver(sender, receiver, message, view))

    def _arrival(self, sender: Process, receiver: Process, message: Any) -> float:
        """Return when a message arrives: after the ones before it, as far as they are kept in order."""
        if isinstance(message, State):
            return self.now + self.latency() + self.random.choice([0.0, 0.2, 1.0])
        is_control = isinstance(message, Told | Progress)
        is_slow = not is_control and self.now < self.slow.get((sender, receiver), 0.0)
        is_slow |= not is_control and self.plan.theme == "joins" and receiver.life != 1
        moment = self.now + self.latency() + (self.random.uniform(0.0, 0.5) if is_slow else 0.0)
        if self.in_order == "nothing":
            return moment
        line = sender, receiver, is_control and self.in_order == "payloads"
        self.arrival[line] = max(moment, self.arrival.get(line, 0.0) + 1e-9)
        return self.arrival[line]

    def _deliver(self, sender: Process, receiver: Process, message: Any, view: int) -> None:
        worker = next((w for w in self.workers if w.alive and w.me == receiver), None)
        if worker is None or (sender, receiver) in self.cut:
            return

        def take() -> None:
            if isinstance(message, State):
                worker.take_state(message)
            else:
                self.laws.check_stranger(worker, sender, message, view)
            worker.go_on()

        worker.wake(take)

    # -------------------------------------------------------------- processes

    def replace(self, worker: Worker) -> None:
        """Start a process for the seat of one that is gone, some time later."""
        self.joining += 1

        def join() -> None:
            if self.registry.view.has(worker.me):  # its old life is still a member
                self.after(0.1, join)
                return
            self.joining -= 1
            self.join(worker.me.seat)

        self.after(self.random.choice([0.0, 0.1, 1.0]), join)

    def join(self, seat: int) -> None:
        """Start a process that joins."""
        self.registry.lives += 1
        life = self.registry.lives if self.random.random() < 0.5 else -self.registry.lives  # lives have no order
        joiner = Worker(self, Process(seat, life), joins=True)
        self.workers.append(joiner)
        joiner.ask_to_join()

    # -------------------------------------------------------------- the run

    def run(self) -> None:
        """Run to the end, and a little longer for the last messages; check what must hold."""
        end: float | None = None
        while self.queue and self.now < self.faults.last_s + PATIENCE_S:
            self.now, _, act = heapq.heappop(self.queue)
            act()
            if self.now <= self.faults.last_s or self.joining or not self._is_over():
                end = None
            elif end is None:
                end = self.now + 1.0 + 200 * self.slowness
            elif self.now > end:
                break
        self.laws.check_end()

    def _is_over(self) -> bool:
        """Return whether everybody has arrived, or nobody is left that could give the shared state."""
        alive = [w for w in self.workers if w.alive]
        return all(w.finished for w in alive) or not any(w.has_state for w in alive)
