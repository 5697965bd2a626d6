"""Takes one round of this worker from its offer to the completed `Round`: stages, cuts, reduces and joins payloads.

The training thread makes it and waits for it. What takes long, waiting for a GPU and reducing, runs in threads of the
link; nothing here sends or receives.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures import Future
from dataclasses import replace

import torch

from atoll.core.allreduce import Reduction, shots
from atoll.link.base import Contribution, Offer, Round, RoundId, TransferStats, split_outliers
from atoll.link.net.messages import PartMean
from atoll.link.net.staging import staging_for
from atoll.link.net.views import Attempt, Process

_MEANWHILE_S = 0.05


class BadPayloadError(Exception):
    """A member has sent something that does not fit its round; the text continues "worker 3 ..."."""

    def __init__(self, sender: Process, why: str) -> None:
        super().__init__(why)
        self.sender = sender


class OpenRound:
    """Holds one round that this worker has opened.

    Args:
        round_id: The round.
        offer: What this worker contributes; None for nothing.
        reduction: How its payloads are reduced.
    """

    def __init__(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> None:
        self.round_id = round_id
        self.reduction = reduction
        self.opened_s = time.perf_counter()
        self._offer = offer
        self._staging = staging_for(reduction.device)
        self._own: Contribution | None = None
        self._on_host: Contribution | None = None
        self._completed: Future[Round] = Future()

    # ------------------------------------------------------------------ what this worker puts in

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for: no device computes the payload, or has it."""
        return self.reduction.device.type == "cpu" and (self._offer is None or isinstance(self._offer, Contribution))

    def settle(self) -> None:
        """Wait for the offer, and bring its payload to the host; called in a thread of the link."""
        self._staging.enter_thread()
        self._own = None if self._offer is None else self._offer.settled()
        self.opened_s = time.perf_counter()
        if self._own is not None:
            self._on_host = replace(self._own, payload=self._staging.to_host(self._own.payload))

    @property
    def whole(self) -> Contribution | None:
        """The payload; None if this worker has nothing to contribute."""
        return self._on_host

    def part_count(self, members: int) -> int:
        """Return the number of parts in two shots between this many members."""
        return self.reduction.part_count(members)

    def part(self, part: int, members: int) -> Contribution | None:
        """Return one part of the payload."""
        if self._on_host is None:
            return None
        count = self.part_count(members)
        return replace(self._on_host, payload=self.reduction.cut(self._on_host.payload, part, count))

    # ------------------------------------------------------------------ what comes back

    def reduce(self, part: int, payloads: Mapping[Process, Contribution | None]) -> PartMean:
        """Return the mean of one part between all members; called in a thread of the link."""
        count = self.part_count(len(payloads))
        due = self.reduction.part_bytes(part, count)
        for process, sent in payloads.items():
            if sent is not None and sent.payload.numel() != due:
                why = f"sent {sent.payload.numel()} bytes of part {part} where {due} were due"
                raise BadPayloadError(process, why)
        there, outliers = split_outliers([sent for sent in payloads.values() if sent is not None], self.reduction)
        inner = torch.zeros(len(there), len(there), dtype=torch.float64, device="cpu")
        if not there:
            return PartMean((), outliers, None, inner)
        members = tuple(process.seat for process in payloads)
        weights = [sent.member.weight for sent in there]
        mean = self.reduction.reduced([sent.payload for sent in there], weights, part, count, members, inner)
        return PartMean(tuple(sent.member for sent in there), outliers, mean, inner)

    def in_one_shot(self, payloads: Mapping[Process, Contribution | None]) -> Round:
        """Make the round of whole payloads, in seat order."""
        arrived = [self._own if sent is self._on_host else sent for sent in payloads.values()]
        there, outliers = split_outliers([sent for sent in arrived if sent is not None], self.reduction)
        own, to_device = self._own, self._staging.to_device
        tensors = tuple(c.payload if c is own else to_device(c.payload) for c in there)
        return Round(self.round_id, tuple(c.member for c in there), tensors, outliers=outliers)

    def in_two_shots(self, means: Sequence[PartMean]) -> Round:
        """Make the round of the means of all its parts, in order."""
        first = means[0]
        if any((mean.members, mean.outliers) != (first.members, first.outliers) for mean in means):
            raise ValueError("its reducers counted different members")
        if first.mean is None:
            return Round(self.round_id, (), (), outliers=first.outliers)
        parts = [mean.mean for mean in means if mean.mean is not None]
        inner = torch.stack([mean.inner for mean in means]).sum(0)
        reduced = self._staging.to_device(self.reduction.joined(parts))
        return Round(self.round_id, first.members, (), reduced, first.outliers, inner)

    def note_reduced(self, attempt: Attempt) -> None:
        """Note between which members the round was cut, for the residuals of later ones."""
        if self.reduction.residual is not None and shots(len(attempt.members)) == 2:
            seats = tuple(member.seat for member in attempt.members)
            self.reduction.residual.note(self.reduction.order, seats)

    def complete(self, completed: Round, sent_bytes: int, received_bytes: int) -> None:
        """Give the round to the training thread, unless it has failed."""
        transfer = TransferStats(self.opened_s, time.perf_counter(), sent_bytes, received_bytes)
        if not self._completed.done():
            self._completed.set_result(replace(completed, transfer=transfer))

    def fail(self, error: Exception) -> None:
        """Raise this error in the training thread, unless the round is complete."""
        if not self._completed.done():
            self._completed.set_exception(error)

    @property
    def done(self) -> bool:
        """Whether the round is complete, or has failed."""
        return self._completed.done()

    def wait(self, meanwhile: Callable[[], None] = lambda: None) -> Round:
        """Block until the round is complete, and call `meanwhile` every now and then."""
        while not self._completed.done():
            meanwhile()
            futures.wait([self._completed], _MEANWHILE_S)
        completed = self._completed.result()
        self._staging.wait_on_current_stream()
        return completed
