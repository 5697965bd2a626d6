"""Carries one round between a worker and the others, in one shot or two, in a thread that waits.

Transfers that share a line compete unfairly, and the slowest decides when the round ends. So not all is sent at once.
In one shot members take turns: in turn t, member m sends to m + t and receives from m - t, and the next turn begins
when that has nearly arrived. In two shots, parts go in stripes, one part of every member each; while one stripe is
reduced and its means are sent, the next is on its way.
"""

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from atoll.core.allreduce import Reduction, shots
from atoll.errors import LinkError
from atoll.link.base import Contribution, Member, Offer, Round, RoundId, TransferStats, split_outliers
from atoll.link.net.staging import staging_for
from atoll.link.net.wire import (
    HEADER_BYTES,
    IncomingMessage,
    MessageKind,
    MessageSpec,
    OutgoingMessage,
    PeerConnections,
    PeerError,
    pack,
)

OVERLAP_BYTES = 1 << 20
"""Bytes that may be missing of one turn when the next begins, so that no line idles for a latency."""
STRIPES_AHEAD = 2
"""Stripes that are sent before the first of them must be reduced, for the same reason."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """Describes a round that this worker opens."""

    round_id: RoundId
    offer: Offer | None
    """What this worker contributes; None for nothing."""
    reduction: Reduction
    tag: int
    """Tag of its messages; the second shot uses the next number."""
    deadline_s: float
    after: threading.Event | None = None
    """Set once the fragment's previous round is reduced, if its residual enters this one (error feedback)."""


