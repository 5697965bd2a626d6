"""A worker's log for observers: whole lines, files that are cut or large, and no more than a share of the line."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path

import pytest

from atoll.errors import LinkError
from atoll.link.net import log_feed
from atoll.link.net.identity import Identity
from atoll.link.net.log_client import WorkerLog
from atoll.link.net.log_feed import LAST_BYTES, PART_BYTES, BusyError, LogFeed, Part, Question
from atoll.link.net.outbox import Foreground
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.revocations import Revocations
from atoll.link.net.run_keys import KeyRing, throw_away
from peer_ends import End, ends, run

LINE = b'{"event": "step"}\n'


class Follower(WorkerLog):
    """Reads a file as a worker answers, without a network between."""

    def __init__(self, path: Path, most_line: int = 1 << 20) -> None:
        super().__init__(3, INSECURE, most_line)
        self.path = path

    async def _ask(self, question: Question) -> Part:
        return Part.parse(log_feed._answer(self.path, Question.parse(question.encode())))

    def read(self) -> tuple[list[bytes], bool]:
        return asyncio.run(self.new())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


def test_whole_lines_come_once_while_the_file_grows(path: Path) -> None:
    follower = Follower(path)
    assert follower.read() == ([], False), "it is not there yet"
    with path.open("ab", buffering=0) as file:
        file.write(LINE + LINE[:5])
        assert follower.read() == ([LINE], False) and not follower.has_more
        file.write(LINE[5:])
        assert follower.read() == ([LINE], False) and follower.read() == ([], False)
        file.write(LINE * 20_000)
        seen = 0
        while (lines := follower.read()[0]) or follower.has_more:
            assert lines == [LINE] * len(lines) and len(lines) * len(LINE) <= PART_BYTES + len(LINE)
            seen += len(lines)
        assert seen == 20_000 and follower.offset == follower.size == path.stat().st_size


@pytest.mark.parametrize("grown", [0, 1, 50])
def test_a_file_that_was_cut_begins_anew(path: Path, grown: int) -> None:
    follower = Follower(path)
    path.write_bytes(LINE * 10 + LINE[:7])
    assert follower.read() == ([LINE] * 10, False)
    other = LINE.replace(b"step", b"eval")
    path.write_bytes(other * grown)
    assert follower.read() == ([other] * grown, True)
    assert follower.read() == ([], False)


def test_of_a_large_file_the_first_line_and_the_last_mebibytes_are_told(path: Path) -> None:
    first, count = b'{"event": "start"}\n', 3 * LAST_BYTES // 40
    with path.open("wb") as file:
        file.write(first)
        file.writelines(b"%039d\n" % n for n in range(count))
    follower = Follower(path)
    assert follower.read() == ([first], False)
    told: list[bytes] = []
    while follower.has_more:
        lines, begins = follower.read()
        told += lines
        assert not begins
    assert told == [b"%039d\n" % n for n in range(count - len(told), count)], "from a line's beginning, without gaps"
    assert 0 <= LAST_BYTES - len(told) * 40 < 40


def test_a_line_without_an_end_is_not_collected_for_ever(path: Path) -> None:
    path.write_bytes(bytes(3000))
    with pytest.raises(LinkError, match="worker 3 sent a line of more than 2000 bytes") as refused:
        Follower(path, 2000).read()
    assert refused.value.worker == 3


def test_parts_that_are_no_parts() -> None:
    part = Part(5, 100, b"x" * 50)
    message = part.encode()
    assert Part.parse(message) == part and len(message) < 40
    bomb = replace(part, size=10 * PART_BYTES, data=bytes(PART_BYTES + 1)).encode()
    for bad in (b"", message[:10], message[:-3], message[:16] + b"?", bomb, replace(part, size=20).encode()):
        with pytest.raises(ValueError, match="a part"):
            Part.parse(bad)
    for bad in (b"", bytes(7), bytes(8 + 65), bytes(7) + b"\x01xx", b"\xff" * 8):
        with pytest.raises(ValueError, match="a question"):
            Question.parse(bad)


@pytest.mark.parametrize("busy", [True, False])
def test_observers_wait_for_each_other_and_for_payloads(
    path: Path, busy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path.write_bytes(LINE)
    size = len(log_feed._answer(path, Question(0)))
    monkeypatch.setattr(log_feed, "BYTES_PER_S", (10 * size, 1000 * size))

    async def main() -> float:
        feed = LogFeed(path, Foreground(int(busy)))
        began_s = time.monotonic()
        await asyncio.gather(*(feed.answer(Question(0).encode()) for _ in range(6)))
        return time.monotonic() - began_s

    took_s = asyncio.run(main())
    assert took_s >= 0.5 if busy else took_s >= 0.005


def test_too_many_observers_are_refused(path: Path) -> None:
    async def main() -> None:
        feed = LogFeed(path, Foreground())
        async with feed._turn:
            asked = [asyncio.create_task(feed.answer(Question(0).encode())) for _ in range(log_feed.MOST_WAITING)]
            await asyncio.sleep(0)
            with pytest.raises(BusyError):
                await feed.answer(Question(0).encode())
            asked[0].cancel()
            await asyncio.wait(asked[:1])
            asked.append(asyncio.create_task(feed.answer(Question(0).encode())))
        answers = await asyncio.gather(*asked[1:])
        assert {Part.parse(answer) for answer in answers} == {Part(0, 0, b"")}

    asyncio.run(main())


@pytest.fixture(scope="module")
def keys() -> KeyRing:
    return throw_away(2)


@pytest.mark.processes
def test_an_observer_follows_a_worker_and_a_stranger_does_not(keys: KeyRing, path: Path) -> None:
    path.write_bytes(LINE * 3)

    async def told(end: End, security: Identity | Insecure, seat: int = 0) -> list[bytes]:
        log = WorkerLog(seat, security, 1 << 20)
        await log.move(["127.0.0.1:1", end.address])
        try:
            return (await log.new())[0]
        finally:
            await log.close()

    async def main() -> None:
        async with ends(End(0, keys.workers[0])) as (zero,):
            with pytest.raises(LinkError, match="worker 0 has no log"):
                await told(zero, keys.observer)
            zero.peers.serve_log(path)
            for known in (keys.observer, keys.workers[1]):
                assert await told(zero, known) == [LINE] * 3
            for stranger in (throw_away(2).observer, throw_away(2).workers[1], keys.registry, INSECURE):
                with pytest.raises(LinkError, match="cannot be reached"):
                    await told(zero, stranger)
            with pytest.raises(LinkError, match="cannot be reached"):
                await told(zero, keys.observer, seat=1)  # the certificate is another worker's
        revoked = Revocations(keys.observer.bearer.run, {("observer", 0): 1})
        async with ends(End(0, keys.workers[0], revocations=revoked)) as (zero,):
            zero.peers.serve_log(path)
            assert await told(zero, keys.workers[1]) == [LINE] * 3
            with pytest.raises(LinkError, match="revoked"):
                await told(zero, keys.observer)

    run(main())
