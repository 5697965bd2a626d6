"""Defines the event that records how a run's model scored on an evaluation task."""

from dataclasses import dataclass
from typing import Literal

from atoll.runs.number import Number

Weights = Literal["final", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Reports the accuracy of a run's exported model on a task of lm-evaluation-harness.

    Accuracies are 0 to 1; standard errors are None for a single document.
    """

    event: Literal["scored"] = "scored"
    task: str
    weights: Weights
    """The export that was evaluated: "final" is model/, "best" is best/."""
    documents: int
    accuracy: Number
    """The harness's acc."""
    stderr: float | None
    """Standard error of `accuracy` over the documents; for a group, over the documents of all its tasks."""
    chance: Number
    """The accuracy of random guesses."""
    by_length: float | None = None
    """The harness's acc_norm, which compares choices by log-likelihood per character; None for tasks without it."""
    by_length_stderr: float | None = None
    group: str | None = None
    """The group that the task was evaluated in, such as blimp; a group's score is the mean over its tasks."""
    sha256: str | None = None
    """The SHA-256 of the task's data file, in hex; None for a group."""
