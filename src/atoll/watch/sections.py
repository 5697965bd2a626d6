"""Defines the content of the page as plain JSON: the one contract between server, page and frozen report.

Times ending in `_s` are seconds since the run began, the same clock for all workers. A number that is not known is
None. Every text is plain text: a page shows it as it is.
"""

from typing import Any, Final, Literal, TypedDict

State = Literal[
    "reading",
    "waiting to begin",
    "training",
    "waiting for a round",
    "stalled",
    "paused",
    "finished",
    "interrupted",
    "failed",
    "silent",
]
ENDED: Final[frozenset[State]] = frozenset(("finished", "interrupted", "failed"))
"""The states of a run that has ended."""
Row = list[Any]
"""A row of numbers and texts, whose meaning the field says."""


class RunSection(TypedDict):
    """Says what the run is, and how it is doing."""

    name: str
    method: str
    workers: int
    steps: int
    """Inner steps of the whole run."""
    parameters: int
    period: int
    delay: list[int]
    """Per worker."""
    codec: str
    device: str
    state: State
    state_words: str
    """One or two sentences."""
    since: float | None
    """Unix time since which it is in this state, where that is known."""
    step: int
    tokens: int
    """Of all workers."""
    seconds: float | None
    """The time of the newest event."""
    left_s: float | None
    """From `updated` to the end."""
    ends_at: float | None
    """Unix time."""
    tokens_per_s: float | None
    """Of all workers, by the newest event; the mean over the run once it has ended."""
    utilisation: float | None
    """The share of its time, 0 to 1, in which a worker did not wait; mean over workers and the whole run."""
    lr: float | None
    updated: float | None
    """Unix time at which any process was last heard."""
    read: float
    """The share of the files, 0 to 1, that was read."""


class Curve(TypedDict):
    """Holds a thinned curve: every point stands for neighbouring ones."""

    mean: list[float | None]
    low: list[float | None]
    high: list[float | None]


class LossCurve(Curve):
    """Holds the training loss of a worker, nats per token."""

    step: list[float]
    tokens: list[float]
    seconds: list[float]
    newest: float | None
    """At the newest step event."""


class LossSection(TypedDict):
    """Holds losses: held-out ones of the anchor, and those of each worker in training."""

    anchor: list[Row]
    """[step, tokens, seconds, loss, anchor_step, best], by step."""
    workers: dict[str, LossCurve]


class SpeedSection(TypedDict):
    """Holds the speed over time, of all workers together."""

    step: list[float]
    seconds: list[float]
    tokens_per_s: list[float | None]
    utilisation: list[float | None]
    lr: list[float | None]


class LaneOfWorker(TypedDict):
    """Says when a worker took part, over the whole run."""

    worker: int
    spans: list[Row]
    """[begin_s, end_s, "training" | "catching up" | "away" | "paused" | "gone"], in order, none over another."""
    marks: list[Row]
    """[time_s, "joined" | "left" | "lost" | "resumed", words], in order."""
    from_s: float
    """When the first bucket begins."""
    bucket_s: float
    """Seconds of a bucket."""
    waiting: list[float]
    """The share of the time of each bucket in which the worker waited, 0 to 1."""
    flying: list[float]
    """Rounds that were on their way in each bucket, mean."""


class LanesSection(TypedDict):
    """Holds a lane per worker over the whole run."""

    end_s: float
    workers: list[LaneOfWorker]
    views: list[Row]
    """[time_s, number] of the views of an elastic run."""


class WindowOfWorker(TypedDict):
    """Says what a worker did in a window of time."""

    worker: int
    waits: list[Row]
    """[begin_s, end_s]."""
    flights: list[Row]
    """[begin_s, end_s, step, fragment, row]; rounds in one row are never over another. -1: several rounds as one."""
    on_their_way: list[Row]
    """[step, fragment, since_s] of rounds that were sent and are not applied yet."""


class WindowSection(TypedDict):
    """Holds what the workers did in a window of time: `now` is the last minute."""

    from_s: float
    to_s: float
    workers: list[WindowOfWorker]


# "from" is a keyword, so the fields are a dict here.
Pair = TypedDict(
    "Pair",
    {"from": int, "to": int, "sent_bytes": int, "rate": float | None, "capacity": float | None, "at_s": float},
)
"""Says what one worker has sent to another: bytes so far, bytes per second now, and those that the line can carry."""


class TrafficOfWorker(TypedDict):
    """Says what a worker has sent and received."""

    worker: int
    sent_bytes: int
    """On the wire; inside one process what an emulated line carries, or 0."""
    received_bytes: int
    rate: float | None
    """Bytes per second sent on the wire now."""
    payload_bytes: int
    """Handed to the link, each payload once."""


class Planned(TypedDict):
    """Says what the planner foretells of the run."""

    words: str
    bytes_per_s: float | None
    """On the wire of each worker, mean."""
    utilisation: float | None


class TrafficSection(TypedDict):
    """Holds the bytes between workers."""

    pairs: list[Pair]
    """Empty if the run does not tell."""
    workers: list[TrafficOfWorker]
    planned: Planned | None
    data_parallel_bytes: int
    """Payload bytes that one worker of a data-parallel run would have sent by now: a gradient of fp32 on each step."""


class OuterSection(TypedDict):
    """Holds the outer gradients: norm of the mean delta of each round, and the cosine between workers' deltas."""

    fragments: int
    step: list[float]
    norm: Curve
    cosine: Curve


class Fault(TypedDict):
    """Says what went wrong."""

    at_s: float | None
    step: int
    worker: int | None
    kind: Literal["dropped", "left out", "guarded", "rolled back", "lost", "fault"]
    words: str


class FaultsSection(TypedDict):
    """Lists what went wrong, the newest first."""

    count: int
    latest: list[Fault]


class Sample(TypedDict):
    """Holds a text that the outer parameters wrote at an evaluation."""

    step: int
    prompt: str
    """The beginning of the held-out text."""
    text: str
    """How the model continues it."""


class Sections(TypedDict):
    """Holds all that the page shows."""

    run: RunSection
    loss: LossSection
    speed: SpeedSection
    lanes: LanesSection
    now: WindowSection
    traffic: TrafficSection
    outer: OuterSection
    faults: FaultsSection
    samples: list[Sample]
    """The newest first."""
    settings: list[list[str]]
    """[key, value]."""
    scores: list[list[str]]
    """[task, documents, accuracy, chance]."""
