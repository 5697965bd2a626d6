"""Serves the board on which the processes of a run with fixed members find each other; worker 0 hosts it.

Processes write JSON texts under their own names, before the first round, at the end and after a failure, and read those
of all others. A worker's certificate says which names are its own. The board is in memory and ends with the run.
"""

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any, Final, Literal, NoReturn, Protocol

import grpc
import grpc.aio
from pydantic import Field

from atoll.link.base import describe_differences
from atoll.link.net.credentials import Gate, PeerRefusedError
from atoll.link.net.identity import Identity
from atoll.link.net.listening import listen_on, server_options
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.registry_messages import Message, parse
from atoll.link.net.revocation_watch import list_of, watch_revocations
from atoll.link.seat import Seat

SERVICE: Final = "atoll.MeetingPoint"
MESSAGE_BYTES: Final = 16 << 20
VALUE_CHARACTERS: Final = 1 << 20
ENTRIES: Final = 20_000
TOTAL_CHARACTERS: Final = 1 << 26
"""Most characters that all texts have together."""
CONNECTIONS: Final = 4096
"""Most connections, strangers' included; and at most a quarter of the files that the process may open."""
MISFIT: Final = "misfit"
"""Name under which the board says why it has refused a process."""
_REPLY_CHARACTERS = 1 << 20
_MOST_HOLD_S = 2.0
_NAME = re.compile(r"[a-z0-9 _-]{1,64}/([0-9]{1,6})\.([0-9]{1,4})", re.ASCII)

Method = Callable[[int | None, Any], Awaitable[Message]]
"""Answers a request of the worker whose certificate the caller shows; None without security."""
Number = Annotated[int, Field(ge=0, lt=1 << 20)]
Name = Annotated[str, Field(max_length=80)]


class TakeRequest(Message):
    """Asks for a seat."""

    worker: Number
    workers: Number
    rank: Number
    ranks: Number
    life: Annotated[int, Field(gt=0, lt=1 << 62)]
    """Drawn by the process, so that it may ask again if the reply was lost."""

    def seat(self) -> Seat:
        """Return the seat; ConfigError, which is a ValueError, if there can be none."""
        return Seat(self.worker, self.workers, self.rank, self.ranks)


class TakeReply(Message):
    """Tells what has become of a seat."""

    state: Literal["ours", "ending", "taken", "misfit"]
    """Ending: a previous run has it, which is about to leave this address."""
    why: str = ""


class SayRequest(Message):
    """Writes a text under a name."""

    name: Name
    text: Annotated[str, Field(max_length=VALUE_CHARACTERS)]


class SayReply(Message):
    """Says that the text is there."""


class LookRequest(Message):
    """Asks for texts, as soon as one of them is there."""

    names: Annotated[list[Name], Field(max_length=ENTRIES)]
    hold_s: Annotated[float, Field(ge=0, le=_MOST_HOLD_S)]
    """Seconds to wait for the first."""


class LookReply(Message):
    """Carries the texts that are there, or the first of them if they are long."""

    texts: dict[str, str]


class Context(Protocol):
    """Is what the server uses of gRPC's context of a call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with an error."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what the caller's certificate says."""


