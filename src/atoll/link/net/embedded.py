"""Serves a registry over gRPC with mutual TLS: inside worker 0, or by `atoll registry` in a process of its own.

What a caller may do follows from its certificate: a worker writes its own presence keys and the view, an observer only
reads. Entries are in a `Journal`; renewals are not, so after a restart every lease has its full time again.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio

from atoll.errors import RegistryError
from atoll.link.net import registry_messages as messages
from atoll.link.net.credentials import Gate, PeerRefusedError
from atoll.link.net.identity import Bearer, Identity
from atoll.link.net.journal import PAGE_BYTES, PAGE_CHANGES, Change, Journal, Page
from atoll.link.net.listening import listen_on, server_options
from atoll.link.net.registry import INSECURE, VIEW, Insecure, Standing, check_key, check_prefix, seat_of
from atoll.link.net.revocation_watch import list_of, watch_revocations

CONNECTIONS: Final = 4096
"""Most connections, strangers' included; and at most a quarter of the files that the process may open."""
WATCHERS: Final = 4096
WATCHERS_EACH: Final = 64
"""Most watchers of one certificate."""
BEAT_S: Final = 2.0
"""A watcher hears from the registry at least this often."""
_TICK_S, _STALL_S = 0.1, 1.0
_log = logging.getLogger(__name__)


class Context(Protocol):
    """Is what the server uses of gRPC's context of a call."""

    async def abort(self, code: grpc.StatusCode, details: str) -> NoReturn:
        """End the call with an error."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]:
        """Return what the caller's certificate says."""


Handler = Callable[[Bearer | None, Any], Coroutine[Any, Any, messages.Message]]
Result = TypeVar("Result")


@dataclass(slots=True)
class _Term:
    """Says when a lease ends unless it is renewed."""

    number: int
    ttl_s: float
    end_s: float


