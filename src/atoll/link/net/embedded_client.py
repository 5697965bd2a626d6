"""Talks to an embedded registry over gRPC with mutual TLS."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

import grpc
import grpc.aio

from atoll.errors import RegistryError
from atoll.link.net import registry_messages as messages
from atoll.link.net.embedded import BEAT_S
from atoll.link.net.identity import Bearer, Identity, Role
from atoll.link.net.registry import (
    INSECURE,
    TOTAL_BYTES,
    Entry,
    Insecure,
    Lease,
    Outcome,
    Registry,
    Standing,
    Update,
    check_key,
    check_prefix,
    check_set,
)
from atoll.link.net.revocation_watch import list_of

SILENT_S: Final = 4 * BEAT_S
"""A watcher that hears nothing for this long connects again."""
_AGAIN_S = 0.1
_PASSING = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
)


class EmbeddedRegistry(Registry):
    """Is a client of a `RegistryServer`.

    Args:
        address: HOST:PORT of the server.
        security: This process's identity, or `INSECURE` for a private cable.
        role: What the server's certificate must say: "registry", or "worker" for one inside worker 0.
        timeout_s: How long an operation waits for the server.
    """

    def __init__(
        self, address: str, security: Identity | Insecure, *, role: Role = "registry", timeout_s: float = 10.0
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        if security == INSECURE:
            self._channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
            return
        server = list_of(security).accepted(Bearer(security.bearer.run, role)).host_name
        credentials = grpc.ssl_channel_credentials(security.run_certificate, security.key, security.certificate)
        named = [("grpc.ssl_target_name_override", server), ("grpc.default_authority", server)]
        self._channel = grpc.aio.secure_channel(address, credentials, options=[*_OPTIONS, *named])

    async def get(self, key: str) -> Entry | None:
        """Return what a key holds now; None if it does not exist."""
        check_key(key)
        reply = await self._call("Get", messages.GetRequest(key=key), messages.GetReply, key)
        return reply.entry.entry() if reply.entry else None

    async def compare_and_set(self, key: str, value: bytes, version: int) -> Outcome:
        """Write a key if it still has this version."""
        check_set(key, value, version)
        request = messages.SetRequest(key=key, value=value, version=version)
        return (await self._call("Set", request, messages.SetReply, key)).outcome()

    async def close(self) -> None:
        """Close the connection."""
        await self._channel.close()

    async def _grant(self, lease: Lease, *, if_absent: bool) -> bool:
        request = messages.GrantRequest(
            key=lease.key, value=lease.value, ttl_s=lease.ttl_s, number=lease.number, if_absent=if_absent
        )
        return (await self._call("Grant", request, messages.GrantReply, lease.key)).granted

    async def _renew(self, lease: Lease) -> Standing:
        request = messages.LeaseRequest(key=lease.key, number=lease.number)
        return (await self._call("Renew", request, messages.RenewReply, lease.key)).standing

    async def _withdraw(self, lease: Lease) -> None:
        request = messages.LeaseRequest(key=lease.key, number=lease.number)
        await self._call("Withdraw", request, messages.WithdrawReply, lease.key)

    async def _call(
        self, method: str, request: messages.Message, kind: type[messages.AnyMessage], key: str
    ) -> messages.AnyMessage:
        call = self._channel.unary_unary(f"/{messages.SERVICE}/{method}")
        try:
            reply: bytes = await call(request.encode(), timeout=self._timeout_s, wait_for_ready=True)
            return messages.parse(kind, reply)
        except grpc.aio.AioRpcError as fault:
            raise self._error(method, fault, key) from fault
        except ValueError as fault:
            raise RegistryError(f"the registry at {self._address} answers with {fault}", key=key) from fault

    def _error(self, method: str, fault: grpc.aio.AioRpcError, key: str | None) -> RegistryError:
        if fault.code() not in _PASSING:
            return RegistryError(f"the registry at {self._address} refuses: {fault.details()}", key=key)
        problem = f"the registry at {self._address} cannot be reached ({fault.code().name}: {fault.details()})"
        advice = "check that it runs, that this address is its own and that the keys are of one run"
        return RegistryError(f"{problem}; {advice}", key=key, uncertain=method != "Get")

    async def watch(self, prefix: str, since: int = 0) -> AsyncGenerator[Update, None]:
        """Yield every change below a prefix that is newer than `since`, in order and without gaps."""
        check_prefix(prefix)
        while True:
            method = self._channel.unary_stream(f"/{messages.SERVICE}/Watch")
            request = messages.WatchRequest(prefix=prefix, since=since)
            call = method(request.encode(), wait_for_ready=True)
            try:
                updates = _Updates(since)
                while True:
                    async with asyncio.timeout(SILENT_S):
                        data = await call.read()
                    if data is grpc.aio.EOF:
                        break
                    for update in updates.take(messages.parse(messages.WatchReply, data)):
                        since = update.version
                        yield update
                    since = updates.since
            except grpc.aio.AioRpcError as fault:
                if fault.code() not in _PASSING:
                    raise self._error("Watch", fault, None) from fault
            except TimeoutError:
                pass
            except ValueError as fault:
                raise RegistryError(f"the registry at {self._address} answers with {fault}") from fault
            finally:
                call.cancel()
            await asyncio.sleep(_AGAIN_S)


class _Updates:
    """Makes updates of the messages of one watch."""

    def __init__(self, since: int) -> None:
        self.since = since
        """The version up to which all has been told."""
        self._snapshot: dict[str, Entry | None] = {}
        self._bytes = 0

    def take(self, reply: messages.WatchReply) -> list[Update]:
        """Return the updates that are complete with this message; ValueError if it cannot follow the others."""
        if reply.is_snapshot:
            self._bytes += sum(len(change.value or b"") for change in reply.changes)
            if self._bytes > TOTAL_BYTES:
                raise ValueError(f"a snapshot of more than {TOTAL_BYTES} bytes")
            self._snapshot.update((change.key, _entry(change)) for change in reply.changes)
            if reply.has_more:
                return []
            update = Update(reply.version, self._snapshot, is_snapshot=True)
            self._snapshot, self._bytes, self.since = {}, 0, reply.version
            return [update]
        updates = []
        for change in reply.changes:
            if change.version <= self.since:
                raise ValueError(f"change {change.version} after change {self.since}")
            self.since = change.version
            updates.append(Update(change.version, {change.key: _entry(change)}))
        self.since = max(self.since, reply.version)
        return updates


def _entry(change: messages.ChangeMessage) -> Entry | None:
    return None if change.value is None else Entry(change.value, change.version)


_OPTIONS = [
    ("grpc.max_receive_message_length", messages.MESSAGE_BYTES),
    ("grpc.max_send_message_length", messages.MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5000),  # also the longest that connecting may take: lines are slow
    ("grpc.max_reconnect_backoff_ms", 1000),
    ("grpc.use_local_subchannel_pool", 1),
]
