"""Workers on machines of their own: rounds over torch.distributed, with fixed members.

Every worker sends straight to every other, through a process group of the link's own (gloo), so each sees for itself
who is missing. A round is a thread that waits; training goes on.

The first thing that goes wrong ends the link: members are fixed, so nobody can go on. Every worker then tells the
others whom it misses and closes its connections, by which they notice; whoever tells nothing is the one that is gone.
So all name the same worker, and not the messenger.
"""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import wait
from contextlib import suppress
from datetime import timedelta
from multiprocessing.util import Finalize
from textwrap import shorten
from typing import Any, Self

from torch import distributed

from atoll.core.allreduce import Reduction
from atoll.errors import AtollError, ConfigError, LinkError
from atoll.link.base import Offer, Pending, RoundId, describe_differences
from atoll.link.net.rendezvous import Rendezvous, begun, parse_address
from atoll.link.net.root_cause import FailureReport, root_cause
from atoll.link.net.seat import Seat
from atoll.link.net.torchrun import refuse_a_group_of_workers, torchrun_address
from atoll.link.net.transfer import RoundTransfer, TransferRequest
from atoll.link.net.wire import MAX_WEIGHT, TAGS, VERSION, PeerConnections, PeerError
from atoll.version import __version__

_BEFORE = "before the first round"
_WORD_S = 0.5  # to find somebody to whom to say that this worker will not come
_MESH_S = 60.0  # for connections between workers that are all there
_FAREWELL_S = 5.0  # for the store to take the reason why this worker leaves, on a line that may be busy
_TOGETHER_S = 0.3  # for connections that have closed at the same moment, of each of which a thread of its own tells
_HEARSAY_S = 1.0  # for the reports of the others, which notice at once what one of them has noticed


