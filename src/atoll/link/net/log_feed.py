"""Serves a file of lines to observers while it grows, part by part and slowly: payloads come first.

An observer asks with an offset and the bytes before it. If those are not in the file, it was cut and begun anew, and
the answer begins at 0. Of a large file, an observer gets the first line, and goes on with the last 8 MiB.
"""

import asyncio
import os
import struct
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from atoll._util.disk import open_plain
from atoll.link.net.outbox import Foreground

PART_BYTES: Final = 1 << 18
"""Most bytes of the file in one answer, before they are compressed."""
REMEMBERED: Final = 64
"""Most bytes before the offset that an observer shows."""
LAST_BYTES: Final = 8 << 20
"""Where an observer of a large file begins, in bytes before its end."""
_LARGE = 2 * LAST_BYTES  # so that one that follows is not made to jump
MOST_WAITING: Final = 16
"""Observers that wait for an answer; more are refused."""
BYTES_PER_S: Final = (1 << 16, 1 << 20)
"""Most bytes a second to all observers together: while messages travel to other workers, and otherwise."""
LEAST_S: Final = 0.02
"""Least seconds between two answers: empty ones cost time, too."""
_RECENT_S = 3.0  # in which an observer that follows asks again
_LINGER_S = 1.5
_ASKED, _TOLD = struct.Struct("!Q"), struct.Struct("!QQ")
_LARGEST = 1 << 60


class BusyError(Exception):
    """Refuses an observer because others wait."""


@dataclass(frozen=True, slots=True)
class Question:
    """Asks for the file from an offset on."""

    offset: int
    before: bytes = b""
    """The bytes that the file had before the offset."""

    def encode(self) -> bytes:
        """Return the message."""
        return _ASKED.pack(self.offset) + self.before

    @classmethod
    def parse(cls, data: bytes) -> "Question":
        """Read a message; ValueError if it is none."""
        if not _ASKED.size <= len(data) <= _ASKED.size + REMEMBERED:
            raise ValueError(f"a question of {len(data)} bytes")
        (offset,), before = _ASKED.unpack_from(data), data[_ASKED.size :]
        if offset > _LARGEST or len(before) > offset:
            raise ValueError(f"a question from byte {offset} on")
        return cls(offset, before)


@dataclass(frozen=True, slots=True)
class Part:
    """Holds a part of the file."""

    offset: int
    """Where it begins."""
    size: int
    """Bytes of the whole file."""
    data: bytes

    def encode(self) -> bytes:
        """Return the message."""
        return _TOLD.pack(self.offset, self.size) + zlib.compress(self.data, 1)

    @classmethod
    def parse(cls, message: bytes) -> "Part":
        """Read a message; ValueError if it is none."""
        if len(message) < _TOLD.size:
            raise ValueError(f"a part of {len(message)} bytes")
        offset, size = _TOLD.unpack_from(message)
        unpacking = zlib.decompressobj()
        try:
            data = unpacking.decompress(message[_TOLD.size :], PART_BYTES + 1)
        except zlib.error as fault:
            raise ValueError(f"a part that cannot be unpacked: {fault}") from fault
        if len(data) > PART_BYTES or not unpacking.eof:
            raise ValueError(f"a part that is cut off, or has more than {PART_BYTES} bytes")
        if not offset + len(data) <= size <= _LARGEST:
            raise ValueError(f"a part of {len(data)} bytes at byte {offset} of {size}")
        return cls(offset, size, data)


class LogFeed:
    """Answers observers one after another; used in one event loop.

    Args:
        path: The file, which need not be there yet.
        foreground: Counts what this process sends to other workers.
    """

    def __init__(self, path: Path, foreground: Foreground) -> None:
        self._path = path
        self._foreground = foreground
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._next_s = 0.0
        self._asked_s = -_RECENT_S

    @property
    def linger_s(self) -> float:
        """Seconds for which to answer after the last line, so that observers get it; 0 if nobody follows."""
        return _LINGER_S if time.monotonic() - self._asked_s < _RECENT_S else 0.0

    async def answer(self, message: bytes) -> bytes:
        """Answer an observer when its turn comes.

        Raises:
            BusyError: Too many wait.
            ValueError: The message is no question.
        """
        question = Question.parse(message)
        self._asked_s = time.monotonic()
        if self._waiting >= MOST_WAITING:
            raise BusyError(f"{MOST_WAITING} observers wait already: ask again later")
        self._waiting += 1
        try:
            async with self._turn:
                await asyncio.sleep(max(0.0, self._next_s - time.monotonic()))
                answer = await asyncio.to_thread(_answer, self._path, question)
                rate = BYTES_PER_S[not self._foreground.messages]
                self._next_s = time.monotonic() + max(len(answer) / rate, LEAST_S)
                return answer
        finally:
            self._waiting -= 1


def _answer(path: Path, question: Question) -> bytes:
    try:
        with open_plain(path) as file:
            return read_part(file, question).encode()
    except OSError:  # it is not there yet, or no longer
        return Part(0, 0, b"").encode()


def read_part(file: IO[bytes], question: Question) -> Part:
    """Return the part of a file that answers a question."""
    offset, size = question.offset, os.fstat(file.fileno()).st_size
    file.seek(offset - len(question.before))
    if offset > size or file.read(len(question.before)) != question.before:
        offset = 0
    if offset == 0 and size > _LARGE:
        file.seek(0)
        return Part(0, size, file.readline(PART_BYTES))
    if size - offset > _LARGE:
        file.seek(size - LAST_BYTES)
        while not file.readline(PART_BYTES).endswith(b"\n") and file.tell() < size:
            continue
        offset = file.tell()
    file.seek(offset)
    return Part(offset, size, file.read(min(PART_BYTES, max(0, size - offset))))
