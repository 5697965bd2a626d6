"""Messages to and from other workers through a process group, in chunks that share a connection.

Receives are posted before sends: gloo announces a receive on the same connection that carries data the other way, so
one that is posted late waits behind it, and the two directions take turns.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from atoll.link.base import Contribution
from atoll.link.net.wire import HEADER_BYTES, BadMessage, Envelope, Kind, checksum, unseal

CHUNK_BYTES = 1 << 19
"""Of one send; also of every receive, for gloo ends the process if more comes than was asked for."""
TAGS = 1 << 30
"""Tags of messages are below."""

_FOREVER = timedelta(days=36500)  # who waits is let go by closing the connections
_JOIN_S = 1.0  # for all threads whose connections are closed; gloo lets none go that had received a part of a chunk


class LostError(Exception):
    """A message that did not come or could not be sent: from or to whom, and in words that follow "worker 3"."""

    def __init__(self, worker: int, why: str, *, closed: bool = False) -> None:
        super().__init__(why)
        self.worker = worker
        self.closed = closed
        """All that is known is that it has closed the connection, which may have reasons that lie elsewhere."""

    @classmethod
    def gone(cls, worker: int) -> "LostError":
        """Of a worker that has closed its connection."""
        return cls(worker, "closed its connection", closed=True)


class Incoming:
    """A message that is due, chunk by chunk; its sender counts with `weight`, as all have agreed."""

    def __init__(self, envelope: Envelope, weight: float, buffer: Tensor, works: Iterable[Any]) -> None:
        self.envelope = envelope
        self._weight = weight
        self._buffer = buffer
        self._works = deque(works)  # gloo waits for ever when it is asked twice about the same one
        self._here_bytes = 0
        self._checksum = 0

    @property
    def left_bytes(self) -> int:
        """What has not been waited for."""
        return self.envelope.message_bytes - self._here_bytes

    def advance(self) -> None:
        """Wait for the next chunk, and take its checksum while others arrive."""
        _settle(self.envelope.sender, [self._works.popleft()])
        end = min(self._here_bytes + CHUNK_BYTES, self.envelope.message_bytes)
        payload = self._buffer[max(self._here_bytes, HEADER_BYTES) : end]
        self._checksum, self._here_bytes = checksum(payload, self._checksum), end

    def wait(self) -> Contribution | None:
        """What it brings, or None if its sender had nothing."""
        while self._works:
            self.advance()
        try:
            brought = unseal(self._buffer[: self.envelope.message_bytes], self.envelope, self._checksum)
        except BadMessage as bad:
            raise LostError(self.envelope.sender, str(bad)) from bad
        if brought is not None and self.envelope.kind is not Kind.MEAN and brought.member.weight != self._weight:
            why = f"sent a weight of {brought.member.weight!r} where {self._weight!r} was agreed at the start"
            raise LostError(self.envelope.sender, why)
        return brought


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message on its way."""

    receiver: int
    works: tuple[Any, ...]

    def wait(self) -> None:
        """Until all of it has left; it keeps the message's memory."""
        _settle(self.receiver, self.works)


def _settle(worker: int, works: Iterable[Any]) -> None:
    for work in works:
        try:
            work.wait(_FOREVER)
        except RuntimeError as fault:
            raise LostError.gone(worker) from fault


class Mail:
    """Messages to and from the others through one process group; `tag` tells those of different rounds apart.

    `weights` are those of all workers in every mean, as they were agreed on.
    """

    def __init__(self, group: Any, peers: Sequence[int], weights: Mapping[int, float]) -> None:
        self._group = group
        self._peers = peers
        self._weights = weights
        self._threads: list[threading.Thread] = []

    def watch(self, lost: Callable[[LostError], None]) -> None:
        """Let `lost` be told when a connection closes, also between rounds."""
        for peer in self._peers:
            # Nothing is ever sent there, so it ends with the connection; gloo tells nobody who waits for nothing.
            watch = self._expect(torch.empty(1, dtype=torch.uint8, device="cpu"), peer, TAGS)
            self.start(_watch, peer, watch, lost)

    def expect(self, envelope: Envelope, tag: int, *, pinned: bool = False) -> Incoming:
        """Post the receives of a message; into pinned memory, if it goes on to a GPU."""
        chunks = -(-envelope.message_bytes // CHUNK_BYTES)
        buffer = torch.empty(chunks * CHUNK_BYTES, dtype=torch.uint8, device="cpu", pin_memory=pinned)
        works = [self._expect(chunk, envelope.sender, tag) for chunk in buffer.split(CHUNK_BYTES)]
        return Incoming(envelope, self._weights[envelope.sender], buffer, works)

    def send(self, message: Tensor, receiver: int, tag: int) -> Outgoing:
        """Start sending a message."""
        group = self._open(receiver)
        try:
            return Outgoing(receiver, tuple(group.send([chunk], receiver, tag) for chunk in message.split(CHUNK_BYTES)))
        except RuntimeError as fault:
            raise LostError.gone(receiver) from fault

    def start(self, run: Callable[..., None], *arguments: Any) -> None:
        """Begin what waits for messages, in a thread."""
        thread = threading.Thread(target=run, args=arguments, name=f"atoll {run.__name__}", daemon=True)
        self._threads = [thread, *(other for other in self._threads if other.is_alive())]
        thread.start()

    def close(self) -> None:
        """Close all connections: whoever waits here is let go, and the others notice."""
        group, self._group = self._group, None
        for peer in self._peers if group is not None else ():
            with suppress(RuntimeError):  # a wait that runs out closes all connections of a group; nothing else does
                nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
                group.recv([nothing], peer, TAGS + 1).wait(timedelta(milliseconds=1))

    def end(self) -> None:
        """Close, and see the threads to their ends: one that is left when Python ends can take the process down."""
        self.close()
        until = time.monotonic() + _JOIN_S
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _expect(self, buffer: Tensor, sender: int, tag: int) -> Any:
        try:
            return self._open(sender).recv([buffer], sender, tag)
        except RuntimeError as fault:
            raise LostError.gone(sender) from fault

    def _open(self, peer: int) -> Any:
        if self._group is None:
            raise LostError.gone(peer)
        return self._group


def _watch(peer: int, work: Any, lost: Callable[[LostError], None]) -> None:
    with suppress(RuntimeError):
        work.wait(_FOREVER)
    lost(LostError.gone(peer))
