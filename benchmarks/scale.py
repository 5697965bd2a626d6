"""Measures what a change of members costs between many workers, in virtual time and without training.

    python benchmarks/scale.py [16 64 256 1024]

The protocol is the library's own (`atoll.link.net.protocol`), with its JSON encoding of control messages; clock and
network are simulated. A message takes 50 ms, and the registry answers within 50 ms. Every worker's own line carries
100 Mbit/s. In every minute one worker is lost, and one joins and is promoted: three views. Two rounds in two shots are
in flight; their payloads are not counted. All members decide alike (`tests/property/test_protocol.py`), so
one of them decides, and the others take over the decision.
"""

import argparse
import heapq
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from atoll.link.base import RoundId
from atoll.link.net import flush
from atoll.link.net.actions import Action, Adopt, Propose, Send
from atoll.link.net.messages import encode_control
from atoll.link.net.protocol import Protocol
from atoll.link.net.view_record import encode_view
from atoll.link.net.views import Decision, Process, Told, View, decide

LATENCY_S = 0.05
REGISTRY_S = 0.025
"""One way."""
LINE_BYTES_S = 100e6 / 8
ROUNDS = 2
VIEWS_A_MINUTE = 3
MOST_SEATS = 256
"""Between more, the simulation takes many minutes; their row is computed from the one before."""


@dataclass
class Offer:
    """Stands for a payload that is never carried."""

    whole: Any = None

    def part_count(self, members: int) -> int:
        """One each."""
        return members

    def part(self, part: int, members: int) -> Any:
        """Nothing."""
        return None


@dataclass(frozen=True)
class Cost:
    """Holds what one change of members takes."""

    seats: int
    seconds: float
    messages: float
    told: float
    registry: float
    decide_s: float


class Run:
    """Holds the members of a simulated run, and counts what they send."""

    def __init__(self, seats: int) -> None:
        self.now = 0.0
        self.count = 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.view = View(1, dict.fromkeys(range(seats), 1))
        self.members = {process: Protocol(process) for process in self.view.members}
        self.free = dict.fromkeys(self.members, 0.0)
        """Process -> when its line is free."""
        self.sizes: dict[int, int] = {}
        self.kept: list[Told] = []
        self.decided: dict[int, Decision] = {}
        self.decide_s = 0.0
        self.messages = self.told_bytes = self.registry_bytes = 0
        self.adopted_s: dict[Process, float] = {}
        flush.decide = self.decide  # type: ignore[attr-defined]

    def decide(self, view: View, told: Any) -> Decision:
        """Decide once for all members."""
        if view.number not in self.decided:
            began = time.process_time()
            self.decided[view.number] = decide(view, told)
            self.decide_s = time.process_time() - began
        return self.decided[view.number]

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        """Do something later."""
        self.count += 1
        heapq.heappush(self.queue, (self.now + seconds, self.count, act))

    def offer_view(self, view: View) -> None:
        """Let the registry accept a view, if it is the next, and tell all members."""
        size = len(encode_view(view))
        self.registry_bytes += size
        if view.number != self.view.number + 1:
            return
        self.view = view
        for process in view.members:
            self.members.setdefault(process, Protocol(process, None))
            self.free.setdefault(process, 0.0)
            self.registry_bytes += size
            self.after(REGISTRY_S, partial(self._tell_view, process, view))

    def _tell_view(self, process: Process, view: View) -> None:
        self.act(process, self.members[process].on_view(view))

    def act(self, me: Process, actions: list[Action]) -> None:
        """Carry out what a member asks for; rounds' payloads are left on the way."""
        for action in actions:
            if isinstance(action, Propose):
                self.after(REGISTRY_S, partial(self.offer_view, action.view))
            elif isinstance(action, Adopt):
                self.adopted_s[me] = self.now
            elif isinstance(action, Send) and isinstance(action.message, Told):
                self.send(me, action.to, action.message)

    def send(self, me: Process, to: Process, told: Told) -> None:
        """Put what a member tells on its line, after what it tells others."""
        if id(told) not in self.sizes:
            self.sizes[id(told)] = len(encode_control(told, told.adopted))
            self.kept.append(told)  # so that its id stays its own
        size = self.sizes[id(told)]
        self.messages += 1
        self.told_bytes += size
        self.free[me] = max(self.free[me], self.now) + size / LINE_BYTES_S
        arrives = self.free[me] - self.now + LATENCY_S
        self.after(arrives, lambda: self.act(to, self.members[to].receive(me, told, told.adopted)))

    def settle(self) -> None:
        """Run until nothing is under way."""
        while self.queue:
            self.now, _, act = heapq.heappop(self.queue)
            act()
        assert all(self.members[process].adopted == self.view.number for process in self.view.members)
        self.sizes, self.kept = {}, []


