"""Keeps the rounds that this worker has opened, checks what arrives for them, and lets a thread reduce their parts."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial

from atoll.core.allreduce import ONE_SHOT_MEMBERS, Reduction
from atoll.errors import LinkError
from atoll.link.base import Contribution, Round, RoundId
from atoll.link.net.actions import Complete, Mean, Part, Reduce, Result, RoundMessage, Whole
from atoll.link.net.held_bytes import MOST_HELD, HeldBytes
from atoll.link.net.messages import PartMean
from atoll.link.net.open_round import OpenRound
from atoll.link.net.views import Process

_ROUNDS_AHEAD = 16  # whole models that a member may send ahead, where a quarter of the memory is less


class RoundTable:
    """Keeps the rounds of one worker; used in one event loop.

    Args:
        workers: Number of seats.
        on_reduced: Called with every part that was asked for, and its mean or the error.
    """

    def __init__(self, workers: int, on_reduced: Callable[[Reduce, PartMean | Exception], None]) -> None:
        self.newest_step = 0
        """The newest inner step that any member is known to have made."""
        self.last_applied = -1
        """The step of the newest round that this worker has applied."""
        self.sent_bytes: Counter[RoundId] = Counter()
        self._received = HeldBytes()
        self._workers = workers
        self._on_reduced = on_reduced
        self._open: dict[RoundId, OpenRound] = {}
        self._unchecked: dict[int, list[tuple[Process, RoundMessage, int]]] = {}  # by fragment
        self._reductions: dict[int, Reduction] = {}  # by fragment: one that tells the sizes of all its payloads
        self._part_sizes: dict[tuple[int, int], frozenset[int]] = {}  # by fragment and part
        self._held_back: list[Reduce] = []  # until earlier rounds of the fragment are complete
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="atoll-reduce")

    def add(self, opened: OpenRound) -> None:
        """Keep a round."""
        self._open[opened.round_id] = opened
        self._reductions[opened.round_id.fragment] = opened.reduction
        self.note_step(opened.round_id.step)

    def note_step(self, step: int) -> None:
        """Note that some member has made this step."""
        self.newest_step = max(self.newest_step, step)

    def drop(self, applied: int) -> bool:
        """Forget the rounds up to a step, which this worker has applied; return whether there were any."""
        old = [round_id for round_id in self._open if round_id.step <= applied]
        for round_id in old:
            del self._open[round_id]
            self.last_applied = max(self.last_applied, round_id.step)
        for round_id in [known for known in self.sent_bytes if known.step <= applied]:
            del self.sent_bytes[round_id]
        self._received.drop(applied)
        for fragment, kept in list(self._unchecked.items()):
            self._unchecked[fragment] = [one for one in kept if one[1].round_id.step > applied]
            if not self._unchecked[fragment]:
                del self._unchecked[fragment]
        return bool(old)

    def forget(self, round_id: RoundId) -> None:
        """Forget a round that was given to the training thread."""
        del self._open[round_id]
        self.sent_bytes.pop(round_id, None)
        self._received.forget(round_id)

    @property
    def all_complete(self) -> bool:
        """Whether no round is on its way."""
        return all(opened.done for opened in self._open.values())

    def waiting_since(self, moment_s: float) -> list[RoundId]:
        """Return the rounds that were opened before a moment and are not complete, newest first."""
        waiting = (known for known, opened in self._open.items() if not opened.done and opened.opened_s <= moment_s)
        return sorted(waiting, reverse=True)

    def on_their_way(self) -> list[RoundId]:
        """Return the rounds that this worker has opened and that are not complete, in order."""
        return sorted(round_id for round_id, opened in self._open.items() if not opened.done)

    def fail(self, error: Exception) -> None:
        """Raise this error in every thread that waits for a round."""
        for opened in self._open.values():
            opened.fail(error)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------ what arrives

    def receive(self, sender: Process, round_id: RoundId, size: int) -> bool:
        """Count a message; return whether its sender makes this worker hold more than it may."""
        held = self._received.add(sender, round_id, size)
        if held <= MOST_HELD:
            return False
        return held > _ROUNDS_AHEAD * sum(reduction.payload_bytes for reduction in self._reductions.values())

    def check(self, sender: Process, message: RoundMessage, view: int) -> bool:
        """Return whether a message can be used now; one of a fragment that was never opened here is kept.

        Raises:
            ValueError: It does not fit its fragment.
        """
        fragment = message.round_id.fragment
        self.note_step(message.round_id.step)
        reduction = self._reductions.get(fragment)
        if reduction is None:
            if message.round_id.step > self.last_applied:
                self._unchecked.setdefault(fragment, []).append((sender, message, view))
            return False
        if isinstance(message, Whole):
            _check_size(message.payload, frozenset({reduction.payload_bytes}))
            if message.payload is not None and message.payload.member.worker != message.owner.seat:
                raise ValueError(
                    f"a payload of worker {message.payload.member.worker} as worker {message.owner.seat}'s"
                )
        elif isinstance(message, Part):
            _check_size(message.payload, self._sizes_of(fragment, message.part))
            if message.payload is not None and message.payload.member.worker != sender.seat:
                raise ValueError(f"a part of worker {message.payload.member.worker}")
        elif isinstance(message, Mean):
            _check_mean(message.payload, self._sizes_of(fragment, message.part))
        else:
            _check_result(message, reduction)
        return True

    def _sizes_of(self, fragment: int, part: int) -> frozenset[int]:
        """Return the sizes that a part of this number can have, by the number of members."""
        if (fragment, part) not in self._part_sizes:
            reduction = self._reductions[fragment]
            counts = {reduction.part_count(members) for members in range(ONE_SHOT_MEMBERS + 1, self._workers + 1)}
            sizes = {reduction.part_bytes(part, count) for count in counts if part < count}
            if not sizes:
                raise ValueError(f"part {part} of a round that has fewer")
            self._part_sizes[fragment, part] = frozenset(sizes)
        return self._part_sizes[fragment, part]

    def take_unchecked(self, fragment: int) -> list[tuple[Process, RoundMessage, int]]:
        """Return the messages that were kept until this worker opened a round of their fragment."""
        return self._unchecked.pop(fragment, [])

    # ------------------------------------------------------------------ reduce, complete

    def reduce(self, action: Reduce) -> None:
        """Take the mean of a part in the reducing thread.

        With error feedback a round needs what the fragment's round before it has lost, so it waits for that one.
        """
        opened = self._open.get(action.round_id)
        if opened is None:
            return
        if opened.reduction.residual is not None and self._has_earlier(action.round_id):
            self._held_back.append(action)
            return
        loop = asyncio.get_running_loop()
        reducing = self._thread.submit(opened.reduce, action.part, action.payloads)
        reducing.add_done_callback(lambda done: _post(loop, partial(self._on_reduced, action, _result(done))))

    def _has_earlier(self, round_id: RoundId) -> bool:
        return any(
            other < round_id and other.fragment == round_id.fragment and not opened.done
            for other, opened in self._open.items()
        )

    def complete(self, action: Complete) -> None:
        """Give a round to the training thread."""
        opened = self._open[action.round_id]
        try:
            completed = self._completed(opened, action)
        except ValueError as fault:
            opened.fail(LinkError(f"{action.round_id}: {fault}", round_id=action.round_id))
            return
        except Exception as fault:
            opened.fail(fault)
            return
        opened.note_reduced(action.attempt)
        arrived = {member.worker for member in (*completed.members, *completed.outliers)}
        between = tuple(process.seat for process in action.attempt.members)
        completed = replace(completed, between=between, complete=arrived == action.due)
        opened.complete(completed, self.sent_bytes[action.round_id], self._received.of_round(action.round_id))
        held_back, self._held_back = self._held_back, []
        for reduce in held_back:
            self.reduce(reduce)

    def _completed(self, opened: OpenRound, action: Complete) -> Round:
        if action.means is not None:
            return opened.in_two_shots(action.means)
        return opened.in_one_shot(action.payloads or {})


def _check_size(contribution: Contribution | None, allowed: frozenset[int]) -> None:
    if contribution is not None and contribution.payload.numel() not in allowed:
        raise ValueError(f"{contribution.payload.numel()} bytes where {max(allowed)} were due")


def _check_mean(mean: PartMean, allowed: frozenset[int]) -> None:
    if mean.mean is not None and mean.mean.numel() not in allowed:
        raise ValueError(f"a mean of {mean.mean.numel()} bytes where {max(allowed)} were due")


def _check_result(result: Result, reduction: Reduction) -> None:
    if not result.attempt.in_parts:
        raise ValueError(f"a result between {len(result.attempt.members)} members, whose rounds have none")
    count = reduction.part_count(len(result.attempt.members))
    if len(result.means) != count:
        raise ValueError(f"a result of {len(result.means)} parts where {count} were due")
    for part, mean in enumerate(result.means):
        _check_mean(mean, frozenset({reduction.part_bytes(part, count)}))


def _result(done: "Future[PartMean]") -> PartMean | Exception:
    error = done.exception()
    if isinstance(error, Exception):
        return error
    return done.result()


def _post(loop: asyncio.AbstractEventLoop, act: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(act)
