"""Keeps the entries of an embedded registry in SQLite, with the changes that led to them.

Every change is one transaction that is on disk before it is acknowledged, so a kill at any moment loses none and the
version never goes back. SQLite's exclusive lock keeps a second process out, and ends with the process that holds it.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from atoll.errors import ConfigError, RegistryError
from atoll.link.net.registry import KEYS, TOTAL_BYTES, Entry, Lease, Outcome

JOURNAL: Final = "registry.sqlite"
HISTORY: Final = 10_000
"""Most changes that are kept for watchers that come back."""
HISTORY_BYTES: Final = 1 << 26
PAGE_BYTES: Final = 1 << 20
PAGE_CHANGES: Final = 1000
_APPLICATION, _FORMAT = 0x61746F6C, 1
_TABLES = """
CREATE TABLE meta (version INTEGER NOT NULL, forgotten INTEGER NOT NULL);
CREATE TABLE entries (key TEXT PRIMARY KEY, value BLOB NOT NULL, version INTEGER NOT NULL, lease INTEGER, ttl_s REAL);
CREATE TABLE changes (version INTEGER PRIMARY KEY, key TEXT NOT NULL, value BLOB);
INSERT INTO meta VALUES (1, 1);
"""


@dataclass(frozen=True, slots=True)
class Change:
    """Records one change; a value of None means that the key has disappeared."""

    key: str
    value: bytes | None
    version: int


@dataclass(frozen=True, slots=True)
class Page:
    """Holds what a watcher is told next."""

    version: int
    """Where the watcher goes on."""
    changes: list[Change]
    is_snapshot: bool


class Journal:
    """Owns the file of a registry; one thread uses it.

    Args:
        folder: Created if it does not exist.

    Raises:
        ConfigError: Another process uses the folder, or its file is not a journal.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._base = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as fault:
            raise self._refusal(f"cannot be opened ({fault})") from fault
        try:
            self._open()
        except BaseException:
            self._base.close()
            raise

    def _open(self) -> None:
        try:
            self._base.execute("PRAGMA locking_mode=EXCLUSIVE")
            self._base.execute("PRAGMA journal_mode=WAL")
            self._base.execute("PRAGMA synchronous=FULL")
            self._base.execute("BEGIN EXCLUSIVE")
            (application,) = self._base.execute("PRAGMA application_id").fetchone()
            (number,) = self._base.execute("PRAGMA user_version").fetchone()
            (tables,) = self._base.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if (application, number, tables) == (0, 0, 0):
                for statement in filter(str.strip, _TABLES.split(";")):
                    self._base.execute(statement)
                self._base.execute(f"PRAGMA application_id={_APPLICATION}")
                self._base.execute(f"PRAGMA user_version={_FORMAT}")
            elif (application, number) != (_APPLICATION, _FORMAT):
                raise self._refusal("is not the journal of a registry of this version of atoll; choose another folder")
            self._base.execute("COMMIT")  # the lock stays
            self.version, self._forgotten = self._base.execute("SELECT version, forgotten FROM meta").fetchone()
            self._bytes = self._sum("entries")
            self._history_bytes = self._sum("changes")
        except sqlite3.Error as fault:
            if "locked" in str(fault):
                raise self._refusal("is used by another registry; stop that one, or choose another folder") from None
            raise self._refusal(f"cannot be read ({fault}); choose another folder") from fault

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(f"registry: {self.path} {why}", setting="folder", value=str(self.path.parent))

    def _sum(self, table: str) -> int:
        return int(self._base.execute(f"SELECT coalesce(sum(length(value)), 0) FROM {table}").fetchone()[0])

    def close(self) -> None:
        """Close the file, which another process may use then."""
        self._base.close()

    # ------------------------------------------------------------------ reading

    def get(self, key: str) -> Entry | None:
        """Return what a key holds; None if it does not exist."""
        found = self._base.execute("SELECT value, version FROM entries WHERE key = ?", (key,)).fetchone()
        return None if found is None else Entry(*found)

    def leases(self) -> dict[str, tuple[int, float]]:
        """Return number and time to live of every lease, by key."""
        found = self._base.execute("SELECT key, lease, ttl_s FROM entries WHERE lease IS NOT NULL")
        return {key: (lease, ttl_s) for key, lease, ttl_s in found}

    def page(self, prefix: str, since: int) -> Page:
        """Return the next changes below a prefix after a version, or a snapshot if they are not all known.

        Raises:
            RegistryError: The version is newer than all: another journal has told of it.
        """
        if since > self.version:
            problem = f"version {since} is unknown to this registry, which is at {self.version}: its journal was lost"
            raise RegistryError(f"{problem}; start all workers of the run again")
        below = (prefix, prefix + "\x7f")
        is_snapshot = since == 0 or since < self._forgotten
        if is_snapshot:
            found = self._base.execute(
                "SELECT key, value, version FROM entries WHERE key >= ? AND key < ? ORDER BY version", below
            )
            return Page(self.version, [Change(*row) for row in found], True)
        changes, size = list[Change](), 0
        rows = self._base.execute(
            "SELECT key, value, version FROM changes WHERE version > ? AND key >= ? AND key < ? ORDER BY version",
            (since, *below),
        )
        for row in rows:
            changes.append(Change(*row))
            size += len(row[1] or b"")
            if size > PAGE_BYTES or len(changes) == PAGE_CHANGES:
                rows.close()
                return Page(changes[-1].version, changes, False)
        return Page(self.version, changes, False)

    # ------------------------------------------------------------------ writing

    def compare_and_set(self, key: str, value: bytes, version: int) -> Outcome:
        """Write a key if it still has this version."""
        there = self.get(key)
        if (there.version if there else 0) != version:
            return Outcome(False, there)
        self._write(key, value)
        return Outcome(True, Entry(value, self.version))

    def grant(self, lease: Lease, *, if_absent: bool) -> bool:
        """Write a lease's key; return False if `if_absent` and another lease has the key."""
        holder = self._holder(lease.key)
        if holder is not None and if_absent:
            return holder == lease.number
        self._write(lease.key, lease.value, lease.number, lease.ttl_s)
        return True

    def withdraw(self, key: str, number: int) -> bool:
        """Delete a key if this lease has it; return whether it had."""
        if self._holder(key) != number:
            return False
        self._write(key, None)
        return True

    def _holder(self, key: str) -> int | None:
        """Return the lease that has a key; None if the key does not exist."""
        found = self._base.execute("SELECT coalesce(lease, 0) FROM entries WHERE key = ?", (key,)).fetchone()
        return None if found is None else int(found[0])

    def _write(self, key: str, value: bytes | None, lease: int | None = None, ttl_s: float | None = None) -> None:
        """Carry out one change, in one transaction; nothing has changed after an error."""
        version, forgotten = self.version + 1, self._forgotten
        with self._transaction(key):
            before = self.get(key)
            size = self._bytes + len(value or b"") - len(before.value if before else b"")
            if value is None:
                self._base.execute("DELETE FROM entries WHERE key = ?", (key,))
            else:
                self._check_room(key, size, is_new=before is None)
                self._base.execute(
                    "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?, ?)", (key, value, version, lease, ttl_s)
                )
            self._base.execute("INSERT INTO changes VALUES (?, ?, ?)", (version, key, value))
            history = self._history_bytes + len(value or b"")
            while version - forgotten > HISTORY or (history > HISTORY_BYTES and forgotten < version - 1):
                forgotten += 1
                (old,) = self._base.execute("SELECT value FROM changes WHERE version = ?", (forgotten,)).fetchone()
                self._base.execute("DELETE FROM changes WHERE version = ?", (forgotten,))
                history -= len(old or b"")
            self._base.execute("UPDATE meta SET version = ?, forgotten = ?", (version, forgotten))
        self.version, self._forgotten, self._bytes, self._history_bytes = version, forgotten, size, history

    def _check_room(self, key: str, size: int, *, is_new: bool) -> None:
        (count,) = self._base.execute("SELECT count(*) FROM entries").fetchone()
        if size > TOTAL_BYTES or count + is_new > KEYS:
            problem = f"the registry has no room for {key}: it holds {count} keys and would have {size} bytes"
            raise RegistryError(f"{problem}; allowed are {KEYS} keys and {TOTAL_BYTES} bytes", key=key)

    @contextmanager
    def _transaction(self, key: str) -> Iterator[None]:
        try:
            self._base.execute("BEGIN IMMEDIATE")
            yield
            self._base.execute("COMMIT")
        except BaseException as fault:
            if self._base.in_transaction:
                self._base.execute("ROLLBACK")
            if not isinstance(fault, sqlite3.Error):
                raise
            problem = f"the registry cannot write {key} to {self.path}: {fault}"
            raise RegistryError(f"{problem}; free some space on that disk", key=key) from fault
