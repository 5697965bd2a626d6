"""Links workers on different machines whose members are fixed: the loss of one ends the run on all."""

import atexit
import json
import math
import os
import re
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.util import Finalize
from pathlib import Path
from textwrap import shorten
from typing import Any, Self, TypedDict, Unpack

from atoll._util.checks import config_error
from atoll.core.allreduce import Reduction
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Link, Offer, Pending, RoundId, describe_differences, warn_unfinished
from atoll.link.net.event_loop import event_loop
from atoll.link.net.failure import Failure
from atoll.link.net.fixed_member import Fault, FixedMember
from atoll.link.net.identity import Identity
from atoll.link.net.meeting_point import VALUE_CHARACTERS
from atoll.link.net.messages import WIRE_FORMAT
from atoll.link.net.open_round import OpenRound
from atoll.link.net.own_address import addresses_of
from atoll.link.net.registry import Insecure
from atoll.link.net.rendezvous import Rendezvous, Waiting, parse_address
from atoll.link.net.root_cause import FailureReport
from atoll.link.net.torchrun import refuse_a_group_of_workers, torchrun_place, torchrun_rank
from atoll.link.net.traffic import Line
from atoll.link.net.views import Process
from atoll.link.net.worker_keys import load_keys
from atoll.link.seat import Seat
from atoll.version import __version__

_BEFORE = "before the first round"
_KEY = re.compile(r"[a-z0-9 _-]{1,48}", re.ASCII)
_LATE_VISIT_S = 0.5  # to find worker 0, if only to say that this worker will not come
_CONNECT_S = 60.0  # for connections between workers that are all there
_FAREWELL_S = 5.0  # to publish why this worker leaves, on a line that may be busy


class Limits(TypedDict, total=False):
    """Bounds how long a link waits, in seconds."""

    deadline_s: float
    """That a round may take after it was opened here, and so how far workers may drift apart."""
    silent_s: float
    """After which a worker that says nothing is lost."""
    join_s: float
    """To wait for all workers at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetOptions:
    """Says how a worker takes part in a run whose members are fixed."""

    address: str
    """HOST:PORT at which worker 0 listens."""
    security: Identity | Insecure
    """This worker's identity, or "none" on a private cable."""
    deadline_s: float = 180.0
    silent_s: float = 5.0
    join_s: float = 600.0
    by_torchrun: bool = False
    """Whether every process of one torchrun is a worker."""


def connect(
    address: str | None = None,
    *,
    worker: int | None = None,
    workers: int | None = None,
    keys: str | Path | None = None,
    rank: int = 0,
    ranks: int = 1,
    **limits: Unpack[Limits],
) -> "NetLink":
    """Make this process's link to workers on other machines; nothing is sent before `join`.

    Args:
        address: HOST:PORT at which worker 0 listens, the same on all workers; None takes torchrun's, where every
            process is a worker.
        worker: This worker's number.
        workers: Number of workers.
        keys: Folder of this worker's bundle, made by `atoll keys new`; "none" on a private cable, where nobody else
            can send. Under torchrun it may be left out: worker 0 makes keys, and torchrun's own store hands them out.
        rank: This process's rank in its worker; a worker of several ranks exchanges rank by rank.
        ranks: Ranks of one worker.
        **limits: Seconds: `deadline_s` (180) that a round may take after it was opened here, and so how far workers
            may drift apart; `silent_s` (5) after which a worker that says nothing is lost; `join_s` (600) to wait for
            all workers at the start. Then the run ends with a LinkError.

    Raises:
        ConfigError: An argument is invalid, or the keys cannot be read or are another worker's; without an address,
            also (in `join`) when a default process group spans the workers: DDP or a Trainer would average their
            gradients at every step.
    """
    for name, seconds in limits.items():
        if name not in Limits.__annotations__:
            raise TypeError(f"connect() got an unexpected keyword argument {name!r}")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e6:
            raise config_error(name, seconds, "a number of seconds above 0, below 10^6")
    by_torchrun, security = address is None, None
    if address is None:
        if worker is not None or workers is not None:
            raise ConfigError("address is missing: give the HOST:PORT of worker 0", setting="address")
        worker, workers = torchrun_rank()
        made = torchrun_place(worker, workers, limits.get("join_s", 600.0), with_keys=keys is None)
        address, security = made.address, made.identity
    if worker is None or workers is None:
        problem = "worker and workers are missing: give this worker's number and how many there are"
        raise ConfigError(problem, setting="worker" if worker is None else "workers")
    parse_address(address)
    seat = Seat(worker, workers, rank, ranks)
    proof = security or load_keys(keys, worker)
    return NetLink(NetOptions(address=address, security=proof, by_torchrun=by_torchrun, **limits), seat)


