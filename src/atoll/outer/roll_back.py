"""Rolls a worker back: after values that are not finite, after a delta that has exploded, or because the user asks."""

import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from atoll.core.outliers import OUTLIER_RATIO
from atoll.errors import ConfigError, NonFiniteError
from atoll.link.base import RoundId
from atoll.outer.flight import Flight
from atoll.outer.rounds import Rounds
from atoll.outer.watch import ModelWatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """Decides which deltas are left out of a round; the worker that made one is rolled back to the anchor."""

    leave_out_nonfinite: bool = False
    """Whether a delta (or gradient) that holds a NaN or an infinity is left out, instead of raising NonFiniteError."""
    outlier_ratio: float | None = OUTLIER_RATIO
    """Leaves out a delta with more than this many times the norm that is expected from its worker's last deltas and the
    other workers'. None lets every finite delta count. All workers must have the same."""
    on_roll_back: Callable[[], object] | None = None
    """Is called when this worker is rolled back. Torch optimizers forget their state then; this is for other state."""

    def __post_init__(self) -> None:
        if not isinstance(self.leave_out_nonfinite, bool):
            problem = f"leave_out_nonfinite must be True or False, got {self.leave_out_nonfinite!r}"
            raise ConfigError(problem, setting="leave_out_nonfinite", value=self.leave_out_nonfinite)
        if self.on_roll_back is not None and not callable(self.on_roll_back):
            problem = f"on_roll_back must be a function without arguments, or None, got {self.on_roll_back!r}"
            raise ConfigError(problem, setting="on_roll_back", value=self.on_roll_back)
        ratio = self.outlier_ratio
        if ratio is not None and not (isinstance(ratio, int | float) and 1 < ratio <= 1e9):
            problem = f"outlier_ratio must be a number above 1, at most 1e9, or None for no limit, got {ratio!r}"
            raise ConfigError(problem, setting="outlier_ratio", value=ratio)


class RollBacks:
    """Takes a worker whose work is no good back to the anchor, and lets its rounds be completed without it."""

    def __init__(
        self,
        rounds: Rounds,
        watch: ModelWatch,
        optimizers: "InnerOptimizers",
        on_roll_back: Callable[[], object] | None,
    ) -> None:
        self._rounds = rounds
        self._link = rounds.exchange.link
        self._watch = watch
        self._optimizers = optimizers
        self._on_roll_back = on_roll_back
        self.in_a_row = 0
        """Roll-backs since the last delta that could be sent."""

    def roll_back(self) -> None:
        """Give up what the worker has trained and not yet sent; its next rounds do without it."""
        self._rounds.exchange.counters.roll_backs += 1
        self._optimizers.reset()
        self.start_anew()
        for replica in self._rounds.replicas:
            replica.left_out = True
        if self._on_roll_back is not None:
            self._on_roll_back()

    def start_anew(self) -> None:
        """Take the anchor, and nothing of the worker's own: it joins, comes back or is rolled back."""
        self._watch.merged = True
        self._watch.loads.forget()
        self._rounds.start_anew()

    def is_spoilt(self, sending: Mapping[RoundId, Flight]) -> bool:
        """Return whether a delta cannot be sent for not being finite; the other fragments are no better then."""
        return any(flight.offer is None and self._link.present(r.step) for r, flight in sending.items())

    def settle(self, sending: Collection[int], step: int) -> None:
        """Learn whether what a GPU was still encoding when it was sent could be; if not, act on it now."""
        unsendable = self._rounds.unsendable()
        spoilt = [(round_id, flight.offer) for round_id, flight in unsendable if flight.offer and not flight.forgotten]
        if spoilt:
            if not self._rounds.leave_out_nonfinite:
                raise self._rounds.refusal(*spoilt[0])
            self.give_up(step, [round_id.fragment for round_id, _ in spoilt], sending)
        elif any(flight.offer is not None and not flight.forgotten for _, flight in self._rounds.waiting()):
            self.in_a_row = 0
        self._rounds.leave_out(unsendable)

    def leave_runaway(self, step: int, sending: Collection[int]) -> None:
        """Roll back if a delta sent after this step is far larger than the worker's last ones."""
        if self._rounds.exchange.outlier_ratio is not None:
            runaways = self._rounds.runaways(step)
            if self._link.on_any_rank(bool(runaways)):
                self._roll_back_less(runaways, sending)

    def leave_outliers(self) -> bool:
        """Roll back after rounds that have left out this worker's delta, unless it has started anew since."""
        outliers, self._rounds.outliers = self._rounds.outliers, {}
        if self._rounds.exchange.outlier_ratio is None or not self._link.on_any_rank(any(outliers.values())):
            return False
        self._roll_back_less([fragment for fragment, holds in outliers.items() if holds])
        return True

    def give_up(self, step: int, fragments: Collection[int] = (), sending: Collection[int] = ()) -> None:
        """Roll back, for a delta was not finite; if that happens every time, NonFiniteError names the likely cause."""
        self._roll_back_less(fragments, sending)
        self.in_a_row += 1
        if self.in_a_row > 1 and self._on_roll_back is None and not self._optimizers.found:
            raise NonFiniteError(
                f"worker {self._link.worker}, step {step}: rolled back {self.in_a_row} times in a row, for no delta "
                "was finite. Its inner optimizer probably keeps NaN in its state: reset it after a roll-back, "
                "OuterLoop(..., guard=atoll.Guard(leave_out_nonfinite=True, on_roll_back=inner.state.clear))"
            )

    def _roll_back_less(self, fragments: Collection[int], sending: Collection[int] = ()) -> None:
        """Roll back, but let the next rounds of these fragments count: those that do without are under way already.

        Unless they are among those `sending` now, in which there is nothing since.
        """
        self.roll_back()
        for fragment in fragments:
            self._rounds.replicas[fragment].left_out = fragment in sending


class InnerOptimizers:
    """Notes which torch optimizers step the parameters of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._found: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._others: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        _hook_once()
        with _lock:
            _watching.add(self)

    @property
    def found(self) -> bool:
        """Whether a torch optimizer has stepped the model."""
        return bool(self._found)

    def notice(self, optimizer: Optimizer) -> None:
        """Note an optimizer that has made a step."""
        if optimizer in self._found or optimizer in self._others:
            return
        model = self._model()
        ours = set() if model is None else {id(p) for p in model.parameters()}
        trains = any(id(p) in ours for group in optimizer.param_groups for p in group["params"])
        (self._found if trains else self._others).add(optimizer)

    def reset(self) -> None:
        """Let every optimizer found forget what it remembers of the parameters, as before its first step."""
        model = self._model()
        for optimizer in self._found:
            for parameter in () if model is None else model.parameters():
                if not isinstance(optimizer, torch.optim.Adagrad):
                    optimizer.state.pop(parameter, None)
                elif parameter in optimizer.state:  # it makes its state once, when it is made
                    optimizer.state[parameter]["step"].zero_()
                    optimizer.state[parameter]["sum"].fill_(optimizer.defaults["initial_accumulator_value"])


_lock = threading.Lock()  # workers may be threads
_watching: weakref.WeakSet[InnerOptimizers] = weakref.WeakSet()


@cache
def _hook_once() -> None:
    """Have torch call `_on_step` after every optimizer's step, from now on.

    One hook stays for good: one that goes when its loop is garbage-collected may do so while torch calls its hooks.
    """
    register_optimizer_step_post_hook(_on_step)


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    with _lock:
        all_watching = list(_watching)
    for watching in all_watching:
        watching.notice(optimizer)
