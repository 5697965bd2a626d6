"""Gives the ranks of an elastic DDP worker one link, which rank 0 holds.

Rank 0 broadcasts what comes over it: rounds, weights, and the state with which the worker joins. So `join`, `rejoin`,
every method of an admission, `check`, `wait`, and `weights` of a step that was not asked for before are collective:
every rank makes the same calls in the same order.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from atoll.link.base import Admission, FragmentState, Link, Pending, Round, RoundId
from atoll.link.ranks import RankGroup, ReplicatedLink

MOST_STEPS = 256
"""Steps whose weights are kept: rank 0 logs rounds by itself, and must not begin a collective then."""


class ElasticRanksLink(ReplicatedLink):
    """Links one rank of a worker that comes and goes, and whose ranks replicate the parameters.

    Args:
        rank_group: The ranks of the worker.
        link: The elastic link on rank 0; None on the others.
        worker: The worker's seat.
        workers: Number of seats.
    """

    def __init__(self, rank_group: RankGroup, link: Link | None, worker: int, workers: int) -> None:
        super().__init__(rank_group, link, worker, workers)
        self.elastic = True
        self._unfinished = False
        self._by_step: dict[int, Mapping[int, float]] = {}  # weights, the same on every rank

    @property
    def unfinished(self) -> bool:
        """Whether an outer loop has joined and not called finish(); rank 0's link decides by it what it tells."""
        return self._unfinished

    @unfinished.setter
    def unfinished(self, unfinished: bool) -> None:
        self._unfinished = unfinished
        if self._link is not None:
            self._link.unfinished = unfinished

    # ------------------------------------------------------------------ join

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join the other workers, or a run that they have under way, on all ranks."""
        mine = {**terms, **(start or {})}
        of_rank_0 = self._on_rank_0(lambda _: mine)
        self._rank_group.raise_on_all(lambda: self._compare(mine, of_rank_0))
        return self._enter(lambda link: link.join(terms, weight, start))

    def rejoin(self) -> Admission:
        """Join again after an ExcludedError, on all ranks."""
        admission = self._enter(lambda link: link.rejoin())
        assert admission is not None
        return admission

    def _enter(self, act: Callable[[Link], Admission | None]) -> Admission | None:
        made: list[Admission] = []

        def enter(link: Link) -> bool:
            made.extend(filter(None, [act(link)]))
            return bool(made)

        follows = self._on_rank_0(enter)
        self._by_step = {}
        return _SharedAdmission(self, *made) if follows else None

    def ask(self, question: Callable[[], int]) -> int:
        """Return on every rank what rank 0 answers."""
        answer: int = self._on_rank_0(lambda _: question())
        return answer

    def share_state(self, states: Iterator[FragmentState]) -> FragmentState:
        """Return the next of rank 0's states on every rank; the others have none to pass."""
        received: list[FragmentState] = []

        def receive(_: Link) -> dict[str, Any]:
            received.append(next(states))
            return describe_state(received[0])

        about = self._on_rank_0(receive)
        own = list(received[0].vectors.values()) if received else [None] * len(about["vectors"])
        vectors = {
            name: self._rank_group.broadcast_bytes(
                None if vector is None else vector.view(torch.uint8), numel * dtype_of(dtype).itemsize
            ).view(dtype_of(dtype))
            for (name, dtype, numel), vector in zip(about["vectors"], own, strict=True)
        }
        return FragmentState(about["fragment"], about["applied"], about["counts"], vectors)

    # ------------------------------------------------------------------ rounds

    def weights(self, step: int) -> Mapping[int, float]:
        """Return worker -> weight of all workers that owe payloads to rounds of this step.

        It takes no collective once a round of the step is complete.
        """
        step = max(1, step)
        return self._by_step[step] if step in self._by_step else self._ask_weights(step)

    def _ask_weights(self, step: int) -> Mapping[int, float]:
        items = self._on_rank_0(lambda link: list(link.weights(step).items()))
        self._by_step.pop(step, None)  # the newest answer comes last
        self._by_step[step] = {int(worker): float(weight) for worker, weight in items}
        if len(self._by_step) > MOST_STEPS:
            del self._by_step[next(iter(self._by_step))]
        return self._by_step[step]

    def complete(self, round_id: RoundId, pending: Pending | None) -> Round:
        """Wait for a round on rank 0 and return it on every rank."""
        completed = super().complete(round_id, pending)
        self._ask_weights(max(1, round_id.step))  # final by now, and no rank has to ask for them again
        return completed


class _SharedAdmission:
    """Leads all ranks of a worker into a run; rank 0 passes its admission, which does the work."""

    def __init__(self, link: ElasticRanksLink, *admission: Admission) -> None:
        self._link = link
        self._admission = admission

    def states(self, fragments: int) -> Iterator[FragmentState]:
        received = (state for admission in self._admission for state in admission.states(fragments))
        for _ in range(fragments):
            yield self._link.share_state(received)

    def newest_step(self) -> int:
        return self._link.ask(lambda: self._admission[0].newest_step())

    def promote(self) -> int:
        return self._link.ask(lambda: self._admission[0].promote())


def describe_state(state: FragmentState) -> dict[str, Any]:
    """Describe a state without its bytes, in JSON: name, dtype and length of each vector that follows."""
    vectors = [(name, str(v.dtype).removeprefix("torch."), v.numel()) for name, v in state.vectors.items()]
    return {
        "fragment": state.fragment,
        "applied": state.applied,
        "counts": dict(state.counts),
        "vectors": vectors,
    }


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype that `describe_state` names."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype
