"""Gives the ranks of an elastic FSDP worker one link, which rank 0 holds.

On the wire, every rank's shard of a fragment is a fragment: number `fragment * ranks + rank`. So each is a round of its
own to the protocol, and codecs, reductions and flushes see nothing new. After a flush, two shards of a fragment may
have been reduced between different members; each has the same anchor on every worker.

* **Offers** go from the other ranks to rank 0 in threads, over a process group that nothing else uses: rank 0's link
  settles offers in a thread, in the order of opening, and so do the others. No training thread waits for them.
* **Rounds** come back in `wait`, in the training threads.
* **A joiner** gets the shards of all ranks as one state. Rank 0 learns that it is wanted in `wait` or `advanced`, while
  the other ranks listen to rank 0: they send theirs before they hear how the call ends.
"""

import json
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from atoll.core.allreduce import MeanResidual, Reduction
from atoll.core.flat import CPU
from atoll.errors import LinkError
from atoll.link.base import Admission, Contribution, FragmentState, Link, Offer, Pending, Round, RoundId, TransferStats
from atoll.link.elastic_ranks import ElasticRanksLink, describe_state, dtype_of
from atoll.link.net.staging import HostStaging, staging_for
from atoll.link.ranks import RankGroup, describe_round, member_from, open_round, round_from, tensors_of

_EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


@dataclass(frozen=True, slots=True)
class _Shard:
    """Describes one rank's shard of a fragment, as far as its rounds need it."""

    numel: int
    outlier_ratio: float | None


