"""Gives a worker of several ranks one link to the other workers; all its ranks succeed or fail together.

Ranks that replicate the parameters (DDP) share one link: rank 0 exchanges and broadcasts the result (`ReplicatedLink`).
Ranks that shard them (FSDP) each exchange their shard with the same rank of the other workers (`ShardedLink`). An error
on one rank is raised on all: a rank that went on alone would wait for the others for ever. So `join`, `check` and
`wait` are collective: every rank of the worker makes the same calls in the same order.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from atoll.core.allreduce import Reduction
from atoll.core.outliers import Size
from atoll.errors import AtollError, ExcludedError, LinkError
from atoll.link.base import (
    Admission,
    FragmentState,
    Link,
    Member,
    Offer,
    Pending,
    Round,
    RoundId,
    TransferStats,
    describe_differences,
)
from atoll.link.seat import Seat

Value = TypeVar("Value")


class RankGroup:
    """Runs collectives between the ranks of one worker, over a gloo process group that nothing else uses."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.ranks = distributed.get_world_size(group)

    def broadcast_text(self, text: str | None) -> str:
        """Return the text of rank 0 on every rank; the others pass None."""
        data = None if text is None else torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        size = torch.tensor([0 if data is None else data.numel()], dtype=torch.int64, device="cpu")
        self._run(lambda: distributed.broadcast(size, group=self._group, group_src=0))
        return self.broadcast_bytes(data, int(size)).numpy().tobytes().decode()

    def broadcast_bytes(self, data: Tensor | None, size: int) -> Tensor:
        """Return `size` bytes of rank 0 on every rank, uint8 on the CPU; the others pass None."""
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu") if data is None else data.cpu().contiguous()
        if size:
            self._run(lambda: distributed.broadcast(buffer, group=self._group, group_src=0))
        return buffer

    def all_gather_text(self, text: str) -> list[str]:
        """Return the texts of all ranks, in rank order."""
        data = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.ranks)]
        size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
        self._run(lambda: distributed.all_gather(sizes, size, group=self._group))
        longest = max(map(int, sizes))
        if not longest:
            return [""] * self.ranks
        padded = torch.tensor(list(data.ljust(longest)), dtype=torch.uint8, device="cpu")
        parts = [torch.empty_like(padded) for _ in sizes]
        self._run(lambda: distributed.all_gather(parts, padded, group=self._group))
        return [part[: int(size)].numpy().tobytes().decode() for part, size in zip(parts, sizes, strict=True)]

    def send_text(self, text: str, to: int) -> None:
        """Send a text to one rank, which calls `receive_text`."""
        data = torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        size = torch.tensor([data.numel()], dtype=torch.int64, device="cpu")
        self._run(lambda: distributed.send(size, group=self._group, group_dst=to))
        self.send_bytes(data, to)

    def receive_text(self, source: int) -> str:
        """Wait for a text of one rank."""
        size = torch.empty(1, dtype=torch.int64, device="cpu")
        self._run(lambda: distributed.recv(size, group=self._group, group_src=source))
        return self.receive_bytes(int(size), source).numpy().tobytes().decode()

    def send_bytes(self, data: Tensor, to: int) -> None:
        """Send bytes, uint8, to one rank, which calls `receive_bytes` with their number."""
        if data.numel():
            buffer = data.cpu().contiguous()
            self._run(lambda: distributed.send(buffer, group=self._group, group_dst=to))

    def receive_bytes(self, size: int, source: int) -> Tensor:
        """Wait for `size` bytes of one rank, uint8 on the CPU."""
        buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        if size:
            self._run(lambda: distributed.recv(buffer, group=self._group, group_src=source))
        return buffer

    def all_reduce_sum(self, numbers: Tensor) -> Tensor:
        """Return the sum over all ranks, fp64 on the CPU: the same bits on each."""
        total = numbers.to("cpu", torch.float64, copy=True)
        self._run(lambda: distributed.all_reduce(total, group=self._group))
        return total

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank; an all-reduce of a few bytes."""
        return bool(self.all_reduce_sum(torch.tensor([float(value)], dtype=torch.float64, device="cpu")).item())

    def raise_on_all(self, act: Callable[[], Value]) -> Value:
        """Call `act` on every rank; if it fails on one, all ranks raise that error's message."""
        error: AtollError | None = None
        value: Value | None = None
        try:
            value = act()
        except AtollError as fault:
            error = fault
        messages = self.all_gather_text("" if error is None else str(error) or type(error).__name__)
        if error is not None:
            raise error
        if message := next(filter(None, messages), None):
            raise LinkError(message)
        return value  # type: ignore[return-value]

    def _run(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as fault:
            raise self.rank_lost_error(fault) from fault

    def rank_lost_error(self, fault: RuntimeError) -> LinkError:
        """Make the error for a failed collective, without the source path that torch's message begins with."""
        why = shorten(str(fault).split("] ", 1)[-1], 120, placeholder=" ...")
        return LinkError(f"rank {self.rank} has lost another rank of its worker, which was killed or failed ({why})")


class ReplicatedLink(Link):
    """Links one rank of a worker whose ranks replicate the parameters.

    Rank 0 passes the real link, whose members must be fixed; the others pass None and send nothing, for they hold the
    same bits.
    """

    def __init__(self, rank_group: RankGroup, link: Link | None, worker: int, workers: int) -> None:
        assert (link is not None) == (rank_group.rank == 0)
        self.worker = worker
        self.workers = workers
        self._rank_group = rank_group
        self._link = link
        self._weights: dict[int, float] = {}

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join the other workers; LinkError names the terms in which another worker, or rank 0, differs."""
        all_terms = {**terms, **(start or {})}

        def join_link(link: Link) -> dict[str, Any]:
            _refuse(link.join(terms, weight, start), self.worker)
            return {"terms": all_terms, "weights": list(link.weights(1).items())}

        joined = self._on_rank_0(join_link)
        self._weights = {int(worker): float(weight) for worker, weight in joined["weights"]}
        self._compare(all_terms, joined["terms"])
        return None

    def _compare(self, mine: Mapping[str, str], of_rank_0: Mapping[str, str]) -> None:
        if differs := describe_differences(mine, of_rank_0):
            problem = f"worker {self.worker}: rank {self._rank_group.rank} and rank 0 differ in {differs}"
            raise LinkError(problem, worker=self.worker)

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers."""
        return self._weights

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; with None, the worker only receives the result."""
        pending = None if self._link is None else open_round(self._link, round_id, offer, reduction)
        return _BroadcastPending(self, round_id, pending)

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note that this worker has applied all rounds up to a step; rank 0 tells the link."""
        if self._link is not None:
            self._link.advanced(step, applied, save)

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Publish rank 0's value and return that of every worker; all ranks call it."""

        def gather_on(link: Link) -> list[Any]:
            return [(astuple(seat), told) for seat, told in link.gather(key, value, within_s).items()]

        return {Seat(*fields): told for fields, told in self._on_rank_0(gather_on)}

    def check(self) -> None:
        """Raise the LinkError of a round that has failed since, on all ranks; rank 0 broadcasts a few bytes."""
        self._on_rank_0(lambda link: link.check())

    def close(self, reason: str | None = None) -> None:
        """Leave for good; a reason, given when leaving before the end, is told to waiting workers."""
        if self._link is not None:
            self._link.unfinished = self.unfinished
            self._link.close(reason)

    def _on_rank_0(self, act: Callable[[Link], Any]) -> Any:
        """Call `act` on rank 0, and return its JSON result, or raise its error, on every rank."""
        if self._link is None:
            result = self._hear()
            if isinstance(result, dict) and "error" in result:
                raise (ExcludedError if result["excluded"] else LinkError)(result["error"])
            return result
        try:
            result = act(self._link)
        except AtollError as fault:
            excluded = isinstance(fault, ExcludedError)
            self._rank_group.broadcast_text(json.dumps({"error": str(fault), "excluded": excluded}))
            raise
        self._rank_group.broadcast_text("" if result is None else json.dumps(result))
        return result

    def _hear(self) -> Any:
        """Return the JSON that rank 0 broadcasts next; on the other ranks."""
        text = self._rank_group.broadcast_text(None)
        return json.loads(text) if text else None

    def complete(self, round_id: RoundId, pending: Pending | None) -> Round:
        """Wait for a round on rank 0 and return it on every rank."""
        began, mine = time.perf_counter(), None

        def wait(_: Link) -> dict[str, Any]:
            nonlocal mine
            assert pending is not None
            mine = pending.wait()
            return describe_round(mine)

        about = self._on_rank_0(wait)
        sent = [None] * len(about["tensors"]) if mine is None else tensors_of(mine)
        sizes, devices = [size for size, _ in about["tensors"]], [device for _, device in about["tensors"]]
        tensors = [self._rank_group.broadcast_bytes(own, size) for own, size in zip(sent, sizes, strict=True)]
        if mine is not None:
            return mine
        tensors = [tensor.to(device) for tensor, device in zip(tensors, devices, strict=True)]
        return round_from(round_id, about, tensors, TransferStats(began, time.perf_counter()))


@dataclass(frozen=True, slots=True)
class _BroadcastPending:
    """A round that rank 0 waits for and broadcasts."""

    link: ReplicatedLink
    round_id: RoundId
    pending: Pending | None

    def wait(self) -> Round:
        return self.link.complete(self.round_id, self.pending)


def tensors_of(completed: Round) -> list[Tensor]:
    """Return the payloads of a round, or its mean."""
    return [*completed.payloads, *([] if completed.reduced is None else [completed.reduced])]


def describe_round(completed: Round) -> dict[str, Any]:
    """Describe a round without its bytes: members, and the size and device type of each tensor that follows."""
    return {
        "members": [astuple(member) for member in completed.members],
        "outliers": [astuple(member) for member in completed.outliers],
        "inner": None if completed.inner is None else completed.inner.tolist(),
        "tensors": [(tensor.numel(), tensor.device.type) for tensor in tensors_of(completed)],
        "reduced": completed.reduced is not None,
        "complete": completed.complete,
    }


def round_from(round_id: RoundId, about: Mapping[str, Any], tensors: list[Tensor], transfer: TransferStats) -> Round:
    """Make a round of what `describe_round` told, and its tensors."""
    reduced = tensors.pop() if about["reduced"] else None
    members, outliers = (tuple(map(member_from, about[name])) for name in ("members", "outliers"))
    inner = None if about["inner"] is None else torch.tensor(about["inner"], dtype=torch.float64, device="cpu")
    return Round(round_id, members, tuple(tensors), reduced, outliers, inner, about["complete"], transfer)


def member_from(fields: list[Any]) -> Member:
    """Make a member of its fields, as `dataclasses.astuple` gives them."""
    *standing, size = fields
    return replace(Member(*standing), size=Size(*size))


class ShardedLink(Link):
    """Links one rank of a worker whose ranks hold a shard each; an error on one rank is raised on all."""

    def __init__(self, rank_group: RankGroup, link: Link) -> None:
        self.worker = link.worker
        self.workers = link.workers
        self.elastic = link.elastic
        self._rank_group = rank_group
        self._link = link

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> None:
        """Join the other workers; LinkError names the terms in which another worker differs."""
        self._rank_group.raise_on_all(lambda: _refuse(self._link.join(terms, weight, start), self.worker))

    def present(self, step: int) -> bool:
        """Return whether this worker is a member during this inner step."""
        return self._link.present(step)

    def trains(self, step: int) -> bool:
        """Return whether this worker makes this inner step."""
        return self._link.trains(step)

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers that are present at this step."""
        return self._link.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round of this rank's shard; with None, the rank only receives the result."""
        return _ShardPending(self._rank_group, open_round(self._link, round_id, offer, reduction))

    def advanced(self, step: int, applied: int, save: Callable[[int], FragmentState]) -> None:
        """Note that this rank has applied all rounds of its shard up to a step."""
        self._link.advanced(step, applied, save)

    def on_any_rank(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of this worker; an all-reduce of a few bytes."""
        return self._rank_group.any(value)

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Publish this rank's value and return that of every rank of every worker."""
        return self._rank_group.raise_on_all(lambda: self._link.gather(key, value, within_s))

    def check(self) -> None:
        """Raise the LinkError of a round that has failed since, on this rank or another."""
        self._rank_group.raise_on_all(self._link.check)

    def close(self, reason: str | None = None) -> None:
        """Leave for good; a reason, given when leaving before the end, is told to waiting workers."""
        self._link.unfinished = self.unfinished
        self._link.close(reason)


@dataclass(frozen=True, slots=True)
class _ShardPending:
    """A round of one rank's shard, complete when those of all ranks are."""

    rank_group: RankGroup
    pending: Pending

    def wait(self) -> Round:
        return self.rank_group.raise_on_all(self.pending.wait)


@dataclass(frozen=True, slots=True)
class _FailedPending:
    """A round that could not be opened; it fails in `wait`, where the other ranks wait too."""

    error: AtollError

    def wait(self) -> Round:
        raise self.error


def _refuse(admission: Admission | None, worker: int) -> None:
    if admission is not None:
        problem = f"worker {worker} has several ranks, and its link is for members that stay: it cannot join a run"
        raise LinkError(f"{problem} that is under way; use ElasticRanksLink or ElasticShardsLink", worker=worker)


def open_round(link: Link, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
    """Open a round; if the link refuses, that is raised where all ranks wait for the round."""
    try:
        return link.open(round_id, offer, reduction)
    except AtollError as fault:
        return _FailedPending(fault)
