"""Serves the page with whatever sections a test sends it, under the content policy of the real server."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from page_content import Sections, window

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


class PageServer(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1, or on one that is given."""

    daemon_threads = True

    def __init__(self, sections: Sections, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.sections = dict(sections)
        self.asked: list[tuple[float, float]] = []
        """The windows of /lanes that were asked for."""
        self.changed = threading.Condition()
        self.messages: list[Sections] = []
        self.is_open = True
        self.is_full = False
        """Whether pages are refused, as by a server with too many viewers."""
        self._thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"

    def send(self, sections: Sections) -> None:
        """Sends changed sections to every page."""
        with self.changed:
            self.sections.update(sections)
            self.messages.append(sections)
            self.changed.notify_all()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changed:
            self.is_open = False
            self.changed.notify_all()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: pages close their connections when they like."""


class _Handler(BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        name = address.path.lstrip("/") or "index.html"
        if name == "updates":
            self._stream()
        elif name == "lanes":
            asked = parse_qs(address.query)
            from_s, to_s = float(asked["from"][0]), float(asked["to"][0])
            self.server.asked.append((from_s, to_s))
            count = len(self.server.sections["lanes"]["workers"])
            self._answer("application/json", json.dumps(window(count, from_s, to_s)).encode())
        else:
            file = files("atoll.watch") / "page" / name
            if file.is_file():
                self._answer(TYPES[name.rpartition(".")[2]], file.read_bytes())
            else:
                self.send_error(404)

    def log_message(self, *_: Any) -> None:
        """Keeps quiet."""

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)

    def _stream(self) -> None:
        if self.server.is_full:
            self.send_error(503)
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        server = self.server
        with server.changed:
            at = len(server.messages)
            message = dict(server.sections)
        while True:
            text = json.dumps(message, ensure_ascii=True)
            self.wfile.write(f"event: sections\nid: {at}\ndata: {text}\n\n".encode())
            self.wfile.flush()
            with server.changed:
                while server.is_open and len(server.messages) == at:
                    server.changed.wait()
                if not server.is_open:
                    return
                message = {key: value for news in server.messages[at:] for key, value in news.items()}
                at = len(server.messages)
