"""Holds the newest JSON of every section for all viewers; latest wins, and nothing is queued."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress


class Board:
    """Keeps each section's JSON with the version of its last change; used in the thread of the event loop alone.

    A viewer waits for a version newer than it has and gets all that has changed since, as one message. So a viewer
    that reads slowly costs one message, and viewers that keep up share their bytes.
    """

    def __init__(self) -> None:
        self.version = 0
        self.is_closed = False
        self._texts: dict[str, tuple[int, bytes]] = {}  # section -> version of its last change, JSON
        self._messages: dict[int, bytes] = {}  # the version that a viewer has -> message
        self._changed = asyncio.Event()

    def put(self, texts: Mapping[str, bytes]) -> None:
        """Replaces sections by their new JSON, and wakes the viewers if any has changed."""
        changed = {name: text for name, text in texts.items() if self._texts.get(name, (0, b""))[1] != text}
        if not changed:
            return
        self.version += 1
        self._texts |= {name: (self.version, text) for name, text in changed.items()}
        self._wake()

    def close(self) -> None:
        """Lets all viewers go."""
        self.is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._messages.clear()
        self._changed.set()
        self._changed = asyncio.Event()

    def text(self, section: str) -> bytes | None:
        """Returns the JSON of a section; None while there is none."""
        return self._texts[section][1] if section in self._texts else None

    def message(self, since: int) -> bytes:
        """Returns a server-sent event with the sections that have changed after a version; 0: all."""
        if since not in self._messages:
            parts = [b'"%s":%s' % (name.encode(), text) for name, (n, text) in self._texts.items() if n > since]
            self._messages[since] = b"event: sections\nid: %d\ndata: {%s}\n\n" % (self.version, b",".join(parts))
        return self._messages[since]

    async def newer(self, version: int, timeout_s: float) -> bool:
        """Waits until there is a newer version; returns whether there is one before the time is up."""
        if self.version <= version and not self.is_closed:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self.version > version
