"""Describes a run as far as its time is concerned: steps, payloads, periods and delays."""

import math
from dataclasses import dataclass

from atoll._util.checks import check_whole
from atoll.core.allreduce import sent_bytes, shots
from atoll.core.schedule import Schedule
from atoll.errors import ConfigError
from atoll.plan.link import Link


def transfer_s(payload_bytes: int, workers: int, link: Link) -> float:
    """Return the seconds from a round's first bit leaving to its last arriving, on a line that carries nothing else."""
    return 8 * sent_bytes(payload_bytes, workers) / link.bits_per_s + shots(workers) * link.latency_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Holds what the time of a run depends on, apart from its link."""

    steps: int
    """Inner steps of every worker."""
    step_s: float
    """Seconds of compute of one inner step."""
    period: int
    """Inner steps between two sends of the same fragment."""
    payload_bytes: tuple[int, ...]
    """Bytes of one worker's payload, per fragment; empty if nothing is ever sent."""
    delay: int | tuple[int, ...]
    """Inner steps from a round's send to its apply; a tuple has one per worker."""
    workers: int
    gradients: bool = False
    """Whether all gradients are exchanged on every step (data-parallel); period and delay are then ignored."""
    finish: bool = True
    """Whether the run ends by exchanging what was not sent yet, as `OuterLoop.finish` does."""

    def __post_init__(self) -> None:
        check_whole("steps", self.steps, least=0)
        check_whole("workers", self.workers)
        if not 0 <= self.step_s < math.inf:
            raise ConfigError(f"step_s must be a number of seconds, 0 or more, got {self.step_s!r}")
        for size in self.payload_bytes:
            check_whole("payload_bytes", size, least=0)
        if isinstance(self.delay, tuple) and len(self.delay) != self.workers:
            raise ConfigError(f"delay has {len(self.delay)} entries for {self.workers} workers: give one, or one each")
        self.schedules()

    def lanes(self) -> tuple[tuple[int, ...], ...]:
        """Group the workers by delay, ascending: workers of one lane behave alike."""
        if self.gradients or isinstance(self.delay, int):
            return (tuple(range(self.workers)),)
        delays = self.delay
        return tuple(tuple(w for w in range(self.workers) if delays[w] == d) for d in sorted(set(delays)))

    def schedules(self) -> tuple[Schedule, ...]:
        """Return the schedule of every lane; none if nothing is ever sent."""
        fragments = len(self.payload_bytes)
        if not fragments:
            return ()
        if self.gradients:
            return (Schedule(1, fragments, 0),)
        delays = [self.delay] if isinstance(self.delay, int) else sorted(set(self.delay))
        return tuple(Schedule(self.period, fragments, delay) for delay in delays)
