"""Averages gradients for the data-parallel baseline: one round per step, before the inner optimizer uses them."""

from dataclasses import replace

import torch
from torch import Tensor

from atoll.core.flat import fingerprint
from atoll.errors import AtollError, ConfigError, NonFiniteError
from atoll.link.base import Contribution, Pending, RoundId
from atoll.outer.backend import Backend
from atoll.outer.exchange import Exchange


class GradientAverage:
    """Averages gradients over the workers, and keeps the order of calls: average once, then step."""

    def __init__(self, exchange: Exchange, backend: Backend, *, leave_out_nonfinite: bool) -> None:
        self._exchange = exchange
        self._backend = backend
        self._leave_out_nonfinite = leave_out_nonfinite
        self._averaged = False
        self._met = False  # whether a round of all workers has compared their parameters
        self._pending: Pending | None = None

    def send(self, step: int) -> None:
        """Send the gradients of this step."""
        if self._averaged:
            raise AtollError("average_gradients() was called twice in one step; call step() once an iteration")
        link = self._exchange.link
        if not link.present(step):
            raise ConfigError(
                f"worker {link.worker} is absent at step {step}: DataParallel has no anchor for it to come back to"
            )
        round_id = RoundId(step, 0)
        sent = self._contribution(round_id, self._backend.window.read_gradients())
        self._exchange.counters.rounds_left_out += sent is None
        self._pending = self._exchange.open(round_id, sent)

    def _contribution(self, round_id: RoundId, gradients: Tensor) -> Contribution | None:
        # Equal gradients keep equal parameters equal, so the first round with all is the one to compare them in.
        anchor_fingerprint = 0 if self._met else fingerprint(self._backend.window.read())
        try:
            payload = self._backend.encode(gradients, self._exchange.seed(round_id))
        except NonFiniteError as error:
            if self._leave_out_nonfinite:
                return None
            raise NonFiniteError(f"worker {self._exchange.link.worker}, {round_id}, {error}") from error
        return Contribution(replace(self._exchange.member, anchor_fingerprint=anchor_fingerprint), payload)

    def apply(self) -> None:
        """Wait for the round and replace the gradients by their mean; if every payload was lost, by zeros."""
        assert self._pending is not None
        completed, self._pending = self._exchange.collect(self._pending), None
        window = self._backend.window
        mean = torch.zeros(window.numel, dtype=window.dtype, device=window.device)
        if completed.members:
            for piece, part in self._backend.means(completed):
                mean[piece] = part
        window.write_gradients(mean)
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