class RegistryServer:
    """Serves the registry whose journal is in a folder; made by `start`."""

    def __init__(self, journal: Journal, thread: ThreadPoolExecutor, security: Identity | Insecure) -> None:
        self.address = ""
        """HOST:PORT where it listens."""
        self._journal = journal
        self._thread = thread  # the journal's: waiting for the disk holds up nothing else
        self._gate = None if security == INSECURE else Gate(security.bearer.run, list_of(security))
        now_s = time.monotonic()
        terms = {key: _Term(number, ttl_s, now_s + ttl_s) for key, (number, ttl_s) in journal.leases().items()}
        self._terms: dict[str, _Term] = terms
        self._changed = asyncio.Event()
        self._watching: Counter[Bearer | None] = Counter()
        self._server = grpc.aio.server(
            options=server_options(messages.MESSAGE_BYTES, CONNECTIONS), maximum_concurrent_rpcs=2 * WATCHERS
        )
        self._calls: set[asyncio.Task[messages.Message]] = set()
        self._tasks: list[asyncio.Task[None]] = []

    @classmethod
    async def start(cls, folder: Path, listen: str, security: Identity | Insecure) -> "RegistryServer":
        """Open a folder's journal and listen.

        Args:
            folder: Holds the journal; created if it does not exist.
            listen: HOST:PORT; port 0 takes a free one.
            security: The server's identity, or `INSECURE` for a private cable.

        Raises:
            ConfigError: Another process uses the journal, or the address cannot be used.
        """
        thread = ThreadPoolExecutor(1, "registry")
        try:
            journal = await asyncio.get_running_loop().run_in_executor(thread, Journal, folder)
        except BaseException:
            thread.shutdown()
            raise
        self = cls(journal, thread, security)
        try:
            self._server.add_generic_rpc_handlers((self._handlers(),))
            self.address = listen_on(self._server, listen, security, "registry")
            await self._server.start()
        except BaseException:
            await self.close()
            raise
        self._tasks.append(asyncio.create_task(self._sweep(), name="registry leases"))
        if self._gate is not None and security != INSECURE:
            watching = watch_revocations(security, self._gate, self._wake)
            self._tasks.append(asyncio.create_task(watching, name="registry revocations"))
        return self

    async def wait(self) -> None:
        """Wait until the server is closed."""
        await self._server.wait_for_termination()

    async def close(self) -> None:
        """Stop serving and close the journal."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(0)
        await asyncio.gather(*self._calls, return_exceptions=True)
        await self._in_thread(self._journal.close)
        self._thread.shutdown()

    async def _in_thread(self, call: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: call(*args))

    # ------------------------------------------------------------------ operations

    async def _get(self, bearer: Bearer | None, request: messages.GetRequest) -> messages.Message:
        check_key(request.key)
        entry = await self._in_thread(self._journal.get, request.key)
        return messages.GetReply(entry=messages.EntryMessage.of(entry))

    async def _set(self, bearer: Bearer | None, request: messages.SetRequest) -> messages.Message:
        if request.key != VIEW or not (bearer is None or bearer.role == "worker"):
            raise PermissionError(f"{_name(bearer)} may not set {request.key}")
        compare_and_set = self._journal.compare_and_set
        outcome = await self._in_thread(compare_and_set, request.key, request.value, request.version)
        if outcome.accepted:
            self._wake()
        return messages.SetReply(accepted=outcome.accepted, entry=messages.EntryMessage.of(outcome.entry))

    async def _grant(self, bearer: Bearer | None, request: messages.GrantRequest) -> messages.Message:
        _check_owner(bearer, request.key)
        lease = request.lease()
        granted = await self._in_thread(lambda: self._journal.grant(lease, if_absent=request.if_absent))
        if granted:
            self._terms[lease.key] = _Term(lease.number, lease.ttl_s, time.monotonic() + lease.ttl_s)
            self._wake()
        return messages.GrantReply(granted=granted)

    async def _renew(self, bearer: Bearer | None, request: messages.LeaseRequest) -> messages.Message:
        _check_owner(bearer, request.key)
        term = self._terms.get(request.key)
        if term is None:
            return messages.RenewReply(standing=Standing.LAPSED)
        if term.number != request.number:
            return messages.RenewReply(standing=Standing.REPLACED)
        term.end_s = time.monotonic() + term.ttl_s
        return messages.RenewReply(standing=Standing.HELD)

    async def _withdraw(self, bearer: Bearer | None, request: messages.LeaseRequest) -> messages.Message:
        _check_owner(bearer, request.key)
        term = self._terms.get(request.key)
        if term is not None and term.number == request.number:
            await self._end(request.key, term)
        return messages.WithdrawReply()

    async def _end(self, key: str, term: _Term) -> None:
        del self._terms[key]  # from now on it cannot be renewed
        try:
            await self._in_thread(self._journal.withdraw, key, term.number)
        except BaseException:
            self._terms.setdefault(key, term)
            raise
        self._wake()

    def _wake(self) -> None:
        """Let all watchers look for changes."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _sweep(self) -> None:
        """End leases that nobody renews."""
        looked_s = time.monotonic()
        while True:
            await asyncio.sleep(_TICK_S)
            now_s = time.monotonic()
            if now_s - looked_s > _STALL_S:  # stopped or swapped out: nobody could renew meanwhile
                for term in self._terms.values():
                    term.end_s = now_s + term.ttl_s
            for key, term in [(key, term) for key, term in self._terms.items() if term.end_s < now_s]:
                if self._terms.get(key) is term:
                    try:
                        await self._end(key, term)
                    except RegistryError as fault:
                        _log.warning("%s is gone, but stays in the registry for now: %s", key, fault)
                        term.end_s = time.monotonic() + _STALL_S
            looked_s = time.monotonic()

    # ------------------------------------------------------------------ watching

    async def _watch(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        bearer = await self._caller(context)
        with self._one_more_watcher(bearer) as problem:
            if problem:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, problem)
            try:
                asked = messages.parse(messages.WatchRequest, request)
                check_prefix(asked.prefix)
            except ValueError as fault:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(fault))
            async for reply in self._replies(asked.prefix, asked.since, context):
                if self._gate is not None and bearer is not None and self._gate.revocations.has(bearer):
                    await self._caller(context)  # says so
                yield reply.encode()

    async def _replies(self, prefix: str, since: int, context: Context) -> AsyncIterator[messages.WatchReply]:
        told_s = time.monotonic()
        while True:
            changed = self._changed
            try:
                page = await self._in_thread(self._journal.page, prefix, since)
            except RegistryError as fault:
                await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(fault))
            for reply in _cut(page):
                yield reply
                told_s = time.monotonic()
            if page.version == since:
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), max(0.0, told_s + BEAT_S - time.monotonic()))
            since = page.version
            if time.monotonic() >= told_s + BEAT_S:
                told_s = time.monotonic()
                yield messages.WatchReply(version=since, changes=[], is_snapshot=False, has_more=False)

    @contextmanager
    def _one_more_watcher(self, bearer: Bearer | None) -> Iterator[str]:
        most = WATCHERS if bearer is None else WATCHERS_EACH
        if self._watching[bearer] >= most or self._watching.total() >= WATCHERS:
            yield f"too many watchers: {_name(bearer)} has {self._watching[bearer]}, allowed are {most}"
            return
        self._watching[bearer] += 1
        try:
            yield ""
        finally:
            self._watching[bearer] -= 1
            if not self._watching[bearer]:
                del self._watching[bearer]

    # ------------------------------------------------------------------ calls

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary: dict[str, tuple[Handler, type[messages.Message]]] = {
            "Get": (self._get, messages.GetRequest),
            "Set": (self._set, messages.SetRequest),
            "Grant": (self._grant, messages.GrantRequest),
            "Renew": (self._renew, messages.LeaseRequest),
            "Withdraw": (self._withdraw, messages.LeaseRequest),
        }
        methods = {name: grpc.unary_unary_rpc_method_handler(self._answering(*how)) for name, how in unary.items()}
        methods["Watch"] = grpc.unary_stream_rpc_method_handler(self._watch)
        return grpc.method_handlers_generic_handler(messages.SERVICE, methods)

    def _answering(
        self, handler: Handler, kind: type[messages.Message]
    ) -> Callable[[bytes, Context], Awaitable[bytes]]:
        async def answer(request: bytes, context: Context) -> bytes:
            bearer = await self._caller(context)
            try:
                asked = messages.parse(kind, request)
                reply = await asyncio.shield(self._begin(handler(bearer, asked)))
                return reply.encode()
            except RegistryError as fault:
                code, why = grpc.StatusCode.RESOURCE_EXHAUSTED, str(fault)
            except PermissionError as fault:
                code, why = grpc.StatusCode.PERMISSION_DENIED, str(fault)
            except ValueError as fault:
                code, why = grpc.StatusCode.INVALID_ARGUMENT, str(fault)
            return await context.abort(code, why)

        return answer

    def _begin(self, call: Coroutine[Any, Any, messages.Message]) -> asyncio.Task[messages.Message]:
        """Carry out a call whole, also if its caller goes away: a key in the journal must have its term here."""
        task = asyncio.create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to see it
        return task

    async def _caller(self, context: Context) -> Bearer | None:
        """Return the name in the caller's certificate; None without security, where all are trusted."""
        if self._gate is None:
            return None
        try:
            return self._gate.peer(context.auth_context(), ("worker", "observer"))
        except PeerRefusedError as refused:
            return await context.abort(refused.code, str(refused))


