"""One worker's copy of one fragment at work: what it has to send, and how rounds reach it."""

from typing import Any

import torch
from torch import Tensor

from atoll.core.flat import pieces
from atoll.core.outer import SGD, Adam, LinearOuter, OuterOptimizer, eager_start
from atoll.link.base import Round, RoundId
from atoll.outer.exchange import Exchange
from atoll.outer.fragment import Flight, FragmentState, Outgoing
from atoll.outer.stats import Products


class Replica:
    """A fragment's state, moved by what its exchange brings; vectors are worked on in pieces that fit a cache."""

    def __init__(self, state: FragmentState, exchange: Exchange, fragment: int, outer: OuterOptimizer) -> None:
        self.state = state
        """What is remembered of the fragment."""
        self._exchange = exchange
        self._fragment = fragment
        self._outer = outer
        self._kernels = exchange.fused[fragment]

    def outgoing(self, round_id: RoundId, *, wait: bool) -> Outgoing:
        """What is to be sent; if a value cannot be, NonFiniteError names its parameter, or nothing is put in.

        With kernels, and unless it is to `wait`, what it offers tells later whether it can be sent.
        """
        state = self.state
        local = self._kernels.live() if self._kernels and state.residual is None else None
        if local is not None and self._exchange.link.present(round_id.step):
            start = state.anchor if state.newest is None else self._whole_start()
            encoding = self._exchange.encoding(round_id, start, local, **self._standing())
            # Rolled back, it sends nothing, and nobody would ask; and a rank that holds a part may not learn of its
            # trouble later than the next forward pass, which would give it to the other ranks.
            now = wait or state.left_out or state.window.in_parts
            offer = encoding.settled() if now else encoding
            if offer is not None:
                return Outgoing(round_id, None, offer)
        return self.outgoing_of(round_id, self.delta())

    def outgoing_of(self, round_id: RoundId, delta: Tensor) -> Outgoing:
        """What is to be sent of a delta that was measured before."""
        return Outgoing(round_id, delta, self._exchange.contribution(round_id, delta, **self._standing()))

    def _standing(self) -> dict[str, Any]:
        """Where the worker stands, as it says with a delta."""
        state = self.state
        return {"anchor": state.anchor, "version": state.version, "usual": state.norms.usual}

    def delta(self) -> Tensor:
        """Where the worker started minus where it is, plus what rounding has kept back."""
        state = self.state
        delta = state.window.subtract_from(self._whole_start())
        return delta if state.residual is None else delta.add_(state.residual)

    def _whole_start(self) -> Tensor:
        start = torch.empty_like(self.state.anchor)
        for piece in pieces(start.numel(), start.device):
            start[piece] = self._start(piece)
        return start

    def _start(self, piece: slice) -> Tensor:
        """Where the work since the last send began: at the anchor, or at the worker's own start under eager."""
        state = self.state
        if state.newest is None or state.own is None:
            return state.anchor[piece]
        newest = self._decoded(state.newest, piece)
        return eager_start(self._linear_outer, state.anchor[piece], state.own[piece], newest, state.share)

    def outer_step(
        self, completed: Round, products: Products | None, keep: float | None = None, *, plainly: bool = False
    ) -> None:
        """Let a round that has members move the anchor; `products` sums up what they sent, if anybody asks.

        With `keep`, blend the anchor into the live parameters, of which so much stays. `plainly`: by the mean alone,
        without momentum.
        """
        state = self.state
        outer = SGD(1.0) if plainly else self._outer
        state.version, state.step = state.version + 1, completed.round_id.step
        if self._kernels is not None and not isinstance(outer, Adam):
            local = None if keep is None else self._kernels.live()
            slots = tuple(state.slots.values()) if outer.slot_names else ()
            for piece, mean in self._exchange.means(completed, products):
                self._kernels.step(outer, state.anchor, slots, mean, piece, local, keep or 0.0)
            if keep is not None and local is None:
                state.blend(keep)
            return
        for piece, mean in self._exchange.means(completed, products):
            slots = tuple(slot[piece] for slot in state.slots.values())
            state.anchor[piece], moved = outer.step(state.anchor[piece], slots, mean, state.version)
            for slot, new in zip(slots, moved, strict=True):
                slot.copy_(new)
        if keep is not None:
            state.blend(keep)

    def restart(self, step: int, lost: Flight | None) -> None:
        """Eager: begin the next period from the lagging anchor plus what the newest own delta will do to it.

        If the delta before that was lost, it leaves the worker's own momentum, which may only know what the others
        will know, and stays in the live parameters as work not yet sent.
        """
        state = self.state
        if state.newest is None or state.own is None:  # rolled back: nothing of its own is under way
            state.window.write(state.anchor)
            return
        state.share = self._exchange.share(step)
        payload = lost.offer.payload if lost and lost.offer else None
        local = torch.empty_like(state.anchor)
        for piece in pieces(local.numel(), local.device):
            newest = self._decoded(state.newest, piece)
            unsent = None if payload is None else self._decoded(payload, piece)
            known = state.own[piece] if unsent is None else state.own[piece] - unsent
            own = self._linear_outer.remember(known, newest)
            start = eager_start(self._linear_outer, state.anchor[piece], own, newest, state.share)
            state.own[piece], local[piece] = own, start if unsent is None else start - unsent
        state.window.write(local)

    def settle(self, delta: Tensor, flight: Flight, *, lost: bool) -> None:
        """Make a last delta, measured before the last round came in, hold all that has not arrived and no more.

        A blending worker's parameters still held what it had sent (or part of it), and an eager worker had started
        beyond it.
        """
        if flight.offer is None or flight.forgotten:
            return
        held = flight.held if self.state.own is None else 0.0
        delta.add_(self._exchange.decode(flight.offer.payload, self._fragment), alpha=lost - held)
        if flight.restore is not None:
            delta.add_(flight.restore)

    def _decoded(self, payload: Tensor, piece: slice) -> Tensor:
        return self._exchange.decode_piece(payload, self._fragment, piece)

    @property
    def _linear_outer(self) -> LinearOuter:
        assert not isinstance(self._outer, Adam)  # as Sync has checked
        return self._outer