def changed(run: Run, cause: Callable[[], None]) -> tuple[float, int, int, int]:
    """Return what one change of members takes: seconds, messages, bytes told, bytes of the registry."""
    began, before = run.now, (run.messages, run.told_bytes, run.registry_bytes)
    run.adopted_s = {}
    cause()
    run.settle()
    after = (run.messages, run.told_bytes, run.registry_bytes)
    messages, told, registry = (new - old for new, old in zip(after, before, strict=True))
    return max(run.adopted_s.values()) - began, messages, told, registry


def lose(run: Run, gone: Process) -> None:
    """Let all others notice that a member is gone, one latency later."""

    def notice(process: Process) -> None:
        run.act(process, run.members[process].lose(gone))

    for process in [member for member in run.view.members if member != gone]:
        run.after(LATENCY_S, partial(notice, process))


def measured(seats: int) -> Cost:
    """Return what a change of members costs, on average of a loss, a join and a promotion."""
    run = Run(seats)
    for process in run.view.members:
        run.act(process, run.members[process].on_view(run.view))
    run.settle()
    for step in range(1, ROUNDS + 1):
        for process, member in run.members.items():
            run.act(process, member.open(RoundId(step, 0), Offer()))
    gone = Process(seats // 2, 1)
    again = Process(seats // 2, 2)
    changes = [changed(run, lambda: lose(run, gone))]
    del run.members[gone]
    changes.append(changed(run, lambda: run.offer_view(run.view.admitting(*again))))
    changes.append(changed(run, lambda: run.offer_view(run.view.promoting(again.seat))))
    seconds, messages, told, registry = (sum(values) / len(changes) for values in zip(*changes, strict=True))
    return Cost(seats, seconds, messages, told, registry, run.decide_s)


def larger(cost: Cost, seats: int) -> Cost:
    """Return the cost of more seats: messages grow with their square, the size of one with their number."""
    times = seats / cost.seats
    told = cost.told * times**3
    seconds = cost.seconds + (told / seats - cost.told / cost.seats) / LINE_BYTES_S
    return Cost(seats, seconds, cost.messages * times**2, told, cost.registry * times**2, cost.decide_s * times**2)


def row(cost: Cost, note: str = "") -> str:
    """Return one line of the table."""
    cells = [
        f"{cost.seats:,}{note}",
        f"{cost.seats - 1:,}",
        f"{cost.messages:,.0f}",
        f"{cost.told / cost.messages / 1e3:,.1f} kB",
        f"{cost.told / cost.seats / 1e6:,.2f} MB",
        f"{cost.registry / 1e6:,.2f} MB",
        f"{cost.seconds:.2f} s",
        f"{100 * cost.seconds * VIEWS_A_MINUTE / 60:.1f} %",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seats", nargs="*", type=int, default=[16, 64, 256, 1024], help="numbers of workers")
    arguments = parser.parse_args()
    titles = ["workers", "connections of a worker", "messages of a view", "size of one", "sent by a worker"]
    titles += ["through the registry", "time to agree", "rounds held up"]
    print("| " + " | ".join(titles) + " |")
    print("|" + "---|" * len(titles))
    cost = None
    for seats in arguments.seats:
        if cost is None or seats <= MOST_SEATS:
            cost = measured(seats)
            print(row(cost), flush=True)
        else:
            print(row(larger(cost, seats), f" (computed from {cost.seats})"))


if __name__ == "__main__":
    main()
