"""Compares what the planner says of a run with what the run has measured."""

from atoll._util.units import bytes_text, share_text
from atoll.link.local import Faults
from atoll.outer.presets import Sync
from atoll.plan.line import Line, parse_line
from atoll.plan.method import Job
from atoll.plan.simulate import time_of
from atoll.settings.config import RunConfig
from atoll.train.progress.reporter import Reporter


def plan_check(config: RunConfig, reporter: Reporter) -> str:
    """Return a line with planned and measured figures; empty if nothing was sent, or workers may have been away."""
    counters, sync = reporter.counters(), config.synchronisation()
    wire_sent = sum(c.wire_sent for c in counters) / max(len(counters), 1)
    if sync is None or not wire_sent or config.faults_of_link() != Faults() or config.link.elastic:
        return ""
    workers, here = config.sync.workers, len(counters)
    job = Job(
        steps=config.train.steps or 0,
        step_s=reporter.totals.step_s * here,  # those in one process take turns
        period=config.sync.used_period,
        payload_bytes=tuple(sync.codec.payload_bytes(f.numel) for f in reporter.loops[0].fragments),
        delay=tuple(sync.delay_of(w, workers) for w in range(workers)) if isinstance(sync, Sync) else 0,
        workers=workers,
        gradients=not isinstance(sync, Sync),
    )
    emulated = config.link.emulate
    expected = time_of(job, parse_line(emulated) if emulated else Line(float("inf")))
    told = f"{bytes_text(expected.bytes_per_worker)} on the wire per worker (measured {bytes_text(wire_sent)})"
    if not emulated:  # the rate of a real line is not known
        return f"planned: {told}"
    busy_s = reporter.totals.seconds - reporter.waited_s
    planned, measured = (busy_s / max(busy_s + wait_s, 1e-9) for wait_s in (expected.exposed_s, reporter.waited_s))
    without = config.unplanned()
    line = f"{emulated} without {' and '.join(without)}" if without else emulated
    return f"planned for {line}: computing {share_text(planned)} (measured {share_text(measured)}), {told}"
