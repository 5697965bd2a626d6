"""Work in a process of its own that may be killed."""

import os
import signal
import sys
import time
from collections.abc import Callable


def forked(act: Callable[[], None], kill_after_s: float | None = None, once: Callable[[], bool] = lambda: True) -> bool:
    """Run `act` in a child, kill it a while after `once` holds if asked to, and say whether it got to its end."""
    child = os.fork()
    if child == 0:
        try:
            act()
        finally:
            os._exit(0 if sys.exc_info()[0] is None else 1)
    if kill_after_s is not None:
        until = time.monotonic() + 60
        while not once() and time.monotonic() < until:  # on a busy machine a child may not run for a long while
            time.sleep(0.001)
        time.sleep(kill_after_s)
        os.kill(child, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL), code
    return code == 0
