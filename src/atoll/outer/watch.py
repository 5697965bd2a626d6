"""Notices what happens to a model outside the outer loop: loads, and optimizers that undo merges.

An optimizer undoes merges if it steps on a copy of the parameters and writes that back: fp32 masters beside bf16
parameters are such a copy (Apex O2, DeepSpeed, Megatron, CPU offload of an optimizer). After a merge the parameters are
W, before it they were V. An inner step moves them from W; one on a copy moves them from V, so they are back at V but
for a step. A few thousand values per fragment show it, and only in the first merges.
"""

import math
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn

from atoll._util.device_values import DeviceValues
from atoll.core.flat import Window, checksum
from atoll.core.schedule import Schedule
from atoll.errors import AtollError
from atoll.link.base import Link
from atoll.outer.agreement import frozen_terms

MERGES = 16
"""Merges that are judged: copies of several workers drift apart, so an undone merge shows more and more."""
IN_A_ROW = 3
"""Merges that must have been undone, one after the other."""
FAR = 3.0
"""Times as far as the largest inner step that a merge must have moved the parameters to be judged."""
NEAR = 0.4
"""Share of a merge's move within which, an inner step later, the parameters count as moved back."""
STRAIGHT = 0.9
"""Cosine of a step with the way down the gradient from which on the one explains the other."""


class ModelWatch:
    """Watches one worker's model from outside the loop's own steps."""

    def __init__(
        self,
        model: nn.Module,
        windows: Sequence[Window],
        schedule: Schedule | None,
        *,
        eager: bool,
    ) -> None:
        self.loads = Loads(model)
        self._merges = None if schedule is None else MergeWatch(windows, schedule, eager=eager)
        self._model = model
        self.base: Mapping[str, str] = frozen_terms(model)
        """The frozen parameters' terms when the worker joined; later on, a running average in them is its own."""
        self.merged = False
        """Whether the last operation wrote into the model's parameters."""
        self.joined_at: int | None = None
        """The step at which the loop replaced the parameters, for it joined a run under way; None if it never did."""

    @property
    def lent(self) -> bool:
        """Whether the model holds the anchor: what is loaded then does not stay."""
        return not self.loads.watching

    @lent.setter
    def lent(self, lent: bool) -> None:
        self.loads.watching = not lent

    def joining(self) -> None:
        """Look at frozen parameters once more before the worker joins, if some were loaded since the loop was made."""
        if self.loads.frozen:
            self.base = frozen_terms(self._model)

    def stepped(self, link: Link, *, judge: bool = False, judge_last: bool = False) -> None:
        """Note an inner step.

        Args:
            link: This worker's end of the link.
            judge: Whether to judge the merges of earlier steps now, of which a device has worked out what it takes.
            judge_last: Whether to judge this step as well.
        """
        assert self._merges is not None
        if judge:
            self._merges.check(link)  # of steps before: a GPU may still be at this one
        self._merges.stepped()
        if judge_last:
            self._merges.check(link)

    def merging(self, step: int) -> None:
        """Note that the loop is about to merge what is due after this step."""
        assert self._merges is not None
        self.merged |= self._merges.merging(step)

    def joined(self, step: int) -> None:
        """Note that the loop has replaced the parameters after this step: the worker has joined a run under way."""
        assert self._merges is not None
        self.joined_at = step
        self._merges.jumped()

    def merged_at(self, step: int) -> None:
        """Note that the loop has merged what was due after this step."""
        assert self._merges is not None
        self._merges.merged(step)


class Loads:
    """Notices trained parameters that `load_state_dict` has changed since the last `check`.

    The anchor was taken before: all that was loaded would be sent as if it had been trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.watching = True
        """Whether what is loaded stays: inside `OuterLoop.anchor()` it does not."""
        self.frozen = False
        """Whether parameters that are not trained were loaded."""
        self._before: dict[str, int] = {}
        self._changed: dict[str, None] = {}  # in order
        handles = []
        for path, module in model.named_modules():  # each by itself, for a part of a model can be loaded too
            handles.append(module.register_load_state_dict_pre_hook(_Hook(self, Loads._begin, path)))
            handles.append(module.register_load_state_dict_post_hook(_Hook(self, Loads._end, path)))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def _begin(self, path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and name not in self._before:
                self._before[name] = checksum(parameter)

    def _end(self, path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(path, recurse=False):
            self.frozen |= not parameter.requires_grad
            if name in self._before:
                self._changed.pop(name, None)
                if checksum(parameter) != self._before[name]:  # it may also have been put back
                    self._changed[name] = None

    def check(self) -> None:
        """Raise an AtollError that names a parameter that is not what it was."""
        if self._changed:
            raise AtollError(
                f"parameter {next(iter(self._changed))!r} ({len(self._changed)} in all) was loaded into the model "
                "after the outer loop was made: load first, then make OuterLoop; to resume a run, call "
                "outer.load_state_dict() after it; to train on from the outer parameters, outer.roll_back()"
            )
        self.forget()

    def forget(self) -> None:
        """Take the parameters as they are: the loop has compared or replaced them."""
        self._before, self._changed = {}, {}


class _Hook:
    """Tells a model's `Loads` of a module that is loaded; copies of the model, and pickled ones, tell nobody."""

    def __init__(
        self, loads: Loads | None = None, tell: Callable[[Loads, str, nn.Module], None] | None = None, path: str = ""
    ) -> None:
        self._loads = None if loads is None else weakref.ref(loads)
        self._tell = tell
        self._path = path

    def __call__(self, module: nn.Module, *_: Any) -> None:
        loads = self._loads() if self._loads is not None else None
        if loads is not None and self._tell is not None and loads.watching:
            self._tell(loads, self._path, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()


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
        self._found: list[list[DeviceValues]] = []  # by merge and fragment
        self._in_a_row = 0

    def stepped(self) -> None:
        """Compare the parameters after an inner step with what was kept before it."""
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
            found.append(DeviceValues(torch.stack(numbers)))
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
        """Keep what a merge after this step has written, if there was one."""
        before, self._before = self._before, {}
        if before:
            self._merged = {fragment: (before[fragment], after) for fragment, after in self._samples(before).items()}
        if self._left:
            self._expected = self._samples(self._merging(step + 1) - self._merging(step))

    def jumped(self) -> None:
        """Forget what was seen before the parameters were replaced; the next inner step starts from here."""
        self._before, self._merged, self._found = {}, {}, []
        self._expected = self._samples(range(len(self._windows)))

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
    """Return whether a merge was undone, unless the inner step was just a large one down the gradient.

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
