"""Defines the event of a text that a run's model has written."""

from dataclasses import dataclass
from typing import Literal

from atoll.runs.number import Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Reports a text sampled from the outer parameters at an evaluation."""

    event: Literal["sample"] = "sample"
    step: int
    seconds: Number
    """Seconds since the run's start, by the clock of Step.seconds."""
    prompt: str
    """The beginning of the held-out text, the same at every evaluation."""
    text: str
    """How the model continues it."""
