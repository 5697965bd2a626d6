"""Defines the kinds of values that a run file holds, each with what it may be."""

import re
import shlex
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from atoll.settings.model_presets import LARGEST, PRESETS


@dataclass(frozen=True, slots=True)
class Allowed:
    """Says what a setting may be, to follow "must be" in an error."""

    text: str
    options: tuple[str, ...] = ()
    """Words to suggest for a misspelled one."""


def _matches(pattern: str) -> AfterValidator:
    """Accepts texts that match a pattern of Python, which knows more than pydantic's."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"does not match {pattern}")
        return value

    return AfterValidator(check)


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 65536 or re.search(r"\s", value):
        raise ValueError("no host and port")
    return value


def _registry_address(value: str) -> str:
    """Accepts HOST:PORT, or etcd://HOST:PORT,HOST:PORT/NAME."""
    if not value.startswith("etcd://"):
        return _address(value)
    hosts, slash, name = value.removeprefix("etcd://").partition("/")
    if not slash or not re.fullmatch(r"[^\s/]+", name):
        raise ValueError("no name")
    for host in hosts.split(","):
        _address(host)
    return value


def _listen(value: str) -> str:
    """Accepts HOST:PORT, also port 0."""
    host, _, port = value.rpartition(":")
    if port != "0" or not host or re.search(r"\s", value):
        return _address(value)
    return value


def _alert(value: str) -> str:
    """Accepts http:// and https:// addresses, commands, and $NAME."""
    if value.startswith("$") and not re.fullmatch(r"\$[A-Za-z_][A-Za-z0-9_]*", value):
        raise ValueError("no name of a variable")
    if "://" in value.partition(" ")[0] and not re.fullmatch(r"https?://[^\s/]+(/\S*)?", value):
        raise ValueError("no address")
    shlex.split(value)
    return value


def worker_numbers(table: Any) -> Any:
    """Converts keys that are worker numbers, since those of TOML are text: "3" -> 3."""
    if not isinstance(table, dict):
        return table
    return {int(k) if isinstance(k, str) and re.fullmatch(r"0|[1-9][0-9]{0,8}", k) else k: v for k, v in table.items()}


BPE_VOCABULARY = 8192
"""Default size of a BPE tokenizer in tokens."""
LEAST_BPE_VOCABULARY = 257
"""Smallest size of a BPE tokenizer: every byte, and a separator of documents."""
MANY = 10**12
"""The largest count."""
Count = Annotated[int, Field(ge=1, le=MANY), Allowed("a whole number from 1 to 10^12")]
Steps = Annotated[int, Field(ge=0, le=MANY), Allowed("a whole number from 0 to 10^12")]
Size = Annotated[int, Field(ge=1, le=LARGEST), Allowed("a whole number from 1 to 10^7")]
Tokens = Annotated[int, Field(ge=0, le=4096), Allowed("a whole number from 0 to 4096")]
Even = Annotated[int, Field(ge=2, le=10**6, multiple_of=2), Allowed("an even whole number from 2 to 10^6")]
Workers = Annotated[int, Field(ge=1, le=4096), Allowed("a whole number from 1 to 4096")]
Worker = Annotated[int, Field(ge=0, le=4095), Allowed("a worker's number, from 0")]
Threads = Annotated[int, Field(ge=1, le=1024), Allowed("a whole number from 1 to 1024")]
Seed = Annotated[int, Field(ge=0, le=2**32 - 1), Allowed("a whole number from 0 to 2^32 - 1")]
Positive = Annotated[float, Field(gt=0), Allowed("a number above 0")]
Amount = Annotated[float, Field(ge=0), Allowed("a number of at least 0")]
Chance = Annotated[float, Field(ge=0, le=1), Allowed("a number from 0 to 1")]
Share = Annotated[float, Field(gt=0, le=1), Allowed("a number above 0 and at most 1")]
Part = Annotated[float, Field(gt=0, lt=1), Allowed("a number above 0 and below 1")]
Decay = Annotated[
    float, Field(ge=0, lt=1), Allowed("a number of at least 0 and below 1, for at 1 the past never fades")
]
Betas = Annotated[
    tuple[Decay, Decay], Field(strict=False), Allowed("a pair like [0.9, 0.99], each at least 0 and below 1")
]
_TEXT = _matches(r"(?=.*\S)[^\x00-\x1f\x7f\ud800-\udfff]+")  # other characters are in no name and no path
Text = Annotated[str, _TEXT, Allowed("text in quotes, not empty")]
Name = Annotated[
    str,
    Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$", max_length=100),
    Allowed("letters, digits, - _ and . only, at most 100, not starting with - or ."),
]
Device = Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$"), Allowed("auto, cpu, cuda (a GPU) or cuda:N")]
Preset = Annotated[str, _matches("|".join(PRESETS)), Allowed(f"one of {', '.join(PRESETS)}", tuple(PRESETS))]
_SOURCE = Allowed('"stdlib", a path, a glob, a folder, "hf:NAME" or "hf:NAME:CONFIG"', ("stdlib",))
Source = Annotated[str, _TEXT, _matches(r"hf:[^:\s]+(:[^:\s]+)?|(?!hf:).*"), _SOURCE]
Sources = Annotated[tuple[Source, ...], Field(strict=False, min_length=1), Allowed("a list of such")]
Address = Annotated[str, AfterValidator(_address), Allowed('HOST:PORT, like "10.0.0.1:29500" or "[fd00::1]:29500"')]
Registry = Annotated[
    str,
    AfterValidator(_registry_address),
    Allowed('HOST:PORT of `atoll registry`, like "10.0.0.1:29400", or etcd://HOST:PORT,HOST:PORT/NAME'),
]
Listen = Annotated[str, AfterValidator(_listen), Allowed('HOST:PORT, like "10.0.0.2:29401"; port 0 takes a free one')]
Alert = Annotated[
    str,
    _TEXT,
    AfterValidator(_alert),
    Allowed('an address like "https://example.org/hook", a command, or "$NAME" of a variable that holds one'),
]
Seconds = Annotated[float, Field(gt=0, lt=1e6), Allowed("a number of seconds above 0, below 10^6")]
Connections = Annotated[int, Field(ge=1, le=8), Allowed("a whole number from 1 to 8")]
Silence = Annotated[float, Field(ge=0.1, lt=1e6), Allowed("a number of seconds from 0.1, below 10^6")]
Tokenizer = Annotated[
    str,
    _TEXT,
    _matches(r"bytes|bpe|.*[/\\].*|.*\.json"),
    Allowed("bytes, bpe or the path of a tokenizer.json", ("bytes", "bpe")),
]
Fragments = Annotated[
    str,
    Field(pattern=r"^(whole|blocks(:[1-9][0-9]{0,5}(:strided|:sequential)?)?|balanced:[1-9][0-9]{0,5})$"),
    Allowed('"whole", "blocks:3", "blocks:3:sequential" or "balanced:4"', ("whole", "blocks:3", "balanced:4")),
]
Delays = Annotated[tuple[Steps, ...], Field(strict=False, min_length=1), Allowed("a list with one for each worker")]

Method = Literal["none", "data-parallel", "diloco", "streaming", "eager", "delayed"]
Outer = Literal["nesterov", "momentum", "sgd", "adam"]
CodecName = Literal["fp64", "fp32", "bf16", "fp16", "int8", "int4", "e3m0", "e2m1", "lloyd4", "lloyd2", "top64"]
Compute = Literal["constant", "doubling", "halving", "ramp-up", "ramp-down"]
View = Literal["auto", "live", "lines", "none"]
