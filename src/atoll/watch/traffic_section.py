"""Composes the section of the bytes between workers, beside what the planner foretells."""

import math
from dataclasses import replace
from functools import lru_cache, partial
from statistics import fmean

from atoll._util.units import bytes_text, share_text
from atoll.errors import ConfigError
from atoll.plan.line import Line, parse_line
from atoll.plan.method import Job
from atoll.plan.simulate import time_of
from atoll.report.record import RunRecord
from atoll.runs.events import Totals
from atoll.runs.lines import Lines
from atoll.watch.live_run import LiveRun
from atoll.watch.sections import Pair, Planned, TrafficOfWorker, TrafficSection

_MOST_PAIRS = 600
_MOST_PLANNED = 1024  # fragments times different delays: planning takes longer with both
_PERIODS = 12  # that the planner simulates: enough for a steady state


def traffic_section(run: LiveRun, record: RunRecord | None) -> TrafficSection:
    """Returns the bytes between workers, beside what the planner foretells."""
    if record is None:
        return {"pairs": [], "workers": [], "planned": None, "data_parallel_bytes": 0}
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
                }
            )
    workers.sort(key=lambda found: found["worker"])
    whole = record.data_parallel_bytes
    return {"pairs": _pairs(run), "workers": workers, "planned": _planned(run, record), "data_parallel_bytes": whole}


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


def _entry(totals: Totals | None, name: str, worker: int) -> int:
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