class RoundTransfer:
    """Carries one round of this worker; `on_end` is called once, with its error or None."""

    def __init__(
        self,
        request: TransferRequest,
        connections: PeerConnections,
        worker: int,
        workers: int,
        on_end: Callable[["RoundTransfer", Exception | None], None],
    ) -> None:
        self.round_id = request.round_id
        self._request = request
        self._connections = connections
        self._worker, self._workers = worker, workers
        self._turns = [((worker + turn) % workers, (worker - turn) % workers) for turn in range(1, workers)]
        self._peers = [receiver for receiver, _ in self._turns]
        self._on_end = on_end
        self._opened_s = time.perf_counter()
        self._staging = staging_for(request.reduction.device)
        self._own: Contribution | None = None
        self._timer: threading.Timer | None = None
        self._incoming: list[IncomingMessage] = []
        self._outgoing: list[OutgoingMessage] = []
        self._sent = 0
        self._missing: PeerError | None = self._too_late(worker, "was not ready to send")
        self.reduced = threading.Event()
        """Set once this worker has reduced its parts, or has given up."""
        self._done = threading.Event()
        self._completed: Round | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Carry the round; runs in its own thread."""
        try:
            self._staging.enter_thread()
            completed = self._two_shots() if shots(self._workers) == 2 else self._one_shot()
            completed = self._on_device(completed)
            received = sum(incoming.spec.message_bytes for incoming in self._incoming)
            transfer = TransferStats(self._opened_s, time.perf_counter(), self._sent, received)
            self._completed = replace(completed, transfer=transfer)
            self._done.set()
            for outgoing in self._outgoing:
                self._missing = self._too_late(outgoing.receiver, "did not take what it was sent")
                outgoing.wait()
            self._missing = None
        except Exception as fault:  # of any kind: callers wait for this thread
            self._on_end(self, fault)
        else:
            self._on_end(self, None)
        finally:
            self.reduced.set()
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None  # breaks a reference cycle
            self._incoming, self._outgoing = [], []  # frees their buffers

    @property
    def complete(self) -> bool:
        """Whether all has arrived; this worker's own messages may still be on their way."""
        return self._completed is not None

    def wait(self) -> Round:
        """Block until the round is complete; LinkError names the missing worker."""
        self._done.wait()
        if self._completed is None:
            raise self._error or LinkError(f"{self.round_id}: the link was closed", round_id=self.round_id)
        self._staging.wait_on_current_stream()
        return self._completed

    def give_up(self, error: Exception) -> None:
        """Raise this error in every caller of `wait`."""
        self._error = error
        self._done.set()

    def _on_deadline(self) -> None:
        if (missing := self._missing) is not None:
            self._on_end(self, missing)

    def _too_late(self, worker: int, what: str) -> PeerError:
        cause = "it was stopped or cut off, or the link is too slow for this round"
        return PeerError(worker, f"{what} within {self._request.deadline_s:g} s: {cause}")

    def _on_device(self, completed: Round) -> Round:
        """Return the round with all payloads on their device; this worker's own is there already."""
        own, to_device = None if self._own is None else self._own.payload, self._staging.to_device
        payloads = tuple(payload if payload is own else to_device(payload) for payload in completed.payloads)
        reduced = None if completed.reduced is None else to_device(completed.reduced)
        return replace(completed, payloads=payloads, reduced=reduced)

    # ------------------------------------------------------------------ shots

    def _settled(self) -> Contribution | None:
        """Wait for this worker's contribution; the round's clock starts when it is computed."""
        offer = self._request.offer
        self._own = None if offer is None else offer.settled()
        self._opened_s = time.perf_counter()
        # Not gloo's timeout: that closes all connections before other workers can be told why.
        self._timer = threading.Timer(self._request.deadline_s, self._on_deadline)
        self._timer.daemon = True
        self._timer.start()
        return self._own

    def _one_shot(self) -> Round:
        """Send every payload to every member."""
        at, reduction = self.round_id, self._request.reduction
        due = {peer: self._expect(MessageSpec.whole(at, peer, reduction)) for peer in self._peers}
        mine = self._settled()
        if self._peers:
            spec = MessageSpec.whole(at, self._worker, reduction)
            message = self._staging.buffer(spec.message_bytes)
            if mine is not None:
                self._staging.copy_to_host(mine.payload, message[HEADER_BYTES:])
            message = pack(spec, mine, message)
            for receiver, sender in self._turns:
                self._send(message, receiver)
                self._wait_until_nearly_there(due[sender])
        there, outliers = split_outliers(self._arrived(mine, due.values()), reduction)
        return Round(at, tuple(c.member for c in there), tuple(c.payload for c in there), outliers=outliers)

    def _two_shots(self) -> Round:
        """Send every part to the member that reduces it, and the mean of each part to every member."""
        at, reduction, me, members = self.round_id, self._request.reduction, self._worker, self._workers
        count = reduction.part_count(members)
        own = range(me, count, members)
        parts = {
            part: [self._expect(MessageSpec.of_part(at, peer, reduction, part, count)) for peer in self._peers]
            for part in own
        }
        means = {
            part: self._expect(MessageSpec.of_mean(at, reduction, part, count, members), shot=1)
            for part in range(count)
            if part not in own
        }
        cuts = self._cuts(self._settled(), count)
        reduced: dict[int, Contribution | None] = {}
        who: tuple[Member, ...] = ()
        outliers: tuple[Member, ...] = ()
        inner = torch.zeros(members, members, dtype=torch.float64, device="cpu")
        for stripe in range(0, count + (STRIPES_AHEAD - 1) * members, members):
            for receiver in self._peers if stripe < count else ():
                part = stripe + receiver
                self._send(pack(MessageSpec.of_part(at, me, reduction, part, count), cuts[part]), receiver)
            part = stripe - (STRIPES_AHEAD - 1) * members + me
            if part >= 0:
                there, outliers = split_outliers(self._arrived(cuts[part], parts[part]), reduction)
                who = tuple(c.member for c in there)
                reduced[part] = self._reduced(part, count, there, inner)
                message = pack(MessageSpec.of_mean(at, reduction, part, count, members), reduced[part])
                for receiver in self._peers:
                    self._send(message, receiver, shot=1)
        self.reduced.set()
        reduced |= {part: self._take(incoming) for part, incoming in means.items()}
        if not who:
            return Round(at, (), (), outliers=outliers)
        mean, inner = self._joined(reduced)
        seen = [member.worker for member in who]
        return Round(at, who, (), mean, outliers, inner[seen][:, seen])

    def _joined(self, reduced: Mapping[int, Contribution | None]) -> tuple[Tensor, Tensor]:
        """Join the parts' encoded means and sum their inner products: the mean, and fp64 [workers, workers]."""
        payloads, count, (rows, columns) = [], len(reduced), _pairs(self._workers)
        inner = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
        for part in range(count):
            mean = reduced[part]
            if mean is None:
                raise PeerError(part % self._workers, "sent no mean, though members have contributed to it")
            size = self._request.reduction.part_bytes(part, count)
            payloads.append(mean.payload[:size])
            if part + self._workers >= count:
                inner += mean.payload[size:].clone().view(torch.float64)
        whole = torch.zeros(self._workers, self._workers, dtype=torch.float64, device="cpu")
        whole[rows, columns] = whole[columns, rows] = inner
        return self._request.reduction.joined(payloads), whole

    def _reduced(self, part: int, count: int, there: list[Contribution], inner: Tensor) -> Contribution | None:
        """Reduce one part to its encoded mean, and add its inner products to `inner`; None without contributions."""
        if not there:
            return None
        if self._request.after is not None:
            self._request.after.wait()
        payloads, weights = [c.payload for c in there], [c.member.weight for c in there]
        products = torch.zeros(len(there), len(there), dtype=torch.float64, device="cpu")
        all_workers = tuple(range(self._workers))
        mean = self._request.reduction.reduced(payloads, weights, part, count, all_workers, products)
        seen = torch.tensor([c.member.worker for c in there], device="cpu")
        inner[seen[:, None], seen] += products
        if part + self._workers >= count:  # the last part carries the sums of inner products
            rows, columns = _pairs(self._workers)
            mean = torch.cat([mean, inner[rows, columns].view(torch.uint8)])
        return Contribution(Member(self._worker, 0.0, 0, 0), mean)

    def _cuts(self, mine: Contribution | None, count: int) -> dict[int, Contribution | None]:
        """Cut this worker's payload into parts."""
        if mine is None:
            return dict.fromkeys(range(count))
        payload, reduction = self._staging.to_host(mine.payload), self._request.reduction
        return {part: Contribution(mine.member, reduction.cut(payload, part, count)) for part in range(count)}

    def _arrived(self, mine: Contribution | None, due: Iterable[IncomingMessage]) -> list[Contribution]:
        """Wait for the contributions of all members, and return them in worker order."""
        contributions = [mine, *(self._take(incoming) for incoming in due)]
        return sorted((c for c in contributions if c is not None), key=lambda c: c.member.worker)

    def _expect(self, spec: MessageSpec, shot: int = 0) -> IncomingMessage:
        pinned = self._staging.pinned and spec.kind == MessageKind.WHOLE  # parts and their means stay on the host
        incoming = self._connections.expect(spec, self._request.tag + shot, pinned=pinned)
        self._incoming.append(incoming)
        return incoming

    def _take(self, incoming: IncomingMessage) -> Contribution | None:
        self._missing = self._too_late(incoming.spec.sender, "did not send its part")
        return incoming.wait()

    def _wait_until_nearly_there(self, incoming: IncomingMessage) -> None:
        """Wait until at most OVERLAP_BYTES of a message are missing."""
        self._missing = self._too_late(incoming.spec.sender, "did not send its part")
        while incoming.left_bytes > OVERLAP_BYTES:
            incoming.advance()

    def _send(self, message: Tensor, receiver: int, shot: int = 0) -> None:
        self._outgoing.append(self._connections.send(message, receiver, self._request.tag + shot))
        self._sent += message.numel()


def _pairs(members: int) -> Tensor:
    """Return the row and column indices [2, pairs] of the upper triangle, members by members."""
    return torch.triu_indices(members, members, device="cpu")
