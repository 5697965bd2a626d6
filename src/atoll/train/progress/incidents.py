"""Decides when a run needs somebody's attention: pure, from what its workers do and the time.

An incident begins once and is over once, and each is one alert. All workers of an elastic run follow what happens, and
the lowest that trains tells it.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from atoll._util.units import clock_text

Kind = Literal["stalled", "lost", "diverged", "failed"]
ABOVE: Final = (1.0, 0.5)
"""A loss has diverged if it is above the lowest so far by these many nats, and by this share of it."""
STEADY: Final = 3
"""Measurements in a row after which a loss has recovered: one that jumps up and down is one incident."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Tells that something has gone wrong, or that it is over."""

    kind: Kind
    recovered: bool = False
    """Whether it is over."""
    step: int
    about: int | None = None
    """The worker that it is about; None: the run."""
    text: str


@dataclass(slots=True)
class _Absence:
    """Holds since when a worker is gone, and why."""

    since_s: float
    why: str
    is_told: bool = False


class Incidents:
    """Follows one run; times are seconds of a clock that never goes back.

    Args:
        worker: This worker of an elastic run; None if members are fixed: then every process tells what it sees.
        stall_s: Seconds without a step after which a run is stalled.
        lost_s: Seconds after which a worker that is gone counts as lost.
        now_s: The time.
    """

    def __init__(self, worker: int | None, stall_s: float, lost_s: float, now_s: float) -> None:
        self._worker = worker
        self._stall_s, self._lost_s = stall_s, lost_s
        self._step, self._moved_s = 0, now_s
        self._is_stalled = self._has_diverged = False
        self._lowest, self._steady = math.inf, 0
        self._training: frozenset[int] = frozenset()
        self._gone: dict[int, _Absence] = {}

    @property
    def _tells(self) -> bool:
        """Whether this worker is the lowest of those that train and that it is connected to."""
        return self._worker is None or self._worker == min(self._training - self._gone.keys(), default=None)

    def _alerts(self, *found: Alert) -> list[Alert]:
        return list(found) if self._tells else []

    # ------------------------------------------------------------------ the time

    def look(self, step: int, now_s: float, *, done: bool = False) -> list[Alert]:
        """Return what has become too long; call it every second or so.

        Args:
            step: Inner steps made so far.
            now_s: The time.
            done: Whether all steps are made: what follows may take its time.
        """
        return self._look_at_steps(step, now_s, done) + self._look_at_workers(now_s)

    def _look_at_steps(self, step: int, now_s: float, done: bool) -> list[Alert]:
        quiet_s = now_s - self._moved_s
        if step != self._step or done:
            self._step, self._moved_s = step, now_s
            if not self._is_stalled:
                return []
            self._is_stalled = False
            text = f"steps are made again, after {clock_text(quiet_s)} without one"
            return self._alerts(Alert(kind="stalled", recovered=True, step=step, text=text))
        if self._is_stalled or quiet_s < self._stall_s:
            return []
        self._is_stalled = True
        text = f"no step was made for {clock_text(quiet_s)}; the last one was step {step}"
        return self._alerts(Alert(kind="stalled", step=step, text=text))

    def _look_at_workers(self, now_s: float) -> list[Alert]:
        found = []
        for worker, absence in self._gone.items():
            if not absence.is_told and now_s - absence.since_s >= self._lost_s:
                absence.is_told = True
                text = f"worker {worker} has been gone for {clock_text(now_s - absence.since_s)}: it {absence.why}"
                found.append(Alert(kind="lost", step=self._step, about=worker, text=text))
        return self._alerts(*found)

    # ------------------------------------------------------------------ losses

    def measured(self, step: int, losses: Sequence[float | None]) -> list[Alert]:
        """Compare the mean loss of the workers here, nats per token, with the lowest so far; None: did not train."""
        known = [loss for loss in losses if loss is not None]
        if not known:
            return []
        loss = sum(known) / len(known)
        bound = self._lowest + max(ABOVE[0], ABOVE[1] * self._lowest)
        is_good = math.isfinite(loss) and loss <= bound
        self._steady = self._steady + 1 if is_good else 0
        text = f"the training loss is {loss:.3f} at step {step}"
        if is_good:
            self._lowest = min(self._lowest, loss)
            if not self._has_diverged or self._steady < STEADY:
                return []
            self._has_diverged = False
            return self._alerts(Alert(kind="diverged", recovered=True, step=step, text=f"{text} again"))
        if self._has_diverged:
            return []
        self._has_diverged = True
        lowest = f"; its lowest was {self._lowest:.3f}" if math.isfinite(self._lowest) else ""
        return self._alerts(Alert(kind="diverged", step=step, text=f"{text}{lowest}"))

    # ------------------------------------------------------------------ members

    def members(self, training: Collection[int], all_of_them: Collection[int], now_s: float) -> list[Alert]:
        """Note the members of an elastic run.

        Args:
            training: Workers that train.
            all_of_them: These, and workers that catch up.
            now_s: The time.
        """
        left = self._training - set(all_of_them)
        self._training = frozenset(training)
        for worker in left - self._gone.keys():
            self._gone[worker] = _Absence(now_s, "was lost by the others")
        back = [worker for worker in sorted(self._gone) if worker in all_of_them]
        found = []
        for worker in back:
            absence = self._gone.pop(worker)
            if absence.is_told:
                text = f"worker {worker} is back, after {clock_text(now_s - absence.since_s)}"
                found.append(Alert(kind="lost", recovered=True, step=self._step, about=worker, text=text))
        return self._alerts(*found)

    def disconnected(self, worker: int, why: str, now_s: float) -> None:
        """Note that the connection to a worker has ended; `why` continues "worker 3 ..."."""
        if worker in self._training:
            self._gone.setdefault(worker, _Absence(now_s, why))

    def over(self) -> None:
        """Note that the run has ended, and all leave."""
        self._gone.clear()

    # ------------------------------------------------------------------ the end

    def failed(self, step: int, why: str) -> list[Alert]:
        """Return that this process ends with an error, which nobody else can tell."""
        return [Alert(kind="failed", step=step, about=self._worker, text=f"training has ended with an error: {why}")]
