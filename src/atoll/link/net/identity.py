"""Makes and reads the certificates of a run: one authority, and one bundle for every seat.

A run has a certificate authority, whose key stays where it was made. It signs one certificate per seat, which carries
the run's name and the seat's number, so that no message can claim another's. Both ends of every connection show theirs.

A certificate also carries a generation. Revoking a seat raises the lowest generation that members accept
(`atoll.link.net.revocations`), and the seat's next certificate is of that generation. Its host names are those of its
generation and of all before it, so a member that dials the name of a later generation refuses it at the handshake.
"""

import re
import secrets
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Final, Literal, cast, get_args

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from atoll._util.checks import check_whole, config_error
from atoll.errors import ConfigError
from atoll.link.net.key_files import key_error, read_key, read_public, write_private

RUN_PEM, CERTIFICATE_PEM, KEY_PEM = "run.pem", "certificate.pem", "key.pem"
DAYS: Final = 365
MOST_DAYS: Final = 3650
MOST_GENERATIONS: Final = 100
"""Certificates of one seat that can be revoked; each adds a name to the next certificate."""
_AUTHORITY_DAYS = 2 * MOST_DAYS
_BACKDATED = timedelta(days=1)  # for machines whose clocks are behind

Role = Literal["worker", "registry", "observer"]
ROLES: Final[tuple[Role, ...]] = get_args(Role)
_USES = {  # an observer cannot serve, and a registry dials nobody
    "worker": (ExtendedKeyUsageOID.CLIENT_AUTH, ExtendedKeyUsageOID.SERVER_AUTH),
    "registry": (ExtendedKeyUsageOID.SERVER_AUTH,),
    "observer": (ExtendedKeyUsageOID.CLIENT_AUTH,),
}
_RUN = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"  # a label of a host name
_HOST = re.compile(rf"(worker|registry|observer)-(0|[1-9][0-9]{{0,5}})-(0|[1-9][0-9]?)\.({_RUN})\.atoll", re.ASCII)


# ---------------------------------------------------------------------- the holder of a certificate


@dataclass(frozen=True, slots=True)
class Bearer:
    """Names the holder of a certificate, as the authority has written it down."""

    run: str
    role: Role
    seat: int = 0
    generation: int = field(default=0, compare=False)
    """How often the seat had been revoked when the certificate was issued; the bearer is the same."""

    def __str__(self) -> str:
        return f"{self.role} {self.seat}" if self.role == "worker" else f"the {self.role}"

    @property
    def folder(self) -> str:
        """The name of the bearer's bundle among the keys of a run."""
        return f"{self.role}-{self.seat}" if self.role == "worker" or self.seat else self.role

    @property
    def option(self) -> str:
        """The option by which `atoll keys` knows the bearer."""
        return f"--worker {self.seat}" if self.role == "worker" else f"--{self.role}"

    @property
    def host_name(self) -> str:
        """The name that TLS compares, the same for every address at which the bearer is reached."""
        return f"{self.role}-{self.seat}-{self.generation}.{self.run}.atoll"

    @classmethod
    def read(cls, host_name: str) -> "Bearer | None":
        """Parse a host name; None if it is none of a run's."""
        found = _HOST.fullmatch(host_name)
        return cls(found[4], cast(Role, found[1]), int(found[2]), int(found[3])) if found else None


@dataclass(frozen=True, slots=True)
class Certificate:
    """Holds what members read in a certificate."""

    bearer: Bearer
    valid_from: datetime
    valid_until: datetime

    @classmethod
    def read(cls, pem: bytes) -> "Certificate":
        """Parse a certificate that an `Authority` has issued; does not verify its signature.

        Raises:
            ValueError: It is not one of those.
        """
        return _read_certificate(pem)

    def clock_fault(self, now: datetime | None = None) -> str:
        """Return why the certificate is not valid now; empty if it is."""
        now = now or datetime.now(UTC)
        if now > self.valid_until:
            return f"expired on {self.valid_until:%Y-%m-%d} (today is {now:%Y-%m-%d})"
        if now < self.valid_from:
            return f"is valid from {self.valid_from:%Y-%m-%d} on, and this machine's clock says {now:%Y-%m-%d}"
        return ""


