"""Reads a watched run in one thread, and puts its sections on the board."""

import math
import threading
import time
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress
from typing import Final

from atoll.report.lanes import Span
from atoll.watch.compose import NAMES, compose_some
from atoll.watch.lane_times import window_section
from atoll.watch.live_run import LiveRun
from atoll.watch.serialise import to_json
from atoll.watch.source import Source

EVERY_S: Final = 0.5
"""Seconds between two looks at the run while somebody watches; who trains is shown at once."""
UNWATCHED_S: Final = 2.0
"""Seconds between two looks while nobody does. Losses are at most seven seconds old, other figures two."""
SLOW_S: Final = 5.0
"""Seconds between two versions of `SLOW` sections."""
SLOW: Final = frozenset(("loss", "speed", "outer"))
"""Sections of curves, which take most of the time; the others follow the run at once."""
_SHARE = 0.003  # of one core that following a run may take, on average


class _Pace:
    """Decides when the page is composed: so seldom that following a run takes `_SHARE` of a core."""

    def __init__(self) -> None:
        self._spent_s = 0.0  # of a core, since the last rest began
        self._until = self._curves = -math.inf  # when the rest is over; when the curves were composed

    @property
    def left_s(self) -> float:
        """Seconds of the rest that are left."""
        return self._until - time.monotonic()

    def spend(self, seconds: float) -> None:
        """Adds time of a core."""
        self._spent_s += seconds

    def rest(self, reads: bool) -> None:
        """Rests after a look: shortly while there is more to read, else as long as the time spent is worth."""
        self._until = time.monotonic() + (EVERY_S if reads else min(self._spent_s / _SHARE, UNWATCHED_S))
        self._spent_s = 0.0

    def end(self) -> None:
        """Ends the rest."""
        self._until = -math.inf

    def is_time_for_curves(self, at_once: bool) -> bool:
        """Returns whether to compose the curves, too, and remembers that."""
        now = time.monotonic()
        if not at_once and now - self._curves < SLOW_S:
            return False
        self._curves = now
        return True


class Reader:
    """Follows a source in a thread.

    Args:
        source: Where the events come from.
        publish: Takes the JSON of all sections, in the reader's thread.
        is_watched: Says whether anybody looks at the page.
    """

    def __init__(
        self, source: Source, publish: Callable[[Mapping[str, bytes]], object], is_watched: Callable[[], bool]
    ) -> None:
        self._source = source
        self._publish = publish
        self._is_watched = is_watched
        self._run = LiveRun(source.about())
        self._lock = threading.Lock()  # of the run
        self._woken, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="watch", daemon=True)
        self._seen: tuple[object, ...] = ()  # by what the sections were composed, but for the time
        self._stale: set[str] = set()  # sections that may have changed since they were composed
        self._pace = _Pace()
        self._share = 0.0  # of the files that was read at the last look

    def start(self) -> None:
        """Begins to read."""
        self._thread.start()

    def wake(self) -> None:
        """Looks at the run at once: somebody has come to watch."""
        self._woken.set()

    def stop(self) -> None:
        """Ends the thread, and waits for it."""
        self._stopped.set()
        self._woken.set()
        self._thread.join(timeout=10.0)
        self._source.close()

    def window(self, window: Span) -> bytes:
        """Returns what the workers did in a window of time, as JSON; called in any thread."""
        with self._lock:
            found = window_section(self._run, window)
        return to_json(found, decimals=6)

    @property
    def trouble(self) -> str:
        """Why the run cannot be followed at the moment; empty if it can."""
        return self._run.trouble

    @property
    def is_alive(self) -> bool:
        """Whether the thread reads."""
        return self._thread.is_alive()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            self._woken.clear()
            try:
                pause_s = self._read_part()
                self._run.trouble = ""
            except Exception as fault:  # a full disk, too many open files, numbers beyond all bounds: it may pass
                self._run.trouble = f"the run cannot be followed: {type(fault).__name__}: {fault}"
                pause_s = UNWATCHED_S
                with suppress(Exception):
                    self._show({"run"}, self._share)
            if self._woken.wait(pause_s):
                self._pace.end()

    def _read_part(self) -> float:
        """Takes some events, and shows what has changed if it is time; returns the seconds to pause."""
        began = time.thread_time()
        with self._lock:
            self._run.take(self._source.poll())
        share, left_s = self._source.share, self._pace.left_s
        pause_s = 0.0 if share < 1 else EVERY_S if self._is_watched() else UNWATCHED_S
        if left_s > 0 and (share < 1 or not self._run.has_turned):
            self._pace.spend(time.thread_time() - began)
            return min(pause_s, left_s)
        self.look(share)
        self._pace.spend(time.thread_time() - began)
        self._pace.rest(reads=share < 1)
        return pause_s

    def look(self, share: float) -> None:
        """Publishes the sections that may have changed; curves, which are long, less often than the rest."""
        with self._lock:
            about, now = self._source.about(), time.time()
            seen = (self._run.taken, about, [self._run.is_silent(name, now) for name in self._run.processes])
            self._run.about, self._run.has_turned = about, False
            self._stale |= set(NAMES) if seen != self._seen else {"run"}  # the state changes with time alone
            self._seen = seen
            curves = bool(self._stale & SLOW) and self._pace.is_time_for_curves(at_once=share >= 1 > self._share)
            names = self._stale if curves else self._stale - SLOW
        self._show(names, share)
        self._stale, self._share = self._stale - names, share

    def _show(self, names: AbstractSet[str], share: float) -> None:
        with self._lock:
            sections = compose_some(self._run, share, time.time(), names)
        self._publish({name: to_json(section) for name, section in sections.items()})
