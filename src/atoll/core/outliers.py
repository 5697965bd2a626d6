"""Tells a delta that has exploded from the others by its norm.

The judgement is a function of what all members of a round send in their headers, so every worker makes the same one.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

OUTLIER_RATIO = 10.0
"""How many times larger than expected a delta is when it is left out, unless the user says otherwise."""
SMALLEST = 64
"""Values that a fragment must have to be judged as strictly: the norm of a few says little."""
DUST = 1e-6
"""Deltas that are smaller than this part of the parameters are of rounding alone."""
_REMEMBERED = 8  # rounds
_ENOUGH = 3  # rounds from which on a worker knows what is usual
_IN_A_ROW = 2  # outliers after which a worker's past no longer counts: its deltas have become larger for good


class Size(NamedTuple):
    """Holds the norm of a member's delta, and the largest of its last ones that counted; 0 if not known."""

    norm: float
    usual: float

    def of(self, norm: float, floor: float) -> "Size":
        """Return the size of a delta: 0 if its norm is of rounding alone, or the others' would look exploded."""
        return self._replace(norm=norm if norm > floor else 0.0)


UNKNOWN = Size(0.0, 0.0)


def outliers(sizes: Sequence[Size], ratio: float | None) -> list[bool]:
    """Return for each member whether its delta is left out: it is `ratio` times larger than any expectation.

    What is expected is the larger of the member's own usual norm and the (lower) median of the others' norms now. So
    all may grow together, as after a warm-up, and one may always have been larger than the rest. A member without a
    past is only left out beyond the third power of the ratio. So is one that is alone, or that has grown with the
    others, compared with its own past: beyond that, even all of them are left out.
    """
    if ratio is None:
        return [False] * len(sizes)
    found = []
    for number, (norm, usual) in enumerate(sizes):
        exploded = 0 < ratio**3 * usual < norm
        if others := sorted(size.norm for other, size in enumerate(sizes) if other != number):
            expected = max(usual, others[(len(others) - 1) // 2])
            exploded |= expected > 0 and norm > (ratio if usual else ratio**3) * expected
        found.append(exploded)
    return found


class Norms:
    """Remembers the norms of a worker's last deltas of one fragment, as far as they counted."""

    def __init__(self, floor: float = 0.0) -> None:
        self.floor = floor
        """Norms up to this say nothing: of a worker that has not trained, only rounding is left."""
        self._last: deque[float] = deque(maxlen=_REMEMBERED)
        self._left_out = 0

    @property
    def usual(self) -> float:
        """The largest remembered norm; 0 before the first."""
        return max(self._last, default=0.0)

    def is_runaway(self, norm: float, ratio: float) -> bool:
        """Whether a delta is so much larger than these that its worker need not wait for the others' judgement.

        With fewer than three, which may have been of part of a period, only beyond the third power of the ratio.
        """
        return 0 < self.usual < norm / (ratio if len(self._last) >= _ENOUGH else ratio**3)

    def counted(self, norm: float) -> None:
        """Note a delta that entered a mean."""
        if norm > self.floor:
            self._last.append(norm)
        self._left_out = 0

    def left_out(self) -> None:
        """Note a delta that was left out; after two in a row, what was usual is forgotten."""
        self._left_out += 1
        if self._left_out >= _IN_A_ROW:
            self._last.clear()

    def state_dict(self) -> list[float]:
        """Return the floor, how many were left out in a row, and the norms, oldest first."""
        return [self.floor, float(self._left_out), *self._last]

    def load_state_dict(self, state: Sequence[float]) -> None:
        """Continue from what state_dict gave."""
        self.floor, left_out, *last = state or (self.floor, 0.0)
        self._last = deque(last, maxlen=_REMEMBERED)
        self._left_out = int(left_out)
