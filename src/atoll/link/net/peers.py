"""Connects a process with the others of its run: one session per pair, over gRPC with mutual TLS.

Either end of a pair may dial, and both may at once. A dial gets through when its streams are open and
hellos are exchanged. The end with the lower `Process` then takes one, says so on its control stream, and refuses
all others; the other end never chooses. So dials that cross need no luck, and a pair that can be dialled in one
direction only still meets. The end that chooses counts the session once it has heard the other on it: that one may
have given the dial up just before.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import grpc
import grpc.aio

from atoll._util.checks import check_number, check_whole, config_error
from atoll.errors import LinkError
from atoll.link.net.credentials import Gate
from atoll.link.net.dialling import Unreachable, dial
from atoll.link.net.frames import CONNECTIONS, CONTROL_BYTES, HEADER_BYTES, MESSAGE_BYTES, Kind, one_line, pack
from atoll.link.net.handshake import Own, RefusedError, name
from atoll.link.net.held_bytes import MOST_HELD
from atoll.link.net.identity import Bearer, Identity, how_to_renew
from atoll.link.net.listening import listen_on, server_options
from atoll.link.net.log_feed import LogFeed
from atoll.link.net.outbox import Sending
from atoll.link.net.reception import Reception
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.revocation_watch import list_of, watch_revocations
from atoll.link.net.revocations import Revocations
from atoll.link.net.session import REFUSED, Handler, Session, Streams, pack_data
from atoll.link.net.traffic import Line, Traffic
from atoll.link.net.views import Process

__all__ = ["Handler", "Peers", "Rate", "Sending"]

MOST_CONNECTIONS: Final = 1024
"""Most connections, strangers' included; and at most a quarter of the files that the process may open."""
_DIAL_TOO_S = 1.0
_PAUSES_S = (0.2, 1.0)
_FLUSH_S = 2.0
_GRACE_S = 0.2  # for peers to close their connections; gRPC prints a line at theirs otherwise
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Rate:
    """Tells how the session with one peer is doing."""

    sent: int
    """Bytes of bulk messages."""
    received: int
    bytes_per_s: float | None
    """At which the peer receives while there is something to send; None before that was measured."""
    round_trip_s: float | None
    """Of the last heartbeat; None before the first."""
    silent_s: float
    """Since the peer was last heard."""


@dataclass(slots=True)
class _Wanted:
    """Is a peer that this process wants a session with."""

    addresses: tuple[str, ...]
    dialling: asyncio.Task[None] | None = None
    problem: str | None = None


