"""Made-up runs whose workers are far apart: the events that each worker's process would write."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from atoll.core.schedule import Schedule
from atoll.runs.events import End, Eval, Event, Jsonl, RoundApplied, Saved, Start, Step

BEGAN = 1_700_000_000.0


@dataclass(frozen=True, kw_only=True)
class MadeUpRun:
    """A run on a link; times in seconds."""

    name: str = "far"
    method: str = "streaming"
    workers: int = 3
    steps: int = 80
    period: int = 20
    delay: int = 5
    payload_bytes: tuple[int, ...] = (40_000, 60_000)
    step_s: tuple[float, ...] = (0.1, 0.1, 0.125)
    """Per worker."""
    travel_s: float = 0.7
    """Of a round, once all have sent it."""
    late_s: tuple[float, ...] = (0.0, 0.25, 0.5)
    """When each worker begins."""
    log_every: int = 10

    def start(self, worker: int | None) -> Start:
        return Start(
            name=self.name, method=self.method, workers=self.workers, steps=self.steps, parameters=25_000,
            tokens_per_step=512, period=self.period, delay=[self.delay] * self.workers, codec="fp32",
            fragments=[size // 4 for size in self.payload_bytes], payload_bytes=list(self.payload_bytes),
            vocabulary=256, device="cpu", threads=1, weights=[1.0] * self.workers, worker=worker,
            began=BEGAN + self.late_s[worker or 0],
        )  # fmt: skip

    def events(self) -> list[list[Event]]:
        """Of each worker's process."""
        return [log.events for log in self._play()]

    def _play(self) -> "list[_Log]":
        random = Random(0)
        schedule = Schedule(self.period, len(self.payload_bytes), self.delay)
        logs = [_Log(self, worker) for worker in range(self.workers)]
        opened: dict[tuple[int, int], list[float]] = {}
        for step in range(1, self.steps + 1):
            for log in logs:
                log.now_s += self.step_s[log.worker] * random.uniform(0.95, 1.05)
            due = schedule.due(step)
            for fragment in due.send:
                opened[step, fragment] = [log.now_s for log in logs]
                for log in logs:
                    log.bytes_sent += self.payload_bytes[fragment]
            for fragment in due.apply:
                sent_s = opened.pop((step - self.delay, fragment))
                for log in logs:
                    log.apply(step - self.delay, fragment, step, sent_s)
            for log in logs:
                if step % self.log_every == 0:
                    log.report(step)
        for log in logs:
            log.end()
        return logs


class _Log:
    """What one worker writes."""

    def __init__(self, run: MadeUpRun, worker: int) -> None:
        self.run, self.worker = run, worker
        self.events: list[Event] = [run.start(worker)]
        self.now_s = run.late_s[worker]
        self.bytes_sent = self.bytes_received = self.wire = 0
        self.wait_s = self.hidden_s = 0.0

    def apply(self, sent: int, fragment: int, step: int, opened_s: list[float]) -> None:
        run, late_s = self.run, self.run.late_s[self.worker]
        size, others = run.payload_bytes[fragment], run.workers - 1
        done_s = max(opened_s) + run.travel_s
        waited_s = max(0.0, done_s - self.now_s)
        hidden_s = max(0.0, done_s - opened_s[self.worker] - waited_s)
        self.now_s += waited_s
        self.wait_s += waited_s
        self.hidden_s += hidden_s
        self.bytes_received += size * others
        self.wire += (size + 64) * others
        self.events.append(
            RoundApplied(
                step=sent, fragment=fragment, applied=step, members=list(range(run.workers)),
                expected=run.workers, norm=3.0, cosine=0.5, bytes=size, worker=self.worker,
                opened_s=opened_s[self.worker] - late_s, done_s=done_s - late_s, waited_s=waited_s,
                hidden_s=hidden_s, wire_sent=(size + 64) * others, wire_received=(size + 64) * others,
            )
        )  # fmt: skip

    def report(self, step: int) -> None:
        tokens = 512 * self.run.workers * step
        seconds = self.now_s - self.run.late_s[self.worker]
        loss = 2 + math.exp(-step / 30) + 0.01 * self.worker
        self.events.append(
            Step(
                step=step, tokens=tokens, seconds=seconds, step_s=self.run.step_s[self.worker],
                loss=self._mine(loss, None), lr=1e-3, grad_norm=self._mine(1.0, None),
                tokens_per_s=tokens / seconds, participants=1, **self._totals(),
            )
        )  # fmt: skip
        if self.worker == 0:
            self.events.append(Eval(step=step, tokens=tokens, seconds=seconds, loss=loss, best=True))
        self.events.append(Saved(step=step, seconds=seconds))

    def end(self) -> None:
        steps = self.run.steps
        self.events.append(
            End(
                step=steps, tokens=512 * self.run.workers * steps,
                seconds=self.now_s - self.run.late_s[self.worker], step_s=self.run.step_s[self.worker],
                loss=2.1 if self.worker == 0 else math.nan, best_loss=2.1 if self.worker == 0 else math.inf,
                outcome="finished", **self._totals(),
            )
        )  # fmt: skip

    def _mine(self, value: Any, other: Any) -> list[Any]:
        return [value if worker == self.worker else other for worker in range(self.run.workers)]

    def _totals(self) -> dict[str, Any]:
        totals = {name: self._mine(getattr(self, name), 0) for name in ("bytes_sent", "bytes_received")}
        totals |= {name: self._mine(getattr(self, name), 0.0) for name in ("wait_s", "hidden_s")}
        return totals | {name: self._mine(self.wire, 0) for name in ("wire_sent", "wire_received")}


def save(folder: Path, happened: Sequence[Event]) -> Path:
    """Write a run's folder, or that of one worker."""
    folder.mkdir(parents=True)
    sink = Jsonl(folder / "metrics.jsonl")
    for event in happened:
        sink.write(event)
    sink.close()
    (folder / "run.toml").write_text('name = "far"\n[sync]\nworkers = 3\n')
    (folder / "about.json").write_text(json.dumps({"seed": 7, "started": "2025-01-02T03:04:05+00:00"}))
    return folder


def save_workers(folder: Path, happened: Sequence[Sequence[Event]]) -> Path:
    """Write the folder of a run with a process per worker."""
    for worker, events in enumerate(happened):
        save(folder / f"worker-{worker}", events)
    return folder
