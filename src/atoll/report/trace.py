"""Writes runs as a trace for ui.perfetto.dev and chrome://tracing: what each worker did when.

The file is JSON in Chrome's trace event format. A worker is a process with tracks of spans (ph X), moments (i) and
counters (C). Times are whole microseconds since the first worker of the run began.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from atoll._util.disk import write_atomically
from atoll.errors import ConfigError
from atoll.report.lanes import Lane, Span, lanes
from atoll.report.load import load_all
from atoll.report.record import EventLog, RunRecord
from atoll.runs.events import RoundApplied, Step, utilisation

_STEPS, _WAITING, _ROUNDS = 1, 2, 3  # tracks; rounds that overlap go on in the next ones

Entry = dict[str, Any]


def write_trace(folders: Sequence[Path], out: Path) -> Path:
    """Writes one trace of these runs' folders to `out`, whole or not at all, and returns its path.

    A folder that is no run but holds runs stands for those.
    """
    out = Path(out)
    if out.is_dir():
        raise ConfigError(f"--trace {out}: is a folder; give the file to write, such as {out / 'trace.json'}")
    trace = {"traceEvents": list(entries(load_all(folders))), "displayTimeUnit": "ms"}
    write_atomically(out, json.dumps(trace, allow_nan=False, separators=(",", ":")).encode())
    return out


def entries(records: Sequence[RunRecord]) -> Iterator[Entry]:
    """Yields the entries of a trace: the names of its tracks, then what happened in order of time."""
    names: list[Entry] = []
    happened: list[Entry] = []
    process = 0
    for record in records:
        logs = {worker: log for log in record.processes for worker in log.workers}
        for lane in lanes(record):
            process += 1  # 0 is the system's own
            names += _names(process, f"{record.name}, worker {lane.worker}", lane)
            happened += [{**entry, "pid": process} for entry in _happened(logs[lane.worker], lane)]
    yield from names
    yield from sorted(happened, key=lambda entry: (entry["ts"], -entry.get("dur", 0)))


def _names(process: int, title: str, lane: Lane) -> Iterator[Entry]:
    tracks = {_STEPS: "inner steps", _WAITING: "waiting"}
    tracks |= {_ROUNDS + row: f"rounds {row + 1}" if row else "rounds" for row in sorted(set(lane.rows))}
    named = [("process", 0, title, process), *(("thread", track, name, track) for track, name in tracks.items())]
    for kind, track, name, place in named:
        for what, args in (("name", {"name": name}), ("sort_index", {"sort_index": place})):
            yield {"ph": "M", "pid": process, "tid": track, "ts": 0, "name": f"{kind}_{what}", "args": args}


# ---------------------------------------------------------------------- what happened


def _happened(log: EventLog, lane: Lane) -> Iterator[Entry]:
    """Yields what a worker did: its steps, waits, rounds, counters and moments."""
    yield from _steps(log, lane)
    for wait in lane.waits:
        yield _span("waiting", _WAITING, wait, {})
    for r, span, row in zip(lane.rounds, lane.flights, lane.rows, strict=True):
        yield _span(f"fragment {r.fragment}, step {r.step}", _ROUNDS + row, span, _round(r))
    for step in log.steps:
        yield from _counters(step, lane)
    yield from _member_counts(log, lane)
    yield from _moments(log, lane)


def _steps(log: EventLog, lane: Lane) -> Iterator[Entry]:
    """Yields a span from each step event to the next, evaluations and waiting included."""
    known = [step for step in log.steps if math.isfinite(step.seconds)]
    before = [(0, 0.0, 0.0), *((step.step, step.seconds, _entry(step.wait_s, lane.worker) or 0.0) for step in known)]
    for step, (made, since_s, waited_s), (_, until_s, waits_s) in zip(known, before, before[1:], strict=False):
        span = Span(lane.begin_s + since_s, lane.begin_s + max(until_s, since_s))
        args = {
            "loss": _entry(step.loss, lane.worker),
            "lr": step.lr,
            "gradient norm": _entry(step.grad_norm, lane.worker),
            "tokens/s, all workers": step.tokens_per_s,
            "waited_s": max(waits_s - waited_s, 0.0),
            "utilisation": utilisation(waits_s - waited_s, until_s - since_s),
        }
        yield _span(f"steps {made + 1} to {step.step}", _STEPS, span, args)


def _round(r: RoundApplied) -> dict[str, Any]:
    names = ("step", "fragment", "bytes", "wire_sent", "wire_received", "hidden_s", "waited_s")
    members = ", ".join(map(str, r.members))
    return {name: getattr(r, name) for name in names} | {"applied after step": r.applied, "members": members}


def _counters(step: Step, lane: Lane) -> Iterator[Entry]:
    def at(values: Sequence[float | None]) -> float | None:
        return _entry(values, lane.worker)

    found = {
        "loss": {"nats per token": at(step.loss)},
        "payload": {"sent, bytes": at(step.bytes_sent), "received, bytes": at(step.bytes_received)},
    }
    if at(step.wire_sent) or at(step.wire_received):
        found["wire"] = {"sent, bytes": at(step.wire_sent), "received, bytes": at(step.wire_received)}
    for name, values in found.items():
        if math.isfinite(step.seconds) and (known := _finite(values)):
            at_us = _micros(lane.begin_s + step.seconds)
            yield {"ph": "C", "cat": "run", "tid": 0, "ts": at_us, "name": name, "args": known}


def _member_counts(log: EventLog, lane: Lane) -> Iterator[Entry]:
    """Yields how many workers trained and caught up in an elastic run, as this worker saw it."""
    for view in log.views:
        if math.isfinite(view.seconds):
            counts = {"training": len(view.members), "catching up": len(view.following)}
            at_us = _micros(lane.begin_s + view.seconds)
            yield {"ph": "C", "cat": "run", "tid": 0, "ts": at_us, "name": "members", "args": counts}


def _moments(log: EventLog, lane: Lane) -> Iterator[Entry]:
    """Yields evaluations, checkpoints, changes of members and faults; some are placed at the step event after them."""
    reports = [(0, 0.0), *((step.step, step.seconds) for step in log.steps)]
    found: list[tuple[str, float, Mapping[str, Any]]] = []
    if lane.worker == log.workers[0]:
        for e in log.evals:
            of = {"outer parameters of step": e.anchor_step} if e.is_behind else {}
            found.append(("evaluation", e.seconds, {"step": e.step, "held-out loss": e.loss, **of}))
        found += [("saved", e.seconds, {"step": e.step}) for e in log.saves]
        found += [("resumed", e.seconds, {"step": e.step}) for e in log.resumes]
        found += [(f"view {e.view}", e.seconds, {"step": e.step, "members": e.members}) for e in log.views]
    placed: list[tuple[str, int, Mapping[str, Any]]] = []
    placed += [("fault", e.step, {"what": e.what}) for e in log.faults if e.worker == lane.worker]
    placed += [(f"worker {e.worker} is gone", e.step, {"why": e.why}) for e in log.losses]
    placed += [(f"worker {e.worker} has joined", e.step, {"at": e.at, "cut off at": e.since}) for e in log.joins]
    for name, step, args in placed:
        at_s = next((after for (a, _), (b, after) in pairwise(reports) if a < step <= b), reports[-1][1])
        found.append((name, at_s, {"step": step, **args}))
    for name, at_s, args in found:
        if math.isfinite(at_s):
            where = {"ts": _micros(lane.begin_s + at_s), "tid": _STEPS, "s": "t"}
            yield {"ph": "i", "cat": "run", **where, "name": name, "args": _finite(args)}


# ---------------------------------------------------------------------- numbers


def _span(name: str, track: int, span: Span, args: Mapping[str, Any]) -> Entry:
    begin = _micros(span.begin_s)  # both ends are rounded, so that what touches still does
    where = {"ph": "X", "cat": "run", "tid": track, "ts": begin, "dur": _micros(span.end_s) - begin}
    return {**where, "name": name, "args": _finite(args)}


def _micros(seconds: float) -> int:
    return round(1e6 * seconds)


def _entry(values: Sequence[float | None], worker: int) -> float | None:
    return values[worker] if worker < len(values) else None


def _finite(args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that JSON can hold: without None, NaN and infinity."""
    return {
        name: v for name, v in args.items() if v is not None and not (isinstance(v, float) and not math.isfinite(v))
    }
