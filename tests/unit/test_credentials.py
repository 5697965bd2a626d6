"""Connections between members: the right seat gets through, and each refusal is one clear line."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from atoll.link.net.credentials import (
    Gate,
    PeerRefusedError,
    channel_credentials,
    channel_options,
    refusal,
    server_credentials,
)
from atoll.link.net.identity import Authority, Bearer, Identity, Role
from atoll.link.net.revocations import Revocations, revoke

pytestmark = pytest.mark.processes  # waits for connections more than it computes

RUN = "x-1a2b3c4d"
NONE = Revocations(RUN)
STRANGER, FORBIDDEN, UNSURE = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAVAILABLE,
)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority.new(RUN)


@dataclass(frozen=True)
class Server:
    """A gRPC server on loopback that answers with the caller's host name."""

    address: str
    gate: Gate
    seen: list[Bearer]


Serve = Callable[..., Server]


@pytest.fixture
def serve() -> Iterator[Serve]:
    running = []

    def start(
        *identities: Identity, roles: tuple[Role, ...] = ("worker",), revoked: Revocations = NONE, trusts: bytes = b""
    ) -> Server:
        server = grpc.server(ThreadPoolExecutor(2))
        gate, seen = Gate(RUN, revoked), list[Bearer]()

        def answer(_: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                seen.append(gate.peer(context.auth_context(), roles))
            except PeerRefusedError as refused:
                context.abort(refused.code, str(refused))
            return seen[-1].host_name.encode()

        handlers = {"ask": grpc.unary_unary_rpc_method_handler(answer)}
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("test", handlers)])
        shown = (replace(identities[0], run_certificate=trusts or identities[0].run_certificate), *identities[1:])
        port = server.add_secure_port("127.0.0.1:0", server_credentials(*shown))
        server.start()
        running.append(server)
        return Server(f"127.0.0.1:{port}", gate, seen)

    yield start
    for server in running:
        server.stop(None).wait()


def dial(address: str, identity: Identity, peer: Bearer, revoked: Revocations = NONE) -> grpc.Channel:
    return grpc.secure_channel(address, channel_credentials(identity), channel_options(peer, revoked))


def ask(channel: grpc.Channel) -> str:
    return bytes(channel.unary_unary("/test/ask")(b"", timeout=10)).decode()


def refused(
    server: Server, identity: Identity, peer: Bearer, code: grpc.StatusCode, *words: str, revoked: Revocations = NONE
) -> str:
    """A call fails with one clear line, and is not answered; returns the line."""
    with dial(server.address, identity, peer, revoked) as channel:
        line = refused_on(channel, server, identity, peer, code)
    assert all(word in line for word in words), line
    return line


def refused_on(channel: grpc.Channel, server: Server, identity: Identity, peer: Bearer, code: grpc.StatusCode) -> str:
    before = len(server.seen)
    with pytest.raises(grpc.RpcError) as caught:
        ask(channel)
    found = refusal(caught.value, identity, peer, server.address)
    assert found is not None, caught.value
    assert found.code is code and found.worker == (peer.seat if peer.role == "worker" else None), found
    line = str(found)
    assert "\n" not in line and len(line) < 450 and server.address in line
    assert not any(noise in line for noise in ("SSL_", "OPENSSL", "TSI_", "last error", "ipv4:"))
    assert len(server.seen) == before
    return line


