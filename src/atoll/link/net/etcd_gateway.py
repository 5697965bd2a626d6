"""Calls the HTTP/JSON gateway of an etcd v3 cluster, one of its members after the other.

Python's http.client speaks HTTP, in threads: the gateway needs no client package. Replies are bounded in size. A call
that was sent and not answered is `uncertain`.
"""

import asyncio
import http.client
import json
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from atoll._util.disk import parse_json
from atoll.errors import ConfigError, RegistryError
from atoll.link.net.registry import INSECURE, TOTAL_BYTES, Insecure

REPLY_BYTES: Final = 2 * TOTAL_BYTES
LINE_BYTES: Final = 16 << 20
"""Most bytes of one message of a stream; etcd cuts longer ones into fragments of 2 MiB."""
THREADS: Final = 64
_CONNECT_S, _TRY_S, _AGAIN_S = 3.0, 3.0, 0.1
_PASSING = (4, 8, 13, 14)  # gRPC's deadline, too many requests, internal, unavailable
_UNKNOWN, _INVALID, _UNAUTHENTICATED = 2, 3, 16
Json = dict[str, Any]
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class EtcdOptions:
    """Says where a cluster is, and how a client proves itself."""

    endpoints: tuple[tuple[str, int], ...]
    """Host and port of each member; one is enough, and all survive the loss of some."""
    security: ssl.SSLContext | Insecure
    """The cluster's authority and perhaps a client certificate, or `INSECURE` for a private cable.

    Where etcd has users, its gateway refuses client certificates that have a common name.
    """
    name: str
    """Keys are below /atoll/NAME/: one for each run."""
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    timeout_s: float = 10.0

    @classmethod
    def read(cls, url: str, security: ssl.SSLContext | Insecure, **more: Any) -> "EtcdOptions":
        """Parse etcd://HOST:PORT,HOST:PORT/NAME.

        Raises:
            ConfigError: The text is anything else.
        """
        scheme, _, rest = url.partition("://")
        hosts, _, name = rest.partition("/")
        endpoints = []
        for text in hosts.split(","):
            host, _, port = text.rpartition(":")
            if not (host and port.isascii() and port.isdecimal() and 0 < int(port[:6]) < 1 << 16):
                break
            endpoints.append((host.removeprefix("[").removesuffix("]"), int(port)))
        is_name = 0 < len(name) <= 100 and name.isascii() and name.replace("-", "").replace("_", "").isalnum()
        if scheme != "etcd" or len(endpoints) != len(hosts.split(",")) or not is_name:
            problem = f"registry: {url[:200]!r} is no cluster; use etcd://HOST:PORT,HOST:PORT/NAME, NAME for each run"
            raise ConfigError(problem, setting="registry", value=url)
        return cls(tuple(endpoints), security, name, **more)


class GatewayError(RegistryError):
    """A member of the cluster has answered with an error, or not at all; `code` is gRPC's."""

    def __init__(self, message: str = "", *, code: int = 14, uncertain: bool = False) -> None:
        super().__init__(message, uncertain=uncertain)
        self.code = code

    @property
    def is_passing(self) -> bool:
        """Whether another member, or the same one later, may do better."""
        return self.code in _PASSING


