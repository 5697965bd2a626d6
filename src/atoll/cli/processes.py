"""Child processes that belong together: their lines shown, all of them stopped together, none left behind.

Each child writes to its log by itself, and what is shown is read from there. So nothing is lost when this process dies,
a terminal that stands still holds no child up, and lines never mix.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, Protocol

from rich.console import Console
from rich.text import Text

from atoll._util.parent_death import EXIT_WITH_PARENT, PATIENCE_S, parent_pipe
from atoll._util.signals import Interrupts
from atoll.errors import printable

POLL_S = 0.05
GRACE_S = 30.0
"""After one has failed, how long the others may take to notice and end by themselves; asked to stop, they save."""
_COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """A process to start."""

    name: str
    """Stands before each of its lines."""
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    """All it says, after what is there already."""
    aftermath: str | None = None
    """A pattern: from the first line that begins like this on, it only tells that something has failed, not why."""


class ProcessExit(NamedTuple):
    """A process that has come to its end."""

    job: ProcessSpec
    status: int
    """Its exit status, or the signal that killed it, negative."""
    said: str
    """Its last error, or else its last line."""
    asked: bool
    """Whether it had been asked to stop."""


class SupervisionResult(NamedTuple):
    """How all of them ended."""

    ended: list[ProcessExit]
    """In the order in which they did."""
    failed: ProcessExit | None
    """The failure that the others follow from."""
    interrupted: bool
    """Whether Ctrl-C or SIGTERM has come."""


class ProcessObserver(Protocol):
    """Sees what supervised processes say, and how they end."""

    def show(self, name: str, line: str) -> None:
        """Take a line of a process."""

    def say(self, line: str) -> None:
        """Take a line of the supervisor's own."""

    def look(self, name: str) -> None:
        """Look elsewhere for news of a process; called while it runs, and once more when it has ended."""

    def end(self, ended: ProcessExit) -> None:
        """Take note of a process that has ended."""


def supervise(
    jobs: Sequence[ProcessSpec],
    greeting: str = "",
    *,
    audience: ProcessObserver | None = None,
    at_once: int | None = None,
    together: bool = True,
    grace_s: float = GRACE_S,
    patience_s: float = PATIENCE_S,
) -> SupervisionResult:
    """Run processes to their ends; when this returns or raises, none is left.

    Ctrl-C or SIGTERM is passed on to each, once, as SIGINT; the second one kills. Those that were asked to stop have
    `patience_s`. If nobody reads what is printed any more, all are asked to stop, and BrokenPipeError is raised.

    Args:
        jobs: what to start.
        greeting: is said first, once signals are heard: who reads it may send one.
        audience: sees what they say; left out: each line is printed after the name of the process.
        at_once: how many may run at a time; left out: all.
        together: whether one that fails ends the others: they have `grace_s` to end by themselves and are then asked
            to by SIGTERM.
    """
    signals = Interrupts()
    audience = audience or PrefixedOutput([job.name for job in jobs])
    rules = _Rules(at_once or len(jobs), together, grace_s, patience_s)
    with _noted(signals), parent_pipe() as stdin:
        children = _Supervisor(jobs, audience, signals, stdin, rules)
        try:
            if greeting:
                audience.say(greeting)
            while children.start():
                time.sleep(POLL_S)
                children.look()
                children.act()
        except BrokenPipeError:
            _print_to_nobody()
            raise
        finally:
            children.end()
    return SupervisionResult(children.ended, _cause(children.failures), children.interrupted)


def count_cores() -> int:
    """Count the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _print_to_nobody() -> None:
    """Discard what is still to be printed: Python would try again at its end, and make the exit status 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


