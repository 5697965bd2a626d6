"""Reads and writes files of keys: their owner alone may read them, and none is overwritten by mistake."""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from atoll._util.disk import read_limited, write_atomically, writing
from atoll.errors import AtollError, ConfigError

_LONGEST = 64 * 1024
_OPEN = stat.S_IRWXG | stat.S_IRWXO


def key_error(path: Path, why: str) -> ConfigError:
    """Return the error for a file or folder of keys that cannot be used."""
    return ConfigError(f"keys: {path}: {why}", setting="keys", value=str(path))


def read_public(path: Path, most: int = _LONGEST) -> bytes:
    """Read a small file; ConfigError if that fails."""
    try:
        return read_limited(path, most)
    except OSError as fault:
        advice = "" if path.parent.is_dir() else "; copy the bundle there, or make keys with `atoll keys new`"
        found = sorted(file.parent.name for file in path.parent.glob(f"*/{path.name}"))
        if bundles := [name for name in found if name != "authority"]:
            advice = f"; give one of the folders in it: {', '.join(bundles[:4])}"
        raise key_error(path, f"cannot be read: {fault.strerror}{advice}") from fault


def read_key(path: Path) -> bytes:
    """Read a private key; ConfigError if the file is this user's and open to others, as ssh has it."""
    content = read_public(path)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _OPEN:
        mode = f"{stat.S_IMODE(found.st_mode):03o}"
        raise key_error(path, f"has mode {mode}, so others on this machine may use it: run `chmod 600 {path}`")
    return content


def write_private(folder: Path, files: Mapping[str, bytes], *, replace: bool = False) -> None:
    """Write files that only their owner may read; ConfigError if one is there and may not be replaced."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, content in files.items():
        if replace:
            write_atomically(folder / name, content, mode=0o600)
        else:
            _create(folder / name, content)


def _create(path: Path, content: bytes) -> None:
    try:
        with writing(path), open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(content)  # does not wait for the disk: that would take seconds for hundreds of seats
    except AtollError as fault:
        if isinstance(fault.__cause__, FileExistsError):
            raise key_error(path, "exists already, and keys are not overwritten; choose another folder") from fault
        raise
