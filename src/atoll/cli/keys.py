"""Defines `atoll keys`, which makes, shows, renews and revokes the certificates of a run."""

from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.errors import ConfigError, printable

if TYPE_CHECKING:
    from atoll.link.net.identity import Bearer
    from atoll.link.net.run_keys import RunKeys

keys = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="""Make, show, renew and revoke the certificates of a run between machines.

    Every worker proves with a certificate that it belongs to the run, and which
    seat is its own; without one nobody gets a connection.""",
)

Folder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run; the keys are in RUN/keys.")]
Days = Annotated[int, typer.Option(min=1, max=3650, metavar="N", help="How long the certificates are valid.")]
Seats = Annotated[
    list[int] | None, typer.Option("--worker", min=0, metavar="K", help="This worker's; may be given many times.")
]
Registry = Annotated[bool, typer.Option("--registry", help="The registry's.")]
Observer = Annotated[bool, typer.Option("--observer", help="The observer's.")]


@keys.command()
def new(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run; the keys go to RUN/keys.")],
    workers: Annotated[int, typer.Option(min=1, max=4096, metavar="N", help="Number of workers: sync.workers.")],
    days: Days = 365,
) -> None:
    """Make an authority, and a bundle for every worker, the registry and an observer.

    [bold]Examples:[/]
      atoll keys new runs/x --workers 8
    """
    from atoll.link.net.run_keys import AUTHORITY, RunKeys

    made = RunKeys.new(folder, workers, days)
    run = made.authority().run
    seats = "worker-0" if workers == 1 else f"worker-0 to worker-{workers - 1}"
    _say(f"made the keys of run {run} in {made.folder}, valid for {_count(days, 'day')}")
    _say(f"  {seats}: copy each to the machine of that worker, and no other:")
    _say(f"    {_copy(made.folder, 'worker-0')}")
    _say("  registry: copy it to the machine that runs the registry")
    _say("  observer: copy it to wherever somebody looks at the run; it changes nothing")
    _say(f"  {AUTHORITY}: leave it here and copy it nowhere; it signs certificates (renew) and revocations (revoke)")


@keys.command()
def show(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run, of its keys, or of one bundle.")],
) -> None:
    """Show the run, the seat and the end of every certificate.

    [bold]Examples:[/]
      atoll keys show runs/x
      atoll keys show runs/x/keys/worker-3
    """
    from atoll.link.net.run_keys import RunKeys

    found = RunKeys(folder)
    rows = found.show()
    names = max(len(row.name) for row in rows)
    runs = max(len(row.run) for row in rows)
    for row in rows:
        _say(f"{row.name:{names}}  {row.run:{runs}}  {row.state}")


@keys.command()
def renew(
    folder: Folder, worker: Seats = None, registry: Registry = False, observer: Observer = False, days: Days = 365
) -> None:
    """Make a new key and certificate for a seat.

    The old certificate stays valid until it expires; to end it now, revoke it
    first. A worker number that has no keys yet gets its first.

    [bold]Examples:[/]
      atoll keys renew runs/x --worker 3
      atoll keys renew runs/x --worker 0 --worker 1 --registry --days 30
    """
    found, bearers = _asked("renew", folder, worker, registry, observer)
    for bearer in bearers:
        had = (found.folder / bearer.folder).exists()
        bundle = found.issue(bearer, days)
        _say(f"{'replaced' if had else 'made'} {bundle}, valid for {_count(days, 'day')}")
        _say(f"  copy it to the machine of {bearer}, and start {bearer} again:")
        _say(f"    {_copy(found.folder, bearer.folder)}")


@keys.command()
def revoke(folder: Folder, worker: Seats = None, registry: Registry = False, observer: Observer = False) -> None:
    """Revoke every certificate that a seat has had so far.

    The authority signs a list, revoked.txt. Members that have it refuse those
    certificates at the next connection or call.

    [bold]Examples:[/]
      atoll keys revoke runs/x --worker 3
    """
    from atoll.link.net.revocations import REVOKED

    found, bearers = _asked("revoke", folder, worker, registry, observer)
    for bearer in bearers:
        found.revoke(bearer)
        _say(f"revoked all certificates of {bearer} so far; the list is in {found.folder}/*/{REVOKED}")
        _say(f"  copy {REVOKED} into the bundle on every machine of the run, such as:")
        _say(f"    scp -p {quote(str(found.folder / 'worker-0' / REVOKED))} HOST:{quote(str(found.folder))}/worker-0/")
        _say(f"  for a new certificate of {bearer}: atoll keys renew {quote(str(folder))} {bearer.option}")


def _asked(
    command: str, folder: Path, workers: list[int] | None, registry: bool, observer: bool
) -> "tuple[RunKeys, list[Bearer]]":
    """Return the keys and the seats that a command is about."""
    from atoll.link.net.identity import Bearer
    from atoll.link.net.run_keys import MOST_WORKERS, RunKeys

    found = RunKeys(folder)
    run = found.authority().run
    bearers = [Bearer(run, "worker", seat) for seat in dict.fromkeys(workers or ())]
    bearers += [Bearer(run, "registry")] * registry + [Bearer(run, "observer")] * observer
    if not bearers:
        problem = f"keys {command}: say whose: --worker K, --registry or --observer"
        raise ConfigError(problem, setting="worker")
    for seat in workers or ():
        if seat >= MOST_WORKERS:
            problem = f"--worker {seat}: must be a number from 0 to {MOST_WORKERS - 1}"
            raise ConfigError(problem, setting="worker", value=seat)
    return found, bearers


def _copy(folder: Path, bundle: str) -> str:
    """Return a command that copies a bundle to the same path on another machine."""
    place = quote(str(folder))
    return f"ssh HOST mkdir -p {place} && scp -rp {quote(str(folder / bundle))} HOST:{place}/"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _say(line: str) -> None:
    typer.echo(printable(line))
