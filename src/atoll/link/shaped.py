"""Emulates a slow line in front of any link: rate, latency, jitter, loss and outages, repeatable by a seed.

Every worker sends over its own line, which carries its rounds one after another; a round is handed to the inner link
when it would have arrived. So the sender is delayed, and workers that are out of step stay so.
"""

import math
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, InvalidStateError, wait
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from atoll._util.checks import check_number, check_whole, config_error
from atoll.core.allreduce import Reduction, sent_bytes, shots
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Admission, Contribution, FragmentState, Link, Offer, Pending, Round, RoundId, TransferStats
from atoll.link.seat import Seat

PACKET_BYTES = 1500
"""Size of a packet, the unit of loss."""
_FLUSH_S = 1.0  # that close() waits until opened rounds are with the inner link; less, unless that blocks

Result = TypeVar("Result")


# ---------------------------------------------------------------------- settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A time during which no worker can send; bits that have left already still arrive."""

    start_s: float
    """Seconds since the link was joined."""
    length_s: float
    """Seconds until the line works again."""

    def __post_init__(self) -> None:
        check_number("an outage's start_s", self.start_s, least=0, why="it counts seconds since the link was joined")
        check_number("an outage's length_s", self.length_s, least=0, why="a link that never comes back trains nothing")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Describes an emulated line; the default delays nothing.

    Loss shows as delay. Resent packets use up the rate: on average every byte is sent 1 / (1 - loss) times. A shot has
    arrived when its unluckiest packet has, and each loss of that packet costs a round trip, twice the latency. There is
    no congestion control: over TCP, a long and lossy line is worse than this.
    """

    bits_per_s: float = math.inf
    """Bits per second that a worker can send."""
    latency_s: float = 0.0
    """Seconds from the last bit's departure to its arrival, once per shot."""
    jitter_s: float = 0.0
    """Most seconds that a shot takes longer, drawn uniformly from 0 to this. Rounds never overtake."""
    loss: float = 0.0
    """Probability that a packet of 1500 bytes is lost and sent again, each time it is sent."""
    outages: tuple[Outage, ...] = ()
    """When no worker can send; outages may overlap."""
    seed: int = 0
    """Seeds jitter and loss; a repeated round is delayed alike."""

    def __post_init__(self) -> None:
        if not isinstance(self.bits_per_s, int | float) or not self.bits_per_s > 0:
            raise config_error("bits_per_s", self.bits_per_s, "a number above 0", "nothing would ever arrive")
        check_number("latency_s", self.latency_s, least=0, why="it is a delay in seconds")
        check_number("jitter_s", self.jitter_s, least=0, why="it is a delay in seconds")
        if not isinstance(self.loss, int | float) or not 0 <= self.loss < 1:
            raise config_error("loss", self.loss, "a probability of at least 0 and below 1")
        if not isinstance(self.outages, tuple) or not all(isinstance(outage, Outage) for outage in self.outages):
            raise config_error("outages", self.outages, "a tuple of Outage(...)")
        check_whole("seed", self.seed, least=0, why="it seeds jitter and loss")

    def rng(self, worker: int, round_id: RoundId) -> random.Random:
        """Return the generator of one worker's delays in one round; independent of `local.Faults`."""
        return random.Random(f"delay {self.seed} {worker} {round_id}")


# ---------------------------------------------------------------------- the arithmetic


class Transmission(NamedTuple):
    """Tells when a round passes one worker's line, in seconds of the caller's clock."""

    begin_s: float
    free_s: float
    """When the line can take the next round."""
    arrival_s: float


