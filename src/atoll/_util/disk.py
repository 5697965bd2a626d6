"""Writes files and folders whole or not at all, reads files in bounded memory, and locks them.

Every small file that another program may have written is read here, so memory stays bounded whatever it holds.
"""

import errno
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Final

from atoll._util.units import bytes_text
from atoll.errors import AtollError

DEEPEST: Final = 100
"""Most levels that JSON, TOML or the state of a checkpoint may nest, far below Python's recursion limit."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError into an AtollError that names the path."""
    try:
        yield
    except OSError as fault:
        raise AtollError(f"{path} cannot be written: {fault.strerror or fault}") from fault


def write_atomically(path: Path, content: bytes, mode: int = 0o666) -> None:
    """Write a small file atomically: readers see the old content or the new. Parent folders are created."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(part, "xb", opener=lambda name, flags: os.open(name, flags, mode)) as file:
                file.write(content)
            flush(part)  # after a power cut, the name must not be there without the bytes
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's entries, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def whole_folder(folder: Path, new: Path, old: Path) -> Iterator[Path]:
    """Yield `new`, an empty folder to fill; then rename it to `folder` once all its files are on disk.

    A folder of that name is replaced, and can be read as `old` until that is done. After an error all is as before.
    """
    new.mkdir(parents=True)
    try:
        yield new
        for path in new.iterdir():
            flush(path)
        flush(new)
        _put_in_place(new, folder, old)
    finally:
        if old.exists():  # given its name back, or deleted under another: a crash half-way leaves no torn `old`
            old.rename(new if folder.exists() else folder)
        shutil.rmtree(new, ignore_errors=True)


def _put_in_place(new: Path, folder: Path, old: Path) -> None:
    if folder.exists():  # POSIX renames nothing onto a folder that has files in it
        folder.rename(old)
    new.rename(folder)
    flush(folder.parent)


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def open_plain(path: Path) -> IO[bytes]:
    """Open a file for reading; OSError if it is a pipe, which may block for ever, or a device."""

    def opened(name: str, flags: int) -> int:
        descriptor = os.open(name, flags | os.O_NONBLOCK)  # opening a pipe without a writer would block
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):  # open() refuses a folder itself
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a plain file", name)
        return descriptor

    return open(path, "rb", opener=opened)


def read_limited(path: Path, most: int, *, pipe: bool = False) -> bytes:
    """Read a file, or a pipe if `pipe` allows it; OSError if it has more than `most` bytes."""
    with path.open("rb") if pipe else open_plain(path) as file:
        length = os.fstat(file.fileno()).st_size
        data = b"" if length > most else file.read(most + 1)
    if max(length, len(data)) > most:
        raise _too_large(path, "it", most)
    return data


def lines_limited(path: Path, file: IO[bytes], most: int) -> Iterator[bytes]:
    """Yield each line of an open file with its newline; OSError if one has more than `most` bytes."""
    number = 0
    while line := file.readline(most + 1):
        number += 1
        if len(line) > most:
            raise _too_large(path, f"line {number}", most)
        yield line


def _too_large(path: Path, what: str, most: int) -> OSError:
    return OSError(errno.EFBIG, f"{what} has more than {bytes_text(most)}, the most that is read", str(path))


def parse_json(text: bytes | str, deepest: int = DEEPEST) -> Any:
    """Parse JSON; ValueError if it is invalid, nests too deeply, repeats a key or holds NaN or Infinity."""
    try:
        value = json.loads(text, object_pairs_hook=_once_each, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"nested more than {deepest} levels deep") from None
    if is_deeper(value, deepest):
        raise ValueError(f"nested more than {deepest} levels deep")
    return value


def is_deeper(value: Any, levels: int) -> bool:
    """Return whether dicts and lists nest more than `levels` levels; does not recurse."""
    level = [value]
    for _ in range(levels + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key[:40]!r} is there twice")
        table[key] = value
    return table


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


@contextmanager
def locked(path: Path, busy: Callable[[], object] | Exception) -> Iterator[None]:
    """Hold the lock of a file; if another process has it, raise `busy`, or call it and wait."""
    # Not through a symlink, whose target may belong to others, and without blocking on a pipe.
    with open(path, "r+b", buffering=0, opener=_lock_file) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if isinstance(busy, Exception):
                raise busy from None
            busy()
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # closing is not enough: a forked child may hold the file


def _lock_file(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_CREAT | os.O_NOFOLLOW, 0o666)