# ---------------------------------------------------------------------- the link


class NetLink(Link):
    """Links one worker to those on other machines; `connect` makes it, and `join` connects it."""

    def __init__(self, options: NetOptions, seat: Seat) -> None:
        self.worker = seat.worker
        self.workers = seat.workers
        self.seat = seat
        self.options = options
        self.waiting = Waiting(options.join_s)
        """How this process waits for others to come, and what it tells meanwhile."""
        self._rendezvous: Rendezvous | None = None
        self._member: FixedMember | None = None
        self._newest = _BEFORE
        self._failure = Failure(seat)
        self._closed = False
        self._has_visited = False
        self._staging = ThreadPoolExecutor(1, thread_name_prefix="atoll-stage")

    @property
    def deadline_s(self) -> float:
        """Seconds that a round may take."""
        return self.options.deadline_s

    # ------------------------------------------------------------------ rendezvous

    def rendezvous(self, within_s: float | None = None) -> Rendezvous:
        """Return the rendezvous of the run, connecting to it on first use."""
        if self._closed:
            raise LinkError(f"the link of {self.seat} is closed", worker=self.worker)
        if self._rendezvous is None:
            self._has_visited = True  # or has tried to
            self._rendezvous = self._meet(math.inf if within_s is None else within_s)
            _when_dropped(self, self._rendezvous.abandon)
            if os.getpid() not in _connected.values():
                Finalize(None, _close_all, exitpriority=0)  # multiprocessing's children run no atexit
            _connected[self] = os.getpid()
        return self._rendezvous

    def _meet(self, within_s: float) -> Rendezvous:
        return Rendezvous(self.options.address, self.seat, self.options.security, self.waiting, within_s)

    def collect(self, key: str, value: Any, within_s: float | None = None) -> Iterator[tuple[Seat, Any]]:
        """Publish a value and yield that of every process of the run, as they come.

        Args:
            key: The key to publish under.
            value: This process's JSON value; the others' must be of the same type.
            within_s: Seconds to wait, None for `join_s`; may be long, for after `join` a death is noticed at once.
        """
        value = _as_json(key, value)
        rendezvous = self.rendezvous(within_s)
        name = rendezvous.gathering(key)
        rendezvous.publish(name, value)
        for seat, theirs in rendezvous.collect(name, self.seat.all(), self.check, within_s):
            if type(theirs) is not type(value):
                raise self._unreadable(seat, key)
            yield seat, theirs

    def _unreadable(self, seat: Seat, key: str) -> LinkError:
        problem = f"{self.options.address}: {seat} published something under {key!r} that cannot be read"
        return LinkError(problem, worker=seat.worker)

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Publish a value and return that of every process of the run, in worker order."""
        return dict(sorted(self.collect(key, value, within_s), key=lambda item: (item[0].worker, item[0].rank)))

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        """Connect to the other workers; LinkError names the terms in which another worker differs."""
        if self._member is not None:
            raise LinkError(f"{self.seat} has joined already: each OuterLoop needs its own link", worker=self.worker)
        if self.options.by_torchrun:
            refuse_a_group_of_workers()
        mine = {"atoll": __version__, "wire format": WIRE_FORMAT, "ranks": str(self.seat.ranks), **terms}
        mine |= start or {}
        rendezvous = self.rendezvous()
        rendezvous.publish("terms", mine)
        for peer, theirs in rendezvous.collect("terms", self.seat.peers()):
            if not isinstance(theirs, dict):
                raise self._unreadable(peer, "terms")
            if differs := describe_differences(mine, theirs):
                raise LinkError(f"{self.seat} and {peer} differ in {differs}", worker=peer.worker)
        self._connect(rendezvous, weight)

    def _connect(self, rendezvous: Rendezvous, weight: float) -> None:
        """Open the connections to the same rank of every other worker."""
        options, me = self.options, Process(self.worker, 1 + secrets.randbelow((1 << 62) - 1))
        report = weakref.WeakMethod(self._on_fault)  # the event loop must not keep a dropped link alive

        def on_fault(fault: Fault) -> None:
            if (act := report()) is not None:
                act(fault)

        async def start() -> tuple[FixedMember, str]:
            member = FixedMember(
                me, self.workers, options.security, weight, options.silent_s, options.deadline_s, on_fault
            )
            return member, await member.peers.start(*addresses_of("0.0.0.0:0", options.address))

        self._member, address = event_loop().run(start())
        _when_dropped(self, partial(_abandon, self._member))
        rendezvous.publish("listening", [me.life, address])
        others: dict[Process, str] = {}
        for peer, said in rendezvous.collect("listening", self._failure.others, self.check):
            match said:
                case [int() as life, str() as theirs] if 0 < life < 1 << 62:
                    others[Process(peer.worker, life)] = theirs[:300]
                case _:
                    raise self._unreadable(peer, "listening")
        meeting = self._member.meet(others, min(options.join_s, _CONNECT_S))
        event_loop().run(meeting, lambda: self._check_all_come(rendezvous))

    def _check_all_come(self, rendezvous: Rendezvous) -> None:
        self.waiting.check_interrupts()
        self.check()
        for value in rendezvous.poll("failure", self._failure.others).values():
            if (report := FailureReport.read(value, self.workers)) is not None:
                raise LinkError(f"{_BEFORE}: worker {report.worker} {report.why}", worker=report.worker)

    # ------------------------------------------------------------------ rounds

    def lines(self) -> Mapping[int, Line]:
        """Return worker -> what this worker has exchanged with it."""
        return {} if self._member is None else event_loop().run(self._member.lines())

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers."""
        assert self._member is not None
        return self._member.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; with None, the worker only receives the result."""
        self.check()
        if self._member is None:
            raise LinkError(f"{round_id}: {self.seat} has not joined", worker=self.worker, round_id=round_id)
        opened = OpenRound(round_id, offer, reduction)
        self._newest = f"after {round_id}"
        self._member.start(opened, self._staging)
        return opened

    def check(self) -> None:
        """Raise the LinkError of a round that has failed since, so that no worker trains on in vain."""
        if self._failure.error is not None:
            raise self._failure.error
        if self._closed:
            raise LinkError(f"the link of {self.seat} is closed", worker=self.worker)

    # ------------------------------------------------------------------ failure

    def _on_fault(self, fault: Fault) -> None:
        """Start to find out what has happened; called in the event loop."""
        if self._failure.begin(fault) and not self._closed:
            threading.Thread(target=self._fail, args=(fault,), daemon=True).start()

    def _fail(self, fault: Fault) -> None:
        rendezvous, member = self._rendezvous, self._member
        if rendezvous is None or member is None:
            return
        error = self._failure.inquire(fault, self._position(), rendezvous, lambda: event_loop().post(member.part))
        self._failure.error = error
        event_loop().post(lambda: member.fail(error))

    def _position(self) -> str:
        """Return the oldest round in flight, or after which round this worker is."""
        return (self._member.position() if self._member else None) or self._newest

    # ------------------------------------------------------------------ close

    def close(self, reason: str | None = None) -> None:
        """Leave; a reason, given when leaving before the end, becomes the LinkError of waiting workers.

        Without a reason, waits until all workers have come to the end: the last messages may still be on their way.
        """
        if self._closed:
            return
        self._closed = True  # from here on, a closed connection is no failure
        failed = self._failure.has_begun
        if reason is None and not failed:
            warn_unfinished(self)
        rendezvous, member = self._rendezvous, self._member
        try:
            if rendezvous is None and reason is not None and not self._has_visited:
                rendezvous = self._late_visit()
            if rendezvous is not None and not failed:
                if reason is not None:
                    report = FailureReport(self.worker, f"left: {reason}", self._position())
                    rendezvous.try_publish("failure", report._asdict(), _FAREWELL_S)
                elif member is not None:
                    self._wait_for_all_to_end(rendezvous)
        finally:  # also if Ctrl-C ends the wait
            self._rendezvous = None  # and with it the port
            if member is not None:
                event_loop().run(_close(member, self.seat, "" if reason is None else f"left: {reason}"))
            if rendezvous is not None:
                rendezvous.leave()
            self._staging.shutdown(wait=False)

    def _late_visit(self) -> Rendezvous | None:
        """Connect only to report that this worker leaves; None if the others do not wait for it."""
        if self.seat.hosts:
            return None
        with suppress(LinkError):
            return self._meet(_LATE_VISIT_S)
        return None

    def _wait_for_all_to_end(self, rendezvous: Rendezvous) -> None:
        until = time.monotonic() + self.deadline_s
        rendezvous.try_publish("end", self._newest, self.deadline_s)
        missing = self._failure.others
        while missing and rendezvous.answers and (left_s := until - time.monotonic()) > 0:
            here = rendezvous.poll("end", missing, min(0.1, left_s), left_s)
            # A worker that closed its connection has seen all others end, or has died.
            missing = [peer for peer in missing if peer not in here and peer.worker not in self._failure.gone]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.close(None if error is None else str(error) or type(error).__name__)


async def _close(member: FixedMember, seat: Seat, reason: str) -> None:
    """Close a member; with a reason, without sending what is queued."""
    member.fail(LinkError(f"the link of {seat} was closed", worker=seat.worker))
    if reason:
        member.part(reason)
    await member.close()


def _as_json(key: str, value: Any) -> Any:
    """Return a value as others read it from JSON; ConfigError if it cannot be gathered under this key."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise config_error("key", key, "1 to 48 lower-case letters, digits, spaces, - and _")
    try:
        text = json.dumps(value)
    except (TypeError, ValueError, RecursionError) as fault:
        raise ConfigError(f"value of {key!r} must be JSON to be gathered: {fault}", setting=key) from fault
    if len(text) > VALUE_CHARACTERS:
        problem = f"value of {key!r} has {len(text)} characters as JSON, allowed are {VALUE_CHARACTERS}"
        raise ConfigError(f"{problem}: gather less, or save it to a file", setting=key)
    return json.loads(text)


def _when_dropped(link: NetLink, act: Callable[[], None]) -> None:
    """Call a function when a link is dropped without close(), in the process that has made it."""
    here = os.getpid()
    weakref.finalize(link, lambda: act() if os.getpid() == here else None).atexit = False  # there, _close_all does it


def _abandon(member: FixedMember) -> None:
    """Close a member of a link that was dropped; in any thread, and without waiting."""
    event_loop().begin(member.close())


_connected: "weakref.WeakKeyDictionary[NetLink, int]" = weakref.WeakKeyDictionary()  # connected links -> process id


@atexit.register
def _close_all() -> None:
    """Close links that a script left open, and tell the other workers why."""
    fault = sys.exc_info()[1] or getattr(sys, "last_value", None)  # of a child process, or of a script
    if isinstance(fault, SystemExit):
        fault = fault.__context__
    why = "" if fault is None else f": {type(fault).__name__}: {shorten(str(fault), 500, placeholder=' ...')}"
    for link, process in list(_connected.items()):
        if process == os.getpid():
            link.close(f"its process has ended without closing the link{why}")
