"""Lists facts about runs side by side: settings in which they differ, what they are, and what failed."""

from collections.abc import Sequence

from atoll._util.units import bytes_text, seconds_text
from atoll.report.load import plain_text
from atoll.report.record import RunRecord
from atoll.report.settings_text import flat_settings, value_text
from atoll.report.words import span_text

Facts = dict[str, list[str]]
"""Lines of a table by label, each with one text per run."""
_SETTINGS = {
    "inner optimizer": "train.optimizer",
    "inner learning rate": "train.lr",
    "batch, sequences per worker": "train.batch",
    "sequence, tokens": "train.sequence",
    "data": "data.source",
    "tokenizer": "data.tokenizer",
}
_MOST_SHARES = 64  # workers whose share is told


def differences(records: Sequence[RunRecord]) -> Facts:
    """Returns the settings in which the runs differ; '-' where a file leaves one out."""
    settings = [flat_settings(record.config) for record in records]
    keys = dict.fromkeys(key for setting in settings for key in setting if key != "name")
    found = {key: [setting.get(key, "-") for setting in settings] for key in keys}
    return {key: values for key, values in found.items() if len(set(values)) > 1}


def facts(records: Sequence[RunRecord]) -> Facts:
    """Returns what is known of each run; lines that no run has are left out."""
    each = [_facts_of(record) for record in records]
    found = {label: [facts[label].strip() or "-" for facts in each] for label in each[0]}
    return {label: values for label, values in found.items() if {*values} != {"-"}}


def failures(records: Sequence[RunRecord]) -> Facts:
    """Returns which rounds were incomplete, and how often each worker's payload arrived; empty if nothing failed."""
    if not any(record.missed or record.faults for record in records):
        return {}
    each = [_failures_of(record) for record in records]
    return {label: [lines[label] for lines in each] for label in each[0]}


def _failures_of(record: RunRecord) -> dict[str, str]:
    rounds = record.rounds
    took = [sum(worker in r.members for r in rounds) for worker in range(record.start.workers)]
    shares = [f"worker {worker} {100 * count / len(rounds):.0f} %" for worker, count in enumerate(took) if rounds]
    more = f" and {len(shares) - _MOST_SHARES:,} more" if len(shares) > _MOST_SHARES else ""
    return {
        "rounds": f"{len(rounds):,}",
        "incomplete rounds": f"{sum(len(r.members) < r.expected for r in rounds):,}",
        "payloads that did not arrive": f"{record.missed:,}",
        "share of rounds that a worker's payload reached": ", ".join(shares[:_MOST_SHARES]) + more or "-",
        "faults": f"{len(record.faults):,}",
    }


def counted(count: int, what: str) -> str:
    """Returns a count with its noun, in the plural where it has to be."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def _members_at_end(record: RunRecord) -> str:
    newest = record.newest_view
    return "-" if newest is None else f"{len(newest.members)} of {record.start.workers}"


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
        "workers that trained at the end": _members_at_end(r),
        "parameters": f"{start.parameters:,}",
        "vocabulary": f"{start.vocabulary:,}",
        "inner steps": f"{r.step:,}" if r.finished else f"{r.step:,} of {start.steps:,}",
        "tokens, all workers": f"{r.tokens:,}",
        "period": counted(start.period, "step") if rounds else "-",
        "delay": delay if rounds and start.delay else "-",
        "codec": plain_text(start.codec),
        "fragments": str(len(start.payload_bytes)) if rounds else "-",
        "payload of a round": span_text(start.payload_bytes, bytes_text) if start.payload_bytes else "-",
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
