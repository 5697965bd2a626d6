"""The data-parallel baseline: one round of gradients per step, before the inner optimizer uses them."""

from collections.abc import Iterator

import torch

from atoll.core.flat import Window
from atoll.errors import AtollError, ConfigError
from atoll.link.base import RoundId
from atoll.outer.exchange import Exchange


class GradientAverage:
    """Keeps the order of calls that data-parallel training needs: average once, then step."""

    def __init__(self, exchange: Exchange, window: Window) -> None:
        self._exchange = exchange
        self._window = window
        self._averaged = False
        self._met = False

    def average(self, step: int) -> Iterator[None]:
        """Replace the gradients of this step by their mean; yields between sending and waiting."""
        if self._averaged:
            raise AtollError("average_gradients() was called twice in one step; call step() once an iteration")
        link = self._exchange.link
        if not link.present(step):
            raise ConfigError(
                f"worker {link.worker} is absent at step {step}: DataParallel has no anchor for it to come back to"
            )
        # Equal gradients keep equal parameters equal, so the first round with all is the one to compare them in.
        parameters = None if self._met else self._window.read()
        round_id, gradients = RoundId(step, 0), self._window.read_gradients()
        sent = self._exchange.contribution(round_id, gradients, anchor=parameters)
        self._exchange.counters.rounds_left_out += sent is None
        pending = self._exchange.open(round_id, sent)
        yield
        completed = self._exchange.collect(pending)
        mean = torch.zeros_like(gradients)  # if every payload was lost, nobody moves
        if completed.members:
            for piece, part in self._exchange.means(completed):
                mean[piece] = part
        for residual in self._exchange.mean_residuals:
            residual.drop(None)
        self._window.write_gradients(mean)
        self._averaged = True
        self._met = self._met or self._exchange.is_complete(completed)

    def end_step(self) -> None:
        """Refuse to go on if this step's gradients were not averaged."""
        if not self._averaged:
            raise AtollError(
                "average_gradients() was not called since the last step(): under DataParallel call it between "
                "backward() and the inner optimizer's step, or the workers drift apart"
            )
        self._averaged = False
