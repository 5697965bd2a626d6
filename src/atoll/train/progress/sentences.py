"""Writes a run's events as lines of text."""

import math

from atoll._util.units import bytes_text, clock_text, count_text, loss_text, seconds_text, share_text
from atoll.runs.events import End, Eval, Event, Fault, Resumed, Saved, Start, Step
from atoll.train.progress.summary import RunSummary, mean_and_spread


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
        case Saved():
            return f"{where}: saved"
        case Resumed():
            return f"{where}: resumed"
    return ""


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
