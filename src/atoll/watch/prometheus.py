"""Writes the newest figures of a watched run as metrics for Prometheus."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from atoll.watch.sections import State

_RUN = {
    "step": ("gauge", "Inner steps made."),
    "steps": ("gauge", "Inner steps of the whole run."),
    "tokens": ("counter", "Tokens that all workers together have trained on."),
    "tokens_per_s": ("gauge", "Tokens a second of all workers, by the newest event; the run's mean once it has ended."),
    "utilisation": ("gauge", "Share of its time in which a worker did not wait for rounds, mean over the run."),
    "left_s": ("gauge", "Seconds to the end, at the pace of the last steps."),
    "updated": ("gauge", "Unix time at which any process of the run was last heard."),
    "lr": ("gauge", "Inner learning rate."),
}
_NAMES = {
    "tokens": "tokens_total",
    "tokens_per_s": "tokens_per_second",
    "utilisation": "utilisation_ratio",
    "left_s": "left_seconds",
    "updated": "updated_timestamp_seconds",
    "lr": "learning_rate",
}
_TRAFFIC = {
    "sent_bytes": ("sent_bytes_total", "Bytes that a worker has put on the wire."),
    "received_bytes": ("received_bytes_total", "Bytes that a worker has taken from the wire."),
    "payload_bytes": ("payload_bytes_total", "Bytes of payloads that a worker has handed to its link."),
}


def metrics(sections: Mapping[str, Any]) -> str:
    """Returns the figures of some sections in Prometheus's text format; unknown ones are left out."""
    return "".join(f"{line}\n" for line in _lines(sections))


def _lines(sections: Mapping[str, Any]) -> Iterator[str]:
    run = sections.get("run") or {}
    labels = {"run": run.get("name", "")}
    for key, (kind, words) in _RUN.items():
        yield from _metric(_NAMES.get(key, key), kind, words, [(labels, run.get(key))])
    states = [({**labels, "state": state}, float(run.get("state") == state)) for state in get_args(State)]
    yield from _metric("state", "gauge", "1 for the state that the run is in, else 0.", states)
    evaluated = [row[3] for row in sections.get("loss", {}).get("anchor", []) if row[3] is not None]
    held_out = [(labels, evaluated[-1] if evaluated else None)]
    yield from _metric("held_out_loss", "gauge", "Newest held-out loss of the anchor, nats per token.", held_out)
    training = [({**labels, "worker": worker}, curve["newest"]) for worker, curve in _curves(sections).items()]
    yield from _metric("training_loss", "gauge", "Newest training loss of a worker, nats per token.", training)
    traffic = sections.get("traffic", {}).get("workers", [])
    for key, (name, words) in _TRAFFIC.items():
        yield from _metric(name, "counter", words, [({**labels, "worker": str(w["worker"])}, w[key]) for w in traffic])
    yield from _pairs(sections, labels)
    count = [(labels, sections.get("faults", {}).get("count"))]
    yield from _metric("faults_total", "counter", "What went wrong: faults, and payloads that were missed.", count)
    members = [({**labels, "worker": str(lane["worker"])}, _trains(lane)) for lane in _lanes(sections)]
    yield from _metric("worker_training", "gauge", "1 for a worker that trains, 0 for one that is away.", members)


def _pairs(sections: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[str]:
    pairs = sections.get("traffic", {}).get("pairs", [])
    named = [({**labels, "worker": str(pair["from"]), "to": str(pair["to"])}, pair) for pair in pairs]
    sent = [(label, pair["sent_bytes"]) for label, pair in named]
    yield from _metric("line_sent_bytes_total", "counter", "Bytes that a worker has sent to another.", sent)
    speeds = [(label, pair["capacity"]) for label, pair in named]
    words = "Measured speed of the line to another worker."
    yield from _metric("line_capacity_bytes_per_second", "gauge", words, speeds)


def _curves(sections: Mapping[str, Any]) -> Mapping[str, Any]:
    return sections.get("loss", {}).get("workers", {})  # type: ignore[no-any-return]


def _lanes(sections: Mapping[str, Any]) -> list[Any]:
    return sections.get("lanes", {}).get("workers", [])  # type: ignore[no-any-return]


def _trains(lane: Mapping[str, Any]) -> float:
    return float(bool(lane["spans"]) and lane["spans"][-1][2] == "training")


def _metric(
    name: str, kind: str, words: str, values: Sequence[tuple[Mapping[str, str], float | None]]
) -> Iterator[str]:
    known = [(labels, value) for labels, value in values if value is not None]
    if not known:
        return
    yield f"# HELP atoll_{name} {words}"
    yield f"# TYPE atoll_{name} {kind}"
    for labels, value in known:
        named = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"atoll_{name}{{{named}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
