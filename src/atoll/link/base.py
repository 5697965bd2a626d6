"""Defines what the outer loop needs from a link: `Link`, and the values that pass through it."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from atoll.core.allreduce import Reduction
from atoll.core.outliers import UNKNOWN, Size, outliers
from atoll.errors import ConfigError, LinkError
from atoll.link.seat import Seat

LEFT_OUT = "left out"
"""Stands for a term that one of two workers does not have."""
STEPS_MADE = "inner steps made (load the same checkpoint on all)"
"""The term with which workers compare how far they are when they start together."""
_MAX_DIFFERENCES = 3  # shown in full; the rest is counted


class RoundId(NamedTuple):
    """Names one exchange of one fragment: the inner step it was sent after, and the fragment's number."""

    step: int
    fragment: int
    last: bool = False
    """The exchange of what remains at the end of a run, after any regular round of the same step."""

    def __str__(self) -> str:
        return f"step {self.step}, fragment {self.fragment}{', the last exchange' if self.last else ''}"


@dataclass(frozen=True, slots=True)
class Member:
    """Describes a worker that takes part in a round, and the anchor its delta was taken from."""

    worker: int
    weight: float
    """Its share of the mean, before normalisation."""
    anchor_version: int
    """Rounds applied so far to the anchor."""
    anchor_fingerprint: int
    """Hash of the anchor's bits; workers with the same version must have the same."""
    size: Size = UNKNOWN
    """Norm of its delta, and of its last ones."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """Holds what one worker puts into a round."""

    member: Member
    payload: Tensor
    """The encoded delta, uint8; not changed after it is handed over."""

    def settled(self) -> "Contribution":
        """Return itself: a contribution is an Offer that is ready."""
        return self


class Offer(Protocol):
    """Holds one worker's contribution to a round, which a GPU may still be computing."""

    @property
    def payload(self) -> Tensor:
        """The buffer that holds the payload, or will."""

    def settled(self) -> Contribution | None:
        """Wait in any thread until it is computed; None if it cannot be sent. The answer never changes."""


@dataclass(frozen=True, slots=True)
class TransferStats:
    """Times and bytes of one round as one worker saw it; times are seconds of time.perf_counter()."""

    opened_s: float
    done_s: float
    """When the last byte was there."""
    sent_bytes: int = 0
    """Bytes on the wire, headers included; inside one process 0, or what an emulated line carries."""
    received_bytes: int = 0
    waited_s: float = 0.0
    """Seconds during which the worker only waited for the round."""

    @property
    def hidden_s(self) -> float:
        """Seconds during which the round travelled while the worker trained."""
        return max(0.0, self.done_s - self.opened_s - self.waited_s)


@dataclass(frozen=True, slots=True)
class Round:
    """Holds a completed exchange, the same on every worker; members are in ascending worker order."""

    round_id: RoundId
    members: tuple[Member, ...]
    payloads: tuple[Tensor, ...]
    """The members' payloads, uint8; empty where only their mean came back."""
    reduced: Tensor | None = None
    """The encoded mean, uint8, of a two-shot round; None where every worker takes the mean itself."""
    outliers: tuple[Member, ...] = ()
    """Members whose payloads arrived and were left out for their size."""
    inner: Tensor | None = None
    """Inner products of the members' deltas, fp64 [members, members], where no payloads come back."""
    complete: bool | None = None
    """Whether the payloads of all who were due have arrived; None if the members tell."""
    transfer: TransferStats | None = field(default=None, compare=False)
    between: tuple[int, ...] = ()
    """Workers between which the link made it, and that reduced its parts if it took two shots; () if unknown."""


class Pending(Protocol):
    """A round in flight."""

    def wait(self) -> Round:
        """Block until the round is complete; LinkError names the missing worker."""


@dataclass(frozen=True, slots=True)
class FragmentState:
    """Holds what all workers have alike of one fragment, for a worker that joins."""

    fragment: int
    applied: int
    """The step up to which all rounds of the fragment have been applied to it, and none after."""
    counts: Mapping[str, int]
    """Such as the anchor's version."""
    vectors: Mapping[str, Tensor]
    """The anchor and the outer optimizer's slots, [numel] on the CPU."""


