"""Owns one worker's replica of one fragment: delta, outer step and merge.

All vectors are [numel] in the window's dtype. The anchor and the outer optimizer's slots have the same bits on every
worker; everything else is this worker's own.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from atoll.core.flat import fingerprint, pieces
from atoll.core.outer_step import SGD, Adam, Blend, LinearOuter, eager_start
from atoll.core.outliers import DUST, Norms, Size
from atoll.errors import LinkError
from atoll.link.base import Contribution, Member, Offer, Round
from atoll.outer.backend import Backend
from atoll.outer.presets import Sync
from atoll.outer.stats import Products

EMPTY = torch.empty(0, dtype=torch.uint8, device="cpu")


class BlendMerger:
    """Blends the anchor into the live parameters whenever a round is applied."""

    def __init__(self, alpha: float) -> None:
        self.alpha: float | None = alpha
        """How much of the live parameters stays, 0 to 1."""
        self.own: Tensor | None = None

    def start(self, anchor: Tensor, *, copy: bool) -> Tensor:
        """Return where the work since the last send began: at the anchor. The caller may change a copy."""
        return anchor.clone() if copy else anchor

    @property
    def begun(self) -> bool:
        """Whether the live parameters have got what follows from the worker's newest send; else it was cut off."""
        return True

    def sent(self, payload: Tensor) -> None:
        """Note a payload that this worker has just sent."""

    def begin_period(self, replica: "FragmentReplica", share: float, lost: Tensor | None) -> None:
        """Start the next period after a send."""

    def forget(self) -> None:
        """Drop what is this worker's own."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"own": None, "newest": None, "share": 0.0}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from what state_dict gave."""


class EagerMerger(BlendMerger):
    """Starts every period from the lagging anchor plus what the worker's own newest delta will do to it."""

    def __init__(self, own: Tensor, outer: LinearOuter, backend: Backend) -> None:
        super().__init__(0.0)
        self.alpha = None  # an applied round moves the anchor; the live parameters wait for the next send
        self.own: Tensor | None = own
        """The worker's own momentum, fed by its own deltas alone."""
        self._newest: Tensor | None = None  # the payload of its newest delta
        self._begun = True  # not between a send and the period that it begins
        self._share = 0.0  # its expected part, 0 to 1, of the mean that this delta enters
        self._outer = outer
        self._backend = backend

    def start(self, anchor: Tensor, *, copy: bool) -> Tensor:
        """Return where the work since the last send began: at the worker's own start. The caller may change a copy."""
        if self._newest is None:
            return super().start(anchor, copy=copy)
        assert self.own is not None
        start = torch.empty_like(anchor)
        for piece in pieces(start.numel(), start.device):
            newest = self._backend.decode_piece(self._newest, piece)
            start[piece] = eager_start(self._outer, anchor[piece], self.own[piece], newest, self._share)
        return start

    @property
    def begun(self) -> bool:
        """Whether the period after the worker's newest send has begun."""
        return self._begun

    def sent(self, payload: Tensor) -> None:
        """Keep the payload: decoded, it enters the next start."""
        self._newest, self._begun = payload, False

    def begin_period(self, replica: "FragmentReplica", share: float, lost: Tensor | None) -> None:
        """Write the next period's start into the live parameters.

        Args:
            replica: The fragment's replica.
            share: The worker's part, 0 to 1, of the mean that its newest delta enters.
            lost: The payload before that, if it never arrived. It leaves the worker's own momentum, which may only know
                what the others will know, and stays in the live parameters as work not yet sent.
        """
        anchor, window = replica.anchor, replica.window
        self._begun = True
        if self._newest is None:  # rolled back: nothing of its own is under way
            window.write(anchor)
            return
        assert self.own is not None
        self._share = share
        local = torch.empty_like(anchor)
        for piece in pieces(local.numel(), local.device):
            newest = self._backend.decode_piece(self._newest, piece)
            unsent = None if lost is None else self._backend.decode_piece(lost, piece)
            known = self.own[piece] if unsent is None else self.own[piece] - unsent
            own = self._outer.remember(known, newest)
            start = eager_start(self._outer, anchor[piece], own, newest, self._share)
            self.own[piece], local[piece] = own, start if unsent is None else start - unsent
        window.write(local)

    def forget(self) -> None:
        """Drop the worker's own momentum and its newest delta."""
        assert self.own is not None
        self.own.zero_()
        self._newest, self._begun = None, True

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, copied."""
        return {"own": copy_of(self.own), "newest": copy_of(self._newest), "share": self._share}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Continue from what state_dict gave."""
        assert self.own is not None
        self.own.copy_(state["own"])
        self._newest = copy_of(state["newest"], device)
        self._share = state["share"]


