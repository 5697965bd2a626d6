"""Workers in processes of their own, as on machines of their own: started, told, killed, stopped, and heard out.

They are forked from one process that has imported everything, so one costs milliseconds instead of seconds.
"""

import atexit
import ctypes
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from atoll import connect
from atoll.link.net.fixed_link import NetLink
from atoll.link.net.run_keys import throw_away

PATIENCE_S = 200.0
"""For a child to say or do what it was started for; only a test that fails takes as long."""
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["atoll.train.run", "atoll.outer.loop", "pytest", "torch._dynamo"])
_ports = cycle(range(10_000, 32_000))
for _ in range(os.getpid() * 101 % 22_000):  # test processes run side by side
    next(_ports)
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET of setns(2)


@dataclass(frozen=True)
class Me:
    """A worker, as its own process sees it."""

    worker: int
    workers: int
    host: str
    port: int
    keys: str = "none"
    """Folder of the keys of all workers, or "none"."""
    deadline_s: float = 30.0
    join_s: float = 30.0
    silent_s: float = 20.0  # machines that test have much to do
    pipe: Connection | None = field(default=None, repr=False)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def link(self, **changes: Any) -> NetLink:
        """This worker's end of a link."""
        limits = {"deadline_s": self.deadline_s, "join_s": self.join_s, "silent_s": self.silent_s}
        options = {"worker": self.worker, "workers": self.workers, "keys": self.bundle, **limits}
        return connect(self.address, **{**options, **changes})

    @property
    def bundle(self) -> str:
        """Folder of this worker's keys, or "none"."""
        return self.keys if self.keys == "none" else f"{self.keys}/worker-{self.worker}"

    def say(self, what: Any) -> None:
        """Tell the test something."""
        assert self.pipe is not None
        self.pipe.send(("said", what))

    def hear(self) -> Any:
        """Wait for what the test says."""
        assert self.pipe is not None
        return self.pipe.recv()


@dataclass(frozen=True)
class Ending:
    """How a worker's work ended."""

    at: float
    """time.monotonic(), which is the same clock in all processes."""
    result: Any = None
    error: str = ""
    """Its type and text."""
    trace: str = field(default="", repr=False)


class Worker:
    """A child, as the test sees it."""

    def __init__(self, me: Me, act: Callable[..., Any], arguments: Sequence[Any], log: Path, namespace: str | None):
        self.log = log
        self._pipe, theirs = _processes.Pipe()
        self.process = _processes.Process(
            target=_live, args=(act, replace(me, pipe=theirs), tuple(arguments), str(log), namespace), daemon=True
        )
        self.process.start()
        theirs.close()
        self._ending: Ending | None = None

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return int(self.process.pid)

    def said(self) -> Any:
        """The next thing it says."""
        kind, what = self._next()
        assert kind == "said", f"it ended: {what}\n{what.trace}\n{self.output}"
        return what

    def tell(self, what: Any = None) -> None:
        self._pipe.send(what)

    def ending(self) -> Ending:
        """Wait for its end; what it says before is passed over."""
        while self._ending is None:
            kind, what = self._next()
            if kind == "ended":
                self._ending = what
        return self._ending

    def result(self) -> Any:
        ending = self.ending()
        assert not ending.error, f"{ending.error}\n{ending.trace}\n{self.output}"
        return ending.result

    def error(self) -> str:
        ending = self.ending()
        assert ending.error, f"it went well: {ending.result}"
        return ending.error

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """As the kernel does when memory is short; a rank may have followed another that was killed before it."""
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join()

    def close(self) -> None:
        with suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.process.join()
        self._pipe.close()

    def _next(self) -> tuple[str, Any]:
        if not self._pipe.poll(PATIENCE_S):
            raise AssertionError(f"worker (process {self.pid}) said nothing in {PATIENCE_S:g} s\n{self.output}")
        try:
            kind, what = self._pipe.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"worker died, exit code {self.process.exitcode}\n{self.output}") from None
        return kind, what


class Fleet:
    """Workers that are gone when the block is left."""

    def __init__(self, folder: Path, workers: int, sites: Any = None, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        if "keys" not in options:
            options["keys"] = str(folder / "keys")
            throw_away(workers).save(folder / "keys")
        self.folder, self.workers = folder, workers
        self.sites = sites
        host = sites[0].address if sites else "127.0.0.1"
        self._base = Me(0, workers, host, 29500 if sites else free_port(), **options)
        self.crew: list[Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self.crew:
            worker.close()

    def __getitem__(self, worker: int) -> Worker:
        return self.crew[worker]

    @property
    def address(self) -> str:
        return self._base.address

    @property
    def port(self) -> int:
        return self._base.port

    def start(self, act: Callable[..., Any], *arguments: Any) -> Self:
        """Let every worker do `act(me, *arguments)`."""
        for worker in range(self.workers):
            self.add(worker, act, *arguments)
        return self

    def add(self, worker: int, act: Callable[..., Any], *arguments: Any, **changes: Any) -> Worker:
        """One more child, as this worker."""
        namespace = self.sites[worker].namespace if self.sites else None
        log = self.folder / f"child-{len(self.crew)}.log"
        child = Worker(replace(self._base, worker=worker, **changes), act, arguments, log, namespace)
        self.crew.append(child)
        return child

    def results(self) -> list[Any]:
        ended = [(worker.ending(), worker.output) for worker in self.crew]
        told = [f"worker {n}: {e.error}\n{e.trace}\n{output}" for n, (e, output) in enumerate(ended) if e.error]
        assert not told, "\n".join(told)  # all of them: the first may only tell of another
        return [ending.result for ending, _ in ended]

    def others(self, *victims: int) -> list[Worker]:
        return [worker for number, worker in enumerate(self.crew) if number not in victims]


def as_rank(rank: int, ranks: int, port: int) -> None:
    """Be one of a worker's processes, as if torchrun had started it."""
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in places.items()}, MASTER_ADDR="127.0.0.1")


def free_port() -> int:
    """One that nobody uses or was given before, below those that the kernel gives away by itself."""
    return next(port for port in _ports if _is_free(port))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _live(act: Callable[..., Any], me: Me, arguments: tuple[Any, ...], log: str, namespace: str | None) -> None:
    assert me.pipe is not None
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    if namespace is not None:
        _enter(namespace)
    try:
        ending = Ending(time.monotonic(), result=act(me, *arguments))
        ending = replace(ending, at=time.monotonic())
    except BaseException as error:
        ending = Ending(time.monotonic(), error=f"{type(error).__name__}: {error}", trace=traceback.format_exc())
    with suppress(BrokenPipeError):
        me.pipe.send(("ended", ending))
    atexit._run_exitfuncs()  # as when a script ends; multiprocessing leaves them out


def _enter(namespace: str) -> None:
    """Be in a site from now on (Python has os.setns only since 3.12)."""
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
