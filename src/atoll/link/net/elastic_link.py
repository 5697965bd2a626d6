"""Links workers on different machines that come and go while others train."""

import secrets
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypedDict, Unpack

from atoll._util.checks import check_whole, config_error
from atoll.core.allreduce import Reduction
from atoll.errors import ExcludedError, LinkError
from atoll.link.base import STEPS_MADE, Admission, FragmentState, Link, Offer, Pending, Round, RoundId, warn_unfinished
from atoll.link.net import departure
from atoll.link.net.admission import NetAdmission
from atoll.link.net.donor import Donor
from atoll.link.net.entrance import Entrance, run_is_over
from atoll.link.net.event_loop import event_loop
from atoll.link.net.grace import watch_late
from atoll.link.net.greeting import Greeting
from atoll.link.net.identity import Identity
from atoll.link.net.member import Member
from atoll.link.net.membership import Membership
from atoll.link.net.messages import WIRE_FORMAT
from atoll.link.net.open_registry import open_registry
from atoll.link.net.open_round import OpenRound
from atoll.link.net.own_address import addresses_of
from atoll.link.net.peers import Peers
from atoll.link.net.protocol import Protocol
from atoll.link.net.registry import Insecure
from atoll.link.net.traffic import Line
from atoll.link.net.views import Decision, Process
from atoll.link.net.worker_keys import load_keys
from atoll.link.seat import Seat
from atoll.version import __version__

CONNECTIONS: Final = 8
"""Most TCP connections for payloads between two workers."""
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticOptions:
    """Says how a worker takes part in a run whose members come and go."""

    registry: str
    """HOST:PORT of `atoll registry`, or etcd://HOST:PORT,HOST:PORT/NAME."""
    security: Identity | Insecure
    """This worker's identity, or "none" on a private cable."""
    listen: str = "0.0.0.0:0"
    """HOST:PORT at which the others reach this process; port 0 takes a free one."""
    min_workers: int = 1
    """While fewer train, all pause."""
    silent_s: float = 5.0
    """Seconds after which a worker that says nothing is lost."""
    grace_s: float | None = None
    """Seconds after which a round is completed without workers that have not opened it; None: never."""
    connections: int = 1
    """TCP connections for payloads between two workers, as the one that dials has it."""
    join_s: float = 600.0
    """Seconds to wait for the others at the start."""


@dataclass(slots=True, kw_only=True)
class ElasticHooks:
    """Holds what the owner of a link adds to it: functions to call, and terms to compare."""

    on_wait: Callable[[str], None] = lambda line: None
    """Called with a line that says what is waited for."""
    on_decision: Callable[[Decision], None] = lambda decision: None
    """Called in the event loop with every decision after a change of the view."""
    on_lost: Callable[[int, str], None] = lambda worker, why: None
    """Called in the event loop with every worker whose connection has ended, and why."""
    on_excluded: Callable[[], None] = lambda: None
    """Called in the training thread when the others have gone on without this worker, before it joins again."""
    check_interrupts: Callable[[], None] | None = None
    """Called repeatedly while the link waits for others to come; may raise."""
    log: Path | None = None
    """File of lines that observers may follow, from join() on."""
    terms: Mapping[str, str] = field(default_factory=dict)
    """Further terms that all workers must have alike, from join() on."""


class Tuning(TypedDict, total=False):
    """Holds the arguments of `elastic` that may be left out."""

    min_workers: int
    silent_s: float
    grace_s: float | None
    connections: int
    listen: str


def elastic(registry: str, *, worker: int, workers: int, keys: str | Path, **tuning: Unpack[Tuning]) -> "ElasticLink":
    """Make this process's link to workers on other machines that come and go; nothing is sent before `join`.

    Args:
        registry: HOST:PORT of `atoll registry`, or etcd://HOST:PORT,HOST:PORT/NAME.
        worker: This worker's number; one that died comes back under the same.
        workers: Number of seats, the most that train together.
        keys: Folder of this worker's bundle, made by `atoll keys new`; "none" on a private cable.
        **tuning: Further arguments, by name:

            - `min_workers` (1): While fewer train, all pause.
            - `silent_s` (5): Seconds after which a worker that says nothing is lost.
            - `grace_s` (None): Seconds after which a round is completed without workers that have not opened it.
            - `connections` (1): TCP connections for payloads between two workers, at most 8.
            - `listen` ("0.0.0.0:0"): HOST:PORT at which the others reach this process; port 0 takes a free one.

    Raises:
        ConfigError: An argument is invalid, or the keys cannot be read or are another worker's.
    """
    Seat(worker, workers)
    options = ElasticOptions(registry=registry, security=load_keys(keys, worker), **tuning)
    check_whole("min_workers", options.min_workers)
    if options.min_workers > workers:
        raise config_error("min_workers", options.min_workers, f"a whole number from 1 to workers ({workers})")
    _check_seconds("silent_s", options.silent_s, 0.1)
    if options.grace_s is not None:
        _check_seconds("grace_s", options.grace_s, 0.01)
    check_whole("connections", options.connections, most=CONNECTIONS, why="each is a TCP connection")
    return ElasticLink(worker, workers, options)


