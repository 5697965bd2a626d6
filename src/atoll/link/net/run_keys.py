"""Keeps the keys of a run in one folder: the authority, and a bundle for each worker, the registry and an observer.

    runs/x/keys/authority/    key.pem, run.pem, revoked.txt: stays where it was made
    runs/x/keys/worker-0/     key.pem, certificate.pem, run.pem, revoked.txt: goes to the machine of worker 0
    runs/x/keys/registry/     the same, for the machine of the registry
    runs/x/keys/observer/     the same, for those that may look on

`throw_away` makes keys for workers that one process starts and ends: their authority's key is never written.
"""

import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from atoll._util.checks import check_whole
from atoll._util.disk import flush, locked, write_atomically, writing
from atoll.errors import AtollError, ConfigError
from atoll.link.net.identity import (
    CERTIFICATE_PEM,
    DAYS,
    MOST_DAYS,
    RUN_PEM,
    Authority,
    Bearer,
    Certificate,
    Identity,
)
from atoll.link.net.key_files import key_error, read_public
from atoll.link.net.revocations import REVOKED, Revocations, revoke

KEYS: Final = "keys"
"""Folder of the keys, in that of the run."""
AUTHORITY: Final = "authority"
MOST_WORKERS: Final = 4096
_LOCK = ".lock"


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Holds an identity for every seat of a run."""

    workers: tuple[Identity, ...]
    registry: Identity
    observer: Identity

    @classmethod
    def issue(cls, authority: Authority, workers: int, days: int = DAYS) -> "KeyRing":
        """Let an authority issue one certificate for each seat."""
        check_whole("workers", workers, most=MOST_WORKERS)
        seats = tuple(authority.issue("worker", seat, days) for seat in range(workers))
        return cls(seats, authority.issue("registry", days=days), authority.issue("observer", days=days))

    @property
    def all(self) -> tuple[Identity, ...]:
        """Every identity, workers first."""
        return (*self.workers, self.registry, self.observer)

    def save(self, folder: Path) -> None:
        """Write one bundle for each seat."""
        for identity in self.all:
            identity.save(folder / identity.bearer.folder)


def throw_away(workers: int, run: str | None = None) -> KeyRing:
    """Make keys whose authority is forgotten at once; nothing is written."""
    return KeyRing.issue(Authority.new(run), workers, MOST_DAYS)


@contextmanager
def throw_away_folder(workers: int, run: str | None = None) -> Iterator[Path]:
    """Yield a folder with throw-away bundles, `worker-0` and so on; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="atoll-keys-") as folder:  # nobody else may enter it
        throw_away(workers, run).save(Path(folder))
        yield Path(folder)


@dataclass(frozen=True, slots=True)
class Shown:
    """Tells about the authority or one bundle in a folder of keys."""

    name: str
    run: str
    """Empty if the files cannot be read."""
    state: str
    """Until when it is valid, or why it is not."""


