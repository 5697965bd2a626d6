"""Shows accuracies on evaluation tasks, for one evaluation or for several runs side by side."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from atoll.errors import printable
from atoll.report.record import RunRecord
from atoll.runs.scored import Scored

if TYPE_CHECKING:
    from rich.table import Table


def accuracy_text(share: float | None, stderr: float | None) -> str:
    """Returns an accuracy and its standard error, in percent."""
    if share is None:
        return "-"
    return f"{100 * share:.2f} %" if stderr is None else f"{100 * share:.2f} ± {100 * stderr:.2f} %"


def score_table(scores: Sequence[Scored]) -> "Table":
    """Returns the scores of one evaluation as a table for the terminal."""
    table = _table("task", "n", "accuracy", "by length", "chance")
    for score in scores:
        table.add_row(
            f"  {score.task.removeprefix(f'{score.group}_')}" if score.group else score.task,
            f"{score.documents:,}",
            accuracy_text(score.accuracy, score.stderr),
            accuracy_text(score.by_length, score.by_length_stderr),
            _chance(score),
        )
    return table


def score_rows(record: RunRecord) -> list[list[str]]:
    """Returns the task, the documents, the accuracy and the chance of every newest score of a run, as texts."""
    newest = sorted(_newest(record).items())
    return [[label, f"{score.documents:,}", _cell(score), _chance(score)] for label, score in newest]


def scores_by_task(records: Sequence[RunRecord]) -> dict[str, list[str]]:
    """Returns, for each task, the newest score of every run as text, or "-" if a run has none.

    A label has the number of documents and the chance too, so scores on different documents are not put side by side.
    """
    newest = [
        {f"{label}, {score.documents:,} documents, chance {_chance(score)}": score for label, score in found.items()}
        for found in map(_newest, records)
    ]
    labels = sorted({label: None for scores in newest for label in scores})
    return {label: [_cell(scores.get(label)) for scores in newest] for label in labels}


def comparison_table(records: Sequence[RunRecord]) -> "Table | None":
    """Returns the scores of several runs as a table for the terminal, a row per run; None without scores."""
    from rich.text import Text

    found = scores_by_task(records)
    if not found:
        return None
    table = _table("run", *found)
    for index, record in enumerate(records):
        table.add_row(Text(printable(record.name)), *(texts[index] for texts in found.values()))
    return table


def _newest(record: RunRecord) -> dict[str, Scored]:
    """Returns the newest score of each task; a group's own score stands for those of its tasks."""
    return {_label(score): score for score in record.scores if score.group is None}


def _chance(score: Scored) -> str:
    return f"{100 * score.chance:.1f} %"


def _label(score: Scored) -> str:
    return printable(score.task) if score.weights == "final" else f"{printable(score.task)} (best)"


def _cell(score: Scored | None) -> str:
    return "-" if score is None else accuracy_text(score.accuracy, score.stderr)


def _table(first: str, *others: str) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for label in others:
        table.add_column(label, justify="right")
    return table
