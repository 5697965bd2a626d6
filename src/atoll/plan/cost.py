"""Computes what a method costs in closed form: bytes, bandwidth, memory, and the least waiting.

Bytes are those of payloads, as `docs/wire.md` has them; headers add 80 bytes a message. Everything is exact except the
waiting where rounds overlap, which `plan.simulate` follows round by round.
"""

from bisect import bisect_left
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate, pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from atoll.core.allreduce import ONE_SHOT_MEMBERS, sent_bytes, shots
from atoll.core.schedule import Schedule
from atoll.plan.line import Line
from atoll.plan.method import Method, Model

Array = NDArray[np.float64]
FP32_BYTES = 4


# ---------------------------------------------------------------------- bytes


@lru_cache(maxsize=1024)
def round_bytes(model: Model, method: Method, workers: int) -> tuple[int, ...]:
    """Return the bytes that one worker sends in a round, per fragment."""
    return tuple(sent_bytes(size, workers) for size in method.payload_bytes(model))


def bytes_per_step(model: Model, method: Method, workers: int) -> float:
    """Return the bytes that one worker sends in a step, averaged over a period."""
    return sum(round_bytes(model, method, workers)) / method.period


def bytes_of_run(model: Model, method: Method, workers: int, steps: int) -> int:
    """Return the bytes that one worker sends in a run, whose end exchanges what was not sent yet."""
    sizes = round_bytes(model, method, workers)
    if method.gradients:
        return steps * sum(sizes)
    schedule = Schedule(method.period, len(sizes), method.delay)
    rounds = [max(0, (steps - schedule.offset(f)) // method.period) for f in range(len(sizes))]
    unsent = [steps > 0 and not schedule.is_send(f, steps) for f in range(len(sizes))]
    return sum(size * (n + last) for size, n, last in zip(sizes, rounds, unsent, strict=True))


def transfer_s(payload_bytes: int, workers: int, link: Line) -> float:
    """Return the seconds from a round's first bit leaving to its last arriving, on a line that carries nothing else."""
    return 8 * sent_bytes(payload_bytes, workers) / link.bits_per_s + shots(workers) * link.latency_s


def average_bits_per_s(model: Model, method: Method, workers: int) -> float:
    """Return the line rate below which a worker has to wait, whatever its delay."""
    return 8 * bytes_per_step(model, method, workers) / model.step_s


def peak_bits_per_s(model: Model, method: Method, workers: int) -> float:
    """Return the rate at which the largest round is over within its delay (one step without a delay).

    It is at least the average, because rounds that overlap share the line.
    """
    largest = 8 * max(round_bytes(model, method, workers)) / (max(method.delay, 1) * model.step_s)
    return max(largest, average_bits_per_s(model, method, workers))


# ---------------------------------------------------------------------- time


def least_wait_s(period: int, delay: int, steps: list[int], late_s: list[Array], line_late_s: Array) -> Array:
    """Return the least that is waited in a period, [rates]; exact if `rounds_apart`.

    Args:
        period: Inner steps of the period.
        delay: Inner steps from a send to its apply.
        steps: Steps of the period after which something is sent, ascending.
        late_s: By how much each of these would be late on an idle line, [rates]; may be negative.
        line_late_s: By how much a period's payloads take longer than its compute, [rates]; may be negative.
    """
    waits = np.maximum(0.0, np.array(late_s))
    chains = _chains(period, delay, steps, waits)
    least: Array = np.max([line_late_s, *chains, np.zeros_like(line_late_s)], axis=0)
    return least


def rounds_apart(period: int, delay: int, steps: list[int]) -> bool:
    """Return whether every round is applied before the next one leaves, so that none queues behind another."""
    gap = min(later - step for step, later in pairwise([*steps, steps[0] + period]))
    return delay == 0 or delay < gap


def _chains(period: int, delay: int, steps: list[int], waits: Array) -> Iterator[Array]:
    """Yield the waiting of sends each of which is applied before the next one leaves: their waits add up."""
    count, first = len(steps), np.arange(len(steps))
    later = np.concatenate([np.array(steps) + lap * period for lap in range(3)])
    stride = int((np.searchsorted(later, later[:count] + delay, side="right") - first).max())
    # Every stride-th send is picked; after some periods that returns to the first of them.
    turns = gcd(stride, count)
    for start in range(turns):
        yield waits[(start + stride * first[: count // turns]) % count].sum(axis=0) / (stride // turns)
    if count % stride and stride < count:  # or the chain restarts in every period
        yield waits[(first[:, None] + stride * first[None, : count // stride]) % count].sum(axis=1).max(axis=0)


# ---------------------------------------------------------------------- memory


def training_bytes(model: Model) -> int:
    """Return the bytes of parameters, gradients and both of Adam's moments in fp32, which every method needs."""
    return 4 * FP32_BYTES * model.parameters


def extra_bytes(model: Model, method: Method, workers: int, *, offload: bool = False) -> int:
    """Return the bytes that the outer loop adds on a worker's device.

    These are the anchor and velocities in fp32, the own momentum of Eager, the residual of error feedback, and the
    payloads of rounds in flight. With `offload` only one fragment's are on the device.
    """
    if method.gradients:
        return sum(_payloads(size, workers) for size in method.payload_bytes(model))
    vectors = 1 + method.velocities * (1 + method.eager) + bool(method.codec.feedback)
    values, payloads = method.values(model), method.payload_bytes(model)
    if offload:
        return vectors * FP32_BYTES * max(values) + _payloads(max(payloads), workers)
    return vectors * FP32_BYTES * sum(values) + _payloads(_most_in_flight(method, payloads), workers)


def _payloads(size: int, workers: int) -> int:
    """Return the payload bytes a worker holds of a round: every member's in one shot, its own and the mean in two."""
    return size * (workers if workers <= ONE_SHOT_MEMBERS else 2)


def _most_in_flight(method: Method, payloads: tuple[int, ...]) -> int:
    """Return the most payload bytes of one worker that are in flight at once: those sent within delay + 1 steps."""
    schedule = Schedule(method.period, len(payloads), method.delay)
    # Two periods back are enough for a delay of one.
    steps = [schedule.offset(f) + lap * method.period for lap in range(3) for f in range(len(payloads))]
    sent = [0, *accumulate(payloads * 3)]
    return max(sent[n + 1] - sent[bisect_left(steps, step - method.delay)] for n, step in enumerate(steps))
