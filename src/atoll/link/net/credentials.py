"""Turns identities into gRPC credentials, and tells with which peer a connection is.

TLS verifies at both ends that the run's authority has signed the peer's certificate, and that it has not expired. The
end that dials also verifies the seat, by its host name. The end that is dialled learns the seat from the certificate:
`Gate` reads it at every call, for certificates expire and are revoked while a connection lives.
"""

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from threading import Lock
from typing import NoReturn

import grpc

from atoll.errors import LinkError
from atoll.link.net.identity import Bearer, Certificate, Identity, Role, how_to_renew
from atoll.link.net.revocations import Revocations

_LONGEST = 400  # characters of a peer's message that are shown
_STRANGER, _FORBIDDEN = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED


def server_credentials(identity: Identity, *others: Identity) -> grpc.ServerCredentials:
    """Return what a server proves itself with; clients must show a certificate of the same run.

    Args:
        identity: Shown to clients.
        *others: Shown to clients that dial these, as a worker that has the registry inside is dialled as either.
    """
    pairs = [(one.key, one.certificate) for one in (identity, *others)]
    return grpc.ssl_server_credentials(pairs, root_certificates=identity.run_certificate, require_client_auth=True)


def channel_credentials(identity: Identity) -> grpc.ChannelCredentials:
    """Return what a client proves itself with; it trusts nobody but the run's authority."""
    return grpc.ssl_channel_credentials(identity.run_certificate, identity.key, identity.certificate)


def channel_options(peer: Bearer, revocations: Revocations) -> list[tuple[str, str]]:
    """Return options of a channel that connects to this peer only, with a certificate that is not revoked."""
    return [("grpc.ssl_target_name_override", revocations.accepted(peer).host_name)]


class PeerRefusedError(LinkError):
    """One end of a connection refuses the other.

    Args:
        message: One line that names both ends, the reason, and what to do.
        code: gRPC's status for it. UNAVAILABLE: the other end may as well be starting or ending, so try again.
        worker: Number of the peer, if it is a worker.
    """

    def __init__(self, message: str, code: grpc.StatusCode, worker: int | None = None) -> None:
        super().__init__(message, worker=worker)
        self.code = code


class Gate:
    """Tells a server which peer makes a call, and refuses those that may not.

    Args:
        run: Name of the run, as in this process's certificate.
        revocations: The newest list that this process has; `update` takes a newer one.
    """

    def __init__(self, run: str, revocations: Revocations | None = None) -> None:
        self._run = run
        self._updating = Lock()
        self.revocations = revocations or Revocations(run)

    def update(self, revocations: Revocations) -> bool:
        """Take a list if it has all that the present one has; return whether it was taken."""
        with self._updating:
            taken = revocations.includes(self.revocations)
            if taken:
                self.revocations = revocations
        return taken

    def peer(
        self, auth_context: Mapping[str, Iterable[bytes]], roles: Iterable[Role], now: datetime | None = None
    ) -> Bearer:
        """Return the peer of a call.

        Args:
            auth_context: The call's `context.auth_context()`.
            roles: The roles that may make this call.
            now: The time at which the certificate must be valid.

        Raises:
            PeerRefusedError: The peer has no certificate, or one that is of another run or role, expired or revoked.
        """
        certificate = self._certificate(auth_context)
        bearer, allowed = certificate.bearer, tuple(roles)
        if bearer.run != self._run:
            self._refuse(bearer, f"its certificate is of run {bearer.run}; copy its bundle of this run there")
        if problem := certificate.clock_fault(now):
            self._refuse(bearer, f"its certificate {problem}; {how_to_renew(bearer)}")
        if self.revocations.has(bearer):
            self._refuse(bearer, f"its certificate is revoked; {how_to_renew(bearer)}")
        if bearer.role not in allowed:
            only = f"only a {' or '.join(allowed)} may"
            self._refuse(bearer, f"{only} do this; start it with such a bundle", _FORBIDDEN)
        return bearer

    def _certificate(self, auth_context: Mapping[str, Iterable[bytes]]) -> Certificate:
        shown = list(auth_context.get("x509_pem_cert", ()))
        try:
            return Certificate.read(shown[0])
        except (IndexError, ValueError):
            why = f"run {self._run} refuses a caller without a certificate of it; `atoll keys new` makes them"
            raise PeerRefusedError(why, _STRANGER) from None

    def _refuse(self, bearer: Bearer, why: str, code: grpc.StatusCode = _STRANGER) -> NoReturn:
        worker = bearer.seat if bearer.role == "worker" else None
        raise PeerRefusedError(f"run {self._run} refuses {bearer}: {why}", code, worker)


# ---------------------------------------------------------------------- the end that dials


def refusal(error: grpc.RpcError, identity: Identity, peer: Bearer, address: str) -> PeerRefusedError | None:
    """Return why one end refuses the other, in one line; None if a call failed for another reason.

    Args:
        error: What the call has raised.
        identity: This process's.
        peer: The bearer that was dialled.
        address: Where it was dialled.
    """
    code, details = error.code(), " ".join((error.details() or "").split())
    worker = peer.seat if peer.role == "worker" else None
    if code in (_STRANGER, _FORBIDDEN):
        return PeerRefusedError(f"{peer} at {address}: {details[:_LONGEST]}", code, worker)
    _, found, details = details.partition("failed to connect")
    if code is not grpc.StatusCode.UNAVAILABLE or not found:
        return None
    if why := _shown_there(details, identity.bearer.run, peer):
        return PeerRefusedError(f"{address} {why}", _STRANGER, worker)
    if "Socket closed" not in details and "reset by peer" not in details:
        return None
    return _refused_there(identity, f"{peer} at {address} closed the connection at the handshake", worker)


def _shown_there(details: str, run: str, peer: Bearer) -> str:
    """Return what is wrong with the certificate that a server has shown; empty if nothing is."""
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    if "Hostname Verification Check failed" in details or "is not in peer certificate" in details:
        return (
            f"shows the certificate of another seat, or one that is revoked, and not that of {peer}: "
            f"give the address of {peer}, or start it there with its newest bundle"
        )
    if "certificate has expired" in details:
        return f"shows an expired certificate (today is {today}); {how_to_renew(peer)}"
    if "certificate is not yet valid" in details:
        return f"shows a certificate from the future: set this machine's clock, which says {today}"
    if "CERTIFICATE_VERIFY_FAILED" in details or "certificate signature failure" in details:
        return (
            f"shows a certificate that the authority of run {run} has not signed for a server: "
            "it is of another run, or a stranger; compare both bundles with `atoll keys show`"
        )
    if "WRONG_VERSION_NUMBER" in details:
        return "does not speak TLS: another program listens there, or one whose link.security is none"
    if "handshake failed" in details:
        return f"fails the TLS handshake: {details[:_LONGEST]}"
    return ""


def _refused_there(identity: Identity, what: str, worker: int | None) -> PeerRefusedError:
    """Return why a server may have closed the connection; gRPC does not pass on what TLS says about it."""
    own = Certificate.read(identity.certificate)
    if problem := own.clock_fault():
        why = f"{what}: the certificate of {own.bearer} {problem}; {how_to_renew(own.bearer)}"
        return PeerRefusedError(why, _STRANGER, worker)
    shown = f"the certificate of {own.bearer} (run {own.bearer.run}, valid until {own.valid_until:%Y-%m-%d})"
    why = f"{what}: it is starting or ending, or refuses {shown}; compare `atoll keys show` and the clocks of both"
    return PeerRefusedError(why, grpc.StatusCode.UNAVAILABLE, worker)
