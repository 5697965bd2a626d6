"""Defines the content of a frozen page of one run or several as plain JSON: sections, and what compares the runs.

Every text is plain text, and every place of a run is its place in `runs`.
"""

from typing import TypedDict

from atoll.watch.sections import Row, Sections


class Table(TypedDict):
    """Holds a table of texts; the first cell of a row is its heading."""

    title: str
    words: str
    """What the table shows, or how its numbers were taken; may be empty."""
    columns: list[str]
    rows: list[list[str]]


class Summary(TypedDict):
    """Holds the numbers of the runs, a row for each."""

    columns: list[str]
    rows: list[list[str]]
    tags: list[str]
    """What is to be said of each run: "reference", or how far it got."""
    words: str
    """What the numbers mean."""


class Sent(TypedDict):
    """Says how many payload bytes one worker has sent."""

    name: str
    run: int | None
    """Its place; None for the data-parallel run that never was."""
    sent_bytes: float
    words: str


class ModelledLane(TypedDict):
    """Says how workers of a run would begin on the given link, one machine for each."""

    run: int
    workers: list[int]
    """Those that behave alike; empty: all."""
    end_s: float
    """When the run would end."""
    utilisation: float
    """The share of the whole run's time, 0 to 1, spent computing."""
    waits: list[Row]
    """[begin_s, end_s]."""
    busy: list[Row]
    """[begin_s, end_s] of what its link carries."""


class Clock(TypedDict):
    """Says when a run would have made its steps."""

    step: list[float]
    seconds: list[float]


class Modelled(TypedDict):
    """Holds the times that the runs would take on the given link."""

    link: str
    words: str
    window_s: float
    """Seconds that the lanes show."""
    lanes: list[ModelledLane]
    clocks: list[Clock]
    """For each run, the times of all steps of its losses."""


class Report(TypedDict):
    """Holds all that a frozen page shows."""

    title: str
    lead: str
    """Some sentences that sum the runs up."""
    claims: list[str]
    notes: list[str]
    """What a reader must know before comparing."""
    summary: Summary
    sent: list[Sent]
    modelled: Modelled | None
    tables: list[Table]
    runs: list[Sections]
    """`now` of a run has its waits and rounds one by one as far back as there is room for, up to the whole run."""
