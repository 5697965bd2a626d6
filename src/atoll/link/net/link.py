"""Links workers on different machines over torch.distributed (gloo); the members of a run are fixed.

Every worker sends straight to every other, through the link's own process group, so each sees by itself which worker is
missing. A round is a thread that waits; training goes on.

The first failure ends the link, for members are fixed. Every worker then publishes which worker it misses and closes
its connections, by which the others notice; a worker that publishes nothing is the one that is gone. So all workers
name the same one, and not the messenger.
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

from atoll._util.checks import config_error
from atoll.core.allreduce import Reduction
from atoll.errors import AtollError, ConfigError, LinkError
from atoll.link.base import Link, Offer, Pending, RoundId, describe_differences, warn_unfinished
from atoll.link.net.rendezvous import Rendezvous, in_thread, parse_address
from atoll.link.net.root_cause import FailureReport, root_cause
from atoll.link.net.seat import Seat
from atoll.link.net.torchrun import refuse_a_group_of_workers, torchrun_address
from atoll.link.net.transfer import RoundTransfer, TransferRequest
from atoll.link.net.wire import MAX_WEIGHT, TAGS, VERSION, PeerConnections, PeerError
from atoll.version import __version__

_BEFORE = "before the first round"
_LATE_VISIT_S = 0.5  # to find the store, if only to say that this worker will not come
_CONNECT_S = 60.0  # for connections between workers that are all there
_FAREWELL_S = 5.0  # to publish why this worker leaves, on a line that may be busy
_CLOSED_TOGETHER_S = 0.3  # between connections that close at the same moment, each noticed by its own thread
_REPORTS_S = 1.0  # for the reports of the others, which notice a failure at once


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
    """Make this process's link to workers on other machines; nothing is sent before `join`.

    Args:
        address: HOST:PORT at which worker 0 listens, the same on all workers; None takes torchrun's, where every
            process is a worker.
        worker: This worker's number.
        workers: Number of workers.
        rank: This process's rank in its worker; a worker of several ranks exchanges rank by rank.
        ranks: Ranks of one worker.
        deadline_s: Seconds that a round may take after it was opened here, and so how far workers may drift apart;
            then the run ends with a LinkError.
        join_s: Seconds to wait for all workers at the start.

    Raises:
        ConfigError: An argument is invalid; without an address, also (in `join`) when a default process group spans
            the workers: DDP or a Trainer would average their gradients at every step.
    """
    for name, seconds in (("deadline_s", deadline_s), ("join_s", join_s)):
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise config_error(name, seconds, "a number of seconds above 0, below 10^6")
    by_torchrun = address is None
    if address is None:
        if worker is not None or workers is not None:
            raise ConfigError("address is missing: give the HOST:PORT of worker 0", setting="address")
        address = torchrun_address(join_s)
        worker, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if worker is None or workers is None:
        problem = "worker and workers are missing: give this worker's number and how many there are"
        raise ConfigError(problem, setting="worker" if worker is None else "workers")
    parse_address(address)
    return NetLink(address, Seat(worker, workers, rank, ranks), deadline_s, join_s, by_torchrun=by_torchrun)


# ---------------------------------------------------------------------- the link


class NetLink(Link):
    """Links one worker to those on other machines; `connect` makes it, and `join` connects it."""

    def __init__(
        self, address: str, seat: Seat, deadline_s: float, join_s: float, *, by_torchrun: bool = False
    ) -> None:
        self.worker = seat.worker
        self.workers = seat.workers
        self.deadline_s = deadline_s
        self.seat = seat
        self.on_wait: Callable[[str], None] | None = None
        """Called with a line that names the missing workers, if they take more than a moment to come."""
        self.check_interrupts: Callable[[], None] | None = None
        """Called repeatedly while the link waits for others to come; may raise."""
        self._address = address
        self._join_s = join_s
        self._by_torchrun = by_torchrun  # every process of one torchrun is a worker
        self._rendezvous: Rendezvous | None = None
        self._connections: PeerConnections | None = None
        self._weights: dict[int, float] = {}
        self._opened = 0
        self._newest = _BEFORE
        self._lock = threading.Lock()
        self._in_flight: list[RoundTransfer] = []
        self._reduced: dict[int, threading.Event] = {}  # by fragment, of its newest round
        self._has_failed = False
        self._gone: set[int] = set()
        self._has_visited = False
        self._error: AtollError | None = None
        self._closed = False

    # ------------------------------------------------------------------ rendezvous

    def rendezvous(self, within_s: float | None = None) -> Rendezvous:
        """Return the rendezvous of the run, connecting to it on first use."""
        if self._closed:
            raise LinkError(f"the link of {self.seat} is closed", worker=self.worker)
        if self._rendezvous is None:
            self._has_visited = True  # or has tried to
            self._rendezvous = Rendezvous(
                self._address, self.seat, self._join_s, self.on_wait, within_s, self.check_interrupts
            )
            if os.getpid() not in _connected.values():
                Finalize(None, _close_all, exitpriority=0)  # multiprocessing's children run no atexit
            _connected[self] = os.getpid()
        return self._rendezvous

    def collect(self, key: str, value: Any, within_s: float | None = None) -> Iterator[tuple[Seat, Any]]:
        """Publish a value and yield that of every process of the run, as they come.

        Args:
            key: The key to publish under.
            value: This process's JSON value; the others' must be of the same type.
            within_s: Seconds to wait, None for `join_s`; may be long, for after `join` a death is noticed at once.
        """
        rendezvous = self.rendezvous(within_s)
        rendezvous.publish(key, value)
        for seat, theirs in rendezvous.collect(key, self.seat.all(), self.check, within_s):
            if type(theirs) is not type(value):
                problem = f"{self._address}: {seat} published something under {key!r} that cannot be read"
                raise LinkError(problem, worker=seat.worker)
            yield seat, theirs

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Publish a value and return that of every process of the run, in worker order."""
        return dict(sorted(self.collect(key, value, within_s), key=lambda item: (item[0].worker, item[0].rank)))

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        """Connect to the other workers; LinkError names the terms in which another worker differs."""
        if self._connections is not None:
            raise LinkError(f"{self.seat} has joined already: each OuterLoop needs its own link", worker=self.worker)
        if self._by_torchrun:
            refuse_a_group_of_workers()
        rendezvous = self.rendezvous()
        mine = {
            "atoll": __version__,
            "wire format": str(VERSION),
            "ranks": str(self.seat.ranks),
            **terms,
            **(start or {}),
        }
        rendezvous.publish("terms", [mine, weight])
        for peer, said in rendezvous.collect("terms", self.seat.peers()):
            match said:
                case [dict() as theirs, int() | float() as their_weight] if 0 < their_weight <= MAX_WEIGHT:
                    self._weights[peer.worker] = float(their_weight)
                case _:
                    problem = f"{self._address}: {peer} published terms that cannot be read"
                    raise LinkError(problem, worker=peer.worker)
            if differs := describe_differences(mine, theirs):
                raise LinkError(f"{self.seat} and {peer} differ in {differs}", worker=peer.worker)
        self._weights = dict(sorted(self._weights.items()))
        others = [worker for worker in range(self.workers) if worker != self.worker]
        lost = weakref.WeakMethod(self._on_connection_lost)  # its threads must not keep a dropped link alive
        self._connections = PeerConnections(self._group(rendezvous), others, self._weights)
        weakref.finalize(self, self._connections.end).atexit = False  # there, _close_all does it
        try:
            self._connections.watch(lambda fault: (on_lost := lost()) and on_lost(fault))
        except PeerError as fault:
            raise LinkError(f"{_BEFORE}: worker {fault.worker} {fault}", worker=fault.worker) from fault

    def _group(self, rendezvous: Rendezvous) -> Any:
        gloo: Any = distributed.ProcessGroupGloo
        options = gloo._Options()  # the public API needs torch's default group
        within_s = min(self._join_s, _CONNECT_S)
        options._timeout = timedelta(seconds=within_s)
        options._devices = [gloo.create_device(hostname=rendezvous.own_address())]
        place = f"rounds/{self.seat.rank}"
        forming = in_thread(lambda: gloo(rendezvous.prefix_store(place, within_s), self.worker, self.workers, options))
        until = time.monotonic() + within_s + 1
        while not wait([forming], 0.1).done and (left_s := until - time.monotonic()) > 0:
            self._check_no_worker_left(rendezvous, left_s)
        try:
            return forming.result(0)
        except (RuntimeError, TimeoutError) as fault:
            problem = shorten(str(fault), 300, placeholder=" ...")
            # gloo publishes an address under "0/K" for each; a worker without one left before that.
            if missing := rendezvous.missing_keys({worker: f"{place}/0/{worker}" for worker in range(self.workers)}):
                names = ", ".join(f"worker {worker}" for worker in missing)
                problem = f"{names} did not open a connection within {within_s:g} s: killed, stopped or cut off"
            worker = missing[0] if missing else None
            raise LinkError(f"{self.seat} cannot connect to the other workers: {problem}", worker=worker) from fault

    def _check_no_worker_left(self, rendezvous: Rendezvous, ask_s: float) -> None:
        for value in rendezvous.poll("failure", self._peers(), ask_s=ask_s).values():
            if (report := FailureReport.read(value, self.workers)) is not None:
                raise LinkError(f"{_BEFORE}: worker {report.worker} {report.why}", worker=report.worker)

    # ------------------------------------------------------------------ rounds

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers."""
        return self._weights

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round in its own thread; with None, the worker only receives the result."""
        with self._lock:
            self.check()
            if self._connections is None:
                raise LinkError(f"{round_id}: {self.seat} has not joined", worker=self.worker, round_id=round_id)
            tag = 2 * self._opened % TAGS
            self._opened += 1  # all open the same rounds in the same order; headers prove it
            after = None if reduction.residual is None else self._reduced.get(round_id.fragment)
            request = TransferRequest(round_id, offer, reduction, tag, self.deadline_s, after)
            transfer = RoundTransfer(request, self._connections, self.worker, self.workers, self._on_transfer_end)
            self._reduced[round_id.fragment] = transfer.reduced
            self._in_flight.append(transfer)
            self._newest = f"after {round_id}"
            self._connections.start(transfer.run)
        return transfer

    def check(self) -> None:
        """Raise the LinkError of a round that has failed since, so that no worker trains on in vain."""
        if self._error is not None:
            raise self._error
        if self._closed:
            raise LinkError(f"the link of {self.seat} is closed", worker=self.worker)

    # ------------------------------------------------------------------ failure

    def _on_transfer_end(self, transfer: RoundTransfer, fault: Exception | None) -> None:
        if fault is not None:
            self._fail(fault, str(transfer.round_id))
            return
        with self._lock:
            self._in_flight.remove(transfer)

    def _on_connection_lost(self, fault: PeerError) -> None:
        self._fail(fault, self._position())

    def _position(self) -> str:
        """Return the oldest round in flight, or after which round this worker is."""
        waiting = [str(transfer.round_id) for transfer in list(self._in_flight) if not transfer.complete]
        return waiting[0] if waiting else self._newest

    def _fail(self, fault: Exception, now: str) -> None:
        with self._lock:
            rendezvous, connections = self._rendezvous, self._connections
            if isinstance(fault, PeerError) and fault.closed:
                self._gone.add(fault.worker)
            if self._has_failed or self._closed or rendezvous is None or connections is None:  # a consequence
                return
            self._has_failed = True
        if isinstance(fault, PeerError):
            report = FailureReport(fault.worker, str(fault), now, fault.closed)
        else:
            report = FailureReport(self.worker, f"failed: {type(fault).__name__}: {fault}", now)
        reached = rendezvous.try_publish("failure", report._asdict())
        if not reached and report.closed and self._has_closed(0):
            report = report._replace(worker=0)  # the store is gone: another worker only noticed first
        connections.close()
        if isinstance(fault, AtollError):
            self._end(fault)
            return
        reports = {self.worker: report}
        if reached:
            for seat, value in rendezvous.poll("failure", self._peers(), _REPORTS_S).items():
                if (theirs := FailureReport.read(value, self.workers)) is not None:
                    reports[seat.worker] = theirs
            reports |= self._ended_too_early(rendezvous, reports, now)
        self._end(root_cause(self.worker, reports, self.workers, reached=reached))

    def _has_closed(self, worker: int) -> bool:
        """Return whether a worker has closed its connection too, as all do once this one closes its own."""
        until = time.monotonic() + _CLOSED_TOGETHER_S
        while worker not in self._gone and time.monotonic() < until:
            time.sleep(0.01)
        return worker in self._gone

    def _ended_too_early(
        self, rendezvous: Rendezvous, reports: Mapping[int, FailureReport], now: str
    ) -> dict[int, FailureReport]:
        """Return reports for silent workers that finished while this one still had a round to make."""
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
            in_flight = list(self._in_flight)
        for transfer in in_flight:
            transfer.give_up(error)

    def _peers(self) -> list[Seat]:
        return [peer for peer in self.seat.peers() if peer != self.seat]

    # ------------------------------------------------------------------ close

    def close(self, reason: str | None = None) -> None:
        """Leave; a reason, given when leaving before the end, becomes the LinkError of waiting workers.

        Without a reason, waits until all workers have come to the end: the last messages may still be on their way.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True  # from here on, a closed connection is no failure
            rendezvous, connections, failed = self._rendezvous, self._connections, self._has_failed
        if reason is None and not failed:
            warn_unfinished(self)
        try:
            if rendezvous is None and reason is not None and not self._has_visited:
                rendezvous = self._late_visit()
            if rendezvous is not None and not failed:
                if reason is not None:
                    report = FailureReport(self.worker, f"left: {reason}", self._position())
                    rendezvous.try_publish("failure", report._asdict(), _FAREWELL_S)
                elif connections is not None:
                    self._wait_for_all_to_end(rendezvous)
        finally:  # also if Ctrl-C ends the wait
            self._rendezvous = self._connections = None  # and with them the port
            for transfer in list(self._in_flight):
                problem = f"{transfer.round_id}: the link of {self.seat} was closed"
                transfer.give_up(LinkError(problem, worker=self.worker, round_id=transfer.round_id))
            if connections is not None:
                connections.end()
            if rendezvous is not None:
                rendezvous.leave()

    def _late_visit(self) -> Rendezvous | None:
        """Connect only to report that this worker leaves; None if the others do not wait for it."""
        if self.seat.hosts:
            return None
        with suppress(LinkError):
            return Rendezvous(self._address, self.seat, _LATE_VISIT_S)
        return None

    def _wait_for_all_to_end(self, rendezvous: Rendezvous) -> None:
        until = time.monotonic() + self.deadline_s
        rendezvous.try_publish("end", self._newest, self.deadline_s)
        missing = self._peers()
        while missing and rendezvous.answers and (left_s := until - time.monotonic()) > 0:
            here = rendezvous.poll("end", missing, ask_s=left_s)
            # A worker that closed its connection has seen all others end, or has died.
            missing = [peer for peer in missing if peer not in here and peer.worker not in self._gone]
            time.sleep(0.02)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close(None if error is None else str(error) or type(error).__name__)


_connected: "weakref.WeakKeyDictionary[NetLink, int]" = weakref.WeakKeyDictionary()  # connected links -> process id


@atexit.register
def _close_all() -> None:
    """Close links that a script left open: a thread left at interpreter exit could crash the process."""
    fault = sys.exc_info()[1] or getattr(sys, "last_value", None)  # of a child process, or of a script
    if isinstance(fault, SystemExit):
        fault = fault.__context__
    why = "" if fault is None else f": {type(fault).__name__}: {shorten(str(fault), 500, placeholder=' ...')}"
    for link, process in list(_connected.items()):
        if process == os.getpid():
            link.close(f"its process has ended without closing the link{why}")
