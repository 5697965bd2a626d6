"""Registries as processes of their own: `atoll registry`, and etcd with one member or three."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

PATIENCE_S = 60.0


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Child:
    """A process that is killed when the test is over."""

    def __init__(self, command: list[str], log: Path) -> None:
        self.log = log
        with log.open("ab") as out:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)

    def kill(self, number: int = signal.SIGKILL) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def end(self) -> None:
        self.kill(signal.SIGCONT)
        self.kill()
        self.process.wait(PATIENCE_S)

    def said(self) -> str:
        return self.log.read_text(errors="replace")


class RegistryProcess:
    """`atoll registry`, which can be killed and started again."""

    def __init__(self, folder: Path, keys: Path | None, files: int | None = None) -> None:
        (port,) = free_ports(1)
        self.address = f"127.0.0.1:{port}"
        self.log = folder.with_name(f"{folder.name}.log")
        proof = ["--security", "none"] if keys is None else ["--keys", str(keys)]
        command = [sys.executable, "-m", "atoll", "registry", str(folder), "--listen", self.address]
        limited = [] if files is None else ["prlimit", f"--nofile={files}"]
        self._command = [*limited, *command, *proof]
        self.child: Child | None = None

    def start(self) -> None:
        said = self.log.read_text().count("listens on") if self.log.exists() else 0
        self.child = Child(self._command, self.log)
        end_s = time.monotonic() + PATIENCE_S
        while self.child.said().count("listens on") == said:
            assert self.child.process.poll() is None and time.monotonic() < end_s, self.child.said()
            time.sleep(0.02)

    def kill(self) -> None:
        assert self.child is not None
        self.child.end()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


class Etcd:
    """A cluster of etcd on loopback ports."""

    def __init__(self, folder: Path, members: int = 1, more: tuple[str, ...] = (), scheme: str = "http") -> None:
        found = shutil.which("etcd")
        if found is None:
            pytest.skip("there is no etcd here; Debian has it in etcd-server")
        self._etcd, self._folder, self._more, self._scheme = found, folder, more, scheme
        ports = free_ports(2 * members)
        self.ports, self._peer_ports = ports[:members], ports[members:]
        self._members: dict[int, Child] = {}

    @property
    def url(self) -> str:
        """For `EtcdOptions.read`, without the name of the run."""
        return "etcd://" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def start(self, number: int) -> None:
        peers = [f"http://127.0.0.1:{port}" for port in self._peer_ports]
        own = f"{self._scheme}://127.0.0.1:{self.ports[number]}"
        options = {
            "name": f"m{number}",
            "data-dir": str(self._folder / f"m{number}"),
            "listen-client-urls": own,
            "advertise-client-urls": own,
            "listen-peer-urls": peers[number],
            "initial-advertise-peer-urls": peers[number],
            "initial-cluster": ",".join(f"m{n}={peer}" for n, peer in enumerate(peers)),
            "logger": "zap",
        }
        command = [self._etcd, *(f"--{name}={value}" for name, value in options.items()), *self._more]
        self._members[number] = Child(command, self._folder / f"m{number}.log")

    def wait(self, number: int) -> None:
        """Wait until a member listens and knows a leader."""
        end_s = time.monotonic() + PATIENCE_S
        while True:
            child = self._members[number]
            assert child.process.poll() is None and time.monotonic() < end_s, child.said()
            with suppress(OSError):
                if self._scheme == "https":
                    socket.create_connection(("127.0.0.1", self.ports[number]), 1).close()
                    return
                with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[number]}/health", timeout=1) as answer:
                    if b"true" in answer.read():
                        return
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        self._members[number].end()

    def signal(self, number: int, what: int) -> None:
        self._members[number].kill(what)

    def __enter__(self) -> Self:
        for number in range(len(self.ports)):
            self.start(number)
        for number in range(len(self.ports)):
            self.wait(number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._members.values():
            child.end()
