"""Finds out, together with the other workers, why a run with fixed members cannot go on.

The first failure ends the link. Every worker then publishes which worker it misses and closes its connections, by which
the others notice; a worker that publishes nothing is the one that is gone. So all name the same one, and not the
messenger.
"""

import threading
import time
from collections.abc import Callable, Mapping

from atoll.errors import AtollError, LinkError
from atoll.link.net.fixed_member import Fault
from atoll.link.net.rendezvous import Rendezvous
from atoll.link.net.root_cause import FailureReport, root_cause
from atoll.link.seat import Seat

_CLOSED_TOGETHER_S = 0.3  # between connections that close at the same moment, each noticed by itself
_REPORTS_S = 1.0  # for the reports of the others, which notice a failure at once


class Failure:
    """Holds what ends a link, and finds the worker at its root.

    Args:
        seat: This process.
    """

    def __init__(self, seat: Seat) -> None:
        self.error: AtollError | None = None
        """What the link raises, once it is known."""
        self.has_begun = False
        """Whether something has failed, and the rest is a consequence."""
        self.gone: set[int] = set()
        """Workers that have closed their connections."""
        self._seat = seat
        self._lock = threading.Lock()

    @property
    def others(self) -> list[Seat]:
        """The processes that this one exchanges rounds with."""
        return [peer for peer in self._seat.peers() if peer != self._seat]

    def begin(self, fault: Fault) -> bool:
        """Note a fault; return whether it is the first."""
        with self._lock:
            if fault.closed:
                self.gone.add(fault.worker)
            is_first, self.has_begun = not self.has_begun, True
        return is_first

    def inquire(self, fault: Fault, position: str, rendezvous: Rendezvous, part: Callable[[], None]) -> LinkError:
        """Compare what the workers have seen, and return the error that names the root.

        Args:
            fault: What this worker has seen.
            position: The round it is in.
            rendezvous: Where reports are published.
            part: Closes the connections to the others, by which they notice.
        """
        report = FailureReport(fault.worker, fault.why, position, fault.closed)
        reached = rendezvous.try_publish("failure", report._asdict())
        if not reached and report.closed and self._has_closed(0):
            report = report._replace(worker=0)  # its host is gone: another worker only noticed first
        part()
        reports = {self._seat.worker: report}
        if reached:
            for seat, value in rendezvous.poll("failure", self.others, _REPORTS_S).items():
                if (theirs := FailureReport.read(value, self._seat.workers)) is not None:
                    reports[seat.worker] = theirs
            reports |= self._ended_too_early(rendezvous, reports, position)
        return root_cause(self._seat.worker, reports, self._seat.workers, reached=reached)

    def _has_closed(self, worker: int) -> bool:
        """Return whether a worker has closed its connection too, as all do once this one closes its own."""
        until = time.monotonic() + _CLOSED_TOGETHER_S
        while worker not in self.gone and time.monotonic() < until:
            time.sleep(0.01)
        return worker in self.gone

    def _ended_too_early(
        self, rendezvous: Rendezvous, reports: Mapping[int, FailureReport], position: str
    ) -> dict[int, FailureReport]:
        """Return reports for silent workers that finished while this one still had a round to make."""
        silent = [peer for peer in self.others if peer.worker not in reports]
        found = {}
        for seat, last in rendezvous.poll("end", silent).items():
            if isinstance(last, str) and last.removeprefix("after ") != position.removeprefix("after "):
                at = f"all workers must make the same number of steps: {position}"
                found[seat.worker] = FailureReport(seat.worker, f"has finished and left, {last[:100]}", at)
        return found
