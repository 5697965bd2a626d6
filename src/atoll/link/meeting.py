"""Where the workers of a run find each other: a small store of texts, kept by worker 0 at an agreed address.

Only texts (JSON) pass through it, and only before the first round and after a failure. It knows no passwords: whoever
reaches the port can disturb a run, so it belongs on a private network.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch.distributed

from atoll.checks import check_whole
from atoll.errors import ConfigError, LinkError

Answer = TypeVar("Answer")
_c10d: Any = torch.distributed  # torch's annotations leave its stores out
_POLL_S = 0.03
_ASK_S = 1.0  # for an answer of a store that may be gone
_LINGER_S = 2.0  # worker 0 keeps the store for so long after a failure, so that the others can read why


@dataclass(frozen=True, slots=True)
class Seat:
    """Which process of a run this is."""

    worker: int
    workers: int
    rank: int = 0
    """Among the processes of its worker."""
    ranks: int = 1

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        check_whole("ranks", self.ranks)
        for name, number, count in (("worker", self.worker, self.workers), ("rank", self.rank, self.ranks)):
            if type(number) is not int or not 0 <= number < count:
                raise ConfigError(f"{name} must be a whole number from 0 to {count - 1}, got {number!r}")

    def __str__(self) -> str:
        return f"worker {self.worker}" if self.ranks == 1 else f"worker {self.worker} rank {self.rank}"

    @property
    def key(self) -> str:
        """What it is called in the store, the same whatever the others think of its ranks."""
        return f"{self.worker}.{self.rank}"

    @property
    def hosts(self) -> bool:
        """Whether this process keeps the store."""
        return self.worker == 0 and self.rank == 0

    def all(self) -> "Iterator[Seat]":
        """Every process of the run."""
        for worker in range(self.workers):
            for rank in range(self.ranks):
                yield Seat(worker, self.workers, rank, self.ranks)

    def peers(self) -> "list[Seat]":
        """The same rank of every worker, this one included: they exchange rounds."""
        return [seat for seat in self.all() if seat.rank == self.rank]


def parse_address(text: str) -> tuple[str, int]:
    """'10.0.0.1:29500' or '[::1]:29500' as host and port."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(f"address must be HOST:PORT of worker 0, like 10.0.0.1:29500, got {text!r}")
    return host, int(port)


