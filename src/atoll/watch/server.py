"""Serves the page of a watched run: its files, its sections as server-sent events, and metrics."""

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from atoll.report.lanes import Span
from atoll.watch.board import Board
from atoll.watch.guard import Admission, Guard
from atoll.watch.prometheus import metrics
from atoll.watch.reader import Reader
from atoll.watch.source import Source

MOST_VIEWERS: Final = 256
"""Viewers at a time; further ones are refused with 503."""
HEARTBEAT_S: Final = 10.0
"""Seconds after which a viewer is sent a comment, if nothing else."""
STUCK_S: Final = 60.0
"""Seconds after which a viewer that takes nothing is let go."""
PAGE: Final = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}
_METRICS_TYPE = "text/plain; version=0.0.4"


class Watch:
    """Serves one run: an ASGI app.

    Args:
        source: Where the run's events come from; it is closed with the app.
        admission: Who may look.
    """

    def __init__(self, source: Source, admission: Admission) -> None:
        self._source = source
        self.viewers = 0
        """How many viewers are connected."""
        self._zooms = asyncio.Semaphore(2)
        self._files = {file.name: file.read_bytes() for file in PAGE.glob("*") if file.suffix in _TYPES}
        self.board: Board
        self.reader: Reader
        routes = [
            Route("/updates", self._updates),
            Route("/lanes", self._lanes),
            Route("/metrics", self._metrics),
            Route("/healthz", self._healthz),
            Route("/", self._file),
            Route("/{name:str}", self._file),
        ]
        self._app = Guard(Starlette(routes=routes, lifespan=self._lifespan), admission)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, as ASGI has it."""
        await self._app(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        self.board = Board()

        def publish(texts: Mapping[str, bytes]) -> None:
            loop.call_soon_threadsafe(self.board.put, texts)

        self.reader = Reader(self._source, publish, lambda: self.viewers > 0)
        self.reader.start()
        try:
            yield
        finally:
            self.board.close()
            await run_in_threadpool(self.reader.stop)

    # ---------------------------------------------------------------------- answers

    async def _file(self, request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in self._files:
            return PlainTextResponse("404: there is no such page.\n", 404)
        return Response(self._files[name], media_type=_TYPES[Path(name).suffix])

    async def _healthz(self, _: Request) -> Response:
        trouble = self.reader.trouble or ("" if self.reader.is_alive else "the run is no longer followed")
        return PlainTextResponse(f"503: {trouble}\n", 503) if trouble else PlainTextResponse("ok\n")

    async def _metrics(self, _: Request) -> Response:
        names = ("run", "loss", "traffic", "faults", "lanes")
        known = {name: json.loads(text) for name in names if (text := self.board.text(name)) is not None}
        return Response(metrics(known), media_type=_METRICS_TYPE)

    async def _lanes(self, request: Request) -> Response:
        """Answers with what the workers did between two times, `from` and `to`."""
        try:
            window = Span(float(request.query_params["from"]), float(request.query_params["to"]))
        except (KeyError, ValueError):
            window = Span(math.nan, math.nan)
        if not -math.inf < window.begin_s < window.end_s < math.inf:
            words = "from and to must be seconds since the run began, from before to, as in /lanes?from=0&to=60"
            return PlainTextResponse(f"400: {words}\n", 400)
        async with self._zooms:
            return Response(await run_in_threadpool(self.reader.window, window), media_type="application/json")

    # ---------------------------------------------------------------------- server-sent events

    async def _updates(self, _: Request) -> Response:
        if self.viewers >= MOST_VIEWERS:
            said = {"retry-after": "30"}
            return PlainTextResponse(f"503: {MOST_VIEWERS} viewers are here already; try later.\n", 503, said)
        return _Stream(self)

    async def messages(self) -> AsyncIterator[bytes]:
        """Yields what has changed since the last message, as soon as the viewer has taken that."""
        has = 0
        while not self.board.is_closed:
            if await self.board.newer(has, HEARTBEAT_S):
                message, has = self.board.message(has), self.board.version
                yield message
            elif not self.board.is_closed:
                yield b": still here\n\n"


class _Stream(StreamingResponse):
    """Streams to a viewer, and lets it go if it takes nothing for `STUCK_S`."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(watch.messages(), media_type="text/event-stream")
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def within(message: Message) -> None:
            async with asyncio.timeout(STUCK_S):
                await send(message)

        self._watch.viewers += 1
        self._watch.reader.wake()
        try:
            await super().__call__(scope, receive, within)
        except* TimeoutError:
            pass  # the server closes a connection whose answer is not complete
        finally:
            self._watch.viewers -= 1
