"""Asks the meeting point that worker 0 hosts, from any thread, and never for longer than a caller says."""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import CancelledError
from typing import Any, TypeVar

import grpc
import grpc.aio

from atoll.errors import LinkError
from atoll.link.net.credentials import channel_credentials, channel_options, refusal
from atoll.link.net.event_loop import event_loop
from atoll.link.net.identity import Bearer, Identity
from atoll.link.net.meeting_point import (
    MESSAGE_BYTES,
    SERVICE,
    LookReply,
    LookRequest,
    SayReply,
    SayRequest,
    TakeReply,
    TakeRequest,
)
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.registry_messages import Message, parse
from atoll.link.net.revocation_watch import list_of
from atoll.link.seat import Seat

ASK_S = 1.0
"""Seconds for an answer of a meeting point that may be gone."""
SILENT_S = 5.0
"""Seconds after which a silent one is not asked again; on a busy line, answers take seconds."""
Reply = TypeVar("Reply", bound=Message)
_OPTIONS = [
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
]


class MeetingClient:
    """Is one process's connection to the meeting point.

    Args:
        address: HOST:PORT of worker 0.
        security: This process's identity, or `INSECURE` for a private cable.
    """

    def __init__(self, address: str, security: Identity | Insecure) -> None:
        self.answers = True
        """Whether the meeting point still answers, as far as is known."""
        self._address = address
        self._security = security
        self._silent_s = 0.0
        self._channel = event_loop().run(self._open())

    async def _open(self) -> grpc.aio.Channel:
        if self._security == INSECURE:
            return grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        host = Bearer(self._security.bearer.run, "worker", 0)
        options = [*_OPTIONS, *channel_options(host, list_of(self._security))]
        return grpc.aio.secure_channel(self._address, channel_credentials(self._security), options=options)

    def close(self) -> None:
        """Close the connection."""
        event_loop().run(self.end())

    async def end(self) -> None:
        """Close the connection, in the event loop."""
        self.answers = False
        await self._channel.close()

    def take(self, seat: Seat, life: int, within_s: float) -> TakeReply:
        """Ask for a seat.

        Raises:
            PeerRefusedError: One end refuses the certificate of the other.
            LinkError: Nobody answers as a meeting point does.
        """
        request = TakeRequest(worker=seat.worker, workers=seat.workers, rank=seat.rank, ranks=seat.ranks, life=life)
        try:
            return event_loop().run(self._call("Take", request, TakeReply, within_s))
        except grpc.aio.AioRpcError as fault:
            if self._security != INSECURE:
                host = Bearer(self._security.bearer.run, "worker", 0)
                if (refused := refusal(fault, self._security, host, self._address)) is not None:
                    raise refused from fault
            raise self._no_answer() from fault
        except ValueError as fault:
            raise LinkError(f"{self._address} answers with {fault}", worker=0) from fault

    def say(self, name: str, value: Any, within_s: float) -> None:
        """Write a JSON value under a name; LinkError if the meeting point does not answer in time, or refuses."""
        self._ask("Say", SayRequest(name=name, text=json.dumps(value)), SayReply, within_s)

    def look(self, names: Iterable[str], within_s: float, hold_s: float = 0.0) -> Mapping[str, str]:
        """Return the texts under these names, as soon as one of them is there.

        Args:
            names: The names; those without a text are left out of the answer.
            within_s: Seconds for an answer, or LinkError.
            hold_s: Seconds to wait for the first text.
        """
        request = LookRequest(names=list(names), hold_s=hold_s)
        return self._ask("Look", request, LookReply, within_s + hold_s).texts

    def _ask(self, method: str, request: Message, kind: type[Reply], within_s: float) -> Reply:
        """Call the meeting point, which may be stopped or gone; a silent one delays every later call."""
        if not self.answers:
            raise self._no_answer()
        try:
            reply = event_loop().run(self._call(method, request, kind, within_s))
        except grpc.aio.AioRpcError as fault:
            if fault.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED):
                raise LinkError(f"worker 0 at {self._address} refuses: {fault.details()}", worker=0) from fault
            self._silent_s += within_s
            is_slow = fault.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            self.answers = self.answers and is_slow and self._silent_s < SILENT_S
            raise self._no_answer() from fault
        except (CancelledError, grpc.aio.BaseError) as fault:  # another thread has closed the connection
            raise self._no_answer() from fault
        except ValueError as fault:
            raise LinkError(f"worker 0 at {self._address} answers with {fault}", worker=0) from fault
        self._silent_s = 0.0
        return reply

    async def _call(self, method: str, request: Message, kind: type[Reply], within_s: float) -> Reply:
        call = self._channel.unary_unary(f"/{SERVICE}/{method}")
        return parse(kind, await call(request.encode(), timeout=within_s))

    def _no_answer(self) -> LinkError:
        return LinkError(f"worker 0 at {self._address} does not answer any more", worker=0)
