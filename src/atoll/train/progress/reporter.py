"""Turns what happens in a run into events: its start, steps, rounds, evaluations, faults and end.

Numbers are those of whole workers: where ranks exchange a shard each, their bytes are summed. So all ranks of a worker
make the same calls, and only the leader's sink writes anything.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Sync
from atoll.outer.stats import Applied, Counters, sizes
from atoll.runs.events import End, Eval, Event, Fault, Joined, Members, Outcome, RoundApplied, Sink, Start, Step
from atoll.runs.evidence import AnchorMoved, Excluded
from atoll.runs.sample import Sample
from atoll.runs.sinks import Metrics
from atoll.settings.config import RunConfig
from atoll.train.progress.members import MembershipLog
from atoll.train.ranks.worker_ranks import WorkerRanks

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Interval:
    """Holds the means since the last report; lists have one entry per worker, None if it did not train."""

    losses: list[float | None]
    """Mean loss over the worker's steps, nats per token."""
    norms: list[float | None]
    """Norm of its last gradient, before clipping."""
    step_s: float
    """Mean seconds of one inner step of one worker, without waiting."""
    tokens_per_s: float
    """Tokens per second of all workers."""
    participants: int
    """Workers that trained."""


class RunningTotals:
    """Sums up the inner steps of all workers; losses stay on their device until they are read."""

    def __init__(self, workers: int) -> None:
        self.tokens = 0
        """Tokens trained on by all workers."""
        self.seconds = 0.0
        """Seconds spent on the run."""
        self.trained_s = 0.0
        """Those in which no worker here waited for a round."""
        self.worker_steps = 0
        self._start_interval(workers)

    def _start_interval(self, workers: int) -> None:
        self.losses: list[list[Tensor]] = [[] for _ in range(workers)]
        self.norms: list[Tensor | None] = [None] * workers
        self.interval_s, self.interval_trained_s, self.interval_tokens = 0.0, 0.0, 0

    def add(
        self,
        losses: Mapping[int, Tensor],
        norms: Mapping[int, Tensor],
        tokens_each: int,
        seconds: float,
        waited_s: float = 0.0,
    ) -> None:
        """Add one inner step.

        Args:
            losses: Loss of each worker that trained, a scalar on any device.
            norms: Gradient norm of each of them, before clipping.
            tokens_each: Tokens that each trained on.
            seconds: How long the step took.
            waited_s: How much of that was waiting for rounds.
        """
        for worker, loss in losses.items():
            self.losses[worker].append(loss)
            self.norms[worker] = norms[worker]
        self.tokens += tokens_each * len(losses)
        self.seconds += seconds
        self.trained_s += seconds - waited_s
        self.worker_steps += len(losses)
        self.interval_s += seconds
        self.interval_trained_s += seconds - waited_s
        self.interval_tokens += tokens_each * len(losses)

    def take(self) -> Interval:
        """Return the means since the last call, and start again."""
        steps = sum(map(len, self.losses))
        interval = Interval(
            losses=[torch.stack(losses).mean().item() if losses else None for losses in self.losses],
            norms=[None if norm is None else norm.item() for norm in self.norms],
            step_s=self.interval_trained_s / max(1, steps),
            tokens_per_s=self.interval_tokens / self.interval_s if self.interval_s else 0.0,
            participants=sum(bool(losses) for losses in self.losses),
        )
        self._start_interval(len(self.losses))
        return interval

    @property
    def is_finite(self) -> bool:
        """Whether the losses since the last report and the last norms are finite; waits for their device."""
        values = [loss for losses in self.losses for loss in losses]
        values += [norm for norm in self.norms if norm is not None]
        return bool(torch.stack(values).isfinite().all()) if values else True

    @property
    def step_s(self) -> float:
        """Mean seconds of one inner step of one worker over the whole run, without waiting."""
        return self.trained_s / max(1, self.worker_steps)

    def state_dict(self) -> dict[str, Any]:
        """Return all sums, with those of an unfinished interval."""
        return {**vars(self), "losses": [list(losses) for losses in self.losses], "norms": list(self.norms)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from a state; losses move to this device."""
        for name in vars(self):
            setattr(self, name, state[name])
        self.losses = [[loss.to(device) for loss in losses] for losses in state["losses"]]
        self.norms = [None if norm is None else norm.to(device) for norm in state["norms"]]


class Reporter:
    """Writes the events of the workers in this process; lists are in the order of `workers`, their numbers."""

    def __init__(self, config: RunConfig, workers: Sequence[int], weights: Sequence[float], ranks: WorkerRanks) -> None:
        self.sink: Sink = Metrics([])
        self.loops: Sequence[OuterLoop] = ()
        self.totals = RunningTotals(len(workers))
        self.began_s = time.perf_counter()
        """When the step or evaluation under way began, by time.perf_counter()."""
        self.members: MembershipLog | None = None
        """Who takes part in an elastic run."""
        self.evidence: Sink | None = None
        """Takes what a replay of an elastic run needs."""
        self._config = config
        self._workers = workers
        self._weights = weights
        self._ranks = ranks
        self._sync = config.synchronisation()
        self._unwritten: list[tuple[Applied, float]] = []  # rounds, each with the time of the run's start

    def counters(self) -> list[Counters]:
        """Return a copy of each loop's counters."""
        return [replace(loop.counters) for loop in self.loops]

    @property
    def waited_s(self) -> float:
        """Seconds that this process waited for rounds: while one of its workers waits, all do."""
        return sum(loop.counters.wait_s for loop in self.loops)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one inner step of one worker."""
        return self._config.train.batch * (self._config.train.sequence or 0)

    # ------------------------------------------------------------------ events

    def write_start(self, parameters: int, vocabulary: int) -> None:
        """Write what this run is."""
        config, sync = self._config, self._sync
        workers = config.sync.workers
        fragments = [fragment.numel for fragment in self.loops[0].fragments] if self.loops else []
        codec = sync.codec if sync else None
        self.sink.write(
            Start(
                name=config.name,
                method=config.sync.method,
                workers=workers,
                steps=config.train.steps or 0,
                parameters=parameters,
                tokens_per_step=self.tokens_per_step,
                period=sync.period if isinstance(sync, Sync) else 1,
                delay=[sync.delay_of(w, workers) if isinstance(sync, Sync) else 0 for w in range(workers)],
                codec=codec.format if codec else "none",
                fragments=fragments,
                payload_bytes=[codec.payload_bytes(numel) for numel in fragments] if codec else [],
                vocabulary=vocabulary,
                device=config.device,
                threads=config.threads or 0,
                weights=list(self._weights),
                worker=None if len(self._workers) == workers else self._workers[0],
                began=time.time(),
            )
        )

    def observe(self, applied: Applied) -> None:
        """Note a round that was applied; it is written at the next step, which costs no waiting."""
        zero_s = self.began_s - self.totals.seconds  # the run's clock stands still between processes
        self._unwritten.append((applied, zero_s))
        if not self._ranks.hold_whole_model:  # collective: its shards are summed now, while all ranks are here
            self.write_rounds()

    def _write(self, event: Event) -> None:
        """Write an event after the rounds that came before it."""
        self.write_rounds()
        self.sink.write(event)

    def write_rounds(self, before: float = math.inf) -> None:
        """Write the rounds that were applied before a step; waits for them on a GPU."""
        while self._unwritten and self._unwritten[0][0].step < before:
            applied, zero_s = self._unwritten.pop(0)
            self.sink.write(self._round(applied, zero_s))
            if self.evidence is not None:
                self.evidence.write(_anchor_moved(applied))

    def _round(self, applied: Applied, zero_s: float) -> RoundApplied:
        sent, transfer, loop = applied.round_id, applied.transfer, self.loops[0]
        assert self._sync is not None and transfer is not None
        # Over an elastic link, members of two shards' rounds may differ: so their products are summed by worker.
        by_worker = self.members is not None and not self._ranks.hold_whole_model
        sums = self._by_worker(applied) if by_worker else applied.sums
        wire_sent, wire_received, *sums = self._ranks.sum_over_shards(
            [transfer.sent_bytes, transfer.received_bytes, *sums]
        )
        norm, cosine = sizes(self._of_members(sums, applied) if by_worker else sums)
        return RoundApplied(
            step=sent.step,
            fragment=sent.fragment,
            applied=applied.step,
            members=list(applied.members),
            expected=len(loop.link.weights(max(1, sent.step))),
            norm=norm,
            cosine=cosine,
            bytes=self._sync.codec.payload_bytes(loop.fragments[sent.fragment].numel),
            worker=self._workers[0],
            opened_s=transfer.opened_s - zero_s,
            done_s=transfer.done_s - zero_s,
            waited_s=transfer.waited_s,
            hidden_s=transfer.hidden_s,
            wire_sent=int(wire_sent),
            wire_received=int(wire_received),
        )

    def _by_worker(self, applied: Applied) -> list[float]:
        """Return the sums of a round with a row and a column for every worker of the run."""
        square, *inner = applied.sums
        found = dict(zip(product(applied.members, repeat=2), inner, strict=bool(inner)))
        return [square, *(found.get(pair, 0.0) for pair in product(range(self._config.sync.workers), repeat=2))]

    def _of_members(self, sums: Sequence[float], applied: Applied) -> list[float]:
        """Return those of `_by_worker` that are of a round's members, if it has them."""
        square, *inner = sums
        found = dict(zip(product(range(self._config.sync.workers), repeat=2), inner, strict=True))
        return [square, *(found[pair] for pair in product(applied.members, repeat=2) if len(applied.sums) > 1)]

    def add_step(
        self, step: int, losses: Mapping[int, Tensor], norms: Mapping[int, Tensor], before: Sequence[Counters]
    ) -> None:
        """Count one inner step that began at `began_s`, when the counters were those of `before`."""
        self.write_rounds(before=step)
        self.write_members(step)
        waited_s = self.waited_s - sum(then.wait_s for then in before)
        self.totals.add(losses, norms, self.tokens_per_step, time.perf_counter() - self.began_s, waited_s)
        if self.members is not None:
            self.totals.tokens += self.tokens_per_step * (self._processes - 1)

    def jump(self, steps: int) -> None:
        """Count inner steps that the others have made without this worker."""
        self.totals.tokens += self.tokens_per_step * max(0, steps) * (self._processes - 1)

    def write_step(self, step: int, rate: float) -> None:
        """Write how the steps since the last call went."""
        interval = self.totals.take()
        self._write(
            Step(
                step=step,
                tokens=self._tokens,
                seconds=self.totals.seconds,
                step_s=interval.step_s,
                loss=self._spread(interval.losses, None),
                lr=rate,
                grad_norm=self._spread(interval.norms, None),
                tokens_per_s=interval.tokens_per_s * self._processes,
                participants=interval.participants * self._processes,
                **self._traffic(),
            )
        )

    def write_eval(self, step: int, loss: float, *, best: bool) -> None:
        """Write the held-out loss of the outer parameters, measured since `began_s`."""
        self.totals.seconds += time.perf_counter() - self.began_s
        anchor, seconds = self.loops[0].anchor_step if self.loops else step, self.totals.seconds
        self._write(Eval(step=step, tokens=self._tokens, seconds=seconds, loss=loss, best=best, anchor_step=anchor))

    def write_sample(self, step: int, prompt: str, text: str) -> None:
        """Write a text that was sampled since `began_s`."""
        self.totals.seconds += time.perf_counter() - self.began_s
        self._write(Sample(step=step, seconds=self.totals.seconds, prompt=prompt, text=text))

    def write_fault(self, step: int, worker: int, what: str) -> None:
        """Write what went wrong on a worker."""
        self._write(Fault(step=step, worker=worker, what=what))

    def write_members(self, step: int) -> None:
        """Write what has changed among the members of an elastic run."""
        for event in self.members.events(step, self.totals.seconds) if self.members else ():
            self.sink.write(event)
            is_own = isinstance(event, Members) or (isinstance(event, Joined) and event.since is not None)
            if self.evidence is not None and is_own:
                self.evidence.write(event)

    def write_excluded(self) -> None:
        """Write how far this worker was when it learnt that the others have gone on without it."""
        self.write_rounds()
        if self.evidence is not None:
            self.evidence.write(Excluded(steps=self.loops[0].steps))

    def write_end(self, step: int, outcome: Outcome, loss: float, best: float) -> None:
        """Write how the run ended."""
        self.write_members(step)
        self._write(
            End(
                step=step,
                tokens=self._tokens,
                seconds=self.totals.seconds,
                step_s=self.totals.step_s,
                loss=loss,
                best_loss=best,
                outcome=outcome,
                **self._traffic(),
            )
        )

    # ------------------------------------------------------------------ numbers of all workers

    @property
    def _processes(self) -> int:
        """Processes of the run: those elsewhere train as much as this one."""
        if self.members is not None:
            return len(self.loops[0].link.weights(self.loops[0].steps))
        return self._config.sync.workers // len(self._workers)

    @property
    def _tokens(self) -> int:
        """Tokens trained on by all workers."""
        return self.totals.tokens * (self._processes if self.members is None else 1)

    def _spread(self, values: Sequence[Value], elsewhere: Value) -> list[Value]:
        """Return one value per worker of the run, given those of the workers here."""
        here = dict(zip(self._workers, values, strict=True))
        return [here.get(worker, elsewhere) for worker in range(self._config.sync.workers)]

    def _traffic(self) -> dict[str, Any]:
        counters = self.counters() or [Counters()]
        names = ("bytes_sent", "bytes_received", "wire_sent", "wire_received")
        bytes_of = {name: self._ranks.sum_over_shards([getattr(c, name) for c in counters]) for name in names}
        return {
            **{name: self._spread([int(value) for value in values], 0) for name, values in bytes_of.items()},
            "wait_s": self._spread([self.waited_s for _ in counters], 0.0),
            "hidden_s": self._spread([c.hidden_s for c in counters], 0.0),
        }


def _anchor_moved(of: Applied) -> AnchorMoved:
    return AnchorMoved(
        step=of.round_id.step,
        fragment=of.round_id.fragment,
        last=of.round_id.last,
        applied=of.step,
        members=list(of.members),
        outliers=list(of.outliers),
        between=list(of.between),
        version=of.version,
        fingerprint=f"{of.fingerprint:016x}",
    )