class ElasticShardsLink(ElasticRanksLink):
    """Links one rank of a worker that comes and goes, and whose ranks hold a shard each.

    Args:
        rank_group: The ranks of the worker, for training threads.
        offers: The same ranks, for the threads that pass offers to rank 0.
        link: The elastic link on rank 0; None on the others.
        worker: The worker's seat.
        workers: Number of seats.
    """

    def __init__(self, rank_group: RankGroup, offers: RankGroup, link: Link | None, worker: int, workers: int) -> None:
        super().__init__(rank_group, link, worker, workers)
        self._offers = offers
        self._shards: dict[int, list[_Shard]] = {}  # by fragment, of every rank
        self._residuals: dict[int, MeanResidual] = {}  # of the other ranks' shards, by fragment on the wire
        self._save: Callable[[int], FragmentState] | None = None
        self._sending = ThreadPoolExecutor(1, thread_name_prefix="atoll-offer")

    # ------------------------------------------------------------------ join

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join the other workers, or a run that they have under way; the terms of all ranks are compared."""
        own = [dict(terms), dict(start or {})]
        everyone = [json.loads(said) for said in self._rank_group.all_gather_text(json.dumps(own))]
        others = [{f"terms of rank {rank}": _checksum(said[0]) for rank, said in enumerate(everyone) if rank}]
        others += [{f"start of rank {rank}": _checksum(said[1]) for rank, said in enumerate(everyone) if rank}]
        return self._enter(lambda link: link.join({**terms, **others[0]}, weight, {**(start or {}), **others[1]}))

    def rejoin(self) -> Admission:
        """Join again after an ExcludedError, on all ranks."""
        self._residuals = {}
        return super().rejoin()

    def share_state(self, states: Iterator[FragmentState]) -> FragmentState:
        """Return this rank's part of the next of rank 0's states."""
        parts: list[FragmentState] = []

        def receive(_: Link) -> list[dict[str, Any]]:
            parts.extend(_split(next(states), self._rank_group.ranks))
            return list(map(describe_state, parts))

        about = self._on_rank_0(receive)
        for rank, part in enumerate(parts):
            if rank:
                self._send_vectors(part, rank)
        return parts[0] if parts else self._receive_vectors(about[self._rank_group.rank], 0)

    def _send_vectors(self, state: FragmentState, to: int) -> None:
        for vector in state.vectors.values():
            self._rank_group.send_bytes(vector.view(torch.uint8), to)

    def _receive_vectors(self, about: Mapping[str, Any], source: int) -> FragmentState:
        vectors = {}
        for name, dtype, numel in about["vectors"]:
            size = numel * dtype_of(dtype).itemsize
            vectors[name] = self._rank_group.receive_bytes(size, source).view(dtype_of(dtype))
        return FragmentState(about["fragment"], about["applied"], about["counts"], vectors)

    # ------------------------------------------------------------------ rounds

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round of every rank's shard; with None, this rank only receives the result."""
        shards = self._shards_of(round_id.fragment, reduction)
        pending: list[Pending] = []
        if self._link is None:
            self._sending.submit(self._send_offer, offer, staging_for(reduction.device))
        else:
            first = round_id.fragment * len(shards)
            pending.append(open_round(self._link, round_id._replace(fragment=first), offer, reduction))
            for rank, shard in enumerate(shards[1:], 1):
                wire_id = round_id._replace(fragment=first + rank)
                theirs = self._reduction_of(shard, wire_id.fragment, reduction)
                pending.append(open_round(self._link, wire_id, _RankOffer(self._offers, rank), theirs))
        return _ShardsPending(self, round_id, reduction.device, pending, time.perf_counter())

    def _shards_of(self, fragment: int, reduction: Reduction) -> list[_Shard]:
        """Return the shards of all ranks; collective the first time."""
        if fragment not in self._shards:
            own = json.dumps([reduction.numel, reduction.outlier_ratio])
            self._shards[fragment] = [_Shard(*json.loads(said)) for said in self._rank_group.all_gather_text(own)]
        return self._shards[fragment]

    def _reduction_of(self, shard: _Shard, fragment: int, own: Reduction) -> Reduction:
        """Return how another rank's payloads are reduced here, in host memory."""
        residual = None if own.residual is None else self._residuals.setdefault(fragment, MeanResidual())
        return replace(own, numel=shard.numel, device=CPU, residual=residual, outlier_ratio=shard.outlier_ratio)

    def _send_offer(self, offer: Offer | None, staging: HostStaging) -> None:
        """Send what this rank puts into a round to rank 0; in a thread."""
        try:
            staging.enter_thread()
            sent = None if offer is None else offer.settled()
            payload = None if sent is None else staging.to_host(sent.payload)
        except Exception as fault:
            self._offers.send_text(json.dumps({"error": f"{type(fault).__name__}: {fault}"}), 0)
            return
        if sent is None or payload is None:
            self._offers.send_text("{}", 0)
        else:
            self._offers.send_text(json.dumps({"member": astuple(sent.member), "size": payload.numel()}), 0)
            self._offers.send_bytes(payload, 0)

    def complete_shards(self, pending: "_ShardsPending") -> Round:
        """Wait for the rounds of all shards on rank 0, and return this rank's."""
        rounds: list[Round] = []

        def wait(_: Link) -> list[dict[str, Any]]:
            rounds.extend(one.wait() for one in pending.of_shards)
            return [{**describe_round(completed), "bytes": _bytes(completed)} for completed in rounds]

        about = self._on_rank_0(wait)
        for rank, completed in enumerate(rounds):
            for tensor in tensors_of(completed) if rank else ():
                self._rank_group.send_bytes(tensor, rank)
        own = rounds[0] if rounds else self._receive_round(about[self._rank_group.rank], pending)
        self._ask_weights(max(1, pending.round_id.step))  # as for replicas
        return replace(own, round_id=pending.round_id)

    def _receive_round(self, about: Mapping[str, Any], pending: "_ShardsPending") -> Round:
        tensors = [self._rank_group.receive_bytes(size, 0).to(pending.device) for size, _ in about["tensors"]]
        transfer = TransferStats(pending.opened_s, time.perf_counter(), *about["bytes"])
        return round_from(pending.round_id, about, tensors, transfer)

    def on_any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of this worker; an all-reduce of a few bytes."""
        return self._rank_group.any(value)

    # ------------------------------------------------------------------ joiners

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note how far this worker is; rank 0 tells the link, and collects what joiners have asked for."""
        self._save = save
        for residual in self._residuals.values():
            residual.drop((applied + 1,))
        self._on_rank_0(lambda link: link.advanced(step, applied, self._save_all))

    def _save_all(self, fragment: int) -> FragmentState:
        """Return copies of all ranks' shards; on rank 0, while the others listen to it."""
        assert self._save is not None
        states = [self._save(fragment)]  # IndexError, for a fragment that there is not, before the others are told
        self._rank_group.broadcast_text(json.dumps({"copy": fragment}))
        for rank in range(1, self._rank_group.ranks):
            states.append(self._receive_vectors(json.loads(self._rank_group.receive_text(rank)), rank))
        return _joined(states)

    def _hear(self) -> Any:
        while isinstance(said := super()._hear(), dict) and "copy" in said:
            assert self._save is not None
            state = self._save(said["copy"])
            self._rank_group.send_text(json.dumps(describe_state(state)), 0)
            self._send_vectors(state, 0)
        return said

    def close(self, reason: str | None = None) -> None:
        """Leave for good; a reason, given when leaving before the end, is told to waiting workers."""
        super().close(reason)
        self._sending.shutdown(wait=False)


