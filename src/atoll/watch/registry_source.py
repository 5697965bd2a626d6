"""Follows a run between machines: its members by the registry, and their events over gRPC."""

import asyncio
import io
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from atoll.errors import DataError, LinkError, RegistryError
from atoll.link.net.event_loop import event_loop
from atoll.link.net.identity import Identity
from atoll.link.net.log_client import WorkerLog
from atoll.link.net.membership import Announcement
from atoll.link.net.open_registry import open_registry
from atoll.link.net.registry import Insecure, Update, seat_of
from atoll.runs.events import MOST_LINE, Event, parsed
from atoll.watch.source import About, News

MOST_WORKERS: Final = 256
"""Workers whose events are followed, the lowest seats first to come."""
MOST_EVENTS: Final = 4000
"""Events of one worker that wait to be taken."""
EVERY_S: Final = 0.5
"""Seconds between two questions to a worker."""
_AGAIN_S = 2.0  # after a worker could not be reached
_WAIT_S = 10.0  # for the registry's first answer
_READING_S = 0.1  # that a poll waits for more, while there is more


class RegistryRun:
    """Follows the workers that are announced in a registry; needs the keys of an observer.

    Args:
        address: HOST:PORT of `atoll registry`, or etcd://HOST:PORT,HOST:PORT/NAME.
        security: The identity of an observer or a worker of the run, or "none".

    Raises:
        RegistryError: The registry does not answer within 10 s, or refuses.
    """

    def __init__(self, address: str, security: Identity | Insecure) -> None:
        self._address = address
        self._security = security
        self._workers: dict[int, _Follower] = {}
        self._left_out: set[int] = set()
        self._trouble = ""
        self._watching: asyncio.Task[None] | None = None
        event_loop().run(self._begin())

    # ------------------------------------------------------------------ the reader's thread

    def poll(self) -> Sequence[News]:
        """Returns what the workers have told since the last call; waits a little while there is more to read."""
        if self.share < 1:
            time.sleep(_READING_S)
        return event_loop().run(self._take())

    @property
    def share(self) -> float:
        """The share of the bytes that are there, 0 to 1, that `poll` has returned."""
        known = list(self._workers.values())
        if not any(worker.is_behind for worker in known):
            return 1.0
        read, size = sum(worker.log.offset for worker in known), sum(worker.log.size for worker in known)
        return min(read / max(size, 1), 0.999)

    def about(self) -> About:
        """Returns the registry's address as the name, until a worker has told one."""
        return About(name=self._address)

    def close(self) -> None:
        """Ends all connections."""
        event_loop().run(self._end())

    # ------------------------------------------------------------------ the event loop

    async def _take(self) -> list[News]:
        news = [worker.take() for worker in self._workers.values()]
        if self._left_out:
            trouble = f"{len(self._left_out)} more workers are not shown: a page follows {MOST_WORKERS}"
            news.append(News(process="others", heard=0.0, trouble=trouble))
        if self._trouble:
            news.append(News(process="registry", heard=0.0, trouble=self._trouble))
        return news

    async def _begin(self) -> None:
        answered = asyncio.Event()
        self._watching = asyncio.create_task(self._watch(answered))
        first = asyncio.create_task(answered.wait())
        await asyncio.wait({self._watching, first}, timeout=_WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        first.cancel()
        if answered.is_set():
            return
        trouble = self._trouble or f"the registry at {self._address} does not answer within {_WAIT_S:g} s"
        await self._end()
        raise RegistryError(f"{trouble}: check that `atoll registry` runs there, and that the keys are of this run")

    async def _watch(self, answered: asyncio.Event) -> None:
        """Follows the registry until it refuses; connections that break are made again."""
        try:
            async with open_registry(self._address, self._security) as registry:
                async for update in registry.watch(""):
                    self._apply(update)
                    answered.set()
        except RegistryError as fault:
            self._trouble = f"who takes part is no longer known: {fault}" if answered.is_set() else str(fault)

    def _apply(self, update: Update) -> None:
        """Follows the workers that are announced, and no longer those that are not."""
        told = {seat: entry for key, entry in update.entries.items() if (seat := seat_of(key)) is not None}
        if update.is_snapshot:
            told |= dict.fromkeys(self._workers.keys() - told.keys())
        for seat, entry in sorted(told.items()):
            known = None if entry is None else Announcement.parse(entry.value)
            if known is None:
                self._left_out.discard(seat)
                if seat in self._workers:
                    self._workers[seat].rest()
            elif seat in self._workers or len(self._workers) < MOST_WORKERS:
                if seat not in self._workers:
                    self._workers[seat] = _Follower(seat, WorkerLog(seat, self._security, MOST_LINE))
                self._workers[seat].follow(known.addresses)
            else:
                self._left_out.add(seat)

    async def _end(self) -> None:
        tasks = [worker.rest() for worker in self._workers.values()] + [self._watching]
        if self._watching is not None:
            self._watching.cancel()
        await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)


class _Follower:
    """Follows the log of one worker while it is announced."""

    def __init__(self, seat: int, log: WorkerLog) -> None:
        self.log = log
        self._seat = seat
        self._events: deque[Event] = deque()
        self._lines = 0
        self._heard = 0.0
        self._trouble = ""
        self._brought = True  # bytes with the last answer: a worker may say that there are more, and send none
        self._following: asyncio.Task[None] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the worker has more than `take` has returned."""
        following = self._following is not None and not self._trouble
        return bool(self._events) or (following and ((self.log.has_more and self._brought) or not self._heard))

    def take(self) -> News:
        """Returns what the worker has told since the last call."""
        events = [self._events.popleft() for _ in range(len(self._events))]
        return News(process=f"worker {self._seat}", events=events, heard=self._heard, trouble=self._trouble)

    def follow(self, addresses: Sequence[str]) -> None:
        """Follows the worker at these addresses, from where its log was read last."""
        self.rest()
        self._following = asyncio.create_task(self._follow(addresses), name=f"follow worker {self._seat}")

    def rest(self) -> asyncio.Task[None] | None:
        """Follows the worker no longer, for it has gone; returns the task that ends."""
        task, self._following, self._trouble = self._following, None, ""
        if task is not None:
            task.cancel()
        return task

    async def _follow(self, addresses: Sequence[str]) -> None:
        await self.log.move(addresses)
        try:
            while True:
                before = self.log.offset
                await self._read()
                self._brought = self.log.offset != before
                while len(self._events) >= MOST_EVENTS:
                    await asyncio.sleep(_READING_S)
                if self._trouble or not (self.log.has_more and self._brought):
                    await asyncio.sleep(_AGAIN_S if self._trouble else EVERY_S)
        except (DataError, OSError) as damage:
            self._trouble = f"{damage}; what follows is not shown"
        finally:
            with suppress(Exception):
                await self.log.close()

    async def _read(self) -> None:
        try:
            lines, begins = await self.log.new()
        except LinkError as fault:
            self._trouble = str(fault)
            return
        self._heard, self._trouble = time.time(), ""
        self._lines = 0 if begins else self._lines
        for _, event in parsed(Path(f"worker {self._seat}"), io.BytesIO(b"".join(lines)), after=self._lines):
            self._events.append(event)
            self._lines += 1
