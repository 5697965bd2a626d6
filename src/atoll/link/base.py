"""The whole contract between the outer loop and what carries its rounds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from atoll.core.allreduce import Reduction
from atoll.core.guard import UNKNOWN, Size, outliers

LEFT_OUT = "left out"
"""How a term is shown that one of two has not."""
MOST_TOLD = 3
"""Differences that are named; where there are more, the rest is counted."""


class RoundId(NamedTuple):
    """One exchange of one fragment: the inner step it was sent after, and the fragment's number."""

    step: int
    fragment: int
    last: bool = False
    """The exchange of what is left at the end of a run, after any regular one of the same step."""

    def __str__(self) -> str:
        return f"step {self.step}, fragment {self.fragment}{', the last exchange' if self.last else ''}"


@dataclass(frozen=True, slots=True)
class Member:
    """A worker that took part in a round, and where it stood."""

    worker: int
    weight: float
    """Its part in the mean, before normalisation."""
    anchor_version: int
    """Rounds applied so far to the anchor that the delta was taken from."""
    anchor_fingerprint: int
    """Of that anchor's bits; workers with the same version must have the same."""
    size: Size = UNKNOWN
    """How large its delta is, and its last ones were."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one worker puts into a round."""

    member: Member
    payload: Tensor
    """The encoded delta, uint8; not changed after it is handed over."""

    def settled(self) -> "Contribution":
        """Itself, as an Offer."""
        return self


class Offer(Protocol):
    """What one worker puts into a round, made or still in the making on a GPU."""

    @property
    def payload(self) -> Tensor:
        """Where it is, or will be."""

    def settled(self) -> Contribution | None:
        """Wait for it, in whatever thread; None if it turns out that it cannot be sent. Always the same answer."""


@dataclass(frozen=True, slots=True)
class Passage:
    """What a round took, as one worker saw it; times are those of time.perf_counter(), seconds."""

    opened_s: float
    done_s: float
    """When the last of it was there."""
    sent: int = 0
    """Bytes put on the wire, headers included; inside one process 0, or what an emulated line carries."""
    received: int = 0
    waited_s: float = 0.0
    """For how long the worker did nothing but wait for it."""

    @property
    def hidden_s(self) -> float:
        """For how long it travelled while the worker trained."""
        return max(0.0, self.done_s - self.opened_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class Round:
    """A completed exchange, the same on every worker: who took part, in ascending worker order."""

    round_id: RoundId
    members: tuple[Member, ...]
    payloads: tuple[Tensor, ...]
    """Of the members, uint8; empty where only the mean of them all came back."""
    reduced: Tensor | None = None
    """The encoded mean, uint8, of a round in two shots; otherwise whoever wants the mean takes it."""
    outliers: tuple[Member, ...] = ()
    """Whose payloads arrived and were left out for their size."""
    inner: Tensor | None = None
    """Inner products of the members' deltas, fp64 [members, members], where they come back without payloads."""
    passage: Passage | None = field(default=None, compare=False)


class Pending(Protocol):
    """A round under way."""

    def wait(self) -> Round:
        """Block until the round is complete; LinkError names the worker that is missing."""


class Link(Protocol):
    """One worker's end of what carries rounds; it moves bytes and does no arithmetic."""

    worker: int
    workers: int

    def join(self, terms: Mapping[str, str], weight: float) -> None:
        """Say what all must agree on; LinkError names the differences to another worker."""

    def present(self, step: int) -> bool:
        """Whether this worker is a member during this inner step; known for the current step and the next."""

    def trains(self, step: int) -> bool:
        """Whether it makes this inner step: false when absent, or when it is too slow and skips it."""

    def weights(self, step: int) -> Mapping[int, float]:
        """Worker -> weight of all who are present at this step."""

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; None takes part in nothing and still learns the result. Does not wait for the offer."""

    def on_any_rank(self, so: bool) -> bool:
        """Whether it is `so` on some rank of this worker, where ranks hold parts of it; all of them ask."""

    def check(self) -> None:
        """Raise the LinkError of a round that has failed meanwhile, so that nobody trains on for nothing."""

    def close(self, reason: str | None = None) -> None:
        """Leave for good; with a reason, before the end: whoever waits for this worker is told."""


def admitted(arrived: Sequence[Contribution], reduction: Reduction) -> tuple[list[Contribution], tuple[Member, ...]]:
    """Split what has arrived into the contributions that count and the members that are left out for their size."""
    out = outliers([contribution.member.size for contribution in arrived], reduction.outlier_ratio)
    counted = [contribution for contribution, is_out in zip(arrived, out, strict=True) if not is_out]
    return counted, tuple(c.member for c, is_out in zip(arrived, out, strict=True) if is_out)


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """What is not the same of the terms, as "period: 5 against 6; codec: ...", at most three; None if all is."""
    differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    told = [f"{key}: {mine.get(key, LEFT_OUT)} against {theirs.get(key, LEFT_OUT)}" for key in differ[:MOST_TOLD]]
    more = [f"and {len(differ) - MOST_TOLD} more"] if len(differ) > MOST_TOLD else []
    return "; ".join(told + more) or None
