"""Composes the sections of the page from a watched run."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from statistics import fmean
from typing import Any, Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from atoll._util.units import bytes_text, share_text
from atoll.errors import ConfigError, printable
from atoll.plan.line import Line, parse_line
from atoll.plan.method import Job
from atoll.plan.simulate import time_of
from atoll.report.load import plain_text
from atoll.report.record import RunRecord
from atoll.report.settings_text import flat_settings
from atoll.report.tasks import scores_by_task
from atoll.runs import events
from atoll.runs.lines import Lines
from atoll.runs.sample import Sample
from atoll.watch.lane_times import lanes_section, window_section
from atoll.watch.process import MOST_KEPT, MOST_POINTS, ProcessLog
from atoll.watch.run import LiveRun
from atoll.watch.sections import (
    Curve,
    Fault,
    FaultsSection,
    LossCurve,
    LossSection,
    OuterSection,
    Pair,
    Planned,
    RunSection,
    Sections,
    SpeedSection,
    TrafficOfWorker,
    TrafficSection,
)
from atoll.watch.state import condition
from atoll.watch.thinning import Bucket, Spread

NAMES: Final = tuple(Sections.__annotations__)
"""The names of all sections."""
_LONGEST = 300  # characters of words
_LONGEST_SAMPLE = 4000
_MOST_SETTINGS, _MOST_PAIRS, _MOST_SAMPLES = 400, 600, 20
_MOST_PLANNED = 1024  # fragments times different delays: planning takes longer with both
_PERIODS = 12  # that the planner simulates: enough for a steady state


def compose(run: LiveRun, share: float, now: float) -> Sections:
    """Returns all sections of a run at a Unix time; `share` is the part of its files that was read, 0 to 1."""
    return cast(Sections, compose_some(run, share, now, NAMES))


def compose_some(run: LiveRun, share: float, now: float, names: Iterable[str]) -> dict[str, Any]:
    """Returns some sections, as `compose` does."""
    record = run.record()
    makers: dict[str, Callable[[], object]] = {
        "run": lambda: run_section(run, record, share, now),
        "loss": lambda: loss_section(run),
        "speed": lambda: speed_section(run),
        "lanes": lambda: lanes_section(run, record, now) if record else {"end_s": 0.0, "workers": [], "views": []},
        "now": lambda: window_section(run),
        "traffic": lambda: traffic_section(run, record),
        "outer": lambda: outer_section(run),
        "faults": lambda: faults_section(run),
        "samples": lambda: samples_section(run),
        "settings": lambda: settings_section(run),
        "scores": lambda: scores_section(record),
    }
    return {name: makers[name]() for name in NAMES if name in names}


def run_section(run: LiveRun, record: RunRecord | None, share: float, now: float) -> RunSection:
    """Returns what the run is, and how it is doing."""
    start, how = record.start if record else None, condition(run, record, share, now)
    updated = max(run.heard.values(), default=None)
    left_s = None if record is None or record.end is not None else run.left_s(now)
    newest = [process.recent[-1][1] for process in run.heard_of(now) if process.recent]
    return {
        "name": record.name if record else plain_text(run.about.name),
        "method": plain_text(start.method) if start else "",
        "workers": start.workers if start else 0,
        "steps": start.steps if start else 0,
        "parameters": start.parameters if start else 0,
        "period": start.period if start else 0,
        "delay": start.delay if start else [],
        "codec": plain_text(start.codec) if start else "",
        "device": plain_text(start.device)[:_LONGEST] if start else "",
        "began": run.began or None,
        "state": how.state,
        "state_words": how.words,
        "since": how.since,
        "step": record.step if record else 0,
        "tokens": record.tokens if record else 0,
        "seconds": run.newest_s if record else None,
        "left_s": left_s,
        "ends_at": updated + left_s if updated is not None and left_s is not None else None,
        "tokens_per_s": max((step.tokens_per_s for step in newest), default=None),
        "utilisation": record.utilisation if record else None,
        "lr": newest[0].lr if newest else None,
        "updated": updated,
        "read": share,
    }


# ---------------------------------------------------------------------- curves


def loss_section(run: LiveRun) -> LossSection:
    """Returns the losses of the anchor and of each worker."""
    evals: dict[int, tuple[ProcessLog, events.Eval]] = {}
    for process in reversed(run.logs()):
        evals |= {e.step: (process, e) for e in process.evals.items()}
    rows = [
        [e.step, e.tokens, run.since(p, p.base + e.seconds), e.loss, e.anchor_step, e.best]
        for _, (p, e) in sorted(evals.items(), key=lambda item: item[0])
    ]
    workers: dict[str, LossCurve] = {}
    for worker, process in sorted(((w, p) for p in run.logs() for w in p.tracks), key=lambda found: found[0]):
        workers[str(worker)] = _loss_curve(run, process, worker)
    return {"anchor": rows[:: -(-len(rows) // MOST_POINTS) or 1] if rows else [], "workers": workers}


def _loss_curve(run: LiveRun, process: ProcessLog, worker: int) -> LossCurve:
    at = list(process.tracks).index(worker)
    buckets = [bucket for bucket in process.curves["loss"].buckets() if bucket.spreads[at].known]
    steps, tokens, times = _places(buckets)
    seconds = [run.since(process, time) for time in times]
    return {"step": steps, "tokens": tokens, "seconds": seconds, **_curve([bucket.spreads[at] for bucket in buckets])}


def speed_section(run: LiveRun) -> SpeedSection:
    """Returns the speed over time: rates of all workers as the lowest tells them, waits as mean of all."""
    found = [(process, buckets) for process in run.logs() if (buckets := process.curves["speed"].buckets())]
    if not found:
        return {"step": [], "seconds": [], "tokens_per_s": [], "utilisation": [], "lr": []}
    first, buckets = found[0]
    steps, _, times = _places(buckets)
    seconds = [run.since(first, at) for at in times]
    shares = np.stack([_busy(run, process, buckets, seconds) for process, buckets in found])
    known = np.isfinite(shares)
    counts = known.sum(axis=0)
    means = np.where(known, shares, 0).sum(axis=0) / np.maximum(counts, 1)
    return {
        "step": steps,
        "seconds": seconds,
        "tokens_per_s": [bucket.spreads[0].mean for bucket in buckets],
        "utilisation": [mean if n else None for mean, n in zip(means.tolist(), counts.tolist(), strict=True)],
        "lr": [bucket.spreads[2].mean for bucket in buckets],
    }


def _busy(
    run: LiveRun, process: ProcessLog, buckets: Sequence[Bucket], seconds: Sequence[float]
) -> NDArray[np.float64]:
    """Returns the utilisation of a process at some times; NaN where it is not known."""
    known = [bucket for bucket in buckets if bucket.spreads[1].known]
    if not known:
        return np.full(len(seconds), math.nan)
    times = [run.since(process, bucket.last[2]) for bucket in known]
    means = [bucket.spreads[1].total / bucket.spreads[1].known for bucket in known]
    return np.interp(seconds, times, means, left=math.nan, right=math.nan)


def outer_section(run: LiveRun) -> OuterSection:
    """Returns the outer gradients, as the lowest worker tells them, and others where it was not there."""
    logs = run.logs()
    chosen: list[Bucket] = []
    for process in logs:
        ends = [bucket.last[0] for bucket in chosen]
        more = [bucket for bucket in process.curves["outer"].buckets() if not _is_covered(bucket, chosen, ends)]
        chosen = sorted(chosen + more)
    chosen = chosen[:: -(-len(chosen) // MOST_POINTS) or 1]
    return {
        "fragments": len(logs[0].start.payload_bytes) if logs else 0,
        "step": [bucket.last[0] for bucket in chosen],
        "norm": _curve([bucket.spreads[0] for bucket in chosen]),
        "cosine": _curve([bucket.spreads[1] for bucket in chosen]),
    }


def _is_covered(bucket: Bucket, chosen: Sequence[Bucket], ends: Sequence[float]) -> bool:
    """Returns whether the steps of a bucket overlap those of any that was chosen; these are in order."""
    after = bisect_left(ends, bucket.first[0])
    return after < len(chosen) and chosen[after].first[0] <= bucket.last[0]


def _places(buckets: Sequence[Bucket]) -> list[list[float]]:
    """Returns steps, tokens and times of the newest point of each bucket."""
    return [[bucket.last[n] for bucket in buckets] for n in range(3)]


def _curve(spreads: Sequence[Spread]) -> Curve:
    return {
        "mean": [spread.mean for spread in spreads],
        "low": [spread.low if spread.known else None for spread in spreads],
        "high": [spread.high if spread.known else None for spread in spreads],
    }


# ---------------------------------------------------------------------- bytes


def traffic_section(run: LiveRun, record: RunRecord | None) -> TrafficSection:
    """Returns the bytes between workers, beside what the planner foretells."""
    if record is None:
        return {"pairs": [], "workers": [], "planned": None, "data_parallel_bytes": 0}
    planned = _planned(run, record)
    workers: list[TrafficOfWorker] = []
    for process in run.logs():
        for worker in process.tracks:
            workers.append(
                {
                    "worker": worker,
                    "sent_bytes": _entry(process.last, "wire_sent", worker),
                    "received_bytes": _entry(process.last, "wire_received", worker),
                    "rate": process.rate(partial(_entry, name="wire_sent", worker=worker)),
                    "payload_bytes": _entry(process.last, "bytes_sent", worker),
                    "planned_rate": planned["bytes_per_s"] if planned else None,
                }
            )
    workers.sort(key=lambda found: found["worker"])
    whole = record.data_parallel_bytes
    return {"pairs": _pairs(run), "workers": workers, "planned": planned, "data_parallel_bytes": whole}


def _pairs(run: LiveRun) -> list[Pair]:
    """Returns what workers have sent to each other; of very many pairs those that have sent most."""
    found: list[Pair] = []
    for process in run.logs():
        if not process.kept[Lines]:
            continue
        (since, first), (at, last) = process.kept[Lines][0], process.kept[Lines][-1]
        for to, (before, sent, capacity) in enumerate(
            zip(first.sent_bytes, last.sent_bytes, last.capacity, strict=False)
        ):
            if to == last.worker or not (sent or capacity):
                continue
            rate = max(0, sent - before) / (at - since) if at > since else None
            found.append(
                {
                    "from": last.worker,
                    "to": to,
                    "sent_bytes": sent,
                    "rate": rate,
                    "capacity": capacity,
                    "at_s": run.since(process, at),
                }
            )
    most = sorted(found, key=lambda pair: -pair["sent_bytes"])[:_MOST_PAIRS]
    return sorted(most, key=lambda pair: (pair["from"], pair["to"]))


def _entry(totals: events.Totals | None, name: str, worker: int) -> int:
    values: list[int] = getattr(totals, name) if totals else []
    return values[worker] if worker < len(values) else 0


def _planned(run: LiveRun, record: RunRecord) -> Planned | None:
    """Returns what the planner foretells for the run's line: the emulated one, or else one that is never slow."""
    timed = [step.step_s for process in run.logs() for _, step in process.recent if 0 < step.step_s < math.inf]
    start = record.start
    if not record.on_wire or not timed or len(start.payload_bytes) * len({*start.delay}) > _MOST_PLANNED:
        return None
    link = record.config.get("link")
    emulated = link.get("emulate") if isinstance(link, dict) else None
    try:
        line = parse_line(emulated) if isinstance(emulated, str) else None
        job = replace(record.job(), finish=False, step_s=float(f"{fmean(timed):.2g}"))
        return _foretold(replace(job, steps=_PERIODS * (1 if job.gradients else job.period)), line)
    except ConfigError:
        return None


