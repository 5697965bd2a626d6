"""Defines the registry: the small store through which members find each other and agree on views.

A registry has four operations. A process announces its presence under a key, and the key disappears when the process
no longer renews it. `get` reads a key. `compare_and_set` writes a key if it still has the version that the caller has
seen. `watch` follows all changes below a prefix.

Versions are numbers of the whole registry: every change has a higher one than all changes before it, also after the
registry was killed and started again. Version 0 stands for a key that does not exist.
"""

import asyncio
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from types import TracebackType
from typing import Final, Literal, Self

from atoll.errors import ConfigError, RegistryError

VIEW: Final = "view"
"""Key of the view, the only one that is written by compare-and-set."""
WORKERS: Final = "workers/"
"""Prefix of all presence keys."""
VALUE_BYTES: Final = 1 << 20
PRESENCE_BYTES: Final = 1 << 14
KEYS: Final = 10_000
TOTAL_BYTES: Final = 1 << 24
"""Most bytes that all values have together."""
TTL_S: Final = (0.1, 3600.0)
INSECURE: Final = "none"
"""Stands for no TLS and no identities; for a private cable only."""
Insecure = Literal["none"]
_KEY = re.compile(r"view|workers/(0|[1-9][0-9]{0,5})(/(0|[1-9][0-9]?))?", re.ASCII)
_PREFIX = re.compile(r"[a-z0-9/]{0,32}", re.ASCII)
_SHORTEST_S, _LONGEST_S = 0.02, 1.0  # between two attempts to renew


@dataclass(frozen=True, slots=True)
class Entry:
    """Holds the value of a key, and the version of the change that wrote it."""

    value: bytes
    version: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """Tells whether a compare-and-set was accepted, and what the key holds now."""

    accepted: bool
    entry: Entry | None
    """The new entry if accepted, else the one that was in the way; None if the key does not exist."""


@dataclass(frozen=True, slots=True)
class Update:
    """Holds one change below a prefix, or everything below it."""

    version: int
    """Where `watch` goes on after this update."""
    entries: Mapping[str, Entry | None]
    """The changed keys; None for a key that has disappeared."""
    is_snapshot: bool = False
    """Whether `entries` has all keys below the prefix: all others do not exist, and changes before it are not told."""


class Standing(StrEnum):
    """Tells what has become of a presence."""

    HELD = "held"
    LAPSED = "lapsed"
    """It was not renewed in time, and the key is free."""
    REPLACED = "replaced"
    """Another process has announced itself under the key."""


class Registry(ABC):
    """Is the connection of one process to a registry.

    Every operation raises RegistryError if the registry cannot be reached in time or refuses.
    """

    @abstractmethod
    async def get(self, key: str) -> Entry | None:
        """Return what a key holds now; None if it does not exist."""

    @abstractmethod
    async def compare_and_set(self, key: str, value: bytes, version: int) -> Outcome:
        """Write a key if it still has this version.

        Args:
            key: `VIEW`.
            value: At most `VALUE_BYTES`.
            version: The version that the caller has seen; 0 to create the key if it does not exist.

        Raises:
            RegistryError: With `uncertain` if the connection was lost after the request was sent: the registry may
                have accepted it, and `get` tells.
        """

    @abstractmethod
    def watch(self, prefix: str, since: int = 0) -> AsyncGenerator[Update, None]:
        """Yield every change below a prefix that is newer than `since`, in order and without gaps.

        Connects again as often as it must, and says nothing meanwhile. The first update is a snapshot if `since` is 0;
        a later one is a snapshot if the watcher was away for so long that the registry has forgotten changes.

        Raises:
            RegistryError: The registry refuses, or has lost changes that it had told of before.
        """

    async def announce(self, key: str, value: bytes, ttl_s: float) -> "Presence":
        """Announce this process under a key, and renew that until the presence is closed.

        Another process under this key is replaced, and learns it.

        Args:
            key: Made by `presence_key`.
            value: At most `PRESENCE_BYTES`.
            ttl_s: The key disappears after this time without renewal; a registry may take up to 2 s longer.
        """
        check_presence(key, value, ttl_s)
        lease = Lease(key, value, ttl_s, 1 + secrets.randbelow((1 << 62) - 1))
        await self._grant(lease, if_absent=False)
        return Presence(self, lease)

    @abstractmethod
    async def close(self) -> None:
        """Close the connection; presences that are still open disappear after their time."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    # ------------------------------------------------------------------ for Presence

    @abstractmethod
    async def _grant(self, lease: "Lease", *, if_absent: bool) -> bool:
        """Write a lease's key; return False, and change nothing, if `if_absent` and another lease has the key."""

    @abstractmethod
    async def _renew(self, lease: "Lease") -> Standing:
        """Give a lease its full time again."""

    @abstractmethod
    async def _withdraw(self, lease: "Lease") -> None:
        """End a lease and delete its key, unless another lease has the key now."""


