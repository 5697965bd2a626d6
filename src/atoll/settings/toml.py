"""Reads and writes run files as TOML, with overrides and with errors that name the key and what is allowed.

Nothing here knows a setting by name: it works on tables and on the pydantic models that describe them.
"""

import copy
import json
import re
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic_core import ErrorDetails

from atoll._util.disk import DEEPEST, is_deeper, read_limited
from atoll.errors import ConfigError
from atoll.settings.value_types import Allowed

MOST_BYTES = 2**20
"""Largest run file in bytes, which is read whole."""
_COMMENT, _WIDTH = 30, 118  # columns of a template
_TOO_DEEP = f"not valid TOML: brackets or dots are nested too deeply, at most {DEEPEST} levels are read"
_KEY = r"""(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')"""
_LONG_KEY = re.compile(rf"(?:^|[\[{{,])[ \t]*(?:{_KEY}[ \t]*+\.[ \t]*+){{{DEEPEST}}}", re.MULTILINE)
Table = dict[str, Any]
Keys = tuple[int | str, ...]
"""Place of a setting: its section and its name, or one of them."""


# ---------------------------------------------------------------------- in


def read(path: Path, missing: str | None = None) -> str:
    """Returns the text of a run file; ConfigError says why it cannot be read (`missing`: for a path without a file)."""
    try:
        # Some editors begin a file with a byte order mark.
        return read_limited(path, MOST_BYTES, pipe=True).decode("utf-8-sig")
    except FileNotFoundError:
        advice = f"no such file; `atoll init {path}` writes one to start from"
        advice = advice if path.suffix == ".toml" else "no such run or run file"
        raise ConfigError(f"{path}: {missing or advice}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: is a folder, not a run file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not a run file: byte {error.start} is not UTF-8 text") from None
    except (OSError, ValueError) as error:  # ValueError: a path that no system has
        raise ConfigError(f"{shown(str(path))}: cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_toml(text: str, where: str) -> Table:
    """Returns the table of a TOML text; ConfigError shows the line that is wrong."""
    try:
        return _loads(text)
    except RecursionError:
        raise ConfigError(f"{where}: {_TOO_DEEP}") from None
    except ValueError as error:  # TOMLDecodeError is one; a number of thousands of digits raises another
        if not (found := re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error), re.DOTALL)):
            raise ConfigError(f"{where}: not valid TOML: {str(error).partition(';')[0]}") from None
        reason, number, column = found[1], int(found[2]), found[3]
        line = shortened(text.split("\n")[number - 1].strip())
        hint = "; text needs quotes" if reason == "Invalid value" else ""
        place = f"line {number}, column {column}"
        raise ConfigError(f"{where}: not valid TOML at {place}: {reason}{hint}: {line}") from None


def _loads(text: str) -> Table:
    """Parses TOML; RecursionError if brackets, or dots in a key, nest too deeply."""
    if _LONG_KEY.search(text):  # tomllib would take a time that grows with the square of the dots
        raise RecursionError
    table = tomllib.loads(text)
    if is_deeper(table, DEEPEST):
        raise RecursionError
    return table


class Override(NamedTuple):
    """Holds a setting given beside the file."""

    key: str
    value: Any
    """None takes the setting out of the file."""

    @staticmethod
    def parse(text: str) -> "Override":
        """Parses "sync.period=50": the value is TOML, and a bare word is text."""
        key, _, raw = (part.strip() for part in text.partition("="))
        if not raw or not all(key.split(".")) or key.count(".") > DEEPEST:
            raise ConfigError(f"{shown(text)}: must be KEY=VALUE, such as sync.period=50")
        try:
            table = _loads(f"value = {raw}")
        except RecursionError:
            raise ConfigError(f"{key}: {_TOO_DEEP}") from None
        except ValueError:
            if raw[0] in "[{\"'":
                raise ConfigError(
                    f"{key}: not valid TOML: {shortened(raw)}; text inside brackets needs quotes"
                ) from None
            return Override(key, raw)
        return Override(key, table["value"] if len(table) == 1 else raw)


def overridden(table: Mapping[str, Any], overrides: Iterable[Override]) -> Table:
    """Returns a copy of a table with some values set."""
    result: Table = copy.deepcopy(dict(table))
    for key, value in overrides:
        *parents, last = key.split(".")
        inner = result
        for depth, parent in enumerate(parents, start=1):
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                above = ".".join(parents[:depth])
                raise ConfigError(f"{key}: cannot be set, since {above} must be a table and is {shown(inner)}")
        if value is None:
            inner.pop(last, None)
        else:
            inner[last] = value
    return result


def without(table: Mapping[str, Any], places: Iterable[Keys]) -> Table:
    """Returns a copy of a table without the settings at these places."""
    result: dict[Any, Any] = {key: dict(value) if isinstance(value, dict) else value for key, value in table.items()}
    for place in places:
        inner = result if len(place) == 1 else result[place[0]]
        inner.pop(place[-1], None)
    return result


# ---------------------------------------------------------------------- what is wrong


