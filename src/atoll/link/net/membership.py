"""Keeps a process announced in the registry, follows who else is, and offers views to it."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.errors import LinkError, RegistryError
from atoll.link.net.registry import VIEW, Entry, Presence, Registry, Update, presence_key, seat_of
from atoll.link.net.view_record import decode_view, encode_view
from atoll.link.net.views import Process, View

_AGAIN_S = 0.1  # between two attempts to reach a registry


class Announcement(BaseModel):
    """Tells how a process that has taken a seat is reached."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    life: Annotated[int, Field(gt=0, lt=1 << 62)]
    addresses: Annotated[list[Annotated[str, Field(max_length=300)]], Field(max_length=8)]
    """HOST:PORT; none if only it can dial."""
    since: Annotated[float, Field(ge=0, lt=1e11)] = 0.0
    """Unix time at which it was announced, by the clock of its machine; 0: unknown."""

    @classmethod
    def parse(cls, value: bytes) -> "Announcement | None":
        """Parse a value of the registry; None if it is of a worker that speaks differently, which cannot be met."""
        try:
            return cls.model_validate_json(value)
        except ValidationError:
            return None


class Membership:
    """Is one process's side of the registry; made and used in one event loop.

    Args:
        registry: A connection to the registry; None if members are fixed, and `view` never changes.
        me: This process.
        on_change: Called after every change of `present` or `view`.
        on_fault: Called once, if the registry refuses this process or another has taken its seat.
    """

    def __init__(
        self,
        registry: Registry | None,
        me: Process,
        on_change: Callable[[], None],
        on_fault: Callable[[LinkError], None],
    ) -> None:
        self.present: dict[int, Announcement] = {}
        """Seat -> announcement, of every process that is announced now."""
        self.view = View(0, {})
        """The newest view that the registry has told of."""
        self.changed = asyncio.Event()
        """Set when a process has come or gone, or the view has changed."""
        self.reaches_registry = True
        """Whether the last offer of a view was answered."""
        self._registry = registry
        self._me = me
        self._version = 0  # of the view in the registry
        self._on_change = on_change
        self._on_fault = on_fault
        self._presence: Presence | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def announce(self, addresses: list[str], ttl_s: float) -> None:
        """Take the seat, and follow the registry from now on.

        Args:
            addresses: HOST:PORT where this process listens.
            ttl_s: Seconds after which the registry forgets a process that does not renew its announcement.
        """
        assert self._registry is not None
        announced = Announcement(life=self._me.life, addresses=addresses, since=time.time())
        value = announced.model_dump_json().encode()
        self._presence = await self._registry.announce(presence_key(self._me.seat), value, ttl_s)
        self.spawn(self._watch(self._registry))
        self.spawn(self._wait_replaced(self._presence))

    def is_present(self, process: Process) -> bool:
        """Return whether a process is announced."""
        known = self.present.get(process.seat)
        return known is not None and known.life == process.life

    def propose(self, view: View) -> None:
        """Offer a view to the registry in place of the one before it, until one is accepted."""
        if self._registry is not None and view.number == self.view.number + 1:
            self.spawn(self._propose(self._registry, view))

    def when_reached(self, act: Callable[[], None], after_s: float) -> None:
        """Call a function after some time, once the registry answers."""
        if self._registry is not None:
            self.spawn(self._when_reached(self._registry, act, after_s))

    async def _when_reached(self, registry: Registry, act: Callable[[], None], after_s: float) -> None:
        while True:
            await asyncio.sleep(after_s)
            with suppress(RegistryError):
                self._take_view(await registry.get(VIEW))
                self._on_change()
                act()
                return

    async def close(self) -> None:
        """Withdraw, and forget the registry."""
        if self._closed:
            return
        self._closed = True
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._presence is not None:
            await self._presence.close()
        if self._registry is not None:
            await self._registry.close()

    async def _propose(self, registry: Registry, view: View) -> None:
        while view.number == self.view.number + 1:
            try:
                outcome = await registry.compare_and_set(VIEW, encode_view(view), self._version)
            except RegistryError:
                self.reaches_registry = False
                await asyncio.sleep(_AGAIN_S)
                with suppress(RegistryError):  # it may have accepted the view before the connection was lost
                    self._take_view(await registry.get(VIEW))
                continue
            self.reaches_registry = True
            self._take_view(outcome.entry)
            self._on_change()
            return

    async def _watch(self, registry: Registry) -> None:
        try:
            async for update in registry.watch(""):
                self._take(update)
                self._on_change()
        except RegistryError as fault:
            self._on_fault(fault)

    async def _wait_replaced(self, presence: Presence) -> None:
        await presence.wait_replaced()
        self._lose_seat()

    def _lose_seat(self) -> None:
        seat = self._me.seat
        why = f"worker {seat} was started again elsewhere, and that process has taken its seat: start it only once"
        self._on_fault(LinkError(why, worker=seat))

    def _take(self, update: Update) -> None:
        if update.is_snapshot:
            self.present = {}
        for key, entry in update.entries.items():
            if key == VIEW:
                self._take_view(entry)
            elif (seat := seat_of(key)) is not None:
                self.present.pop(seat, None)
                if entry is not None and (known := Announcement.parse(entry.value)) is not None:
                    self.present[seat] = known
        own = self.present.get(self._me.seat)
        if own is not None and own.life != self._me.life:  # before the view says so, or both would join again and again
            self._lose_seat()

    def _take_view(self, entry: Entry | None) -> None:
        if entry is None or entry.version <= self._version:
            return
        try:
            view = decode_view(entry.value)
        except ValueError as fault:
            self._on_fault(RegistryError(f"the registry holds a view that cannot be read ({fault})", key=VIEW))
            return
        self._version = entry.version
        if view.number > self.view.number:
            self.view = view

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work in the background until this process withdraws."""
        if self._closed:
            work.close()
            return
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        """Forget a task; an error in it ends this process's part, for nobody else would notice."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            seat = self._me.seat
            self._on_fault(LinkError(f"worker {seat} failed: {type(fault).__name__}: {fault}", worker=seat))
