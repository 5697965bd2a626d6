"""Measures a line between two machines over TCP: latency from small round trips, a rate in each direction.

One end serves, the other measures. Every measurement is its own connection, which begins with a line of text; the end
that receives the bytes computes the rate. Nothing that arrives is kept or run.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple

from atoll._util.checks import config_error
from atoll.errors import LinkError

PING, UP, DOWN, DONE = "ping", "up", "down", "done"
_GREETING = "atoll-probe 1"
_PIECE = bytes(256 * 1024)
_ROUND_TRIPS = 20
_LONGEST_S = 60.0  # that a client can make this end send
_PATIENCE_S = 20.0  # for the next byte
_SLOW_START = 0.3  # share of the time in which TCP finds its speed


class LineSpeed(NamedTuple):
    """Rates and latency of a line, as one end measured them."""

    up_bits_per_s: float
    """From this machine to the other."""
    down_bits_per_s: float
    """From the other machine to this one."""
    latency_s: float
    """One way: half of the median round trip."""


def parse_end(text: str, *, serving: bool) -> tuple[str, int]:
    """Parse '10.0.0.1:29600' or, to serve on every interface, ':29600' into host and port."""
    host, colon, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536 or not (host or serving):
        how = ":29600 or 10.0.0.1:29600" if serving else "HOST:PORT of the end that serves, like 10.0.0.1:29600"
        raise config_error("probe-link", text, how)
    return host, int(port)


# ---------------------------------------------------------------------- the end that measures


def measure(host: str, port: int, seconds: float = 3.0) -> LineSpeed:
    """Measure the line to the end that serves, for `seconds` in each direction."""
    try:
        latency_s = _latency(host, port)
        up = _upload(host, port, seconds)
        down = _download(host, port, seconds)
        with _asking(host, port, DONE, 0.0):
            pass
    except OSError as error:
        why = error.strerror or str(error) or type(error).__name__
        raise LinkError(
            f"cannot measure the line to {host}:{port}: {why}; is `atoll plan --probe-link :{port} --serve` running "
            "there, and the port open?"
        ) from error
    return LineSpeed(up, down, latency_s)


@contextmanager
def _asking(host: str, port: int, what: str, seconds: float) -> Iterator[socket.socket]:
    with socket.create_connection((host, port), timeout=_PATIENCE_S) as line:
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        line.sendall(f"{_GREETING} {what} {seconds:g}\n".encode())
        if _read_line(line) != _GREETING:
            raise OSError("another service answers there")
        yield line


def _latency(host: str, port: int) -> float:
    with _asking(host, port, PING, 0.0) as line:
        trips = []
        for _ in range(_ROUND_TRIPS):
            began = time.perf_counter()
            line.sendall(b"?")
            if not line.recv(1):
                raise OSError("the other end has left")
            trips.append(time.perf_counter() - began)
    return median(trips) / 2


def _upload(host: str, port: int, seconds: float) -> float:
    with _asking(host, port, UP, seconds) as line:
        _send_for(line, seconds)
        line.shutdown(socket.SHUT_WR)
        line.settimeout(_PATIENCE_S + 10 * seconds)  # a slow line still has to drain the buffers
        return float(json.loads(_read_line(line) or "0"))


def _download(host: str, port: int, seconds: float) -> float:
    with _asking(host, port, DOWN, seconds) as line:
        return _receive_all(line)


# ---------------------------------------------------------------------- the end that serves


def _say(line: str) -> None:
    print(line, flush=True)  # a pipe would hold it back


def serve(host: str, port: int, tell: Callable[[str], None] = _say) -> None:
    """Answer the measurements of one client, then return; other connections are dropped."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)  # its message repeats the address
        raise LinkError(f"cannot listen on {host}:{port}: {why}") from error
    with listening:
        tell(f"waiting on port {port}; at the other end: atoll plan --probe-link THIS-MACHINE:{port} ...")
        while True:
            line, (peer, *_) = listening.accept()
            with line:
                try:
                    if _answer(line) == DONE:
                        tell(f"{peer} has measured the line")
                        return
                except (OSError, ValueError) as error:
                    tell(f"{peer} left before it was done: {error}")


def _answer(line: socket.socket) -> str:
    line.settimeout(_PATIENCE_S)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asked = re.fullmatch(rf"{_GREETING} ({PING}|{UP}|{DOWN}|{DONE}) ([0-9.e+-]+)", _read_line(line))
    if asked is None:
        raise ValueError("it did not ask for a measurement")
    what, seconds = asked[1], min(float(asked[2]), _LONGEST_S)
    line.sendall(f"{_GREETING}\n".encode())
    if what == PING:
        while line.recv(1):
            line.sendall(b"!")
    elif what == UP:
        line.sendall(f"{json.dumps(_receive_all(line))}\n".encode())
    elif what == DOWN:
        _send_for(line, seconds)
    return what


# ---------------------------------------------------------------------- bytes


def _send_for(line: socket.socket, seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        line.sendall(_PIECE)


def _receive_all(line: socket.socket) -> float:
    """Receive until the other end stops; return bits per second, not counting TCP's slow start."""
    marks: list[tuple[float, int]] = []  # (seconds, total bytes)
    room, total = bytearray(len(_PIECE)), 0
    while count := line.recv_into(room):
        total += count
        marks.append((time.perf_counter(), total))
    if not marks or marks[-1][0] <= marks[0][0]:
        raise OSError("too little came to tell a rate")
    (first_s, _), (last_s, _) = marks[0], marks[-1]
    # The last mark before the cut, so that one follows it even if the line stalled in between.
    begun_s, before = [mark for mark in marks if mark[0] <= first_s + _SLOW_START * (last_s - first_s)][-1]
    return 8 * (total - before) / (last_s - begun_s)


def _read_line(line: socket.socket) -> str:
    """Read up to a newline, at most 100 bytes, byte by byte, so that nothing after it is consumed."""
    read = b""
    while len(read) < 100 and (byte := line.recv(1)) not in (b"", b"\n"):
        read += byte
    return read.decode(errors="replace")
