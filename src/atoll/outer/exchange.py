"""Opens rounds of vectors on a link, waits for them, checks them and counts what passes."""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

from atoll.core.allreduce import MOST_PARTS_EACH, MeanResidual, Reduction, sent_bytes
from atoll.core.codec import Codec
from atoll.core.flat import Window
from atoll.core.outliers import SMALLEST
from atoll.errors import LinkError
from atoll.link.base import Link, Member, Offer, Pending, Round, RoundId
from atoll.outer.stats import Counters


class Exchange:
    """Exchanges one worker's vectors with the others, a round at a time."""

    def __init__(
        self,
        link: Link,
        codec: Codec,
        weight: float,
        windows: Sequence[Window],
        *,
        trailing: Collection[int] = (),
        outlier_ratio: float | None = None,
    ) -> None:
        self.link = link
        self.codec = codec
        self.member = Member(link.worker, weight, 0, 0)
        """This worker, as every one of its contributions names it."""
        self.windows = windows
        self.counters = Counters()
        self.mean_residuals = [MeanResidual() for _ in windows] if codec.feedback else []
        """By fragment, what this worker's part in reducing means has lost; empty without error feedback."""
        self._trailing = trailing  # workers that apply a round only after they have sent the next: one anchor behind
        self.outlier_ratio = outlier_ratio
        """How many times larger than expected a delta is left out of a round; None: never."""

    def seed(self, round_id: RoundId) -> int:
        """Return the seed of this worker's payload in a round: the same when a run is repeated."""
        return self._seeds(round_id) + self.link.worker

    def _seeds(self, round_id: RoundId) -> int:
        return (round_id.step * len(self.windows) + round_id.fragment) * self.link.workers

    def share(self, step: int) -> float:
        """Return this worker's part, 0 to 1, of a mean over all who are present at this step."""
        return self.member.weight / sum(self.link.weights(step).values())

    def open(self, round_id: RoundId, offer: Offer | None) -> Pending:
        """Start a round with what this worker offers, and count it."""
        if offer is not None:
            self._count_sent(round_id, 1)
        return self.reopen(round_id, offer)

    def reopen(self, round_id: RoundId, offer: Offer | None) -> Pending:
        """Start a round that was in flight when a run was saved: it has been counted."""
        window = self.windows[round_id.fragment]
        # A seed for each part, higher than any payload's, so that no two things round alike; not higher still, for
        # torch's generator takes the low 32 bits.
        seed = 2**31 + MOST_PARTS_EACH * self._seeds(round_id)
        residual = self.mean_residuals[round_id.fragment] if self.mean_residuals else None
        ratio = self.ratio_of(round_id.fragment)
        reduction = Reduction(
            self.codec, window.numel, window.dtype, seed, window.device, tuple(round_id), residual, ratio
        )
        return self.link.open(round_id, offer, reduction)

    def take_back(self, round_id: RoundId) -> None:
        """Count a round as one without this worker: its offer could not be sent."""
        self._count_sent(round_id, -1)
        self.counters.rounds_left_out += 1

    def _count_sent(self, round_id: RoundId, rounds: int) -> None:
        self.counters.rounds_sent += rounds
        self.counters.bytes_sent += rounds * self.codec.payload_bytes(self.windows[round_id.fragment].numel)

    def ratio_of(self, fragment: int) -> float | None:
        """Return the outlier ratio for deltas of this fragment, a larger one if it is small; None: not judged."""
        ratio, small = self.outlier_ratio, self.windows[fragment].numel < SMALLEST
        return ratio**3 if ratio is not None and small else ratio

    def collect(self, pending: Pending) -> Round:
        """Wait for a round; LinkError if payloads do not fit or the members no longer share one anchor."""
        began = time.perf_counter()
        completed = pending.wait()
        waited_s = time.perf_counter() - began
        self.counters.wait_s += waited_s
        if completed.transfer is not None:
            transfer = replace(completed.transfer, waited_s=waited_s)
            self.counters.hidden_s += transfer.hidden_s
            self.counters.wire_sent += transfer.sent_bytes
            self.counters.wire_received += transfer.received_bytes
            completed = replace(completed, transfer=transfer)
        payload_bytes = self.codec.payload_bytes(self.windows[completed.round_id.fragment].numel)
        self._check(completed, payload_bytes)
        self.counters.bytes_received += self._received(completed, payload_bytes)
        self.counters.rounds_applied += bool(completed.members)
        return completed

    def _received(self, completed: Round, payload_bytes: int) -> int:
        if completed.reduced is None:
            return payload_bytes * sum(m.worker != self.link.worker for m in completed.members)
        members = self.link.weights(completed.round_id.step)
        return sent_bytes(payload_bytes, len(members)) if self.link.worker in members else payload_bytes

    def is_complete(self, completed: Round) -> bool:
        """Return whether the payloads of all who were present have arrived: the same answer on every worker."""
        if completed.complete is not None:
            return completed.complete
        return {member.worker for member in completed.members} == self.link.weights(completed.round_id.step).keys()

    def _check(self, completed: Round, payload_bytes: int) -> None:
        for member, payload in zip(completed.members, completed.payloads, strict=bool(completed.payloads)):
            if payload.numel() != payload_bytes:
                sent = f"worker {member.worker} sent {payload.numel()} bytes where {payload_bytes} were due"
                raise LinkError(f"{completed.round_id}: {sent}")
        leaders: dict[bool, Member] = {}
        for member in completed.members:
            leader = leaders.setdefault(member.worker in self._trailing, member)
            if (member.anchor_version, member.anchor_fingerprint) != (leader.anchor_version, leader.anchor_fingerprint):
                who = f"{completed.round_id}: workers {leader.worker} and {member.worker} have different anchors"
                if member.anchor_version == leader.anchor_version == 0:
                    raise LinkError(f"{who}: they started differently; load the same parameters on each")
                raise LinkError(f"{who}: they have diverged by round {member.anchor_version}")
