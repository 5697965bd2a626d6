"""Encodes what members of a run send each other: a JSON header, parsed strictly, and raw bytes for payloads.

Messages of the protocol (`protocol.py`) that carry payloads, and a fragment's state for a joiner, travel in bulk; all
others are control messages without a body. Nothing that a peer sends is unpickled or evaluated.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from torch import Tensor

from atoll.core.outliers import Size
from atoll.link.base import Contribution, FragmentState, Member, RoundId
from atoll.link.net.actions import Mean, Part, Progress, Result, RoundMessage, Whole
from atoll.link.net.views import Attempt, Era, Process, RoundStatus, Told

WIRE_FORMAT: Final = "3"
"""Version of what is encoded here; workers that differ in it refuse each other."""
MAX_WEIGHT: Final = 1e18
_DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}

Number = Annotated[int, Field(ge=0, lt=1 << 63)]
Step = Annotated[int, Field(ge=-1, lt=1 << 63)]
Fingerprint = Annotated[int, Field(ge=0, lt=1 << 64)]
SeatLife = tuple[Annotated[int, Field(ge=0, lt=1 << 20)], Number]
Id = tuple[Number, Annotated[int, Field(ge=0, lt=1 << 20)], bool]


@dataclass(frozen=True, slots=True)
class PartMean:
    """Holds the mean of one part of a round, from the member that has reduced it."""

    members: tuple[Member, ...]
    """The members whose payloads it is the mean of."""
    outliers: tuple[Member, ...]
    """The members that were left out for their size."""
    mean: Tensor | None
    """The encoded mean, uint8 on the CPU; None if nobody had anything to contribute."""
    inner: Tensor
    """Inner products of what is behind the members' payloads of this part, fp64 [members, members]."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Asks a member for what all workers have alike of some fragments."""

    fragments: tuple[int, ...]
    boundary: int
    """All rounds up to this step must be in it."""


