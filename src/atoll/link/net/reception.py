"""Answers other processes of a run that dial this one."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, cast

import grpc
import grpc.aio

from atoll.link.net.credentials import PeerRefusedError
from atoll.link.net.frames import CONNECTIONS, BulkHello, FrameError, Hello, Kind
from atoll.link.net.handshake import ACCEPTED, HANDSHAKE_S, SERVICE, Begin, Own, RefusedError, name
from atoll.link.net.identity import Bearer
from atoll.link.net.log_feed import BusyError, LogFeed
from atoll.link.net.session import BROKEN, CLOSED, Session, Stream, Streams
from atoll.link.net.views import Process

HANDSHAKES: Final = 512
"""Most streams that belong to no session yet, of all peers together."""
HANDSHAKES_EACH: Final = 3 * (1 + CONNECTIONS)
"""Most of them of one certificate: a dial that was given up may linger beside the next."""
_UNMET_S = 2.0  # a dial waits for this process to want it


class Context(Stream, Protocol):
    """Is what the server uses of gRPC's context of a call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with an error."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what the caller's certificate says."""


@dataclass(slots=True)
class _Dial:
    """Is a dial of another process that may become the session."""

    peer: Process
    bulks: list[Stream | None]
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    over: asyncio.Event = field(default_factory=asyncio.Event)


class Reception:
    """Serves the methods that other processes call.

    Args:
        own: This process.
        expects: Tells whether a session with a process is wanted.
        begin: Makes a dial the session.
    """

    def __init__(self, own: Own, expects: Callable[[Process], bool], begin: Begin) -> None:
        self._own = own
        self._expects, self._begin = expects, begin
        self._dials: dict[str, _Dial] = {}
        self._handshakes: Counter[int | None] = Counter()
        self._changed = asyncio.Event()
        self.status: Callable[[], bytes] = lambda: b""
        """Returns what an observer is told."""
        self.log: LogFeed | None = None
        """The log that observers may follow."""

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return what gRPC's server calls."""
        methods = {
            "Control": grpc.stream_stream_rpc_method_handler(self._control),
            "Bulk": grpc.stream_stream_rpc_method_handler(self._bulk),
            "Status": grpc.unary_unary_rpc_method_handler(self._tell_status),
            "Log": grpc.unary_unary_rpc_method_handler(self._tell_log),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _tell_status(self, _: bytes, context: Context) -> bytes:
        """Answer an observer, or a worker, that asks how far this process is."""
        await self._check_observer(context)
        return self.status()

    async def _tell_log(self, question: bytes, context: Context) -> bytes:
        """Answer an observer, or a worker, that follows the log of this process."""
        await self._check_observer(context)
        if self.log is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, f"worker {self._own.me.seat} has no log for observers")
        try:
            return await self.log.answer(question)
        except BusyError as busy:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(busy))
        except ValueError as fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {self._own.me.seat} got {fault}")

    async def _check_observer(self, context: Context) -> None:
        """Refuse a caller that has no certificate of the run, or one that is revoked."""
        try:
            if self._own.gate is not None:
                self._own.gate.peer(context.auth_context(), ("worker", "observer"))
        except PeerRefusedError as refused:
            await context.abort(refused.code, str(refused))

    def wake(self) -> None:
        """Look again at dials that were not expected."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _control(self, _: Any, context: Context) -> None:
        try:
            caller = self._caller(context)
            with self._one_more(None if caller is None else caller.seat):
                session, dial = await self._welcome(caller, context)
        except (RefusedError, PeerRefusedError) as refused:
            await context.abort(refused.code, str(refused))
        except FrameError as fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {self._own.me.seat} got {fault}")
        except TimeoutError:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"no session within {HANDSHAKE_S:g} s")
        except BROKEN:
            return
        try:
            await session.over.wait()
        finally:
            session.end(CLOSED)
            dial.over.set()

    async def _welcome(self, caller: Bearer | None, context: Context) -> tuple[Session, _Dial]:
        """Exchange hellos with a process that dials, wait for its bulk streams, and begin the session."""
        async with asyncio.timeout(HANDSHAKE_S):
            hello, greeting = Hello.read(await _read(context))
            peer = Process(hello.seat, hello.life)
            if caller is not None and caller.seat != hello.seat:
                why = f"worker {caller.seat} says that it is worker {hello.seat}: start it with the bundle of that seat"
                raise RefusedError(why, grpc.StatusCode.PERMISSION_DENIED)
            self._own.check_wanted(hello)
            await self._wait_expected(peer)
            if hello.session in self._dials:
                raise FrameError("the number of another session")
            dial = self._dials[hello.session] = _Dial(peer, [None] * hello.connections)
            is_begun = False
            try:
                await context.write(self._own.hello(peer, hello.session, hello.connections))
                await dial.complete.wait()
                if not self._own.chooses(peer) and await _read(context) != bytes((Kind.READY,)):
                    raise FrameError("no word that the session begins")
                generation = 0 if caller is None else caller.generation
                streams = Streams(context, cast(list[Stream], dial.bulks), generation=generation)
                session = self._begin(peer, streams, greeting)
                is_begun = True
            finally:
                del self._dials[hello.session]
                if not is_begun:
                    dial.over.set()
            return session, dial

    async def _wait_expected(self, peer: Process) -> None:
        """Wait a little for a process to be expected: it may have read the registry a moment earlier."""
        try:
            async with asyncio.timeout(_UNMET_S):
                while not self._expects(peer):
                    await self._changed.wait()
        except TimeoutError:
            raise RefusedError(f"{name(self._own.me)} does not expect {name(peer)}") from None

    async def _bulk(self, _: Any, context: Context) -> None:
        try:
            caller = self._caller(context)
            seat = None if caller is None else caller.seat
            with self._one_more(seat):
                async with asyncio.timeout(HANDSHAKE_S):
                    hello = BulkHello.read(await _read(context))
                    dial = self._dials.get(hello.session)
                    if dial is None or seat not in (None, dial.peer.seat):
                        raise RefusedError("there is no such session")
                    if hello.index >= len(dial.bulks) or dial.bulks[hello.index] is not None:
                        raise RefusedError(f"the session has no bulk stream {hello.index}, or has it already")
                    dial.bulks[hello.index] = context
                    await context.write(ACCEPTED)
                    if None not in dial.bulks:
                        dial.complete.set()
        except (RefusedError, PeerRefusedError) as refused:
            await context.abort(refused.code, str(refused))
        except FrameError as fault:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"worker {self._own.me.seat} got {fault}")
        except (TimeoutError, *BROKEN):
            return
        await dial.over.wait()

    def _caller(self, context: Context) -> Bearer | None:
        """Return the name in the caller's certificate; None without security."""
        return None if self._own.gate is None else self._own.gate.peer(context.auth_context(), ("worker",))

    @contextmanager
    def _one_more(self, seat: int | None) -> Iterator[None]:
        """Count a handshake while it lasts."""
        most = HANDSHAKES if seat is None else HANDSHAKES_EACH
        if self._handshakes[seat] >= most or self._handshakes.total() >= HANDSHAKES:
            raise RefusedError("too many dials at once", grpc.StatusCode.RESOURCE_EXHAUSTED)
        self._handshakes[seat] += 1
        try:
            yield
        finally:
            self._handshakes[seat] -= 1
            if not self._handshakes[seat]:
                del self._handshakes[seat]


async def _read(context: Context) -> bytes:
    data = await context.read()
    return b"" if data is grpc.aio.EOF else bytes(data)
