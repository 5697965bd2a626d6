"""Follows the log of a worker from another machine, as an observer."""

from collections.abc import Sequence

import grpc
import grpc.aio

from atoll.errors import LinkError
from atoll.link.net.frames import one_line
from atoll.link.net.handshake import SERVICE
from atoll.link.net.identity import Identity
from atoll.link.net.log_feed import REMEMBERED, Part, Question
from atoll.link.net.registry import Insecure
from atoll.link.net.worker_status import open_channel

ANSWER_S = 15.0
"""Seconds to wait for an answer: a worker answers slowly while it sends payloads."""


class WorkerLog:
    """Reads the lines of one worker's log as they are written; used in one event loop.

    Args:
        seat: The worker.
        security: The identity of an observer or a worker, or "none".
        most_line: Longest line in bytes; a longer one is an error.
    """

    def __init__(self, seat: int, security: Identity | Insecure, most_line: int) -> None:
        self.size = 0
        """Bytes of the whole log, as of the last answer."""
        self.offset = 0
        """Bytes of it that were read, or left out."""
        self._seat = seat
        self._addresses: Sequence[str] = ()
        self._security = security
        self._most_line = most_line
        self._channel: grpc.aio.Channel | None = None
        self._before = b""  # the last bytes that were read
        self._unfinished = b""  # the beginning of a line

    async def new(self) -> tuple[list[bytes], bool]:
        """Read the next part.

        Returns:
            Whole lines with their newlines; and whether the log begins anew with them.

        Raises:
            LinkError: The worker cannot be reached, refuses, or sends something else.
        """
        part = await self._ask(Question(self.offset, self._before))
        begins = part.offset == 0 and self.offset > 0
        if part.offset != self.offset:
            self._before = self._unfinished = b""
        self.offset, self.size = part.offset + len(part.data), part.size
        self._before = (self._before + part.data)[-REMEMBERED:]
        *lines, rest = (self._unfinished + part.data).split(b"\n")
        self._unfinished = rest
        if len(rest) > self._most_line:
            raise LinkError(f"worker {self._seat} sent a line of more than {self._most_line} bytes", worker=self._seat)
        return [line + b"\n" for line in lines], begins

    async def move(self, addresses: Sequence[str]) -> None:
        """Ask the worker at these addresses, HOST:PORT, tried in turn; if it has another log, that begins anew."""
        await self.close()
        self._addresses = addresses

    @property
    def has_more(self) -> bool:
        """Whether the log had more than was read."""
        return self.offset < self.size

    async def close(self) -> None:
        """Close the connection, if there is one."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask(self, question: Question) -> Part:
        why = "it has told no address"
        for address in self._addresses:
            if self._channel is None:
                self._channel = open_channel(self._seat, address, self._security)
            try:
                call = self._channel.unary_unary(f"/{SERVICE}/Log")
                return Part.parse(await call(question.encode(), timeout=ANSWER_S))
            except grpc.aio.AioRpcError as fault:
                why = one_line(fault.details() or fault.code().name.lower())
            except ValueError as fault:
                raise LinkError(f"worker {self._seat} sent {fault}", worker=self._seat) from fault
            await self.close()
        raise LinkError(f"worker {self._seat} cannot be reached from here: {why}", worker=self._seat)
