"""Runs -> tables, pictures, one self-contained HTML page."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from atoll.errors import AtollError, ConfigError
from atoll.plan.cost import Link
from atoll.report.load import RunRecord, load, load_all
from atoll.report.table import Row, rich_table, summary

__all__ = ["Row", "RunRecord", "load", "load_all", "rich_table", "summary", "write"]


def write(
    runs: Sequence[Path], out: Path, *, link_bits_per_s: float, latency_s: float = 0.0, png: Path | None = None
) -> list[Path]:
    """Write the page about these runs' folders to `out`, and the pictures alone into the folder `png` if given.

    Times are those on a link of `link_bits_per_s` and `latency_s` for each worker. Returns all paths written. Every
    file appears whole or not at all. An `out` that is a folder gets a report.html.
    """
    # Matplotlib and Jinja take a second to import: only who wants a page pays.
    from atoll.report.canvas import to_png
    from atoll.report.figures import pictures
    from atoll.report.page import page

    if not runs:
        raise ConfigError("a report needs the folder of at least one run, got none")
    link, out = Link(link_bits_per_s, latency_s), Path(out)
    records = load_all(runs)
    rows = summary(records, link)
    drawn = pictures(records, rows, link)
    files = {out / "report.html" if out.is_dir() else out: page(records, rows, drawn, link).encode()}
    if png is not None:
        files |= {Path(png) / f"{picture.key}.png": to_png(picture.draw) for picture in drawn}
    for path, content in files.items():
        _write_whole(path, content)
    return list(files)


def _write_whole(path: Path, content: bytes) -> None:
    """Beside its place first, then into it: nobody ever sees half a file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(content)
                file.flush()
                os.chmod(file.name, 0o666 & ~_umask())
                os.replace(file.name, path)
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                raise
    except OSError as error:
        raise AtollError(f"{path} cannot be written: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
