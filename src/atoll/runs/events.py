"""Defines the events of a run, and writes and reads metrics.jsonl.

The file holds one JSON object a line, {"event": "step", ...fields}. A number that is not finite is null. A line counts
once its newline is there. Fields that a reader does not know were added by a newer atoll and are ignored; anything else
that does not fit is damage, and an error.
"""

import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import IO, Annotated, Any, Final, Literal, Protocol

from pydantic import Discriminator, TypeAdapter, ValidationError

from atoll._util.disk import lines_limited, open_plain, writing
from atoll.errors import DataError
from atoll.runs.evidence import Evidence
from atoll.runs.lines import Lines
from atoll.runs.number import Number
from atoll.runs.sample import Sample
from atoll.runs.scored import Scored

Outcome = Literal["finished", "interrupted"]

MOST_LINE: Final = 2**24
"""Largest line in bytes: room for the numbers of thousands of workers."""


# ---- the events; a list that is "per worker" is in worker order, and has None or 0 for workers of other processes


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Opens a run and describes it."""

    event: Literal["start"] = "start"
    name: str
    method: str
    workers: int
    steps: int
    """Inner steps of the whole run."""
    parameters: int
    tokens_per_step: int
    """Tokens of one worker in one inner step."""
    period: int
    delay: list[int]
    """Inner steps from send to apply, per worker."""
    codec: str
    fragments: list[int]
    """Values per fragment."""
    payload_bytes: list[int]
    """Bytes of one payload, per fragment."""
    vocabulary: int
    device: str
    threads: int
    weights: list[Number]
    """Weight in every mean, per worker."""
    worker: int | None = None
    """The worker that this process trains; None: all of them."""
    began: Number = 0.0
    """Unix time of the run's first start, seconds; 0: unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Holds the totals since the run's start that `Step` and `End` report; lists are per worker."""

    event: str
    step: int
    tokens: int
    """Trained on by all workers."""
    seconds: Number
    """Seconds since the run's start, over resumes."""
    step_s: Number
    """Mean seconds of compute of one inner step of one worker: in a Step since the one before."""
    bytes_sent: list[int]
    """Bytes of payloads, each counted once."""
    bytes_received: list[int]
    wait_s: list[Number]
    """Exposed wait: seconds in which a worker only waited for rounds; workers of one process wait together."""
    hidden_s: list[Number] = field(default_factory=list)
    """Seconds in which rounds travelled while the worker trained, summed over rounds."""
    wire_sent: list[int] = field(default_factory=list)
    """Bytes put on the wire, headers included; inside one process 0, or what an emulated line carries."""
    wire_received: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Step(Totals):
    """Reports some inner steps."""

    event: Literal["step"] = "step"
    loss: list[float | None]
    """Nats per token, per worker; None: did not train, or not finite."""
    lr: Number
    grad_norm: list[float | None]
    """Norm of the gradient before clipping, per worker."""
    tokens_per_s: Number
    """Tokens a second of all workers together."""
    participants: int
    """Workers that trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundApplied:
    """Reports a round that was applied to the anchor."""

    event: Literal["round"] = "round"
    step: int
    """The step after which it was sent."""
    fragment: int
    applied: int
    """The step after which it was applied."""
    members: list[int]
    """Workers whose payload arrived."""
    expected: int
    """Workers that were to send one."""
    norm: Number
    """Euclidean norm of the mean delta."""
    cosine: float | None
    """Mean cosine similarity over pairs of the members' deltas; None where there is no pair."""
    bytes: int
    """Bytes of one worker's payload."""
    worker: int = 0
    """The worker that measured the fields below."""
    opened_s: Number = math.nan
    """When it was sent, seconds since the run's start, by the clock of Step.seconds; NaN: not measured."""
    done_s: Number = math.nan
    """When its last payload had arrived."""
    waited_s: Number = 0.0
    hidden_s: Number = 0.0
    wire_sent: int = 0
    wire_received: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Eval:
    """Reports the loss of the outer parameters on held-out text."""

    event: Literal["eval"] = "eval"
    step: int
    tokens: int
    seconds: Number
    loss: Number
    """Nats per token."""
    best: bool
    """Whether it is the lowest so far."""
    anchor_step: int | None = None
    """The step of the outer parameters: between two rounds, an earlier one. None: unknown (older files)."""

    @property
    def is_behind(self) -> bool:
        """Whether the outer parameters are of an earlier step than that of the evaluation."""
        return self.anchor_step is not None and self.anchor_step < self.step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Reports a failure of one worker that does not end the run."""

    event: Literal["fault"] = "fault"
    step: int
    worker: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """Reports a new view: the members of an elastic run."""

    event: Literal["members"] = "members"
    step: int
    """The step of the worker that reports it, as in the other events."""
    view: int
    members: list[int]
    """Workers that train."""
    following: list[int]
    """Workers that have joined and are catching up."""
    boundary: int
    """Rounds after this step are between these members."""
    seconds: Number
    late: dict[int, int] = field(default_factory=dict)
    """Worker that this view has left behind -> rounds that were completed without it so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """Reports that a worker is no longer a member of an elastic run."""

    event: Literal["lost"] = "lost"
    step: int
    worker: int
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """Reports that a worker has joined an elastic run that was under way."""

    event: Literal["joined"] = "joined"
    step: int
    worker: int
    at: int
    """The step after which it trains with the others."""
    since: int | None = None
    """The step that this worker had come to when it was cut off, if it has joined again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """Reports a checkpoint on disk; seconds since the run's start."""

    event: Literal["saved"] = "saved"
    step: int
    seconds: Number


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """Reports that the run continues from a checkpoint; seconds trained since the run's start."""

    event: Literal["resumed"] = "resumed"
    step: int
    seconds: Number
    began: Number = 0.0
    """Unix time of this moment, seconds; 0: unknown (older files)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End(Totals):
    """Closes a run that has finished, or was interrupted and can be resumed."""

    event: Literal["end"] = "end"
    loss: Number
    """The last held-out loss, nats per token; NaN if there was no evaluation."""
    best_loss: Number
    outcome: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Reports the error that ended a process; a resumed run begins after its last checkpoint, without this event."""

    event: Literal["failed"] = "failed"
    step: int
    seconds: Number
    """Seconds since the run's start, by the clock of Step.seconds."""
    why: str


