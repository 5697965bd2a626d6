"""Folders of files that are built once, whole or not at all, and checked whenever they are opened.

    cache/
      .KEY.lock          held while somebody builds; the lock dies with its holder
      .building-KEY-*    a build under way, or what a crash left of one; the next build sweeps it
      KEY/ ...           the files, and manifest.json with the bytes and the CRC-32 of each

A folder gets its name once all of it is on disk. The checksums guard against accidents, not forgers.
"""

import errno
import fcntl
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

from atoll._util.disk import flush, locked, parse_json, read_limited
from atoll._util.units import bytes_text
from atoll.errors import DataError

FORMAT: Final = "atoll-tokens"
MANIFEST: Final = "manifest.json"
MOST_MANIFEST: Final = 2**22
"""Bytes of a manifest, which is read whole: room for thousands of workers."""
TELL_BYTES: Final = 2**18
"""How often somebody is told; for every little document would take longer than the documents."""

Tell = Callable[[str, int, int | None], None]
"""Called with a stage, the bytes done and those to do, if known, as a build goes on."""


def silent(stage: str, done: int, total: int | None) -> None:
    """Tell nobody."""


class Meter:
    """How far a build is: bytes read, of how many if that is known, and bytes written."""

    def __init__(self, tell: Tell, stage: str, total: int | None) -> None:
        self.tell, self.stage, self.total = tell, stage, total
        self.read = self.written = 0
        self._told = -TELL_BYTES

    def add(self, read: int, written: int = 0) -> None:
        """So many bytes more were read, and so many are about to be written."""
        self.read, self.written = self.read + read, self.written + written
        if self.read >= self._told + TELL_BYTES or self.read == self.total:
            self.tell(self.stage, self.read, self.total)
            self._told = self.read

    def needed(self) -> str:
        """Room that the whole takes, as far as can be told by now."""
        if self.total and self.read:
            return f"about {bytes_text(self.written * max(1.0, self.total / self.read))}"
        return f"more than {bytes_text(self.written)}"


def build_once(target: Path, root: Path, meter: Meter, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Have `fill` write the files of `target`, unless it is there; `root` is the cache's folder that it is (in)."""
    if os.path.exists(target):  # no lock: the cache may be read-only
        return
    cache, key = root.parent, root.name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        waiting = partial(meter.tell, "waiting for another process that builds the same", 0, None)
        with locked(cache / f".{key}.lock", waiting):
            _sweep(cache, key)
            folder = cache / f".building-{key}-{secrets.token_hex(4)}"
            try:
                if not target.exists():  # else somebody else has built it meanwhile
                    folder.mkdir()
                    seal(folder, fill(folder))
                    folder.rename(target)
                    flush(target.parent)
            finally:
                shutil.rmtree(folder, ignore_errors=True)  # there is none left unless something failed
    except OSError as fault:
        if fault.errno in (errno.ENOSPC, errno.EDQUOT):
            room = f"the tokens need {meter.needed()}, and {bytes_text(shutil.disk_usage(cache).free)} is free"
            raise DataError(f"{cache} is full: {room}; make room, or set data.cache to another disk") from fault
        raise DataError(f"tokens cannot be kept in data.cache {cache}: {fault.strerror or fault}") from fault


def _sweep(cache: Path, own: str) -> None:
    """Delete what dead builds left: of the key whose lock we hold, and of those whose lock nobody holds."""
    for leftover in cache.glob(".building-*"):
        key = leftover.name.split("-")[1]
        with (cache / f".{key}.lock").open("wb") as lock:
            try:
                if key != own:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(leftover, ignore_errors=True)


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Get every file onto the disk, and last a manifest that knows them."""
    files = {}
    for path in sorted(folder.iterdir()):
        flush(path)
        checksum = 0
        for part in _parts(path):
            checksum = zlib.crc32(part, checksum)
        files[path.name] = {"bytes": path.stat().st_size, "crc32": checksum}
    body = {"format": FORMAT, **facts, "files": files}
    manifest = {"manifest": body, "crc32": zlib.crc32(json.dumps(body).encode())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    flush(folder / MANIFEST)
    flush(folder)


def check(folder: Path, tell: Tell) -> dict[str, Any]:
    """The manifest of a folder, once every byte of its files is found good."""
    remedy = f"delete the folder {folder} to have it built again"
    path = folder / MANIFEST
    try:
        sealed = parse_json(read_limited(path, MOST_MANIFEST))
        manifest: dict[str, Any] = sealed["manifest"]
        if zlib.crc32(json.dumps(manifest).encode()) != sealed["crc32"]:
            raise DataError(f"{path} is damaged: its CRC-32 is not the one at its end; {remedy}")
        total = sum(file["bytes"] for file in manifest["files"].values())
        done = 0
        for name, file in manifest["files"].items():
            path = folder / name
            if (length := path.stat().st_size) != file["bytes"]:
                raise DataError(f"{path} is torn: it has {length} bytes of {file['bytes']}; {remedy}")
            if not path.is_file():  # of the length 0, for example, and yet endless
                raise DataError(f"{path} is no plain file; {remedy}")
            checksum = 0
            for part in _parts(path):
                checksum, done = zlib.crc32(part, checksum), done + len(part)
                tell("checking", done, total)
            if checksum != file["crc32"]:
                raise DataError(f"{path} is damaged: its CRC-32 is not the one in {MANIFEST}; {remedy}")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as fault:
        reason = getattr(fault, "strerror", None) or repr(fault)
        raise DataError(f"{path} cannot be read ({reason}); {remedy}") from fault
    return manifest


def _parts(path: Path) -> Iterator[bytes]:
    """The bytes of a file, some megabytes at a time."""
    with path.open("rb") as file:
        while part := file.read(2**24):
            yield part
