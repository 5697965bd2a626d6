"""Vectors on one side, a link on the other: encodes and decodes, counts what passes, refuses what does not fit."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.applied import Products, mean_square
from atoll.core.cargo import MOST_PARTS_EACH, Cargo, MeanResidual
from atoll.core.codec import Codec
from atoll.core.flat import Window, fingerprint, pieces
from atoll.core.guard import SMALLEST, UNKNOWN, Size
from atoll.core.outer import weighted_mean
from atoll.core.shots import sent_bytes
from atoll.errors import LinkError, NonFiniteError
from atoll.kernels import fused
from atoll.late import Late
from atoll.link.base import Contribution, Link, Member, Offer, Pending, Round, RoundId
from atoll.state import Counters

if TYPE_CHECKING:
    from atoll.kernels.fragment import Fused
    from atoll.kernels.live import Live


class Encoding:
    """What kernels are encoding: from which anchor, and whether it can be sent, is known once they are done."""

    def __init__(
        self, made: Contribution, found: Late, read: Callable[[Sequence[int]], tuple[int, float] | None]
    ) -> None:
        self._made = made
        self._found = found
        self._read = read  # no more of the kernels, for links keep offers, and would keep the model

    @property
    def payload(self) -> Tensor:
        """Where it will be, uint8."""
        return self._made.payload

    def settled(self) -> Contribution | None:
        """Wait for it; None if a value of the delta was not finite, or too large."""
        read = self._read(self._found.values)
        if read is None:
            return None
        anchor_fingerprint, norm = read
        member = self._made.member
        size = member.size._replace(norm=norm)
        return replace(self._made, member=replace(member, anchor_fingerprint=anchor_fingerprint, size=size))


class Exchange:
    """One worker's rounds: vectors of `windows[fragment].numel` values go out, means come back."""

    def __init__(
        self,
        link: Link,
        codec: Codec,
        weight: float,
        windows: Sequence[Window],
        trailing: Collection[int] = (),
        *,
        tolerant: bool = False,
        outlier_ratio: float | None = None,
    ) -> None:
        self.link = link
        self.codec = codec
        self.weight = weight
        self.counters = Counters()
        self._windows = windows
        self.fused = [fused(window, codec) for window in windows]
        """By fragment, the kernels that do its arithmetic, where its device has any."""
        self.mean_residuals = [MeanResidual() for _ in windows] if codec.feedback else []
        """By fragment, what this worker's part in reducing means has lost; empty without error feedback."""
        # They apply a round only after they have sent the next, so their anchors are one behind.
        self._trailing = trailing
        self.tolerant = tolerant
        """Of NaNs and infinities: they keep this worker out of the round."""
        self.outlier_ratio = outlier_ratio
        """How many times larger than expected a delta is left out of a round; None: never."""

    def share(self, step: int) -> float:
        """This worker's part, 0 to 1, of a mean over all who are present at this step."""
        return self.weight / sum(self.link.weights(step).values())

    def contribution(
        self, round_id: RoundId, vector: Tensor, *, anchor: Tensor | None, version: int = 0, usual: float | None = None
    ) -> Contribution | None:
        """What this worker puts into a round; None while it is absent, or if the vector is not finite and tolerated.

        `usual` is the norm that its last ones had; without it, the vector is not judged by its size.
        If it is not tolerated, NonFiniteError names the parameter.
        """
        if not self.link.present(round_id.step):
            return None
        try:
            payload = self.codec.encode(vector, self._seed(round_id) + self.link.worker)
        except NonFiniteError as error:
            if self.tolerant:
                return None
            worst = int(vector.abs().nan_to_num(torch.inf).argmax())
            name = self._windows[round_id.fragment].locate(worst)
            raise NonFiniteError(f"worker {self.link.worker}, {round_id}, parameter {name!r}: {error}") from error
        size = UNKNOWN
        if usual is not None:
            size = Size(float(torch.linalg.vector_norm(vector, dtype=torch.float64)), usual)
        anchor_fingerprint = 0 if anchor is None else fingerprint(anchor)
        return Contribution(Member(self.link.worker, self.weight, version, anchor_fingerprint, size), payload)

    def encoding(
        self, round_id: RoundId, start: Tensor, local: "Live", *, anchor: Tensor, version: int, usual: float
    ) -> Encoding:
        """What this worker puts into a round, of start - local, by kernels; does not wait for them."""
        kernels = self.fused[round_id.fragment]
        assert kernels is not None
        payload, found = kernels.encode(start, local, anchor)
        member = Member(self.link.worker, self.weight, version, 0, Size(0.0, usual))
        return Encoding(Contribution(member, payload), Late(found), kernels.read)

    def refusal(self, round_id: RoundId, offer: Offer) -> NonFiniteError:
        """What to say of an offer that could not be sent: the parameter is looked up in what was encoded."""
        window, where = self._windows[round_id.fragment], ""
        if offer.payload.numel():
            values = self.codec.largest(offer.payload, window.numel)
            names = dict.fromkeys(window.locate(index) for index in (values.start, values.stop - 1))
            where = f", parameter {' or '.join(map(repr, names))}"
        at = f"worker {self.link.worker}, {round_id}{where}"
        return NonFiniteError(f"{at}: a value was not finite, or too large to be sent")

    def _seed(self, round_id: RoundId) -> int:
        """Where the seeds of a round's payloads begin, one per worker; the same ones when a run is repeated."""
        return (round_id.step * len(self._windows) + round_id.fragment) * self.link.workers

    def open(self, round_id: RoundId, offer: Offer | None) -> Pending:
        """Send a contribution on its way."""
        if offer is not None:
            self._count_sent(round_id, 1)
        return self.reopen(round_id, offer)

    def reopen(self, round_id: RoundId, offer: Offer | None) -> Pending:
        """Take up a round that was in flight when a run was saved: it has been counted."""
        return self.link.open(round_id, offer, self._cargo(round_id))

    def take_back(self, round_id: RoundId) -> None:
        """Count a round as one that this worker was left out of: its offer could not be sent."""
        self._count_sent(round_id, -1)
        self.counters.rounds_left_out += 1

    def _count_sent(self, round_id: RoundId, rounds: int) -> None:
        self.counters.rounds_sent += rounds
        self.counters.bytes_sent += rounds * self.codec.payload_bytes(self._windows[round_id.fragment].numel)

    def _cargo(self, round_id: RoundId) -> Cargo:
        window = self._windows[round_id.fragment]
        # One for each part, and higher than any payload's, so that no two things round alike; not higher still, for
        # torch's generator takes the low 32 bits.
        seed = 2**31 + MOST_PARTS_EACH * self._seed(round_id)
        residual = self.mean_residuals[round_id.fragment] if self.mean_residuals else None
        ratio = self.ratio_of(round_id.fragment)
        return Cargo(self.codec, window.numel, window.dtype, seed, window.device, tuple(round_id), residual, ratio)

    def ratio_of(self, fragment: int) -> float | None:
        """The outlier ratio by which deltas of this fragment are judged, a larger one if it is small; None: not."""
        ratio, small = self.outlier_ratio, self._windows[fragment].numel < SMALLEST
        return ratio**3 if ratio is not None and small else ratio

    def collect(self, pending: Pending) -> Round:
        """Wait for a round; LinkError if payloads do not fit or the members no longer share one anchor."""
        began = time.perf_counter()
        completed = pending.wait()
        waited_s = time.perf_counter() - began
        self.counters.wait_s += waited_s
        if completed.passage is not None:
            passage = replace(completed.passage, waited_s=waited_s)
            self.counters.hidden_s += passage.hidden_s
            self.counters.wire_sent += passage.sent
            self.counters.wire_received += passage.received
            completed = replace(completed, passage=passage)
        self._check(completed)
        self.counters.bytes_received += self._payload_bytes_received(completed)
        self.counters.rounds_applied += bool(completed.members)
        return completed

    def _payload_bytes_received(self, completed: Round) -> int:
        payload = self.codec.payload_bytes(self._windows[completed.round_id.fragment].numel)
        if completed.reduced is not None:
            members = self.link.weights(completed.round_id.step)
            return sent_bytes(payload, len(members)) if self.link.worker in members else payload
        return payload * sum(m.worker != self.link.worker for m in completed.members)

    def is_complete(self, completed: Round) -> bool:
        """Whether the payloads of all who were present have arrived: the same answer on every worker."""
        return {member.worker for member in completed.members} == self.link.weights(completed.round_id.step).keys()

    def _check(self, completed: Round) -> None:
        expected = self.codec.payload_bytes(self._windows[completed.round_id.fragment].numel)
        for member, payload in zip(completed.members, completed.payloads, strict=bool(completed.payloads)):
            if payload.numel() != expected:
                sent = f"worker {member.worker} sent {payload.numel()} bytes where {expected} were due"
                raise LinkError(f"{completed.round_id}: {sent}")
        leaders: dict[bool, Member] = {}
        for member in completed.members:
            leader = leaders.setdefault(member.worker in self._trailing, member)
            if (member.anchor_version, member.anchor_fingerprint) != (leader.anchor_version, leader.anchor_fingerprint):
                who = f"{completed.round_id}: workers {leader.worker} and {member.worker} have different anchors"
                if member.anchor_version == leader.anchor_version == 0:
                    raise LinkError(f"{who}: they started differently; load the same parameters on each")
                raise LinkError(f"{who}: they have diverged by round {member.anchor_version}")

    def means(self, completed: Round, products: Products | None = None) -> Iterator[tuple[slice, Tensor]]:
        """The mean of a round with members, piece by piece: temporaries stay in cache, no full mean is stored."""
        fragment, weights = completed.round_id.fragment, [member.weight for member in completed.members]
        window, kernels = self._windows[fragment], self.fused[fragment]
        if kernels is not None:
            yield from self._means_by_kernels(completed, kernels, weights, products)
            return
        for piece in pieces(window.numel, window.device):
            decoded: list[Tensor] = []
            if completed.reduced is None or (products is not None and completed.inner is None):
                decoded = [self.decode_piece(payload, fragment, piece) for payload in completed.payloads]
            if completed.reduced is not None:
                mean = self._decode_mean(completed.reduced, window, piece)
            else:
                mean = weighted_mean(decoded, weights)
            if products is not None:
                products.add(decoded, mean)
            yield piece, mean
        if products is not None and completed.inner is not None:
            products.add_inner(completed.inner)

    def _means_by_kernels(
        self, completed: Round, kernels: "Fused", weights: Sequence[float], products: Products | None
    ) -> Iterator[tuple[slice, Tensor]]:
        window, reduced = self._windows[completed.round_id.fragment], completed.reduced
        averaged, of_mean = completed.payloads, kernels
        if reduced is not None:
            averaged, weights, of_mean = (reduced,), [1.0], kernels.for_mean
        stacked = of_mean.stacked(averaged)
        if products is not None and window.numel:
            inner = of_mean.inner_products(stacked)
            seen = inner if reduced is None else self._seen(completed, kernels)
            products.add_known(seen, mean_square(inner, weights))
        for piece in pieces(window.numel, window.device):
            yield piece, of_mean.mean(stacked, weights, piece)

    def _seen(self, completed: Round, kernels: "Fused") -> Tensor:
        """Inner products of the deltas of a round in two shots: as they were sent, or of the payloads that came."""
        if completed.inner is None:
            return kernels.inner_products(kernels.stacked(completed.payloads))
        return completed.inner.to(self._windows[completed.round_id.fragment].device, non_blocking=True)

    def _decode_mean(self, reduced: Tensor, window: Window, piece: slice) -> Tensor:
        values = self.codec.for_mean.decode_piece(reduced, window.numel, piece)
        return values.to(window.device, window.dtype)

    def decode_piece(self, payload: Tensor, fragment: int, piece: slice) -> Tensor:
        """One of the `pieces` of the vector behind a payload of this fragment."""
        window, kernels = self._windows[fragment], self.fused[fragment]
        if kernels is not None:
            return kernels.mean(payload.to(window.device)[None], [1.0], piece)
        return self.codec.decode_piece(payload, window.numel, piece).to(window.device, window.dtype)

    def decode(self, payload: Tensor, fragment: int) -> Tensor:
        """The vector behind a payload of this fragment."""
        window = self._windows[fragment]
        return self.codec.decode(payload.to(window.device), window.numel, window.dtype)
