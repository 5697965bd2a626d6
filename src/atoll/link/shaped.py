"""Any link behind a slower one: a rate, a latency, jitter, loss and outages, in user space, repeatable by a seed.

Every worker has one line of its own to the others, which carries its rounds one after the other; each is handed to the
inner link when it would have passed. So the sender is delayed, and workers that are out of step stay so.
"""

import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from atoll._util.checks import check_number, check_whole
from atoll.core.allreduce import Reduction, sent_bytes, shots
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Contribution, Link, Offer, Passage, Pending, Round, RoundId

PACKET_BYTES = 1500
"""What is lost at once."""
_FLUSH_S = 1.0
"""How long close() waits until what was opened is with the inner link, seconds; it takes less unless that blocks."""

Result = TypeVar("Result")


# ---------------------------------------------------------------------- what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time in which nothing leaves a worker; bits that have left already still arrive."""

    start_s: float
    """Seconds since the link was joined."""
    length_s: float
    """Seconds until it works again."""

    def __post_init__(self) -> None:
        check_number("an outage's start_s", self.start_s, least=0, why="it counts seconds since the link was joined")
        check_number("an outage's length_s", self.length_s, least=0, why="a link that never comes back trains nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a link is like; the default is one that costs nothing.

    Loss shows as delay. Resent packets take up the rate, at their mean: every byte is sent 1 / (1 - loss) times. A shot
    is there when its unluckiest packet is, and each time that one is lost costs a round trip, twice the latency. Nobody
    slows down for fear of congestion, as TCP would: a long and lossy line is worse than this.
    """

    bits_per_s: float = math.inf
    """Bits per second that a worker can send."""
    latency_s: float = 0.0
    """Seconds from the last bit's departure to its arrival, once per shot."""
    jitter_s: float = 0.0
    """The most seconds that a shot takes longer: between 0 and this, all equally likely. Rounds never overtake."""
    loss: float = 0.0
    """Chance that a packet of 1500 bytes is lost and sent again; so is the one sent again."""
    outages: tuple[Outage, ...] = ()
    """When nothing leaves, the same for every worker; they may overlap."""
    seed: int = 0
    """Decides jitter and loss; the same rounds are delayed alike whenever they are repeated."""

    def __post_init__(self) -> None:
        if not isinstance(self.bits_per_s, int | float) or not self.bits_per_s > 0:
            raise ConfigError(
                f"bits_per_s must be a number above 0, got {self.bits_per_s!r}: nothing would ever arrive"
            )
        check_number("latency_s", self.latency_s, least=0, why="it is a delay in seconds")
        check_number("jitter_s", self.jitter_s, least=0, why="it is a delay in seconds")
        if not isinstance(self.loss, int | float) or not 0 <= self.loss < 1:
            raise ConfigError(f"loss must be a chance of at least 0 and below 1, got {self.loss!r}")
        if not isinstance(self.outages, tuple) or not all(isinstance(outage, Outage) for outage in self.outages):
            raise ConfigError(f"outages must be a tuple of Outage(...), got {self.outages!r}")
        check_whole("seed", self.seed, least=0, why="it seeds jitter and loss")

    def dice(self, worker: int, round_id: RoundId) -> random.Random:
        """What decides about one worker's part in one round; other draws than those of `local.Faults`."""
        return random.Random(f"delay {self.seed} {worker} {round_id}")


# ---------------------------------------------------------------------- the arithmetic


class Transit(NamedTuple):
    """A round on one worker's line; times are those of the clock it was given."""

    begin_s: float
    free_s: float
    """When the line can take the next round."""
    arrival_s: float


class Line:
    """When a worker's rounds pass its line, one after the other; it knows no clock but what it is told."""

    def __init__(self, shape: Shape, joined_s: float = 0.0) -> None:
        self._shape = shape
        self._outages = sorted((joined_s + o.start_s, joined_s + o.start_s + o.length_s) for o in shape.outages)
        self._free_s = self._arrival_s = -math.inf

    def carry(self, at_s: float, size: int, crossings: int, dice: random.Random) -> Transit:
        """Take up a round of `size` bytes, opened at `at_s`, that crosses in so many shots; 0 is none of its business.

        Rounds come in the order in which they were opened, and arrive in it.
        """
        begin_s = max(at_s, self._free_s)
        arrival_s = at_s
        if crossings:
            busy_s = 8 * size / self._shape.bits_per_s / (1 - self._shape.loss)
            self._free_s = self._passed(begin_s, busy_s)
            arrival_s = self._free_s + (crossings * self._shape.latency_s + self._luck_s(size, crossings, dice))
        self._arrival_s = max(self._arrival_s, arrival_s)
        return Transit(begin_s, self._free_s, self._arrival_s)

    def _passed(self, at_s: float, busy_s: float) -> float:
        """When the line has worked for so many seconds, outages aside."""
        for start_s, stop_s in self._outages:
            if at_s < start_s and at_s + busy_s <= start_s:
                break
            if at_s < stop_s:
                busy_s = max(0.0, busy_s - max(0.0, start_s - at_s))
                at_s = stop_s
        return at_s + busy_s

    def _luck_s(self, size: int, crossings: int, dice: random.Random) -> float:
        """Jitter and lost packets of all shots, seconds; draws as often whatever the shape."""
        packets = max(1, -(-size // (crossings * PACKET_BYTES)))
        luck_s = 0.0
        for _ in range(crossings):
            luck_s += self._shape.jitter_s * dice.random()
            luck_s += 2 * self._shape.latency_s * _losses(self._shape.loss, packets, dice.random())
        return luck_s


def _losses(loss: float, packets: int, chance: float) -> int:
    """How often the unluckiest packet is lost: at most k times with probability (1 - loss^(k+1))^packets."""
    if not loss or not chance:
        return 0
    rest = -math.expm1(math.log(chance) / packets)
    return max(0, math.ceil(math.log(rest) / math.log(loss)) - 1)


# ---------------------------------------------------------------------- the thread that waits


class _Handed(NamedTuple):
    """A round that has passed the line and is with the inner link."""

    pending: Pending
    at_s: float
    members: int
    sent: int


@dataclass(frozen=True, slots=True)
class _Parcel:
    round_id: RoundId
    contribution: Contribution | None
    reduction: Reduction
    opened_s: float
    handed: Future[_Handed]


class _Courier:
    """Hands one worker's rounds to its inner link, each at its time, from one thread that makes all such calls.

    The thread is a daemon and does not know the ShapedLink, which stops it when it is closed or dropped.
    """

    def __init__(self, inner: Link, shape: Shape) -> None:
        self.inner = inner
        self.shape = shape
        self.inbox: SimpleQueue[_Parcel | None] = SimpleQueue()  # None: stop; put() is safe in a finalizer
        self.failed: BaseException | None = None
        self._later: deque[_Parcel] = deque()
        self._stopping = False

    def start(self, terms: Mapping[str, str], weight: float) -> Future[None]:
        """Join the inner link from the new thread; the result is there when it has."""
        joined: Future[None] = Future()
        name = f"atoll-line-{self.inner.worker}"
        self.thread = threading.Thread(target=self._run, args=(terms, weight, joined), name=name, daemon=True)
        self.thread.start()
        return joined

    def stop(self) -> None:
        """Hand over at once what is still under way, and end; others may wait for it."""
        self.inbox.put(None)
        self.thread.join(_FLUSH_S)

    def _run(self, terms: Mapping[str, str], weight: float, joined: Future[None]) -> None:
        try:
            self.inner.join(terms, weight)
        except BaseException as error:
            joined.set_exception(error)
            return
        line = Line(self.shape, time.perf_counter())
        joined.set_result(None)
        while (parcel := self._next()) is not None:
            self._deliver(parcel, line)
            del parcel  # its payload's memory

    def _next(self) -> _Parcel | None:
        if self._later:
            return self._later.popleft()
        return None if self._stopping else self.inbox.get()

    def _deliver(self, parcel: _Parcel, line: Line) -> None:
        try:
            handed = self._hand_over(parcel, line)
        except BaseException as error:
            self.failed = self.failed or error
            parcel.handed.set_exception(error)
        else:
            parcel.handed.set_result(handed)

    def _hand_over(self, parcel: _Parcel, line: Line) -> _Handed:
        members = sent = 0
        if not self._stopping:
            # Asked here and not in open(): it may wait for workers that the same caller has yet to let join.
            weights = self.inner.weights(parcel.round_id.step)
            members, crossings = len(weights), 0
            if self.inner.worker in weights:
                sent, crossings = sent_bytes(parcel.reduction.payload_bytes, members), shots(members)
            dice = self.shape.dice(self.inner.worker, parcel.round_id)
            self._sleep_until(line.carry(parcel.opened_s, sent, crossings, dice).arrival_s)
        pending = self.inner.open(parcel.round_id, parcel.contribution, parcel.reduction)
        return _Handed(pending, time.perf_counter(), members, sent)

    def _sleep_until(self, arrival_s: float) -> None:
        while not self._stopping and (left_s := arrival_s - time.perf_counter()) > 0:
            try:
                parcel = self.inbox.get(timeout=min(left_s, 3600.0))  # it takes no timeout of centuries
            except Empty:
                continue
            if parcel is None:
                self._stopping = True
            else:
                self._later.append(parcel)


# ---------------------------------------------------------------------- the link


@dataclass(frozen=True, slots=True)
class _Pending:
    link: "ShapedLink"  # keeps it from being dropped while somebody may wait
    round_id: RoundId
    reduction: Reduction
    opened_s: float
    handed: Future[_Handed]

    def wait(self) -> Round:
        handed = self.link._outcome(self.handed)
        completed = handed.pending.wait()
        inner = completed.passage or Passage(handed.at_s, time.perf_counter())
        sent, received = inner.sent, inner.received
        if not sent and not received:
            sent, received = handed.sent, self._received(completed, handed.members)
        done_s = max(inner.done_s, handed.at_s)
        return replace(completed, passage=Passage(self.opened_s, done_s, sent, received))

    def _received(self, completed: Round, members: int) -> int:
        """Bytes that the others put on their lines for this worker, headers aside."""
        size = self.reduction.payload_bytes
        if completed.reduced is not None:  # who was absent hears the mean alone
            absent = self.link.worker not in self.link.weights(self.round_id.step)
            return size if absent else sent_bytes(size, members)
        return size * sum(member.worker != self.link.worker for member in completed.members)


class ShapedLink:
    """One worker's end of a link behind a line of the given shape; `shaped` makes all of them.

    Where the inner link counts no bytes, those that the model puts on the line are, headers aside. A worker that is
    absent sends none; one that has nothing to contribute sends as many as the others, as between machines.
    """

    def __init__(self, inner: Link, shape: Shape) -> None:
        if not hasattr(inner, "worker"):
            raise ConfigError(f"a shaped link needs one worker's end of a link, got {type(inner).__name__}")
        if not isinstance(shape, Shape):
            raise ConfigError(f"shape must be a Shape(...), got {shape!r}")
        self.worker = inner.worker
        self.workers = inner.workers
        self.shape = shape
        self._inner = inner
        self._courier: _Courier | None = None
        self._closed: Future[str | None] = Future()  # its result is the reason

    def join(self, terms: Mapping[str, str], weight: float) -> None:
        """Say what all must agree on; LinkError names the differences to another worker."""
        self._check_open()
        if self._courier is not None:
            raise LinkError(
                f"worker {self.worker} has joined already: an OuterLoop needs a link of its own, from a new shaped()"
            )
        courier = _Courier(self._inner, self.shape)
        try:
            self._outcome(courier.start(terms, weight))
        except BaseException:
            courier.inbox.put(None)
            raise
        self._courier = courier
        weakref.finalize(self, courier.inbox.put, None).atexit = False

    def present(self, step: int) -> bool:
        """Whether this worker is a member during this inner step."""
        return self._inner.present(step)

    def trains(self, step: int) -> bool:
        """Whether it makes this inner step: false when absent, or when slower and skipping it."""
        return self._inner.trains(step)

    def weights(self, step: int) -> Mapping[int, float]:
        """Worker -> weight of all who are present at this step."""
        return self._inner.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Send a round on its way, which takes what the shape says; returns at once."""
        self._check_open()
        if self._courier is None:
            raise LinkError(f"{round_id}: worker {self.worker} has not joined yet, and its line is not open")
        contribution = None if offer is None else offer.settled()  # a line takes what is there, and its time from then
        opened_s = time.perf_counter()
        parcel = _Parcel(round_id, contribution, reduction, opened_s, Future())
        self._courier.inbox.put(parcel)
        return _Pending(self, round_id, reduction, opened_s, parcel.handed)

    def on_any_rank(self, so: bool) -> bool:
        """Whether it is so on some rank of this worker."""
        return self._inner.on_any_rank(so)

    def check(self) -> None:
        """Raise the error of a round that has failed meanwhile, on its line or in the inner link."""
        if self._courier is not None and self._courier.failed is not None:
            raise self._courier.failed
        self._inner.check()

    def close(self, reason: str | None = None) -> None:
        """Leave for good, with a reason if before the end; whoever waits here gets a LinkError.

        What was opened goes to the inner link at once: it is not lost, for other workers may wait for it, and not
        delayed, for they should learn of a failure.
        """
        try:
            self._closed.set_result(reason)
        except InvalidStateError:
            return
        if self._courier is not None:
            self._courier.stop()
        self._inner.close(reason)

    def _outcome(self, future: Future[Result]) -> Result:
        """What the courier's thread comes up with; LinkError if the link is closed, before or meanwhile."""
        either: list[Future[Any]] = [future, self._closed]
        wait(either, return_when=FIRST_COMPLETED)
        self._check_open()
        return future.result()

    def _check_open(self) -> None:
        if self._closed.done():
            raise LinkError(f"the link of worker {self.worker} is closed: {self._closed.result() or 'it has left'}")


def shaped(links: Sequence[Link], shape: Shape) -> list[ShapedLink]:
    """Each of these links behind a line of this shape."""
    return [ShapedLink(link, shape) for link in links]
