"""Keeps what one process of a run has told, thinned as it grows."""

import math
from array import array
from collections import Counter, deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from atoll.report.lanes import Span, wait_until
from atoll.report.record import EventLog
from atoll.runs.events import (
    End,
    Eval,
    Event,
    Failed,
    Fault,
    Joined,
    Lost,
    Members,
    Resumed,
    RoundApplied,
    Saved,
    Start,
    Step,
    Totals,
    utilisation,
)
from atoll.runs.lines import Lines
from atoll.runs.sample import Sample
from atoll.runs.scored import Scored
from atoll.watch.thinning import Series, Thinned, TimeBuckets

MOST_POINTS: Final = 400
"""Points of a curve."""
MOST_KEPT: Final = 200
"""Newest faults, losses, joins and the like that are kept of each kind."""
MOST_FLIGHTS: Final = 2_000_000
"""Newest rounds of a worker whose times are kept one by one, in 40 bytes each."""
_MOST_NUMBERS = 16_000  # points of the curves of all workers together
_FEWEST_POINTS = 20
_WAITING, _FLYING = 0, 1
_WIDTH, _BLOCK = 5, 2048  # numbers of a round, rounds that are searched at once
_RECENT = 64  # step events by which the speed is measured

_KEPT: dict[type, int] = {  # how many of the newest events of each kind
    **dict.fromkeys((Fault, Lost, Joined, Resumed, Scored, RoundApplied), MOST_KEPT),
    Members: 1000,
    Sample: 20,
    Lines: 12,
    Failed: 1,
}


