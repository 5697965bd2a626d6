"""Where the workers of a run find each other: a small store of texts, kept by worker 0 at an agreed address.

Only texts (JSON) pass through it, and only before the first round and after a failure. It knows no passwords: whoever
reaches the port can disturb a run, so it belongs on a private network.
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

from atoll.errors import ConfigError, LinkError
from atoll.link.base import describe_differences
from atoll.link.net.seat import Seat

Answer = TypeVar("Answer")
_c10d: Any = torch.distributed  # torch's annotations leave its stores out
_POLL_S = 0.03
_ASK_S = 1.0  # for an answer of a store that may be gone
_SILENT_S = (
    5.0  # a store that has answered nothing for so long is not asked again; on a busy line, answers take seconds
)
_SOON_S = 2.0  # who waits for longer is told for whom
_TRY_S = 5.0  # for what listens there to answer as a store does; several round trips
_MISFIT = "misfit"  # where a process that was refused leaves why
_LINGER_S = 2.0  # worker 0 keeps the store for so long after a failure, so that the others can read why
_ENDING_S = _LINGER_S + 1  # for a run before to end, where nothing says that it does


def parse_address(text: str) -> tuple[str, int]:
    """'10.0.0.1:29500' or '[::1]:29500' as host and port."""
    host, _, port = text.strip().rpartition(":") if isinstance(text, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    if not _can_be_a_host(host) or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ConfigError(f"address must be HOST:PORT of worker 0, like 10.0.0.1:29500, got {text!r:.100}")
    return host, int(port)


def _can_be_a_host(host: str) -> bool:
    try:
        return host.isprintable() and len(host.encode("idna")) > 0  # what the resolver would fail on otherwise
    except UnicodeError:
        return False


class Rendezvous:
    """One process's door to the store; whoever it waits for must come within `join_s` seconds.

    `tell` is told in a line for whom it waits, if that takes more than a moment. The store itself must be there within
    `arrive_s`, if that is less. Whatever `heed` raises ends the waiting.
    """

    def __init__(
        self,
        address: str,
        seat: Seat,
        join_s: float,
        tell: Callable[[str], None] | None = None,
        arrive_s: float | None = None,
        check_interrupts: Callable[[], None] | None = None,
    ) -> None:
        self.address = address
        self.seat = seat
        self._join_s = join_s if arrive_s is None else min(join_s, arrive_s)
        self._tell = tell or (lambda line: None)
        self._check_interrupts = check_interrupts or (lambda: None)
        self.answers = True
        """Whether the store still does, as far as is known."""
        self._silent_s = 0.0
        self._all_here = False
        host, port = parse_address(address)
        self._store = self._host(host, port) if seat.hosts else self._visit(host, port)
        if self._ask(lambda: self._store.add(f"seat/{seat.key}", 1), join_s) > 1:
            raise self._twice()
        self._agree_on_size()
        self._join_s = join_s

    def prefix_store(self, prefix: str, timeout_s: float) -> Any:
        """A part of the store for torch's own use, by a connection of its own: whoever waits there holds up others."""
        return _c10d.PrefixStore(prefix, open_store(*parse_address(self.address), timeout_s, is_master=False))

    def missing_keys(self, names: Mapping[int, str]) -> list[int]:
        """The numbers of those names that nobody has left anything under; none if the store does not answer."""
        try:
            return self._ask(lambda: [n for n, name in names.items() if not self._store.check([name])], _SILENT_S)
        except LinkError:
            return []

    def own_address(self) -> str:
        """The address of this machine that the others reach it by: the one it reaches worker 0 from."""
        host, port = parse_address(self.address)
        try:
            family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(target)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as fault:
            raise LinkError(f"{self.seat} finds no way to {self.address}: {fault}") from fault

    # ------------------------------------------------------------------ setting up

    def _host(self, host: str, port: int) -> Any:
        try:
            family, kind, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            with socket.socket(family, kind) as listener:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # an ended run keeps no port
                listener.bind(target)  # by hand: left to itself, the store listens on every interface
                listener.listen(1024)
                return open_store(host, port, is_master=True, master_listen_fd=listener.detach())
        except OSError as fault:
            problem = f"worker 0 cannot listen at {self.address}: {fault.strerror or fault}"
            raise LinkError(problem + _listening_advice(fault)) from fault

    def _visit(self, host: str, port: int) -> Any:
        began, told = time.monotonic(), False
        odd_since = math.inf  # when what is there began to be neither our run nor one before that says it ends
        while True:
            self._check_interrupts()
            now = time.monotonic()
            left_s = max(_ASK_S, began + self._join_s - now)
            try_s = min(left_s, _TRY_S)
            taken = broken = False
            problem, advice = "", "start it there, and check that this machine can reach it"
            try:
                socket.create_connection((host, port), timeout=try_s).close()
                problem = "something listens there, but does not answer as worker 0 does"
                advice = "if another service uses this port, give the run another one"
                # Torch's own clock first: a call that is left behind can take the process down when it ends.
                store = in_time(partial(open_store, host, port, try_s, is_master=False), try_s + 3)
                seat = in_time(partial(self._found_seat, store), left_s)
                if seat == "free":
                    store.set_timeout(timedelta(seconds=max(self._join_s, 60.0)))  # ours are shorter, and break nothing
                    return store
                taken = seat == "taken"  # by ourselves, if the run before has not heard yet that we have left it
                problem, advice = "the run before has not ended there", "wait, or give this run another port"
            except socket.gaierror as fault:
                problem, advice = fault.strerror or str(fault), "check the name, or give the IP address of worker 0"
            except OSError as fault:  # also what took too long
                problem = problem or fault.strerror or "no answer"
            except RuntimeError:  # the run before closes while it ends, too
                broken = True
            odd_since = min(odd_since, now) if taken or broken else math.inf
            if taken and now > odd_since + _ENDING_S:
                raise self._twice()
            # One try that took long proves nothing: the run before may have closed, and the next not opened meanwhile.
            is_foreign = broken and now > odd_since + _TRY_S
            if is_foreign or time.monotonic() > began + self._join_s:
                where = f"{self.address} in {min(time.monotonic() - began, self._join_s):.2g} s"
                raise LinkError(f"{self.seat} finds no worker 0 at {where} ({problem}): {advice}")
            if not told and time.monotonic() > began + _SOON_S:
                told = True
                self._tell_of_waiting([self._host_seat], self._join_s)
            time.sleep(0.1)

    def _twice(self) -> LinkError:
        why = "another run uses this address, or this worker was started twice"
        return LinkError(f"{self.seat} is at {self.address} already: {why}")

    def _found_seat(self, store: Any) -> str:
        """Whether our seat is free, taken, or that of a run before which is ending: one can follow at its address."""
        if not store.check([f"seat/{self.seat.key}"]):
            return "free"
        host = self._host_seat
        gone = [f"left/{self.seat.key}", f"left/{host.key}", f"failure/{host.key}"]
        return "ending" if any(store.check([name]) for name in gone) else "taken"

    @property
    def _host_seat(self) -> Seat:
        return replace(self.seat, worker=0, rank=0)

    def _agree_on_size(self) -> None:
        """Refuse a process that expects others than worker 0 does: somebody would wait for one that never comes."""
        mine = {"sync.workers": str(self.seat.workers), "ranks that exchange": str(self.seat.ranks)}
        if self.seat.hosts:
            self.publish("size", mine)
            return
        ((host, theirs),) = self.collect("size", [self._host_seat])
        if differs := describe_differences(mine, theirs if isinstance(theirs, dict) else {}):
            why = f"{self.seat} and {host} differ in {differs}"
            self._ask(lambda: self._store.set(_MISFIT, why), _ASK_S)
            self.leave()
            raise LinkError(why)

    # ------------------------------------------------------------------ talking

    def publish(self, key: str, value: Any) -> None:
        """Leave something that JSON can hold for the others."""
        self._ask(lambda: self._set(key, value), self._join_s)

    def collect(
        self, key: str, seats: Iterable[Seat], check: Callable[[], None] = lambda: None, within_s: float | None = None
    ) -> Iterator[tuple[Seat, Any]]:
        """What others have left, as they come; LinkError if one has not come in time, or has left again.

        `check` is called again and again meanwhile, to raise what would make waiting vain.
        """
        awaited, began, told = list(seats), time.monotonic(), False
        missing, until = awaited, began + (self._join_s if within_s is None else within_s)
        while missing:
            left_s = max(_ASK_S, min(until - time.monotonic(), self._join_s))  # for the store, which is never busy
            here = self._found(key, missing, left_s)
            yield from here.items()
            missing = [seat for seat in missing if seat not in here]
            for seat, report in self._found("failure", missing, left_s).items():
                self._refuse_to_wait(seat, report)
            if not missing:
                break
            check()
            self._check_interrupts()
            if not self._all_here and (misfit := self._ask(self._misfit, left_s)):
                raise LinkError(misfit)
            if time.monotonic() > until:
                raise LinkError(f"{self.address}: {self._too_late(missing, until - began)}")
            if not told and time.monotonic() > began + _SOON_S:
                told = True
                self._tell_of_waiting(self._absent(missing), until - began)
            time.sleep(_POLL_S)
        self._all_here |= set(awaited) >= set(self.seat.all())

    def _refuse_to_wait(self, seat: Seat, report: Any) -> None:
        """LinkError for one that has left; one that tells of another closes its connections, by which all notice."""
        match report:
            case {"worker": int() as blamed, "why": str()} if blamed != seat.worker:
                return
            case {"why": why}:
                raise LinkError(f"{self.address}: {seat} {why}")
        raise LinkError(f"{self.address}: {seat} left")

    def _misfit(self) -> str:
        """What was found of a process that was refused; of no interest any more once all have come."""
        return str(self._store.get(_MISFIT).decode(errors="replace"))[:500] if self._store.check([_MISFIT]) else ""

    def _absent(self, seats: Iterable[Seat]) -> list[Seat]:
        """Those who have never been here."""
        return self._ask(lambda: [seat for seat in seats if not self._store.check([f"seat/{seat.key}"])], self._join_s)

    def _tell_of_waiting(self, seats: Sequence[Seat], within_s: float) -> None:
        if seats:
            self._tell(f"waiting for {_listed(seats)} at {self.address}, at most {within_s:g} s")

    def _too_late(self, missing: Sequence[Seat], within_s: float) -> str:
        within = f"within {within_s:g} s"
        if not (absent := self._absent(missing)):
            return f"{_listed(missing)} came, but did not get this far {within}: see what it says there"
        them, which = ("it", "its machine") if len(absent) == 1 else ("them", "their machines")
        how = ", ".join(dict.fromkeys(f"--worker {seat.worker}" for seat in absent))
        return (
            f"{_listed(absent)} did not come {within}: start {them} with this address ({how}), and check that {which} "
            "can reach it, through any firewall"
        )

    def poll_one(self, key: str, seat: Seat) -> Any | None:
        """What another has left, if it has and the store can still be reached; never waits long."""
        return self.poll(key, [seat]).get(seat)

    def poll(self, key: str, seats: Iterable[Seat], within_s: float = 0.0, ask_s: float = _ASK_S) -> dict[Seat, Any]:
        """What of others is there, or comes within some seconds, which end early once all of it is.

        The store has `ask_s` to answer, or those seconds if they are more.
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
        """What some have left, of those that have."""

        def look() -> dict[Seat, bytes]:
            names = {seat: f"{key}/{seat.key}" for seat in seats}
            return {seat: self._store.get(name) for seat, name in names.items() if self._store.check([name])}

        found: dict[Seat, Any] = {}
        for seat, text in self._ask(look, within_s).items():
            try:
                found[seat] = json.loads(text)
            except (ValueError, RecursionError) as fault:
                raise LinkError(f"{self.address}: {seat} left something under {key!r} that is no JSON") from fault
        return found

    def _set(self, key: str, value: Any) -> None:
        name = f"{key}/{self.seat.key}"
        self._store.set(name, json.dumps(value))
        self._store.check([name])  # nothing comes back from set(): it goes well into a cable that is cut

    def _ask(self, ask: Callable[[], Answer], within_s: float) -> Answer:
        """Talk to the store, which may be stopped or gone; while it is silent, whatever is asked waits behind."""
        try:
            if not self.answers:
                raise TimeoutError
            answer = in_time(ask, within_s)
        except (RuntimeError, TimeoutError) as fault:
            self._silent_s += within_s
            self.answers = isinstance(fault, TimeoutError) and self._silent_s < _SILENT_S
            raise LinkError(f"worker 0 at {self.address}, where all meet, does not answer any more") from fault
        self._silent_s = 0.0
        return answer

    def try_publish(self, key: str, value: Any, within_s: float = _ASK_S) -> bool:
        """`tell`, where the store may be gone; whether it was there."""
        try:
            self._ask(lambda: self._set(key, value), within_s)
        except LinkError:
            return False
        return True

    # ------------------------------------------------------------------ leaving

    def leave(self) -> None:
        """Say goodbye; the host stays until the others have gone too, but not for long."""
        with suppress(LinkError):  # in one call, with its answer: the host may be gone before it hears another
            self._ask(lambda: self._store.add(f"left/{self.seat.key}", 1), _ASK_S)
        if not self.seat.hosts:
            return
        until = time.monotonic() + _LINGER_S
        others = [seat for seat in self.seat.all() if seat != self.seat]  # also those that are yet to be refused
        while others and time.monotonic() < until:
            others = [seat for seat in others if not self._store.check([f"left/{seat.key}"])]
            time.sleep(_POLL_S)


def _listed(seats: Iterable[Seat]) -> str:
    return ", ".join(map(str, seats))


def _listening_advice(fault: OSError) -> str:
    """What to do about an address that cannot be listened at."""
    if isinstance(fault, socket.gaierror):
        return "; check the name, or give the IP address of this machine that the others know"
    return {
        errno.EADDRINUSE: "; if another run is using it, give this one another port",
        errno.EADDRNOTAVAIL: "; it is not an address of this machine: give one that is, or start worker 0 where it is",
        errno.EACCES: "; ports below 1024 are for root: give another port",
    }.get(fault.errno or 0, "")


def open_store(host: str, port: int, timeout_s: float = 10.0, **options: Any) -> Any:
    """A store of torch.distributed that waits for nobody."""
    return _c10d.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **options)


def in_time(ask: Callable[[], Answer], within_s: float) -> Answer:
    """The answer of a call that cannot be interrupted; TimeoutError without one: it then goes on, and is forgotten."""
    return begun(ask).result(within_s)


def begun(ask: Callable[[], Answer]) -> "Future[Answer]":
    """Let a thread call what cannot be interrupted."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as fault:
            answer.set_exception(fault)

    threading.Thread(target=run, daemon=True).start()
    return answer