@lru_cache(maxsize=64)
def _foretold(job: Job, line: Line | None) -> Planned:
    half = replace(job, steps=job.steps // 2)  # the first periods have no rounds to wait for
    before, after = (time_of(one, line or Line(math.inf)) for one in (half, job))
    seconds = after.total_s - before.total_s
    rate = (after.bytes_per_worker - before.bytes_per_worker) / seconds if seconds > 0 else None
    share = (after.compute_s - before.compute_s) / seconds if line and seconds > 0 else None
    words = f"{bytes_text(rate or 0.0)}/s a worker on the wire"
    if share is not None:
        words = f"{words}, computing {share_text(share)} of the time on {line}"
    return {"words": words, "bytes_per_s": rate, "utilisation": share}


# ---------------------------------------------------------------------- faults and settings


def faults_section(run: LiveRun) -> FaultsSection:
    """Returns what went wrong, each once although several workers tell of it."""
    found: dict[tuple[Any, ...], Fault] = {}
    logs = run.logs()
    for process in logs:
        for kind in (events.Fault, events.Lost, events.RoundApplied):
            for at, event in process.kept[kind]:
                for fault in _faults(event):
                    key = (
                        fault["kind"],
                        fault["step"],
                        fault["worker"],
                        fault["words"] if kind is events.Fault else "",
                    )
                    found.setdefault(key, fault | {"at_s": run.since(process, at)})
    latest = sorted(found.values(), key=lambda fault: (fault["at_s"] or 0.0, fault["step"]), reverse=True)
    return {"count": max(len(latest), _count(logs)), "latest": latest[:MOST_KEPT]}


def _count(logs: Sequence[ProcessLog]) -> int:
    """Returns how much went wrong: faults of each process, and payloads that any of them has missed."""
    return sum(p.counts["faults"] for p in logs) + max((p.counts["missed"] for p in logs), default=0)


def _faults(event: events.Event) -> Iterable[Fault]:
    match event:
        case events.Fault():
            words = plain_text(event.what)[:_LONGEST]
            yield {"at_s": None, "step": event.step, "worker": event.worker, "kind": _kind(words), "words": words}
        case events.Lost():
            words = f"no longer a member: {plain_text(event.why)[:_LONGEST]}"
            yield {"at_s": None, "step": event.step, "worker": event.worker, "kind": "lost", "words": words}
        case events.RoundApplied():
            came = f"{len(event.members)} of {event.expected} payloads"
            words = f"round of step {event.step}, fragment {event.fragment}: {came} came"
            yield {"at_s": None, "step": event.step, "worker": None, "kind": "dropped", "words": words}


def _kind(words: str) -> Literal["guarded", "left out", "rolled back", "fault"]:
    """Returns the kind of a fault by the trainer's words."""
    if "rolled back" in words:
        return "rolled back"
    if words.startswith("left out"):
        return "guarded" if "far larger" in words else "left out"
    return "fault"


def samples_section(run: LiveRun) -> list[dict[str, Any]]:
    """Returns what the model wrote at the last evaluations, the newest first."""
    found = [(e.step, e.prompt, e.text) for process in run.logs() for _, e in process.kept[Sample]]
    return [
        {"step": step, "prompt": printable(prompt)[:_LONGEST_SAMPLE], "text": printable(text)[:_LONGEST_SAMPLE]}
        for step, prompt, text in sorted(dict.fromkeys(found), reverse=True)[:_MOST_SAMPLES]
    ]


def settings_section(run: LiveRun) -> list[list[str]]:
    """Returns the settings of the run file."""
    return [[*item] for item in flat_settings(run.about.settings).items()][:_MOST_SETTINGS]


def scores_section(record: RunRecord | None) -> list[list[str]]:
    """Returns the accuracy on each task."""
    return [[task, texts[0]] for task, texts in scores_by_task([record]).items()] if record else []