@dataclass(frozen=True, slots=True)
class _ShardsPending:
    """A round in flight; rank 0 waits for those of all shards, the others for rank 0."""

    link: ElasticShardsLink
    round_id: RoundId
    device: torch.device
    """Where this rank uses payloads."""
    of_shards: Sequence[Pending]
    """In rank order; empty on the other ranks."""
    opened_s: float

    def wait(self) -> Round:
        return self.link.complete_shards(self)


@dataclass(frozen=True, slots=True)
class _RankOffer:
    """Holds another rank's contribution, which is received when it is settled."""

    offers: RankGroup
    rank: int
    payload: Tensor = _EMPTY

    def settled(self) -> Contribution | None:
        told = json.loads(self.offers.receive_text(self.rank))
        if "error" in told:
            raise LinkError(f"rank {self.rank} of this worker could not send its shard: {told['error']}")
        if "member" not in told:
            return None
        return Contribution(member_from(told["member"]), self.offers.receive_bytes(told["size"], self.rank))


def _bytes(completed: Round) -> tuple[int, int]:
    transfer = completed.transfer
    return (0, 0) if transfer is None else (transfer.sent_bytes, transfer.received_bytes)


def _checksum(terms: Mapping[str, str]) -> str:
    return f"checksum {zlib.crc32(json.dumps(terms, sort_keys=True).encode()):08x}"


def _joined(states: Sequence[FragmentState]) -> FragmentState:
    """Join the shards of all ranks into one state: all have applied the same rounds."""
    counts = {f"{rank}/{name}": count for rank, state in enumerate(states) for name, count in state.counts.items()}
    vectors = {f"{rank}/{name}": vector for rank, state in enumerate(states) for name, vector in state.vectors.items()}
    return FragmentState(states[0].fragment, max(state.applied for state in states), counts, vectors)


def _split(state: FragmentState, ranks: int) -> list[FragmentState]:
    """Split a joined state by rank; LinkError if it is that of another number of ranks."""
    counts: list[dict[str, int]] = [{} for _ in range(ranks)]
    vectors: list[dict[str, Tensor]] = [{} for _ in range(ranks)]
    try:
        for name, count in state.counts.items():
            counts[int(name.partition("/")[0])][name.partition("/")[2]] = count
        for name, vector in state.vectors.items():
            vectors[int(name.partition("/")[0])][name.partition("/")[2]] = vector
        if any(one.keys() != some[0].keys() for some in (counts, vectors) for one in some):
            raise ValueError("a shard is missing")
    except (ValueError, IndexError):
        problem = f"fragment {state.fragment}: another worker's state of it is not that of {ranks} ranks"
        raise LinkError(f"{problem}: it holds {', '.join(list(state.vectors)[:4])}") from None
    return [FragmentState(state.fragment, state.applied, c, v) for c, v in zip(counts, vectors, strict=True)]
