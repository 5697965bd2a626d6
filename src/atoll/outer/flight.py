"""Follows one round of one worker, and saves it while it is in flight."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from atoll.core.outliers import Size
from atoll.link.base import Contribution, Member, Offer, Pending
from atoll.outer.fragment import EMPTY, copy_of


class Unsendable:
    """Stands for an offer that could not be sent, saved before its worker had learned of it."""

    payload = EMPTY

    def settled(self) -> None:
        """Return None: there is nothing to send."""


@dataclass(slots=True)
class Flight:
    """Follows one round of this worker, from its delta until every worker has applied it."""

    offer: Offer | None = None
    """What the worker sends; None if it is absent or rolled back, and takes the result all the same."""
    delta: Tensor | None = None
    """What the payload was encoded from, until it is sent."""
    pending: Pending | None = None
    """Where the result comes from; None until the link is joined after a resume."""
    undo: Tensor | None = None
    """What to add to the residual if the payload turns out to be lost."""
    applied: bool = False
    """This worker is done with it, and keeps it only for workers with a longer delay."""
    held: float = 1.0
    """How much of the work it sent the live parameters still hold: less once another round has been blended in."""
    forgotten: bool = False
    """The worker was away or rolled back after sending, and has started anew."""
    keeps: bool = False
    """The live parameters hold work from before the worker was cut off: they move with the anchor, unblended."""
    owed: Tensor | None = None
    """What the worker had sent before it was cut off: if the round has not counted it, a later one must."""
    counted: tuple[int, ...] = ()
    """Workers whose payloads counted, once it is applied."""

    @property
    def sent_work(self) -> Tensor | None:
        """The payload with work that the worker has not given up, or None."""
        return self.owed if self.offer is None or self.forgotten else self.offer.payload

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the pending round, which a resumed run opens again with the same payload."""
        sent = None if self.offer is None else self.offer.settled()
        return {
            "unsent": self.offer is not None and sent is None,
            "payload": None if sent is None else sent.payload.clone(),
            "anchor": None if sent is None else (sent.member.anchor_version, sent.member.anchor_fingerprint),
            "size": None if sent is None else tuple(sent.member.size),
            "restore": copy_of(self.undo),
            "applied": self.applied,
            "held": self.held,
            "forgotten": self.forgotten,
            "keeps": self.keeps,
            "owed": copy_of(self.owed),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any], member: Member, device: torch.device) -> Self:
        """Make a flight from what state_dict gave; `member` is the worker that sent it."""
        offer: Offer | None = Unsendable() if state.get("unsent") else None
        if (payload := copy_of(state["payload"], device)) is not None:
            version, fingerprint = state["anchor"]
            size = Size(*(state.get("size") or (0.0, 0.0)))
            offer = Contribution(
                replace(member, anchor_version=version, anchor_fingerprint=fingerprint, size=size), payload
            )
        kept = {key: state[key] for key in ("applied", "held", "forgotten")}
        kept |= {"keeps": state.get("keeps", False), "owed": copy_of(state.get("owed"), device)}
        return cls(offer, undo=copy_of(state["restore"], device), **kept)