@contextmanager
def _noted(signals: Interrupts) -> Iterator[None]:
    """Only note Ctrl-C and SIGTERM. It also undoes for children that a shell may have started us deaf to Ctrl-C."""

    def note(number: int, _frame: object) -> None:
        signals.note(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _cause(failures: Sequence[ProcessExit]) -> ProcessExit | None:
    """The first to fail, unless it only tells of another: a peer may be quicker to end than the one it has lost."""
    names = {failure.job.name for failure in failures}

    def blames_another(failure: ProcessExit) -> bool:
        return any(re.search(rf"\b{re.escape(name)}\b", failure.said) for name in names - {failure.job.name})

    own = [failure for failure in failures if not blames_another(failure)]
    return next(iter(own or failures), None)


# ---------------------------------------------------------------------- all of them


class _Rules(NamedTuple):
    at_once: int
    together: bool
    grace_s: float
    patience_s: float


class _Supervisor:
    """Those that run, and what is to be done about them."""

    def __init__(
        self, jobs: Sequence[ProcessSpec], audience: ProcessObserver, signals: Sequence[int], stdin: int, rules: _Rules
    ) -> None:
        self.running: list[_Child] = []
        self.ended: list[ProcessExit] = []
        self.failures: list[ProcessExit] = []
        self.interrupted = False
        self._waiting = deque(jobs)
        self._audience, self._signals, self._stdin, self._rules = audience, signals, stdin, rules
        self._asked = False
        self._due = math.inf
        """When those that still run are asked to stop, or killed if they were asked."""

    def start(self) -> bool:
        """Start as many as may run; whether any does."""
        while self._waiting and len(self.running) < self._rules.at_once:
            self.running.append(_Child(self._waiting.popleft(), self._stdin))
        return bool(self.running)

    def look(self) -> None:
        """Show what is new, and take leave of those that have ended."""
        over: list[_Child] = []
        for child in self.running:
            status = child.process.poll()  # before reading: what it said last is in the log by then
            for line in child.lines(last=status is not None):
                self._audience.show(child.job.name, line)
            self._audience.look(child.job.name)
            if status is not None:
                over.append(child)
        # Of several in one look, first were those that a signal killed, which the others noticed; then by last words.
        for child in sorted(over, key=lambda child: (child.status >= 0, child.last_words_ns)):
            child.close()
            self.running.remove(child)
            self.ended.append(ProcessExit(child.job, child.status, child.said, self._asked))
            if child.status and not self._asked:
                self.failures.append(self.ended[-1])
            self._audience.end(self.ended[-1])

    def act(self) -> None:
        """Pass signals on, and mind the time."""
        if self._signals and (self.running or self._waiting) and not self.interrupted:
            self.interrupted = True
            self._audience.say("stopping: all save first; Ctrl-C again stops at once, without saving")
            self._ask(signal.SIGINT)
        if self.failures and self._rules.together and self._due == math.inf:
            self._due = time.monotonic() + self._rules.grace_s
        if len(self._signals) > 1 or (self._asked and self._late):
            self._kill()
        elif self._late:
            self._ask(signal.SIGTERM)

    def end(self) -> None:
        """Leave none behind, also when something has gone wrong here: they may still save."""
        left = list(self.running)
        self._ask(signal.SIGTERM)
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

    def _ask(self, number: signal.Signals) -> None:
        """Once only: the second signal would keep them from saving."""
        if self._asked:
            return
        self._asked = True
        self._waiting.clear()
        self._due = time.monotonic() + self._rules.patience_s
        for child in self.running:
            child.process.send_signal(number)
            child.wake()

    def _kill(self) -> None:
        for child in self.running:
            child.kill()


# ---------------------------------------------------------------------- one of them


class _Child:
    """A process that runs, and how far its log has been read."""

    def __init__(self, job: ProcessSpec, stdin: int) -> None:
        self.job = job
        job.log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            log = opened.enter_context(job.log.open("a+b"))
            _head(log.fileno(), job.command)
            self._log = opened.enter_context(job.log.open("rb"))
            self._log.seek(0, os.SEEK_END)
            # In a session of its own: Ctrl-C reaches this process alone, which passes it on once; twice would not save.
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
        self._over = False

    @property
    def status(self) -> int:
        """How it ended; it must have."""
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def last_words_ns(self) -> int:
        """When it last wrote to its log."""
        return os.fstat(self._log.fileno()).st_mtime_ns

    @property
    def said(self) -> str:
        """Its last error, for a farewell may follow it; else its last line."""
        return self._error or self._last

    def lines(self, *, last: bool) -> Iterator[str]:
        """Whole lines that are new; what the `last` words lack of a line is not waited for."""
        *whole, self._part = (self._part + self._log.read()).split(b"\n")
        if last and self._part:
            whole, self._part = [*whole, self._part], b""
        for raw in whole:
            line = raw.decode(errors="replace").rstrip("\r").rpartition("\r")[2]  # of a progress bar, its last state
            self._note(line)
            yield line

    def _note(self, line: str) -> None:
        self._over = self._over or bool(self.job.aftermath and re.match(self.job.aftermath, line))
        if not self._over:
            self._last = line.strip() or self._last
        if line.startswith("error: ") and not (self._over and self._error):  # a rank's own may come a little late
            self._error = line

    def wake(self) -> None:
        """Let what was stopped (SIGSTOP) go on: otherwise it would not hear that it is asked to end."""
        for pid in (self.process.pid, *_descendants(self.process.pid)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGCONT)

    def kill(self) -> None:
        """At once, with all that it has started: torchrun gives each rank a session of its own."""
        family = _descendants(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _head(log: int, command: Sequence[str]) -> None:
    """Begin a line in a log that says what follows, for it is kept over many starts."""
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


# ---------------------------------------------------------------------- what is shown


class PrefixedOutput:
    """Prints the lines of all, each after the name of who said it; in colour on a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        self._console = Console(highlight=False)
        self._width = max(map(len, names), default=0)
        self._colours = {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}

    def show(self, name: str, line: str) -> None:
        """Print a line of one of them."""
        head, line = f"{name:<{self._width}} | ", self._printable(line)
        if self._console.is_terminal:
            self._console.print(Text.assemble((head, self._colours[name]), line), soft_wrap=True)
        else:
            print(head + line, flush=True)

    def say(self, line: str) -> None:
        """Print a line of our own."""
        print(line, flush=True)

    def look(self, name: str) -> None:
        """There is nothing but lines."""

    def end(self, ended: ProcessExit) -> None:
        """What it said last has been printed."""

    def _printable(self, line: str) -> str:
        """Make a line fit for any terminal: a character that it does not have must not end a run."""
        encoding = sys.stdout.encoding or "utf-8"
        return printable(line).encode(encoding, "replace").decode(encoding)
