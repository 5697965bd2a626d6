"""Defines `atoll replay`, which trains an elastic run again and compares its anchors."""

from pathlib import Path
from typing import Annotated

import typer

from atoll.cli.errors import saying
from atoll.errors import printable


def replay(
    folders: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folder of the run, or the folders of all its workers.")
    ],
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Compare the workers' records with each other; train nothing.")
    ] = False,
) -> None:
    """Train an elastic run again, and compare its anchors bit by bit.

    Workers have recorded who took part in every round, and the anchor after it.
    All of them are trained again in this process, with the same members, joins
    and losses. Exit code 1: an anchor differs; the first round is printed.

    [bold]Examples:[/]
      atoll replay runs/run
      atoll replay site-a/worker-0 site-b/worker-1 --check-only
    """
    with saying("stopped"):
        from atoll.train.replay.run import replay as replay_run

        found = replay_run(folders, check_only=check_only)
    of = f"{found.rounds} rounds of {found.workers} workers"
    if found.difference is not None:
        typer.echo(printable(f"anchors differ at {found.difference.round_id}: {found.difference.what}"))
    elif check_only:
        typer.echo(f"{of}: the records agree")
    elif found.missed:
        typer.echo(f"{of}: {len(found.missed)} could not be made again, the first at {found.missed[0]}")
    else:
        typer.echo(f"{of}: all anchors are equal, bit by bit")
    raise typer.Exit(1 if found.difference is not None or found.missed else 0)
