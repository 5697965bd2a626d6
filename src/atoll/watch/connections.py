"""Bounds what connections may cost the server of a page: their number, and the time without a request."""

import asyncio
import resource
from typing import Any, Final

from uvicorn.protocols.http.h11_impl import H11Protocol

IDLE_S: Final = 10.0
"""Seconds after which a connection without a request, or with half of one, is closed."""
MOST_CONNECTIONS: Final = 1024
ACCEPTED_AT_ONCE: Final = 16
"""Connections that are accepted before they are counted: asyncio goes round in circles if file handles run out then."""
_SPARE_FILES = 64  # for the run's own files


def most_connections() -> int:
    """Returns how many connections leave enough file handles for reading the run."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_CONNECTIONS if soft == resource.RLIM_INFINITY else max(8, min(MOST_CONNECTIONS, soft - _SPARE_FILES))


class BoundedProtocol(H11Protocol):
    """Closes a connection that is one too many, or that asks for nothing."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Takes a connection, if there are few enough."""
        super().connection_made(transport)
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self.loop.call_later(IDLE_S, self._check)

    def _check(self) -> None:
        cycle: Any = self.cycle
        if self.transport.is_closing():
            return
        if cycle is None or cycle.response_complete:
            self.transport.abort()
        else:
            self.loop.call_later(IDLE_S, self._check)