def _check_seconds(name: str, value: object, least: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= 3600:
        raise config_error(name, value, f"a number of seconds from {least:g} to 3600")


class ElasticLink(Link):
    """Links one worker to those on other machines; members may come and go.

    Args:
        worker: This worker's seat.
        workers: Number of seats.
        options: How it takes part.
    """

    def __init__(self, worker: int, workers: int, options: ElasticOptions) -> None:
        self.elastic = True
        self.worker = worker
        self.workers = workers
        self.options = options
        self.hooks = ElasticHooks()
        self._greeting: Greeting | None = None
        self._member: Member | None = None
        self._admission: NetAdmission | None = None
        self._saves: tuple[int, Callable[[int], FragmentState]] | None = None  # a step, and how to copy as of it
        self._opened_step = -1  # the newest whose rounds this worker has opened
        self._closed = False
        self._staging = ThreadPoolExecutor(1, thread_name_prefix="atoll-stage")

    # ------------------------------------------------------------------ join

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join the other workers, or a run that they have under way."""
        if self._member is not None:
            raise LinkError(f"worker {self.worker} has joined already: each OuterLoop needs its own link")
        mine = {"atoll": __version__, "wire format": WIRE_FORMAT, **terms, **self.hooks.terms}
        steps = int((start or {}).get(STEPS_MADE, "0"))
        self._greeting = Greeting(terms=mine, start=dict(start or {}), steps=steps, weight=weight)
        return self._enter()

    def rejoin(self) -> Admission:
        """Join again, as another process would, after an ExcludedError."""
        self.hooks.on_excluded()
        if self._member is not None:
            event_loop().run(departure.close(self._member, ""))
        admission = self._enter()
        if admission is None:
            raise LinkError(f"worker {self.worker} comes back to a run that nobody has kept up: start all again")
        return admission

    def _enter(self) -> NetAdmission | None:
        for left in reversed(range(_ATTEMPTS)):
            self._admission = None
            try:
                event_loop().run(self._start(), self.hooks.check_interrupts)
                break
            except ExcludedError:  # it was too slow to answer, as while its machine has much to do
                if not left:
                    raise
        member = self._member
        assert member is not None
        follows = self.worker in member.protocol.view.following
        return self._admission if follows else None

    async def _start(self) -> None:
        options, greeting = self.options, self._greeting
        assert greeting is not None
        me = Process(self.worker, 1 + secrets.randbelow((1 << 62) - 1))
        handler = _Handler(lambda worker, why: self.hooks.on_lost(worker, why))
        protocol = Protocol(me, None, options.min_workers)
        membership = Membership(
            open_registry(options.registry, options.security), me, handler.on_change, handler.on_fault
        )
        peers = Peers(
            me,
            options.security,
            handler,
            greeting=greeting.encode(),
            silent_s=options.silent_s,
            connections=options.connections,
        )
        if self._member is not None:  # this process has joined before
            peers.traffic = self._member.peers.traffic
        if self.hooks.log is not None:
            peers.serve_log(self.hooks.log)
        member = handler.member = Member(protocol, membership, peers, greeting, self.workers, self._decided)
        self._member, self._opened_step = member, -1
        try:
            address = await peers.start(options.listen)
            addresses = addresses_of(address, options.registry)
            await membership.announce(addresses, max(2 * options.silent_s, 1.0))
            if options.grace_s is not None:
                membership.spawn(watch_late(member, options.grace_s, handler.lost))
            await Entrance(member, self.workers, options.min_workers, options.join_s, self.hooks.on_wait).enter()
        except BaseException as fault:
            self._member = None
            await departure.close(member, str(fault))
            raise

    def _decided(self, decision: Decision) -> None:
        member = self._member
        assert member is not None
        if self._admission is None and self.worker in decision.view.following:
            self._admission = NetAdmission(member, decision.boundary, event_loop().run)
        if decision.view.over and self.worker in decision.view.following:
            member.fail(run_is_over(self.worker))
        self.hooks.on_decision(decision)

    # ------------------------------------------------------------------ rounds

    def lines(self) -> Mapping[int, Line]:
        """Return worker -> what this worker has exchanged with it."""
        return {} if self._member is None else event_loop().run(self._member.lines())

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers that owe payloads to rounds of this step.

        Waits for a change of the view that is under way, if this worker has opened rounds of the step: nothing changes
        the answer afterwards, so a replay with the same members computes the same.
        """
        member = self._member
        assert member is not None
        if step <= self._opened_step:
            event_loop().run(member.wait_opened(step))
        return member.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; with None, the worker only receives the result."""
        member = self._member
        if member is None:
            raise LinkError(f"{round_id}: worker {self.worker} has not joined", worker=self.worker, round_id=round_id)
        opened = OpenRound(round_id, offer, reduction)
        self._opened_step = max(self._opened_step, round_id.step)
        member.start(opened, self._staging)
        return _WaitingDonor(opened, member.donor, self._give)

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note how far this worker is, and copy what joiners have asked for."""
        member = self._member
        assert member is not None
        if self.unfinished:  # the last exchange of a run belongs to its last step, and is yet to come
            applied = max(0, min(applied, step - 1))
        self._saves = applied, save
        event_loop().post(lambda: member.advance(step, applied))
        self._give()

    def _give(self) -> None:
        """Copy what joiners have asked for: also while this worker waits for a round that may wait for them."""
        member = self._member
        if member is None or self._saves is None:
            return
        applied, save = self._saves
        if not (wanted := member.donor.wanted(applied)):
            return
        copies = []
        for fragment in wanted:
            try:
                copies.append(save(fragment))
            except IndexError:
                event_loop().post(partial(member.donor.forget, fragment))
        event_loop().post(lambda: member.donor.add(copies))

    def check(self) -> None:
        """Raise the error for which this worker cannot go on."""
        if self._member is not None and self._member.error is not None:
            raise self._member.error

    def interrupt(self) -> None:
        """End every wait of the training thread with a LinkError; from any thread."""
        member = self._member
        if member is not None:
            error = LinkError(f"worker {self.worker} was interrupted while it waited", worker=self.worker)
            event_loop().post(lambda: member.fail(error))

    def leave(self, reason: str) -> None:
        """Leave a run that goes on, after the rounds that this worker has opened.

        Args:
            reason: What the others are told; continues "worker 3 ...".
        """
        if self._member is not None and not self._closed:
            self._closed = True
            event_loop().run(departure.drain(self._member, reason))
            self._staging.shutdown(wait=False)

    def close(self, reason: str | None = None) -> None:
        """Leave for good; without a reason, once the others have applied what this worker has sent.

        Raises:
            ExcludedError: The others have ended the run without this worker, so its model may differ from theirs.
        """
        if self._member is None or self._closed:
            return
        self._closed = True
        if reason is None:
            warn_unfinished(self)
        event_loop().run(departure.leave(self._member, reason, over=reason is None and not self.unfinished))
        self._staging.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class _WaitingDonor:
    """A round in flight; while the training thread waits for it, it serves joiners."""

    opened: OpenRound
    donor: Donor
    give: Callable[[], None]

    def wait(self) -> Round:
        completed = self.opened.wait(self.give)
        self.donor.is_over |= completed.round_id.last
        return completed


class _Handler:
    """Passes on what happens to the member, which is made after its parts."""

    member: Member

    def __init__(self, on_lost: Callable[[int, str], None]) -> None:
        self._on_lost = on_lost

    def on_change(self) -> None:
        self.member.on_change()

    def on_fault(self, fault: LinkError) -> None:
        self.member.fail(fault)

    def connected(self, peer: Process, greeting: bytes) -> None:
        self.member.connected(peer, greeting)

    def lost(self, peer: Process, why: str) -> None:
        self.member.lost(peer, why)
        self._on_lost(peer.seat, why)

    def control(self, peer: Process, data: bytes) -> None:
        self.member.control(peer, data)

    def bulk(self, peer: Process, header: bytes, body: bytearray) -> None:
        self.member.bulk(peer, header, body)
