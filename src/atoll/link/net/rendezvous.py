"""Lets the processes of a run with fixed members find each other through the meeting point that worker 0 hosts.

Only JSON texts pass through it, before the first round, at the end and after a failure.
"""

import errno
import json
import math
import re
import secrets
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from atoll._util.checks import config_error
from atoll.errors import ConfigError, LinkError
from atoll.link.net.credentials import PeerRefusedError
from atoll.link.net.event_loop import event_loop
from atoll.link.net.identity import Identity
from atoll.link.net.meeting_client import ASK_S, MeetingClient
from atoll.link.net.meeting_point import MISFIT, MeetingPoint
from atoll.link.net.registry import Insecure
from atoll.link.seat import Seat

_HOLD_S = 0.2  # that a question waits at the meeting point; in between, interrupts and failures are looked for
_SOON_S = 2.0  # of waiting, after which the user is told for which worker
_TRY_S = 5.0  # for a listening port to answer as a meeting point; several round trips
_LINGER_S = 2.0  # that worker 0 keeps the meeting point after a failure, so that the others can read why
_ENDING_S = _LINGER_S + 1  # for the previous run to end, where nothing says that it does


def parse_address(text: str) -> tuple[str, int]:
    """Parse '10.0.0.1:29500' or '[::1]:29500' into host and port."""
    host, _, port = text.strip().rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not _can_be_a_host(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise config_error("address", text, "HOST:PORT of worker 0, like 10.0.0.1:29500")
    return host, int(port)


def _can_be_a_host(host: str) -> bool:
    try:
        return host.isprintable() and len(host.encode("idna")) > 0  # the resolver would fail on it
    except UnicodeError:
        return False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Says how a process waits for others, and what it does meanwhile."""

    join_s: float
    """Seconds within which the other processes must come."""
    on_wait: Callable[[str], None] = lambda line: None
    """Called with a line that names the missing processes, if they take more than a moment."""
    check_interrupts: Callable[[], None] = lambda: None
    """Called repeatedly; what it raises ends the wait."""


class Rendezvous:
    """Connects one process to the meeting point, and exchanges values with the other processes of the run.

    Args:
        address: HOST:PORT of worker 0.
        seat: This process.
        security: Its identity, or "none" on a private cable.
        waiting: How it waits for the others.
        arrive_s: Seconds within which the meeting point must be there, if less than `waiting.join_s`.
    """

    def __init__(
        self, address: str, seat: Seat, security: Identity | Insecure, waiting: Waiting, arrive_s: float = math.inf
    ) -> None:
        self.address = address
        self.seat = seat
        self._security = security
        self._waiting = waiting
        self._join_s = min(waiting.join_s, arrive_s)
        self._life = 1 + secrets.randbelow((1 << 62) - 1)
        self._all_here = self._left = False
        self._gathered: Counter[str] = Counter()
        host, port = parse_address(address)
        self._point = self._host(host, port) if seat.hosts else None
        try:
            self._client = self._connect(host, port)
        except BaseException:
            self._close_point()
            raise
        self._join_s = waiting.join_s

    @property
    def answers(self) -> bool:
        """Whether the meeting point still answers, as far as is known."""
        return self._client.answers

    # ------------------------------------------------------------------ connect

    def _host(self, host: str, port: int) -> MeetingPoint:
        try:
            family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as probe:  # gRPC does not say why it cannot listen
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of an ended run is free
                probe.bind(target)
                probe.listen()
            return event_loop().run(MeetingPoint.start(self.address.strip(), self.seat, self._security))
        except OSError as fault:
            problem = f"worker 0 cannot listen at {self.address}: {fault.strerror or fault}"
            raise LinkError(problem + _listening_advice(fault), worker=0) from fault
        except ConfigError as fault:
            raise LinkError(f"worker 0 cannot listen at {self.address}: {fault}", worker=0) from fault

    def _connect(self, host: str, port: int) -> MeetingClient:
        """Find worker 0, and take this process's seat."""
        began, told = time.monotonic(), False
        odd_since = math.inf  # since when the port is neither our run nor a previous one that says it ends
        while True:
            self._waiting.check_interrupts()
            now = time.monotonic()
            try_s = min(max(ASK_S, began + self._join_s - now), _TRY_S)
            seat, broken = "", False
            problem, advice = "", "start it there, and check that this machine can reach it"
            try:
                socket.create_connection((host, port), timeout=try_s).close()
                problem = "a service listens there, but does not answer as worker 0 does"
                advice = "if another service uses this port, give the run another one"
                client, seat, why = self._take_seat(try_s)
                if client is not None:
                    return client
                problem, advice = "the previous run has not ended there", "wait, or give this run another port"
            except socket.gaierror as fault:
                problem, advice = fault.strerror or str(fault), "check the name, or give the IP address of worker 0"
            except OSError as fault:  # a timeout, too
                problem = problem or fault.strerror or "no answer"
            except PeerRefusedError as fault:
                if fault.code is not grpc.StatusCode.UNAVAILABLE:  # then it may as well be ending
                    raise
                problem, broken = str(fault), True
            except LinkError:  # as when the previous run closes
                broken = True
            if seat == "misfit":
                raise LinkError(why, worker=self.seat.worker)
            taken = seat == "taken"  # by ourselves, if the previous run has yet to learn that we left
            odd_since = min(odd_since, now) if taken or broken else math.inf
            if taken and now > odd_since + _ENDING_S:
                raise self._seat_taken()
            # One slow try proves nothing: the previous run may have closed before the next one opened.
            is_foreign = broken and now > odd_since + _TRY_S
            if is_foreign or time.monotonic() > began + self._join_s:
                where = f"{self.address} in {min(time.monotonic() - began, self._join_s):.2g} s"
                raise LinkError(f"{self.seat} finds no worker 0 at {where} ({problem}): {advice}", worker=0)
            if not told and time.monotonic() > began + _SOON_S:
                told = True
                self._report_waiting([self._host_seat], self._join_s)
            time.sleep(0.1)

    def _take_seat(self, within_s: float) -> tuple[MeetingClient | None, str, str]:
        """Ask for this process's seat: return the connection if it has it now, the seat's state, and why it has not."""
        client = MeetingClient(self.address.strip(), self._security)  # gRPC would wait before it tries one again
        state = ""
        try:
            reply = client.take(self.seat, self._life, within_s)
            state = reply.state
            return client if state == "ours" else None, state, reply.why
        finally:
            if state != "ours":
                client.close()

    def _seat_taken(self) -> LinkError:
        why = "another run uses this address, or this worker was started twice"
        return LinkError(f"{self.seat} is at {self.address} already: {why}", worker=self.seat.worker)

    @property
    def _host_seat(self) -> Seat:
        return replace(self.seat, worker=0, rank=0)

    # ------------------------------------------------------------------ exchange

    def gathering(self, key: str) -> str:
        """Return the key of the next gathering with this name: all processes count them alike."""
        self._gathered[key] += 1
        return f"gathered {self._gathered[key]} {key}"

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value under a key for the other processes."""
        self._client.say(_name(key, self.seat), value, self._join_s)

    def try_publish(self, key: str, value: Any, within_s: float = ASK_S) -> bool:
        """Publish at a meeting point that may be gone; return whether it answered."""
        try:
            self._client.say(_name(key, self.seat), value, within_s)
        except LinkError:
            return False
        return True

    def collect(
        self, key: str, seats: Iterable[Seat], check: Callable[[], None] = lambda: None, within_s: float | None = None
    ) -> Iterator[tuple[Seat, Any]]:
        """Yield what others published under a key, as it comes.

        Args:
            key: The key.
            seats: The processes to wait for.
            check: Called repeatedly; may raise what makes waiting pointless.
            within_s: Seconds to wait; None for `join_s`.

        Raises:
            LinkError: A process did not come in time, or has left.
        """
        awaited, began, told = list(seats), time.monotonic(), False
        missing, until = awaited, began + (self._join_s if within_s is None else within_s)
        while missing:
            left_s = max(ASK_S, min(until - time.monotonic(), self._join_s))  # for an answer, never busy
            here = self._found(key, missing, left_s, min(_HOLD_S, max(0.0, until - time.monotonic())))
            if absent := [seat for seat in missing if seat not in here]:
                try:
                    self._check_failures(absent, left_s)
                    check()
                except LinkError:  # one that has left may have published its value first
                    late = self._found_if_there(key, absent, left_s)
                    if not late:
                        raise
                    here |= late
            yield from here.items()
            missing = [seat for seat in missing if seat not in here]
            if not missing:
                break
            self._waiting.check_interrupts()
            if not self._all_here and (misfit := self._client.look([MISFIT], left_s)):
                raise LinkError(misfit[MISFIT][:500])
            if time.monotonic() > until:
                problem = self._too_late(missing, until - began)
                raise LinkError(f"{self.address}: {problem}", worker=missing[0].worker)
            if not told and time.monotonic() > began + _SOON_S:
                told = True
                self._report_waiting(self._absent(missing), until - began)
        self._all_here |= set(awaited) >= set(self.seat.all())

    def _check_failures(self, seats: Sequence[Seat], within_s: float) -> None:
        """Raise a LinkError if one of these processes reports that it left."""
        for seat, report in self._found("failure", seats, within_s).items():
            self._check_left(seat, report)

    def _found_if_there(self, key: str, seats: Sequence[Seat], within_s: float) -> dict[Seat, Any]:
        """Return what these processes have published so far, nothing if the meeting point is gone."""
        try:
            return self._found(key, seats, within_s)
        except LinkError:
            return {}

    def _check_left(self, seat: Seat, report: Any) -> None:
        """Raise a LinkError if a process reports that it left; one that blames another is noticed otherwise."""
        match report:
            case {"worker": int() as blamed, "why": str()} if blamed != seat.worker:
                return
            case {"why": why}:
                raise LinkError(f"{self.address}: {seat} {why}", worker=seat.worker)
        raise LinkError(f"{self.address}: {seat} left", worker=seat.worker)

    def _absent(self, seats: Iterable[Seat]) -> list[Seat]:
        """Return the processes that have never connected."""
        names = {seat: _name("seat", seat) for seat in seats}
        here = self._client.look(names.values(), self._join_s)
        return [seat for seat, name in names.items() if name not in here]

    def _report_waiting(self, seats: Sequence[Seat], within_s: float) -> None:
        if seats:
            self._waiting.on_wait(f"waiting for {_listed(seats)} at {self.address}, at most {within_s:g} s")

    def _too_late(self, missing: Sequence[Seat], within_s: float) -> str:
        within = f"within {within_s:g} s"
        if not (absent := self._absent(missing)):
            return f"{_listed(missing)} came, but did not get this far {within}: see its output"
        them, which = ("it", "its machine") if len(absent) == 1 else ("them", "their machines")
        how = ", ".join(dict.fromkeys(f"--worker {seat.worker}" for seat in absent))
        return (
            f"{_listed(absent)} did not come {within}: start {them} with this address ({how}), and check that {which} "
            "can reach it, through any firewall"
        )

    def poll(self, key: str, seats: Iterable[Seat], within_s: float = 0.0, ask_s: float = ASK_S) -> dict[Seat, Any]:
        """Return what others have published, or publish within some seconds; ends early once all have.

        Args:
            key: The key.
            seats: The processes to ask for.
            within_s: Seconds to wait for them.
            ask_s: Seconds that the meeting point has to answer, if more than `within_s`.
        """
        found: dict[Seat, Any] = {}
        missing, until = list(seats), time.monotonic() + within_s
        with suppress(LinkError):
            while True:
                left_s = until - time.monotonic()
                found |= self._found(key, missing, max(ask_s, left_s), min(_HOLD_S, max(0.0, left_s)))
                missing = [seat for seat in missing if seat not in found]
                if not missing or time.monotonic() > until:
                    break
        return found

    def _found(self, key: str, seats: Sequence[Seat], within_s: float, hold_s: float = 0.0) -> dict[Seat, Any]:
        """Return what these processes have published so far, or the first of it within `hold_s`."""
        names = {_name(key, seat): seat for seat in seats}
        found: dict[Seat, Any] = {}
        for name, text in (self._client.look(names, within_s, hold_s) if names else {}).items():
            seat = names[name]
            try:
                found[seat] = json.loads(text)
            except (ValueError, RecursionError) as fault:
                problem = f"{self.address}: {seat} published something under {key!r} that is no JSON"
                raise LinkError(problem, worker=seat.worker) from fault
        return found

    # ------------------------------------------------------------------ leave

    def leave(self) -> None:
        """Leave; the host stays until the others have left too, at most for two seconds."""
        self._left = True
        self.try_publish("left", True)
        if self._point is not None:
            until = time.monotonic() + _LINGER_S
            others = [seat for seat in self.seat.all() if seat != self.seat]  # also those yet to be refused
            while others and time.monotonic() < until:
                here = self.poll("left", others, min(_HOLD_S, _LINGER_S))
                others = [seat for seat in others if seat not in here]
        self._client.close()
        self._close_point()

    def _close_point(self) -> None:
        if self._point is not None:
            event_loop().run(self._point.close())

    def abandon(self) -> None:
        """Close everything, unless this process has left, and wait for nothing; from any thread."""
        if self._left:
            return
        event_loop().begin(self._client.end())
        if self._point is not None:
            event_loop().begin(self._point.close())


def _name(key: str, seat: Seat) -> str:
    return f"{key}/{seat.key}"


def _listed(seats: Iterable[Seat]) -> str:
    return ", ".join(map(str, seats))


def _listening_advice(fault: OSError) -> str:
    """Return advice on an address that cannot be listened at."""
    if isinstance(fault, socket.gaierror):
        return "; check the name, or give the IP address of this machine that the others know"
    return {
        errno.EADDRINUSE: "; if another run is using it, give this one another port",
        errno.EADDRNOTAVAIL: "; it is not an address of this machine: give one that is, or start worker 0 where it is",
        errno.EACCES: "; ports below 1024 are for root: give another port",
    }.get(fault.errno or 0, "")