@lru_cache(maxsize=4096)
def _read_certificate(pem: bytes) -> Certificate:
    parsed = x509.load_pem_x509_certificate(pem)
    try:
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        raise ValueError("the certificate is of no run") from None
    found = [Bearer.read(str(name.value)) for name in names]
    first = found[0] if found else None
    if first is None or any(one != first for one in found):
        raise ValueError("the certificate is of no run, or of several seats")
    generations = [one.generation for one in found if one is not None]
    if sorted(generations) != list(range(len(found))):
        raise ValueError("the certificate skips a generation")
    bearer = Bearer(first.run, first.role, first.seat, max(generations))
    return Certificate(bearer, parsed.not_valid_before_utc, parsed.not_valid_after_utc)


@dataclass(frozen=True, slots=True)
class Identity:
    """Holds what one process proves itself with, as PEM."""

    bearer: Bearer
    run_certificate: bytes
    """The authority's certificate."""
    certificate: bytes
    key: bytes = field(repr=False)
    folder: Path | None = field(default=None, compare=False)
    """The bundle that it was read from: lists of revoked certificates appear there."""

    @classmethod
    def load(cls, folder: Path, now: datetime | None = None) -> "Identity":
        """Read a bundle that `atoll keys` has written.

        Raises:
            ConfigError: A file is missing, broken or open to others, the files do not belong together, or the
                certificate is not valid now.
        """
        run, certificate = read_public(folder / RUN_PEM), read_public(folder / CERTIFICATE_PEM)
        key = read_key(folder / KEY_PEM)
        try:
            authority = x509.load_pem_x509_certificate(run)
            parsed, known = x509.load_pem_x509_certificate(certificate), Certificate.read(certificate)
            own = load_pem_private_key(key, None).public_key()
        except (ValueError, TypeError) as fault:
            raise key_error(folder, f"a file of it is not what `atoll keys` writes ({fault})") from fault
        if own != parsed.public_key():
            raise key_error(folder, f"{KEY_PEM} is not the key of {CERTIFICATE_PEM}: copy the whole folder again")
        try:
            parsed.verify_directly_issued_by(authority)
        except (ValueError, TypeError, InvalidSignature) as fault:
            why = f"{CERTIFICATE_PEM} is not signed by {RUN_PEM}, so they are of two runs: copy the whole folder again"
            raise key_error(folder, why) from fault
        if problem := known.clock_fault(now):
            raise key_error(folder, f"the certificate of {known.bearer} {problem}; {how_to_renew(known.bearer)}")
        return cls(known.bearer, run, certificate, key, folder)

    def save(self, folder: Path, *, replace: bool = False) -> None:
        """Write a bundle that `load` reads; refuses files that are there unless they may be replaced."""
        files = {RUN_PEM: self.run_certificate, CERTIFICATE_PEM: self.certificate, KEY_PEM: self.key}
        write_private(folder, files, replace=replace)


def how_to_renew(bearer: Bearer) -> str:
    """Return what to do about a bearer's certificate, as the end of an error."""
    return f"for a new one: `atoll keys renew FOLDER {bearer.option}` where the authority is, then copy it"


# ---------------------------------------------------------------------- the authority