class Header(BaseModel):
    """Is the base of all headers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=False, allow_inf_nan=False)


class _MemberHeader(Header):
    worker: Number
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)]
    version: Number
    fingerprint: Fingerprint
    norm: Annotated[float, Field(ge=0)]
    usual: Annotated[float, Field(ge=0)]

    @classmethod
    def of(cls, member: Member) -> "_MemberHeader":
        return cls(
            worker=member.worker,
            weight=member.weight,
            version=member.anchor_version,
            fingerprint=member.anchor_fingerprint,
            norm=member.size.norm,
            usual=member.size.usual,
        )

    def member(self) -> Member:
        return Member(self.worker, self.weight, self.version, self.fingerprint, Size(self.norm, self.usual))


class _MeanHeader(Header):
    members: list[_MemberHeader]
    outliers: list[_MemberHeader]
    length: Number | None
    """Bytes of the mean; None if there is none."""

    @classmethod
    def of(cls, mean: PartMean) -> "_MeanHeader":
        members, outliers = (list(map(_MemberHeader.of, some)) for some in (mean.members, mean.outliers))
        return cls(members=members, outliers=outliers, length=None if mean.mean is None else mean.mean.numel())


class _WholeHeader(Header):
    kind: Literal["whole"] = "whole"
    view: Number
    round: Id
    owner: SeatLife
    member: _MemberHeader | None


class _PartHeader(Header):
    kind: Literal["part"] = "part"
    view: Number
    round: Id
    attempt: Number
    part: Number
    member: _MemberHeader | None


class _MeanOfPartHeader(Header):
    kind: Literal["mean"] = "mean"
    view: Number
    round: Id
    attempt: Number
    part: Number
    mean: _MeanHeader


class _AttemptHeader(Header):
    view: Number
    members: list[SeatLife]

    @classmethod
    def of(cls, attempt: Attempt) -> "_AttemptHeader":
        return cls(view=attempt.view, members=list(attempt.members))

    def attempt(self) -> Attempt:
        return Attempt(self.view, tuple(Process(*member) for member in self.members))


class _ResultHeader(Header):
    kind: Literal["result"] = "result"
    view: Number
    round: Id
    attempt: _AttemptHeader
    members: list[_MemberHeader]
    """Of every part: its reducers count the same."""
    outliers: list[_MemberHeader]
    lengths: list[Number | None]
    """Bytes of the mean of every part; None if there is none."""


class _StateHeader(Header):
    kind: Literal["state"] = "state"
    fragment: Number
    applied: Step
    counts: dict[str, Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]]
    vectors: list[tuple[str, str, Number]]


class _ProgressHeader(Header):
    kind: Literal["progress"] = "progress"
    view: Number
    applied: Step


class _AskHeader(Header):
    kind: Literal["ask"] = "ask"
    fragments: list[Annotated[int, Field(ge=0, lt=1 << 20)]]
    boundary: Step


class _EraHeader(Header):
    view: Number
    first_step: Step
    owing: list[SeatLife]
    receiving: list[SeatLife]
    due: list[Number]

    @classmethod
    def of(cls, era: Era) -> "_EraHeader":
        return cls(
            view=era.view,
            first_step=era.first_step,
            owing=list(era.owing),
            receiving=sorted(era.receiving),
            due=sorted(era.due),
        )

    def era(self) -> Era:
        receiving = frozenset(_processes(self.receiving))
        return Era(self.view, self.first_step, _processes(self.owing), receiving, frozenset(self.due))


class _StatusHeader(Header):
    round: Id
    attempt: _AttemptHeader
    held: list[SeatLife]
    done: bool


class _ToldHeader(Header):
    kind: Literal["told"] = "told"
    view: Number
    adopted: Number
    step: Number
    applied: Step | None
    since: Number
    eras: list[_EraHeader]
    rounds: list[_StatusHeader]


_BULK: TypeAdapter[Any] = TypeAdapter(
    Annotated[
        _WholeHeader | _PartHeader | _MeanOfPartHeader | _ResultHeader | _StateHeader, Field(discriminator="kind")
    ]
)
_CONTROL: TypeAdapter[Any] = TypeAdapter(
    Annotated[_ProgressHeader | _ToldHeader | _AskHeader, Field(discriminator="kind")]
)

# ---------------------------------------------------------------------- control


def encode_control(message: Progress | Told | Ask, view: int) -> bytes:
    """Return a control message as JSON; `view` is the number of the view that this member has adopted."""
    header: Header
    if isinstance(message, Progress):
        header = _ProgressHeader(view=view, applied=message.applied)
    elif isinstance(message, Ask):
        header = _AskHeader(fragments=list(message.fragments), boundary=message.boundary)
    else:
        rounds = [
            _StatusHeader(round=round_id, attempt=_AttemptHeader.of(one.attempt), held=sorted(one.held), done=one.done)
            for round_id, one in message.rounds.items()
        ]
        header = _ToldHeader(
            view=message.view,
            adopted=message.adopted,
            step=message.step,
            applied=message.applied,
            since=message.since,
            eras=[_EraHeader.of(era) for era in message.eras],
            rounds=rounds,
        )
    return header.model_dump_json().encode()


def decode_control(data: bytes) -> tuple[Progress | Told | Ask, int]:
    """Parse a control message, and the number of its sender's view; ValueError if it is anything else."""
    header = parse(_CONTROL, data)
    if isinstance(header, _ProgressHeader):
        return Progress(header.applied), header.view
    if isinstance(header, _AskHeader):
        return Ask(tuple(header.fragments), header.boundary), 0
    rounds = {
        RoundId(*one.round): RoundStatus(one.attempt.attempt(), frozenset(_processes(one.held)), one.done)
        for one in header.rounds
    }
    eras = tuple(era.era() for era in header.eras)
    if (header.adopted or rounds) and not eras:
        raise ValueError(f"words of a flush after view {header.adopted} without any era")
    told = Told(header.view, header.adopted, header.step, header.applied, header.since, eras, rounds)
    return told, header.adopted


# ---------------------------------------------------------------------- bulk


def encode_round(message: RoundMessage, view: int) -> tuple[bytes, Tensor]:
    """Return a message of a round as header and body, uint8 on the CPU."""
    at = message.round_id
    header: Header
    bodies: list[Tensor]
    if isinstance(message, Mean):
        mean = _MeanHeader.of(message.payload)
        bodies = _mean_bodies(message.payload)
        header = _MeanOfPartHeader(view=view, round=at, attempt=message.attempt, part=message.part, mean=mean)
    elif isinstance(message, Result):
        bodies = [body for mean in message.means for body in _mean_bodies(mean)]
        header = _result_header(message, view)
    else:
        contribution: Contribution | None = message.payload
        member = None if contribution is None else _MemberHeader.of(contribution.member)
        bodies = [] if contribution is None else [contribution.payload]
        if isinstance(message, Whole):
            header = _WholeHeader(view=view, round=at, owner=message.owner, member=member)
        else:
            header = _PartHeader(view=view, round=at, attempt=message.attempt, part=message.part, member=member)
    body = bodies[0] if len(bodies) == 1 else torch.cat([torch.empty(0, dtype=torch.uint8, device="cpu"), *bodies])
    return header.model_dump_json().encode(), body


