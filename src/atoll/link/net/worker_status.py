"""Tells an observer how far a worker is, and asks workers for it.

A worker answers with counts, which costs it nothing while nobody asks. The observer asks twice and takes differences.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

import grpc
import grpc.aio
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.link.net.credentials import channel_credentials, channel_options
from atoll.link.net.handshake import SERVICE
from atoll.link.net.identity import Bearer, Identity
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.revocation_watch import list_of

MOST_ROUNDS = 16
"""Rounds on their way that a worker names."""
ANSWER_S = 3.0
_Count = Annotated[int, Field(ge=0, lt=1 << 62)]


class WorkerStatus(BaseModel):
    """Holds how far a worker is."""

    model_config = ConfigDict(frozen=True)

    step: _Count
    """Inner steps that it has made."""
    sent_bytes: _Count
    """Put on the wire to the processes that it is connected to."""
    received_bytes: _Count
    rounds: Annotated[list[tuple[int, int]], Field(max_length=MOST_ROUNDS)]
    """Step and fragment of the oldest rounds that it has opened and that are not complete."""


async def ask(addresses: Mapping[int, Sequence[str]], security: Identity | Insecure) -> dict[int, WorkerStatus]:
    """Ask workers how far they are; those that do not answer within `ANSWER_S` are left out.

    Args:
        addresses: By seat, HOST:PORT of the worker.
        security: The identity of an observer or a worker, or "none".
    """
    found = await asyncio.gather(*(_ask_one(seat, places, security) for seat, places in addresses.items()))
    return {seat: status for seat, status in zip(addresses, found, strict=True) if status is not None}


async def _ask_one(seat: int, addresses: Sequence[str], security: Identity | Insecure) -> WorkerStatus | None:
    for address in addresses:
        try:
            async with open_channel(seat, address, security) as channel:
                call = channel.unary_unary(f"/{SERVICE}/Status")
                return WorkerStatus.model_validate_json(await call(b"", timeout=ANSWER_S))
        except (grpc.aio.AioRpcError, ValidationError):
            continue
    return None


def open_channel(seat: int, address: str, security: Identity | Insecure) -> grpc.aio.Channel:
    """Return a channel of an observer to a worker."""
    own = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
    if security == INSECURE:
        return grpc.aio.insecure_channel(address, options=own)
    options = [*own, *channel_options(Bearer(security.bearer.run, "worker", seat), list_of(security))]
    return grpc.aio.secure_channel(address, channel_credentials(security), options=options)
