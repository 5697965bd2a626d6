"""Sums over the inner steps of a run: losses, tokens and seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds the means since the last report; lists have one entry per worker, None if it did not train."""

    losses: list[float | None]
    """Mean loss over the worker's steps, nats per token."""
    norms: list[float | None]
    """Norm of its last gradient, before clipping."""
    step_s: float
    """Mean seconds of one inner step of one worker, without waiting."""
    tokens_per_s: float
    """Tokens per second of all workers."""
    participants: int
    """Workers that trained."""


class Totals:
    """Sums up the inner steps of all workers; losses stay on their device until they are read."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self.tokens = 0
        """Tokens trained on by all workers."""
        self.seconds = 0.0
        """Seconds spent on the run."""
        self._trained_s = 0.0
        self._worker_steps = 0
        self._clear()

    def _clear(self) -> None:
        self._losses: list[list[Tensor]] = [[] for _ in range(self._workers)]
        self._norms: list[Tensor | None] = [None] * self._workers
        self._interval_s, self._interval_trained_s, self._interval_tokens = 0.0, 0.0, 0

    def add(
        self,
        losses: Mapping[int, Tensor],
        norms: Mapping[int, Tensor],
        tokens_each: int,
        seconds: float,
        waited_s: float = 0.0,
    ) -> None:
        """Add one inner step.

        Args:
            losses: Loss of each worker that trained, a scalar on any device.
            norms: Gradient norm of each of them, before clipping.
            tokens_each: Tokens that each trained on.
            seconds: How long the step took.
            waited_s: How much of that was waiting for rounds.
        """
        for worker, loss in losses.items():
            self._losses[worker].append(loss)
            self._norms[worker] = norms[worker]
        self.tokens += tokens_each * len(losses)
        self.seconds += seconds
        self._trained_s += seconds - waited_s
        self._worker_steps += len(losses)
        self._interval_s += seconds
        self._interval_trained_s += seconds - waited_s
        self._interval_tokens += tokens_each * len(losses)

    def take(self) -> Interval:
        """Return the means since the last call, and start again."""
        steps = sum(map(len, self._losses))
        interval = Interval(
            losses=[torch.stack(losses).mean().item() if losses else None for losses in self._losses],
            norms=[None if norm is None else norm.item() for norm in self._norms],
            step_s=self._interval_trained_s / max(1, steps),
            tokens_per_s=self._interval_tokens / self._interval_s if self._interval_s else 0.0,
            participants=sum(bool(losses) for losses in self._losses),
        )
        self._clear()
        return interval

    @property
    def is_finite(self) -> bool:
        """Whether the losses since the last report and the last norms are finite; waits for their device."""
        values = [loss for losses in self._losses for loss in losses]
        values += [norm for norm in self._norms if norm is not None]
        return bool(torch.stack(values).isfinite().all()) if values else True

    @property
    def step_s(self) -> float:
        """Mean seconds of one inner step of one worker over the whole run, without waiting."""
        return self._trained_s / max(1, self._worker_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return all sums, with those of an unfinished interval."""
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "trained_s": self._trained_s,
            "worker_steps": self._worker_steps,
            "interval_s": self._interval_s,
            "interval_trained_s": self._interval_trained_s,
            "interval_tokens": self._interval_tokens,
            "losses": [list(losses) for losses in self._losses],
            "norms": list(self._norms),
        }

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a state; losses move to this device."""
        self.tokens, self.seconds = state["tokens"], state["seconds"]
        self._trained_s, self._worker_steps = state["trained_s"], state["worker_steps"]
        self._interval_s, self._interval_tokens = state["interval_s"], state["interval_tokens"]
        self._interval_trained_s = state["interval_trained_s"]
        self._losses = [[loss.to(device) for loss in losses] for losses in state["losses"]]
        self._norms = [None if norm is None else norm.to(device) for norm in state["norms"]]
