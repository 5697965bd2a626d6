"""What one worker remembers between two steps, and how it is written down."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from atoll.core.flat import Window, pieces
from atoll.core.guard import DUST, Norms, Size
from atoll.core.outer import blend
from atoll.link.base import Contribution, Member, Offer, Pending, RoundId


@dataclass(slots=True)
class Counters:
    """What one worker's outer loop has done so far."""

    rounds_sent: int = 0
    """Rounds that this worker gave something to; with kernels, one that could not be sent is taken back later."""
    rounds_applied: int = 0
    rounds_missed: int = 0
    """Rounds that were completed without the payload this worker had sent."""
    rounds_left_out: int = 0
    """Rounds without this worker, because its loss or its delta was not finite, or its delta far too large."""
    rounds_outlier: int = 0
    """Rounds that left this worker's delta out because it was far too large."""
    outliers_seen: int = 0
    """Deltas of any worker that were left out of applied rounds for that reason."""
    roll_backs: int = 0
    """How often this worker gave up its work because something of it was not finite, or far too large."""
    bytes_sent: int = 0
    """Payload bytes handed to the link, counted once however many workers receive them."""
    bytes_received: int = 0
    """Payload bytes of the other workers."""
    wait_s: float = 0.0
    """Seconds spent blocked on the link: the exposed part of what rounds take."""
    hidden_s: float = 0.0
    """Seconds for which rounds travelled while this worker trained, summed over rounds."""
    wire_sent: int = 0
    """Bytes put on the wire, headers included; inside one process 0, or what an emulated line carries."""
    wire_received: int = 0
    """Bytes that came from the wire."""

    def count_outliers(self, seen: int, *, own: bool) -> None:
        """Count the deltas that a round has left out for their size, with this worker's `own` or without."""
        self.outliers_seen += seen
        self.rounds_outlier += own
        self.rounds_left_out += own


@dataclass(slots=True)
class FragmentState:
    """One fragment on one worker; all vectors are [numel] in the window's dtype."""

    window: Window
    """The live parameters."""
    anchor: Tensor
    """The fragment as last agreed by all: the same bits on every worker."""
    slots: dict[str, Tensor]
    """The outer optimizer's vectors, such as the velocity: the same bits on every worker."""
    version: int = 0
    """Rounds applied to the anchor."""
    step: int = 0
    """The inner step after which the last round that moved the anchor was sent."""
    gap: int = 0
    """The step of the last round that somebody's payload did not reach; 0 if there was none."""
    residual: Tensor | None = None
    """Error feedback: what rounding has lost and the next delta will carry."""
    own: Tensor | None = None
    """Eager: the worker's own momentum, fed by its own deltas alone."""
    newest: Tensor | None = None
    """Eager: the payload of the worker's newest delta."""
    share: float = 0.0
    """Eager: the worker's expected part, 0 to 1, of the mean which that delta enters."""
    norms: Norms = field(default_factory=Norms)
    """The norms of the worker's last deltas."""
    left_out: bool = False
    """The worker was rolled back since the last send: the next round does without it."""

    @classmethod
    def fresh(cls, window: Window, slot_names: Iterable[str], *, eager: bool, feedback: bool) -> Self:
        """The state before the first step: the anchor is where the live parameters are."""
        anchor = window.read()
        return cls(
            window,
            anchor,
            {name: torch.zeros_like(anchor) for name in slot_names},
            residual=torch.zeros_like(anchor) if feedback else None,
            own=torch.zeros_like(anchor) if eager else None,
            norms=Norms(DUST * float(torch.linalg.vector_norm(anchor, dtype=torch.float64))),
        )

    def hold_back(self, delta: Tensor, decoded: Tensor) -> Tensor | None:
        """Keep what rounding lost of a delta just sent; returns what undoes that, should the payload be lost.

        If it is, a blending worker's parameters still hold all its work, so the residual must go back to what it was.
        An eager worker sends exactly what was lost once more, so its residual stays.
        """
        if self.residual is None:
            return None
        lost = delta - decoded
        undoes = self.residual - lost if self.own is None else None
        self.residual.copy_(lost)
        return undoes

    def restore(self, lost: "Flight") -> None:
        """The live parameters still hold what a lost payload carried, so rounding has kept nothing back of it."""
        if self.residual is not None and lost.restore is not None:
            self.residual.add_(lost.restore)

    def blend(self, alpha: float) -> None:
        """Mix the anchor into the live parameters, of which `alpha` stays."""
        if alpha == 0:
            self.window.write(self.anchor)
            return
        local = self.window.read()
        for piece in pieces(local.numel(), local.device):
            local[piece] = blend(local[piece], self.anchor[piece], alpha)
        self.window.write(local)

    def vectors(self) -> dict[str, Tensor]:
        """All that is needed only when the fragment is due."""
        own = {"residual": self.residual, "own": self.own}
        return {"anchor": self.anchor, **self.slots, **{name: v for name, v in own.items() if v is not None}}

    def put(self, vectors: Mapping[str, Tensor]) -> None:
        """Replace what `vectors` gave by copies of it."""
        self.anchor = vectors["anchor"]
        self.slots = {name: vectors[name] for name in self.slots}
        self.residual, self.own = vectors.get("residual"), vectors.get("own")

    def forget(self) -> None:
        """Become the state of a worker that has just arrived: it has the anchor and nothing of its own."""
        for vector in (self.residual, self.own):
            if vector is not None:
                vector.zero_()
        self.newest = None
        self.window.write(self.anchor)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the live parameters, copied, so that training on does not tear it."""
        return {
            "anchor": self.anchor.clone(),
            "slots": {name: slot.clone() for name, slot in self.slots.items()},
            "version": self.version,
            "step": self.step,
            "gap": self.gap,
            "residual": _copy(self.residual),
            "own": _copy(self.own),
            "newest": _copy(self.newest),
            "share": self.share,
            "left_out": self.left_out,
            "norms": self.norms.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave, on the device of the live parameters."""
        self.anchor.copy_(state["anchor"])
        for name, slot in self.slots.items():
            slot.copy_(state["slots"][name])
        self.version, self.step, self.gap = state["version"], state.get("step", 0), state["gap"]
        for vector, saved in ((self.residual, state["residual"]), (self.own, state["own"])):
            if vector is not None:
                vector.copy_(saved)
        self.newest = _copy(state["newest"], self.window.device)
        self.share, self.left_out = state["share"], state["left_out"]
        self.norms.load_state_dict(state.get("norms", ()))


