"""A run's events as sentences for people."""

import math

from atoll._util.units import bytes_text, clock_text, count_text, loss_text, seconds_text, share_text
from atoll.runs.events import End, Eval, Event, Fault, Resumed, Saved, Start, Step
from atoll.train.progress.summary import Seen, mean_and_spread


def sentence(event: Event, seen: Seen) -> str:
    """An event as a line; empty for one that is not worth it."""
    if isinstance(event, End):
        return summary(event, seen)
    where = f"{clock_text(seen.seconds):>7}  step {seen.step}" + (f"/{seen.steps}" if seen.steps else "")
    match event:
        case Start():
            return f"{what(event)}, {event.steps} steps"
        case Step():
            parts = [
                f"loss {mean_and_spread(seen.losses)}",
                f"{count_text(event.tokens_per_s)} tokens/s",
                *_traffic(seen),
            ]
            return f"{where}: {', '.join(parts)}{left(seen.left_s, ', ')}"
        case Eval():
            best = "best so far" if event.best else f"best {loss_text(seen.best)}"
            return f"{where}: held-out loss {loss_text(event.loss)}{age(event)}, {best}"
        case Fault():
            return f"{where}: worker {event.worker}: {event.what}"
        case Saved():
            return f"{where}: saved"
        case Resumed():
            return f"{where}: resumed"
    return ""


def age(event: Eval) -> str:
    """Which outer parameters an evaluation was of, if they were not those of its own step."""
    return f" (outer parameters of step {event.anchor_step})" if event.is_behind else ""


def what(start: Start) -> str:
    """What a run is, in a few words."""
    workers = f"{start.workers} worker{'s' if start.workers > 1 else ''}"
    if start.worker is not None and start.workers > 1:
        workers = f"worker {start.worker} of {start.workers}"
    return f"{start.method}, {workers}, {count_text(start.parameters)} parameters, {start.device}"


def summary(end: End, seen: Seen) -> str:
    """The whole run in a line."""
    parts = [
        f"{end.outcome} at step {end.step}" + (f"/{seen.steps}" if seen.steps else ""),
        f"{count_text(end.tokens)} tokens in {clock_text(end.seconds)}",
    ]
    if math.isfinite(end.loss) or not seen.alone:  # one worker measures it for all
        parts.append(f"held-out loss {loss_text(end.loss)} (best {loss_text(end.best_loss)})")
    parts += _traffic(seen)
    if seen.faults:
        parts.append(f"{seen.faults} fault{'' if seen.faults == 1 else 's'}")
    return ", ".join(parts)


def named(seen: Seen, line: str) -> str:
    """A line with the run's name before it, if that is known."""
    return f"{seen.start.name}: {line}" if seen.start else line


def left(seconds: float | None, before: str) -> str:
    """The time left, if there is any telling."""
    return "" if seconds is None else f"{before}{clock_text(seconds)} left"


def computing(seen: Seen) -> str:
    """The share of its time that a worker does not wait."""
    return "-" if seen.utilisation is None else share_text(seen.utilisation)


def _traffic(seen: Seen) -> list[str]:
    """Bytes and waiting; of those, only what there is."""
    parts = [f"{bytes_text(seen.sent)} sent" + ("" if seen.alone else " per worker")]
    if any(seen.wire):
        sent, received = seen.wire
        parts.append(f"on the wire {bytes_text(sent)} out and {bytes_text(received)} in")
    if seen.waits:
        parts.append(f"waited {seconds_text(seen.waited_s)} (computing {computing(seen)})")
    return parts
