"""Sites that are far apart, on one machine: network namespaces whose only way to each other is a slow line.

    with Sites(count=2, rate="20mbit") as sites:
        process = sites[0].popen([sys.executable, "worker.py"], env=...)

Each site has one interface, and a bridge in a namespace of its own joins them all: nothing outside can be reached
from a site, nothing outside reaches it, and no address can clash with one of the machine's. The line is limited in
both directions by the kernel's token buckets (`tbf`): what a site sends, and what the others send to it. There is no
latency and no loss beyond what queueing makes. Needs root, `ip` and `tc`; `available()` says what is missing.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Sequence
from itertools import count as serial_numbers
from types import FrameType, TracebackType
from typing import Any, NamedTuple, NoReturn, Self

LINE = "line"
"""A site's interface, as it is called inside the site."""
PREFIX = "atoll"
QUEUE = "100ms"
"""The longest a packet waits for the line before it is dropped; routers hold about this much."""
BURST_SECONDS = 0.002
"""Tokens a line may save up: enough for the kernel's timers to keep it busy, too little to beat the rate by."""
LEAST_BURST = 80_000
"""Bytes: room for a segment of 64 kB, or the kernel cuts it up, and interfaces count the headers of every packet."""
NETWORK = "10.77.0.0/16"
CONGESTION_CONTROL = "cubic"
"""What most machines have. Where BBR is the default, it takes a line without latency for one that holds nothing."""
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_serials = serial_numbers()


class Counters(NamedTuple):
    """What a site's interface has carried since it was made, as the kernel counts it.

    The headers of a segment of up to 64 kB count once, though the line carries (and limits) those of every packet.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def since(self, before: "Counters") -> "Counters":
        """What has been carried between two readings."""
        return Counters(*(now - then for now, then in zip(self, before, strict=True)))


def available() -> str | None:
    """Why sites cannot be made here, or None if they can."""
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no {tool} (it comes with iproute2)"
    try:
        with Sites(count=1, rate="1mbit"):
            return None
    except RuntimeError as error:
        return f"the kernel refuses: {error}"


def bits_per_second(rate: str) -> float:
    """20mbit -> 20 million; the units are those of `tc` that count bits."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit)", rate)
    if match is None:
        raise ValueError(f"a rate is a number and one of {', '.join(UNITS)}, got {rate!r}")
    return float(match[1]) * UNITS[match[2]]


class Site:
    """One place: commands run in it, and it has one line to all others."""

    def __init__(self, family: str, index: int) -> None:
        self.namespace, self._hub, self._port = f"{family}-{index}", f"{family}-hub", f"site{index}"
        self.address = f"10.77.{index // 250}.{index % 250 + 1}"  # of NETWORK

    def popen(self, command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
        """Start a command in this site; its pid is the command's own, so signals reach it."""
        return subprocess.Popen(["ip", "netns", "exec", self.namespace, *command], **options)

    def counters(self) -> Counters:
        """Read the interface's counters."""
        (line,) = json.loads(_run("ip", "-n", self.namespace, "-s", "-j", "link", "show", "dev", LINE))
        sent, received = line["stats64"]["tx"], line["stats64"]["rx"]
        return Counters(sent["bytes"], sent["packets"], received["bytes"], received["packets"])

    @property
    def cutting(self) -> tuple[str, ...]:
        """The command that cuts the line; it takes down the far end, so that the site keeps its routes."""
        return ("ip", "-n", self._hub, "link", "set", self._port, "down")

    def cut(self) -> None:
        """Let the line carry nothing, in either direction: packets vanish, and connections are told nothing."""
        _run(*self.cutting)

    def mend(self) -> None:
        """Let the line carry packets again."""
        _run("ip", "-n", self._hub, "link", "set", self._port, "up")

    def rate(self, up: str | None, down: str | None = None) -> None:
        """Limit what the site sends from now on, and what it receives (by default alike); None lifts the limit."""
        for namespace, device, rate in ((self.namespace, LINE, up), (self._hub, self._port, down or up)):
            if rate is None:
                with contextlib.suppress(RuntimeError):  # no limit is there to be taken away
                    _run("tc", "-n", namespace, "qdisc", "del", "dev", device, "root")
                continue
            burst = max(LEAST_BURST, int(BURST_SECONDS * bits_per_second(rate) / 8))
            limit = ("rate", rate, "burst", str(burst), "latency", QUEUE)
            _run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "tbf", *limit)

    def make(self) -> None:
        """Make the namespace and its line to the hub."""
        _namespace(self.namespace)
        end = ("peer", "name", LINE, "netns", self.namespace)
        _run("ip", "-n", self._hub, "link", "add", self._port, "type", "veth", *end)
        _run("ip", "-n", self._hub, "link", "set", self._port, "master", "bridge", "up")
        _run("ip", "-n", self.namespace, "address", "add", f"{self.address}/16", "dev", LINE)
        _run("ip", "-n", self.namespace, "link", "set", LINE, "up")
        route = ("dev", LINE, "proto", "kernel", "scope", "link", "src", self.address)
        with contextlib.suppress(RuntimeError):  # a kernel that has nothing else need not be told
            _run("ip", "-n", self.namespace, "route", "replace", NETWORK, *route, "congctl", CONGESTION_CONTROL)


class Sites:
    """As many sites as asked for, on one bridge; leaving the block ends what runs in them and removes everything.

    Also when the process is told to end (SIGTERM), if this is its main thread. What a killed process has left behind
    is removed by the next one that makes sites.
    """

    def __init__(self, count: int, rate: str | None = None) -> None:
        if rate is not None:
            bits_per_second(rate)
        self._family = f"{PREFIX}-{os.getpid()}-{next(_serials)}"
        self._sites = [Site(self._family, index) for index in range(count)]
        self._rate = rate
        self._handled = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._handled = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._handled:
            signal.signal(signal.SIGTERM, _leave)
        try:
            sweep()
            hub = f"{self._family}-hub"
            _namespace(hub)
            _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
            _run("ip", "-n", hub, "link", "set", "bridge", "up")
            for site in self._sites:
                site.make()
                site.rate(self._rate)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __len__(self) -> int:
        return len(self._sites)

    def __getitem__(self, index: int) -> Site:
        return self._sites[index]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def close(self) -> None:
        """End every process in the sites and remove them; twice does no harm."""
        for name in _namespaces():
            if name.startswith(f"{self._family}-"):
                _remove(name)
        if self._handled:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._handled = False


def sweep() -> None:
    """Remove the sites of processes that are gone."""
    for name in _namespaces():
        maker = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", name)
        if maker is not None and not os.path.exists(f"/proc/{maker[1]}"):
            _remove(name)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines()]


def _namespace(name: str) -> None:
    """Make a namespace with a loopback and without IPv6, whose chatter would be counted as traffic."""
    _run("ip", "netns", "add", name)
    with contextlib.suppress(RuntimeError):  # a kernel without IPv6 has nothing to turn off
        _run("ip", "netns", "exec", name, "sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
    _run("ip", "-n", name, "link", "set", "lo", "up")


def _remove(name: str) -> None:
    """End what runs in a namespace and delete it; another process may be doing the same."""
    with contextlib.suppress(RuntimeError):
        for pid in _run("ip", "netns", "pids", name).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _run("ip", "netns", "delete", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