class Peers:
    """Holds the sessions of this process with others of its run.

    All methods are called, and all callbacks are made, in the event loop that `start` runs in.

    Args:
        me: This process.
        security: Its identity, or `INSECURE` for a private cable: then a hello says which seat a peer has.
        handler: Told what happens.
        greeting: Goes to every peer with the hello; at most 1 MiB.
        silent_s: A peer that is silent for this long is lost.
        connections: Bulk streams of every session that this process dials, each with a TCP connection to itself.
        revocations: The newest list that this process has, if not the one in its bundle, which it follows.
    """

    def __init__(
        self,
        me: Process,
        security: Identity | Insecure,
        handler: Handler,
        *,
        greeting: bytes,
        silent_s: float = 5.0,
        connections: int = 1,
        revocations: Revocations | None = None,
    ) -> None:
        check_whole("connections", connections, most=CONNECTIONS, why="each is a TCP connection")
        check_number("silent_s", silent_s, least=0.05, why="heartbeats come five times as often")
        if len(greeting) > CONTROL_BYTES:
            raise config_error("greeting", len(greeting), f"at most {CONTROL_BYTES} bytes")
        self.gate = None if security == INSECURE else Gate(security.bearer.run, revocations or list_of(security))
        self._own = Own(me, security, self.gate, greeting, connections)
        self._handler = handler
        self._silent_s = silent_s
        self._wanted: dict[Process, _Wanted] = {}
        self._sessions: dict[Process, Session] = {}
        self._unheard: dict[Session, tuple[_Wanted, bytes]] = {}  # chosen here, with the greeting
        self._reception = Reception(self._own, self._expects, self._begin)
        self.traffic = Traffic()
        """What this process has exchanged; a second `Peers` of the same worker takes over that of the first."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None
        self._watching: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Listen for other processes.

        Args:
            listen: HOST:PORT, such as "0.0.0.0:0" or "[::]:29400"; port 0 takes a free one.

        Returns:
            HOST:PORT where it listens.

        Raises:
            ConfigError: The address cannot be used.
        """
        limits = server_options(MESSAGE_BYTES, MOST_CONNECTIONS)
        server = grpc.aio.server(options=limits, maximum_concurrent_rpcs=2 * MOST_CONNECTIONS)
        server.add_generic_rpc_handlers((self._reception.handlers(),))
        try:
            address = listen_on(server, listen, self._own.security, "link")
            await server.start()
        except BaseException:
            await server.stop(0)
            raise
        self._server = server
        if self.gate is not None and self._own.security != INSECURE:
            watching = watch_revocations(self._own.security, self.gate, self.end_revoked)
            self._watching = self._begin_task(watching, "revocations")
        return address

    # ------------------------------------------------------------------ what the owner asks for

    def meet(self, peer: Process, addresses: Sequence[str], *, dial: bool) -> None:
        """Want a session with a process; a session that is lost is not opened again unless asked for again.

        Asking again before there is one changes nothing, unless for other addresses: a dial goes on.

        Args:
            peer: The process.
            addresses: HOST:PORT of it, tried in turn.
            dial: Whether to dial at once; otherwise the peer dials, and this process too after a second.
        """
        if peer.seat == self._own.me.seat:
            raise LinkError(f"worker {peer.seat} cannot be its own peer", worker=peer.seat)
        known = self._wanted.get(peer)
        if peer in self._sessions or (known is not None and known.addresses == tuple(addresses)):
            return
        self._forget(peer)
        wanted = self._wanted[peer] = _Wanted(tuple(addresses))
        if addresses:
            delay_s = 0.0 if dial else _DIAL_TOO_S
            wanted.dialling = self._begin_task(self._dial(peer, wanted.addresses, delay_s), f"dial {peer.seat}")
        self._reception.wake()

    def drop(self, peer: Process, reason: str = "") -> None:
        """End a session, or no longer want one; the handler hears nothing more of it.

        Args:
            peer: The process.
            reason: What its handler is told; continues "worker 0 ...".
        """
        self._forget(peer)
        if peer in self._sessions:
            self._sessions[peer].end(None, reason)

    def answer_observers(self, status: Callable[[], bytes]) -> None:
        """Answer observers that ask how this process is doing with what this returns."""
        self._reception.status = status

    def serve_log(self, path: Path) -> None:
        """Let observers follow a file of lines that grows."""
        self._reception.log = LogFeed(path, self.traffic.foreground)

    @property
    def wanted(self) -> tuple[Process, ...]:
        """The processes that this one wants a session with and has none."""
        return tuple(self._wanted)

    def is_connected(self, peer: Process) -> bool:
        """Return whether there is a session with a process, and both ends have it."""
        return peer in self._sessions and self._sessions[peer] not in self._unheard

    def problem(self, peer: Process) -> str | None:
        """Return why the last dial failed, in one line; None if it did not, or none was asked for."""
        wanted = self._wanted.get(peer)
        return wanted.problem if wanted else None

    def send(self, peer: Process, data: bytes) -> None:
        """Queue a control message, of at most 1 MiB; without a session nothing happens."""
        if len(data) > CONTROL_BYTES:
            problem = f"a control message of {len(data)} bytes; allowed are {CONTROL_BYTES}: use send_bulk"
            raise LinkError(problem, worker=peer.seat)
        if peer in self._sessions:
            self._sessions[peer].put(pack_data(data))

    def send_bulk(self, peer: Process, header: bytes, body: memoryview | bytes, *, background: bool = False) -> Sending:
        """Queue a bulk message; without a session it is cancelled at once.

        Args:
            peer: The process.
            header: At most 64 KiB.
            body: Must not change until the message is done.
            background: Whether to yield to all other bulk messages, and to take a share of the line only.
        """
        if len(header) > HEADER_BYTES:
            raise LinkError(f"a header of {len(header)} bytes; allowed are {HEADER_BYTES}", worker=peer.seat)
        flat = memoryview(body).cast("B")
        if (session := self._sessions.get(peer)) is not None:
            if session.outbox.waiting > MOST_HELD:
                why = f"takes what it is sent too slowly: {session.outbox.waiting} bytes wait"
                asyncio.get_running_loop().call_soon(session.end, why, "cannot wait longer for what it has sent to go")
            return session.outbox.add(header, flat, background=background)
        sending = Sending(0, header, flat, background=background)
        sending.done.cancel()
        return sending

    def rates(self) -> Mapping[Process, Rate]:
        """Return how each session is doing."""
        now_s = time.monotonic()
        return {
            peer: Rate(
                one.outbox.sent,
                one.assembly.received,
                one.outbox.rate,
                one.pulse.round_trip_s,
                now_s - one.pulse.heard_s,
            )
            for peer, one in self._sessions.items()
        }

    def lines(self) -> Mapping[int, Line]:
        """Return worker -> what has been exchanged with it, also with those that are gone."""
        open_ones = {
            peer.seat: (one.outbox.sent, one.assembly.received, one.outbox.rate) for peer, one in self._sessions.items()
        }
        known = {**self.traffic.sent, **open_ones}
        return {worker: self.traffic.line(worker, *open_ones.get(worker, ())) for worker in known}

    async def close(self, reason: str = "") -> None:
        """Send what is queued, for at most 2 s, tell all peers the reason, and close everything."""
        if self._watching is not None:
            self._watching.cancel()
        for peer in list(self._wanted):
            self._forget(peer)
        end_s = time.monotonic() + _FLUSH_S
        while any(not one.outbox.is_empty for one in self._sessions.values()) and time.monotonic() < end_s:
            await asyncio.sleep(0.01)
        for session in list(self._sessions.values()):
            session.end(None, reason)
        for peer in list(self._wanted):  # of sessions that ended unheard meanwhile
            self._forget(peer)
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            if reason and self._reception.log is not None:  # it leaves for good
                await asyncio.sleep(self._reception.log.linger_s)
            await self._server.stop(_GRACE_S)

    # ------------------------------------------------------------------ sessions

    def ended(self, session: Session, why: str | None) -> None:
        """Forget a session that has ended; called by it. One that the peer never was heard on is a failed dial."""
        assert session.closing is not None
        self._keep(session.closing)
        unheard = self._unheard.pop(session, None)
        if self._sessions.get(session.peer) is session:
            del self._sessions[session.peer]
            self.traffic.sent[session.peer.seat] += session.outbox.sent
            self.traffic.received[session.peer.seat] += session.assembly.received
            if why is not None and unheard is not None:
                self.meet(session.peer, unheard[0].addresses, dial=True)
            elif why is not None:
                self._handler.lost(session.peer, why)

    def heard(self, session: Session) -> None:
        """Count a session, for the peer has it too; called by it with everything that comes."""
        if (unheard := self._unheard.pop(session, None)) is not None:
            self._connected(session, unheard[1])

    def end_revoked(self) -> None:
        """End the sessions whose peers may have shown certificates that are revoked by now."""
        for peer, session in list(self._sessions.items()):
            if session.generation < self._own.least_generation(peer):
                why = f"its certificate is revoked; {how_to_renew(Bearer('', 'worker', peer.seat))}"
                session.end("has a certificate that is revoked", f"{REFUSED}{why}")

    def _begin(self, peer: Process, streams: Streams, greeting: bytes) -> Session:
        """Make a dial the session."""
        if not self._expects(peer):
            raise RefusedError(f"{name(peer)} is no longer expected")
        wanted = self._wanted[peer]
        if streams.generation < self._own.least_generation(peer):
            raise RefusedError(f"the certificate of {name(peer)} is revoked")
        self._forget(peer, but=asyncio.current_task())
        session = Session(peer, streams, self, self._handler, self._silent_s, self.traffic.foreground)
        self._sessions[peer] = session
        if self._own.chooses(peer):
            self._unheard[session] = wanted, greeting
            session.put(pack(Kind.READY))
        session.start()
        if not self._own.chooses(peer):
            self._connected(session, greeting)
        return session

    def _connected(self, session: Session, greeting: bytes) -> None:
        peer = session.peer
        try:
            self._handler.connected(peer, greeting)
        except Exception as fault:
            _log.exception("this process cannot handle the greeting of worker %d", peer.seat)
            session.end(f"has a greeting that this process cannot handle: {one_line(repr(fault))}", "fails")

    def _expects(self, peer: Process) -> bool:
        if peer in self._sessions:
            raise RefusedError("there is a session already", grpc.StatusCode.ALREADY_EXISTS)
        return peer in self._wanted

    async def _dial(self, peer: Process, addresses: Sequence[str], delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        pause_s, longest_s = _PAUSES_S
        while True:
            for address in addresses:
                try:
                    await dial(self._own, peer, address, self._begin)
                    return
                except Unreachable as fault:
                    if peer in self._wanted:
                        self._wanted[peer].problem = str(fault)
            await asyncio.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)

    def _forget(self, peer: Process, but: asyncio.Task[Any] | None = None) -> None:
        wanted = self._wanted.pop(peer, None)
        if wanted and wanted.dialling and wanted.dialling is not but:
            wanted.dialling.cancel()

    def _begin_task(self, work: Coroutine[Any, Any, None], what: str) -> asyncio.Task[None]:
        return self._keep(asyncio.create_task(work, name=what))

    def _keep(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