class Authority:
    """Signs certificates and revocations of one run."""

    def __init__(self, run: str, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.run = run
        self._key = key
        self._certificate = certificate

    @classmethod
    def new(cls, run: str | None = None) -> "Authority":
        """Make an authority, with a random name for the run unless it is given."""
        run = run or f"run-{secrets.token_hex(4)}"
        if not re.fullmatch(_RUN, run, re.ASCII):
            allowed = "1 to 63 of a-z, 0-9 and -, without - at its ends"
            raise config_error("run", run, allowed, "it is part of a host name in every certificate")
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, run)])
        start = datetime.now(UTC)
        ends = start - _BACKDATED, start + timedelta(days=_AUTHORITY_DAYS)
        builder = _builder(name, name, key.public_key(), ends)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_key_usage(certificates=True), critical=True)
        certificate = builder.sign(key, hashes.SHA256())
        return cls(run, key, certificate)

    @classmethod
    def load(cls, folder: Path) -> "Authority":
        """Read an authority that `save` has written.

        Raises:
            ConfigError: A file is missing, broken or open to others, or they do not belong together.
        """
        try:
            key = load_pem_private_key(read_key(folder / KEY_PEM), None)
            certificate = x509.load_pem_x509_certificate(read_public(folder / RUN_PEM))
            run = common_name(certificate)
        except (ValueError, TypeError) as fault:
            raise key_error(folder, f"a file of it is not what `atoll keys new` writes ({fault})") from fault
        if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
            raise key_error(folder, f"{KEY_PEM} is not the key of {RUN_PEM}")
        return cls(run, key, certificate)

    def save(self, folder: Path) -> None:
        """Write the authority's key and certificate; refuses files that are there."""
        write_private(folder, {RUN_PEM: self.pem, KEY_PEM: _pem(self._key)})

    @property
    def pem(self) -> bytes:
        """The authority's certificate, which every member trusts."""
        return self._certificate.public_bytes(Encoding.PEM)

    @property
    def valid_until(self) -> datetime:
        """The end of the authority's certificate, which no certificate outlives."""
        return self._certificate.not_valid_after_utc

    def issue(
        self, role: Role, seat: int = 0, days: int = DAYS, *, generation: int = 0, start: datetime | None = None
    ) -> Identity:
        """Make a key and sign its certificate.

        Args:
            role: What the bearer may do in the run.
            seat: Number of a worker.
            days: How long the certificate is valid.
            generation: How often the seat has been revoked.
            start: From when on it is valid; left out, from now, and from a day ago for clocks that are behind.

        Raises:
            ConfigError: An argument is out of bounds, or the certificate would outlive the authority's.
        """
        self._check(role, seat, days, generation)
        begin = start or datetime.now(UTC)
        ends = start or begin - _BACKDATED, begin + timedelta(days=days)
        if ends[1] > self.valid_until:
            most = (self.valid_until - begin).days
            why = f"the authority of run {self.run} is valid until {self.valid_until:%Y-%m-%d}"
            raise config_error("days", days, f"at most {max(most, 0)}", f"{why}; `atoll keys new` makes another")
        bearer = Bearer(self.run, role, seat, generation)
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{role} {seat}")])
        builder = _builder(subject, self._certificate.subject, key.public_key(), ends)
        hosts = [Bearer(self.run, role, seat, each).host_name for each in range(generation + 1)]
        extensions: list[tuple[x509.ExtensionType, bool]] = [
            (x509.BasicConstraints(False, None), True),
            (_key_usage(certificates=False), True),
            (x509.ExtendedKeyUsage(_USES[role]), True),
            (x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts]), False),
            (x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), False),
        ]
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical=critical)
        certificate = builder.sign(self._key, hashes.SHA256())
        return Identity(bearer, self.pem, certificate.public_bytes(Encoding.PEM), _pem(key))

    def sign(self, content: bytes) -> bytes:
        """Sign what is no certificate; the content must begin with words that no certificate begins with."""
        return self._key.sign(content, ec.ECDSA(hashes.SHA256()))

    def _check(self, role: str, seat: int, days: int, generation: int) -> None:
        if role not in ROLES:
            raise config_error("role", role, "one of " + ", ".join(ROLES))
        check_whole("seat", seat, least=0, most=999_999)
        check_whole("days", days, most=MOST_DAYS)
        if not 0 <= generation < MOST_GENERATIONS:
            raise ConfigError(
                f"{role} {seat} of run {self.run} was revoked {generation} times, and {MOST_GENERATIONS - 1} is the "
                "most: make new keys with `atoll keys new`",
                setting="generation",
                value=generation,
            )


def common_name(certificate: x509.Certificate) -> str:
    """Return the common name of a certificate's subject: the run, for that of an authority."""
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    if len(names) != 1:
        raise ValueError("the certificate has no common name, or several")
    return str(names[0].value)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, ends: tuple[datetime, datetime]
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends[0])
        .not_valid_after(ends[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,  # the authority signs lists of revocations
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=certificates,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
