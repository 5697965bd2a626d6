"""What a method costs, in closed form: bytes, bandwidth, memory, and the waiting that nothing hides.

Bytes are those of payloads, as `docs/wire.md` has them; headers add 64 bytes a message. All are exact, but for the
waiting where rounds overlap: `plan.simulate` follows those one by one.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from math import gcd

import numpy as np

from atoll.core.allreduce import ONE_SHOT_MEMBERS, sent_bytes, shots
from atoll.core.schedule import Schedule
from atoll.plan.lines import Array
from atoll.plan.method import Method, Model

FP32_BYTES = 4


# ---------------------------------------------------------------------- bytes


@lru_cache(maxsize=1024)
def round_bytes(model: Model, method: Method, workers: int) -> tuple[int, ...]:
    """What one worker sends in a round of every fragment."""
    return tuple(sent_bytes(size, workers) for size in method.payload_bytes(model))


def bytes_per_step(model: Model, method: Method, workers: int) -> float:
    """What one worker sends, on average over a period."""
    return sum(round_bytes(model, method, workers)) / method.period


def bytes_of_run(model: Model, method: Method, workers: int, steps: int) -> int:
    """What one worker sends in a run of so many steps; at its end, all that was not sent yet is."""
    sizes = round_bytes(model, method, workers)
    if method.gradients:
        return steps * sum(sizes)
    schedule = Schedule(method.period, len(sizes), method.delay)
    rounds = [max(0, (steps - schedule.offset(f)) // method.period) for f in range(len(sizes))]
    unsent = [steps > 0 and not schedule.is_send(f, steps) for f in range(len(sizes))]
    return sum(size * (n + last) for size, n, last in zip(sizes, rounds, unsent, strict=True))


def average_bits_per_s(model: Model, method: Method, workers: int) -> float:
    """The rate at which a line keeps up with a worker that never waits; below, it must."""
    return 8 * bytes_per_step(model, method, workers) / model.step_s


def peak_bits_per_s(model: Model, method: Method, workers: int) -> float:
    """The rate at which the largest exchange is over in the time it has: its delay, or one step if it has none.

    Where exchanges overlap they share the line, which has to carry the average all the same.
    """
    largest = 8 * max(round_bytes(model, method, workers)) / (max(method.delay, 1) * model.step_s)
    return max(largest, average_bits_per_s(model, method, workers))


# ---------------------------------------------------------------------- time


def exposed_at(model: Model, method: Method, workers: int, rates: Array, *, latency_s: float = 0.0) -> Array:
    """[rates]: seconds of waiting in every period (data-parallel: every step), as atoll sends: after the step.

    Exact if `rounds_apart`; otherwise rounds queue and hide behind each other, and this is the least that is waited.
    """
    sent = sent_together(model, method, workers)
    hidden_s = method.delay * model.step_s
    latency_s *= shots(workers)
    waits = [8 * size / rates + latency_s - hidden_s for size in sent.values()]
    return least_waited_s(method, list(sent), waits, 8 * sum(sent.values()) / rates - method.period * model.step_s)


def least_waited_s(method: Method, steps: list[int], late_s: list[Array], line_late_s: Array) -> Array:
    """[rates]: the least that is waited in a period, of what is sent after these of its steps.

    `late_s` is by how much each would be late on a free line, `line_late_s` by how much the line is after a period;
    either may be less than 0.
    """
    waits = np.maximum(0.0, np.array(late_s))
    least: Array = np.max([line_late_s, *_chains(method, steps, waits), np.zeros_like(line_late_s)], axis=0)
    return least


def rounds_apart(model: Model, method: Method) -> bool:
    """Whether every round has been applied before the next one leaves, so that none ever waits for another."""
    steps = list(sent_together(model, method, 1))
    gap = min((later - step for step, later in pairwise([*steps, steps[0] + method.period])), default=0)
    return method.delay == 0 or method.delay < gap


def sent_together(model: Model, method: Method, workers: int) -> dict[int, int]:
    """By step of the period, ascending: bytes that a worker sends after it. They are applied together, too."""
    together: dict[int, int] = {}
    for offset, size in zip(offsets(model, method), round_bytes(model, method, workers), strict=True):
        together[offset] = together.get(offset, 0) + size
    return together


@lru_cache(maxsize=1024)
def offsets(model: Model, method: Method) -> tuple[int, ...]:
    """After which step of the period each fragment is sent."""
    schedule = Schedule(method.period, len(method.values(model)), 0)
    return tuple(schedule.offset(fragment) for fragment in range(schedule.fragments))


def _chains(method: Method, steps: list[int], waits: Array) -> Iterator[Array]:
    """What is waited in a period for sends of which each is applied before the next one leaves: their waits add up."""
    count, first = len(steps), np.arange(len(steps))
    later = np.concatenate([np.array(steps) + lap * method.period for lap in range(3)])
    stride = int((np.searchsorted(later, later[:count] + method.delay, side="right") - first).max())
    # Every so many sends one is picked; that comes back to the first of them after some periods.
    turns = gcd(stride, count)
    for start in range(turns):
        yield waits[(start + stride * first[: count // turns]) % count].sum(axis=0) / (stride // turns)
    if count % stride and stride < count:  # or one begins anew with every period
        yield waits[(first[:, None] + stride * first[None, : count // stride]) % count].sum(axis=1).max(axis=0)


# ---------------------------------------------------------------------- memory


def bare_bytes(model: Model) -> int:
    """Parameters and both of Adam's moments, in fp32: what training needs anyway, activations and gradients aside."""
    return 3 * FP32_BYTES * model.parameters


def training_bytes(model: Model) -> int:
    """The same with gradients: what a worker's device must hold with any method, activations aside."""
    return bare_bytes(model) + FP32_BYTES * model.parameters


def extra_bytes(model: Model, method: Method, workers: int, *, offload: bool = False) -> int:
    """What the outer loop adds on a worker's device.

    Anchor and velocities in fp32, Eager's own momentum, feedback's residual, and the payloads of rounds on their way.
    With `offload`, they are in the machine's memory but for one fragment's.
    """
    if method.gradients:
        return sum(_payloads(size, workers) for size in method.payload_bytes(model))
    vectors = 1 + method.velocities * (1 + method.eager) + method.codec.feedback
    values, payloads = method.values(model), method.payload_bytes(model)
    if offload:
        return vectors * FP32_BYTES * max(values) + _payloads(max(payloads), workers)
    return vectors * FP32_BYTES * sum(values) + _payloads(_most_in_flight(method, payloads), workers)


def _payloads(size: int, workers: int) -> int:
    """All that are there of a round: everybody's in one shot; in two, one's own and the mean."""
    return size * (workers if workers <= ONE_SHOT_MEMBERS else 2)


def _most_in_flight(method: Method, payloads: tuple[int, ...]) -> int:
    """Bytes of one worker's payloads that are on their way together, at worst: what is sent in a delay and a step."""
    schedule = Schedule(method.period, len(payloads), method.delay)
    laps = [
        (schedule.offset(f) + lap * method.period, size) for lap in range(3) for f, size in enumerate(payloads)
    ]  # by step, ascending; two periods back are enough for a delay of one
    most = flying = oldest = 0
    for step, size in laps:
        flying += size
        while laps[oldest][0] < step - method.delay:
            flying -= laps[oldest][1]
            oldest += 1
        most = max(most, flying)
    return most
