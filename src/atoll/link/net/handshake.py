"""Defines how two processes of a run greet each other, whichever of them dials."""

from dataclasses import dataclass
from typing import Final, Protocol

import grpc

from atoll.link.net.credentials import Gate
from atoll.link.net.frames import Hello
from atoll.link.net.identity import Bearer, Identity
from atoll.link.net.registry import Insecure
from atoll.link.net.session import Session, Streams
from atoll.link.net.views import Process

SERVICE: Final = "atoll.Peer"
ACCEPTED: Final = b"1"
"""Answers the hello of a bulk stream."""
HANDSHAKE_S: Final = 10.0


class RefusedError(Exception):
    """A dial cannot become the session.

    Args:
        why: One line for the user at the other end.
        code: gRPC's status for it.
    """

    def __init__(self, why: str, code: grpc.StatusCode = grpc.StatusCode.FAILED_PRECONDITION) -> None:
        super().__init__(why)
        self.code = code


class Begin(Protocol):
    """Makes the streams of a dial the session with a peer, or raises `RefusedError`."""

    def __call__(self, peer: Process, streams: Streams, greeting: bytes) -> Session:
        """Return the session, which has started."""


@dataclass(frozen=True, slots=True)
class Own:
    """Holds what this process is and how it greets others."""

    me: Process
    security: Identity | Insecure
    gate: Gate | None
    """None without security."""
    greeting: bytes
    connections: int

    def hello(self, peer: Process, session: str, connections: int) -> bytes:
        """Return the first message of a control stream."""
        hello = Hello(
            seat=self.me.seat,
            life=self.me.life,
            wanted_seat=peer.seat,
            wanted_life=peer.life,
            session=session,
            connections=connections,
        )
        return hello.pack(self.greeting)

    def check_wanted(self, hello: Hello) -> None:
        """Refuse a hello that is for another process."""
        wanted = Process(hello.wanted_seat, hello.wanted_life)
        if wanted != self.me:
            raise RefusedError(f"this is {name(self.me)}, not {name(wanted)}: use the newest address in the registry")

    def least_generation(self, peer: Process) -> int:
        """Return the lowest generation of a peer's certificates that this process accepts now."""
        if self.gate is None:
            return 0
        return self.gate.revocations.accepted(Bearer(self.gate.revocations.run, "worker", peer.seat)).generation

    def chooses(self, peer: Process) -> bool:
        """Return whether this end takes one of the dials between both."""
        return self.me < peer


def name(process: Process) -> str:
    """Return a process's name for messages."""
    return f"worker {process.seat} (life {process.life})"
