"""Reports on finished and running runs: tables, pictures, one self-contained HTML page, traces."""

from collections.abc import Sequence
from pathlib import Path

from atoll._util.disk import write_atomically
from atoll.plan.line import Line
from atoll.report.load import load, load_all
from atoll.report.record import RunRecord
from atoll.report.table import Row, rich_table, summary
from atoll.report.trace import write_trace

__all__ = ["Row", "RunRecord", "load", "load_all", "rich_table", "summary", "write", "write_trace"]


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
    # Matplotlib and Jinja take a second to import: only pages need them.
    from atoll.report.canvas import to_png
    from atoll.report.figures import pictures
    from atoll.report.page import page

    out = Path(out)
    rows = summary(load_all(runs), link)
    drawn = pictures(rows, link)
    files = {out / "report.html" if out.is_dir() else out: page(rows, drawn, link, title, claims).encode()}
    if png is not None:
        files |= {Path(png) / f"{name}.png": to_png(draw) for name, draw in drawn.items()}
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)
