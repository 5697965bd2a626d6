"""Supervises child processes: shows their output, stops them together, and leaves none behind.

Each child writes to its own log file, and its output is read from there. So nothing is lost when this process dies, a
stalled terminal blocks no child, and lines never mix.
"""

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from atoll._util.signals import EXIT_WITH_PARENT, PATIENCE_S, Interrupts, parent_pipe
from atoll.errors import printable

POLL_S = 0.05
GRACE_S = 30.0
"""Seconds that the others have to end by themselves after one has failed; then they are asked to stop, and save."""
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """Describes a process to start."""

    name: str
    """Prefixes each of its lines."""
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    """Its output is appended here."""
    aftermath: str | None = None
    """Pattern of the line after which it only reports that a process failed, and no longer why."""


class ProcessExit(NamedTuple):
    """Tells how a process ended."""

    job: ProcessSpec
    status: int
    """Its exit status, or the signal that killed it, negative."""
    said: str
    """Its last error, or else its last line."""
    asked: bool
    """Whether it had been asked to stop."""


class SupervisionResult(NamedTuple):
    """Tells how all processes ended."""

    ended: list[ProcessExit]
    """In the order in which they ended."""
    failed: ProcessExit | None
    """The failure that caused the others."""
    interrupted: bool
    """Whether Ctrl-C or SIGTERM has come."""


class ProcessObserver:
    """Sees what supervised processes print and how they end; by default it only prints the supervisor's lines."""

    def show(self, name: str, line: str) -> None:
        """Take a line of a process."""

    def say(self, line: str) -> None:
        """Print a line of the supervisor."""
        print(line, flush=True)

    def look(self, name: str) -> None:
        """Look elsewhere for news of a process; called while it runs, and once after it has ended."""

    def end(self, ended: ProcessExit) -> None:
        """Take the end of a process."""


def supervise(
    jobs: Sequence[ProcessSpec],
    greeting: str = "",
    *,
    audience: ProcessObserver | None = None,
    at_once: int | None = None,
    together: bool = True,
    grace_s: float = GRACE_S,
    patience_s: float = PATIENCE_S,
    again: Callable[[ProcessExit], bool] = lambda ended: False,
) -> SupervisionResult:
    """Run processes to their ends; when this returns or raises, none is left.

    Ctrl-C or SIGTERM is passed on to each process, once, as SIGINT; the second signal kills them.

    Args:
        jobs: The processes to start.
        greeting: A line to print once signals are handled.
        audience: Sees what they print; None prints each line after the name of its process.
        at_once: How many may run at a time; None for all.
        together: Whether one that fails ends the others.
        grace_s: Seconds that the others then have to end by themselves, before SIGTERM asks them to.
        patience_s: Seconds that a process has to end after it was asked to, before it is killed.
        again: Says of a process that has failed whether to start it again.

    Raises:
        BrokenPipeError: Standard output was closed; all processes were asked to stop.
    """
    signals = Interrupts()
    audience = audience or PrefixedOutput([job.name for job in jobs])
    with _recording(signals), parent_pipe() as stdin:
        supervisor = _Supervisor(jobs, audience, signals, stdin, again)
        try:
            if greeting:
                audience.say(greeting)
            while supervisor.start(at_once or len(jobs)):
                time.sleep(POLL_S)
                supervisor.look()
                supervisor.act(grace_s if together else math.inf, patience_s)
        except BrokenPipeError:
            # Discard what is still buffered: Python would try again at its end, and exit with status 120.
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stdout.fileno())
            raise
        finally:
            supervisor.end(patience_s)
    return SupervisionResult(supervisor.ended, _cause(supervisor.failures), supervisor.interrupted)


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


