"""Vectors on one side, a link on the other: encodes and decodes, counts what passes, refuses what does not fit."""

import time
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from atoll.applied import Products
from atoll.core.codec import Codec
from atoll.core.flat import Window, fingerprint, pieces
from atoll.core.outer import weighted_mean
from atoll.errors import LinkError, NonFiniteError
from atoll.link.base import Contribution, Link, Pending, Round, RoundId
from atoll.state import Counters


class Exchange:
    """One worker's rounds: vectors of `windows[fragment].numel` values go out, means come back."""

    def __init__(
        self,
        link: Link,
        codec: Codec,
        weight: float,
        windows: Sequence[Window],
        late: Collection[int] = (),
        *,
        tolerant: bool = False,
    ) -> None:
        self.link = link
        self.codec = codec
        self.weight = weight
        self.counters = Counters()
        self._windows = windows
        self._late = late  # workers that apply a round only after they have sent the next: their anchors trail by one
        self._tolerant = tolerant  # of NaNs and infinities: they keep this worker out of the round

    def share(self, step: int) -> float:
        """This worker's part, 0 to 1, of a mean over all who are present at this step."""
        return self.weight / sum(self.link.weights(step).values())

    def contribution(
        self, round_id: RoundId, vector: Tensor, *, anchor: Tensor | None = None, version: int = 0
    ) -> Contribution | None:
        """What this worker puts into a round; None while it is absent, or if the vector is not finite and tolerated.

        If it is not tolerated, NonFiniteError names the parameter.
        """
        if not self.link.present(round_id.step):
            return None
        try:
            # Another seed for every payload, and the same one when a run is repeated.
            seed = (round_id.step * len(self._windows) + round_id.fragment) * self.link.workers + self.link.worker
            payload = self.codec.encode(vector, seed)
        except NonFiniteError as error:
            if self._tolerant:
                return None
            worst = int(vector.abs().nan_to_num(torch.inf).argmax())
            name = self._windows[round_id.fragment].locate(worst)
            raise NonFiniteError(f"worker {self.link.worker}, {round_id}, parameter {name!r}: {error}") from error
        anchor_fingerprint = 0 if anchor is None else fingerprint(anchor)
        return Contribution(self.link.worker, self.weight, payload, version, anchor_fingerprint)

    def open(self, round_id: RoundId, contribution: Contribution | None) -> Pending:
        """Send a contribution on its way."""
        if contribution is not None:
            self.counters.rounds_sent += 1
            self.counters.bytes_sent += contribution.payload.numel()
        return self.link.open(round_id, contribution)

    def collect(self, pending: Pending) -> Round:
        """Wait for a round; LinkError if payloads do not fit or the members no longer share one anchor."""
        start = time.perf_counter()
        completed = pending.wait()
        self.counters.wait_s += time.perf_counter() - start
        self._check(completed)
        others = [c.payload.numel() for c in completed.contributions if c.worker != self.link.worker]
        self.counters.bytes_received += sum(others)
        self.counters.rounds_applied += bool(completed.contributions)
        return completed

    def is_complete(self, completed: Round) -> bool:
        """Whether the payloads of all who were present have arrived: the same answer on every worker."""
        return {c.worker for c in completed.contributions} == self.link.weights(completed.round_id.step).keys()

    def _check(self, completed: Round) -> None:
        expected = self.codec.payload_bytes(self._windows[completed.round_id.fragment].numel)
        leaders: dict[bool, Contribution] = {}
        for c in completed.contributions:
            if c.payload.numel() != expected:
                sent = f"worker {c.worker} sent {c.payload.numel()} bytes where {expected} were due"
                raise LinkError(f"{completed.round_id}: {sent}")
            leader = leaders.setdefault(c.worker in self._late, c)
            if (c.anchor_version, c.anchor_fingerprint) != (leader.anchor_version, leader.anchor_fingerprint):
                who = f"{completed.round_id}: workers {leader.worker} and {c.worker} have different anchors"
                if c.anchor_version == leader.anchor_version == 0:
                    raise LinkError(f"{who}: they started differently; load the same parameters on each")
                raise LinkError(f"{who}: they have diverged by round {c.anchor_version}")

    def means(self, completed: Round, products: Products | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The mean of a round with members, piece by piece: temporaries stay in cache, no full mean is stored."""
        fragment, members = completed.round_id.fragment, completed.contributions
        for piece in pieces(self._windows[fragment].numel):
            decoded = [self.decode_piece(member.payload, fragment, piece) for member in members]
            if products is not None:
                products.add(decoded)
            yield piece, weighted_mean(decoded, [member.weight for member in members])

    def decode_piece(self, payload: Tensor, fragment: int, piece: slice) -> Tensor:
        """One of the `pieces` of the vector behind a payload of this fragment."""
        window = self._windows[fragment]
        return self.codec.decode_piece(payload, window.numel, piece).to(window.device, window.dtype)

    def decode(self, payload: Tensor, fragment: int) -> Tensor:
        """The vector behind a payload of this fragment."""
        window = self._windows[fragment]
        return self.codec.decode(payload, window.numel, window.dtype).to(window.device)
