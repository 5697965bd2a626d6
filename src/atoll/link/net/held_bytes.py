"""Counts what each member has made this process hold, and says when that is too much.

A member that is admitted may still be hostile. What it sends is kept until its round is applied, so without a bound it
could fill the memory with rounds that never come.
"""

import os
from collections import Counter
from typing import Final

from atoll.link.base import RoundId
from atoll.link.net.views import Process

MOST_HELD: Final = max(1 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4)
"""Bytes that one member may make this process hold: a quarter of the machine's memory, at least 1 GiB."""
MESSAGE_COST: Final = 1024
"""Bytes that a message takes besides its content, at most."""


class HeldBytes:
    """Counts the bytes that were received for rounds that this worker has not applied."""

    def __init__(self) -> None:
        self._received: Counter[RoundId] = Counter()
        self._costs: dict[RoundId, Counter[Process]] = {}
        self._held: Counter[Process] = Counter()

    def add(self, sender: Process, round_id: RoundId, size: int) -> int:
        """Count a message; return what its sender makes this worker hold by now, in bytes."""
        cost = size + MESSAGE_COST
        self._costs.setdefault(round_id, Counter())[sender] += cost
        self._received[round_id] += size
        self._held[sender] += cost
        return self._held[sender]

    def of_round(self, round_id: RoundId) -> int:
        """Return the bytes that were received for a round."""
        return self._received[round_id]

    def drop(self, applied: int) -> None:
        """Forget the rounds up to a step, which this worker has applied."""
        for round_id in [known for known in self._costs if known.step <= applied]:
            self.forget(round_id)

    def forget(self, round_id: RoundId) -> None:
        """Forget one round."""
        self._held -= self._costs.pop(round_id, Counter())
        self._received.pop(round_id, None)
