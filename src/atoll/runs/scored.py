"""Defines the event of a model that was evaluated on a task."""

from dataclasses import dataclass
from typing import Literal

from atoll.runs.number import Number

Weights = Literal["final", "best"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """Reports the accuracy of a run's exported model on a task of lm-evaluation-harness.

    Shares are 0 to 1; standard errors are None for a single document.
    """

    event: Literal["scored"] = "scored"
    task: str
    weights: Weights
    """The export: model/ or best/."""
    documents: int
    accuracy: Number
    """The harness's acc."""
    stderr: float | None
    """Standard error of `accuracy` over the documents; of a group, over those of all its tasks."""
    chance: Number
    """The accuracy of guesses."""
    by_length: float | None = None
    """The harness's acc_norm, by the log-likelihood per character of a choice; None for tasks that do not have it."""
    by_length_stderr: float | None = None
    group: str | None = None
    """The group that the task was evaluated as a part of, whose score is the mean of its tasks."""
    sha256: str | None = None
    """The digest of the task's file, in hex; None for a group."""
