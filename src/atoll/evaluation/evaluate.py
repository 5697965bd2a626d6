"""Evaluates the model of a run, or any exported model, on tasks, and records the scores in the run's metrics."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import torch

from atoll._util.checks import check_whole
from atoll._util.disk import locked
from atoll.errors import AtollError, ConfigError, DataError
from atoll.evaluation.tasks import find_tasks, read_tasks
from atoll.runs.events import Jsonl
from atoll.runs.layout import METRICS, RUN
from atoll.runs.scored import Scored
from atoll.train.data.corpus import need
from atoll.train.folder import LOCK
from atoll.train.model.export import find_export, load_export


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Holds the scores of a model, and counts the requests that did not fit into its context."""

    model: Path
    """The folder of the export."""
    scores: list[Scored]
    requests: int
    cut: int
    """Requests whose beginning was cut off."""
    context: int
    """The model's context, in tokens."""
    recorded: Path | None
    """The file that the scores were appended to; None for an exported model, or if they were not recorded."""
    failure: DataError | None = None
    """Why the scores were not recorded, as on a full disk."""


def evaluate(
    folder: Path,
    tasks: Sequence[str],
    data: Path,
    *,
    best: bool = False,
    device: str = "auto",
    batch: int = 16,
) -> Evaluation:
    """Evaluates the model of a run, or an exported model, on tasks of lm-evaluation-harness.

    The scores of a run's model become events of its metrics.jsonl, which reports show. If the file cannot be written
    any more, the scores are returned nevertheless, with the failure. Nothing is downloaded.

    Args:
        folder: Folder of a run, or of an exported model.
        tasks: Names of tasks.
        data: Folder with a JSONL file for each task.
        best: Use the run's best parameters so far instead of its last.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:1".
        batch: Requests of one forward pass.

    Raises:
        AtollError: another process is training the run.
        ConfigError: a task is unknown, or lm-evaluation-harness is not installed.
        DataError: there is no model, it holds NaNs or infinities, or a data file is missing or malformed.
    """
    check_whole("batch", batch)
    need("lm_eval", "evaluation on tasks", extra="eval")
    from atoll.evaluation.causal_lm import CausalLM, encoder_of
    from atoll.evaluation.harness import TASKS, score

    found = find_tasks(tasks, TASKS)
    export = find_export(folder, best=best, command="eval")
    place = _device(device)
    metrics = None
    with ExitStack() as held:
        if (folder / RUN).is_file():  # training would replace the export, and cut the metrics
            busy = f"{folder} is being trained: wait until it ends, or evaluate {export}, which records no scores"
            held.enter_context(locked(folder / LOCK, AtollError(busy)))
            metrics = held.enter_context(_open_metrics(folder / METRICS, export))  # before hours of work
        read = read_tasks(found, data)
        model, tokenizer = load_export(export)
        if not all(parameter.isfinite().all() for parameter in model.parameters()):
            raise DataError(
                f"the model in {export} holds NaNs or infinities, because its training diverged: evaluate another",
                path=export,
            )
        lm = CausalLM(model, encoder_of(export, model, tokenizer), place, batch)
        scores = score(lm, read, "best" if best else "final")
        failure = _record(scores, metrics) if metrics is not None else None
    return Evaluation(
        model=export,
        scores=scores,
        requests=lm.requests,
        cut=lm.cut,
        context=lm.context,
        recorded=None if metrics is None or failure else metrics.path,
        failure=failure,
    )


def _record(scores: Sequence[Scored], metrics: Jsonl) -> DataError | None:
    """Appends the scores to a run's metrics; returns an error instead of raising it, so that they are not lost."""
    try:
        metrics.write(*scores)
    except AtollError as error:
        return DataError(f"the scores were not recorded: {error}; make room, then evaluate again", path=metrics.path)
    return None


def _open_metrics(path: Path, export: Path) -> AbstractContextManager[Jsonl]:
    try:
        return closing(Jsonl(path, at=path.stat().st_size))
    except (OSError, AtollError) as error:
        problem = f"the scores could not be recorded in {path} ({error})"
        raise DataError(f"{problem}: evaluate {export}, which records none", path=path) from error


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda") or (device.index or 0) >= _count(device):
        allowed = f"auto, cpu or one of the {torch.cuda.device_count()} GPUs here (cuda, cuda:1)"
        raise ConfigError(f"--device must be {allowed}, got {name!r}", setting="device", value=name)
    return device


def _count(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else 1
