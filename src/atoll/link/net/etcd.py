"""Keeps the registry in an existing etcd v3 cluster, so that it survives the loss of a machine.

etcd's revisions are the versions, its leases the presences. What a user may read and write is etcd's own business:
grant each run's users the keys below /atoll/NAME/.
"""

import asyncio
import base64
import binascii
import math
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Final

from atoll.errors import RegistryError
from atoll.link.net.etcd_gateway import EtcdOptions, Gateway, GatewayError, Json
from atoll.link.net.registry import (
    KEYS,
    VIEW,
    Entry,
    Lease,
    Outcome,
    Registry,
    Standing,
    Update,
    check_key,
    check_prefix,
    check_set,
)

IDLE_S: Final = 5.0
"""After this time without changes, a watcher asks whether its member of the cluster is alive."""
_AGAIN_S = 0.1
_NOT_FOUND, _EXISTS = 5, 9  # gRPC's codes


class EtcdRegistry(Registry):
    """Is a client of an etcd cluster."""

    def __init__(self, options: EtcdOptions) -> None:
        self._gateway = Gateway(options)
        self._root = f"/atoll/{options.name}/"

    async def get(self, key: str) -> Entry | None:
        """Return what a key holds now; None if it does not exist."""
        check_key(key)
        reply = await self._gateway.call("kv/range", {"key": self._key(key)}, again=True)
        return _entry_of(reply)

    async def compare_and_set(self, key: str, value: bytes, version: int) -> Outcome:
        """Write a key if it still has this version."""
        check_set(key, value, version)
        name = self._key(key)
        body = {
            "compare": [{"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": str(version)}],
            "success": [{"request_put": {"key": name, "value": _encode(value)}}],
            "failure": [{"request_range": {"key": name}}],
        }
        reply = await self._gateway.call("kv/txn", body)
        if reply.get("succeeded") is True:
            return Outcome(True, Entry(value, _revision(reply)))
        return Outcome(False, _entry_of(_first(reply, "response_range")))

    async def close(self) -> None:
        """Close the connection."""
        self._gateway.close()

    # ------------------------------------------------------------------ presence

    async def _grant(self, lease: Lease, *, if_absent: bool) -> bool:
        number, name = str(lease.number), self._key(lease.key)
        try:
            await self._gateway.call("lease/grant", {"ID": number, "TTL": str(math.ceil(lease.ttl_s))}, again=True)
        except GatewayError as fault:
            if fault.code != _EXISTS:
                raise
        put = {"request_put": {"key": name, "value": _encode(lease.value), "lease": number}}
        body: Json = {"success": [put], "failure": [{"request_range": {"key": name}}]}
        if if_absent:
            body["compare"] = [{"key": name, "target": "MOD", "result": "EQUAL", "mod_revision": "0"}]
        reply = await self._gateway.call("kv/txn", body, again=True)
        return reply.get("succeeded") is True or _lease_of(_first(reply, "response_range")) == lease.number

    async def _renew(self, lease: Lease) -> Standing:
        reply = await self._gateway.call("lease/keepalive", {"ID": str(lease.number)}, again=True)
        result = reply.get("result")
        is_alive = isinstance(result, dict) and _number(result.get("TTL", 0)) > 0
        holder = _lease_of(await self._gateway.call("kv/range", {"key": self._key(lease.key)}, again=True))
        if holder is None or (holder == lease.number and not is_alive):
            return Standing.LAPSED
        return Standing.HELD if holder == lease.number else Standing.REPLACED

    async def _withdraw(self, lease: Lease) -> None:
        try:
            await self._gateway.call("lease/revoke", {"ID": str(lease.number)}, again=True)
        except GatewayError as fault:
            if fault.code != _NOT_FOUND:
                raise

    # ------------------------------------------------------------------ watching

    async def watch(self, prefix: str, since: int = 0) -> AsyncGenerator[Update, None]:
        """Yield every change below a prefix that is newer than `since`, in order and without gaps."""
        check_prefix(prefix)
        while True:
            changes = _Changes(since, len(self._root))
            try:
                if since == 0:
                    update = await self._snapshot(prefix)
                    since = update.version
                    yield update
                    changes.since = since
                await self._check_known(since)
                async with aclosing(self._gateway.stream("watch", self._request(prefix, since), IDLE_S)) as stream:
                    async for message in stream:
                        for update in changes.take(message):
                            since = update.version
                            yield update
                        if changes.is_over:
                            break
            except GatewayError as fault:
                if not fault.is_passing and fault.code not in _STALE:
                    raise
            if changes.is_forgotten:
                since = 0
            await asyncio.sleep(_AGAIN_S)

    def _request(self, prefix: str, since: int) -> Json:
        create = {"start_revision": str(since + 1), "fragment": True}
        return {"create_request": {**self._range(prefix), **create}}

    async def _check_known(self, since: int) -> None:
        reply = await self._gateway.call("kv/range", {"key": self._key(VIEW), "keys_only": True}, again=True)
        if (newest := _revision(reply)) < since:
            problem = f"version {since} is unknown to this cluster, which is at {newest}: its data was lost"
            raise RegistryError(f"{problem}; start all workers of the run again")

    async def _snapshot(self, prefix: str) -> Update:
        reply = await self._gateway.call("kv/range", {**self._range(prefix), "limit": str(KEYS)}, again=True)
        if reply.get("more"):
            raise RegistryError(
                f"etcd holds more than {KEYS} keys below {self._root}{prefix}; delete what is no worker's"
            )
        entries: dict[str, Entry | None] = {}
        for one in _list(reply, "kvs"):
            entries[_name(one, len(self._root))] = Entry(
                _decode(one.get("value", "")), _number(one.get("mod_revision"))
            )
        return Update(_revision(reply), entries, is_snapshot=True)

    def _key(self, key: str) -> str:
        return _encode(f"{self._root}{key}".encode())

    def _range(self, prefix: str) -> Json:
        return {"key": self._key(prefix), "range_end": self._key(f"{prefix}\x7f")}