class Meeting:
    """One process's door to the store; whoever it waits for must come within `join_s` seconds."""

    def __init__(self, address: str, seat: Seat, join_s: float) -> None:
        self.address = address
        self.seat = seat
        self._join_s = join_s
        self._answers = True
        host, port = parse_address(address)
        self._store = self._host(host, port) if seat.hosts else self._visit(host, port)
        if self._ask(lambda: self._store.add(f"seat/{seat.key}", 1), join_s) > 1:
            raise LinkError(
                f"{seat} is at {address} already: another run uses this address, or this worker was started twice"
            )

    def shelf(self, prefix: str) -> Any:
        """A part of the store for torch's own use."""
        return _c10d.PrefixStore(prefix, self._store)

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
            raise LinkError(
                f"worker 0 cannot listen at {self.address}: {fault.strerror or fault}; "
                "if another run is using it, give this one another port"
            ) from fault

    def _visit(self, host: str, port: int) -> Any:
        began = time.monotonic()
        while True:
            left_s = max(_ASK_S, began + self._join_s - time.monotonic())
            patience_s = self._join_s
            try:
                socket.create_connection((host, port), timeout=min(left_s, 5.0)).close()
                store = in_time(partial(open_store, host, port, left_s, is_master=False), left_s)
                if not in_time(partial(self._is_ending, store), left_s):
                    return store
                problem = "the run before has not ended there"
            except OSError as fault:  # also what took too long
                problem = str(fault) or "no answer"
            except RuntimeError:
                problem = "what listens there is something else"
                patience_s = min(patience_s, _LINGER_S + 1)  # the run before closes while it ends, too
            if time.monotonic() > began + patience_s:
                raise LinkError(
                    f"{self.seat} finds no worker 0 at {self.address} in {patience_s:g} s ({problem}): start it there, "
                    "and check that this machine can reach that port"
                )
            time.sleep(0.1)

    def _is_ending(self, store: Any) -> bool:
        """Whether this is what is left of a run before, so that one can follow another at the same address."""
        host = replace(self.seat, worker=0, rank=0)
        gone = [f"left/{self.seat.key}", f"left/{host.key}", f"failure/{host.key}"]
        return bool(store.check([f"seat/{self.seat.key}"])) and any(store.check([name]) for name in gone)

    # ------------------------------------------------------------------ talking

    def tell(self, key: str, value: Any) -> None:
        """Leave something that JSON can hold for the others."""
        self._ask(lambda: self._set(key, value), self._join_s)

    def hear(self, key: str, seats: Iterable[Seat]) -> Iterator[tuple[Seat, Any]]:
        """What others have left, as they come; LinkError if one has not come in time, or has left again."""
        missing, until = list(seats), time.monotonic() + self._join_s
        while missing:
            left_s = max(_ASK_S, until - time.monotonic())
            here = self._found(key, missing, left_s)
            yield from here.items()
            missing = [seat for seat in missing if seat not in here]
            for seat, report in self._found("failure", missing, left_s).items():
                why = report["why"] if isinstance(report, dict) and "why" in report else "left"
                raise LinkError(f"{self.address}: {seat} {why}")
            if missing and time.monotonic() > until:
                who = ", ".join(map(str, missing))
                raise LinkError(f"{self.address}: {who} did not come within {self._join_s:g} s")
            time.sleep(_POLL_S if missing else 0.0)

    def heard(self, key: str, seat: Seat) -> Any | None:
        """What another has left, if it has and the store can still be reached; never waits long."""
        return self.heard_by(key, [seat]).get(seat)

    def heard_by(self, key: str, seats: Iterable[Seat], within_s: float = 0.0) -> dict[Seat, Any]:
        """What of others is there, or comes within some seconds, which end early once all of it is."""
        found: dict[Seat, Any] = {}
        missing, until = list(seats), time.monotonic() + within_s
        with suppress(LinkError):
            while True:
                found |= self._found(key, missing, _ASK_S)
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
        """Talk to the store, which may be stopped or gone; once it has been silent, whatever is asked waits behind."""
        try:
            if not self._answers:
                raise TimeoutError
            return in_time(ask, within_s)
        except (RuntimeError, TimeoutError) as fault:
            self._answers = False
            raise LinkError(f"worker 0 at {self.address}, where all meet, does not answer any more") from fault

    def tell_at_last(self, key: str, value: Any) -> bool:
        """`tell`, where the store may be gone; whether it was there."""
        try:
            self._ask(lambda: self._set(key, value), _ASK_S)
        except LinkError:
            return False
        return True

    # ------------------------------------------------------------------ leaving

    def leave(self) -> None:
        """Say goodbye; the host stays until the others have gone too, but not for long."""
        self.tell_at_last("left", True)
        if not self.seat.hosts:
            return
        until = time.monotonic() + _LINGER_S
        others = [seat for seat in self.seat.all() if seat != self.seat]  # also those that are yet to be refused
        while others and time.monotonic() < until:
            others = [seat for seat in others if not self._store.check([f"left/{seat.key}"])]
            time.sleep(_POLL_S)


def open_store(host: str, port: int, timeout_s: float = 10.0, **options: Any) -> Any:
    """A store of torch.distributed that waits for nobody."""
    return _c10d.TCPStore(host, port, wait_for_workers=False, timeout=timedelta(seconds=timeout_s), **options)


def in_time(ask: Callable[[], Answer], within_s: float) -> Answer:
    """The answer of a call that cannot be interrupted; TimeoutError without one: it then goes on, and is forgotten."""
    answer: Future[Answer] = Future()

    def run() -> None:
        try:
            answer.set_result(ask())
        except Exception as fault:
            answer.set_exception(fault)

    threading.Thread(target=run, daemon=True).start()
    return answer.result(within_s)
