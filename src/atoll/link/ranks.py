"""The far link of a worker that has several ranks: what befalls one of them befalls all, at the same moment.

Ranks that hold the same parameters (DDP) need one link between them: the first rank exchanges, the others hear from it
(`TeamLink`). Ranks that hold a part each (FSDP) exchange it with the same rank of the other workers (`PartLink`).
Either way, an error of one is raised on all: a rank that went on alone would wait for the others for ever. So `join`,
`check` and `wait` are collective: every rank of the worker makes the same calls in the same order.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, replace
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed

from atoll.core.allreduce import Reduction
from atoll.core.guard import Size
from atoll.errors import AtollError, LinkError
from atoll.link.base import Link, Member, Offer, Passage, Pending, Round, RoundId, difference

Value = TypeVar("Value")


class Circle:
    """The ranks of one worker, as they talk among themselves; a process group of its own (gloo) keeps it in order."""

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group
        self.rank = distributed.get_rank(group)
        self.ranks = distributed.get_world_size(group)

    def hear(self, text: str | None) -> str:
        """What the first rank says; the others give None."""
        said = None if text is None else torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")
        size = torch.tensor([0 if said is None else said.numel()], dtype=torch.int64, device="cpu")
        self._run(lambda: distributed.broadcast(size, group=self._group, group_src=0))
        return self.take(said, int(size)).numpy().tobytes().decode()

    def take(self, data: Tensor | None, size: int) -> Tensor:
        """`size` bytes of the first rank, uint8 on the CPU; the others give None."""
        here = torch.empty(size, dtype=torch.uint8, device="cpu") if data is None else data.cpu().contiguous()
        if size:
            self._run(lambda: distributed.broadcast(here, group=self._group, group_src=0))
        return here

    def gather(self, text: str) -> list[str]:
        """What every rank says, in rank order."""
        said = text.encode()
        sizes = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.ranks)]
        size = torch.tensor([len(said)], dtype=torch.int64, device="cpu")
        self._run(lambda: distributed.all_gather(sizes, size, group=self._group))
        longest = max(map(int, sizes))
        if not longest:
            return [""] * self.ranks
        padded = torch.tensor(list(said.ljust(longest)), dtype=torch.uint8, device="cpu")
        parts = [torch.empty_like(padded) for _ in sizes]
        self._run(lambda: distributed.all_gather(parts, padded, group=self._group))
        return [part[: int(size)].numpy().tobytes().decode() for part, size in zip(parts, sizes, strict=True)]

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all ranks, fp64 on the CPU: the same bits on each."""
        total = numbers.to("cpu", torch.float64, copy=True)
        self._run(lambda: distributed.all_reduce(total, group=self._group))
        return total

    def together(self, act: Callable[[], Value]) -> Value:
        """Let every rank act; if one of them fails, all do, with its words."""
        fault: AtollError | None = None
        value: Value | None = None
        try:
            value = act()
        except AtollError as error:
            fault = error
        faults = self.gather("" if fault is None else str(fault) or type(fault).__name__)
        if fault is not None:
            raise fault
        for told in faults:
            if told:
                raise LinkError(told)
        return value  # type: ignore[return-value]

    def _run(self, talk: Callable[[], Any]) -> None:
        try:
            talk()
        except RuntimeError as fault:
            raise self.loss_of_a_rank(fault) from fault

    def loss_of_a_rank(self, fault: RuntimeError) -> LinkError:
        """What to say of a collective operation that has failed: torch's words begin with a file of its own."""
        words = shorten(str(fault).split("] ", 1)[-1], 120, placeholder=" ...")
        return LinkError(
            f"rank {self.rank} has lost another rank of its worker, which was killed or has failed itself ({words})"
        )


