"""Reads finished and running runs, and reports on them: records, tables, pictures, traces."""

from collections.abc import Sequence

from atoll.plan.line import Line
from atoll.report.load import load, load_all
from atoll.report.record import RunRecord
from atoll.report.table import Row, rich_table, summary
from atoll.report.trace import write_trace

__all__ = ["Row", "RunRecord", "load", "load_all", "png_files", "rich_table", "summary", "write_trace"]


def png_files(rows: Sequence[Row], link: Line) -> dict[str, bytes]:
    """Returns every picture that the rows have data for as a PNG, by the name of its file.

    Args:
        rows: the runs, as `summary` returns them.
        link: the line of each worker in modelled times.
    """
    # Matplotlib takes a second to import: only pictures need it.
    from atoll.report.canvas import to_png
    from atoll.report.figures import pictures

    return {f"{name}.png": to_png(draw) for name, draw in pictures(rows, link).items()}
