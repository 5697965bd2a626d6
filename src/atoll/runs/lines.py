"""Defines the event of the lines between one worker and the others."""

from dataclasses import dataclass
from typing import Literal

from atoll.runs.number import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Lines:
    """Reports what a worker exchanges with each other worker; lists have one entry per worker of the run.

    Workers of one process exchange nothing that travels, and have no such event.
    """

    event: Literal["lines"] = "lines"
    step: int
    seconds: Number
    """Seconds since the run's start, by the clock of Step.seconds."""
    worker: int
    """The worker that reports."""
    sent_bytes: list[int]
    """Bytes of payloads and states put on the wire to each worker so far, over resumes; 0 for itself."""
    received_bytes: list[int]
    """Bytes that came from each worker so far."""
    capacity: list[float | None]
    """Measured speed of the line to each worker, bytes/s, while there is something to send; None: not measured yet."""
