"""Holds the events of a run by kind: those of each process, and those of all processes as one run."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from atoll.core.codec import Codec
from atoll.errors import DataError
from atoll.plan.method import Job
from atoll.runs.events import (
    End,
    Eval,
    Event,
    Fault,
    Joined,
    Lost,
    Members,
    Resumed,
    RoundApplied,
    Saved,
    Start,
    Step,
    Totals,
    utilisation,
)
from atoll.runs.scored import Scored

_TOTALS = ("bytes_sent", "bytes_received", "wait_s", "hidden_s", "wire_sent", "wire_received")
_LISTS = {"steps": Step, "rounds": RoundApplied, "evals": Eval, "faults": Fault, "saves": Saved, "resumes": Resumed}
_LISTS |= {"views": Members, "losses": Lost, "joins": Joined, "scores": Scored}
_SHARED = ("method", "workers", "steps", "parameters", "period", "codec", "fragments")


@dataclass(frozen=True, slots=True, kw_only=True)
class EventLog:
    """Holds the events that one process of a run wrote, by kind."""

    start: Start
    steps: tuple[Step, ...] = ()
    rounds: tuple[RoundApplied, ...] = ()
    evals: tuple[Eval, ...] = ()
    faults: tuple[Fault, ...] = ()
    saves: tuple[Saved, ...] = ()
    resumes: tuple[Resumed, ...] = ()
    views: tuple[Members, ...] = ()
    losses: tuple[Lost, ...] = ()
    joins: tuple[Joined, ...] = ()
    scores: tuple[Scored, ...] = ()
    end: End | None = None
    """None while the process trains, or if it was killed."""

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers that the process trains."""
        return tuple(range(self.start.workers)) if self.start.worker is None else (self.start.worker,)

    @property
    def last(self) -> Totals | None:
        """The newest event with totals."""
        return self.end or (self.steps[-1] if self.steps else None)

    @property
    def newest_view(self) -> Members | None:
        """The newest view of an elastic run."""
        return max(self.views, key=lambda view: view.view, default=None)

    def busy_share(self, worker: int) -> float | None:
        """Returns the share of its time in which a worker did not wait, by the clock of its machine."""
        last = self.last
        return utilisation(last.wait_s[worker], last.seconds) if last and worker < len(last.wait_s) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord(EventLog):
    """Holds one run, finished or not: its settings, and the events of all its processes as one log."""

    name: str
    """Unique among the runs that `load_all` reads."""
    folder: Path
    config: dict[str, Any]
    """The table of run.toml."""
    about: dict[str, Any]
    """The object of about.json: versions, device, seed, time of the start."""
    processes: tuple[EventLog, ...]
    """The logs of the processes, each by the clock of its machine."""

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers whose events were found: not those whose folders are on other machines."""
        return tuple(sorted({worker for process in self.processes for worker in process.workers}))

    @property
    def finished(self) -> bool:
        """Whether the run made all its steps."""
        return self.end is not None and self.end.outcome == "finished"

    @property
    def step(self) -> int:
        """Inner steps made."""
        return self.last.step if self.last else 0

    @property
    def tokens(self) -> int:
        """Tokens that all workers together have trained on."""
        return self.last.tokens if self.last else 0

    @property
    def loss(self) -> float | None:
        """The last held-out loss in nats per token; None if there is none, or it is not finite."""
        losses = [e.loss for e in self.evals] + ([self.end.loss] if self.end else [])
        return losses[-1] if losses and math.isfinite(losses[-1]) else None

    @property
    def on_wire(self) -> bool:
        """Whether payloads left the process of their worker."""
        return self.last is not None and any(self.last.wire_sent + self.last.wire_received)

    def per_worker(self, total: str) -> float:
        """Returns the newest total of this name (`bytes_sent`, `wait_s` ...), mean over the known workers."""
        values: list[float] = getattr(self.last, total) if self.last else []
        known = [values[worker] for worker in self.workers if worker < len(values)]
        return sum(known) / len(known) if known else 0.0

    @property
    def utilisation(self) -> float | None:
        """The share of its time in which a worker did not wait, mean over the workers."""
        shares = [process.busy_share(worker) for process in self.processes for worker in process.workers]
        known = [share for share in shares if share is not None]
        return fmean(known) if known else None

    @property
    def tokens_per_s(self) -> float | None:
        """Measured tokens a second of all workers together, over the whole run."""
        return self.tokens / self.last.seconds if self.last and self.last.seconds > 0 else None

    @property
    def step_s(self) -> float:
        """Mean seconds of compute of one inner step of one worker."""
        if self.end and math.isfinite(self.end.step_s):
            return self.end.step_s
        before = (0, *(event.step for event in self.steps))
        timed = [(e.step - since, e.step_s) for since, e in zip(before, self.steps, strict=False)]
        timed = [(steps, step_s) for steps, step_s in timed if math.isfinite(step_s)]
        made = sum(steps for steps, _ in timed)
        return sum(steps * step_s for steps, step_s in timed) / made if made else 0.0

    @property
    def missed(self) -> int:
        """Payloads that were due in a round and did not arrive."""
        return sum(max(r.expected - len(r.members), 0) for r in self.rounds)

    @property
    def gradients(self) -> bool:
        """Whether the workers exchanged gradients on every step: data-parallel."""
        return self.start.method == "data-parallel"

    @property
    def data_parallel_bytes(self) -> int:
        """Payload bytes that a data-parallel worker would have sent by now: a gradient of fp32 on each step."""
        return self.step * Codec("fp32").payload_bytes(max(self.start.parameters, 0))

    def job(self) -> Job:
        """Returns what the planner needs to model the run with one machine per worker, as far as it got."""
        silent = self.start.method == "none" or self.start.workers == 1
        delays = tuple(self.start.delay)
        return Job(
            steps=self.step,
            step_s=self.step_s,
            period=max(self.start.period, 1),
            payload_bytes=() if silent else tuple(self.start.payload_bytes),
            delay=0 if self.gradients or not delays else delays[0] if len({*delays}) == 1 else delays,
            workers=self.start.workers,
            gradients=self.gradients,
            finish=self.finished,
        )


def jobs(records: Sequence[RunRecord]) -> list[Job]:
    """Returns the job of each run, with one compute time for all runs that compute the same.

    Runs of the same model size, tokens per step, device and threads differ in the load of the machine alone: they
    share the smallest mean that was measured among them.
    """
    quickest: dict[tuple[Any, ...], float] = {}
    kinds = [(r.start.parameters, r.start.tokens_per_step, r.start.device, r.start.threads) for r in records]
    for record, kind in zip(records, kinds, strict=True):
        if record.step_s > 0:
            quickest[kind] = min(record.step_s, quickest.get(kind, math.inf))
    return [replace(r.job(), step_s=quickest.get(kind, 0.0)) for r, kind in zip(records, kinds, strict=True)]


# ---------------------------------------------------------------------- the logs of several processes as one


def log_of(events: Sequence[Event]) -> EventLog | None:
    """Returns the events of one file by kind; None if it has no start event."""
    starts = [event for event in events if isinstance(event, Start)]
    newest = next((e for e in reversed(events) if isinstance(e, Totals)), None)
    end = newest if isinstance(newest, End) else None  # an interrupted run may have gone on
    lists: dict[str, Any] = {name: tuple(e for e in events if isinstance(e, kind)) for name, kind in _LISTS.items()}
    return EventLog(start=starts[-1], end=end, **lists) if starts else None


def merge(logs: Sequence[EventLog]) -> EventLog:
    """Returns the logs of one run's processes, in worker order, as if one process had written them all.

    Workers may be missing, and may have stopped at different steps: a total stays what it was when its worker stopped.

    Raises:
        DataError: the logs are of different runs.
    """
    first = logs[0]
    if len(logs) == 1:
        return first
    for other in logs[1:]:
        for name in _SHARED:
            mine, theirs = getattr(first.start, name), getattr(other.start, name)
            if mine != theirs:
                which = f"workers {first.start.worker} and {other.start.worker} are not of one run"
                raise DataError(f"{which}: {name} is {mine} and {theirs}")
    began = [log.start.began for log in logs if log.start.began > 0]
    devices = dict.fromkeys(log.start.device for log in logs)
    rounds: list[RoundApplied] = []
    for log in logs:  # all see the same ones: those of the lowest worker, and those that it was not there for
        seen = {(r.step, r.fragment) for r in rounds}
        rounds += [r for r in log.rounds if (r.step, r.fragment) not in seen]
    rounds.sort(key=lambda r: r.step)
    evals: dict[int, Eval] = {}
    for log in logs:
        evals = {e.step: e for e in log.evals} | evals
    return replace(
        first,
        start=replace(first.start, worker=None, began=min(began, default=0.0), device=", ".join(devices)),
        steps=tuple(_merged_steps(logs)),
        rounds=tuple(rounds),
        evals=tuple(evals[step] for step in sorted(evals)),
        faults=tuple(sorted(dict.fromkeys(f for p in logs for f in p.faults), key=lambda f: (f.step, f.worker))),
        views=tuple({view.view: view for log in reversed(logs) for view in log.views}.values()),
        scores=tuple(score for log in logs for score in log.scores),
        end=_merged_end(logs),
    )


def _merged_steps(logs: Sequence[EventLog]) -> Iterable[Step]:
    known = [{event.step: event for event in log.steps} for log in logs]
    newest: list[Step | None] = [None] * len(logs)
    for step in sorted({step for steps in known for step in steps}):
        newest = [steps.get(step, before) for steps, before in zip(known, newest, strict=True)]
        made = [steps[step] for steps in known if step in steps]
        losses, norms = _first([e.loss for e in made]), _first([e.grad_norm for e in made])
        yield Step(
            step=step,
            tokens=max(e.tokens for e in made),
            seconds=max(e.seconds for e in made),
            step_s=fmean(e.step_s for e in made),
            loss=losses,
            lr=made[0].lr,
            grad_norm=norms,
            tokens_per_s=max(e.tokens_per_s for e in made),
            participants=sum({loss, norm} != {None} for loss, norm in zip_longest(losses, norms)),
            **_totals([e for e in newest if e is not None]),
        )


def _merged_end(logs: Sequence[EventLog]) -> End | None:
    """Returns the end of a run: one worker has finished it, or all have stopped."""
    ends = [log.end for log in logs if log.end is not None]
    finished = [end for end in ends if end.outcome == "finished"]
    if not finished and len(ends) < len(logs):
        return None
    losses = [end.loss for end in finished or ends if math.isfinite(end.loss)]
    best = [end.best_loss for end in ends if math.isfinite(end.best_loss)]
    newest = [log.last for log in logs if log.last is not None]
    return End(
        step=max(e.step for e in newest),
        tokens=max(e.tokens for e in newest),
        seconds=max(e.seconds for e in newest),
        step_s=fmean(end.step_s for end in ends),
        loss=losses[0] if losses else math.nan,
        best_loss=min(best, default=math.nan),
        outcome="finished" if finished else "interrupted",
        **_totals(newest),
    )


def _first(lists: Sequence[Sequence[float | None]]) -> list[float | None]:
    """Returns, entry by entry, the first value that is not None."""
    return [next((value for value in values if value is not None), None) for values in zip_longest(*lists)]


def _totals(newest: Sequence[Totals]) -> dict[str, Any]:
    """Returns the sum entry by entry: every total is 0 but in the process of its worker."""
    return {
        name: [sum(values) for values in zip_longest(*(getattr(event, name) for event in newest), fillvalue=0)]
        for name in _TOTALS
    }