@dataclass(frozen=True, slots=True)
class Lease:
    """Holds what a process is announced with."""

    key: str
    value: bytes
    ttl_s: float
    number: int
    """Drawn by the process, so that it knows its own announcement again if the reply was lost."""


class Presence:
    """Renews the presence of this process in the background.

    If the registry could not be reached for too long and the key has disappeared, it is announced again.
    """

    def __init__(self, registry: Registry, lease: Lease) -> None:
        self._registry = registry
        self._lease = lease
        self._replaced = asyncio.Event()
        self._renewing = asyncio.create_task(self._renew(), name=f"presence {lease.key}")

    @property
    def key(self) -> str:
        """The key under which the process is announced."""
        return self._lease.key

    async def wait_replaced(self) -> None:
        """Wait until another process has announced itself under the key; then this one renews no longer."""
        waiting = asyncio.create_task(self._replaced.wait())
        try:
            await asyncio.wait((waiting, self._renewing), return_when=asyncio.FIRST_COMPLETED)
            if self._renewing.done() and not self._renewing.cancelled():
                self._renewing.result()  # an error that is none of the registry's
        finally:
            waiting.cancel()

    @property
    def is_replaced(self) -> bool:
        """Whether another process is known to have the key."""
        return self._replaced.is_set()

    async def close(self) -> None:
        """Withdraw: the key disappears at once, or after its time if the registry cannot be reached."""
        self._renewing.cancel()
        with suppress(asyncio.CancelledError):
            await self._renewing
        if not self.is_replaced:
            with suppress(RegistryError, TimeoutError):
                await asyncio.wait_for(self._registry._withdraw(self._lease), self._lease.ttl_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _renew(self) -> None:
        wait_s = third_s = self._lease.ttl_s / 3
        while True:
            await asyncio.sleep(wait_s)
            try:
                async with asyncio.timeout(max(third_s, _LONGEST_S)):
                    standing = await self._registry._renew(self._lease)
                    if standing is Standing.LAPSED:
                        is_ours = await self._registry._grant(self._lease, if_absent=True)
                        standing = Standing.HELD if is_ours else Standing.REPLACED
            except (RegistryError, TimeoutError):
                wait_s = min(max(third_s / 4, _SHORTEST_S), _LONGEST_S)
                continue
            if standing is Standing.REPLACED:
                self._replaced.set()
                return
            wait_s = third_s


# ---------------------------------------------------------------------- keys


def presence_key(seat: int, rank: int | None = None) -> str:
    """Return the key under which a worker, or one of its ranks, announces itself."""
    return f"{WORKERS}{seat}" if rank is None else f"{WORKERS}{seat}/{rank}"


def seat_of(key: str) -> int | None:
    """Return the seat that a presence key belongs to; None for any other key."""
    return int(key.split("/")[1]) if key.startswith(WORKERS) and _KEY.fullmatch(key) else None


def check_key(key: str) -> None:
    """Refuse a key that no registry holds."""
    if not _KEY.fullmatch(key):
        allowed = f'allowed are "{VIEW}", "{WORKERS}SEAT" and "{WORKERS}SEAT/RANK"'
        raise ConfigError(f"registry: the key {key[:80]!r} is unknown; {allowed}", setting="key", value=key)


def check_prefix(prefix: str) -> None:
    """Refuse a prefix below which no key can be."""
    if not _PREFIX.fullmatch(prefix):
        problem = f"registry: the prefix {prefix[:80]!r} is unknown; allowed are beginnings of keys"
        raise ConfigError(problem, setting="prefix", value=prefix)


def check_set(key: str, value: bytes, version: int) -> None:
    """Refuse a compare-and-set of another key than the view, of a value that is too long, or of no version."""
    if key != VIEW:
        problem = f'registry: {key[:80]!r} cannot be set; only "{VIEW}" can, presences are announced'
        raise ConfigError(problem, setting="key", value=key)
    _check_size(key, value, VALUE_BYTES)
    if not 0 <= version < 1 << 63:
        raise ConfigError(f"registry: version {version} is not in 0 to 2**63 - 1", setting="version", value=version)


def check_presence(key: str, value: bytes, ttl_s: float) -> None:
    """Refuse a presence under another key than a worker's, one that is too long, or a time that cannot work."""
    check_key(key)
    if seat_of(key) is None:
        raise ConfigError(f"registry: {key!r} is no presence; use presence_key(seat)", setting="key", value=key)
    _check_size(key, value, PRESENCE_BYTES)
    if not TTL_S[0] <= ttl_s <= TTL_S[1]:
        problem = f"registry: a presence of {ttl_s} s; allowed are {TTL_S[0]} to {TTL_S[1]} s"
        raise ConfigError(problem, setting="ttl_s", value=ttl_s)


def _check_size(key: str, value: bytes, most: int) -> None:
    if len(value) > most:
        problem = f"registry: the value of {key} has {len(value)} bytes; allowed are {most}"
        raise ConfigError(problem, setting="value", value=len(value))