def _check_owner(bearer: Bearer | None, key: str) -> None:
    check_key(key)
    seat = seat_of(key)
    if seat is None or not (bearer is None or (bearer.role == "worker" and bearer.seat == seat)):
        raise PermissionError(f"{_name(bearer)} may not announce itself as {key}")


def _name(bearer: Bearer | None) -> str:
    return "a caller without a name" if bearer is None else f"{bearer.role} {bearer.seat}"


def _cut(page: Page) -> Iterator[messages.WatchReply]:
    """Cut a page into messages; none if it has no changes and is no snapshot."""
    parts, size = list[list[Change]](), PAGE_BYTES
    for change in page.changes:
        if size >= PAGE_BYTES or len(parts[-1]) == PAGE_CHANGES:
            parts.append([])
            size = 0
        parts[-1].append(change)
        size += len(change.value or b"")
    if page.is_snapshot and not parts:
        parts = [[]]
    for number, part in enumerate(parts, 1):
        changes = [messages.ChangeMessage(key=one.key, value=one.value, version=one.version) for one in part]
        has_more = page.is_snapshot and number < len(parts)
        version = page.version if page.is_snapshot or number == len(parts) else part[-1].version
        yield messages.WatchReply(version=version, changes=changes, is_snapshot=page.is_snapshot, has_more=has_more)
