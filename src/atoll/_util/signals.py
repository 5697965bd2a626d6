"""Ctrl-C and SIGTERM, noted: Python can lose the exception it makes of them, and training is to end between steps."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

ONE_S = 0.5
"""Signals that follow each other more closely are one: some programs pass on what their children have got, too."""
_AGAIN_S = 0.02
_IMPORTS_S = 15.0  # whoever trains inside an import that never ends is interrupted nevertheless


class Interrupts(list[int]):
    """The signals that have come: acted on at once until training begins, and then between two steps."""

    at_once = True
    on_first: Callable[[], None] | None = None
    """Called when the first one comes during training."""
    _last_s = -ONE_S

    def note(self, number: int) -> bool:
        """Whether a signal that comes now is another one than the last."""
        now_s = time.monotonic()
        is_new = now_s - self._last_s >= ONE_S
        self._last_s = now_s
        if is_new:
            self.append(number)
        return is_new

    def raise_pending(self) -> None:
        """Act on one that has come and was lost: an exception may be, inside what cannot raise any."""
        if self and self.at_once:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    def wait_for_steps(self) -> None:
        """From now on only fill the list."""
        self.raise_pending()
        self.at_once = False
        if self:  # it came in between
            raise KeyboardInterrupt

    @contextmanager
    def raising_at_once(self) -> Iterator[None]:
        """Inside, while there is nothing but waiting, act on them at once again."""
        self.at_once = True
        try:
            self.raise_pending()
            yield
        finally:
            self.at_once = False

    def strike(self, frame: FrameType | None) -> None:
        """Raise KeyboardInterrupt, once no import is under way: inside one it may be lost, or torch's C++ aborts."""
        if _is_importing(frame) and time.monotonic() < self._last_s + _IMPORTS_S:
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_S)
        else:
            raise KeyboardInterrupt


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


_minded: list[Interrupts] = []  # by whoever asked first: those inside share it


@contextmanager
def interruptible() -> Iterator[Interrupts]:
    """Mind Ctrl-C and SIGTERM; once training has begun, the second one stops at once.

    An error that comes after one, while they are acted on at once, is taken for what became of it on its way.
    """
    received = Interrupts()
    if threading.current_thread() is not threading.main_thread():  # whoever owns that one decides
        yield received
        return
    if _minded:
        yield _minded[0]
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
    _minded.append(received)
    try:
        yield received
    except Exception as error:
        if received and received.at_once:
            raise KeyboardInterrupt from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        _minded.clear()
        for number, handler in before.items():
            signal.signal(number, handler)
