"""Folders of files that are built once, whole or not at all, and checked whenever they are opened.

    cache/
      .KEY.lock          held while a process builds; the system releases it if the process dies
      .building-KEY-*    a build under way, or what a crash left of one; the next build deletes it
      KEY/ ...           the files, and manifest.json with the bytes and the CRC-32 of each

The checksums guard against accidents, not against forgery.
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

from atoll._util.disk import locked, parse_json, read_limited, whole_folder
from atoll._util.units import bytes_text
from atoll.errors import DataError

FORMAT: Final = "atoll-tokens"
MANIFEST: Final = "manifest.json"
MOST_MANIFEST: Final = 2**22
"""Bytes of a manifest, which is read whole: room for thousands of workers."""
REPORT_BYTES: Final = 2**18
"""Bytes between two progress reports: one for every small document would take longer than the documents."""

OnProgress = Callable[[str, int, int | None], None]
"""Called during a build with its stage, the bytes done, and the bytes to do if known."""


def no_progress(stage: str, done: int, total: int | None) -> None:
    """Ignore progress."""


class Meter:
    """Counts the bytes that a build reads and writes, and reports its progress."""

    def __init__(self, on_progress: OnProgress, stage: str, total: int | None) -> None:
        self.on_progress, self.stage, self.total = on_progress, stage, total
        self.read = self.written = 0
        self._reported = -REPORT_BYTES

    def add(self, read: int, written: int = 0) -> None:
        """Count bytes that were read, and bytes that are about to be written."""
        self.read, self.written = self.read + read, self.written + written
        if self.read >= self._reported + REPORT_BYTES or self.read == self.total:
            self.on_progress(self.stage, self.read, self.total)
            self._reported = self.read

    def needed(self) -> str:
        """Return the disk space that the whole build takes, as far as known, for people."""
        if self.total and self.read:
            return f"about {bytes_text(self.written * max(1.0, self.total / self.read))}"
        return f"more than {bytes_text(self.written)}"


def build_once(target: Path, root: Path, meter: Meter, fill: Callable[[Path], dict[str, Any]]) -> None:
    """Build a folder of the cache unless it is there; wait if another process builds it.

    Args:
        target: The folder to build: `root`, or a folder in it.
        root: The corpus's folder in the cache, whose name is the key of its lock.
        meter: Knows how much space the build needs.
        fill: Writes the files into a folder and returns what else the manifest says.

    Raises:
        DataError: if the disk is full or refuses the files.
    """
    if os.path.exists(target):  # no lock: the cache may be read-only
        return
    cache, key = root.parent, root.name
    try:
        cache.mkdir(parents=True, exist_ok=True)
        waiting = partial(meter.on_progress, "waiting for another process that builds the same", 0, None)
        with locked(cache / f".{key}.lock", waiting):
            _delete_leftovers(cache, key)
            new = cache / f".building-{key}-{secrets.token_hex(4)}"
            if not target.exists():  # else another process has built it meanwhile
                with whole_folder(target, new, new.with_suffix(".old")) as folder:
                    seal(folder, fill(folder))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            room = f"the tokens need {meter.needed()}, and {bytes_text(shutil.disk_usage(cache).free)} is free"
            raise DataError(f"{cache} is full: {room}; make room, or set data.cache to another disk") from error
        raise DataError(f"tokens cannot be kept in data.cache {cache}: {error.strerror or error}") from error


def _delete_leftovers(cache: Path, own: str) -> None:
    """Delete what dead builds left: of the key whose lock this process holds, and of keys that are not locked."""
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
    """Write a manifest with the size and the CRC-32 of every file in a folder."""
    files = {}
    for path in sorted(folder.iterdir()):
        checksum = 0
        for part in _parts(path):
            checksum = zlib.crc32(part, checksum)
        files[path.name] = {"bytes": path.stat().st_size, "crc32": checksum}
    body = {"format": FORMAT, **facts, "files": files}
    manifest = {"manifest": body, "crc32": zlib.crc32(json.dumps(body).encode())}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")


def check(folder: Path, on_progress: OnProgress) -> dict[str, Any]:
    """Return the manifest of a folder, after comparing every byte of its files with it.

    Raises:
        DataError: if a file is missing, torn or damaged.
    """
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
            if not path.is_file():  # a device, for example, has length 0 and never ends
                raise DataError(f"{path} is not a plain file; {remedy}")
            checksum = 0
            for part in _parts(path):
                checksum, done = zlib.crc32(part, checksum), done + len(part)
                on_progress("checking", done, total)
            if checksum != file["crc32"]:
                raise DataError(f"{path} is damaged: its CRC-32 is not the one in {MANIFEST}; {remedy}")
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise DataError(f"{path} cannot be read ({reason}); {remedy}") from error
    return manifest


def _parts(path: Path) -> Iterator[bytes]:
    """Yield the bytes of a file, some megabytes at a time."""
    with path.open("rb") as file:
        while part := file.read(2**24):
            yield part
