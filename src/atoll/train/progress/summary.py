"""Summarises the events of a run up to any moment, and writes them as lines of text."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

from atoll._util.units import bytes_text, clock_text, count_text, loss_text, seconds_text, share_text
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
    utilisation,
)
from atoll.runs.evidence import AnchorMoved, Began, Excluded
from atoll.runs.lines import Lines
from atoll.runs.sample import Sample
from atoll.runs.scored import Scored

KEPT = 18
"""Evaluations that the sparkline shows."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The state of one run by its events so far; immutable, because another thread draws it."""

    start: Start | None = None
    last: Step | None = None
    end: End | None = None
    evals: tuple[float, ...] = ()
    """The last held-out losses, nats per token."""
    evaluated: Eval | None = None
    """The last evaluation."""
    best: float = math.nan
    faults: int = 0
    step: int = 0
    seconds: float = 0.0
    """Seconds since the run's start, over resumes."""
    marks: tuple[tuple[int, float], ...] = ()
    """(step, seconds) of up to three moments: the start or resume, the first log after it, the last log."""
    heard: float = 0.0
    """When the last Step event came, by time.monotonic()."""

    @classmethod
    def of(cls, events: Iterable[Event]) -> Self:
        """Return the summary of some events."""
        run = cls()
        for event in events:
            run = run.after(event)
        return run

    def after(self, event: Event) -> Self:
        """Return the summary after one more event."""
        match event:
            case Start():
                return type(self)(start=event, marks=((0, 0.0),))
            case RoundApplied() | Lines() | Sample() | Scored() | Failed() | Began() | AnchorMoved() | Excluded():
                return self
            case Fault():
                return replace(self, step=event.step, faults=self.faults + 1)
            case Members() | Lost() | Joined():
                return replace(self, step=event.step)
        now = replace(self, step=event.step, seconds=event.seconds)
        match event:
            case Resumed():
                return replace(now, end=None, marks=((event.step, event.seconds),))
            case Step():
                marks = (*self.marks[:2], (event.step, event.seconds))
                return replace(now, last=event, end=None, marks=marks, heard=time.monotonic())
            case Eval():
                best = event.loss if not self.best <= event.loss else self.best
                return replace(now, evals=(*self.evals, event.loss)[-KEPT:], evaluated=event, best=best)
            case End():
                return replace(now, end=event)
        return now

    @property
    def steps(self) -> int | None:
        """Steps of the whole run, once known."""
        return self.start.steps if self.start else None

    @property
    def step_s(self) -> float | None:
        """Seconds per step, everything included, since the start or resume; without the first steps (compiling)."""
        if len(self.marks) < 2:
            return None
        (begin, began), (now, seconds) = self.marks[-2:]
        return (seconds - began) / (now - begin) if now > begin else None

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, counted down between events; None while unknown."""
        if self.end is not None:
            return 0.0
        if self.last is None or self.steps is None or self.step_s is None:
            return None
        return max(0.0, self.step_s * (self.steps - self.last.step) - (time.monotonic() - self.heard))

    @property
    def losses(self) -> list[float]:
        """The last training losses of the workers that have one, nats per token."""
        losses = self.last.loss if self.last else []
        return [loss for loss in losses if loss is not None and math.isfinite(loss)]

    @property
    def alone(self) -> bool:
        """Whether this process trains only one of several workers."""
        return self.start is not None and self.start.worker is not None and self.start.workers > 1

    @property
    def sent(self) -> float:
        """Mean payload bytes that a worker has sent; NaN while unknown."""
        return self._mean_per_worker("bytes_sent")

    @property
    def wire(self) -> tuple[float, float]:
        """Mean bytes that a worker has sent and received on the wire; 0 inside one process."""
        sent, received = self._mean_per_worker("wire_sent"), self._mean_per_worker("wire_received")
        return (0.0 if math.isnan(sent) else sent), (0.0 if math.isnan(received) else received)

    @property
    def waited_s(self) -> float:
        """Mean seconds that a worker has waited for rounds; NaN while unknown."""
        return self._mean_per_worker("wait_s")

    @property
    def utilisation(self) -> float | None:
        """Share of its time in which a worker did not wait; None while unknown."""
        source = self.end or self.last
        return utilisation(self.waited_s, source.seconds) if source else None

    @property
    def waits(self) -> bool:
        """Whether waiting is worth showing: there is a wire, or it costs at least 0.5 % of the time."""
        return any(self.wire) or (self.utilisation is not None and self.utilisation < 0.995)

    def _mean_per_worker(self, name: str) -> float:
        """Return the mean of a counter over the workers of this process."""
        source = self.end or self.last
        values: list[float] = getattr(source, name) if source else []
        mine = self.start.worker if self.start else None
        return mean(values if mine is None else values[mine : mine + 1])


# ---- several numbers in few characters


def mean(values: Sequence[float]) -> float:
    """Return the mean; NaN of no values."""
    return sum(values) / len(values) if values else math.nan


def mean_and_spread(losses: Sequence[float]) -> str:
    """Return the mean and the range: 4.321 (4.28-4.36)."""
    spread = f" ({min(losses):.2f}-{max(losses):.2f})" if len(losses) > 1 else ""
    return loss_text(mean(losses)) + spread


def sparkline(values: Sequence[float]) -> str:
    """Return a curve of block characters; values that are not finite are blanks."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((value - low) * scale)] if math.isfinite(value) else " " for value in values)


