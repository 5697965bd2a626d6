"""Lists which certificates of a run are revoked; the run's authority signs the list.

For every seat that was ever revoked, the list has the lowest generation of certificates that is accepted (see
`atoll.link.net.identity`). It only grows, so of two lists of a run the later one has all that the earlier one has. A
member that has a list refuses a revoked certificate at both ends:

- It dials a seat by the name of the lowest accepted generation, which an earlier certificate does not carry.
- It reads the generation in the certificate of every peer that calls (`atoll.link.net.credentials`).

A list of serial numbers would not do: in Python, a gRPC client can neither read the server's certificate nor give TLS
an X.509 revocation list.

The file is text. The signature is over all lines before it:

    atoll revocations 1
    run x-1a2b3c4d
    worker-3 1
    signature MEUCIQ...
"""

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from atoll.errors import ConfigError
from atoll.link.net.identity import (
    MOST_GENERATIONS,
    Authority,
    Bearer,
    Identity,
    Role,
    common_name,
    how_to_renew,
)
from atoll.link.net.key_files import key_error, read_public

REVOKED: Final = "revoked.txt"
"""Name of the list in a bundle, and beside the authority's key."""
LONGEST: Final = 128 * 1024
"""Most bytes of a list: 4,096 seats take half."""
_HEAD, _RUN, _SIGNATURE = "atoll revocations 1", "run ", "signature "
_ENTRY = re.compile(r"(worker|registry|observer)-(0|[1-9][0-9]{0,5}) ([1-9][0-9]?)", re.ASCII)
Seat = tuple[Role, int]


@dataclass(frozen=True, slots=True)
class Revocations:
    """Holds a verified list; without arguments but the run, the list before the first revocation."""

    run: str
    least: Mapping[Seat, int] = field(default_factory=dict)
    """(role, seat) -> the lowest generation of its certificates that is accepted."""
    content: bytes = b""
    """The signed file, to be passed on; empty before the first revocation."""

    def has(self, bearer: Bearer) -> bool:
        """Return whether a bearer's certificate is revoked."""
        return bearer.generation < self.least.get((bearer.role, bearer.seat), 0)

    def accepted(self, bearer: Bearer) -> Bearer:
        """Return the bearer with the lowest generation that is accepted: dial it by that host name."""
        return Bearer(bearer.run, bearer.role, bearer.seat, generation=self.least.get((bearer.role, bearer.seat), 0))

    def includes(self, other: "Revocations") -> bool:
        """Return whether this list has all revocations of another, so that it may take its place."""
        return self.run == other.run and all(self.least.get(seat, 0) >= least for seat, least in other.least.items())

    @classmethod
    def verify(cls, content: bytes, run_certificate: bytes) -> "Revocations":
        """Parse a list that may come from anywhere, and verify the signature of the run's authority.

        Raises:
            ValueError: It is too long, is no list, is of another run or is not signed by this run's authority.
        """
        if len(content) > LONGEST:
            raise ValueError(f"it has {len(content)} bytes, and {LONGEST} is the most")
        body, found, last = content.rpartition(_SIGNATURE.encode())
        if not found or not last.endswith(b"\n"):
            raise ValueError("it is no list of revocations, or is cut off")
        authority = x509.load_pem_x509_certificate(run_certificate)
        key = authority.public_key()
        assert isinstance(key, ec.EllipticCurvePublicKey)
        try:
            signature = base64.b64decode(last[:-1], validate=True)
            if base64.b64encode(signature) != last[:-1]:  # so that a list has one form
                raise InvalidSignature
            key.verify(signature, body, ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError):
            raise ValueError("it is not signed by the authority of this run") from None
        run, least = _parse(body.decode("ascii"))
        if run != (own := common_name(authority)):
            raise ValueError(f"it is of run {run}, and this is run {own}")
        return cls(run, least, content)

    @classmethod
    def load(cls, folder: Path, run: str, run_certificate: bytes) -> "Revocations":
        """Read and verify the list of a bundle; without a file, nothing is revoked.

        Raises:
            ConfigError: The file cannot be read, or is not what this run's authority has signed.
        """
        path = folder / REVOKED
        if not os.path.lexists(path):  # a link to nowhere is an error
            return cls(run)
        try:
            return cls.verify(read_public(path, LONGEST), run_certificate)
        except ValueError as fault:
            if isinstance(fault, ConfigError):
                raise
            advice = f"copy {REVOKED} again from the folder in which `atoll keys revoke` was run"
            raise key_error(path, f"{fault}; {advice}") from fault


def load_bundle(folder: Path) -> tuple[Identity, Revocations]:
    """Read a bundle and its list.

    Raises:
        ConfigError: A file of it cannot be used, or its own certificate is expired or revoked.
    """
    identity = Identity.load(folder)
    known = Revocations.load(folder, identity.bearer.run, identity.run_certificate)
    if known.has(identity.bearer):
        raise key_error(folder, f"the certificate of {identity.bearer} is revoked; {how_to_renew(identity.bearer)}")
    return identity, known


def revoke(authority: Authority, before: Revocations, bearer: Bearer) -> Revocations:
    """Return the signed list that revokes every certificate of a seat so far.

    Raises:
        ConfigError: The seat was revoked too often.
    """
    least = {**before.least, (bearer.role, bearer.seat): before.accepted(bearer).generation + 1}
    if least[bearer.role, bearer.seat] >= MOST_GENERATIONS:
        why = f"{bearer} was revoked {MOST_GENERATIONS - 1} times, the most: make new keys with `atoll keys new`"
        raise ConfigError(f"keys: {why}", setting="keys", value=str(bearer))
    entries = [f"{role}-{seat} {generation}" for (role, seat), generation in sorted(least.items())]
    body = "".join(f"{line}\n" for line in (_HEAD, _RUN + authority.run, *entries)).encode()
    signature = _SIGNATURE.encode() + base64.b64encode(authority.sign(body)) + b"\n"
    return Revocations(authority.run, least, body + signature)


def _parse(text: str) -> tuple[str, dict[Seat, int]]:
    head, *lines = text.split("\n")
    if head != _HEAD or len(lines) < 2 or lines[-1] or not lines[0].startswith(_RUN):
        raise ValueError(f"it does not begin with {_HEAD!r} and the run: another version of atoll has written it")
    least: dict[Seat, int] = {}
    for line in lines[1:-1]:
        found = _ENTRY.fullmatch(line)
        if found is None:
            raise ValueError(f"it has a line that is no entry: {line[:40]!r}")
        seat = cast(Role, found[1]), int(found[2])
        if seat in least:
            raise ValueError(f"it has {found[1]}-{found[2]} twice")
        least[seat] = int(found[3])
    return lines[0].removeprefix(_RUN), least
