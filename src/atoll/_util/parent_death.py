"""Ends a child process when its supervisor dies, however it died.

The child's standard input is a pipe that is never written to and whose other end only the supervisor holds. When the
supervisor dies, even by kill -9, the kernel closes that end, and the child reads the end of the file. This is portable,
free of races, and depends on no process id that may have been reused.
"""

import os
import signal
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

EXIT_WITH_PARENT = "ATOLL_FOLLOWS_STDIN"
"""Environment variable of a child whose standard input ends with its supervisor."""
PATIENCE_S = 300.0
"""Seconds that a process has to save after it was asked to stop; then it is killed."""


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