def points_of(workers: int) -> int:
    """Returns the points of each worker's curve, an even number: fewer if there are many workers."""
    return min(MOST_POINTS, max(_FEWEST_POINTS, _MOST_NUMBERS // max(workers, 1) // 2 * 2))


class Flights:
    """Keeps when each round of a worker was under way, one by one; times are Unix times."""

    def __init__(self) -> None:
        self._numbers = array("d")  # of each round begin, end, seconds waited, step, fragment

    def add(self, r: RoundApplied, flight: Span) -> None:
        """Adds a round."""
        if len(self._numbers) >= _WIDTH * MOST_FLIGHTS:
            del self._numbers[: _WIDTH * (MOST_FLIGHTS // 2)]
        self._numbers.extend((flight.begin_s, flight.end_s, r.waited_s, r.step, r.fragment))

    def within(self, window: Span) -> NDArray[np.float64]:
        """Returns rows of begin, end, seconds waited, step and fragment: the rounds under way in a window."""
        found, stop = [], len(self._numbers)
        while stop > 0:  # from the newest on, for most ask about these
            start = max(0, stop - _WIDTH * _BLOCK)
            rows = np.array(self._numbers[start:stop]).reshape(-1, _WIDTH)
            found.append(rows[(rows[:, 0] < window.end_s) & (rows[:, 1] > window.begin_s)])
            if (rows[:, 1] < window.begin_s).all():  # they are applied nearly in the order in which they end
                break
            stop = start
        return np.concatenate(found[::-1]) if found else np.empty((0, _WIDTH))


class WorkerTrack:
    """Keeps the rounds and absences of one worker; times are Unix times."""

    def __init__(self, points: int, began: float) -> None:
        self.flights = Flights()
        self.shares = TimeBuckets(points, began, kinds=2)
        """How long it waited, and how long rounds were on their way."""
        self.applied: dict[int, int] = {}
        """Fragment -> the step of its newest round."""
        self.away: deque[Span] = deque(maxlen=MOST_KEPT)
        """When it did not train, although its process did."""
        self._free = began  # when its last wait was over

    def apply(self, r: RoundApplied, base: float) -> None:
        """Adds a round, whose times are in seconds after `base`."""
        self.applied[r.fragment] = max(r.step, self.applied.get(r.fragment, 0))
        if not (math.isfinite(r.opened_s) and math.isfinite(r.done_s)):
            return
        flight = Span(base + r.opened_s, base + max(r.done_s, r.opened_s))
        self.flights.add(r, flight)
        self.shares.add(_FLYING, flight)
        if (wait := wait_until(flight.end_s, r.waited_s, self._free)) is not None:
            self.shares.add(_WAITING, wait)
            self._free = wait.end_s

    def add_away(self, span: Span) -> None:
        """Adds a time without training; one that touches the last makes it longer."""
        if self.away and self.away[-1].end_s >= span.begin_s:
            span = Span(self.away.pop().begin_s, span.end_s)
        self.away.append(span)


class ProcessLog:
    """Keeps the events of one process, thinned; times are Unix times, or seconds if its begin is not known."""

    def __init__(self, start: Start) -> None:
        self.start = start
        self.base = self.began
        """The time at which the clock of its events was 0; later after a resume."""
        self.newest = self.began
        """The time of its newest event."""
        self.last: Totals | None = None
        self.kept: dict[type, deque[tuple[float, Any]]] = {kind: deque(maxlen=most) for kind, most in _KEPT.items()}
        """Kind of event -> (time, event) of the newest; of rounds those without some of their members."""
        self.faults: Counter[int] = Counter()
        """Worker -> its faults so far; -1 for one that is not of the run."""
        self.missed = 0
        """Payloads so far that rounds had to do without."""
        self.evals: Thinned[Eval] = Thinned(MOST_POINTS)
        self.clock: Thinned[tuple[float, float]] = Thinned(MOST_POINTS)
        """(step, time)."""
        points = points_of(start.workers)
        self.curves = {"loss": Series(points), "speed": Series(MOST_POINTS), "outer": Series(MOST_POINTS)}
        """At (step, tokens, time): loss per worker; tokens a second, utilisation and learning rate; norm and cosine."""
        self.recent: deque[tuple[float, Step]] = deque(maxlen=_RECENT)
        """(time, event) of the last steps since the start or resume."""
        self.tracks = {worker: WorkerTrack(points, self.began) for worker in EventLog(start=start).workers}

    @property
    def began(self) -> float:
        """The Unix time of its first start; 0 if it is not known."""
        return self.start.began if 0 < self.start.began < math.inf else 0.0

    @property
    def end(self) -> End | None:
        """Returns the event that ended it; None while it trains, or if it was killed."""
        return self.last if isinstance(self.last, End) else None

    @property
    def failure(self) -> str:
        """The error that has ended it; empty if none has."""
        return next((event.why or "an error without words" for _, event in self.kept[Failed]), "")

    def log(self) -> EventLog:
        """Returns its start, its newest totals, and what is kept of the other events."""
        names = {"faults": Fault, "resumes": Resumed, "views": Members, "losses": Lost, "joins": Joined}
        kept: dict[str, Any] = {name: tuple(event for _, event in self.kept[kind]) for name, kind in names.items()}
        newest = self.recent[-1][1] if self.recent else self.last
        steps = (newest,) if isinstance(newest, Step) else ()
        scores = tuple(event for _, event in self.kept[Scored])
        return EventLog(
            start=self.start, steps=steps, evals=tuple(self.evals.items()), scores=scores, end=self.end, **kept
        )

    # ---------------------------------------------------------------------- events

    def take(self, event: Event) -> None:
        """Adds an event."""
        match event:
            case RoundApplied():
                self._take_round(event)
            case Step():
                self._take_step(event)
            case Eval() | Saved() | Members() | End() | Resumed() | Lines() | Sample():
                self._take_timed(event)
            case Failed():
                self._pass(event.step, event.seconds)
                self._keep(event)
            case Fault():
                self.faults[event.worker if 0 <= event.worker < self.start.workers else -1] += 1
                self._keep(event)
            case _ if type(event) in self.kept:
                self._keep(event)

    def _keep(self, event: Event) -> None:
        self.kept[type(event)].append((self.newest, event))

    def _pass(self, step: int, seconds: float) -> float:
        """Returns the time of an event, by its clock."""
        if math.isfinite(seconds):
            self.newest = max(self.newest, self.base + seconds)
            self.clock.add((step, self.newest))
        return self.newest

    def _take_timed(self, event: Eval | Saved | Members | End | Resumed | Lines | Sample) -> None:
        before = self.newest
        if isinstance(event, Resumed) and self.began and math.isfinite(event.seconds):
            self.base = max(self.base, event.began - event.seconds)  # as it was if unknown: 0 or NaN
        self._pass(event.step, event.seconds)
        match event:
            case Eval():
                self.evals.add(event)
            case End():
                self.last = event
            case Resumed():
                self.last = None if self.end else self.last
                self.kept[Failed].clear()
                self.recent.clear()
                self._keep(event)
                for track in self.tracks.values() if self.newest > before else ():
                    track.add_away(Span(before, self.newest))
            case Members() | Lines() | Sample():
                self._keep(event)

    def _take_step(self, event: Step) -> None:
        before, at = self.newest, self._pass(event.step, event.seconds)
        place = (event.step, event.tokens, at)
        losses = [event.loss[worker] if worker < len(event.loss) else None for worker in self.tracks]
        self.curves["loss"].add(place, losses)
        if None in losses and at > before:
            for track, loss in zip(self.tracks.values(), losses, strict=True):
                if loss is None:
                    track.add_away(Span(before, at))
        self.kept[Failed].clear()
        earlier = self.recent[-1][1] if self.recent else None
        self.curves["speed"].add(place, (event.tokens_per_s, self._busy_share(earlier, event), event.lr))
        self.recent.append((at, event))
        self.last = event

    def _busy_share(self, before: Step | None, now: Step) -> float | None:
        """Returns the share of the time between two events in which the process's workers did not wait, mean."""
        known = [worker for worker in self.tracks if worker < len(now.wait_s)]
        if before is None or not known or known[-1] >= len(before.wait_s):
            return None
        waited_s = sum(now.wait_s[worker] - before.wait_s[worker] for worker in known) / len(known)
        return utilisation(waited_s, now.seconds - before.seconds)

    def _take_round(self, event: RoundApplied) -> None:
        if (missing := event.expected - len(event.members)) > 0:
            self.missed += missing
            self._keep(event)
        self.curves["outer"].add((event.step, 0, self.newest), (event.norm, event.cosine))
        if (track := self.tracks.get(event.worker)) is not None:
            track.apply(event, self.base)

    # ---------------------------------------------------------------------- speed

    def newest_loss(self, worker: int) -> float | None:
        """Returns the training loss of a worker at the newest step event; None if it is not known."""
        losses = self.recent[-1][1].loss if self.recent else ()
        return losses[worker] if worker < len(losses) else None

    @property
    def interval_s(self) -> float:
        """Seconds between its last step events, mean; 0 if there are fewer than two."""
        if len(self.recent) < 2:
            return 0.0
        return (self.recent[-1][0] - self.recent[0][0]) / (len(self.recent) - 1)

    def rate(self, total: Callable[[Step], float]) -> float | None:
        """Returns how much a total grows in a second, over the last steps; None while it is not known."""
        if len(self.recent) < 2 or self.recent[-1][0] <= self.recent[0][0]:
            return None
        (since, first), (now, last) = self.recent[0], self.recent[-1]
        return max(0.0, total(last) - total(first)) / (now - since)