# ---- lines


def event_line(event: Event, run: RunSummary) -> str:
    """Return an event as a line, given the run's summary after it; empty for one not worth a line."""
    where = f"{clock_text(run.seconds):>7}  step {run.step}" + (f"/{run.steps}" if run.steps else "")
    match event:
        case End():
            return end_line(event, run)
        case Start():
            return f"{run_title(event)}, {event.steps} steps"
        case Step():
            loss, speed = f"loss {mean_and_spread(run.losses)}", f"{count_text(event.tokens_per_s)} tokens/s"
            return f"{where}: {', '.join([loss, speed, *_traffic(run)])}{time_left(run.left_s, ', ')}"
        case Eval():
            best = "best so far" if event.best else f"best {loss_text(run.best)}"
            of_step = f" (outer parameters of step {event.anchor_step})" if event.is_behind else ""
            return f"{where}: held-out loss {loss_text(event.loss)}{of_step}, {best}"
        case Fault():
            return f"{where}: worker {event.worker}: {event.what}"
        case Members():
            behind = f", {_workers(event.following)} catching up" if event.following else ""
            late = "".join(f"; worker {w} is late, rounds without it so far: {n}" for w, n in event.late.items())
            return f"{where}: view {event.view} from step {event.boundary + 1}: {_workers(event.members)}{behind}{late}"
        case Lost():
            return f"{where}: worker {event.worker} is gone: {event.why}"
        case Joined():
            again = f"was cut off at step {event.since} and is back" if event.since is not None else "has joined"
            return f"{where}: worker {event.worker} {again} at step {event.at}"
        case Saved():
            return f"{where}: saved"
        case Resumed():
            return f"{where}: resumed"
    return ""


def _workers(numbers: Sequence[int]) -> str:
    return f"worker{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def run_title(start: Start) -> str:
    """Return a run's method, workers, size and device."""
    workers = f"{start.workers} worker{'s' if start.workers > 1 else ''}"
    if start.worker is not None and start.workers > 1:
        workers = f"worker {start.worker} of {start.workers}"
    return f"{start.method}, {workers}, {count_text(start.parameters)} parameters, {start.device}"


def end_line(end: End, run: RunSummary) -> str:
    """Return the whole run in a line."""
    parts = [
        f"{end.outcome} at step {end.step}" + (f"/{run.steps}" if run.steps else ""),
        f"{count_text(end.tokens)} tokens in {clock_text(end.seconds)}",
    ]
    if math.isfinite(end.loss) or not run.alone:  # one worker evaluates for all
        parts.append(f"held-out loss {loss_text(end.loss)} (best {loss_text(end.best_loss)})")
    parts += _traffic(run)
    if run.faults:
        parts.append(f"{run.faults} fault{'' if run.faults == 1 else 's'}")
    return ", ".join(parts)


def with_name(run: RunSummary, line: str) -> str:
    """Put the run's name, if known, before a line."""
    return f"{run.start.name}: {line}" if run.start else line


def time_left(seconds: float | None, before: str) -> str:
    """Return the time left after the text `before`; empty while unknown."""
    return "" if seconds is None else f"{before}{clock_text(seconds)} left"


def computing_share(run: RunSummary) -> str:
    """Return the share of its time in which a worker does not wait for rounds."""
    return "-" if run.utilisation is None else share_text(run.utilisation)


def _traffic(run: RunSummary) -> list[str]:
    """Return bytes sent, bytes on the wire and waiting, without those that are zero."""
    parts = [f"{bytes_text(run.sent)} sent" + ("" if run.alone else " per worker")]
    if any(run.wire):
        sent, received = run.wire
        parts.append(f"on the wire {bytes_text(sent)} out and {bytes_text(received)} in")
    if run.waits:
        parts.append(f"waited {seconds_text(run.waited_s)} (computing {computing_share(run)})")
    return parts
