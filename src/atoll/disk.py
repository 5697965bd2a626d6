"""Files that are on disk when they are said to be, whole or not at all, and locks that die with their holder."""

import fcntl
import hashlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.errors import AtollError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what the system refuses into an AtollError that names the path."""
    try:
        yield
    except OSError as fault:
        raise AtollError(f"{path} cannot be written: {fault.strerror or fault}") from fault


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file that nobody ever sees half of, whatever happens meanwhile; folders above it are made."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(content)
            flush(part)  # or the new name could outlive a power cut that the bytes do not
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
        flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def locked(path: Path, busy: Callable[[], object]) -> Iterator[None]:
    """Hold the lock of a file. If another process has it, `busy` is called, and may raise; then its end is awaited."""
    with path.open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            busy()
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(lock, fcntl.LOCK_UN)  # a child forked meanwhile would keep it past the closing
