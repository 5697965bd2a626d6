"""Processes of a run, several in one event loop, that remember what happens to them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from atoll.link.net.identity import Identity
from atoll.link.net.peers import Peers
from atoll.link.net.registry import Insecure
from atoll.link.net.views import Process

PATIENCE_S = 20.0


class Log:
    """A handler that remembers."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def connected(self, peer: Process, greeting: bytes) -> None:
        self.events.append(("connected", peer, greeting))

    def lost(self, peer: Process, why: str) -> None:
        self.events.append(("lost", peer, why))

    def control(self, peer: Process, data: bytes) -> None:
        self.events.append(("control", peer, data))

    def bulk(self, peer: Process, header: bytes, body: bytearray) -> None:
        self.events.append(("bulk", peer, header, bytes(body)))

    def of(self, kind: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == kind]


class End:
    """One process of a run, as a test has it."""

    def __init__(self, seat: int, security: Identity | Insecure, life: int = 1, **options: Any) -> None:
        self.me, self.log = Process(seat, life), Log()
        self.peers = Peers(self.me, security, self.log, **{"greeting": b"from %d" % seat, **options})
        self.address = ""

    def meet(self, other: "End", *, dial: bool = True) -> None:
        self.peers.meet(other.me, [other.address], dial=dial)


@asynccontextmanager
async def ends(*made: End, listen: str = "127.0.0.1:0") -> AsyncIterator[tuple[End, ...]]:
    for end in made:
        end.address = await end.peers.start(listen)
    try:
        yield made
    finally:
        await asyncio.gather(*(end.peers.close() for end in made))
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        assert not left


async def until(condition: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(patience_s):
        while not condition():
            await asyncio.sleep(0.002)


def has(log: Log, **counts: int) -> bool:
    return all(len(log.of(kind)) >= count for kind, count in counts.items())


def is_measured(here: End, there: End) -> bool:
    return here.peers.rates()[there.me].round_trip_s is not None


def has_exchanged(here: End, there: End, count: int) -> bool:
    """Whether so many bytes of payloads went both ways; what was sent is counted a little later."""
    rate = here.peers.rates()[there.me]
    return rate.sent == rate.received == count


def both(one: End, other: End) -> Callable[[], bool]:
    return lambda: one.peers.is_connected(other.me) and other.peers.is_connected(one.me)


def run(work: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(100):
            await work

    asyncio.run(bounded())