def _result_header(result: Result, view: int) -> _ResultHeader:
    headers = [_MeanHeader.of(mean) for mean in result.means]
    if not headers or any((h.members, h.outliers) != (headers[0].members, headers[0].outliers) for h in headers):
        raise ValueError(f"{result.round_id}: its reducers counted different members")
    return _ResultHeader(
        view=view,
        round=result.round_id,
        attempt=_AttemptHeader.of(result.attempt),
        members=headers[0].members,
        outliers=headers[0].outliers,
        lengths=[header.length for header in headers],
    )


def encode_state(state: FragmentState) -> tuple[bytes, Tensor]:
    """Return a fragment's state as header and body."""
    vectors = [(name, str(v.dtype).removeprefix("torch."), v.numel()) for name, v in state.vectors.items()]
    header = _StateHeader(fragment=state.fragment, applied=state.applied, counts=dict(state.counts), vectors=vectors)
    return header.model_dump_json().encode(), torch.cat([v.view(torch.uint8) for v in state.vectors.values()])


def decode_bulk(header: bytes, body: bytearray) -> tuple[RoundMessage, int] | FragmentState:
    """Parse a bulk message: one of a round and the number of its sender's view, or a fragment's state.

    Payloads share the memory of the body.

    Raises:
        ValueError: It is anything else, in one short line.
    """
    parsed = parse(_BULK, header)
    rest = torch.frombuffer(body, dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8, device="cpu")
    if isinstance(parsed, _StateHeader):
        return _state(parsed, rest)
    round_id = RoundId(*parsed.round)
    message: RoundMessage
    if isinstance(parsed, _MeanOfPartHeader):
        (mean,) = _means(parsed.mean, [parsed.mean.length], rest)
        message = Mean(round_id, parsed.attempt, parsed.part, mean)
    elif isinstance(parsed, _ResultHeader):
        message = Result(round_id, parsed.attempt.attempt(), tuple(_means(parsed, parsed.lengths, rest)))
    else:
        if parsed.member is None and body:
            raise ValueError(f"a message without a contribution has {len(body)} bytes")
        contribution = None if parsed.member is None else Contribution(parsed.member.member(), rest)
        if isinstance(parsed, _WholeHeader):
            message = Whole(round_id, Process(*parsed.owner), contribution)
        else:
            message = Part(round_id, parsed.attempt, parsed.part, contribution)
    return message, parsed.view


def _mean_bodies(mean: PartMean) -> list[Tensor]:
    if mean.mean is None:
        return []
    return [mean.mean, mean.inner.flatten().view(torch.uint8)]


def _means(header: _MeanHeader | _ResultHeader, lengths: Sequence[int | None], body: Tensor) -> Iterable[PartMean]:
    members, outliers = (tuple(one.member() for one in some) for some in (header.members, header.outliers))
    size, at = len(members), 0
    for length in lengths:
        if (length is None) != (not members):
            raise ValueError(f"a mean of {length} bytes between {size} members")
        if length is None:
            yield PartMean((), outliers, None, torch.zeros(0, 0, dtype=torch.float64, device="cpu"))
            continue
        ends = at + length, at + length + 8 * size * size
        if ends[1] > body.numel():
            raise ValueError(f"a mean of {length} bytes between {size} members in {body.numel()} bytes")
        inner = body[ends[0] : ends[1]].clone().view(torch.float64).reshape(size, size)
        yield PartMean(members, outliers, body[at : ends[0]], inner)
        at = ends[1]
    if at != body.numel():
        raise ValueError(f"means of {at} bytes in {body.numel()}")


def _state(header: _StateHeader, body: Tensor) -> FragmentState:
    vectors, at = {}, 0
    for name, dtype, numel in header.vectors:
        if dtype not in _DTYPES:
            raise ValueError(f"a vector of type {dtype[:20]!r}; allowed are {' and '.join(_DTYPES)}")
        end = at + numel * _DTYPES[dtype].itemsize
        if end > body.numel():
            break
        vectors[name] = body[at:end].clone().view(_DTYPES[dtype])
        at = end
    if len(vectors) != len(header.vectors) or at != body.numel():
        raise ValueError(f"a state of {body.numel()} bytes, which its vectors do not fill")
    return FragmentState(header.fragment, header.applied, header.counts, vectors)


def _processes(pairs: Iterable[tuple[int, int]]) -> tuple[Process, ...]:
    return tuple(Process(*pair) for pair in pairs)


def parse(kind: TypeAdapter[Any], data: bytes) -> Any:
    """Parse JSON; ValueError in one short line if it is anything else."""
    try:
        return kind.validate_json(data)
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))[:60]
        raise ValueError(f"not a message of atoll: {where!a}: {first['msg'][:200]!a}") from None
