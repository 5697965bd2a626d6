"""How a run stops when it is told to: between two steps, and where workers have processes of their own, together."""

import shlex
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from atoll._util.signals import Interrupts
from atoll.errors import LinkError
from atoll.link.net.link import NetLink
from atoll.train.ranks.worker_ranks import Team

TOGETHER_S = 15.0
"""For the other processes to say that they were told, too; Python hears between two kernels."""


class Stopped(SystemExit):
    """The end of a run that was told to stop and has saved; `together`: so have all other processes of it."""

    def __init__(self, *, together: bool) -> None:
        super().__init__(130)
        self.together = together


class Stop:
    """After which step to stop: the next one, or the first that all processes of the run can stop after.

    A run is resumed from a step that all have saved. So whoever is told to stop says how far it is, also while it
    waits for a round, and goes on to the furthest of all. If not all were told, it stops by itself. The ranks of a
    worker stop as one, whichever of them was told.
    """

    def __init__(self, interrupts: Interrupts, link: NetLink | None, steps: Callable[[], int], team: Team) -> None:
        self._interrupts = interrupts
        self._link = link
        self._steps = steps
        self._team = team
        self._after: int | None = None
        self._together = link is None
        self._has_told = False
        if link is not None and team.leads:
            interrupts.on_first = self._tell

    def _tell(self) -> None:
        if self._has_told:
            return
        self._has_told = True
        link, after = self._link, self._steps() + 1  # one that has just begun is not counted yet
        assert link is not None

        def tell() -> None:
            with suppress(LinkError):  # it may have left already
                link.rendezvous().try_publish("stop", after, TOGETHER_S)

        # In a thread: this is a signal handler, and the store may be far away.
        threading.Thread(target=tell, daemon=True).start()

    def due(self) -> bool:
        """Whether to stop now, between two steps."""
        if not self._team.any(bool(self._interrupts)):
            return False
        if self._after is None:
            self._after, self._together = self._team.first(self._agreed)
        return self._steps() >= self._after

    def _agreed(self) -> tuple[int, bool]:
        """After which step to stop, and whether all processes of the run do."""
        if self._link is None:
            return self._steps(), True
        self._tell()  # now, if it was another rank that was told
        leading = self._link.seat.peers()
        # Not past the deadline of the others, who may wait in a round: they would not hear why this worker leaves.
        within_s = min(TOGETHER_S, self._link.deadline_s / 2)
        told = self._link.rendezvous().poll("stop", leading, within_s)
        together = len(told) == len(leading)
        return max(told.values()) if together else self._steps(), together

    @property
    def together(self) -> bool:
        """Whether all processes of the run stop after this step, and so can wait for each other before they leave."""
        return self._together

    def again(self, folder: Path) -> str:
        """The command that goes on from here."""
        if self._link is None:
            return f"atoll train {shlex.quote(str(folder))} --resume"
        return "the same command and --resume, on every worker"