class RunKeys:
    """Opens the keys of a run.

    Args:
        folder: The run's folder, its `keys`, or one bundle.

    Raises:
        ConfigError: There are none.
    """

    def __init__(self, folder: Path) -> None:
        for place in (folder / KEYS, folder):
            if found := sorted(path.parent for path in place.glob(f"*/{RUN_PEM}")):
                self.folder, self._bundles = place, found
                return
        if not (folder / RUN_PEM).is_file():
            raise key_error(folder, f"holds no keys; make them with `atoll keys new {folder} --workers N`")
        bundle = folder.resolve()  # `.` has no name
        self.folder, self._bundles = bundle.parent, [bundle]

    @classmethod
    def new(cls, folder: Path, workers: int, days: int = DAYS) -> "RunKeys":
        """Make an authority and a bundle for every seat, all or none, in `keys` of a run's folder.

        Raises:
            ConfigError: There are keys already, or an argument is out of bounds.
        """
        place = folder / KEYS
        if os.path.lexists(place):
            raise _exists(place, folder)
        label = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")[:40].strip("-") or "run"
        authority = Authority.new(f"{label}-{secrets.token_hex(4)}")
        ring = KeyRing.issue(authority, workers, days)
        part = folder / f".{KEYS}.{secrets.token_hex(4)}"
        with writing(place):
            folder.mkdir(parents=True, exist_ok=True)
            part.mkdir(mode=0o700)
            try:
                authority.save(part / AUTHORITY)
                ring.save(part)
                try:
                    part.rename(place)
                except OSError as fault:
                    raise _exists(place, folder) if place.exists() else fault from None
                flush(folder)
            finally:
                shutil.rmtree(part, ignore_errors=True)
        return cls(folder)

    @property
    def _authority(self) -> Path:
        return self.folder / AUTHORITY

    def authority(self) -> Authority:
        """Read the authority; ConfigError if its key is not here."""
        if not self._authority.is_dir():
            why = "is not here, and only it can sign: run this where `atoll keys new` was run"
            raise key_error(self._authority, why)
        return Authority.load(self._authority)

    def issue(self, bearer: Bearer, days: int = DAYS) -> Path:
        """Write a bundle with a new key and certificate, also for a seat that had none; return its folder."""
        with self._lock():
            authority = self.authority()
            known = Revocations.load(self._authority, authority.run, authority.pem)
            generation = known.accepted(bearer).generation
            identity = authority.issue(bearer.role, bearer.seat, days, generation=generation)
            bundle = self.folder / bearer.folder
            identity.save(bundle, replace=True)
            if known.content:
                write_atomically(bundle / REVOKED, known.content)
            if bundle not in self._bundles:
                self._bundles.append(bundle)
        return bundle

    def revoke(self, bearer: Bearer) -> Revocations:
        """Revoke every certificate of a seat so far; write the list to the authority and all bundles here."""
        with self._lock():
            authority = self.authority()
            known = Revocations.load(self._authority, authority.run, authority.pem)
            revoked = revoke(authority, known, bearer)
            others = [bundle for bundle in self._bundles if bundle != self._authority]
            for place in (self._authority, *others):  # the authority's is the one that counts
                write_atomically(place / REVOKED, revoked.content)
        return revoked

    def show(self, now: datetime | None = None) -> list[Shown]:
        """Tell about all that is here, the authority first and workers by number."""

        def order(bundle: Path) -> tuple[bool, str, int]:
            role, _, seat = bundle.name.partition("-")
            return bundle != self._authority, "" if role == "worker" else role, int(seat) if seat.isdecimal() else 0

        return [self._show(bundle, now or datetime.now(UTC)) for bundle in sorted(self._bundles, key=order)]

    def _show(self, bundle: Path, now: datetime) -> Shown:
        try:
            if bundle == self._authority:
                authority = self.authority()
                return Shown(bundle.name, authority.run, _until(authority.valid_until, now))
            known = Certificate.read(read_public(bundle / CERTIFICATE_PEM))
            revoked = Revocations.load(bundle, known.bearer.run, read_public(bundle / RUN_PEM))
            state = known.clock_fault(now) or _until(known.valid_until, now)
            if revoked.has(known.bearer):
                state = f"revoked; {state}"
            elif not known.clock_fault(now):
                Identity.load(bundle, now)
            return Shown(bundle.name, known.bearer.run, state)
        except ValueError as fault:  # a ConfigError is one
            return Shown(bundle.name, "", str(fault))

    def _lock(self) -> AbstractContextManager[None]:
        self.authority()  # or there would be no folder for the lock
        busy = AtollError(f"{self._authority} is in use by another `atoll keys`: wait for it")
        return locked(self._authority / _LOCK, busy)


def _until(end: datetime, now: datetime) -> str:
    days = round((end - now) / timedelta(days=1))
    return f"valid until {end:%Y-%m-%d} ({days} day{'' if days == 1 else 's'})"


def _exists(place: Path, folder: Path) -> ConfigError:
    advice = f"`atoll keys show {folder}` tells what they are, `atoll keys renew {folder}` makes new certificates"
    return key_error(place, f"exists already, and keys are not overwritten: {advice}")
