"""Files that appear whole or not at all, and locks."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from atoll._util.disk import locked, write_atomically
from atoll.errors import AtollError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_with_the_folders_above_it_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "file"
    for content in (b"first", b"second"):
        write_atomically(path, content)
        assert path.read_bytes() == content
    assert names(path.parent) == ["file"]


def test_a_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_a_disk_that_is_full_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write_atomically(tmp_path / "file", b"old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(AtollError, match=r"file cannot be written: No space left on device$"):
            write_atomically(tmp_path / "file", b"new")
    assert names(tmp_path) == ["file"]
    assert (tmp_path / "file").read_bytes() == b"old"


def test_bytes_are_on_disk_before_the_name_and_the_name_before_the_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: there.append((tmp_path / "file").exists()))
    write_atomically(tmp_path / "file", b"")
    assert there == [False, True]


def test_whoever_finds_a_lock_held_is_told_and_waits(tmp_path: Path) -> None:
    told = threading.Event()
    happened: list[str] = []

    def wait() -> None:
        with locked(tmp_path / "lock", told.set):
            happened.append("second")

    with locked(tmp_path / "lock", pytest.fail):
        other = threading.Thread(target=wait)
        other.start()
        assert told.wait(10)
        happened.append("first")
    other.join(10)
    assert happened == ["first", "second"]


def test_whoever_will_not_wait_gets_no_lock_and_breaks_none(tmp_path: Path) -> None:
    def refuse() -> None:
        raise AtollError("taken")

    with locked(tmp_path / "lock", refuse):
        for _ in range(2):
            with pytest.raises(AtollError, match="taken"), locked(tmp_path / "lock", refuse):
                pytest.fail("two hold the lock")
    with locked(tmp_path / "lock", refuse):
        pass
