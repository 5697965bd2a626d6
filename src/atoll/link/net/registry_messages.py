"""Defines what an embedded registry and its clients send each other: JSON, parsed strictly and bounded in size."""

from typing import Annotated, Final, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.link.net.registry import PRESENCE_BYTES, TTL_S, VALUE_BYTES, Entry, Lease, Outcome, Standing

SERVICE: Final = "atoll.Registry"
MESSAGE_BYTES: Final = 4 << 20
"""Most bytes of one message: a page of changes and one value more, in base64."""
_MOST_CHANGES = 1000

Key = Annotated[str, Field(min_length=1, max_length=32)]
Value = Annotated[bytes, Field(max_length=VALUE_BYTES)]
Version = Annotated[int, Field(ge=0, lt=1 << 63)]
LeaseNumber = Annotated[int, Field(gt=0, lt=1 << 62)]


class Message(BaseModel):
    """Is the base of all messages."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, ser_json_bytes="base64", val_json_bytes="base64"
    )

    def encode(self) -> bytes:
        """Return the message as JSON."""
        return self.model_dump_json().encode()


class GetRequest(Message):
    """Asks for one key."""

    key: Key


class EntryMessage(Message):
    """Carries an entry."""

    value: Value
    version: Version

    @classmethod
    def of(cls, entry: Entry | None) -> "EntryMessage | None":
        """Make the message of an entry, if there is one."""
        return None if entry is None else cls(value=entry.value, version=entry.version)

    def entry(self) -> Entry:
        """Return the entry."""
        return Entry(self.value, self.version)


class GetReply(Message):
    """Carries what a key holds."""

    entry: EntryMessage | None


class SetRequest(Message):
    """Asks for a compare-and-set."""

    key: Key
    value: Value
    version: Version


class SetReply(Message):
    """Carries the outcome of a compare-and-set."""

    accepted: bool
    entry: EntryMessage | None

    def outcome(self) -> Outcome:
        """Return the outcome."""
        return Outcome(self.accepted, self.entry.entry() if self.entry else None)


class GrantRequest(Message):
    """Asks for a presence."""

    key: Key
    value: Annotated[bytes, Field(max_length=PRESENCE_BYTES)]
    ttl_s: Annotated[float, Field(ge=TTL_S[0], le=TTL_S[1])]
    number: LeaseNumber
    if_absent: bool

    def lease(self) -> Lease:
        """Return the lease."""
        return Lease(self.key, self.value, self.ttl_s, self.number)


class GrantReply(Message):
    """Tells whether the presence was granted."""

    granted: bool


class LeaseRequest(Message):
    """Asks for a lease to be renewed or ended."""

    key: Key
    number: LeaseNumber


class RenewReply(Message):
    """Tells what has become of a lease."""

    standing: Standing


class WithdrawReply(Message):
    """Says that the lease has ended."""


class WatchRequest(Message):
    """Asks for all changes below a prefix after a version."""

    prefix: Annotated[str, Field(max_length=32)]
    since: Version


class ChangeMessage(Message):
    """Carries one change; a value of None means that the key has disappeared."""

    key: Key
    value: Value | None
    version: Version


class WatchReply(Message):
    """Carries changes, or a part of a snapshot; without changes it says that the registry is there."""

    version: Version
    changes: Annotated[list[ChangeMessage], Field(max_length=_MOST_CHANGES)]
    is_snapshot: bool
    has_more: bool
    """Whether the snapshot goes on in the next message."""


AnyMessage = TypeVar("AnyMessage", bound=Message)


def parse(kind: type[AnyMessage], data: bytes) -> AnyMessage:
    """Parse a message; ValueError in one short line if it is anything else."""
    try:
        return kind.model_validate_json(data)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"not a {kind.__name__}: {where[:60]}: {first['msg'][:200]}") from None