class Outgoing(NamedTuple):
    """A delta on its way out, and what the codec made of it; None while the worker is absent."""

    round_id: RoundId
    delta: Tensor | None
    """None if it was never written down: nobody needs it once it is encoded."""
    offer: Offer | None


class Unsent:
    """An offer of which it is known that it could not be sent, but not yet to the worker that made it."""

    payload = torch.empty(0, dtype=torch.uint8, device="cpu")

    def settled(self) -> None:
        """There is none."""


@dataclass(slots=True)
class Flight:
    """A round this worker has opened and that some worker has yet to apply."""

    offer: Offer | None
    """What it sent, or tried to; None if it was absent or rolled back, and takes the result all the same."""
    pending: Pending | None = None
    """Where the result will come from; None until the link is joined after a resume."""
    restore: Tensor | None = None
    """What to add to the residual if the payload turns out to be lost."""
    applied: bool = False
    """This worker is done with it, and keeps it only for workers with a longer delay."""
    held: float = 1.0
    """How much of the work it sent the live parameters still hold: less once another round has been blended in."""
    forgotten: bool = False
    """The worker was away or rolled back after sending, and has started anew."""

    def state_dict(self) -> dict[str, Any]:
        """Everything but the pending round, which is opened anew on resume with the same contribution."""
        sent = None if self.offer is None else self.offer.settled()
        return {
            "unsent": self.offer is not None and sent is None,
            "payload": None if sent is None else sent.payload.clone(),
            "anchor": None if sent is None else (sent.member.anchor_version, sent.member.anchor_fingerprint),
            "size": None if sent is None else tuple(sent.member.size),
            "restore": _copy(self.restore),
            "applied": self.applied,
            "held": self.held,
            "forgotten": self.forgotten,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], worker: int, weight: float, device: torch.device) -> Self:
        """A flight as state_dict gave it, sent by this worker."""
        sent: Offer | None = Unsent() if state.get("unsent") else None
        if (payload := _copy(state["payload"], device)) is not None:
            size = Size(*(state.get("size") or (0.0, 0.0)))
            sent = Contribution(replace(Member(worker, weight, *state["anchor"]), size=size), payload)
        restore = _copy(state["restore"], device)
        return cls(sent, None, restore, *(state[key] for key in ("applied", "held", "forgotten")))


def _copy(tensor: Tensor | None, device: torch.device | None = None) -> Tensor | None:
    return None if tensor is None else tensor.to(device or tensor.device, copy=True)
