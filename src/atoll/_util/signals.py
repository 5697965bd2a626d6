"""Records Ctrl-C and SIGTERM, so that training ends between two steps, and ends a child when its supervisor dies.

A supervised child's standard input is a pipe that is never written to and whose other end only the supervisor holds.
When the supervisor dies, even by kill -9, the kernel closes that end, and the child reads the end of the file. This is
portable, free of races, and depends on no process id that may have been reused.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ONE_S = 0.5
"""Seconds within which signals count as one: some programs send their children what these got already."""
EXIT_WITH_PARENT = "ATOLL_FOLLOWS_STDIN"
"""Environment variable of a child whose standard input ends with its supervisor."""
PATIENCE_S = 300.0
"""Seconds that a process has to save after it was asked to stop; then it is killed."""
_AGAIN_S = 0.02
_IMPORTS_S = 15.0  # after which an import is interrupted nevertheless


class Interrupts(list[int]):
    """Lists the received signals; they raise at once until training begins, and then only between steps."""

    at_once = True
    on_first: Callable[[], None] | None = None
    """Called when the first signal comes during training."""
    _last_s = -ONE_S

    def note(self, number: int) -> bool:
        """Record a signal; return whether it is a new one, not the last one repeated."""
        now_s = time.monotonic()
        is_new = now_s - self._last_s >= ONE_S
        self._last_s = now_s
        if is_new:
            self.append(number)
        return is_new

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt for a signal whose exception was lost, as in a destructor or callback."""
        if self and self.at_once:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    def wait_for_steps(self) -> None:
        """From now on only record signals."""
        self.raise_pending()
        self.at_once = False
        if self:  # one came in between
            raise KeyboardInterrupt

    @contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Let signals raise at once inside this context, which only waits."""
        self.at_once = True
        try:
            self.raise_pending()
            yield
        finally:
            self.at_once = False

    def strike(self, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, after a running import: inside one it may be lost, or torch's C++ aborts."""
        if _is_importing(frame) and time.monotonic() < self._last_s + _IMPORTS_S:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


_active: list[Interrupts] = []  # of the outermost context, which inner ones share


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Record Ctrl-C and SIGTERM in this context; once training has begun, the second one stops at once.

    While signals raise at once, an error that follows one becomes a KeyboardInterrupt: it is taken for its effect.
    """
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield received
        return
    if _active:
        yield _active[0]
        return

    def note(number: int, frame: FrameType | None) -> None:
        if not received.note(number):
            return
        if received.at_once:
            received.strike(frame)
        elif len(received) > 1:
            for known, handler in before.items():
                signal.signal(known, handler)
            signal.raise_signal(number)
        elif received.on_first is not None:
            received.on_first()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    before[signal.SIGALRM] = signal.signal(signal.SIGALRM, lambda _, frame: received.strike(frame))
    _active.append(received)
    try:
        yield received
    except Exception as error:
        if received and received.at_once:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _active.clear()
        for number, handler in before.items():
            signal.signal(number, handler)


# ---------------------------------------------------------------------- supervised processes


@contextmanager
def parent_pipe() -> Iterator[int]:
    """Yield a file descriptor for the children's standard input, which ends with this process or context."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(write)
        os.close(read)


def exit_with_parent(patience_s: float = PATIENCE_S) -> None:
    """End this process when its supervisor dies: by SIGTERM, so that it saves, and then by SIGKILL.

    Does nothing in a process without a supervisor. Processes that this one starts must be ended by it: torchrun passes
    SIGTERM on to its ranks.
    """
    if not os.environ.pop(EXIT_WITH_PARENT, None) or not stat.S_ISFIFO(os.fstat(0).st_mode):
        return

    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(patience_s)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="follow", daemon=True).start()
