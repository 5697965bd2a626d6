"""What a round looked like once it was applied: who took part, how far their mean went, how alike they were."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from atoll.link.base import Round, RoundId


@dataclass(frozen=True, slots=True)
class Applied:
    """One applied round, the same on every worker that watches."""

    round_id: RoundId
    step: int
    """The inner step it was applied after."""
    members: tuple[int, ...]
    """Workers whose payloads arrived."""
    norm: float
    """Length of the mean delta, the outer gradient."""
    cosine: float | None
    """Cosine similarity of two members' deltas, averaged over all pairs; None with fewer than two."""


Observer = Callable[[Applied], None]


class Products:
    """Sums up the inner products of the members' deltas, piece by piece, in fp64."""

    def __init__(self, members: int) -> None:
        self._sums = torch.zeros(members, members, dtype=torch.float64)

    def add(self, decoded: Sequence[Tensor]) -> None:
        """Take in the same piece of every member's delta, each [values]."""
        rows = torch.stack(list(decoded)).double()
        self._sums += (rows @ rows.T).cpu()

    def applied(self, completed: Round, step: int) -> Applied:
        """What the round that was summed up looked like."""
        members, sums = completed.contributions, self._sums
        weights = torch.tensor([c.weight for c in members], dtype=torch.float64)
        weights /= weights.sum()
        lengths = sums.diagonal().sqrt()
        cosines = sums / lengths.outer(lengths)
        pairs = cosines[torch.ones_like(cosines, dtype=torch.bool).triu(1)].nan_to_num()  # a worker that did not move
        return Applied(
            round_id=completed.round_id,
            step=step,
            members=tuple(c.worker for c in members),
            norm=math.sqrt(max(0.0, float(weights @ sums @ weights))),
            cosine=float(pairs.mean()) if len(pairs) else None,
        )