class FragmentReplica:
    """Owns one worker's state of one fragment: the live parameters, the anchor, the outer optimizer's slots."""

    def __init__(self, backend: Backend, sync: Sync) -> None:
        anchor = backend.window.read()
        self.window = backend.window
        """The live parameters."""
        self.backend = backend
        self._outer = sync.outer
        self.anchor = anchor
        """The outer parameters as last agreed by all."""
        self.slots = {name: torch.zeros_like(anchor) for name in sync.outer.slot_names}
        """The outer optimizer's vectors, such as the velocity."""
        self.residual = torch.zeros_like(anchor) if sync.codec.feedback else None
        """Error feedback: what encoding has lost, for the next delta to carry."""
        self.merge = BlendMerger(sync.merge.alpha) if isinstance(sync.merge, Blend) else self._eager(sync)
        """How applied rounds reach the live parameters."""
        self.version = 0
        """Rounds applied to the anchor."""
        self.step = 0
        """The inner step after which the last round that moved the anchor was sent."""
        self.gap = 0
        """The step of the last round that lacked somebody's payload; 0 if there was none."""
        self.norms = Norms(DUST * float(torch.linalg.vector_norm(anchor, dtype=torch.float64)))
        """The norms of the worker's last deltas."""
        self.left_out = False
        """Whether the worker was rolled back or joined since its last send: the next round does without it."""

    def _eager(self, sync: Sync) -> EagerMerger:
        assert not isinstance(sync.outer, Adam)  # as Sync has checked
        return EagerMerger(torch.zeros_like(self.anchor), sync.outer, self.backend)

    # ------------------------------------------------------------------ send

    def delta(self) -> Tensor:
        """Return where the worker started minus where it is, plus what encoding has kept back."""
        delta = self.window.subtract_from(self.merge.start(self.anchor, copy=True))
        return delta if self.residual is None else delta.add_(self.residual, alpha=self._feedback)

    @property
    def _feedback(self) -> float:
        """The share of the residual that the next delta carries."""
        return float(self.backend.codec.feedback)

    def unsent(self) -> Tensor:
        """Return `delta`, also for a worker that was cut off between a send and what follows from it."""
        if self.merge.begun:
            return self.delta()
        return torch.zeros_like(self.anchor) if self.residual is None else self._feedback * self.residual

    def prepare(self, member: Member, seed: int, *, wait: bool) -> tuple[Tensor | None, Offer]:
        """Measure and encode what the worker has to send.

        Args:
            member: The worker; where it stands is filled in here.
            seed: Feeds stochastic rounding.
            wait: Whether to wait until it is known that the payload can be sent.

        Returns:
            The delta, if it was written down, and the offer for the link.

        Raises:
            NonFiniteError: A value cannot be sent; the message names its parameter.
        """
        if self.residual is None:
            made = Contribution(self._standing(member), EMPTY)
            start = self.merge.start
            live = partial(start, self.anchor, copy=False)
            encoding = self.backend.encode_live(live, self.anchor, made, self.norms.floor)
            # A worker that was rolled back sends nothing, so nobody would ask later. And a rank that holds a part of
            # the model must know of a value it cannot send before the next forward pass gives it to the other ranks.
            now = wait or self.left_out or self.window.in_parts
            offer: Offer | None = encoding.settled() if encoding is not None and now else encoding
            if offer is not None:  # pragma: no cover (needs kernels)
                return None, offer
        delta = self.delta()
        return delta, self.encode(delta, member, seed)

    def encode(self, delta: Tensor, member: Member, seed: int) -> Contribution:
        """Encode a delta that was measured before."""
        payload = self.backend.encode(delta, seed)
        member = self._standing(member)
        size = member.size.of(float(torch.linalg.vector_norm(delta, dtype=torch.float64)), self.norms.floor)
        return Contribution(replace(member, anchor_fingerprint=fingerprint(self.anchor), size=size), payload)

    def _standing(self, member: Member) -> Member:
        return replace(member, anchor_version=self.version, size=Size(0.0, self.norms.usual))

    def sent(self, payload: Tensor, delta: Tensor | None) -> Tensor | None:
        """Note what the worker has sent, and keep what rounding lost of it.

        Returns:
            What to add to the residual if the payload turns out to be lost. A blending worker's parameters still hold
            all its work then, so its residual goes back to what it was. An eager worker sends exactly what was lost
            once more, so its residual stays.
        """
        self.merge.sent(payload)
        if self.residual is None or delta is None:
            return None
        lost = delta - self.backend.decode(payload)
        undo = self.residual - lost if self.merge.own is None else None
        self.residual.copy_(lost)
        return undo

    # ------------------------------------------------------------------ apply

    def outer_step(
        self, completed: Round, products: Products | None, alpha: float | None, *, plain_mean: bool = False
    ) -> None:
        """Let a round that has members move the anchor.

        Args:
            completed: The round.
            products: Sums up inner products of the members' deltas on the way.
            alpha: Blends the anchor into the live parameters, of which so much stays; None leaves them alone.
            plain_mean: Moves the anchor by the mean alone, without momentum.
        """
        outer = SGD(1.0) if plain_mean else self._outer
        self.version, self.step = self.version + 1, completed.round_id.step
        means, slots = self.backend.means(completed, products), tuple(self.slots.values())
        self.backend.outer_step(outer, self.anchor, slots, means, self.version, alpha)

    def restore(self, undo: Tensor | None) -> None:
        """Take back what `sent` kept of a payload that was lost: the live parameters still hold all of its work."""
        if self.residual is not None and undo is not None:
            self.residual.add_(undo)

    def forget(self) -> None:
        """Become the replica of a worker that has just arrived: it has the anchor and nothing of its own."""
        if self.residual is not None:
            self.residual.zero_()
        self.merge.forget()
        self.window.write(self.anchor)

    def put_back(self, payload: Tensor) -> None:
        """Put work that no round has counted into the live parameters again; the next delta carries it."""
        self.window.write(self.window.read() - self.backend.decode(payload))

    @contextmanager
    def moving_along(self) -> Iterator[None]:
        """Let the live parameters move as far as the anchor moves inside, so that no work in them is lost."""
        before = self.anchor.clone()
        yield
        self.window.write(self.window.read() + (self.anchor - before))

    # ------------------------------------------------------------------ join

    def shared(self) -> tuple[dict[str, int], dict[str, Tensor]]:
        """Return what all workers have alike: counts, and the vectors themselves."""
        return {"version": self.version, "step": self.step, "gap": self.gap}, {"anchor": self.anchor, **self.slots}

    def take_shared(self, counts: Mapping[str, int], vectors: Mapping[str, Tensor]) -> None:
        """Take over what `shared` gave on another worker; LinkError if it is not of this fragment."""
        own_counts, own = self.shared()
        mine, theirs = ({name: (tuple(v.shape), v.dtype) for name, v in of.items()} for of in (own, vectors))
        if theirs != mine or counts.keys() != own_counts.keys() or min(counts.values()) < 0:
            raise LinkError(f"it holds {theirs} and counts {dict(counts)}, where {mine} and {own_counts} are due")
        for name, vector in own.items():
            vector.copy_(vectors[name])
        self.version, self.step, self.gap = counts["version"], counts["step"], counts["gap"]

    # ------------------------------------------------------------------ offload and resume

    def vectors(self) -> dict[str, Tensor]:  # pragma: no cover (for offload, which needs CUDA)
        """Return all vectors that are needed only when the fragment is due."""
        own = {"residual": self.residual, "own": self.merge.own}
        return {"anchor": self.anchor, **self.slots, **{name: v for name, v in own.items() if v is not None}}

    def replace_vectors(self, vectors: Mapping[str, Tensor]) -> None:  # pragma: no cover (as above)
        """Use these copies of what `vectors` gave from now on."""
        self.anchor = vectors["anchor"]
        self.slots = {name: vectors[name] for name in self.slots}
        self.residual, self.merge.own = vectors.get("residual"), vectors.get("own")

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the live parameters, copied, so that training on does not change it."""
        return {
            "anchor": self.anchor.clone(),
            "slots": {name: slot.clone() for name, slot in self.slots.items()},
            "version": self.version,
            "step": self.step,
            "gap": self.gap,
            "residual": copy_of(self.residual),
            **self.merge.state_dict(),
            "left_out": self.left_out,
            "norms": self.norms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what state_dict gave."""
        self.anchor.copy_(state["anchor"])
        for name, slot in self.slots.items():
            slot.copy_(state["slots"][name])
        self.version, self.step, self.gap = state["version"], state.get("step", 0), state["gap"]
        if self.residual is not None:
            self.residual.copy_(state["residual"])
        self.merge.load_state_dict(state, self.window.device)
        self.left_out = state["left_out"]
        self.norms.load_state_dict(state.get("norms", ()))


def copy_of(tensor: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    """Return a copy of a tensor, on another device if one is given."""
    return None if tensor is None else tensor.to(device or tensor.device, copy=True)
