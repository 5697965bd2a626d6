"""Runs -> tables, pictures, one self-contained HTML page."""

from collections.abc import Sequence
from pathlib import Path

from atoll._util.disk import write_atomically
from atoll.errors import ConfigError
from atoll.plan.link import Link
from atoll.report.load import RunRecord, load, load_all
from atoll.report.table import Row, rich_table, summary
from atoll.report.trace import write_trace

__all__ = ["Row", "RunRecord", "load", "load_all", "rich_table", "summary", "write", "write_trace"]


def write(
    runs: Sequence[Path],
    out: Path,
    *,
    link: Link,
    png: Path | None = None,
    title: str = "",
    claims: Sequence[str] = (),
) -> list[Path]:
    """Write the page about these runs' folders to `out`, and the pictures alone into the folder `png` if given.

    A folder that is no run but holds runs stands for those. The page has `title` for its heading (empty: one that says
    how many runs) and lists the sentences of `claims` after its summary; both are plain text. Times are those with such
    a link for each worker. Returns all paths written. Every file appears whole or not at all. An `out` that is a folder
    gets a report.html.
    """
    # Matplotlib and Jinja take a second to import: only who wants a page pays.
    from atoll.report.canvas import to_png
    from atoll.report.figures import pictures
    from atoll.report.page import page

    if not runs:
        raise ConfigError("a report needs the folder of at least one run, got none")
    out = Path(out)
    records = load_all(runs)
    rows = summary(records, link)
    drawn = pictures(records, rows, link)
    files = {out / "report.html" if out.is_dir() else out: page(records, rows, drawn, link, title, claims).encode()}
    if png is not None:
        files |= {Path(png) / f"{picture.key}.png": to_png(picture.draw) for picture in drawn}
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)
