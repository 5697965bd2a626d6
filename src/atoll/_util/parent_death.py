"""How a child process learns that the one that started it is dead, however it died.

The child's standard input is a pipe that nobody writes to and whose other end only the supervisor holds. When the
supervisor dies, of kill -9 too, the kernel closes that end, and the child reads the end of the file. This needs nothing
of Linux, races with nobody, and keeps no process number that could have been given to another process.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_WITH_PARENT = "ATOLL_FOLLOWS_STDIN"
"""In a child's environment: its standard input ends when its supervisor does."""
PATIENCE_S = 300.0
"""How long a process that was asked to stop may take to save; then it is killed."""


@contextmanager
def parent_pipe() -> Iterator[int]:
    """Make the standard input of children: it ends with this process, or with this context."""
    read, write = os.pipe()
    try:
        yield read
    finally:
        os.close(write)
        os.close(read)


def exit_with_parent(patience_s: float = PATIENCE_S) -> None:
    """End this process when its supervisor dies: by SIGTERM, so that it saves, and then by SIGKILL.

    Does nothing in a process that has no supervisor. What this process starts does not follow by itself, for this
    process takes it along: torchrun passes SIGTERM on to its ranks.
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