def utilisation(waited_s: float, seconds: float) -> float | None:
    """Returns the share of a worker's time, 0 to 1, without waits; None before any time has passed."""
    return min(1.0, max(0.0, 1 - waited_s / seconds)) if seconds > 0 and math.isfinite(waited_s) else None


_Progress = Start | Step | RoundApplied | Eval | Fault | Saved | Resumed | End | Failed
Event = _Progress | Members | Lost | Joined | Lines | Sample | Scored | Evidence


class Sink(Protocol):
    """Takes events."""

    def write(self, event: Event) -> None:
        """Take one event."""

    def close(self) -> None:
        """Write or send what is left; harmless when repeated."""


class Jsonl:
    """Writes events as lines of a file, each visible to readers at once.

    Args:
        path: the file.
        at: None begins a new file in place of an old one. A number of bytes continues the file there: the rest is cut
            off. If the file is shorter, it continues after the last whole line, and `missing` holds the bytes lost.
    """

    def __init__(self, path: str | Path, at: int | None = None) -> None:
        self.path = Path(path)
        with writing(self.path):
            # Unbuffered, so that events are one write(), and one that failed is not tried again by close().
            self._file = open(self.path, "ab+", buffering=0)  # noqa: SIM115
            whole = 0
            if end := min(at or 0, os.fstat(self._file.fileno()).st_size):
                with mmap(self._file.fileno(), 0, access=ACCESS_READ) as content:
                    whole = content.rfind(b"\n", 0, end) + 1
            self._file.truncate(whole)
            self.missing = (at or 0) - whole

    def write(self, event: Event, *more: Event) -> None:
        """Appends events, all or none: after a failure the file ends in a whole line as before."""
        with writing(self.path):
            before = os.fstat(self._file.fileno()).st_size
            try:
                lines = b"".join(map(_line, (event, *more)))
                while (
                    lines
                ):  # once, but for a disk that fills up: it takes a part, and refuses the rest with the reason
                    lines = lines[self._file.write(lines) :]
            except OSError:
                with suppress(OSError):
                    self._file.truncate(before)
                raise

    def position(self) -> int:
        """Waits until all events are on disk, and returns the length in bytes: the `at` of a resume."""
        with writing(self.path):
            os.fsync(self._file.fileno())
            return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Closes the file."""
        with writing(self.path):
            self._file.close()


def read(path: str | Path) -> list[Event]:
    """Returns all events of a file without a torn last line; other damage is a DataError with file and line."""
    path = Path(path)
    try:
        with open_plain(path) as file:
            return [event for _, event in parsed(path, file)]
    except OSError as fault:
        raise DataError(f"{path} cannot be read: {fault.strerror}; give the metrics.jsonl of a run") from fault


def _line(event: Event) -> bytes:
    """Returns an event as one line of JSON."""
    fields = {name: _finite(value) for name, value in asdict(event).items()}
    text = json.dumps(fields, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode(errors="replace") + b"\n"


def _finite(value: Any) -> Any:
    """Returns the value with None for every float that is not finite."""
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_LONG_NUMBER = re.compile(rb"[:,\[]\s*-?[0-9]{30}")
_ZEROS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else byte for byte in range(256))


@cache
def _parser() -> TypeAdapter[Event]:
    return TypeAdapter(Annotated[Event, Discriminator("event")])


def parsed(path: Path, file: IO[bytes], after: int = 0) -> Iterator[tuple[bytes, Event]]:
    """Yields the whole lines of a file, each with its event; `after` lines of the file were read before.

    Raises:
        DataError: a line is damaged.
        OSError: the file cannot be read, or a line is too long.
    """
    for number, line in enumerate(lines_limited(path, file, MOST_LINE), after + 1):
        if not line.endswith(b"\n"):
            return
        # Digits are sought first, which takes a fifth of the time. JSON has no largest number, but floats have.
        if b"0" * 30 in line.translate(_ZEROS) and _LONG_NUMBER.search(line):
            raise DataError(f"{path}, line {number} is damaged: it holds a number of 30 digits or more")
        try:
            event = _parser().validate_json(line, strict=True)
        except ValidationError as fault:
            first = fault.errors(include_url=False, include_input=False)[0]
            raise DataError(f"{path}, line {number} is damaged: {_complaint(first)}") from fault
        yield line, event


def _complaint(error: Mapping[str, Any]) -> str:
    """Says what is wrong with a line, by the names of the file."""
    match error["type"]:
        case "json_invalid":
            return "it is not JSON"
        case "union_tag_not_found" | "dict_type":
            return 'it has no "event"'
        case "union_tag_invalid":
            known = error["ctx"]["expected_tags"].replace("'", "")
            return f"its event is {error['ctx']['tag']!r}, known are {known}; if a newer atoll wrote it, upgrade"
    return f"{'.'.join(map(str, error['loc']))}: {error['msg'][:1].lower()}{error['msg'][1:]}"
