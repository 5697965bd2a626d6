"""Composes the sections of the page from a watched run."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from atoll.errors import printable
from atoll.report.load import plain_text
from atoll.report.record import RunRecord
from atoll.report.settings_text import flat_settings
from atoll.report.tasks import score_rows
from atoll.runs import sample
from atoll.runs.events import Eval
from atoll.watch.fault_section import faults_section
from atoll.watch.lane_times import lanes_section, window_section
from atoll.watch.live_run import LiveRun
from atoll.watch.process import MOST_POINTS, ProcessLog
from atoll.watch.sections import (
    ENDED,
    Curve,
    LossCurve,
    LossSection,
    OuterSection,
    RunSection,
    Sample,
    Sections,
    SpeedSection,
)
from atoll.watch.state import condition
from atoll.watch.thinning import Bucket, Spread
from atoll.watch.traffic_section import traffic_section

NAMES: Final = tuple(Sections.__annotations__)
"""The names of all sections."""
_LONGEST = 300  # characters of words
_LONGEST_SAMPLE = 4000
_MOST_SETTINGS, _MOST_SAMPLES = 400, 20


def compose(run: LiveRun, share: float, now: float) -> Sections:
    """Returns all sections of a run.

    Args:
        run: The run.
        share: The share of its files that was read, 0 to 1.
        now: Unix time.
    """
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
        "state": how.state,
        "state_words": how.words,
        "since": how.since,
        "step": record.step if record else 0,
        "tokens": record.tokens if record else 0,
        "seconds": run.newest_s if record else None,
        "left_s": left_s,
        "ends_at": updated + left_s if updated is not None and left_s is not None else None,
        "tokens_per_s": (
            record.tokens_per_s
            if record and how.state in ENDED
            else max((step.tokens_per_s for step in newest), default=None)
        ),
        "utilisation": record.utilisation if record else None,
        "lr": newest[0].lr if newest else None,
        "updated": updated,
        "read": share,
    }


# ---------------------------------------------------------------------- curves


def loss_section(run: LiveRun) -> LossSection:
    """Returns the losses of the anchor and of each worker."""
    evals: dict[int, tuple[ProcessLog, Eval]] = {}
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
    curve = _curve([bucket.spreads[at] for bucket in buckets])
    return {"step": steps, "tokens": tokens, "seconds": seconds, "newest": process.newest_loss(worker), **curve}


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
    known = [(bucket.last[2], mean) for bucket in buckets if (mean := bucket.spreads[1].mean) is not None]
    if not known:
        return np.full(len(seconds), math.nan)
    times, means = [run.since(process, at) for at, _ in known], [mean for _, mean in known]
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


# ---------------------------------------------------------------------- texts


def samples_section(run: LiveRun) -> list[Sample]:
    """Returns what the model wrote at the last evaluations, the newest first."""
    found = [(e.step, e.prompt, e.text) for process in run.logs() for _, e in process.kept[sample.Sample]]
    return [
        {"step": step, "prompt": printable(prompt)[:_LONGEST_SAMPLE], "text": printable(text)[:_LONGEST_SAMPLE]}
        for step, prompt, text in sorted(dict.fromkeys(found), reverse=True)[:_MOST_SAMPLES]
    ]


def settings_section(run: LiveRun) -> list[list[str]]:
    """Returns the settings of the run file."""
    return [[*item] for item in flat_settings(run.about.settings).items()][:_MOST_SETTINGS]


def scores_section(record: RunRecord | None) -> list[list[str]]:
    """Returns the accuracy on each task."""
    return score_rows(record) if record else []
