"""Measurements before a run: a step on this machine, a line to another one."""

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import sites
from atoll.errors import ConfigError, LinkError
from atoll.link.net import bandwidth
from atoll.settings.config import parse
from atoll.train.model.decoder import Decoder, Loss
from atoll.train.step.step_time import probe_step

TINY = {"model": {"preset": "tiny", "layers": 2}, "train": {"batch": 2, "sequence": 16}, "device": "cpu"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


# ---------------------------------------------------------------------- a step


def test_a_step_is_measured_without_data_or_other_workers() -> None:
    said: list[str] = []
    found = probe_step(parse(TINY), 256, tell=said.append)
    assert 0 < found.step_s < 10
    assert found.tokens == 2 * 16
    assert "2 x 16 tokens" in said[0] and "CPU" in found.device


def test_the_batch_of_the_run_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Size] = []
    loss = Decoder.loss

    def noted(self: Decoder, tokens: torch.Tensor) -> Loss:
        seen.append(tokens.shape)
        return loss(self, tokens)

    monkeypatch.setattr(Decoder, "loss", noted)
    found = probe_step(parse(TINY | {"train": {"batch": 6, "sequence": 16}}), 256, tell=lambda line: None)
    assert found.tokens == 6 * 16 and set(seen) == {(6, 17)}


@pytest.mark.parametrize(("parallel", "compiled"), [("ddp", True), ("fsdp", False)])
def test_a_step_is_compiled_where_the_run_would_be(
    parallel: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Decoder] = []
    monkeypatch.setattr(Decoder, "compile", lambda self: seen.append(self))
    run = TINY | {"compile": True, "train": {"batch": 2, "sequence": 16, "parallel": parallel}}
    probe_step(parse(run), 256, tell=lambda line: None)
    assert bool(seen) == compiled


# ---------------------------------------------------------------------- a line


def start_server(port: int) -> tuple[threading.Thread, list[str]]:
    said: list[str] = []
    ready = threading.Event()

    def tell(line: str) -> None:
        said.append(line)
        ready.set()

    thread = threading.Thread(target=bandwidth.serve, args=("127.0.0.1", port, tell), daemon=True)
    thread.start()
    assert ready.wait(10)
    return thread, said


def test_a_fast_line_is_measured_and_the_server_ends() -> None:
    port = free_port()
    thread, said = start_server(port)
    speed = bandwidth.measure("127.0.0.1", port, seconds=0.3)
    thread.join(10)
    assert not thread.is_alive() and "has measured" in said[-1]
    assert min(speed.up_bits_per_s, speed.down_bits_per_s) > 0 and 0 < speed.latency_s < 10


def test_a_line_that_halts_is_measured_all_the_same() -> None:
    ours, theirs = socket.socketpair()

    def send() -> None:
        with theirs:
            theirs.sendall(bytes(1000))
            time.sleep(0.2)
            theirs.sendall(bytes(1000))

    thread = threading.Thread(target=send)
    thread.start()
    with ours:
        assert 8 * 1000 / 10 < bandwidth._receive_all(ours) < 8 * 1000 / 0.19
    thread.join()


def test_a_stranger_is_sent_away_and_the_server_goes_on() -> None:
    port = free_port()
    thread, said = start_server(port)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as line:
        line.sendall(b"hello\n")
        assert line.recv(100) == b""
    bandwidth.measure("127.0.0.1", port, seconds=0.1)
    thread.join(10)
    assert not thread.is_alive() and any("did not ask" in line for line in said)


def test_something_else_that_answers_is_no_server() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            line, _ = listening.accept()
            with line:
                line.sendall(b"220 mail.example ESMTP\r\n")
                line.recv(100)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        with pytest.raises(LinkError, match="another service answers there"):
            bandwidth.measure("127.0.0.1", listening.getsockname()[1], seconds=0.1)
        thread.join(10)


def test_nobody_there_is_said_with_what_to_do() -> None:
    with pytest.raises(LinkError, match="--serve` running"):
        bandwidth.measure("127.0.0.1", free_port(), seconds=0.1)


def test_a_port_that_is_taken_is_said() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(LinkError, match="cannot listen"):
        bandwidth.serve("127.0.0.1", listening.getsockname()[1])


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:70000", "host:x", ":29600"])
def test_a_wrong_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="probe-link must be"):
        bandwidth.parse_end(text, serving=False)


def test_a_server_may_leave_out_its_host() -> None:
    assert bandwidth.parse_end(":29600", serving=True) == ("", 29600)
    assert bandwidth.parse_end("[::1]:29600", serving=False) == ("::1", 29600)


@pytest.mark.processes
@pytest.mark.skipif(sites.available() is not None, reason="no network namespaces here")
def test_a_limited_line_is_measured_right(tmp_path: Path) -> None:
    serve = "from atoll.link.net.bandwidth import serve; serve('', 29600)"
    with sites.Sites(count=2, rate="20mbit") as (here, there):
        server = here.popen([sys.executable, "-c", serve], stdout=subprocess.PIPE, text=True)
        assert server.stdout is not None and "waiting" in server.stdout.readline()
        ask = f"from atoll.link.net.bandwidth import measure; print(*measure('{here.address}', 29600, 2.0))"
        with there.popen([sys.executable, "-c", ask], stdout=subprocess.PIPE, text=True) as client:
            out, _ = client.communicate(timeout=120)
        assert server.wait(20) == 0
        server.stdout.close()
    up, down, latency_s = map(float, out.split())
    for rate in (up, down):
        assert 0.25 * 20e6 < rate < 1.05 * 20e6  # a busy machine may leave the line idle, but nothing makes it faster
    assert latency_s < 1
