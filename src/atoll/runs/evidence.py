"""Defines the events of anchors.jsonl, from which `atoll replay` makes the rounds of an elastic run again.

The file has `Began`, `Members`, `AnchorMoved`, `Excluded` and `Joined` events of one worker. Unlike metrics.jsonl it is
never cut: what a worker did between its last checkpoint and its death has entered the others' anchors.
"""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Began:
    """Reports that a process has begun to train a worker."""

    event: Literal["began"] = "began"
    worker: int
    checkpoint: int | None
    """The step of the checkpoint that it has loaded; None if it has none."""
    joined: int | None
    """The step after which it trains with the others, if they were under way; None if all started together."""
    ranks: int = 1
    """Ranks of the worker. Where each holds a part of the model, fingerprints are of the first one's part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorMoved:
    """Reports the members of an applied round, and the anchor after it."""

    event: Literal["anchor"] = "anchor"
    step: int
    """The step after which it was sent."""
    fragment: int
    last: bool
    """Whether it is the exchange at the end of a run."""
    applied: int
    """The step after which it was applied."""
    members: list[int]
    """Workers whose payload counted."""
    outliers: list[int]
    """Workers whose payload arrived and was left out for its size."""
    between: list[int]
    """Workers between which the round was made."""
    version: int
    """Rounds applied to the anchor, with this one."""
    fingerprint: str
    """Hash of the anchor's bits after it, 16 hexadecimal digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Excluded:
    """Reports that a worker has learnt that the others went on without it; it joins again."""

    event: Literal["excluded"] = "excluded"
    steps: int
    """Steps that its outer loop had counted."""


Evidence = Began | AnchorMoved | Excluded