class Gateway:
    """Calls a cluster; remembers which of its members answered last."""

    def __init__(self, options: EtcdOptions) -> None:
        self._options = options
        self._threads = ThreadPoolExecutor(THREADS, "etcd")
        self._turn = 0
        self._token: str | None = None

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False)

    async def call(self, path: str, body: Json, *, again: bool = False) -> Json:
        """Call a method of the gateway.

        Args:
            path: Such as kv/range.
            body: Of the request; bytes are in base64, 64-bit numbers are strings.
            again: Whether the call may be carried out twice: then it is tried again, at other members, until the
                time is over. Without, it is tried again only as long as no member has received it.
        """
        end_s = time.monotonic() + self._options.timeout_s
        try_s = max(_TRY_S, self._options.timeout_s / len(self._options.endpoints))
        while True:
            endpoint = self._endpoint()
            try:
                return await self._once(endpoint, path, body, min(end_s, time.monotonic() + try_s))
            except asyncio.CancelledError:  # perhaps because this member has not answered for too long
                self._turn_from(endpoint)
                raise
            except GatewayError as fault:
                if not fault.is_passing:
                    raise
                self._turn_from(endpoint)
                if (fault.uncertain and not again) or time.monotonic() + _AGAIN_S > end_s:
                    raise
            await asyncio.sleep(_AGAIN_S)

    async def _once(self, endpoint: tuple[str, int], path: str, body: Json, end_s: float) -> Json:
        def ask() -> Json:
            left_s = max(_AGAIN_S, end_s - time.monotonic())
            stream = _Stream(self._connection(endpoint, min(_CONNECT_S, left_s)), endpoint)
            try:
                stream.send(path, body, headers, left_s)
                return _reply(stream.read(REPLY_BYTES), endpoint, stream.is_ok)
            finally:
                stream.close()

        headers = await self._headers(endpoint, end_s) if path != "auth/authenticate" else {}
        try:
            return await self._in_thread(ask)
        except GatewayError as fault:
            if not (self._options.user and fault.code in (_UNAUTHENTICATED, _INVALID) and "token" in str(fault)):
                raise
        self._token = None  # it has expired, or the member was started again
        headers = await self._headers(endpoint, end_s)
        return await self._in_thread(ask)

    async def stream(self, path: str, body: Json, idle_s: float) -> AsyncGenerator[Json, None]:
        """Call a method that answers with messages without end; between them, asks whether the member is alive.

        Raises:
            GatewayError: The connection was lost, or the member does not answer within `idle_s`.
        """
        endpoint = self._endpoint()
        stream: _Stream | None = None
        reading: asyncio.Future[bytes] | None = None
        try:
            headers = await self._headers(endpoint, time.monotonic() + idle_s)
            stream = _Stream(self._connection(endpoint, min(_CONNECT_S, idle_s)), endpoint)
            headers["Grpc-Metadata-hasleader"] = "true"  # a member that is cut off from the others must say so
            await asyncio.wait_for(self._in_thread(stream.send, path, body, headers, None), idle_s)
            while True:
                reading = reading or asyncio.ensure_future(self._in_thread(stream.readline, LINE_BYTES))
                await asyncio.wait((reading,), timeout=idle_s)
                if not reading.done():
                    await self._once(endpoint, "kv/range", {"key": "AA==", "limit": "1"}, time.monotonic() + idle_s)
                    continue
                line, reading = reading.result(), None
                message = _reply(line, endpoint, stream.is_ok)
                yield message["result"] if isinstance(message.get("result"), dict) else {}
        except TimeoutError:
            self._turn_from(endpoint)
            raise GatewayError(f"etcd at {_text(endpoint)} does not answer") from None
        except GatewayError as fault:
            self._turn_from(endpoint)
            if fault.code in (_UNAUTHENTICATED, _INVALID):
                self._token = None
            raise
        finally:
            if stream is not None:
                stream.close()
            if reading is not None:
                await asyncio.gather(reading, return_exceptions=True)

    async def _headers(self, endpoint: tuple[str, int], end_s: float) -> dict[str, str]:
        if self._options.user is None:
            return {}
        if self._token is None:
            body = {"name": self._options.user, "password": self._options.password or ""}
            token = (await self._once(endpoint, "auth/authenticate", body, end_s)).get("token")
            if not isinstance(token, str) or not token.isprintable() or len(token) > 10_000:
                raise GatewayError(
                    f"etcd at {_text(endpoint)} lets {self._options.user} in without a token", code=_UNKNOWN
                )
            self._token = token
        return {"Authorization": self._token}

    def _endpoint(self) -> tuple[str, int]:
        return self._options.endpoints[self._turn % len(self._options.endpoints)]

    def _turn_from(self, endpoint: tuple[str, int]) -> None:
        if self._endpoint() == endpoint:
            self._turn += 1

    def _connection(self, endpoint: tuple[str, int], timeout_s: float) -> http.client.HTTPConnection:
        security = self._options.security
        if security == INSECURE:
            return http.client.HTTPConnection(*endpoint, timeout=timeout_s)
        return http.client.HTTPSConnection(*endpoint, timeout=timeout_s, context=security)

    async def _in_thread(self, call: Callable[..., Result], *args: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *args)


