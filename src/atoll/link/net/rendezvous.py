"""Lets the workers of a run find each other through a small key-value store hosted by worker 0.

Only JSON texts pass through the store, before the first round, at the end and after a failure. It has no passwords:
every process that reaches the port can disturb a run, so it belongs on a private network.
"""

import errno
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed

from atoll._util.checks import config_error
from atoll.errors import LinkError
from atoll.link.base import describe_differences
from atoll.link.net.seat import Seat

Answer = TypeVar("Answer")
_c10d: Any = torch.distributed  # torch's annotations leave its stores out
_POLL_S = 0.03
_ASK_S = 1.0  # for an answer of a store that may be gone
_SILENT_S = 5.0  # after which a silent store is not asked again; on a busy line, answers take seconds
_SOON_S = 2.0  # of waiting, after which the user is told for which worker
_TRY_S = 5.0  # for a listening port to answer as a store; several round trips
_MISFIT = "misfit"  # key under which a refused process publishes why
_LINGER_S = 2.0  # that worker 0 keeps the store after a failure, so that the others can read why
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


class Rendezvous:
    """Connects one process to the store, and exchanges values with the other processes of the run.

    Args:
        address: HOST:PORT of worker 0.
        seat: This process.
        join_s: Seconds within which the other processes must come.
        on_wait: Called with a line that names the missing processes, if they take more than a moment.
        arrive_s: Seconds within which the store must be there, if less than `join_s`.
        check_interrupts: Called repeatedly while waiting; what it raises ends the wait.
    """

    def __init__(
        self,
        address: str,
        seat: Seat,
        join_s: float,
        on_wait: Callable[[str], None] | None = None,
        arrive_s: float | None = None,
        check_interrupts: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.seat = seat
        self._join_s = join_s if arrive_s is None else min(join_s, arrive_s)
        self._on_wait = on_wait or (lambda line: None)
        self._check_interrupts = check_interrupts or (lambda: None)
        self.answers = True
        """Whether the store still answers, as far as is known."""
        self._silent_s = 0.0
        self._all_here = False
        host, port = parse_address(address)
        self._store = self._host(host, port) if seat.hosts else self._connect(host, port)
        if self._ask(lambda: self._store.add(f"seat/{seat.key}", 1), join_s) > 1:
            raise self._seat_taken()
        self._agree_on_size()
        self._join_s = join_s

    def prefix_store(self, prefix: str, timeout_s: float) -> Any:
        """Open a part of the store for torch, over its own connection: a blocking wait there holds up no other."""
        return _c10d.PrefixStore(prefix, open_store(*parse_address(self.address), timeout_s, is_master=False))

    def missing_keys(self, keys: Mapping[int, str]) -> list[int]:
        """Return the numbers whose keys are not in the store; none if the store does not answer."""
        try:
            return self._ask(lambda: [n for n, key in keys.items() if not self._store.check([key])], _SILENT_S)
        except LinkError:
            return []

    def own_address(self) -> str:
        """Return the address at which the others reach this machine: the one it reaches worker 0 from."""
        host, port = parse_address(self.address)
        try:
            family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as fault:
            raise LinkError(f"{self.seat} finds no route to {self.address}: {fault}", worker=0) from fault

    # ------------------------------------------------------------------ connect

    def _host(self, host: str, port: int) -> Any:
        try:
            family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port of an ended run is free
                listener.bind(target)  # torch's store would listen on every interface
                listener.listen(1024)
                return open_store(host, port, is_master=True, master_listen_fd=listener.detach())
        except OSError as fault:
            problem = f"worker 0 cannot listen at {self.address}: {fault.strerror or fault}"
            raise LinkError(problem + _listening_advice(fault), worker=0) from fault

    def _connect(self, host: str, port: int) -> Any:
        began, told = time.monotonic(), False
        odd_since = math.inf  # since when the port is neither our run nor a previous one that says it ends
        while True:
            self._check_interrupts()
            now = time.monotonic()
            left_s = max(_ASK_S, began + self._join_s - now)
            try_s = min(left_s, _TRY_S)
            taken = broken = False
            problem, advice = "", "start it there, and check that this machine can reach it"
            try:
                socket.create_connection((host, port), timeout=try_s).close()
                problem = "a service listens there, but does not answer as worker 0 does"
                advice = "if another service uses this port, give the run another one"
                # Torch's own timeout first: a call left behind can crash the process at its end.
                store = in_time(partial(open_store, host, port, try_s, is_master=False), try_s + 3)
                seat = in_time(partial(self._found_seat, store), left_s)
                if seat == "free":
                    store.set_timeout(timedelta(seconds=max(self._join_s, 60.0)))  # ours are shorter
                    return store
                taken = seat == "taken"  # by ourselves, if the previous run has yet to learn that we left
                problem, advice = "the previous run has not ended there", "wait, or give this run another port"
            except socket.gaierror as fault:
                problem, advice = fault.strerror or str(fault), "check the name, or give the IP address of worker 0"
            except OSError as fault:  # a timeout, too
                problem = problem or fault.strerror or "no answer"
            except RuntimeError:  # as when the previous run closes
                broken = True
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

    def _seat_taken(self) -> LinkError:
        why = "another run uses this address, or this worker was started twice"
        return LinkError(f"{self.seat} is at {self.address} already: {why}", worker=self.seat.worker)

    def _found_seat(self, store: Any) -> str:
        """Return whether our seat is free, taken, or held by a previous run that is ending at this address."""
        if not store.check([f"seat/{self.seat.key}"]):
            return "free"
        host = self._host_seat
        gone = [f"left/{self.seat.key}", f"left/{host.key}", f"failure/{host.key}"]
        return "ending" if any(store.check([name]) for name in gone) else "taken"

    @property
    def _host_seat(self) -> Seat:
        return replace(self.seat, worker=0, rank=0)

    def _agree_on_size(self) -> None:
        """Refuse a process that counts workers or ranks differently: it would wait for one that never comes."""
        mine = {"sync.workers": str(self.seat.workers), "ranks that exchange": str(self.seat.ranks)}
        if self.seat.hosts:
            self.publish("size", mine)
            return
        ((host, theirs),) = self.collect("size", [self._host_seat])
        if differs := describe_differences(mine, theirs if isinstance(theirs, dict) else {}):
            why = f"{self.seat} and {host} differ in {differs}"
            self._ask(lambda: self._store.set(_MISFIT, why), _ASK_S)
            self.leave()
            raise LinkError(why, worker=self.seat.worker)

    # ------------------------------------------------------------------ exchange

    def publish(self, key: str, value: Any) -> None:
        """Publish a JSON value under a key for the other processes."""
        self._ask(lambda: self._set(key, value), self._join_s)

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
            left_s = max(_ASK_S, min(until - time.monotonic(), self._join_s))  # for the store, never busy
            here = self._found(key, missing, left_s)
            yield from here.items()
            missing = [seat for seat in missing if seat not in here]
            for seat, report in self._found("failure", missing, left_s).items():
                self._check_left(seat, report)
            if not missing:
                break
            check()
            self._check_interrupts()
            if not self._all_here and (misfit := self._ask(self._misfit, left_s)):
                raise LinkError(misfit)
            if time.monotonic() > until:
                problem = self._too_late(missing, until - began)
                raise LinkError(f"{self.address}: {problem}", worker=missing[0].worker)
            if not told and time.monotonic() > began + _SOON_S:
                told = True
                self._report_waiting(self._absent(missing), until - began)
            time.sleep(_POLL_S)
        self._all_here |= set(awaited) >= set(self.seat.all())

    def _check_left(self, seat: Seat, report: Any) -> None:
        """Raise a LinkError if a process reports that it left; one that blames another is noticed otherwise."""
        match report:
            case {"worker": int() as blamed, "why": str()} if blamed != seat.worker:
                return
            case {"why": why}:
                raise LinkError(f"{self.address}: {seat} {why}", worker=seat.worker)
        raise LinkError(f"{self.address}: {seat} left", worker=seat.worker)

    def _misfit(self) -> str:
        """Return why a process was refused, or ""; irrelevant once all have come."""
        return str(self._store.get(_MISFIT).decode(errors="replace"))[:500] if self._store.check([_MISFIT]) else ""

    def _absent(self, seats: Iterable[Seat]) -> list[Seat]:
        """Return the processes that have never connected."""
        return self._ask(lambda: [seat for seat in seats if not self._store.check([f"seat/{seat.key}"])], self._join_s)

    def _report_waiting(self, seats: Sequence[Seat], within_s: float) -> None:
        if seats:
            self._on_wait(f"waiting for {_listed(seats)} at {self.address}, at most {within_s:g} s")

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

    def poll_one(self, key: str, seat: Seat) -> Any | None:
        """Return what another process has published, or None; never waits long."""
        return self.poll(key, [seat]).get(seat)

    def poll(self, key: str, seats: Iterable[Seat], within_s: float = 0.0, ask_s: float = _ASK_S) -> dict[Seat, Any]:
        """Return what others have published, or publish within some seconds; ends early once all have.

        Args:
            key: The key.
            seats: The processes to ask for.
            within_s: Seconds to wait for them.
            ask_s: Seconds that the store has to answer, if more than `within_s`.
        """
        found: dict[Seat, Any] = {}
        missing, until = list(seats), time.monotonic() + within_s
        with suppress(LinkError):
            while True:
                found |= self._found(key, missing, max(ask_s, until - time.monotonic()))
                missing = [seat for seat in missing if seat not in found]
                if not missing or time.monotonic() > until:
                    break
                time.sleep(_POLL_S)
        return found

    def _found(self, key: str, seats: Sequence[Seat], within_s: float) -> dict[Seat, Any]:
        """Return what these processes have published so far."""

        def look() -> dict[Seat, bytes]:
            names = {seat: f"{key}/{seat.key}" for seat in seats}
            return {seat: self._store.get(name) for seat, name in names.items() if self._store.check([name])}

        found: dict[Seat, Any] = {}
        for seat, text in self._ask(look, within_s).items():
            try:
                found[seat] = json.loads(text)
            except (ValueError, RecursionError) as fault:
                problem = f"{self.address}: {seat} published something under {key!r} that is no JSON"
                raise LinkError(problem, worker=seat.worker) from fault
        return found

    def _set(self, key: str, value: Any) -> None:
        name = f"{key}/{self.seat.key}"
        self._store.set(name, json.dumps(value))
        self._store.check([name])  # set() has no answer: it succeeds on a dead connection

    def _ask(self, ask: Callable[[], Answer], within_s: float) -> Answer:
        """Call the store, which may be stopped or gone; a silent store delays every later call."""
        try:
            if not self.answers:
                raise TimeoutError
            answer = in_time(ask, within_s)
        except (RuntimeError, TimeoutError) as fault:
            self._silent_s += within_s
            self.answers = isinstance(fault, TimeoutError) and self._silent_s < _SILENT_S
            problem = f"worker 0 at {self.address} does not answer any more"
            raise LinkError(problem, worker=0) from fault
        self._silent_s = 0.0
        return answer

    def try_publish(self, key: str, value: Any, within_s: float = _ASK_S) -> bool:
        """Publish to a store that may be gone; return whether it answered."""
        try:
            self._ask(lambda: self._set(key, value), within_s)
        except LinkError:
            return False
        return True

    # ------------------------------------------------------------------ leave

    def leave(self) -> None:
        """Leave; the host stays until the others have left too, at most for two seconds."""
        with suppress(LinkError):  # one call: the host may be gone before a second
            self._ask(lambda: self._store.add(f"left/{self.seat.key}", 1), _ASK_S)
        if not self.seat.hosts:
            return
        until = time.monotonic() + _LINGER_S
        others = [seat for seat in self.seat.all() if seat != self.seat]  # also those yet to be refused
        while others and time.monotonic() < until:
            others = [seat for seat in others if not self._store.check([f"left/{seat.key}"])]
            time.sleep(_POLL_S)


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


def open_store(host: str, port: int, timeout_s: float = 10.0, **options: Any) -> Any:
    """Open a TCPStore that does not wait for other processes."""
    return _c10d.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **options)


def in_time(ask: Callable[[], Answer], within_s: float) -> Answer:
    """Return the result of a call that cannot be interrupted; after a TimeoutError it runs on unheeded."""
    return in_thread(ask).result(within_s)


def in_thread(ask: Callable[[], Answer]) -> "Future[Answer]":
    """Start a call that cannot be interrupted in a daemon thread."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as fault:
            answer.set_exception(fault)

    threading.Thread(target=run, daemon=True).start()
    return answer
