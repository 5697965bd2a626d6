"""Work in a process of its own that may be killed, and processes that are to be gone."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path


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


def with_mark(mark: str) -> list[int]:
    """Processes whose command line names this, such as a test's folder; a zombie has none."""
    return [pid for pid, command in _commands() if mark in command and pid != os.getpid()]


def gone(mark: str, within_s: float = 20) -> bool:
    deadline = time.monotonic() + within_s
    while with_mark(mark):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _commands() -> Iterator[tuple[int, str]]:
    if sys.platform != "linux":
        told = subprocess.run(["ps", "-axww", "-o", "pid=,command="], capture_output=True, check=True).stdout
        for line in told.decode(errors="replace").splitlines():
            pid, _, command = line.strip().partition(" ")
            yield int(pid), command
        return
    for place in Path("/proc").glob("[0-9]*"):
        try:
            yield int(place.name), (place / "cmdline").read_bytes().decode(errors="replace")
        except OSError:  # it has just ended
            continue