_STALE = (3, 16)  # of a token that has expired: the gateway gets another


class _Changes:
    """Makes updates of the messages of one watch: one for each revision, once all of it is here."""

    def __init__(self, since: int, root: int) -> None:
        self.since = since
        """The version up to which all has been told."""
        self.is_over = False
        self.is_forgotten = False
        """Whether etcd has compacted changes that were not told yet."""
        self._root = root
        self._part: dict[str, Entry | None] = {}
        self._part_version = 0

    def take(self, message: Json) -> list[Update]:
        """Return the updates that are complete with this message."""
        if message.get("canceled"):
            self.is_over = True
            self.is_forgotten = _number(message.get("compact_revision", 0)) > 0
            return []
        if message.get("created"):
            return []
        updates = []
        for event in _list(message, "events"):
            one = event.get("kv")
            if not isinstance(one, dict):
                raise RegistryError("etcd tells of a change without a key")
            version = _number(one.get("mod_revision"))
            if version != self._part_version:
                updates += self._complete()
                self._part_version = version
            gone = event.get("type") == "DELETE"
            self._part[_name(one, self._root)] = None if gone else Entry(_decode(one.get("value", "")), version)
        if not message.get("fragment"):
            updates += self._complete()
        return updates

    def _complete(self) -> list[Update]:
        if not self._part:
            return []
        if self._part_version <= self.since:
            raise RegistryError(f"etcd tells of change {self._part_version} after change {self.since}")
        update = Update(self._part_version, self._part)
        self._part, self.since = {}, self._part_version
        return [update]


# ---------------------------------------------------------------------- etcd's JSON


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _decode(text: object) -> bytes:
    try:
        return base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        raise RegistryError("etcd answers with bytes that are not in base64") from None


def _number(text: object) -> int:
    """Read a 64-bit number, which is a string in JSON."""
    if isinstance(text, int) or (isinstance(text, str) and text.isascii() and text.isdecimal() and len(text) < 20):
        return int(text)
    raise RegistryError(f"etcd answers with {str(text)[:40]!r} for a number")


def _revision(reply: Json) -> int:
    header = reply.get("header")
    return _number(header.get("revision", 0)) if isinstance(header, dict) else 0


def _list(reply: Json, field: str) -> list[Json]:
    found = reply.get(field) or []
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise RegistryError(f"etcd answers with no list of {field}")
    return found


def _first(reply: Json, kind: str) -> Json:
    """Return the first reply inside a transaction's."""
    inner: Any = next(iter(_list(reply, "responses")), {}).get(kind)
    return inner if isinstance(inner, dict) else {}


def _entry_of(reply: Json) -> Entry | None:
    found = _list(reply, "kvs")
    return Entry(_decode(found[0].get("value", "")), _number(found[0].get("mod_revision"))) if found else None


def _lease_of(reply: Json) -> int | None:
    """Return the lease of the key that was asked for; None if it does not exist, 0 if it has none."""
    found = _list(reply, "kvs")
    return _number(found[0].get("lease", 0)) if found else None


def _name(one: Json, root: int) -> str:
    return _decode(one.get("key")).decode("utf-8", "replace")[root:]
