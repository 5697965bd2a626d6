"""One round on its way between a worker and the others: in one shot or two, in a thread that waits.

Transfers that share a line fight for it, unfairly, and the last to end decides when the round does. So not all of it
is sent at once. In one shot members take turns: in turn t, member m sends to m + t and receives from m - t, and the
next turn begins when that is nearly there. In two shots, parts go in stripes, one part of every member each; while one
is reduced and its means go out, the next is on its way.
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
from atoll.link.net.staging import stage
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
"""What may be missing of one turn when the next begins, so that no line falls silent for a latency."""


STRIPES_AHEAD = 2
"""How many stripes, one part of each member, are sent at most before one of them is reduced; the same reason."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """What a round is, as this worker opens it."""

    round_id: RoundId
    offer: Offer | None
    """What this worker puts in; None if it has nothing."""
    reduction: Reduction
    tag: int
    """Of its messages; the next number is its own too."""
    deadline_s: float
    after: threading.Event | None = None
    """Set once the round before of this fragment is reduced, if what that loses is added here (error feedback)."""


class RoundTransfer:
    """A round that this worker has opened; `ended` is told once, with what went wrong or None."""

    def __init__(
        self,
        request: TransferRequest,
        connections: PeerConnections,
        worker: int,
        workers: int,
        ended: Callable[["RoundTransfer", Exception | None], None],
    ) -> None:
        self.round_id = request.round_id
        self._request = request
        self._connections = connections
        self._worker, self._workers = worker, workers
        self._turns = [((worker + turn) % workers, (worker - turn) % workers) for turn in range(1, workers)]
        self._peers = [receiver for receiver, _ in self._turns]
        self._tell = ended
        self._opened_s = time.perf_counter()
        self._stage = stage(request.reduction.device)
        self._mine: Contribution | None = None
        self._clock: threading.Timer | None = None
        self._incoming: list[IncomingMessage] = []
        self._outgoing: list[OutgoingMessage] = []
        self._sent = 0
        self._missing: PeerError | None = self._late(worker, "was not ready to send")
        self.reduced = threading.Event()
        """Set once this worker has reduced its parts, or never will."""
        self._over = threading.Event()
        self._completed: Round | None = None
        self._error: Exception | None = None

    def run(self) -> None:
        """Carry it to its end."""
        try:
            self._stage.begin()
            completed = self._two_shots() if shots(self._workers) == 2 else self._one_shot()
            completed = self._brought_up(completed)
            received = sum(incoming.spec.message_bytes for incoming in self._incoming)
            transfer = TransferStats(self._opened_s, time.perf_counter(), self._sent, received)
            self._completed = replace(completed, transfer=transfer)
            self._over.set()
            for outgoing in self._outgoing:
                self._missing = self._late(outgoing.receiver, "did not take what it was sent")
                outgoing.wait()
            self._missing = None
        except Exception as fault:  # whatever it is: somebody may be waiting for this thread
            self._tell(self, fault)
        else:
            self._tell(self, None)
        finally:
            self.reduced.set()
            if self._clock is not None:
                self._clock.cancel()
                self._clock = None  # it knows this round: together they would outlive the link
            self._incoming, self._outgoing = [], []  # their memory

    @property
    def complete(self) -> bool:
        """Whether all has arrived; what this worker sends may still be on its way."""
        return self._completed is not None

    def wait(self) -> Round:
        """Block until it is complete; LinkError names the worker that is missing."""
        self._over.wait()
        if self._completed is None:
            raise self._error or LinkError(f"{self.round_id}: the link was closed")
        self._stage.arrive()
        return self._completed

    def give_up(self, error: Exception) -> None:
        """Let whoever waits for it go, with this error."""
        self._error = error
        self._over.set()

    def _run_out(self) -> None:
        if (missing := self._missing) is not None:
            self._tell(self, missing)

    def _late(self, worker: int, what: str) -> PeerError:
        how = "it was stopped or cut off, or the link is too slow for this round"
        return PeerError(worker, f"{what} within {self._request.deadline_s:g} s: {how}")

    def _brought_up(self, completed: Round) -> Round:
        """With its payloads where they are used; what this worker has put in is there already."""
        own = None if self._mine is None else self._mine.payload
        payloads = tuple(payload if payload is own else self._stage.up(payload) for payload in completed.payloads)
        reduced = None if completed.reduced is None else self._stage.up(completed.reduced)
        return replace(completed, payloads=payloads, reduced=reduced)

    # ------------------------------------------------------------------ shots

    def _settled(self) -> Contribution | None:
        """What this worker puts in, once it is known; what is still computed until then is not under way."""
        offer = self._request.offer
        self._mine = None if offer is None else offer.settled()
        self._opened_s = time.perf_counter()
        # A clock of its own, for gloo's closes all connections before anybody can be told why.
        self._clock = threading.Timer(self._request.deadline_s, self._run_out)
        self._clock.daemon = True
        self._clock.start()
        return self._mine

    def _one_shot(self) -> Round:
        """Everybody's payload to everybody."""
        at, reduction = self.round_id, self._request.reduction
        due = {peer: self._expect(MessageSpec.whole(at, peer, reduction)) for peer in self._peers}
        mine = self._settled()
        if self._peers:
            spec = MessageSpec.whole(at, self._worker, reduction)
            message = self._stage.room(spec.message_bytes)
            if mine is not None:
                self._stage.down(mine.payload, message[HEADER_BYTES:])
            message = pack(spec, mine, message)
            for receiver, sender in self._turns:
                self._send(message, receiver)
                self._nearly(due[sender])
        there, outliers = split_outliers(self._arrived(mine, due.values()), reduction)
        return Round(at, tuple(c.member for c in there), tuple(c.payload for c in there), outliers=outliers)

    def _two_shots(self) -> Round:
        """Everybody's parts to whoever reduces them; the mean of each part to everybody."""
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
        """The encoded mean of the whole vector, and the inner products of all deltas, from those of its parts."""
        payloads, count, (rows, columns) = [], len(reduced), _pairs(self._workers)
        inner = torch.zeros(len(rows), dtype=torch.float64, device="cpu")
        for part in range(count):
            mean = reduced[part]
            if mean is None:
                raise PeerError(part % self._workers, "sent no mean, though there are members to take it of")
            size = self._request.reduction.part_bytes(part, count)
            payloads.append(mean.payload[:size])
            if part + self._workers >= count:
                inner += mean.payload[size:].clone().view(torch.float64)
        whole = torch.zeros(self._workers, self._workers, dtype=torch.float64, device="cpu")
        whole[rows, columns] = whole[columns, rows] = inner
        return self._request.reduction.joined(payloads), whole

    def _reduced(self, part: int, count: int, there: list[Contribution], inner: Tensor) -> Contribution | None:
        """The mean of one part, if anybody has put something in; inner products are added to those so far."""
        if not there:
            return None
        if self._request.after is not None:
            self._request.after.wait()
        payloads, weights = [c.payload for c in there], [c.member.weight for c in there]
        products = torch.zeros(len(there), len(there), dtype=torch.float64, device="cpu")
        everybody = tuple(range(self._workers))
        mean = self._request.reduction.reduced(payloads, weights, part, count, everybody, products)
        seen = torch.tensor([c.member.worker for c in there], device="cpu")
        inner[seen[:, None], seen] += products
        if part + self._workers >= count:  # the last: it says what all of them came to
            rows, columns = _pairs(self._workers)
            mean = torch.cat([mean, inner[rows, columns].view(torch.uint8)])
        return Contribution(Member(self._worker, 0.0, 0, 0), mean)

    def _cuts(self, mine: Contribution | None, count: int) -> dict[int, Contribution | None]:
        """What this worker gives of each part."""
        if mine is None:
            return dict.fromkeys(range(count))
        payload, reduction = self._stage.host(mine.payload), self._request.reduction
        return {part: Contribution(mine.member, reduction.cut(payload, part, count)) for part in range(count)}

    def _arrived(self, mine: Contribution | None, due: Iterable[IncomingMessage]) -> list[Contribution]:
        """What everybody put in, in worker order."""
        all_of_it = [mine, *(self._take(incoming) for incoming in due)]
        return sorted((c for c in all_of_it if c is not None), key=lambda c: c.member.worker)

    def _expect(self, spec: MessageSpec, shot: int = 0) -> IncomingMessage:
        pinned = self._stage.pinned and spec.kind == MessageKind.WHOLE  # parts and their means stay with the host
        incoming = self._connections.expect(spec, self._request.tag + shot, pinned=pinned)
        self._incoming.append(incoming)
        return incoming

    def _take(self, incoming: IncomingMessage) -> Contribution | None:
        self._missing = self._late(incoming.spec.sender, "did not send its part")
        return incoming.wait()

    def _nearly(self, incoming: IncomingMessage) -> None:
        """Wait for a message until only a little of it is missing."""
        self._missing = self._late(incoming.spec.sender, "did not send its part")
        while incoming.left_bytes > OVERLAP_BYTES:
            incoming.advance()

    def _send(self, message: Tensor, receiver: int, shot: int = 0) -> None:
        self._outgoing.append(self._connections.send(message, receiver, self._request.tag + shot))
        self._sent += message.numel()


def _pairs(members: int) -> Tensor:
    """Rows and columns [2, pairs] of the upper half of a square of all members."""
    return torch.triu_indices(members, members, device="cpu")