def problems(
    errors: Iterable[ErrorDetails], model: type[BaseModel], table: Mapping[str, Any], what: str = "a run file"
) -> dict[Keys, str]:
    """Returns one line for each wrong setting, by its place; `what` is the name of the table in errors."""
    lines: dict[Keys, str] = {}
    for error in errors:
        place: Keys = error["loc"][: 2 if section(model, error["loc"][0]) else 1]  # what follows is inside the value
        if place in lines:
            continue
        key = ".".join(map(_key, place))
        owner = model if len(place) == 1 else section(model, place[0])
        if error["type"] in ("extra_forbidden", "invalid_key") and error["loc"] == place:
            lines[place] = f"{key}: unknown key; {_meant(place, model, what)}"
        elif error["type"] == "missing" and error["loc"] == place and owner is not None:
            lines[place] = f"{key}: is missing: {purpose(owner, str(place[-1]))}"
        elif owner is None or section(owner, place[-1]):
            example = f"write [{key}] on a line, and its settings below it"
            lines[place] = f"{key}: must be a table, got {shown(error['input'])}: {example}"
        else:
            name, inner = str(place[-1]), table if len(place) == 1 else table[str(place[0])]
            lines[place] = f"{key}: {_misfit(owner, name, inner[name])}"
    return lines


def refusal(where: str, lines: Sequence[str]) -> ConfigError:
    """Returns the error that lists all problems of a file, each on a line."""
    if len(lines) == 1:
        return ConfigError(f"{where}: {lines[0]}")
    return ConfigError("\n  ".join([f"{where}: {len(lines)} problems", *lines]))


def section(model: type[BaseModel], name: object) -> type[BaseModel] | None:
    """Returns the model of a section; None if the name is that of a plain setting, or unknown."""
    field = model.model_fields.get(str(name))
    kind = field.annotation if field else None
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _meant(place: Keys, model: type[BaseModel], what: str) -> str:
    """Suggests the key that was meant, in this section before others; else lists those of this section."""
    home, name = str(place[0]) if len(place) > 1 else "", str(place[-1])
    sections = {"": model} | {name: inner for name in model.model_fields if (inner := section(model, name))}
    full: dict[str, str] = {}
    for title in sorted(sections, key=lambda title: title != home):
        for field in sections[title].model_fields:
            full.setdefault(field, f"{title}.{field}".lstrip("."))
    if close := get_close_matches(name.lower(), full, n=1, cutoff=0.6):
        return f"did you mean {full[close[0]]}?"
    return f"{home or what} has {', '.join(sections[home].model_fields)}"


def _misfit(owner: type[BaseModel], name: str, value: Any) -> str:
    """Says what the setting must be and what it is; then which word was meant, or what the setting is for."""
    kinds = _kinds(owner, name)
    line = f"must be {' or '.join(kind.text for kind in kinds)}, got {shown(value)}"
    options = [option for kind in kinds for option in kind.options]
    if isinstance(value, str):
        if close := get_close_matches(value.lower(), options, n=1, cutoff=0.5):
            return f'{line}; did you mean "{close[0]}"?'
        if re.search("number|true", line) and re.fullmatch(r"[-+]?[0-9][0-9_.eE+-]*|true|false", value):
            line += "; write it without quotes"
    return f"{line}: {purpose(owner, name)}"


def _kinds(owner: type[BaseModel], name: str) -> list[Allowed]:
    return list(_allowed(get_type_hints(owner, include_extras=True)[name]))


def _allowed(annotation: Any) -> Iterator[Allowed]:
    """Yields what an annotation accepts, part by part."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Annotated:
        yield from (extra for extra in arguments if isinstance(extra, Allowed))
    elif get_origin(annotation) is Literal:
        yield Allowed(f"{'one of ' if len(arguments) > 1 else ''}{', '.join(arguments)}", arguments)
    elif annotation is bool:
        yield Allowed("true or false")
    elif get_origin(annotation) in (Union, types.UnionType):
        for part in arguments:
            yield from _allowed(part)


def purpose(owner: type[BaseModel], name: str) -> str:
    """Returns what a setting is for, to follow a colon."""
    sentence = (owner.model_fields[name].description or "").rstrip(".")
    return sentence if sentence[1:2].isupper() else sentence[:1].lower() + sentence[1:]


def _key(part: object) -> str:
    return part if isinstance(part, str) and re.fullmatch(r"[A-Za-z0-9_-]+", part) else shown(part)


def shown(value: Any) -> str:
    """Returns a value on one line, as TOML has it; long ones are cut short."""
    match value:
        case None:
            return "nothing"
        case bool():
            text = str(value).lower()
        case str():
            text = json.dumps(value)
        case int() if value.bit_length() > 200:  # Python refuses to write those of thousands of digits
            text = f"a number of {value.bit_length()} bits"
        case list() | tuple():
            text = f"[{', '.join(map(shown, value[:10]))}]"
        case dict():
            text = f"{{{', '.join(f'{_key(key)} = {shown(inner)}' for key, inner in list(value.items())[:10])}}}"
        case _:
            text = str(value)
    return shortened(text)


def shortened(text: str, most: int = 80) -> str:
    """Returns the text, or its beginning and three dots."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


# ---------------------------------------------------------------------- out


def template(model: type[BaseModel], title: str) -> str:
    """Returns a run file with every setting, its default and what it is for; those left out are comments."""
    lines = [*title.splitlines(), "", *_template_lines(model)]
    for name in model.model_fields:
        if inner := section(model, name):
            lines += ["", f"# {(inner.__doc__ or '').strip()}", f"[{name}]", *_template_lines(inner)]
    return "\n".join(lines) + "\n"


def _template_lines(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if section(model, name):
            continue
        value = f"# {name} = {shown(field.examples[0])}" if field.examples else f"{name} = {shown(field.get_default())}"
        words = [kind.text for kind in _kinds(model, name) if kind.text.startswith("one of ")]
        choice = f"{words[0].removeprefix('one of ').replace(', ', ' | ')}: " if words else ""
        first, *more = wrap(choice + purpose(model, name), _WIDTH - _COMMENT - 3)
        yield f"{value:<{_COMMENT}} # {first}"
        yield from (f"{'':<{_COMMENT}} # {line}" for line in more)