class LineClock:
    """Computes when a worker's rounds pass its line, one after another; it reads no clock."""

    def __init__(self, shape: Shape, joined_s: float = 0.0) -> None:
        self._shape = shape
        self._outages = sorted((joined_s + o.start_s, joined_s + o.start_s + o.length_s) for o in shape.outages)
        self._free_s = self._arrival_s = -math.inf

    def carry(self, at_s: float, size: int, shot_count: int, rng: random.Random) -> Transmission:
        """Put a round on the line; rounds come in the order in which they were opened, and arrive in it.

        Args:
            at_s: When the round was opened.
            size: Bytes of the round.
            shot_count: Shots that it takes; 0 if it does not use the line.
            rng: Draws jitter and loss.
        """
        begin_s = max(at_s, self._free_s)
        arrival_s = at_s
        if shot_count:
            busy_s = 8 * size / self._shape.bits_per_s / (1 - self._shape.loss)
            self._free_s = self._passed(begin_s, busy_s)
            arrival_s = self._free_s + (shot_count * self._shape.latency_s + self._luck_s(size, shot_count, rng))
        self._arrival_s = max(self._arrival_s, arrival_s)
        return Transmission(begin_s, self._free_s, self._arrival_s)

    def _passed(self, at_s: float, busy_s: float) -> float:
        """Return when the line has worked for `busy_s` seconds, not counting outages."""
        for start_s, stop_s in self._outages:
            if at_s < start_s and at_s + busy_s <= start_s:
                break
            if at_s < stop_s:
                busy_s = max(0.0, busy_s - max(0.0, start_s - at_s))
                at_s = stop_s
        return at_s + busy_s

    def _luck_s(self, size: int, shot_count: int, rng: random.Random) -> float:
        """Return the delay of all shots by jitter and loss, seconds; draws equally often for every shape."""
        packets = max(1, -(-size // (shot_count * PACKET_BYTES)))
        luck_s = 0.0
        for _ in range(shot_count):
            luck_s += self._shape.jitter_s * rng.random()
            luck_s += 2 * self._shape.latency_s * _losses(self._shape.loss, packets, rng.random())
        return luck_s


def _losses(loss: float, packets: int, chance: float) -> int:
    """Return how often the unluckiest packet is lost: at most k times with probability (1 - loss^(k+1))^packets."""
    if not loss or not chance:
        return 0
    rest = -math.expm1(math.log(chance) / packets)
    return max(0, math.ceil(math.log(rest) / math.log(loss)) - 1)


# ---------------------------------------------------------------------- the line's thread


class _OpenedRound(NamedTuple):
    """A round that has passed the line and was opened on the inner link."""

    pending: Pending
    at_s: float
    members: int
    sent: int


@dataclass(frozen=True, slots=True)
class _QueuedRound:
    """A round waiting for its worker's line."""

    round_id: RoundId
    contribution: Contribution | None
    reduction: Reduction
    opened_s: float
    opened: Future[_OpenedRound]


class _LineThread:
    """Opens one worker's rounds on the inner link, each at its arrival time, from one daemon thread.

    The thread holds no reference to the ShapedLink, which stops it when it is closed or garbage-collected.
    """

    def __init__(self, inner: Link, shape: Shape) -> None:
        self.inner = inner
        self.shape = shape
        self.queue: SimpleQueue[_QueuedRound | None] = SimpleQueue()  # None: stop; put() is safe in a finalizer
        self.failed: BaseException | None = None
        self._later: deque[_QueuedRound] = deque()
        self._stopping = False

    def start(self, *arguments: Any) -> Future[Admission | None]:
        """Join the inner link from the new thread; the future is done when it has joined."""
        joined: Future[Admission | None] = Future()
        name = f"atoll-line-{self.inner.worker}"
        self.thread = threading.Thread(target=self._run, args=(arguments, joined), name=name, daemon=True)
        self.thread.start()
        return joined

    def stop(self) -> None:
        """Open what is still queued at once, for other workers may wait for it, and end."""
        self.queue.put(None)
        self.thread.join(_FLUSH_S)

    def _run(self, arguments: Sequence[Any], joined: Future[Admission | None]) -> None:
        try:
            admission = self.inner.join(*arguments)
        except BaseException as error:
            joined.set_exception(error)
            return
        line = LineClock(self.shape, time.perf_counter())
        joined.set_result(admission)
        while (queued := self._next()) is not None:
            self._open(queued, line)
            del queued  # frees its payload

    def _next(self) -> _QueuedRound | None:
        if self._later:
            return self._later.popleft()
        return None if self._stopping else self.queue.get()

    def _open(self, queued: _QueuedRound, line: LineClock) -> None:
        try:
            opened = self._open_on_time(queued, line)
        except BaseException as error:
            self.failed = self.failed or error
            queued.opened.set_exception(error)
        else:
            queued.opened.set_result(opened)

    def _open_on_time(self, queued: _QueuedRound, line: LineClock) -> _OpenedRound:
        members = sent = 0
        if not self._stopping:
            # Not in open(): weights() may wait for workers that the same caller has yet to let join.
            weights = self.inner.weights(queued.round_id.step)
            members, shot_count = len(weights), 0
            if self.inner.worker in weights:
                sent, shot_count = sent_bytes(queued.reduction.payload_bytes, members), shots(members)
            rng = self.shape.rng(self.inner.worker, queued.round_id)
            self._sleep_until(line.carry(queued.opened_s, sent, shot_count, rng).arrival_s)
        pending = self.inner.open(queued.round_id, queued.contribution, queued.reduction)
        return _OpenedRound(pending, time.perf_counter(), members, sent)

    def _sleep_until(self, arrival_s: float) -> None:
        while not self._stopping and (left_s := arrival_s - time.perf_counter()) > 0:
            try:
                queued = self.queue.get(timeout=min(left_s, 3600.0))  # a queue refuses timeouts of centuries
            except Empty:
                continue
            if queued is None:
                self._stopping = True
            else:
                self._later.append(queued)


# ---------------------------------------------------------------------- the link


@dataclass(frozen=True, slots=True)
class _ShapedPending:
    link: "ShapedLink"  # keeps the link alive while a caller may wait
    round_id: RoundId
    reduction: Reduction
    opened_s: float
    opened: Future[_OpenedRound]

    def wait(self) -> Round:
        opened = self.link._outcome(self.opened)
        completed = opened.pending.wait()
        inner = completed.transfer or TransferStats(opened.at_s, time.perf_counter())
        sent, received = inner.sent_bytes, inner.received_bytes
        if not sent and not received:
            sent, received = opened.sent, self._received(completed, opened.members)
        done_s = max(inner.done_s, opened.at_s)
        return replace(completed, transfer=TransferStats(self.opened_s, done_s, sent, received))

    def _received(self, completed: Round, members: int) -> int:
        """Return the bytes that the others put on their lines for this worker, without headers."""
        size = self.reduction.payload_bytes
        if completed.reduced is not None:  # an absent worker receives the mean alone
            absent = self.link.worker not in self.link.weights(self.round_id.step)
            return size if absent else sent_bytes(size, members)
        return size * sum(member.worker != self.link.worker for member in completed.members)


class ShapedLink(Link):
    """Puts an emulated line in front of one worker's link; `shaped` makes those of all workers.

    Where the inner link counts no bytes, this one counts those on the emulated line, without headers. An absent worker
    sends none; one that has nothing to contribute sends as many as the others, as between machines.
    """

    def __init__(self, inner: Link, shape: Shape) -> None:
        if not hasattr(inner, "worker"):
            problem = f"a shaped link needs the link of one worker, got {type(inner).__name__}"
            raise ConfigError(problem, setting="inner", value=inner)
        if not isinstance(shape, Shape):
            raise config_error("shape", shape, "a Shape(...)")
        self.worker = inner.worker
        self.workers = inner.workers
        self.elastic = inner.elastic
        self.shape = shape
        self._inner = inner
        self._line_thread: _LineThread | None = None
        self._closed: Future[str | None] = Future()  # its result is the reason

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join the inner link; LinkError names the terms in which another worker differs."""
        self._check_open()
        if self._line_thread is not None:
            problem = f"worker {self.worker} has joined already: each OuterLoop needs its own link, from a new shaped()"
            raise LinkError(problem, worker=self.worker)
        line_thread = _LineThread(self._inner, self.shape)
        try:
            admission = self._outcome(line_thread.start(terms, weight, start))
        except BaseException:
            line_thread.queue.put(None)
            raise
        self._line_thread = line_thread
        weakref.finalize(self, line_thread.queue.put, None).atexit = False
        return admission

    def rejoin(self) -> Admission:
        """Join the inner link again after an ExcludedError."""
        if self._line_thread is not None:
            self._line_thread.failed = None
        return self._inner.rejoin()

    def present(self, step: int) -> bool:
        """Return whether this worker is a member during this inner step."""
        return self._inner.present(step)

    def trains(self, step: int) -> bool:
        """Return whether this worker makes this inner step: not if it is absent, or slower and skips it."""
        return self._inner.trains(step)

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers that are present at this step."""
        return self._inner.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Queue a round for the line, which delays it by its shape; returns at once."""
        self._check_open()
        if self._line_thread is None:
            problem = f"{round_id}: worker {self.worker} has not joined yet, and its line is not open"
            raise LinkError(problem, worker=self.worker, round_id=round_id)
        contribution = None if offer is None else offer.settled()  # sending begins when the payload is there
        opened_s = time.perf_counter()
        queued = _QueuedRound(round_id, contribution, reduction, opened_s, Future())
        self._line_thread.queue.put(queued)
        return _ShapedPending(self, round_id, reduction, opened_s, queued.opened)

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note that this worker has applied all rounds up to a step."""
        self._inner.advanced(step, applied, save)

    def on_any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of this worker."""
        return self._inner.on_any_rank(value)

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Publish a value and return that of every process, past the emulated line."""
        return self._inner.gather(key, value, within_s)

    def check(self) -> None:
        """Raise the error of a round that has failed since, on its line or in the inner link."""
        if self._line_thread is not None and self._line_thread.failed is not None:
            raise self._line_thread.failed
        self._inner.check()

    def close(self, reason: str | None = None) -> None:
        """Leave for good; callers that wait here get a LinkError.

        Rounds that were opened go to the inner link at once: other workers may wait for them, and should learn of a
        failure without delay.
        """
        try:
            self._closed.set_result(reason)
        except InvalidStateError:
            return
        if self._line_thread is not None:
            self._line_thread.stop()
        self._inner.unfinished = self.unfinished
        self._inner.close(reason)

    def _outcome(self, future: Future[Result]) -> Result:
        """Return the result of the line's thread; LinkError if the link is or gets closed."""
        either: list[Future[Any]] = [future, self._closed]
        wait(either, return_when=FIRST_COMPLETED)
        self._check_open()
        return future.result()

    def _check_open(self) -> None:
        if self._closed.done():
            why = self._closed.result() or "it has left"
            raise LinkError(f"the link of worker {self.worker} is closed: {why}", worker=self.worker)


def shaped(links: Sequence[Link], shape: Shape) -> list[ShapedLink]:
    """Put an emulated line of this shape in front of each of these links."""
    return [ShapedLink(link, shape) for link in links]