class TeamLink:
    """One rank's end of the link of a worker whose ranks hold the same parameters.

    The first rank gives the real link, whose members must be fixed; the others give None, and nothing of theirs is
    sent: they hold the same bits.
    """

    def __init__(self, circle: Circle, link: Link | None, worker: int, workers: int) -> None:
        assert (link is not None) == (circle.rank == 0)
        self.worker = worker
        self.workers = workers
        self._circle = circle
        self._link = link
        self._weights: dict[int, float] = {}

    def join(self, terms: Mapping[str, str], weight: float) -> None:
        """Say what all must agree on; LinkError names the differences to another worker, or to the first rank."""

        def meet(link: Link) -> dict[str, Any]:
            link.join(terms, weight)
            return {"terms": dict(terms), "weights": list(link.weights(1).items())}

        said = self._relayed(meet)
        self._weights = {int(worker): float(weight) for worker, weight in said["weights"]}
        if differs := difference(terms, said["terms"]):
            raise LinkError(f"worker {self.worker}: rank {self._circle.rank} and rank 0 differ in {differs}")

    def present(self, step: int) -> bool:
        """Always: members are fixed."""
        return True

    def trains(self, step: int) -> bool:
        """Always: members are fixed."""
        return True

    def weights(self, step: int) -> Mapping[int, float]:
        """Worker -> weight of all."""
        return self._weights

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; None takes part in nothing and still learns the result."""
        pending = None if self._link is None else _opened(self._link, round_id, offer, reduction)
        return _Relay(self, round_id, pending)

    def on_any_rank(self, so: bool) -> bool:
        """Whether it is so: all ranks hold the same bits."""
        return so

    def check(self) -> None:
        """Raise the LinkError of a round that has failed meanwhile, on all ranks alike; a few bytes from the first."""
        self._relayed(lambda link: link.check())

    def close(self, reason: str | None = None) -> None:
        """Leave for good; with a reason, before the end: whoever waits for this worker is told."""
        if self._link is not None:
            self._link.close(reason)

    # ------------------------------------------------------------------ inside the worker

    def _relayed(self, act: Callable[[Link], Any]) -> Any:
        """What the first rank makes of its link (JSON), heard by all, or its error, raised on all."""
        if self._link is None:
            return _understood(self._circle.hear(None))
        try:
            result = act(self._link)
        except AtollError as fault:
            self._circle.hear(json.dumps({"error": str(fault)}))
            raise
        self._circle.hear("" if result is None else json.dumps(result))
        return result

    def complete(self, round_id: RoundId, pending: Pending | None) -> Round:
        """A round that the first rank has waited for, as every rank needs it."""
        began, mine = time.perf_counter(), None

        def wait(_: Link) -> dict[str, Any]:
            nonlocal mine
            assert pending is not None
            mine = pending.wait()
            return _described(mine)

        said = self._relayed(wait)
        sent = [None] * len(said["tensors"]) if mine is None else _tensors(mine)
        heard = [self._circle.take(own, size) for own, (size, _) in zip(sent, said["tensors"], strict=True)]
        if mine is not None:
            return mine
        heard = [tensor.to(device) for tensor, (_, device) in zip(heard, said["tensors"], strict=True)]
        reduced = heard.pop() if said["reduced"] else None
        members, outliers = (tuple(map(_member, said[name])) for name in ("members", "outliers"))
        inner = None if said["inner"] is None else torch.tensor(said["inner"], dtype=torch.float64, device="cpu")
        passage = Passage(began, time.perf_counter())
        return Round(round_id, members, tuple(heard), reduced, outliers, inner, passage)


class _Relay:
    """A round that the first rank waits for and the others hear of."""

    def __init__(self, link: TeamLink, round_id: RoundId, pending: Pending | None) -> None:
        self._link = link
        self._round_id = round_id
        self._pending = pending

    def wait(self) -> Round:
        return self._link.complete(self._round_id, self._pending)


def _tensors(completed: Round) -> list[Tensor]:
    return [*completed.payloads, *([] if completed.reduced is None else [completed.reduced])]


def _described(completed: Round) -> dict[str, Any]:
    """A round without its bytes: who took part, how large the tensors are that follow, and on what kind of device."""
    return {
        "members": [astuple(member) for member in completed.members],
        "outliers": [astuple(member) for member in completed.outliers],
        "inner": None if completed.inner is None else completed.inner.tolist(),
        "tensors": [(tensor.numel(), tensor.device.type) for tensor in _tensors(completed)],
        "reduced": completed.reduced is not None,
    }


def _member(fields: list[Any]) -> Member:
    *standing, size = fields
    return replace(Member(*standing), size=Size(*size))


def _understood(text: str) -> Any:
    """What the first rank has said; its error is raised here too."""
    said = json.loads(text) if text else None
    if isinstance(said, dict) and "error" in said:
        raise LinkError(said["error"])
    return said


class PartLink:
    """One rank's end of the link of a worker whose ranks hold a part each: its own, less the right to fail alone."""

    def __init__(self, circle: Circle, link: Link) -> None:
        self.worker = link.worker
        self.workers = link.workers
        self._circle = circle
        self._link = link

    def join(self, terms: Mapping[str, str], weight: float) -> None:
        """Say what all must agree on; LinkError names the differences to another worker."""
        self._circle.together(lambda: self._link.join(terms, weight))

    def present(self, step: int) -> bool:
        """Whether this worker is a member during this inner step; known for the current step and the next."""
        return self._link.present(step)

    def trains(self, step: int) -> bool:
        """Whether it makes this inner step."""
        return self._link.trains(step)

    def weights(self, step: int) -> Mapping[int, float]:
        """Worker -> weight of all who are present at this step."""
        return self._link.weights(step)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Start a round; None takes part in nothing and still learns the result."""
        return _Part(self._circle, _opened(self._link, round_id, offer, reduction))

    def on_any_rank(self, so: bool) -> bool:
        """Whether it is so on some rank of this worker; a few bytes between them."""
        return bool(self._circle.sum(torch.tensor([float(so)], dtype=torch.float64, device="cpu")).item())

    def check(self) -> None:
        """Raise the LinkError of a round that has failed meanwhile, here or on another rank."""
        self._circle.together(self._link.check)

    def close(self, reason: str | None = None) -> None:
        """Leave for good; with a reason, before the end: whoever waits for this worker is told."""
        self._link.close(reason)


class _Part:
    """A round of one rank's part, complete when those of all ranks are."""

    def __init__(self, circle: Circle, pending: Pending) -> None:
        self._circle = circle
        self._pending = pending

    def wait(self) -> Round:
        return self._circle.together(self._pending.wait)


class _Failed:
    """A round that could not be opened; the other ranks wait for it, so it fails when they do."""

    def __init__(self, fault: AtollError) -> None:
        self._fault = fault

    def wait(self) -> Round:
        raise self._fault


def _opened(link: Link, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
    try:
        return link.open(round_id, offer, reduction)
    except AtollError as fault:
        return _Failed(fault)
