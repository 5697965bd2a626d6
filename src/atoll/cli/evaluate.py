"""Defines `atoll eval`, which evaluates a model on tasks of lm-evaluation-harness."""

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.errors import saying

if TYPE_CHECKING:  # torch and the harness are imported by the command alone
    from atoll.evaluation.evaluate import Evaluation


def evaluate(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, or of an exported model.")],
    tasks: Annotated[str, typer.Option(metavar="NAME,...", help="Tasks, such as lambada_openai,blimp.")],
    data: Annotated[Path, typer.Option(metavar="DIR", help="Folder with a JSONL file for each task.")],
    best: Annotated[
        bool, typer.Option("--best", help="Evaluate the weights with the lowest held-out loss, not the final ones.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:1.")] = "auto",
    batch: Annotated[int, typer.Option(min=1, metavar="N", help="Requests in one forward pass.")] = 16,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a model on tasks of lm-evaluation-harness, with local data.

    Prompts, targets and metrics are the harness's own; install it with
    pip install 'atoll\\[eval]'. The scores of a run's model are kept in the run,
    for atoll report and atoll compare. Nothing is downloaded: docs/evaluation.md
    lists the data files.

    [bold]Examples:[/]
      atoll eval runs/run --tasks lambada_openai,blimp --data data
      atoll eval runs/run/model --tasks arc_easy --data data --json
    """
    # The packages read these when they are imported: no look for updates, and no progress bars with other counts.
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TQDM_DISABLE": "1"}
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with saying("stopped; nothing was recorded"):
        from atoll.evaluation.evaluate import evaluate as evaluate_run

        names = [name.strip() for name in tasks.split(",") if name.strip()]
        found = evaluate_run(folder, names, data, best=best, device=device, batch=batch)
    if as_json:
        typer.echo(json.dumps(_as_json(found), indent=2))
    else:
        _print(found)
    if found.failure is not None:
        raise found.failure


def _as_json(found: "Evaluation") -> dict[str, object]:
    scores = [asdict(score) for score in found.scores]
    for score in scores:
        del score["event"]
    return {"model": str(found.model), "requests": found.requests, "cut": found.cut, "tasks": scores}


def _print(found: "Evaluation") -> None:
    from rich.console import Console

    from atoll.report.tasks import score_table

    Console().print(score_table(found.scores))
    if found.cut:
        longer = f"longer than the model's context of {found.context} tokens: their beginnings were cut off"
        typer.echo(f"note: {found.cut:,} of {found.requests:,} requests were {longer}")
    if found.recorded is not None:
        typer.echo(f"the scores were recorded in {found.recorded}")
