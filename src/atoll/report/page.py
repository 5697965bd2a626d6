"""Writes runs as one HTML page of words, table, pictures and settings, without scripts or network."""

import math
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup, escape

from atoll._util.units import bytes_text, count_words, loss_text, percent_text, ratio_text, seconds_text, share_text
from atoll.plan.line import Line
from atoll.report.canvas import DARK, LIGHT, css_variables, shorten, to_svg
from atoll.report.figures import Picture
from atoll.report.load import plain_text
from atoll.report.record import RunRecord
from atoll.report.table import Row, columns, notes

_MOST_FAULTS = 40  # listed one by one; the rest is counted
_MOST_SENTENCES = 4  # runs with a sentence each
_LONGEST_NAME = 48  # in a sentence
_LONGEST_HEADING = 36  # in a table
_GAP = re.compile(r"(?<=\d) (?=(?:[kMGTP]?B|[kMGT]?bit/s|m?s|min|h|days|years|%)\b|%)")  # between a number and its unit


@dataclass(frozen=True, slots=True)
class Fact:
    """Holds one line of a table with a column per run."""

    label: str
    values: list[str]

    @property
    def common(self) -> bool:
        """Whether it is the same for all runs."""
        return len(set(self.values)) == 1


def page(
    records: Sequence[RunRecord],
    rows: Sequence[Row],
    pictures: Sequence[Picture],
    link: Line,
    title: str = "",
    claims: Sequence[str] = (),
) -> str:
    """Returns the page as text; an empty title becomes one that says how many runs."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(files("atoll.report").joinpath("page.html.j2").read_text("utf-8"))
    return template.render(
        title=plain_text(title) or (f"Run {rows[0].name}" if len(rows) == 1 else f"{len(rows)} runs compared"),
        claims=[plain_text(claim) for claim in claims],
        words=_words(records, rows, link),
        notes=_notes(records, rows),
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        colours=len(LIGHT.series),
        rows=rows,
        notes_of=notes,
        short=shorten,
        longest_heading=_LONGEST_HEADING,
        columns=columns(rows, link),
        measured=any(row.utilisation is not None for row in rows),
        figures=pictures,
        image=_image,
        differences=_differences(records),
        facts=_facts(records),
        faults=[_faults(record) for record in records if record.missed or record.faults],
        link=link,
    )


def _image(picture: Picture, *, narrow: bool = False, dark: bool = False) -> str:
    """Returns a picture as a data URL."""
    svg = to_svg(picture.draw, replace(DARK if dark else LIGHT, narrow=narrow))
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


# ---------------------------------------------------------------------- words


def _words(records: Sequence[RunRecord], rows: Sequence[Row], link: Line) -> Markup:
    """Returns the comparison as a paragraph: a sentence for each of few runs, else for the best."""
    reference = next(row for row in rows if row.is_reference)
    others = [row for row in rows if row is not reference]
    what = "One run" if len(rows) == 1 else f"{len(rows)} runs"
    sizes = _span([r.start.parameters for r in records], count_words, "parameters")
    one = all(r.start.workers == 1 for r in records)
    workers = _span([r.start.workers for r in records], str, "worker" if one else "workers")
    tokens = _span([r.tokens for r in records], count_words, "tokens")
    sentences = [
        escape(f"{what} of a model with {sizes}: {workers}, {tokens}."),
        _ending(reference, link, alone=not others),
    ]
    if len(others) <= _MOST_SENTENCES:
        sentences += [_compared(row) for row in others]
    else:
        sentences += _outstanding([row for row in others if row.record.finished])
    return Markup(_GAP.sub("&nbsp;", Markup(" ").join(sentences)))


def _outstanding(rows: Sequence[Row]) -> list[Markup]:
    """Returns a sentence for each run that is best at something."""
    best: dict[str, list[str]] = {}
    for what, key in (
        ("the lowest loss", lambda row: math.inf if row.loss is None else row.loss),
        ("the fewest bytes", lambda row: row.sent_bytes),
        ("the shortest time", lambda row: row.link_time.total_s),
    ):
        if rows:
            best.setdefault(min(rows, key=key).name, []).append(what)
    by_name = {row.name: row for row in rows}
    sentences = [f"{' and '.join(what)}: " + _compared(by_name[name]) for name, what in best.items()]
    return ["Among the others " + sentences[0], *("T" + words[1:] for words in sentences[1:])] if sentences else []


def _ending(row: Row, link: Line, *, alone: bool) -> Markup:
    subject = _name(row) if alone else "The reference, " + _name(row) + ","
    ends = "ends at" if row.record.finished else f"has come to step {row.record.step} of {row.record.start.steps} and"
    loss = "no held-out loss" if row.loss is None else f"a held-out loss of {loss_text(row.loss)}"
    perplexity = "" if row.perplexity is None else f" (perplexity {row.perplexity:,.2f})"
    sent = f"sends {bytes_text(row.sent_bytes)} per worker" if row.sent_bytes else "sends nothing"
    busy = "" if row.link_time.utilisation == 1 else f", computing for {share_text(row.link_time.utilisation)} of it"
    time = f"With one machine per worker and {link} for each it would take {seconds_text(row.link_time.total_s)}{busy}."
    return subject + f" {ends} {loss}{perplexity} and {sent}. {time}"


def _compared(row: Row) -> Markup:
    """Returns a sentence that compares a run with the reference."""
    loss = "has no held-out loss yet"
    if row.loss is not None:
        away = "" if row.against is None else f" ({percent_text(row.against)})"
        loss = f"{'ends' if row.record.finished else 'is'} at {loss_text(row.loss)}{away}"
    fewer = f", {ratio_text(row.fewer)}" if row.fewer is not None and ratio_text(row.fewer) != "the same" else ""
    sent = f"with {bytes_text(row.sent_bytes)}{fewer}" if row.sent_bytes else "sends nothing"
    return _name(row) + f" {loss} {sent}, and would take {seconds_text(row.link_time.total_s)}."


def _name(row: Row) -> Markup:
    return Markup("<strong>{}</strong>").format(shorten(row.name, _LONGEST_NAME))


def _span(values: Sequence[int], text: Callable[[int], str], unit: str) -> str:
    low, high = text(min(values)), text(max(values))
    return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"


def _notes(records: Sequence[RunRecord], rows: Sequence[Row]) -> list[str]:
    """Returns what a reader must know before comparing."""
    notes = [
        f"{shorten(row.name, _LONGEST_NAME)} is not finished: "
        f"it is at step {row.record.step} of {row.record.start.steps}, and its numbers are those so far."
        for row in rows
        if not row.record.finished
    ]
    finished = [row.record.tokens for row in rows if row.record.finished]
    if finished and max(finished) > 1.01 * min(finished):
        notes.append("The runs have not trained on the same number of tokens: compare losses with care.")
    if len({r.start.vocabulary for r in records}) > 1:
        notes.append("The runs have different vocabularies: their losses per token cannot be compared.")
    if len({r.start.workers for r in records}) > 1:
        notes.append("The runs have different numbers of workers: bytes are per worker, tokens are of all together.")
    for r in records:
        if missing := [w for w in range(r.start.workers) if w not in r.workers]:
            which = ("Worker " if len(missing) == 1 else "Workers ") + shorten(", ".join(map(str, missing)), 60)
            lack = f"{which} of {shorten(r.name, _LONGEST_NAME)} left no numbers here (the folder is elsewhere)"
            notes.append(f"{lack}: bytes, waits and training losses are those of the others.")
    if any(r.last and r.start.workers > 1 and any(s.participants < len(r.workers) for s in r.steps) for r in records):
        notes.append("Workers were away in some runs; modelled times assume that all are there all the time.")
    return notes


# ---------------------------------------------------------------------- settings


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for key, value in table.items():
        name = plain_text(f"{prefix}{key}")
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = _value(value)
    return flat


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return plain_text(str(value))


def _differences(records: Sequence[RunRecord]) -> list[Fact]:
    """Returns the settings in which the runs differ; '-' where a file leaves one out."""
    settings = [_flat(record.config) for record in records]
    keys = dict.fromkeys(key for setting in settings for key in setting if key != "name")
    facts = [Fact(key, [setting.get(key, "-") for setting in settings]) for key in keys]
    return [fact for fact in facts if not fact.common]


def _facts(records: Sequence[RunRecord]) -> list[Fact]:
    def about(record: RunRecord, key: str) -> str:
        value = record.about.get(key, "-")
        if isinstance(value, Mapping):
            return ", ".join(f"{plain_text(str(k))} {plain_text(str(v))}" for k, v in value.items())
        return plain_text(str(value))

    def delay(record: RunRecord) -> str:
        delays = set(record.start.delay)
        if len(delays) > 1:
            return ", ".join(map(str, record.start.delay)) + " steps"
        return _counted(delays.pop(), "step") if delays else "-"

    def rounds(record: RunRecord) -> bool:
        return record.start.method not in ("none", "data-parallel")

    found = {
        "method": [plain_text(r.start.method) for r in records],
        "workers": [str(r.start.workers) for r in records],
        "parameters": [f"{r.start.parameters:,}" for r in records],
        "vocabulary": [f"{r.start.vocabulary:,}" for r in records],
        "inner steps": [f"{r.step:,}" if r.finished else f"{r.step:,} of {r.start.steps:,}" for r in records],
        "tokens, all workers": [f"{r.tokens:,}" for r in records],
        "period": [_counted(r.start.period, "step") if rounds(r) else "-" for r in records],
        "delay": [delay(r) if rounds(r) else "-" for r in records],
        "codec": [plain_text(r.start.codec) or "-" for r in records],
        "fragments": [str(len(r.start.payload_bytes)) if rounds(r) else "-" for r in records],
        "payload of a round": [
            "-" if not r.start.payload_bytes else _span(r.start.payload_bytes, bytes_text, "") for r in records
        ],
        "outer optimizer": [_outer(r) if rounds(r) else "-" for r in records],
        **{label: [_setting(r, key) for r in records] for label, key in _SETTINGS.items()},
        "compute of an inner step, measured": [seconds_text(r.step_s) for r in records],
        "time it took here": [seconds_text(r.last.seconds) if r.last else "-" for r in records],
        **{label: [text(r) if r.on_wire else "-" for r in records] for label, text in _ON_WIRE.items()},
        "device": [plain_text(r.start.device) for r in records],
        "threads": [str(r.start.threads) for r in records],
        "resumed": [_counted(len(r.resumes), "time") if r.resumes else "never" for r in records],
        "seed": [about(r, "seed") for r in records],
        "started": [about(r, "started") for r in records],
        "command": [about(r, "command") for r in records],
        "versions": [about(r, "versions") for r in records],
        "folder": [plain_text("/".join(r.folder.resolve().parts[-2:])) for r in records],
    }
    return [Fact(label, [value.strip() for value in values]) for label, values in found.items() if {*values} != {"-"}]


_ON_WIRE: dict[str, Callable[[RunRecord], str]] = {
    "put on the wire, per worker": lambda r: bytes_text(r.per_worker("wire_sent")),
    "taken from the wire, per worker": lambda r: bytes_text(r.per_worker("wire_received")),
    "exposed wait, per worker": lambda r: seconds_text(r.per_worker("wait_s")),
    "hidden by training, per worker": lambda r: seconds_text(r.per_worker("hidden_s")),
}
_SETTINGS = {
    "inner optimizer": "train.optimizer",
    "inner learning rate": "train.lr",
    "batch, sequences per worker": "train.batch",
    "sequence, tokens": "train.sequence",
    "data": "data.source",
    "tokenizer": "data.tokenizer",
}


def _setting(record: RunRecord, key: str) -> str:
    """Returns a setting of run.toml as text; '-' where the file leaves it out."""
    value: Any = record.config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return "-" if value is None else _value(value)


def _outer(record: RunRecord) -> str:
    """Returns the outer optimizer with those of its numbers that run.toml has."""
    numbers = {"lr": "outer_lr", "momentum": "outer_momentum", "betas": "outer_betas", "eps": "outer_eps"}
    values = {"": _setting(record, "sync.outer")}
    values |= {f"{word} ": _setting(record, f"sync.{key}") for word, key in numbers.items()}
    return ", ".join(word + value for word, value in values.items() if value != "-") or "-"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


# ---------------------------------------------------------------------- faults


def _faults(record: RunRecord) -> dict[str, Any]:
    rounds = len(record.rounds)
    incomplete = sum(len(r.members) < r.expected for r in record.rounds)
    shares = []
    if rounds:
        took = [sum(w in r.members for r in record.rounds) for w in range(record.start.workers)]
        shares = [(worker, f"{100 * count / rounds:.0f} %") for worker, count in enumerate(took)]
    return {
        "name": record.name,
        "words": f"{incomplete:,} of {_counted(rounds, 'round')} {'was' if rounds == 1 else 'were'} incomplete; "
        f"{_counted(record.missed, 'payload')} did not arrive."
        if rounds
        else "",
        "shares": shares,
        "events": [(f"{f.step:,}", str(f.worker), plain_text(f.what)) for f in record.faults[:_MOST_FAULTS]],
        "more": max(len(record.faults) - _MOST_FAULTS, 0),
    }