class Admission(Protocol):
    """Leads a worker into a run that is under way. The worker receives all rounds, and sends once it is promoted."""

    def states(self, fragments: int) -> Iterator[FragmentState]:
        """Yield what the members have alike of every fragment, in order; all rounds after it reach this worker."""

    def newest_step(self) -> int:
        """Return a step that some member has come to, the newest known here whose rounds are sure to be completed."""

    def promote(self) -> int:
        """Become a member that sends, and return the last step whose rounds do without this worker.

        Call it when little is left to catch up with: from the next step on, the others wait for this worker.
        """


class Link(Protocol):
    """Carries one worker's rounds; a link moves bytes and does no arithmetic.

    Implementations inherit from it: what is defined here fits a link whose members are fixed and whose worker is one
    rank.
    """

    worker: int
    workers: int
    elastic: bool = False
    """Whether workers may join and leave while others train."""
    unfinished: bool = False
    """Whether an outer loop has joined and not called finish(): then the workers hold different models."""

    def join(
        self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None
    ) -> "Admission | None":
        """Join the other workers; LinkError names the terms in which another worker differs.

        Args:
            terms: What all workers must agree on, such as the period and the codec.
            weight: This worker's share of every mean, before normalisation.
            start: Further terms of workers that start, or resume, together.

        Returns:
            How to catch up with the others, if they are under way; None if all start together.
        """

    def rejoin(self) -> "Admission":
        """Join again after an ExcludedError."""
        problem = f"worker {self.worker} cannot join again: the members of this link are fixed"
        raise LinkError(problem, worker=self.worker)

    def present(self, step: int) -> bool:
        """Return whether this worker is a member during this inner step; known for this step and the next."""
        return True

    def trains(self, step: int) -> bool:
        """Return whether this worker makes this inner step: not if it is absent, or too slow and skips it."""
        return True

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers that are present at this step."""

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round without waiting for the offer; with None, the worker only receives the result."""

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note how far this worker is.

        Args:
            step: The inner steps that it has made.
            applied: The step up to which it has applied all rounds.
            save: Returns a copy of what all workers have alike of a fragment; the link may call it before it returns.
        """
        return

    def on_any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of this worker; a collective call of its ranks."""
        return value

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Publish a value and return that of every process, in worker order; all processes call it.

        Args:
            key: A name; if it is used again, all processes use it equally often.
            value: JSON; the others' must be of the same type.
            within_s: Seconds to wait for the others; None for the link's own patience.
        """
        if self.workers > 1:
            problem = f"link must be made by atoll.connect(...), got {type(self).__name__}"
            raise ConfigError(f"{problem}: {self.workers} workers tell each other {key!r} through it", setting="link")
        return {Seat(self.worker, 1): value}

    def check(self) -> None:
        """Raise the LinkError of a round that has failed since, so that no worker trains on in vain."""
        return

    def close(self, reason: str | None = None) -> None:
        """Leave for good; a reason, given when leaving before the end, is told to waiting workers."""


def warn_unfinished(link: Link) -> None:
    """Warn of a worker that ends in order, but without finish()."""
    if link.unfinished:
        warnings.warn(
            f"worker {link.worker} ended without outer.finish(): the workers hold different models; call finish() on "
            "every worker after the last step",
            stacklevel=3,
        )


def split_outliers(
    arrived: Sequence[Contribution], reduction: Reduction
) -> tuple[list[Contribution], tuple[Member, ...]]:
    """Split contributions into those that enter the mean and the members left out for their size."""
    out = outliers([contribution.member.size for contribution in arrived], reduction.outlier_ratio)
    counted = [contribution for contribution, is_out in zip(arrived, out, strict=True) if not is_out]
    return counted, tuple(c.member for c, is_out in zip(arrived, out, strict=True) if is_out)


def describe_differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Describe at most three differing terms, as "period: 5 against 6; codec: ..."; None if all are equal.

    Of fragments' layouts and of parameters only the first that differs is described.
    """
    differ = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    firsts = {" ".join(key.split()[:2]).rstrip("s"): key for key in reversed(differ)}  # "layout of", "frozen parameter"
    chosen = [key for key in differ if key in firsts.values()][:_MAX_DIFFERENCES]
    shown = [f"{key}: {mine.get(key, LEFT_OUT)} against {theirs.get(key, LEFT_OUT)}" for key in chosen]
    more = [f"and {len(differ) - len(chosen)} more"] if len(differ) > len(chosen) else []
    return "; ".join(shown + more) or None
