"""What each process wrote down of a run, and several of them as one."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean
from typing import Any

from atoll.errors import DataError
from atoll.runs.events import End, Eval, Event, Fault, Resumed, Round, Saved, Start, Step

_TOTALS = ("bytes_sent", "bytes_received", "wait_s", "hidden_s", "wire_sent", "wire_received")
_SHARED = ("method", "workers", "steps", "parameters", "period", "codec", "fragments")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """All that one process wrote down of a run."""

    start: Start
    steps: tuple[Step, ...] = ()
    rounds: tuple[Round, ...] = ()
    evals: tuple[Eval, ...] = ()
    faults: tuple[Fault, ...] = ()
    saves: tuple[Saved, ...] = ()
    resumes: tuple[Resumed, ...] = ()
    end: End | None = None
    """None while it runs, or if it was killed."""

    @property
    def workers(self) -> tuple[int, ...]:
        """Those that the process trains."""
        return tuple(range(self.start.workers)) if self.start.worker is None else (self.start.worker,)

    @property
    def last(self) -> End | Step | None:
        """The newest totals."""
        return self.end or (self.steps[-1] if self.steps else None)


def part_of(events: Sequence[Event]) -> Part | None:
    """The events of one file; None before the first start."""
    starts = [e for e in events if isinstance(e, Start)]
    if not starts:
        return None
    newest = next((e for e in reversed(events) if isinstance(e, Step | End)), None)
    return Part(
        start=starts[-1],
        steps=tuple(e for e in events if isinstance(e, Step)),
        rounds=tuple(e for e in events if isinstance(e, Round)),
        evals=tuple(e for e in events if isinstance(e, Eval)),
        faults=tuple(e for e in events if isinstance(e, Fault)),
        saves=tuple(e for e in events if isinstance(e, Saved)),
        resumes=tuple(e for e in events if isinstance(e, Resumed)),
        end=newest if isinstance(newest, End) else None,  # an interrupted run may have gone on
    )


def merge(parts: Sequence[Part]) -> Part:
    """Parts of one run, in worker order, as if one process had written them all; DataError if they do not fit.

    Workers may be missing, and may have stopped at different steps: a total stays what it was when its worker stopped.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    for other in parts[1:]:
        for name in _SHARED:
            mine, theirs = getattr(first.start, name), getattr(other.start, name)
            if mine != theirs:
                who = f"workers {first.start.worker} and {other.start.worker} are not of one run"
                raise DataError(f"{who}: {name} is {mine} and {theirs}")
    began = [part.start.began for part in parts if part.start.began > 0]
    devices = dict.fromkeys(part.start.device for part in parts)
    rounds: list[Round] = []
    for part in parts:  # all see the same ones: those of the lowest worker, and what came after it had stopped
        seen = rounds[-1].step if rounds else -1
        rounds += [r for r in part.rounds if r.step > seen]
    evals: dict[int, Eval] = {}
    for part in parts:
        evals = {e.step: e for e in part.evals} | evals
    return Part(
        start=replace(first.start, worker=None, began=min(began, default=0.0), device=", ".join(devices)),
        steps=tuple(_steps(parts)),
        rounds=tuple(rounds),
        evals=tuple(evals[step] for step in sorted(evals)),
        faults=tuple(sorted(dict.fromkeys(f for p in parts for f in p.faults), key=lambda f: (f.step, f.worker))),
        saves=first.saves,
        resumes=first.resumes,
        end=_end(parts),
    )


def _steps(parts: Sequence[Part]) -> Iterable[Step]:
    known = [{event.step: event for event in part.steps} for part in parts]
    newest: list[Step | None] = [None] * len(parts)
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


def _end(parts: Sequence[Part]) -> End | None:
    """The run is over when one worker has finished it, or when all have stopped."""
    ends = [part.end for part in parts if part.end is not None]
    finished = [end for end in ends if end.outcome == "finished"]
    if not finished and len(ends) < len(parts):
        return None
    losses = [end.loss for end in finished or ends if math.isfinite(end.loss)]
    best = [end.best_loss for end in ends if math.isfinite(end.best_loss)]
    newest = [part.last for part in parts if part.last is not None]
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
    """Entry by entry, the first that is not None."""
    return [next((value for value in values if value is not None), None) for values in zip_longest(*lists)]


def _totals(newest: Sequence[Step | End]) -> dict[str, Any]:
    """Entry by entry the sum: every total is 0 but in the process of its worker."""
    return {
        name: [sum(values) for values in zip_longest(*(getattr(event, name) for event in newest), fillvalue=0)]
        for name in _TOTALS
    }
