"""Writes runs as one HTML page of words, table, pictures and settings, without scripts or network."""

import math
import re
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from atoll._util.units import bytes_text, count_words, loss_text, percent_text, ratio_text, seconds_text, share_text
from atoll.plan.line import Line
from atoll.report.canvas import DARK, LIGHT, Draw, css_variables, shorten, to_svg
from atoll.report.load import plain_text
from atoll.report.members import MOST_SEATS
from atoll.report.record import RunRecord
from atoll.report.settings_text import flat_settings, value_text
from atoll.report.table import Row, columns, notes
from atoll.report.tasks import scores_by_task
from atoll.report.timeline import MOST_WORKERS

_MOST_FAULTS = 40  # listed one by one; the rest is counted
_MOST_SENTENCES = 4  # runs with a sentence each
_LONGEST_NAME = 48  # in a sentence
_GAP = re.compile(r"(?<=\d) (?=(?:[kMGTP]?B|[kMGT]?bit/s|m?s|min|h|days|years|%)\b|%)")  # between a number and its unit

Facts = dict[str, list[str]]
"""Lines of a table by label, each with one text per run."""


def page(
    rows: Sequence[Row], drawn: Mapping[str, Draw], link: Line, title: str = "", claims: Sequence[str] = ()
) -> str:
    """Returns the page as text; an empty title becomes one that says how many runs."""
    environment = Environment(
        loader=PackageLoader("atoll", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (bytes_text, loss_text, percent_text, plain_text, ratio_text, seconds_text, share_text, shorten)
    environment.filters |= {function.__name__: function for function in (*filters, counted, data_url, spaced)}
    records = [row.record for row in rows]
    return environment.get_template("page.html.j2").render(
        title=plain_text(title) or (f"Run {rows[0].name}" if len(rows) == 1 else f"{len(rows)} runs compared"),
        claims=claims,
        light=Markup(css_variables(LIGHT)),
        dark=Markup(css_variables(DARK)),
        colours=len(LIGHT.series),
        longest_name=_LONGEST_NAME,
        most_workers=MOST_WORKERS,
        most_seats=MOST_SEATS,
        members_at_end=_members_at_end,
        most_faults=_MOST_FAULTS,
        rows=rows,
        reference=next(row for row in rows if row.is_reference),
        told=_told([row for row in rows if not row.is_reference]),
        parameters=_span([r.start.parameters for r in records], count_words),
        workers=_span([r.start.workers for r in records], str),
        tokens=_span([r.tokens for r in records], count_words),
        notes=list(_notes(records)),
        notes_of=notes,
        columns=columns(rows, link),
        measured=any(row.utilisation is not None for row in rows),
        pictures=drawn,
        differences=_differences(records),
        facts=_facts(records),
        tasks=scores_by_task(records),
        faults=[_faults(record) for record in records if record.missed or record.faults],
        link=link,
    )


def data_url(draw: Draw, *, narrow: bool = False, dark: bool = False) -> str:
    """Returns a picture as a data URL."""
    svg = to_svg(draw, replace(DARK if dark else LIGHT, narrow=narrow))
    return f"data:image/svg+xml;base64,{b64encode(svg).decode()}"


def counted(count: int, what: str) -> str:
    """Returns a count with its noun, in the plural where it has to be."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def spaced(text: str) -> Markup:
    """Returns HTML in which no line breaks between a number and its unit."""
    return Markup(_GAP.sub("&nbsp;", text))


def _span(values: Sequence[int], text: Callable[[int], str]) -> str:
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


# ---------------------------------------------------------------------- words


def _told(others: Sequence[Row]) -> list[tuple[Row, list[str]]]:
    """Returns the runs to compare with the reference: each of few, else the best and what they are best at."""
    if len(others) <= _MOST_SENTENCES:
        return [(row, []) for row in others]
    finished = [row for row in others if row.record.finished]
    best: dict[str, tuple[Row, list[str]]] = {}
    keys: dict[str, Callable[[Row], float]] = {
        "lowest loss": lambda row: math.inf if row.loss is None else row.loss,
        "fewest bytes": lambda row: row.sent_bytes,
        "shortest time": lambda row: row.link_time.total_s,
    }
    for what, key in keys.items():
        if finished:
            row = min(finished, key=key)
            best.setdefault(row.name, (row, []))[1].append(what)
    return list(best.values())


def _notes(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields what a reader must know before comparing."""
    for r in records:
        if not r.finished:
            yield (
                f"{shorten(r.name, _LONGEST_NAME)} is not finished: it is at step {r.step} of {r.start.steps}, "
                "and its numbers are those so far."
            )
    finished = [r.tokens for r in records if r.finished]
    if finished and max(finished) > 1.01 * min(finished):
        yield "The runs have not trained on the same number of tokens: compare losses with care."
    if len({r.start.vocabulary for r in records}) > 1:
        yield "The runs have different vocabularies: their losses per token cannot be compared."
    if len({r.start.workers for r in records}) > 1:
        yield "The runs have different numbers of workers: bytes are per worker, tokens are of all together."
    for r in records:
        if missing := [w for w in range(r.start.workers) if w not in r.workers]:
            which = ("Worker " if len(missing) == 1 else "Workers ") + shorten(", ".join(map(str, missing)), 60)
            lack = f"{which} of {shorten(r.name, _LONGEST_NAME)} left no numbers here (the folder is elsewhere)"
            yield f"{lack}: bytes, waits and training losses are those of the others."
    if any(r.last and r.start.workers > 1 and any(s.participants < len(r.workers) for s in r.steps) for r in records):
        yield "Workers were away in some runs; modelled times assume that all are there all the time."


def _members_at_end(record: RunRecord) -> str:
    newest = max(record.views, key=lambda view: view.view, default=None)
    return "not elastic" if newest is None else f"{len(newest.members)} of {record.start.workers}"


def _faults(record: RunRecord) -> dict[str, Any]:
    rounds = record.rounds
    took = [sum(worker in r.members for r in rounds) for worker in range(record.start.workers)]
    return {
        "record": record,
        "incomplete": sum(len(r.members) < r.expected for r in rounds),
        "shares": [f"worker {worker} {100 * count / len(rounds):.0f} %" for worker, count in enumerate(took) if rounds],
    }


# ---------------------------------------------------------------------- settings


def _differences(records: Sequence[RunRecord]) -> Facts:
    """Returns the settings in which the runs differ; '-' where a file leaves one out."""
    settings = [flat_settings(record.config) for record in records]
    keys = dict.fromkeys(key for setting in settings for key in setting if key != "name")
    found = {key: [setting.get(key, "-") for setting in settings] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def _facts(records: Sequence[RunRecord]) -> Facts:
    each = [_facts_of(record) for record in records]
    found = {label: [facts[label].strip() or "-" for facts in each] for label in each[0]}
    return {label: values for label, values in found.items() if {*values} != {"-"}}


_SETTINGS = {
    "inner optimizer": "train.optimizer",
    "inner learning rate": "train.lr",
    "batch, sequences per worker": "train.batch",
    "sequence, tokens": "train.sequence",
    "data": "data.source",
    "tokenizer": "data.tokenizer",
}


def _facts_of(r: RunRecord) -> dict[str, str]:
    """Returns the facts about one run; '-' where there is none."""
    start, settings = r.start, flat_settings(r.config)
    rounds = start.method not in ("none", "data-parallel")
    delay = counted(start.delay[0], "step") if len({*start.delay}) == 1 else f"{value_text(start.delay)[1:-1]} steps"
    numbers = {word: settings.get(f"sync.outer_{word}") for word in ("lr", "momentum", "betas", "eps")}
    outer = [settings.get("sync.outer"), *(f"{word} {value}" for word, value in numbers.items() if value)]
    return {
        "method": plain_text(start.method),
        "workers": str(start.workers),
        "parameters": f"{start.parameters:,}",
        "vocabulary": f"{start.vocabulary:,}",
        "inner steps": f"{r.step:,}" if r.finished else f"{r.step:,} of {start.steps:,}",
        "tokens, all workers": f"{r.tokens:,}",
        "period": counted(start.period, "step") if rounds else "-",
        "delay": delay if rounds and start.delay else "-",
        "codec": plain_text(start.codec),
        "fragments": str(len(start.payload_bytes)) if rounds else "-",
        "payload of a round": _span(start.payload_bytes, bytes_text) if start.payload_bytes else "-",
        "outer optimizer": ", ".join(filter(None, outer)) if rounds else "-",
        **{label: settings.get(key, "-") for label, key in _SETTINGS.items()},
        "compute of an inner step, measured": seconds_text(r.step_s),
        "time it took here": seconds_text(r.last.seconds) if r.last else "-",
        "put on the wire, per worker": bytes_text(r.per_worker("wire_sent")) if r.on_wire else "-",
        "taken from the wire, per worker": bytes_text(r.per_worker("wire_received")) if r.on_wire else "-",
        "exposed wait, per worker": seconds_text(r.per_worker("wait_s")) if r.on_wire else "-",
        "hidden by training, per worker": seconds_text(r.per_worker("hidden_s")) if r.on_wire else "-",
        "device": plain_text(start.device),
        "threads": str(start.threads),
        "resumed": counted(len(r.resumes), "time") if r.resumes else "never",
        **{key: value_text(r.about.get(key, "-")) for key in ("seed", "started", "command", "versions")},
        "folder": plain_text("/".join(r.folder.resolve().parts[-2:])),
    }