class MeetingPoint:
    """Serves the board of one run; made by `start`, and used in one event loop.

    Args:
        host: The process that hosts it.
        security: The host's identity, or `INSECURE` for a private cable.
    """

    def __init__(self, host: Seat, security: Identity | Insecure) -> None:
        self._host = host
        self._security = security
        self._watching: asyncio.Task[None] | None = None
        self._gate = None if security == INSECURE else Gate(security.bearer.run, list_of(security))
        self._texts: dict[str, str] = {}
        self._lives: dict[str, int] = {}  # of the processes that have taken a seat, by its key
        self._characters = 0
        self._changed = asyncio.Event()
        options = server_options(MESSAGE_BYTES, CONNECTIONS)
        self._server = grpc.aio.server(options=options, maximum_concurrent_rpcs=2 * CONNECTIONS)
        self._server.add_generic_rpc_handlers((self._handlers(),))

    @classmethod
    async def start(cls, address: str, host: Seat, security: Identity | Insecure) -> "MeetingPoint":
        """Listen at an address; ConfigError if that cannot be."""
        self = cls(host, security)
        try:
            listen_on(self._server, address, security, "address")
            await self._server.start()
        except BaseException:
            await self.close()
            raise
        if self._gate is not None and self._security != INSECURE:
            self._watching = asyncio.create_task(watch_revocations(self._security, self._gate, lambda: None))
        return self

    async def close(self) -> None:
        """Stop, and free the port."""
        if self._watching is not None:
            self._watching.cancel()
        await self._server.stop(0)

    # ------------------------------------------------------------------ calls

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary: dict[str, tuple[Method, type[Message]]] = {
            "Take": (self._take, TakeRequest),
            "Say": (self._say, SayRequest),
            "Look": (self._look, LookRequest),
        }
        methods = {name: grpc.unary_unary_rpc_method_handler(self._answering(*how)) for name, how in unary.items()}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _answering(self, method: Method, kind: type[Message]) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(request: bytes, context: Context) -> bytes:
            try:
                caller = None
                if self._gate is not None:
                    caller = self._gate.peer(context.auth_context(), ("worker",)).seat
                return (await method(caller, parse(kind, request))).encode()
            except PeerRefusedError as refused:
                code, why = refused.code, str(refused)
            except PermissionError as fault:
                code, why = grpc.StatusCode.PERMISSION_DENIED, str(fault)
            except ValueError as fault:
                code, why = grpc.StatusCode.INVALID_ARGUMENT, str(fault)
            return await context.abort(code, why)

        return answer

    async def _take(self, caller: int | None, request: TakeRequest) -> TakeReply:
        seat = request.seat()
        _check_own(caller, seat.worker)
        if differs := describe_differences(_size(seat), _size(self._host)):
            why = f"{seat} and {self._host} differ in {differs}"
            self._write(MISFIT, why)
            return TakeReply(state="misfit", why=why)
        if self._lives.setdefault(seat.key, request.life) == request.life:
            self._write(f"seat/{seat.key}", "true")
            return TakeReply(state="ours")
        gone = (f"left/{seat.key}", f"left/{self._host.key}", f"failure/{self._host.key}")
        return TakeReply(state="ending" if any(name in self._texts for name in gone) else "taken")

    async def _say(self, caller: int | None, request: SayRequest) -> SayReply:
        found = _NAME.fullmatch(request.name)
        if found is None:
            raise ValueError(f"the name {request.name!r} is unknown; names are KEY/WORKER.RANK")
        _check_own(caller, int(found[1]))
        self._write(request.name, request.text)
        return SayReply()

    async def _look(self, caller: int | None, request: LookRequest) -> LookReply:
        with suppress(TimeoutError):
            async with asyncio.timeout(request.hold_s):
                while not any(name in self._texts for name in request.names):
                    await self._changed.wait()
        texts, size = dict[str, str](), 0
        for name in request.names:
            if name in self._texts and size <= _REPLY_CHARACTERS:
                texts[name] = self._texts[name]
                size += len(texts[name])
        return LookReply(texts=texts)

    def _write(self, name: str, text: str) -> None:
        size = self._characters + len(text) - len(self._texts.get(name, ""))
        if size > TOTAL_CHARACTERS or len(self._texts) + (name not in self._texts) > ENTRIES:
            raise ValueError(f"no room for {name}; allowed are {ENTRIES} texts of {TOTAL_CHARACTERS} characters")
        self._texts[name], self._characters = text, size
        self._changed.set()
        self._changed = asyncio.Event()


def _size(seat: Seat) -> dict[str, str]:
    return {"sync.workers": str(seat.workers), "ranks that exchange": str(seat.ranks)}


def _check_own(caller: int | None, worker: int) -> None:
    """Refuse a worker that writes as another one."""
    if caller not in (None, worker):
        raise PermissionError(f"worker {caller} may not write as worker {worker}: start it with the bundle of that one")
