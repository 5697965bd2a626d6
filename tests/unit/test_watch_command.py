"""`atoll watch` as a process: it prints where the page is, serves real sockets, and stops when it is told."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from http.client import HTTPConnection, HTTPException
from pathlib import Path

import pytest
from typer.testing import CliRunner

from atoll.cli.main import app
from atoll.runs.events import End, Event, Jsonl
from made_up_runs import MadeUpRun, save

VOYAGE = MadeUpRun(steps=400)
LOG: list[Event] = [event for event in VOYAGE.events()[0] if not isinstance(event, End)]
PATIENCE_S = 60.0


@contextmanager
def watching(
    folder: Path, *options: str, before: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], int, str]]:
    """Starts the command; yields its process, its port and the line that it printed."""
    command = [*before, sys.executable, "-m", "atoll", "watch", str(folder), "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        found = re.search(r"http://[^:/]+:(\d+)/", line)
        assert found is not None, line + process.stdout.read()
        yield process, int(found[1]), line
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


class Stream:
    """A viewer with a socket of its own."""

    def __init__(self, port: int, buffer: int = 2**16) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self._socket.settimeout(PATIENCE_S)
        self._socket.connect(("127.0.0.1", port))
        self._socket.sendall(b"GET /updates HTTP/1.1\r\nHost: localhost\r\n\r\n")
        self._file = self._socket.makefile("rb")

    def until_step(self, step: int) -> None:
        """Reads until the run is at a step."""
        for line in self._file:
            if line.startswith(b"data: "):
                run = json.loads(line.removeprefix(b"data: ")).get("run", {})
                if run.get("step") == step:
                    return
        raise AssertionError("the stream has ended")

    def close(self) -> None:
        self._file.close()
        self._socket.close()


def append(folder: Path, events: Sequence[Event]) -> None:
    file = folder / "metrics.jsonl"
    sink = Jsonl(file, file.stat().st_size)
    for event in events:
        sink.write(event)
    sink.close()


def memory_bytes(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc")
def test_ten_viewers_follow_while_one_is_stuck_and_memory_does_not_grow(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", LOG[:40])
    with watching(folder) as (process, port, _):
        stuck, viewers = Stream(port, buffer=2048), [Stream(port) for _ in range(10)]
        rest = LOG[40:]
        sizes = []
        for n in range(8):
            part = rest[n * len(rest) // 8 : (n + 1) * len(rest) // 8]
            append(folder, part)
            step = max(getattr(event, "step", 0) for event in part if hasattr(event, "seconds"))
            for viewer in viewers:
                viewer.until_step(step)
            sizes.append(memory_bytes(process))
        assert sizes[-1] - sizes[1] < 20e6
        for viewer in [stuck, *viewers]:
            viewer.close()
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
        assert process.stdout is not None and "the run is not affected" in process.stdout.read()


@pytest.mark.processes
def test_it_stops_although_somebody_looks(tmp_path: Path) -> None:
    with watching(save(tmp_path / "far", LOG)) as (process, port, _):
        stuck, viewer = Stream(port, buffer=2048), Stream(port)
        viewer.until_step(400)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert time.monotonic() - began < 20
        stuck.close()
        viewer.close()


@pytest.mark.processes
def test_beyond_this_machine_a_token_is_made_and_asked_for(tmp_path: Path) -> None:
    with watching(save(tmp_path / "far", LOG), "--host", "0.0.0.0") as (_, port, line):
        found = re.search(r"\?token=([\w-]{43})", line)
        assert found is not None and f"http://{socket.gethostname()}:{port}/" in line
        for headers, status in (({}, 401), ({"Authorization": f"Bearer {found[1]}"}, 200)):
            connection = HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            connection.request("GET", "/metrics", headers=headers)
            assert connection.getresponse().status == status
            connection.close()


def refused(*arguments: str) -> str:
    found = CliRunner().invoke(app, ["watch", *arguments])
    assert found.exit_code == 2, found.output
    return " ".join(found.output.split())


def test_what_cannot_be_watched_is_one_line(tmp_path: Path) -> None:
    folder = str(save(tmp_path / "far", LOG))
    assert "does not exist" in refused(str(tmp_path / "nothing"))
    assert "has 5 characters and needs 16" in refused(folder, "--token", "short")
    assert "no run given" in refused()
    assert "leave one out" in refused(folder, "--registry", "127.0.0.1:1")
    for given in (("--keys", folder), ("--security", "none")):
        assert "--keys and --security belong to --registry" in refused(folder, *given)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"cannot listen on 127.0.0.1, port {port}" in refused(folder, "--port", port)
    assert "cannot listen on nowhere.invalid" in refused(folder, "--host", "nowhere.invalid")


@pytest.mark.processes
def test_strangers_that_only_connect_leave_the_page_to_others(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", LOG[:40])
    limited = ["bash", "-c", 'ulimit -n 128; exec "$@"', "bash"]
    with watching(folder, before=limited) as (process, port, _), ExitStack() as open_ones:
        strangers = [open_ones.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(200)]
        for stranger in strangers[:100]:
            with suppress(OSError):
                stranger.sendall(b"GET / HT")
        until = time.monotonic() + PATIENCE_S
        while True:
            with suppress(OSError, HTTPException), closing(HTTPConnection("127.0.0.1", port, timeout=5)) as connection:
                connection.request("GET", "/healthz")
                if connection.getresponse().read() == b"ok\n":
                    break
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.5)
        append(folder, LOG[40:80])
        step = max(getattr(event, "step", 0) for event in LOG[40:80] if hasattr(event, "seconds"))
        with closing(Stream(port)) as viewer:
            viewer.until_step(step)