class _Stream:
    """Sends one request and reads its reply; `close` from another thread ends a read that waits."""

    def __init__(self, connection: http.client.HTTPConnection, endpoint: tuple[str, int]) -> None:
        self._connection = connection
        self._endpoint = endpoint
        self._response: http.client.HTTPResponse | None = None
        self._socket: socket.socket | None = None
        self._is_closed = False

    def send(self, path: str, body: Json, headers: Mapping[str, str], timeout_s: float | None) -> None:
        """Connect and send; wait for the reply's head."""
        try:
            self._connection.connect()
        except (OSError, http.client.HTTPException) as fault:
            raise GatewayError(f"etcd at {_text(self._endpoint)} cannot be reached: {fault}") from fault
        self._socket = self._connection.sock
        if self._is_closed or self._socket is None:  # meanwhile
            self._connection.close()
            raise GatewayError(f"the connection to etcd at {_text(self._endpoint)} is closed")
        self._socket.settimeout(timeout_s)
        with _uncertain(self._endpoint):
            data = json.dumps(body).encode()
            self._connection.request("POST", f"/v3/{path}", data, {"Content-Type": "application/json", **headers})
            self._response = self._connection.getresponse()

    @property
    def is_ok(self) -> bool:
        """Whether the reply is no error."""
        return self._response is not None and self._response.status == http.client.OK

    def read(self, most: int) -> bytes:
        """Read the whole reply."""
        assert self._response is not None
        with _uncertain(self._endpoint):
            return _bounded(self._response.read(most + 1), most)

    def readline(self, most: int) -> bytes:
        """Read one line of the reply."""
        assert self._response is not None
        with _uncertain(self._endpoint):
            line = _bounded(self._response.readline(most + 1), most)
            if not line.endswith(b"\n"):
                raise ConnectionError("the stream has ended")
            return line

    def close(self) -> None:
        """Close the connection."""
        self._is_closed = True
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._connection.close()


@contextmanager
def _uncertain(endpoint: tuple[str, int]) -> Iterator[None]:
    """Turn errors of a connection into a GatewayError; some are of a connection that was closed meanwhile."""
    try:
        yield
    except (OSError, ValueError, AttributeError, http.client.HTTPException) as fault:
        raise GatewayError(f"etcd at {_text(endpoint)} does not answer: {fault!r}", uncertain=True) from fault


def _bounded(data: bytes, most: int) -> bytes:
    if len(data) > most:
        raise ValueError(f"a reply of more than {most} bytes")
    return data


def _reply(data: bytes, endpoint: tuple[str, int], is_ok: bool) -> Json:
    """Parse a reply; GatewayError if it is an error."""
    try:
        reply = parse_json(data)
        if not isinstance(reply, dict):
            raise ValueError("no object")
    except ValueError:
        text = data[:200].decode("utf-8", "replace").strip()
        raise GatewayError(f"etcd at {_text(endpoint)} answers: {text!r}", code=_UNKNOWN, uncertain=True) from None
    if is_ok and "error" not in reply:
        return reply
    error = reply.get("error")
    inner = error if isinstance(error, dict) else reply  # a stream's errors are objects
    code = inner.get("grpc_code", inner.get("code"))
    text = str(inner.get("message", error))[:300]
    code = code if isinstance(code, int) else _UNKNOWN
    raise GatewayError(f"etcd at {_text(endpoint)}: {text}", code=code, uncertain=code in (_UNKNOWN, *_PASSING))


def _text(endpoint: tuple[str, int]) -> str:
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
