"""A viewer of an ASGI app without a network: requests, and streams that are read as slowly as a test likes."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Self

from starlette.types import ASGIApp, Message

PATIENCE_S = 60.0


@dataclass
class Answer:
    """What came back."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


def _scope(method: str, target: str, headers: Mapping[str, str]) -> dict[str, Any]:
    path, _, query = target.partition("?")
    named = {"host": "localhost:8420", **headers}
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "headers": [(name.lower().encode(), value.encode("latin-1")) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8420),
    }


@asynccontextmanager
async def running(app: ASGIApp) -> AsyncIterator[None]:
    """Starts an app and stops it."""
    inbox: asyncio.Queue[Message] = asyncio.Queue()
    outbox: asyncio.Queue[Message] = asyncio.Queue()
    task = asyncio.ensure_future(app({"type": "lifespan", "asgi": {"version": "3.0"}}, inbox.get, outbox.put))
    await inbox.put({"type": "lifespan.startup"})
    assert (await outbox.get())["type"] == "lifespan.startup.complete"
    try:
        yield
    finally:
        await inbox.put({"type": "lifespan.shutdown"})
        assert (await outbox.get())["type"] == "lifespan.shutdown.complete"
        await task


async def get(app: ASGIApp, target: str, method: str = "GET", **headers: str) -> Answer:
    """Makes one request."""
    answer, gone = Answer(), asyncio.Event()

    async def receive() -> Message:
        if gone.is_set():
            await asyncio.sleep(PATIENCE_S)
        gone.set()
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
        else:
            answer.body += message["body"]

    await asyncio.wait_for(app(_scope(method, target, headers), receive, send), PATIENCE_S)
    return answer


class Viewer:
    """Reads a stream; while nobody calls `read`, it takes nothing."""

    def __init__(self, app: ASGIApp, target: str = "/updates") -> None:
        self.answer = Answer()
        self._app, self._scope = app, _scope("GET", target, {})
        self._wanted: asyncio.Queue[asyncio.Future[bytes]] = asyncio.Queue()
        self._gone = asyncio.Event()
        self.offered = 0
        """Bytes that the app has handed over, or tries to."""

    async def __aenter__(self) -> Self:
        self._task = asyncio.ensure_future(self._app(self._scope, self._receive, self._send))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._gone.set()
        while not self._wanted.empty():
            self._wanted.get_nowait()
        with suppress(asyncio.CancelledError, TimeoutError):
            await asyncio.wait_for(self._task, 5.0)

    async def _receive(self) -> Message:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.answer.status = message["status"]
            return
        self.offered += len(message["body"])
        if self._gone.is_set():
            return
        (await self._wanted.get()).set_result(message["body"])

    async def read(self) -> bytes:
        """Returns the next part."""
        wanted: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        await self._wanted.put(wanted)
        return await asyncio.wait_for(wanted, PATIENCE_S)
