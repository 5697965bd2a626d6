"""Says in sentences what runs are, how they compare, and what a reader must know before comparing them."""

import math
import re
from collections.abc import Callable, Iterator, Sequence

from atoll._util.units import bytes_text, count_words, loss_text, percent_text, ratio_text, seconds_text, share_text
from atoll.plan.line import Line
from atoll.report.record import RunRecord
from atoll.report.table import Row

LONGEST_NAME = 48
"""Characters of a run's name in a sentence."""
_MOST_SENTENCES = 4  # runs with a sentence each
_GAP = re.compile(r"(?<=\d) (?=(?:[kMGTP]?B|[kMGT]?bit/s|m?s|min|h|days|years|%)\b|%)")  # between a number and its unit


def lead(rows: Sequence[Row], link: Line) -> str:
    """Returns what the runs are, and how each of few, or the best of many, compares with the reference."""
    records = [row.record for row in rows]
    several = len(rows) > 1
    workers = span_text([r.start.workers for r in records], str)
    parameters = span_text([r.start.parameters for r in records], count_words)
    tokens = span_text([r.tokens for r in records], count_words)
    of = f"{f'{len(rows)} runs' if several else 'One run'} of a model with {parameters} parameters"
    found = [f"{of}: {workers} {'worker' if workers == '1' else 'workers'}, {tokens} tokens."]
    found += [_ending(row, link, several) for row in rows if row.is_reference]
    for n, (row, best) in enumerate(_told([row for row in rows if not row.is_reference])):
        first = "The" if n else "Among the others the"
        found.append((f"{first} {' and the '.join(best)}: " if best else "") + _compared(row))
    return _GAP.sub("\u00a0", " ".join(found))


def shorten(name: str, most: int) -> str:
    """Returns a name of at most this many characters."""
    return name if len(name) <= most else f"{name[: most - 3].rstrip()}..."


def span_text(values: Sequence[int], text: Callable[[int], str]) -> str:
    """Returns the least and the greatest of some numbers as text, once if they read the same."""
    low, high = text(min(values)), text(max(values))
    return low if low == high else f"{low} to {high}"


def _ending(row: Row, link: Line, several: bool) -> str:
    name = shorten(row.name, LONGEST_NAME)
    begun = f"has come to step {row.record.step} of {row.record.start.steps} and"
    ends = "ends at" if row.record.finished else begun
    loss = "no held-out loss" if row.loss is None else f"a held-out loss of {loss_text(row.loss)}"
    perplexity = "" if row.perplexity is None else f" (perplexity {row.perplexity:,.2f})"
    sends = f"sends {bytes_text(row.sent_bytes)} per worker" if row.sent_bytes else "sends nothing"
    share = row.link_time.utilisation
    computing = "" if share == 1 else f", computing for {share_text(share)} of it"
    time = f"With one machine per worker and {link} for each it would take {seconds_text(row.link_time.total_s)}"
    whose = f"The reference, {name}," if several else name
    return f"{whose} {ends} {loss}{perplexity} and {sends}. {time}{computing}."


def _compared(row: Row) -> str:
    loss = " has no held-out loss yet"
    if row.loss is not None:
        loss = f" {'ends' if row.record.finished else 'is'} at {loss_text(row.loss)}"
        loss += "" if row.against is None else f" ({percent_text(row.against)})"
    sends = " sends nothing"
    if row.sent_bytes:
        ratio = "the same" if row.fewer is None else ratio_text(row.fewer)
        sends = f" with {bytes_text(row.sent_bytes)}" + ("" if ratio == "the same" else f", {ratio}")
    return f"{shorten(row.name, LONGEST_NAME)}{loss}{sends}, and would take {seconds_text(row.link_time.total_s)}."


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


def warnings_of(records: Sequence[RunRecord]) -> Iterator[str]:
    """Yields what a reader must know before comparing."""
    for r in records:
        if not r.finished:
            yield (
                f"{shorten(r.name, LONGEST_NAME)} is not finished: it is at step {r.step} of {r.start.steps}, "
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
            lack = f"{which} of {shorten(r.name, LONGEST_NAME)} left no numbers here (the folder is elsewhere)"
            yield f"{lack}: bytes, waits and training losses are those of the others."
    if any(r.last and r.start.workers > 1 and any(s.participants < len(r.workers) for s in r.steps) for r in records):
        yield "Workers were away in some runs; modelled times assume that all are there all the time."


def explained(rows: Sequence[Row], link: Line) -> str:
    """Returns what the numbers of the table mean."""
    measured = any(row.utilisation is not None for row in rows)
    quickest = "the quickest of the runs' own, among those of the same model size, tokens per step, device and threads"
    compute = "the compute time of an inner step as measured here" + (f": {quickest}" if len(rows) > 1 else "")
    modelled = "Time is" if measured else "Time and the share of it spent computing are"
    found = [
        "Held-out loss is in nats per token, of the outer parameters. Bytes are payloads, each counted once.",
        "On the link a worker sends each payload M-1 times up to three workers, beyond 2(M-1)/M payloads (M: workers).",
        f"{modelled} modelled: one machine per worker, {link} for each, and {compute}.",
    ]
    if measured:
        waits = "how long a worker did nothing but wait for rounds, and the share of its time that this left"
        found.append(f"Waited and computing here are measured: {waits}; the mean over the workers.")
    return _GAP.sub("\u00a0", " ".join(found))
