"""Computes when each worker of an elastic run took part."""

from dataclasses import dataclass, field
from itertools import accumulate

from atoll.report.record import RunRecord


@dataclass(slots=True)
class Presence:
    """Holds when one worker took part, in inner steps of the run."""

    worker: int
    training: list[tuple[int, int]] = field(default_factory=list)
    """From one step to another."""
    following: list[tuple[int, int]] = field(default_factory=list)
    """While it caught up."""
    lost: list[int] = field(default_factory=list)
    """Steps after which it was no longer a member."""
    joined: list[int] = field(default_factory=list)
    """Steps after which it trained again, or for the first time."""

    def share(self, steps: int) -> float:
        """Returns the share of the run's steps, 0 to 1, that it made as a member."""
        return sum(end - begin for begin, end in self.training) / max(steps, 1)


def presences(record: RunRecord) -> list[Presence]:
    """Returns a lane per worker, from the views that any process recorded."""
    found = {worker: Presence(worker) for worker in range(record.start.workers)}
    views = sorted(record.views, key=lambda view: view.view)
    trained: set[int] = set()
    ends = [*accumulate((view.boundary for view in reversed(views[1:])), min)][::-1]
    for n, (view, end) in enumerate(zip(views, [*ends, record.step], strict=False)):
        # A view can begin earlier than the one before, if the worker that was ahead is gone.
        span, training = (view.boundary, max(end, view.boundary)), set(view.members)
        for worker in training & found.keys():
            _extend(found[worker].training, span)
        for worker in set(view.following) & found.keys():
            _extend(found[worker].following, span)
        for worker in (training - trained if n else set()) & found.keys():
            found[worker].joined.append(min(view.boundary, end))
        for worker in (trained - training) & found.keys():
            found[worker].lost.append(min(view.boundary, end))
        trained = training
    return list(found.values())


def _extend(spans: list[tuple[int, int]], span: tuple[int, int]) -> None:
    """Adds a span to those before it, or makes the last one longer."""
    begin, end = span
    while spans and spans[-1][1] >= begin:
        begin = min(begin, spans.pop()[0])
    if end > begin:
        spans.append((begin, end))
