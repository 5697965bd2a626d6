"""What a run reports: what it is, how its steps went, every round, and its end.

The numbers are those of whole workers: where ranks exchange a part each, their bytes are summed up. So all ranks of a
worker make the same calls; whose sink is empty only adds its part.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Sync
from atoll.outer.stats import Applied, Counters, sizes
from atoll.runs.events import End, Eval, Event, Fault, Outcome, Round, Sink, Start, Step
from atoll.runs.sinks import Metrics
from atoll.settings.config import RunConfig
from atoll.train.progress.totals import Tally
from atoll.train.ranks.worker_ranks import Team

Value = TypeVar("Value")


class Account:
    """Of the workers in this process, whose numbers are `workers`; lists are in their order."""

    def __init__(self, config: RunConfig, workers: Sequence[int], weights: Sequence[float], team: Team) -> None:
        self.sink: Sink = Metrics([])
        """Where events go."""
        self.loops: Sequence[OuterLoop] = ()
        self.tally = Tally(len(workers))
        self.clock_s = time.perf_counter()
        """When the step or evaluation under way began."""
        self._config = config
        self._workers = workers
        self._weights = weights
        self._team = team
        self._sync = config.synchronisation()
        self._observed: list[tuple[Applied, float]] = []  # rounds not written down yet, each with the run's start

    def counted(self) -> list[Counters]:
        """What the loops have counted so far."""
        return [replace(loop.counters) for loop in self.loops]

    @property
    def waited_s(self) -> float:
        """Seconds in which nothing here was computed: while one of the workers of a process is blocked, so are all."""
        return sum(loop.counters.wait_s for loop in self.loops)

    @property
    def tokens_per_step(self) -> int:
        """Of one worker."""
        return self._config.train.batch * (self._config.train.sequence or 0)

    # ------------------------------------------------------------------ events

    def introduce(self, parameters: int, vocabulary: int) -> None:
        """Write down what this run is."""
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
        """A round has reached the anchor; it is written down with the next step, when it takes no waiting."""
        zero_s = self.clock_s - self.tally.seconds  # the run's start, as far as its clock runs only while it works
        self._observed.append((applied, zero_s))
        if not self._team.whole:  # its parts are summed up now, while all ranks are here
            self.settle()

    def _write(self, event: Event) -> None:
        """Write an event down, after all that came before it."""
        self.settle()
        self.sink.write(event)

    def settle(self, before: float = math.inf) -> None:
        """Write down the rounds that were applied before this step; of a GPU, that waits until they were."""
        while self._observed and self._observed[0][0].step < before:
            self.sink.write(self._round(*self._observed.pop(0)))

    def _round(self, applied: Applied, zero_s: float) -> Round:
        sent, transfer, loop = applied.round_id, applied.transfer, self.loops[0]
        assert self._sync is not None and transfer is not None
        wire_sent, wire_received, *sums = self._team.over_parts(
            [transfer.sent_bytes, transfer.received_bytes, *applied.sums]
        )
        norm, cosine = sizes(sums)
        return Round(
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

    def add(
        self, step: int, losses: Mapping[int, Tensor], norms: Mapping[int, Tensor], before: Sequence[Counters]
    ) -> None:
        """One inner step is made; the counters were those `before` when it began, at `clock_s`."""
        self.settle(before=step)
        waited_s = self.waited_s - sum(then.wait_s for then in before)
        self.tally.add(losses, norms, self.tokens_per_step, time.perf_counter() - self.clock_s, waited_s)

    def log(self, step: int, rate: float) -> None:
        """Write down how the steps since the last log went."""
        interval = self.tally.take()
        self._write(
            Step(
                step=step,
                tokens=self._tokens,
                seconds=self.tally.seconds,
                step_s=interval.step_s,
                loss=self._spread(interval.losses, None),
                lr=rate,
                grad_norm=self._spread(interval.norms, None),
                tokens_per_s=interval.tokens_per_s * self._processes,
                participants=interval.participants * self._processes,
                **self._traffic(),
            )
        )

    def evaluated(self, step: int, loss: float, *, best: bool) -> None:
        """Write down the held-out loss of the outer parameters, measured since `clock_s`."""
        self.tally.seconds += time.perf_counter() - self.clock_s
        of = self.loops[0].anchor_step if self.loops else step
        seconds = self.tally.seconds
        self._write(Eval(step=step, tokens=self._tokens, seconds=seconds, loss=loss, best=best, anchor_step=of))

    def fault(self, step: int, worker: int, what: str) -> None:
        """Write down what a worker has suffered."""
        self._write(Fault(step=step, worker=worker, what=what))

    def end(self, step: int, outcome: Outcome, loss: float, best: float) -> None:
        """Write down how the run ended."""
        self._write(
            End(
                step=step,
                tokens=self._tokens,
                seconds=self.tally.seconds,
                step_s=self.tally.step_s,
                loss=loss,
                best_loss=best,
                outcome=outcome,
                **self._traffic(),
            )
        )

    # ------------------------------------------------------------------ of all workers

    @property
    def _processes(self) -> int:
        """Over how many the workers are spread: those elsewhere do as much as those here."""
        return self._config.sync.workers // len(self._workers)

    @property
    def _tokens(self) -> int:
        """Trained on by all workers."""
        return self.tally.tokens * self._processes

    def _spread(self, values: Sequence[Value], elsewhere: Value) -> list[Value]:
        """One value per worker of the run from those of the workers here."""
        here = dict(zip(self._workers, values, strict=True))
        return [here.get(worker, elsewhere) for worker in range(self._config.sync.workers)]

    def _traffic(self) -> dict[str, Any]:
        counters = self.counted() or [Counters()]
        names = ("bytes_sent", "bytes_received", "wire_sent", "wire_received")
        bytes_of = {name: self._team.over_parts([getattr(c, name) for c in counters]) for name in names}
        return {
            **{name: self._spread([int(value) for value in values], 0) for name, values in bytes_of.items()},
            "wait_s": self._spread([self.waited_s for _ in counters], 0.0),
            "hidden_s": self._spread([c.hidden_s for c in counters], 0.0),
        }

    # ------------------------------------------------------------------ checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Sums so far."""
        return self.tally.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Go on from a state, with losses to come from this device."""
        self.tally.load_state_dict(state, device)