def connect(
    address: str | None = None,
    *,
    worker: int | None = None,
    workers: int | None = None,
    rank: int = 0,
    ranks: int = 1,
    deadline_s: float = 180.0,
    join_s: float = 600.0,
) -> "NetLink":
    """This process's end of a link between machines.

    Worker 0 listens at `address` ("10.0.0.1:29500"), and all give the same one; without one, what torchrun says counts,
    and every process is a worker. A worker of several processes exchanges rank by rank (`rank` of `ranks`), each what
    it holds. A round that is not complete `deadline_s` seconds after it was opened here ends the run with a LinkError,
    so that is also how far workers may drift apart; `join_s` is how long to wait for all of them at the start.

    Raises:
        ConfigError: for an argument that cannot be; without an address, also when workers meet (`join`) while a default
            process group spans them: DDP or a Trainer would average their gradients at every step.
    """
    for name, seconds in (("deadline_s", deadline_s), ("join_s", join_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise ConfigError(f"{name} must be a number of seconds above 0, below 10^6, got {seconds!r:.50}")
    by_torchrun = address is None
    if address is None:
        if worker is not None or workers is not None:
            raise ConfigError("address is missing: give the HOST:PORT of worker 0")
        address = torchrun_address(join_s)
        worker, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if worker is None or workers is None:
        raise ConfigError("worker and workers are missing: give this worker's number and how many there are")
    parse_address(address)
    return NetLink(address, Seat(worker, workers, rank, ranks), deadline_s, join_s, by_torchrun=by_torchrun)


# ---------------------------------------------------------------------- the link


class NetLink:
    """One worker's end of a link between machines; `connect` makes it. It meets nobody until `join`."""

    def __init__(
        self, address: str, seat: Seat, deadline_s: float, join_s: float, *, by_torchrun: bool = False
    ) -> None:
        self.worker = seat.worker
        self.workers = seat.workers
        self.deadline_s = deadline_s
        self.seat = seat
        self.on_wait: Callable[[str], None] | None = None
        """Told in a line for whom it waits at the start, if that takes more than a moment."""
        self.check_interrupts: Callable[[], None] | None = None
        """Called again and again while it waits for others to come; may raise."""
        self._address = address
        self._join_s = join_s
        self._by_torchrun = by_torchrun  # every process of one torchrun is a worker
        self._rendezvous: Rendezvous | None = None
        self._connections: PeerConnections | None = None
        self._weights: dict[int, float] = {}
        self._opened = 0
        self._newest = _BEFORE
        self._lock = threading.Lock()
        self._flying: list[RoundTransfer] = []
        self._reduced: dict[int, threading.Event] = {}  # by fragment, of its newest round
        self._blamed = False
        self._gone: set[int] = set()
        self._has_come = False
        self._error: AtollError | None = None
        self._closed = False

    # ------------------------------------------------------------------ rendezvous

    def rendezvous(self, within_s: float | None = None) -> Rendezvous:
        """Where the workers of the run are; comes there if it has not."""
        if self._closed:
            raise LinkError(f"the link of {self.seat} is closed")
        if self._rendezvous is None:
            self._has_come = True  # or tried to, and found nobody
            self._rendezvous = Rendezvous(
                self._address, self.seat, self._join_s, self.on_wait, within_s, self.check_interrupts
            )
            if os.getpid() not in _met.values():
                Finalize(None, _close_all, exitpriority=0)  # multiprocessing's children end without atexit
            _met[self] = os.getpid()
        return self._rendezvous

    def collect(self, key: str, value: Any, within_s: float | None = None) -> Iterator[tuple[Seat, Any]]:
        """What every process of the run says under a key, as they come: JSON of the type of `value`, which is ours.

        They have `join_s`, or `within_s`, which may be long: after `join`, one that dies is noticed at once.
        """
        rendezvous = self.rendezvous(within_s)
        rendezvous.publish(key, value)
        for seat, said in rendezvous.collect(key, self.seat.all(), self.check, within_s):
            if type(said) is not type(value):
                raise LinkError(f"{self._address}: {seat} left something under {key!r} that cannot be read")
            yield seat, said

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """What every process of the run says under a key, in worker order; waits for all of them."""
        return dict(sorted(self.collect(key, value, within_s), key=lambda said: (said[0].worker, said[0].rank)))

    def join(self, terms: Mapping[str, str], weight: float) -> None:
        """Say what all must agree on; LinkError names the differences to another worker."""
        if self._connections is not None:
            raise LinkError(f"{self.seat} has joined already: an OuterLoop needs a link of its own")
        if self._by_torchrun:
            refuse_a_group_of_workers()
        rendezvous = self.rendezvous()
        mine = {"atoll": __version__, "wire format": str(VERSION), "ranks": str(self.seat.ranks), **terms}
        rendezvous.publish("terms", [mine, weight])
        for peer, said in rendezvous.collect("terms", self.seat.peers()):
            match said:
                case [dict() as theirs, int() | float() as their_weight] if 0 < their_weight <= MAX_WEIGHT:
                    self._weights[peer.worker] = float(their_weight)
                case _:
                    raise LinkError(f"{self._address}: {peer} left terms there that cannot be read")
            if differs := describe_differences(mine, theirs):
                raise LinkError(f"{self.seat} and {peer} differ in {differs}")
        self._weights = dict(sorted(self._weights.items()))
        others = [worker for worker in range(self.workers) if worker != self.worker]
        lost = weakref.WeakMethod(self._lost)  # a link that is dropped must not live on in its own threads
        self._connections = PeerConnections(self._group(rendezvous), others, self._weights)
        weakref.finalize(self, self._connections.end).atexit = False  # there, _close_all does it
        try:
            self._connections.watch(lambda fault: (tell := lost()) and tell(fault))
        except PeerError as fault:
            raise LinkError(f"before the first round: worker {fault.worker} {fault}") from fault

    def _group(self, rendezvous: Rendezvous) -> Any:
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()  # the public way would go through torch's global default group
        within_s = min(self._join_s, _MESH_S)
        options._timeout = timedelta(seconds=within_s)
        options._devices = [gloo.create_device(hostname=rendezvous.own_address())]
        place = f"rounds/{self.seat.rank}"
        forming = begun(lambda: gloo(rendezvous.prefix_store(place, within_s), self.worker, self.workers, options))
        until = time.monotonic() + within_s + 1
        while not wait([forming], 0.1).done and (left_s := until - time.monotonic()) > 0:
            self._check_nobody_left(rendezvous, left_s)
        try:
            return forming.result(0)
        except (RuntimeError, TimeoutError) as fault:
            problem = shorten(str(fault), 300, placeholder=" ...")
            # gloo leaves an address under "0/K" for each; one that has left none has gone before it came so far.
            if missing := rendezvous.missing_keys({worker: f"{place}/0/{worker}" for worker in range(self.workers)}):
                who = ", ".join(f"worker {worker}" for worker in missing)
                problem = f"{who} did not open a connection within {within_s:g} s: killed, stopped or cut off"
            raise LinkError(f"{self.seat} cannot connect to the other workers: {problem}") from fault

    def _check_nobody_left(self, rendezvous: Rendezvous, ask_s: float) -> None:
        for said in rendezvous.poll("failure", self._peers(), ask_s=ask_s).values():
            if (report := FailureReport.read(said, self.workers)) is not None:
                raise LinkError(f"{_BEFORE}: worker {report.worker} {report.why}")

    # ------------------------------------------------------------------ rounds

    def present(self, step: int) -> bool:
        """Always: members are fixed."""
        return True

    def trains(self, step: int) -> bool:
        """Always: members are fixed."""
        return True

    def weights(self, step: int) -> Mapping[int, float]:
        """Worker -> weight of all."""
        return self._weights

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; None takes part in nothing and still learns the result."""
        with self._lock:
            self.check()
            if self._connections is None:
                raise LinkError(f"{round_id}: {self.seat} has not joined")
            tag = 2 * self._opened % TAGS
            self._opened += 1  # all open the same rounds in the same order, or headers tell
            after = None if reduction.residual is None else self._reduced.get(round_id.fragment)
            request = TransferRequest(round_id, offer, reduction, tag, self.deadline_s, after)
            transfer = RoundTransfer(request, self._connections, self.worker, self.workers, self._over)
            self._reduced[round_id.fragment] = transfer.reduced
            self._flying.append(transfer)
            self._newest = f"after {round_id}"
            self._connections.start(transfer.run)
        return transfer

    def on_any_rank(self, so: bool) -> bool:
        """Whether it is so on this rank: others have links of their own, and `ShardedLink` asks them."""
        return so

    def check(self) -> None:
        """Raise the LinkError of a round that has failed meanwhile, so that nobody trains on for nothing."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise LinkError(f"the link of {self.seat} is closed")

    # ------------------------------------------------------------------ failure

    def _over(self, transfer: RoundTransfer, fault: Exception | None) -> None:
        if fault is not None:
            self._fail(fault, str(transfer.round_id))
            return
        with self._lock:
            self._flying.remove(transfer)

    def _lost(self, fault: PeerError) -> None:
        self._fail(fault, self._now())

    def _now(self) -> str:
        """Where this worker stands: in its oldest round, or after the last one."""
        waiting = [str(transfer.round_id) for transfer in list(self._flying) if not transfer.complete]
        return waiting[0] if waiting else self._newest

    def _fail(self, fault: Exception, now: str) -> None:
        with self._lock:
            rendezvous, connections = self._rendezvous, self._connections
            if isinstance(fault, PeerError) and fault.closed:
                self._gone.add(fault.worker)
            if self._blamed or self._closed or rendezvous is None or connections is None:  # a consequence
                return
            self._blamed = True
        if isinstance(fault, PeerError):
            report = FailureReport(fault.worker, str(fault), now, fault.closed)
        else:
            report = FailureReport(self.worker, f"failed: {type(fault).__name__}: {fault}", now)
        reached = rendezvous.try_publish("failure", report._asdict())
        if not reached and report.closed and self._has_closed(0):
            report = report._replace(worker=0)  # with the store: the other one has only noticed that first
        connections.close()
        if isinstance(fault, AtollError):
            self._end(fault)
            return
        reports = {self.worker: report}
        if reached:
            for seat, said in rendezvous.poll("failure", self._peers(), _HEARSAY_S).items():
                if (theirs := FailureReport.read(said, self.workers)) is not None:
                    reports[seat.worker] = theirs
            reports |= self._ended_too_early(rendezvous, reports, now)
        self._end(LinkError(root_cause(self.worker, reports, self.workers, reached=reached)))

    def _has_closed(self, worker: int) -> bool:
        """Whether a worker has closed its connection too; true of all once this one closes its own."""
        until = time.monotonic() + _TOGETHER_S
        while worker not in self._gone and time.monotonic() < until:
            time.sleep(0.01)
        return worker in self._gone

    def _ended_too_early(
        self, rendezvous: Rendezvous, reports: Mapping[int, FailureReport], now: str
    ) -> dict[int, FailureReport]:
        """Of those that have reported nothing: who came to its end, though this worker still had a round to make."""
        silent = [peer for peer in self._peers() if peer.worker not in reports]
        found = {}
        for seat, last in rendezvous.poll("end", silent).items():
            if isinstance(last, str) and last.removeprefix("after ") != now.removeprefix("after "):
                why = f"has finished and left, {last[:100]}: all workers must make the same number of steps"
                found[seat.worker] = FailureReport(seat.worker, why, now)
        return found

    def _end(self, error: AtollError) -> None:
        with self._lock:
            self._error = error
            flying = list(self._flying)
        for transfer in flying:
            transfer.give_up(error)

    def _peers(self) -> list[Seat]:
        return [peer for peer in self.seat.peers() if peer != self.seat]

    # ------------------------------------------------------------------ the end

    def close(self, reason: str | None = None) -> None:
        """Leave; with a reason, before the end: whoever waits for this worker gets a LinkError that says it.

        Without one, waits until all have come to the end, for what was sent last may still be on its way.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True  # from here on, a connection that closes is no failure
            rendezvous, connections, failed = self._rendezvous, self._connections, self._blamed
        try:
            if rendezvous is None and reason is not None and not self._has_come:
                rendezvous = self._late_visit()
            if rendezvous is not None and not failed:
                if reason is not None:
                    report = FailureReport(self.worker, f"left: {reason}", self._now())
                    rendezvous.try_publish("failure", report._asdict(), _FAREWELL_S)
                elif connections is not None:
                    self._meet_at_the_end(rendezvous)
        finally:  # also if Ctrl-C ends the waiting
            self._rendezvous = self._connections = None  # and with them the port
            for transfer in list(self._flying):
                transfer.give_up(LinkError(f"{transfer.round_id}: the link of {self.seat} was closed"))
            if connections is not None:
                connections.end()
            if rendezvous is not None:
                rendezvous.leave()

    def _late_visit(self) -> Rendezvous | None:
        """Where the others wait for this worker, if they do: it leaves without ever having come."""
        if self.seat.hosts:
            return None
        with suppress(LinkError):
            return Rendezvous(self._address, self.seat, _WORD_S)
        return None

    def _meet_at_the_end(self, rendezvous: Rendezvous) -> None:
        until = time.monotonic() + self.deadline_s
        rendezvous.try_publish("end", self._newest, self.deadline_s)
        missing = self._peers()
        while missing and rendezvous.answers and (left_s := until - time.monotonic()) > 0:
            here = rendezvous.poll("end", missing, ask_s=left_s)
            # One that has closed its connection, has met all others, or has died.
            missing = [peer for peer in missing if peer not in here and peer.worker not in self._gone]
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close(None if error is None else str(error) or type(error).__name__)


_met: "weakref.WeakKeyDictionary[NetLink, int]" = weakref.WeakKeyDictionary()  # with the process that met


@atexit.register
def _close_all() -> None:
    """Say goodbye for a script that has forgotten to: a thread left when Python ends could take the process down."""
    fault = sys.exc_info()[1] or getattr(sys, "last_value", None)  # what ends a child process, or has ended a script
    if isinstance(fault, SystemExit):
        fault = fault.__context__
    why = "" if fault is None else f": {type(fault).__name__}: {shorten(str(fault), 500, placeholder=' ...')}"
    for link, process in list(_met.items()):
        if process == os.getpid():
            link.close(f"its process has ended without closing the link{why}")
