"""Computes outer steps and merges: state in, state out, on vectors of any length.

Workers with different processors must get the same bits, so every operation is one that IEEE 754 rounds correctly,
one at a time: no fused multiply-add, and no division by a number, which CUDA turns into a product with its reciprocal.
What was made here is worked on in place: new memory costs a vector more than the arithmetic does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from atoll.errors import ConfigError

Slots = tuple[Tensor, ...]
"""The outer optimizer's vectors beside the anchor: none, (velocity,) or (velocity, variance)."""


def shares_of(weights: Sequence[float]) -> list[float]:
    """Return each weight's part of the whole, 0 to 1."""
    return [weight / sum(weights) for weight in weights]


def weighted_mean(deltas: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of [n] vectors, summed in the order given, so every worker gets the same bits."""
    shares = shares_of(weights)
    mean = deltas[0] * shares[0]
    for delta, share in zip(deltas[1:], shares[1:], strict=True):
        mean += delta * share
    return mean


def _less(anchor: Tensor, move: Tensor) -> Tensor:
    """Return anchor - move, in the memory of `move`, which nobody else has."""
    return torch.sub(anchor, move, out=move)


def _positive(name: str, value: float) -> None:
    if not 0 < value < float("inf"):
        raise ConfigError(f"{name} must be a finite number above 0, got {value}")


def _fraction(name: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be at least 0 and below 1, got {value}: at 1 the past never fades")


@dataclass(frozen=True, slots=True)
class SGD:
    """Steps without momentum: at lr 1 the anchor becomes the mean of the workers (FedAvg)."""

    slot_names: ClassVar[tuple[str, ...]] = ()
    lr: float = 1.0

    def __post_init__(self) -> None:
        _positive("outer lr", self.lr)

    def step(self, anchor: Tensor, slots: Slots, mean: Tensor, count: int) -> tuple[Tensor, Slots]:
        """Return the anchor and slots after one round with this mean delta."""
        return _less(anchor, self.lr * mean), slots

    def remember(self, own: Tensor, delta: Tensor) -> Tensor:
        """Return the worker's own momentum after one more of its deltas: the delta itself, without momentum."""
        return delta

    def reach(self, own: Tensor, delta: Tensor) -> Tensor:
        """Return how far a worker's own deltas move the anchor in one round, before its share and lr."""
        return delta


@dataclass(frozen=True, slots=True)
class Momentum:
    """Steps with heavy-ball momentum: the anchor moves by the velocity."""

    slot_names: ClassVar[tuple[str, ...]] = ("velocity",)
    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        _positive("outer lr", self.lr)
        _fraction("outer momentum", self.momentum)

    def step(self, anchor: Tensor, slots: Slots, mean: Tensor, count: int) -> tuple[Tensor, Slots]:
        """Return the anchor and velocity after one round with this mean delta."""
        velocity = self.remember(slots[0], mean)
        return _less(anchor, self.lr * self.reach(velocity, mean)), (velocity,)

    def remember(self, own: Tensor, delta: Tensor) -> Tensor:
        """Return the decayed sum of deltas after one more."""
        return (self.momentum * own).add_(delta)

    def reach(self, own: Tensor, delta: Tensor) -> Tensor:
        """Return the direction of the step, given the velocity that already includes `delta`."""
        return own


@dataclass(frozen=True, slots=True)
class Nesterov(Momentum):
    """Steps with Nesterov momentum, as torch.optim.SGD(nesterov=True): the default of all three papers."""

    @staticmethod
    def for_workers(workers: int, momentum: float = 0.9) -> "Nesterov":
        """Return the scaling-law study's best outer lr by number of workers: 0.4, 0.6, 0.6, 0.8 at 1, 2, 4, 8."""
        if workers < 1:
            raise ConfigError(f"workers must be at least 1, got {workers}")
        return Nesterov(0.4 if workers == 1 else 0.6 if workers <= 4 else 0.8, momentum)

    def reach(self, own: Tensor, delta: Tensor) -> Tensor:
        """Return the direction of the step, given the velocity that already includes `delta`."""
        return (self.momentum * own).add_(delta)


@dataclass(frozen=True, slots=True)
class Adam:
    """Steps with Adam on the mean delta; the DiLoCo paper found it unstable unless eps is large, hence 0.1."""

    slot_names: ClassVar[tuple[str, ...]] = ("velocity", "variance")
    lr: float = 0.3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 0.1

    def __post_init__(self) -> None:
        _positive("outer lr", self.lr)
        _positive("outer eps", self.eps)
        _fraction("outer beta1", self.beta1)
        _fraction("outer beta2", self.beta2)

    def step(self, anchor: Tensor, slots: Slots, mean: Tensor, count: int) -> tuple[Tensor, Slots]:
        """Return the anchor and both moments after round number `count` (from 1), which corrects their bias."""
        velocity = self.beta1 * slots[0] + (1 - self.beta1) * mean
        variance = self.beta2 * slots[1] + (1 - self.beta2) * (mean * mean)
        unbiased = variance * (1 / (1 - self.beta2**count))
        size = unbiased.double().sqrt_().to(unbiased.dtype) + self.eps  # CUDA's fp32 sqrt is not exact
        return anchor - (self.lr / (1 - self.beta1**count)) * (velocity / size), (velocity, variance)


OuterOptimizer = SGD | Momentum | Nesterov | Adam
LinearOuter = SGD | Momentum | Nesterov
"""Outer optimizers whose steps add up: the sum of the workers' steps is the step of their sum. Eager needs it."""


@dataclass(frozen=True, slots=True)
class Blend:
    """Sets the live parameters to alpha * local + (1 - alpha) * anchor when a round is applied."""

    alpha: float = 0.0
    """How much of the worker's own progress since the send survives: 0 none, 1 all (never synchronised)."""

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"alpha must be between 0 and 1, got {self.alpha}")


@dataclass(frozen=True, slots=True)
class EagerMerge:
    """Lets the anchor lag one period behind; each worker adds its own newest delta on top at once."""


Merge = Blend | EagerMerge


def blend(local: Tensor, anchor: Tensor, alpha: float) -> Tensor:
    """Return the live parameters [n] after an applied round."""
    return (alpha * local).add_((1 - alpha) * anchor)


def eager_start(outer: LinearOuter, anchor: Tensor, own: Tensor, delta: Tensor, share: float) -> Tensor:
    """Return where a worker starts its next period [n]: the lagging anchor plus what its newest delta will do to it.

    `delta` is the worker's newest delta as decoded from its own payload, `own` its memory including that delta,
    `share` the part of the mean that is the worker's own (1/M when all weigh the same).
    """
    return _less(anchor, (outer.lr * share) * outer.reach(own, delta))
