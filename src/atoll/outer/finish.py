"""Ends a run: applies rounds in flight, exchanges the rest once more, and makes the anchor the model.

These are the phases of `OuterLoop.finish()`.
"""

import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from atoll.core.flat import check_coverage
from atoll.core.schedule import Schedule
from atoll.link.base import RoundId
from atoll.outer.admission import tell_advanced
from atoll.outer.flight import Flight
from atoll.outer.fragment import FragmentReplica

if TYPE_CHECKING:
    from atoll.outer.loop import OuterLoop

_CALLER = 5  # stack level of a script: past this function, a phase, finish() and torch.no_grad's wrapper


def prepare(loop: "OuterLoop") -> None:
    """Measure what has not been sent, and check that it can be."""
    loop._sending = {}  # of an operation that was refused
    loop._begin()
    if loop._schedule is None:
        return
    if loop.link.workers > 1:
        _warn_of_period(loop._schedule, loop.steps)
    loop._watch.stepped(loop.link, judge_last=True)
    loop._roll_backs.settle(range(len(loop.fragments)), loop.steps)
    check_coverage(loop.model, loop._windows)
    spoilt, moved = False, False
    for fragment, replica in enumerate(loop._rounds.replicas):
        round_id = RoundId(loop.steps, fragment, last=True)
        loop._rounds.offload.use_only(fragment)
        delta = replica.delta()
        moved = moved or (not loop.steps and bool(delta.any()))
        spoilt |= loop._roll_backs.is_spoilt({round_id: loop._rounds.prepare(round_id, delta=delta)})
        loop._sending[round_id] = Flight(delta=loop._rounds.offload.kept(delta))
    if loop.link.on_any_rank(spoilt):
        loop._sending = {round_id: Flight() for round_id in loop._sending}
    if moved and loop.link.workers > 1:
        warnings.warn(
            "the parameters have been trained, but outer.step() was never called: they are only averaged now; call "
            "outer.step() once after every step of the optimizer",
            stacklevel=_CALLER - 1,
        )


def send(loop: "OuterLoop") -> None:
    """Apply what is in flight, then send what no round has carried yet."""
    loop._status = "finished"
    if loop._schedule is None:
        return
    rounds, steps = loop._rounds, loop.steps
    rest, loop._sending = loop._sending, {}
    if any(flight.delta is None for flight in rest.values()):
        loop._roll_backs.give_up(loop.steps)
    for round_id, flight in rounds.waiting():
        last, replica = rest[RoundId(steps, round_id.fragment, last=True)], rounds.replicas[round_id.fragment]
        loop._rounds.offload.use_only(round_id.fragment)
        delta = _measured(last, replica)
        lost = rounds.apply(round_id, steps, merging=False)
        rounds.unsent_work(round_id, flight, delta, lost=lost is not None)
        last.delta = loop._rounds.offload.kept(delta)
    if loop._roll_backs.leave_outliers():
        rest = {round_id: Flight() for round_id in rest}
    for round_id, last in rest.items():
        replica = rounds.replicas[round_id.fragment]
        if loop.link.elastic or _has_unsent(replica, loop._schedule, round_id):
            loop._rounds.offload.use_only(round_id.fragment)
            loop._sending = {round_id: rounds.prepare(round_id, delta=_measured(last, replica))}
            loop._send()


def apply(loop: "OuterLoop") -> None:
    """Let the last rounds move the anchor, and make it the model."""
    if loop._schedule is None:
        return
    for round_id, _ in loop._rounds.waiting():
        loop._rounds.offload.use_only(round_id.fragment)
        loop._rounds.apply_last(round_id, loop.steps)
    loop._rounds.offload.bring_home()
    for replica in loop._rounds.replicas:
        replica.window.write(replica.anchor)
    loop._watch.merged = True
    loop.link.unfinished = False
    loop._rounds.drop(loop.steps + loop._schedule.period)
    tell_advanced(loop, loop.steps, loop.steps)


def _warn_of_period(schedule: Schedule, steps: int) -> None:
    """Warn if a run ends before every fragment was sent; alike on all workers, so that Python prints it once."""
    unsent = sum(schedule.first_send(fragment) > steps for fragment in range(schedule.fragments))
    if steps and unsent:
        warnings.warn(
            f"finish() after {steps} steps, before the first send of {unsent} of {schedule.fragments} fragments: they "
            f"are only averaged now; choose a period shorter than the run, not {schedule.period}",
            stacklevel=_CALLER,
        )


def _measured(last: Flight, replica: FragmentReplica) -> Tensor:
    """Return a last delta on its device; zeros for a worker that was rolled back."""
    return torch.zeros_like(replica.anchor) if last.delta is None else last.delta.to(replica.window.device)


def _has_unsent(replica: FragmentReplica, schedule: Schedule, last: RoundId) -> bool:
    """Return whether some worker holds work of a fragment that has not arrived: the same answer on every worker.

    It was trained since the last send, or lost in one of the last two rounds: an eager worker learns of a loss when it
    has already sent again. Over an elastic link, one may also have learnt now that work of before a cut-off is lost.
    """
    recent_gap = 0 < replica.gap > last.step - 2 * schedule.period
    return recent_gap or not schedule.is_send(last.fragment, last.step)
