"""Writes the page about finished and running runs: the same page as the live one, frozen into one file."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from atoll._util.disk import write_atomically
from atoll.plan.line import Line
from atoll.report import RunRecord, load_all, png_files, summary
from atoll.report.facts import Facts, differences, facts, failures
from atoll.report.lanes import Span, clock, modelled_lanes
from atoll.report.load import plain_text
from atoll.report.table import Row, bytes_sent, columns, notes
from atoll.report.tasks import scores_by_task
from atoll.report.words import explained, lead, warnings_of
from atoll.watch.compose import compose
from atoll.watch.folders import Folders
from atoll.watch.frozen import frozen_page
from atoll.watch.lane_times import window_section
from atoll.watch.live_run import LiveRun, read_run
from atoll.watch.report_content import Clock, Modelled, ModelledLane, Report, Sent, Summary, Table
from atoll.watch.sections import Sections, WindowSection
from atoll.watch.thinning import join_near

MOST_DETAIL: Final = 16_000
"""Waits and rounds of all runs of a page that are told one by one: about half a megabyte."""
_LEAST_DETAIL = 400  # of each run
_MOST_MODELLED = 400  # waits of a modelled lane
_MODELLED_WORDS = (
    "How each run would begin with one machine per worker: the thick bar is a worker's processor, pale while it waits, "
    "the thin one below it its link. The share is over the whole run."
)
_TASK_WORDS = (
    "By atoll eval, with lm-evaluation-harness, in percent, with the standard error over the task's documents; the "
    "newest score of each task. Chance is the accuracy of random guesses."
)


def write(
    runs: Sequence[Path],
    out: Path,
    *,
    link: Line,
    png: Path | None = None,
    title: str = "",
    claims: Sequence[str] = (),
) -> list[Path]:
    """Writes the page about runs, each file whole or not at all.

    Args:
        runs: folders of runs; a folder that is no run but holds runs stands for those.
        out: the page, or a folder that gets a report.html.
        link: the line of each worker in modelled times.
        png: a folder for the pictures as PNG; None for none.
        title: heading of the page as plain text; empty: one that says how many runs.
        claims: sentences to list after the summary, as plain text.

    Returns:
        The paths of all files written.
    """
    out = Path(out)
    rows = summary(load_all(runs), link)
    content = report_content(rows, link, title, claims)
    files = {out / "report.html" if out.is_dir() else out: frozen_page(content, content["title"]).encode()}
    if png is not None:
        files |= {Path(png) / name: picture for name, picture in png_files(rows, link).items()}
    for path, written in files.items():
        write_atomically(path, written)
    return list(files)


def report_content(rows: Sequence[Row], link: Line, title: str = "", claims: Sequence[str] = ()) -> Report:
    """Returns all that the page of these runs shows; an empty title becomes one that says how many runs."""
    records = [row.record for row in rows]
    runs = [sections_of(record, max(MOST_DETAIL // len(rows), _LEAST_DETAIL)) for record in records]
    named = f"Run {rows[0].name}" if len(rows) == 1 else f"{len(rows)} runs compared"
    return {
        "title": plain_text(title) or named,
        "lead": lead(rows, link),
        "claims": [plain_text(claim) for claim in claims],
        "notes": list(warnings_of(records)),
        "summary": _summary(rows, link),
        "sent": _sent(rows),
        "modelled": _modelled(rows, runs, link) if any(row.job.steps for row in rows) else None,
        "tables": _tables(records),
        "runs": runs,
    }


# ---------------------------------------------------------------------- each run


def sections_of(record: RunRecord, most: int) -> Sections:
    """Returns the sections of a run as its folder has them now, with at most `most` single waits and rounds."""
    run = read_run(Folders([record.folder]))
    sections = compose(run, 1.0, time.time())
    sections["run"]["name"] = record.name
    sections["now"] = _detail(run, most)
    return sections


def _detail(run: LiveRun, most: int) -> WindowSection:
    """Returns waits and rounds one by one, of the whole run or of its last half, quarter and so on."""
    window = Span(0.0, run.newest_s)
    found = window_section(run, window, unseen=0.0)
    while _is_too_much(found, most):
        window = Span((window.begin_s + window.end_s) / 2, window.end_s)
        if window.begin_s >= window.end_s:
            break
        found = window_section(run, window, unseen=0.0)
    return found


def _is_too_much(section: WindowSection, most: int) -> bool:
    """Returns whether there are too many waits and rounds, or some of them were joined."""
    flights = [flight for worker in section["workers"] for flight in worker["flights"]]
    waits = sum(len(worker["waits"]) for worker in section["workers"])
    return len(flights) + waits > most or any(step < 0 for _, _, step, *_ in flights)


# ---------------------------------------------------------------------- what compares them


def _summary(rows: Sequence[Row], link: Line) -> Summary:
    shown = columns(rows, link)
    tags = [["reference" if row.is_reference and len(rows) > 1 else "", notes(row)] for row in rows]
    return {
        "columns": ["run", *(column.label for column in shown)],
        "rows": [[row.name, *(column.cell(row) for column in shown)] for row in rows],
        "tags": [", ".join(filter(None, tag)) for tag in tags],
        "words": explained(rows, link),
    }


def _sent(rows: Sequence[Row]) -> list[Sent]:
    found = bytes_sent(rows)
    return [{"name": name, "run": run, "sent_bytes": size, "words": words} for run, name, size, words in found]


def _modelled(rows: Sequence[Row], runs: Sequence[Sections], link: Line) -> Modelled:
    window_s, found = modelled_lanes([(row.job, row.link_time.utilisation) for row in rows], link)
    lanes: list[ModelledLane] = [
        {
            "run": n,
            "workers": list(workers),
            "end_s": lane.end_s,
            "utilisation": lane.utilisation or 0.0,
            "waits": [[*span] for span in join_near(lane.waits, _MOST_MODELLED)],
            "busy": [[*span] for span in join_near(lane.flights, _MOST_MODELLED)],
        }
        for n, workers, lane in found
    ]
    return {
        "link": str(link),
        "words": _MODELLED_WORDS,
        "window_s": window_s,
        "lanes": lanes,
        "clocks": [_clock(row, run, link) for row, run in zip(rows, runs, strict=True)],
    }


def _clock(row: Row, run: Sections, link: Line) -> Clock:
    curves = [[point[0] for point in run["loss"]["anchor"]], *(one["step"] for one in run["loss"]["workers"].values())]
    steps = sorted({step for curve in curves for step in curve})
    return {"step": steps, "seconds": [clock(row.job, link, step) for step in steps]}


def _tables(records: Sequence[RunRecord]) -> list[Table]:
    found = [
        ("Accuracy on tasks", _TASK_WORDS, scores_by_task(records) if len(records) > 1 else {}),
        ("Settings that differ", "", differences(records)),
        ("Faults and workers left out", "Each run lists its faults one by one.", failures(records)),
        ("Facts", "", facts(records)),
    ]
    return [_table(title, words, lines, records) for title, words, lines in found if lines]


def _table(title: str, words: str, lines: Facts, records: Sequence[RunRecord]) -> Table:
    rows = [[label, *values] for label, values in lines.items()]
    return {"title": title, "words": words, "columns": ["", *(record.name for record in records)], "rows": rows}
