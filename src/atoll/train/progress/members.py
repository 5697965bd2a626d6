"""Turns changes of the members of an elastic run into events."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from queue import Empty, SimpleQueue

from atoll.link.net.views import Decision
from atoll.runs.events import Event, Joined, Lost, Members

_Change = Decision | tuple[int, str] | Joined


class MembershipLog:
    """Collects changes in the thread of the link; the training thread takes them as events.

    Args:
        worker: This worker.
        min_workers: While fewer train, all pause.
        say: Prints a line that cannot wait: the training thread may be waiting for the others.
    """

    def __init__(self, worker: int, min_workers: int, say: Callable[[str], None]) -> None:
        self._worker = worker
        self._min_workers = min_workers
        self._say = say
        self._is_paused = False  # as the thread of the link last said
        self._changes: SimpleQueue[_Change] = SimpleQueue()
        self._members: dict[int, bool] = {}  # worker -> whether it trains, by the last decision that was written
        self._reasons: dict[int, str] = {}
        self._late: Counter[int] = Counter()  # worker -> rounds that were completed without it

    # ------------------------------------------------------------------ the thread of the link

    def decided(self, decision: Decision) -> None:
        """Note a new view."""
        self._changes.put(decision)
        training = len(decision.view.owing)
        if (paused := training < self._min_workers and not decision.view.over) != self._is_paused:
            self._is_paused = paused
            how = f"{training} worker{'' if training == 1 else 's'}, and link.min_workers is {self._min_workers}"
            self._say(f"paused until others come back: {how}" if paused else f"training goes on: {how}")

    def lost(self, worker: int, why: str) -> None:
        """Note why the connection to a worker has ended."""
        self._changes.put((worker, why))

    # ------------------------------------------------------------------ the training thread

    def joined(self, at: int, since: int | None = None) -> None:
        """Note that this worker has joined a run under way.

        Args:
            at: The step at which it did.
            since: The step that it had come to when it was cut off; None if it had not been there.
        """
        self._changes.put(Joined(step=at, worker=self._worker, at=at, since=since))

    def events(self, step: int, seconds: float) -> Iterator[Event]:
        """Yield what has changed since the last call."""
        while True:
            try:
                change = self._changes.get_nowait()
            except Empty:
                return
            if isinstance(change, Joined):
                yield replace(change, step=step)
            elif isinstance(change, Decision):
                yield from self._events_of(change, step, seconds)
            else:
                self._reasons[change[0]] = change[1]

    def _events_of(self, decision: Decision, step: int, seconds: float) -> Iterator[Event]:
        view, before = decision.view, self._members
        if view.over:
            return  # all leave, one after another
        self._members = {process.seat: process in view.owing for process in view.members}
        for worker in sorted(before.keys() - self._members.keys()):
            yield Lost(step=step, worker=worker, why=self._reasons.pop(worker, "another worker has lost it"))
        training = [worker for worker, trains in self._members.items() if trains]
        following = sorted(self._members.keys() - set(training))
        late = Counter(process.seat for left_behind in decision.left_behind.values() for process in left_behind)
        self._late += late
        yield Members(
            step=step,
            view=view.number,
            members=training,
            following=following,
            boundary=decision.boundary,
            seconds=seconds,
            late={worker: self._late[worker] for worker in sorted(late)},
        )
        for worker in training:
            if worker != self._worker and before.get(worker) is False:
                yield Joined(step=step, worker=worker, at=decision.boundary)