@contextmanager
def _recording(signals: Interrupts) -> Iterator[None]:
    """Only record Ctrl-C and SIGTERM; children get the default handlers, even if a shell had us ignore Ctrl-C."""
    before = {n: signal.signal(n, lambda number, _: signals.note(number)) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(failures: Sequence[ProcessExit]) -> ProcessExit | None:
    """Return the first failure that blames no other process: a peer may end sooner than the one it lost."""
    names = {failure.job.name for failure in failures}

    def blames_another(failure: ProcessExit) -> bool:
        return any(re.search(rf"\b{re.escape(name)}\b", failure.said) for name in names - {failure.job.name})

    own = [failure for failure in failures if not blames_another(failure)]
    return next(iter(own or failures), None)


class _Supervisor:
    """Starts, watches and stops the children."""

    def __init__(
        self,
        jobs: Sequence[ProcessSpec],
        audience: ProcessObserver,
        signals: Sequence[int],
        stdin: int,
        again: Callable[[ProcessExit], bool],
    ) -> None:
        self.running: list[_Child] = []
        self.ended: list[ProcessExit] = []
        self.failures: list[ProcessExit] = []
        self.interrupted = False
        self._waiting = deque(jobs)
        self._audience, self._signals, self._stdin = audience, signals, stdin
        self._again = again
        self._asked = False
        self._due = math.inf  # when running children are asked to stop, or killed if they were asked

    def start(self, at_once: int) -> bool:
        """Start waiting jobs up to `at_once`; return whether any child runs."""
        while self._waiting and len(self.running) < at_once:
            self.running.append(_Child(self._waiting.popleft(), self._stdin))
        return bool(self.running)

    def look(self) -> None:
        """Show new output, and record the children that have ended."""
        over: list[_Child] = []
        for child in self.running:
            status = child.process.poll()  # before reading: its last output is in the log by then
            for line in child.lines(last=status is not None):
                self._audience.show(child.job.name, line)
            self._audience.look(child.job.name)
            if status is not None:
                over.append(child)
        # Of several in one look, a signal killed the first, which the others noticed; the rest by last output.
        for child in sorted(over, key=lambda child: (child.process.returncode >= 0, child.last_output_ns)):
            child.close()
            self.running.remove(child)
            ended = ProcessExit(child.job, child.process.returncode, child.said, self._asked)
            self.ended.append(ended)
            if ended.status and not self._asked:
                if self._again(ended):
                    self._waiting.append(child.job)
                else:
                    self.failures.append(ended)
            self._audience.end(ended)

    def act(self, grace_s: float, patience_s: float) -> None:
        """Pass signals on, and enforce the time limits."""
        if self._signals and (self.running or self._waiting) and not self.interrupted:
            self.interrupted = True
            self._audience.say("stopping: all save first; Ctrl-C again stops at once, without saving")
            self._ask(signal.SIGINT, patience_s)
        if self.failures and self._due == math.inf:
            self._due = time.monotonic() + grace_s
        if len(self._signals) > 1 or (self._asked and self._late):
            self._kill()
        elif self._late:
            self._ask(signal.SIGTERM, patience_s)

    def end(self, patience_s: float) -> None:
        """Leave no child behind, even after an error here; they may still save."""
        left = list(self.running)
        self._ask(signal.SIGTERM, patience_s)
        while self.running and not self._late and len(self._signals) < 2:
            time.sleep(POLL_S)
            self.running = [child for child in self.running if child.process.poll() is None]
        self._kill()
        for child in left:
            child.process.wait()
            child.close()

    @property
    def _late(self) -> bool:
        return time.monotonic() >= self._due

    def _ask(self, number: signal.Signals, patience_s: float) -> None:
        """Ask all children to stop, once only: a second signal would keep them from saving."""
        if self._asked:
            return
        self._asked = True
        self._waiting.clear()
        self._due = time.monotonic() + patience_s
        for child in self.running:
            child.process.send_signal(number)
            child.signal_all(signal.SIGCONT)  # a stopped process (SIGSTOP) would not get the other signal

    def _kill(self) -> None:
        for child in self.running:
            child.signal_all(signal.SIGKILL)


class _Child:
    """A running process, and how far its log has been read."""

    def __init__(self, job: ProcessSpec, stdin: int) -> None:
        self.job = job
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            log = opened.enter_context(job.log.open("a+b"))
            _write_title(log.fileno(), job.command)
            self._log = opened.enter_context(job.log.open("rb"))
            self._log.seek(0, os.SEEK_END)
            # In its own session: Ctrl-C reaches only this process, which passes it on once; a second would not save.
            self.process = subprocess.Popen(
                job.command,
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Unbuffered, or its last line on stderr would come before what it printed earlier.
                env={"PYTHONUNBUFFERED": "1", **job.environment, EXIT_WITH_PARENT: "1"},
                start_new_session=True,
            )
            log.close()
            self.close = opened.pop_all().close
        self._part = b""
        self._last = self._error = ""
        self._in_aftermath = False

    @property
    def last_output_ns(self) -> int:
        """The time at which it last wrote to its log."""
        return os.fstat(self._log.fileno()).st_mtime_ns

    @property
    def said(self) -> str:
        """Its last error, which other lines may follow; else its last line."""
        return self._error or self._last

    def lines(self, *, last: bool) -> Iterator[str]:
        """Yield new whole lines; with `last`, an unfinished one too."""
        *whole, self._part = (self._part + self._log.read()).split(b"\n")
        if last and self._part:
            whole, self._part = [*whole, self._part], b""
        for raw in whole:
            line = raw.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # the last state of a progress bar
            self._remember(line)
            yield line

    def _remember(self, line: str) -> None:
        self._in_aftermath |= bool(self.job.aftermath and re.match(self.job.aftermath, line))
        if not self._in_aftermath:
            self._last = line.strip() or self._last
        if line.startswith("error: ") and not (self._in_aftermath and self._error):  # a rank's own may come late
            self._error = line

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to the process and its descendants: torchrun gives each rank its own session."""
        descendants = _descendants(self.process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, number)
        for pid in descendants:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)


def _write_title(log: int, command: Sequence[str]) -> None:
    """Append a line with the time and the command to a log, which is kept over many starts."""
    size = os.fstat(log).st_size
    torn = size and os.pread(log, 1, size - 1) != b"\n"
    title = f"--- {datetime.now():%Y-%m-%d %H:%M:%S} {shlex.join(command)}\n"
    os.write(log, (b"\n" if torn else b"") + title.encode())


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_bytes().split()):
                found += [child, *_descendants(child)]
    return found


class PrefixedOutput(ProcessObserver):
    """Prints each line after the name of its process, in colour on a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        self._console = Console(highlight=False)
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}

    def show(self, name: str, line: str) -> None:
        """Print a line of a process; characters that the terminal lacks are replaced."""
        encoding = sys.stdout.encoding or "utf-8"
        head, line = f"{name:<{self._width}} | ", printable(line).encode(encoding, "replace").decode(encoding)
        if self._console.is_terminal:
            self._console.print(Text.assemble((head, self._colours[name]), line), soft_wrap=True)
        else:
            print(head + line, flush=True)
