"""Who is at the root of a failure, from what the workers have told of each other.

The one that is gone tells nothing. Of those that do, most have only seen that another one closed its connections.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class FailureReport(NamedTuple):
    """What one worker tells when it can go on no longer."""

    worker: int
    """Who is to blame, as far as it can see; itself, if it leaves for reasons of its own."""
    why: str
    """In words that follow "worker 3"."""
    round: str
    """In which round."""
    closed: bool = False
    """All it has seen is a connection that closed."""

    @classmethod
    def read(cls, said: Any, workers: int) -> "FailureReport | None":
        """What another worker has left in the store, if it is a report."""
        match said:
            case {"worker": int() as worker, "why": str() as why, "round": str() as at, "closed": bool() as closed}:
                return cls(worker, why[:1000], at[:100], closed) if 0 <= worker < workers else None
        return None


def root_cause(me: int, reports: Mapping[int, FailureReport], workers: int, *, reached: bool) -> str:
    """What to tell the user of worker `me`: the round and the worker at the root; the same one on every worker.

    `reports` are those that came in time, with one's own; without the store (not `reached`) there are no others.
    """
    mine = reports[me]
    if mine.worker == me:
        return f"{mine.round}: worker {me} {mine.why}"
    if not reached:
        if mine.worker == 0:
            return _told(me, 0, reports)
        return f"{mine.round}: worker 0, where all meet, does not answer, and worker {mine.worker} {mine.why}"
    left = {teller: report for teller, report in reports.items() if report.worker == teller}
    silent = [worker for worker in range(workers) if worker not in reports]
    if left:
        root = mine.worker if mine.worker in left else min(left)
    elif silent:
        root = mine.worker if mine.worker in silent else min(silent)
    else:
        root = _follow(me, reports)
    return _told(me, root, reports)


def _follow(me: int, reports: Mapping[int, FailureReport]) -> int:
    """Along what workers have seen for themselves: who was late may have waited for another."""
    at = me if not reports[me].closed else min((t for t, r in reports.items() if not r.closed), default=me)
    known: set[int] = set()
    while at not in known and at in reports and (not reports[at].closed or not known):
        known.add(at)
        at = reports[at].worker
    return at


def _told(me: int, root: int, reports: Mapping[int, FailureReport]) -> str:
    accusers = {teller: report for teller, report in reports.items() if report.worker == root}
    if not accusers:
        mine = reports[me]
        return f"{mine.round}: worker {root} is gone without a word, and so worker {mine.worker} {mine.why}"
    # What it says of itself counts for more than what was seen of it.
    teller = min(accusers, key=lambda worker: (accusers[worker].closed, worker != root, worker != me, worker))
    report = accusers[teller]
    if root == me:
        return f"{report.round}: worker {teller} has told of this one, worker {me}, that it {report.why}"
    died = " without a word: it was killed, or has crashed" if report.closed and root not in reports else ""
    source = "" if teller in (me, root) else f" (as worker {teller} has told)"
    return f"{report.round}: worker {root} {report.why}{died}{source}"
