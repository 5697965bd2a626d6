"""Compares runs in a table: loss, bytes and time of each, for the terminal and for the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from atoll._util.units import bytes_text, loss_text, number_text, percent_text, ratio_text, seconds_text, share_text
from atoll.errors import printable
from atoll.plan.line import Line
from atoll.plan.method import Job
from atoll.plan.simulate import RunTime, time_of
from atoll.report.record import RunRecord, jobs

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Compares one run with the reference; None where there is no number."""

    record: RunRecord
    is_reference: bool
    """The run that the others are compared with: the first data-parallel one, else the first."""
    against: float | None
    """Loss, relative to the reference: 0.05 is 5 % above."""
    perplexity: float | None
    sent_bytes: float
    """Payload bytes that one worker handed to its link, mean over the workers; each payload counts once."""
    fewer: float | None
    """The reference's bytes over this run's: 80 is 80 times fewer."""
    job: Job
    """The run as the planner models it, with the compute time of `jobs`."""
    link_time: RunTime
    """Modelled: the job with one machine per worker on the given link."""
    wait_s: float | None
    """Measured: seconds that a worker only waited for rounds, mean; None where no payload left its process."""
    utilisation: float | None
    """Measured: the share of its time that a worker did not wait, mean."""

    @property
    def name(self) -> str:
        """The name of the run."""
        return self.record.name

    @property
    def loss(self) -> float | None:
        """The last held-out loss, nats per token."""
        return self.record.loss


def summary(records: Sequence[RunRecord], link: Line) -> list[Row]:
    """Returns one row per run, in the order given."""
    if not records:
        return []
    reference = next((r for r in records if r.gradients), records[0])
    return [_row(record, reference, job, link) for record, job in zip(records, jobs(records), strict=True)]


def _row(record: RunRecord, reference: RunRecord, job: Job, link: Line) -> Row:
    loss, base = record.loss, reference.loss
    sent, compared = record.per_worker("bytes_sent"), reference.per_worker("bytes_sent")
    return Row(
        record=record,
        is_reference=record is reference,
        against=loss / base - 1 if loss is not None and base else None,
        perplexity=math.exp(loss) if loss is not None and loss < 700 else None,
        sent_bytes=sent,
        fewer=compared / sent if sent and compared else None,
        job=job,
        link_time=time_of(job, link),
        wait_s=record.per_worker("wait_s") if record.on_wire else None,
        utilisation=record.utilisation if record.on_wire else None,
    )


def bytes_sent(rows: Sequence[Row]) -> list[tuple[int | None, str, float, str]]:
    """Returns the place, name and payload bytes of a worker of each run, with words.

    Without a data-parallel run, one that never was comes last, without a place: a gradient of fp32 on each step.
    """
    found: list[tuple[int | None, str, float, str]] = []
    for n, row in enumerate(rows):
        compared = "" if row.fewer is None or row.is_reference else f", {ratio_text(row.fewer)}"
        found.append(
            (
                n,
                row.name,
                row.sent_bytes,
                f"{bytes_text(row.sent_bytes)}{compared}" if row.sent_bytes else "sends nothing",
            )
        )
    would = max((row.record.data_parallel_bytes for row in rows), default=0)
    if would and not any(row.record.gradients for row in rows):
        found.append((None, "data-parallel", would, f"would have sent {bytes_text(would)}"))
    return found


# ---------------------------------------------------------------------- as text


@dataclass(frozen=True, slots=True)
class Column:
    """Describes one column of the table, as text."""

    label: str
    short: str | None
    """The label in a terminal of 80 characters; None: not shown there."""
    cell: Callable[[Row], str]


def columns(rows: Sequence[Row], link: Line) -> list[Column]:
    """Returns the columns after the run's name; comparisons only if there are several runs."""
    several = len(rows) > 1
    measured = any(row.wait_s is not None for row in rows)
    found = [
        Column("held-out loss", "loss", lambda row: loss_text(row.loss)),
        Column("loss against reference", "against", lambda row: percent_text(row.against)) if several else None,
        Column("perplexity", None if measured else "ppl", lambda row: number_text(row.perplexity, 2)),
        Column("sent per worker", "sent", lambda row: bytes_text(row.sent_bytes)),
        Column("bytes against reference", "bytes", _fewer) if several else None,
        Column("tokens/s here", "tok/s", lambda row: number_text(row.record.tokens_per_s, 0)),
        Column("waited here", None, _waited) if measured else None,
        Column("computing here", "busy", _computing) if measured else None,
        Column(f"time at {link}", f"time at\n{link}", lambda row: seconds_text(row.link_time.total_s)),
        None if measured else Column("computing", None, lambda row: share_text(row.link_time.utilisation)),
    ]
    return [column for column in found if column]


def notes(row: Row) -> str:
    """Returns how many payloads and workers failed, and how far an unfinished run got."""
    run, faults = row.record, len(row.record.faults)
    found = [
        f"{run.missed:,} missed" if run.missed else "",
        f"{faults:,} {'fault' if faults == 1 else 'faults'}" if faults else "",
        "" if run.finished else f"{100 * run.step / max(run.start.steps, 1):.0f} % done",
    ]
    return ", ".join(note for note in found if note)


def _waited(row: Row) -> str:
    return "-" if row.wait_s is None else seconds_text(row.wait_s)


def _computing(row: Row) -> str:
    return "-" if row.utilisation is None else share_text(row.utilisation)


def _fewer(row: Row) -> str:
    return "1x" if row.is_reference else ratio_text(row.fewer)


def rich_table(rows: Sequence[Row], link: Line) -> "Table":
    """Returns the rows as a table for a terminal of 80 characters or more."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    reference = next((row.name for row in rows if row.is_reference), "")
    lines = [f"against: {printable(reference)}"] if len(rows) > 1 else []
    if any(row.utilisation is not None for row in rows):
        lines.append("busy: measured, the share of its time that a worker did not wait for rounds")
    lines.append(f"time: modelled, one machine per worker and {link} for each")
    if len(rows) > 1:
        lines.append("compute of a step: the quickest of the runs' own (same size and machine)")
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        caption=Text("\n".join(lines)),
        caption_justify="left",
    )
    table.add_column("run", overflow="fold")
    shown = [column for column in columns(rows, link) if column.short is not None]
    for column in shown:
        table.add_column(column.short or "", justify="right", no_wrap=True)
    for row in rows:  # Text, not str: a name must not be read as markup
        name = Text(printable(row.name), style="bold" if row.is_reference else "")
        if said := notes(row):
            name.append(f"\n{said}", style="not bold dim")
        table.add_row(name, *(column.cell(row) for column in shown))
    return table
