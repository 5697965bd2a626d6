"""Runs the event loop of all links of a process, in one daemon thread: gRPC's asyncio does not like several."""

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import cache
from typing import Any, TypeVar

Result = TypeVar("Result")


class EventLoop:
    """Runs coroutines and functions in one thread; `event_loop` returns that of this process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._begun: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="atoll link", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, Result], check: Callable[[], None] | None = None) -> Result:
        """Run a coroutine, and wait for its result in another thread.

        Args:
            work: The coroutine; it is cancelled if waiting for it is interrupted.
            check: Called repeatedly while waiting; what it raises ends the wait.
        """
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while check is not None and not running.done():
                check()
                try:
                    return running.result(0.1)
                except TimeoutError:
                    continue
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine, and wait for nothing; from any thread."""
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        self._begun.add(running)  # the loop itself may lose it
        running.add_done_callback(self._begun.discard)

    def post(self, act: Callable[[], None]) -> None:
        """Call a function soon."""
        self._loop.call_soon_threadsafe(act)


def event_loop() -> EventLoop:
    """Return the event loop of this process, starting it on first use; a forked child has its own."""
    return _of_process(os.getpid())


@cache
def _of_process(pid: int) -> EventLoop:
    return EventLoop()
