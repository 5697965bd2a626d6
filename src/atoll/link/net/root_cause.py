"""Finds the worker at the root of a failure from the reports of all workers.

A worker that died reports nothing. Of those that report, most have only seen another one close its connections.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from atoll.errors import LinkError


class FailureReport(NamedTuple):
    """Tells the other workers why one of them cannot go on."""

    worker: int
    """The worker to blame, as far as it can see; itself, if it leaves of itself."""
    why: str
    """Continues "worker 3 ..."."""
    round: str
    """The round it failed in."""
    closed: bool = False
    """It has only seen a connection close."""

    @classmethod
    def read(cls, value: Any, workers: int) -> "FailureReport | None":
        """Parse what another worker published; None if it is no report."""
        match value:
            case {"worker": int() as worker, "why": str() as why, "round": str() as at, "closed": bool() as closed}:
                return cls(worker, why[:1000], at[:100], closed) if 0 <= worker < workers else None
        return None


def root_cause(me: int, reports: Mapping[int, FailureReport], workers: int, *, reached: bool) -> LinkError:
    """Make the error that worker `me` raises: it names the round and the root, the same one on every worker.

    Args:
        me: This worker.
        reports: Reporting worker -> its report, this worker's included, as far as they came in time.
        workers: Number of workers.
        reached: Whether the store answered; if not, `reports` holds only this worker's.
    """
    mine = reports[me]
    if mine.worker == me:
        return LinkError(f"{mine.round}: worker {me} {mine.why}", worker=me)
    if not reached:
        if mine.worker == 0:
            return _blame(me, 0, reports)
        problem = f"{mine.round}: worker 0, which hosts the store, does not answer, and worker {mine.worker} {mine.why}"
        return LinkError(problem, worker=0)
    left = {reporter: report for reporter, report in reports.items() if report.worker == reporter}
    silent = [worker for worker in range(workers) if worker not in reports]
    if left:
        root = mine.worker if mine.worker in left else min(left)
    elif silent:
        root = mine.worker if mine.worker in silent else min(silent)
    else:
        root = _follow(me, reports)
    return _blame(me, root, reports)


def _follow(me: int, reports: Mapping[int, FailureReport]) -> int:
    """Follow who blames whom to its end: a worker that was late may have waited for another."""
    at = me if not reports[me].closed else min((t for t, r in reports.items() if not r.closed), default=me)
    known: set[int] = set()
    while at not in known and at in reports and (not reports[at].closed or not known):
        known.add(at)
        at = reports[at].worker
    return at


def _blame(me: int, root: int, reports: Mapping[int, FailureReport]) -> LinkError:
    accusers = {reporter: report for reporter, report in reports.items() if report.worker == root}
    if not accusers:
        mine = reports[me]
        problem = f"{mine.round}: worker {root} is gone without a word, and so worker {mine.worker} {mine.why}"
        return LinkError(problem, worker=root)
    # What a worker reports of itself counts for more than what others saw of it.
    reporter = min(accusers, key=lambda worker: (accusers[worker].closed, worker != root, worker != me, worker))
    report = accusers[reporter]
    if root == me:
        problem = f"{report.round}: worker {reporter} has reported of this one, worker {me}, that it {report.why}"
        return LinkError(problem, worker=me)
    died = " without a word: it was killed, or has crashed" if report.closed and root not in reports else ""
    source = "" if reporter in (me, root) else f" (as worker {reporter} has reported)"
    return LinkError(f"{report.round}: worker {root} {report.why}{died}{source}", worker=root)