def self_signed(identity: Identity) -> Identity:
    """The same names, signed with the key that they are for."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "worker 0")])
    before = x509.load_pem_x509_certificate(identity.certificate)
    builder = x509.CertificateBuilder(
        name, name, key.public_key(), 17, before.not_valid_before_utc, before.not_valid_after_utc,
        list(before.extensions),
    )  # fmt: skip
    pem = builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM)
    return replace(identity, certificate=pem, key=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))


def expired(authority: Authority, seat: int) -> Identity:
    return authority.issue("worker", seat, days=5, start=datetime.now(UTC) - timedelta(days=10))


# ---------------------------------------------------------------------- accepted


def test_the_right_seat_is_accepted_and_known(authority: Authority, serve: Serve) -> None:
    here, there = authority.issue("worker", 0), authority.issue("worker", 1)
    server = serve(there)
    with dial(server.address, here, there.bearer) as channel:
        assert ask(channel) == here.bearer.host_name
    assert server.seen == [here.bearer]


def test_roles_are_told_apart(authority: Authority, serve: Serve) -> None:
    registry, observer = authority.issue("registry"), authority.issue("observer")
    server = serve(registry, roles=("worker", "observer"))
    for identity in (observer, authority.issue("worker", 5)):
        with dial(server.address, identity, registry.bearer) as channel:
            assert ask(channel) == identity.bearer.host_name
    strict = serve(registry, roles=("worker",))
    refused(strict, observer, registry.bearer, FORBIDDEN, "the observer", "only a worker may")


def test_a_worker_with_the_registry_inside_is_dialled_as_either(authority: Authority, serve: Serve) -> None:
    both = authority.issue("worker", 0), authority.issue("registry")
    server = serve(*both)
    caller = authority.issue("worker", 1)
    for identity in both:
        with dial(server.address, caller, identity.bearer) as channel:
            ask(channel)
    refused(server, caller, Bearer(RUN, "worker", 2), STRANGER, "another seat")


# ---------------------------------------------------------------------- refused callers


def test_a_stranger_without_a_certificate_is_refused(authority: Authority, serve: Serve) -> None:
    server = serve(there := authority.issue("worker", 1))
    options = channel_options(there.bearer, NONE)
    trusting = grpc.ssl_channel_credentials(there.run_certificate)
    for channel in (
        grpc.insecure_channel(server.address),
        grpc.secure_channel(server.address, trusting, options),
    ):
        with channel, pytest.raises(grpc.RpcError) as caught:
            ask(channel)
        assert caught.value.code() is UNSURE
    assert not server.seen


def test_callers_that_the_authority_has_not_signed_are_refused(authority: Authority, serve: Serve) -> None:
    server = serve(there := authority.issue("worker", 1))
    others = [Authority.new("other").issue("worker", 0), Authority.new(RUN).issue("worker", 0)]
    for other in (*others, self_signed(authority.issue("worker", 0))):
        trusting = replace(other, run_certificate=there.run_certificate)  # so that only the server can refuse
        refused(server, trusting, there.bearer, UNSURE, "closed the connection", "refuses the certificate of worker 0")


def test_an_expired_caller_is_refused_and_knows_why(authority: Authority, serve: Serve) -> None:
    server = serve(there := authority.issue("worker", 1))
    words = "the certificate of worker 0 expired on", "atoll keys renew FOLDER --worker 0"
    refused(server, expired(authority, 0), there.bearer, STRANGER, *words)


def test_a_registrys_certificate_does_not_dial(authority: Authority, serve: Serve) -> None:
    server = serve(there := authority.issue("worker", 1), roles=("worker", "registry"))
    refused(server, authority.issue("registry"), there.bearer, UNSURE, "the registry")


def test_a_revoked_caller_is_refused_at_its_next_call(authority: Authority, serve: Serve) -> None:
    here, there = authority.issue("worker", 3), authority.issue("worker", 1)
    server = serve(there)
    with dial(server.address, here, there.bearer) as channel:
        ask(channel)
        assert server.gate.update(revoke(authority, NONE, here.bearer))
        line = refused_on(channel, server, here, there.bearer, STRANGER)  # on the connection that it has
    assert "refuses worker 3" in line and "revoked" in line and "atoll keys renew FOLDER --worker 3" in line
    for identity in (authority.issue("worker", 2), authority.issue("worker", 3, generation=1)):
        with dial(server.address, identity, there.bearer) as channel:
            ask(channel)


def test_a_certificate_that_expires_while_connected_is_refused(authority: Authority, serve: Serve) -> None:
    auth = {"x509_pem_cert": [authority.issue("worker", 3, days=5).certificate]}
    gate = Gate(RUN)
    assert gate.peer(auth, ["worker"]).seat == 3
    with pytest.raises(PeerRefusedError, match="worker 3: its certificate expired on") as caught:
        gate.peer(auth, ["worker"], now=datetime.now(UTC) + timedelta(days=6))
    assert caught.value.code is STRANGER and caught.value.worker == 3


def test_the_gate_does_not_rely_on_tls_alone(authority: Authority) -> None:
    gate = Gate(RUN)
    shown: list[list[bytes]] = [[], [b"garbage"], [authority.pem]]
    for auth in ({}, *({"x509_pem_cert": one} for one in shown)):
        with pytest.raises(PeerRefusedError, match="without a certificate") as caught:
            gate.peer(auth, ["worker"])
        assert caught.value.code is STRANGER
    other = Authority.new("other").issue("worker", 3)
    with pytest.raises(PeerRefusedError, match="is of run other"):
        gate.peer({"x509_pem_cert": [other.certificate]}, ["worker"])


# ---------------------------------------------------------------------- refused servers


def test_another_seat_than_was_dialled_is_refused(authority: Authority, serve: Serve) -> None:
    server = serve(authority.issue("worker", 2))
    peer = Bearer(RUN, "worker", 1)
    refused(server, authority.issue("worker", 0), peer, STRANGER, "another seat", "give the address of worker 1")


def test_servers_that_the_authority_has_not_signed_are_refused(authority: Authority, serve: Serve) -> None:
    mine = authority.issue("worker", 1)
    others = [Authority.new("other").issue("worker", 1), Authority.new(RUN).issue("worker", 1)]
    for other in (*others, self_signed(mine)):
        server = serve(other, trusts=mine.run_certificate)
        words = f"authority of run {RUN} has not signed", "atoll keys show"
        refused(server, authority.issue("worker", 0), mine.bearer, STRANGER, *words)


def test_an_expired_server_is_refused(authority: Authority, serve: Serve) -> None:
    server = serve(there := expired(authority, 1))
    words = "expired certificate", "atoll keys renew FOLDER --worker 1"
    refused(server, authority.issue("worker", 0), there.bearer, STRANGER, *words)


def test_a_server_from_the_future_is_a_clock_that_is_wrong(authority: Authority, serve: Serve) -> None:
    server = serve(there := authority.issue("worker", 1, start=datetime.now(UTC) + timedelta(days=2)))
    refused(server, authority.issue("worker", 0), there.bearer, STRANGER, "this machine's clock")


def test_an_observers_certificate_does_not_serve(authority: Authority, serve: Serve) -> None:
    server = serve(there := authority.issue("observer"))
    refused(server, authority.issue("worker", 0), there.bearer, STRANGER, "has not signed for a server")


def test_a_revoked_server_is_refused_at_the_handshake(authority: Authority, serve: Serve) -> None:
    here, stolen = authority.issue("worker", 0), authority.issue("worker", 1)
    list_1 = revoke(authority, NONE, stolen.bearer)
    server = serve(stolen)
    refused(server, here, stolen.bearer, STRANGER, "revoked", "newest bundle", revoked=list_1)
    assert server.seen == []
    renewed = serve(authority.issue("worker", 1, generation=1))
    for known in (NONE, list_1):  # a member that has not heard of it yet dials the renewed seat too
        with dial(renewed.address, here, stolen.bearer, known) as channel:
            ask(channel)
    list_2 = revoke(authority, list_1, stolen.bearer)
    refused(renewed, here, stolen.bearer, STRANGER, "revoked", revoked=list_2)


def test_a_server_without_tls_is_refused(authority: Authority) -> None:
    plain = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{plain.add_insecure_port('127.0.0.1:0')}"
    plain.start()
    try:
        words = refused(
            Server(address, Gate(RUN), []), authority.issue("worker", 0), Bearer(RUN, "worker", 1), STRANGER
        )
        assert "does not speak TLS" in words
    finally:
        plain.stop(None).wait()


# ---------------------------------------------------------------------- other failures


def test_a_call_that_fails_otherwise_is_no_refusal(authority: Authority, serve: Serve) -> None:
    here, there = authority.issue("worker", 0), authority.issue("worker", 1)
    server = serve(there)
    with dial(server.address, here, there.bearer) as channel:
        with pytest.raises(grpc.RpcError) as unknown:
            channel.unary_unary("/test/other")(b"", timeout=10)
        assert refusal(unknown.value, here, there.bearer, server.address) is None
    with dial("127.0.0.1:1", here, there.bearer) as channel, pytest.raises(grpc.RpcError) as nobody:
        ask(channel)
    assert refusal(nobody.value, here, there.bearer, "127.0.0.1:1") is None


def test_what_a_peer_says_is_cut_and_stays_one_line(authority: Authority) -> None:
    class Failure(grpc.RpcError):  # type: ignore[misc]
        def code(self) -> grpc.StatusCode:
            return STRANGER

        def details(self) -> str:
            return "no\n\x1b[31m" + "x" * 10**6

    here = authority.issue("worker", 0)
    line = str(refusal(Failure(), here, Bearer(RUN, "worker", 1), "10.0.0.1:29500"))
    assert len(line) < 500 and "\n" not in line and "\x1b" not in line


def test_strangers_write_nothing_to_the_log() -> None:
    script = (
        "import socket\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from atoll.link.net.credentials import grpc, server_credentials\n"
        "from atoll.link.net.run_keys import throw_away\n"
        "server = grpc.server(ThreadPoolExecutor(1))\n"
        "port = server.add_secure_port('127.0.0.1:0', server_credentials(throw_away(1).registry))\n"
        "server.start()\n"
        "for _ in range(3):\n"
        "    with socket.create_connection(('127.0.0.1', port), timeout=20) as stranger:\n"
        "        stranger.sendall(b'GET / HTTP/1.1' + bytes([13, 10, 13, 10]))\n"
        "        while stranger.recv(100):\n"
        "            pass\n"
        "server.stop(None).wait()\n"
    )
    bare = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    done = subprocess.run([sys.executable, "-c", script], check=True, timeout=60, capture_output=True, env=bare)
    assert done.stdout == done.stderr == b""
