"""Notices an inner optimizer that undoes merges: one that steps on a copy of the parameters and writes it back.

fp32 masters beside bf16 parameters are such a copy (Apex O2, DeepSpeed, Megatron, CPU offload of an optimizer). After a
merge the parameters are W, before it they were V. An inner step moves them from W; one on a copy moves them from V, so
they are back at V but for a step. A few thousand values per fragment show it, and only in the first merges.
"""

import math
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from atoll._util.device_values import Late
from atoll.core.flat import Window
from atoll.core.schedule import Schedule
from atoll.errors import AtollError
from atoll.link.base import Link

MERGES = 16
"""So many are looked at: the copies of several workers drift apart, so it shows more and more."""
IN_A_ROW = 3
"""So many must have been undone, one after the other."""
FAR = 3.0
"""A merge tells something if it moved the parameters so many times as far as the largest inner step that was seen."""
NEAR = 0.4
"""It was undone if an inner step later they are so near to where they were before, as a share of what it moved."""


STRAIGHT = 0.9
"""Cosine of a step with the way down the gradient from which on the one explains the other."""


class MergeWatch:
    """Looks at one worker's parameters before a merge, after it, and an inner step later.

    Of no use at period 1, where every inner step follows a merge and there is none to compare it with.
    """

    def __init__(self, windows: Sequence[Window], schedule: Schedule, *, eager: bool) -> None:
        self._windows = windows
        self._schedule = schedule
        self._eager = eager
        self._left = MERGES
        self._largest: dict[int, Tensor] = {}  # fragment -> [], square of an inner step's length
        self._expected = self._samples(range(len(windows)))
        self._stepped: set[int] = set()  # fragments whose last inner step was measured
        self._before: dict[int, Tensor] = {}
        self._merged: dict[int, tuple[Tensor, Tensor]] = {}  # fragment -> before and after
        self._found: list[list[Late]] = []  # by merge and fragment
        self._in_a_row = 0

    def stepped(self) -> None:
        """An inner step was made: compare with what was kept before it."""
        expected, self._expected = self._expected, {}
        for fragment, now in self._samples(expected).items():
            length = _square(now - expected[fragment])
            self._largest[fragment] = torch.maximum(self._largest.get(fragment, length), length)
        self._stepped = set(expected)
        merged, self._merged = self._merged, {}
        found = []
        for fragment, now in self._samples(merged).items():
            before, after = merged[fragment]
            gradient = self._windows[fragment].sample(gradients=True)
            rows = torch.stack([now - before, now - after, gradient])
            numbers = [_square(after - before), self._largest[fragment], *(rows @ rows.T).flatten()]
            found.append(Late(torch.stack(numbers)))
        if found:
            self._found.append(found)

    def merging(self, step: int) -> bool:
        """Whether fragments are merged into after this step; if so, keep a sample of them, unless enough was seen."""
        merging = self._merging(step)
        if self._left and (seen := self._stepped & merging):
            self._left -= 1
            self._before = self._samples(seen)
        return bool(merging)

    def merged(self, step: int) -> None:
        """The merge after this step was made, if there was one."""
        before, self._before = self._before, {}
        if before:
            self._merged = {fragment: (before[fragment], after) for fragment, after in self._samples(before).items()}
        if self._left:
            self._expected = self._samples(self._merging(step + 1) - self._merging(step))

    def _merging(self, step: int) -> set[int]:
        due = self._schedule.due(step)
        return {*due.apply, *(due.send if self._eager else ())}

    def check(self, link: Link) -> None:
        """Raise an AtollError if the last merges were undone, as far as is known when the next one is due."""
        for found in self._found:
            sums = [sum(numbers) for numbers in zip(*(late.values for late in found), strict=True)]
            self._in_a_row = self._in_a_row + 1 if _is_undone(*sums) else 0
        if self._found and link.on_any_rank(self._in_a_row >= IN_A_ROW):
            raise AtollError(
                f"worker {link.worker}: an inner step after each of the last {IN_A_ROW} merges, the parameters were "
                "back where they had been before it. The inner optimizer steps on a copy of its own, such as fp32 "
                "masters, so what workers exchange never reaches it: copy the parameters into it whenever outer.merged "
                "is true after outer.step(), or use an optimizer without a copy"
            )
        self._found = []

    def _samples(self, fragments: Collection[int]) -> dict[int, Tensor]:
        return {fragment: self._windows[fragment].sample() for fragment in fragments}


def _is_undone(moved: float, inner: float, *products: float) -> bool:
    """Whether a merge that moved so much was undone, unless the inner step was just a large one down the gradient.

    `inner` is the largest inner step; both squared. The products are those of the way from before the merge, the way
    from after it, and the gradient, in rows.
    """
    from_before, _, before_gradient, _, from_after, after_gradient, _, _, gradient = products
    if not (moved > FAR**2 * inner and from_before < NEAR**2 * moved):
        return False
    down_from_before = max(0.0, -before_gradient) / math.sqrt(from_before * gradient or 1.0)  # cosines
    down_from_after = max(0.0, -after_gradient) / math.sqrt(from_after * gradient or 1.0)
    return down_from_after < max(STRAIGHT, down_from_before - 0.01)


def _square(difference: Tensor) -> Tensor:
    return difference.square().sum()
