"""Defines `atoll status`, which shows who takes part in an elastic run."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll._util.units import clock_text
from atoll.cli.security import load_security
from atoll.errors import RegistryError, printable

if TYPE_CHECKING:  # gRPC is imported by the command alone
    from atoll.link.net.identity import Identity
    from atoll.link.net.membership import Announcement
    from atoll.link.net.registry import Insecure, Update
    from atoll.link.net.views import View

WAIT_S = 10.0
"""Seconds to wait for the registry."""


def status(
    registry: Annotated[
        str, typer.Argument(metavar="REGISTRY", help="HOST:PORT of `atoll registry`, or etcd://HOST:PORT,.../NAME.")
    ],
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the observer's keys, or of any other of the run.")
    ] = None,
    security: Annotated[
        str, typer.Option(metavar="HOW", help="keys, or none if the run has link.security = none.")
    ] = "keys",
) -> None:
    """Show who takes part in an elastic run.

    The view is what the workers have agreed on; a worker is present while it
    renews its announcement in the registry.

    [bold]Examples:[/]
      atoll status 10.0.0.1:29400 --keys runs/run/keys/observer
    """
    proof = load_security(keys, security, "observer")
    for line in lines(asyncio.run(_look(registry, proof)), time.time()):
        typer.echo(printable(line))


async def _look(address: str, security: "Identity | Insecure") -> "Update":
    from atoll.link.net.registries import open_registry

    async with open_registry(address, security) as registry:
        updates = registry.watch("")
        try:
            async with asyncio.timeout(WAIT_S):
                return await anext(updates)
        except TimeoutError:
            problem = f"the registry at {address} does not answer within {WAIT_S:g} s"
            raise RegistryError(f"{problem}: check that `atoll registry` runs there") from None
        finally:
            await updates.aclose()


def lines(update: "Update", now: float) -> list[str]:
    """Return what a registry holds as lines for a user; `now` is the Unix time."""
    from atoll.link.net.membership import Announcement
    from atoll.link.net.registry import VIEW, seat_of
    from atoll.link.net.view_record import decode_view
    from atoll.link.net.views import View

    held = {key: entry for key, entry in update.entries.items() if entry is not None}
    view = decode_view(held.pop(VIEW).value) if VIEW in held else View(0, {})
    present = {
        seat: Announcement.parse(entry.value) for key, entry in held.items() if (seat := seat_of(key)) is not None
    }
    if view.number == 0:
        said = ["no view yet: the run has not begun"]
    else:
        count = f"{len(view.owing)} worker{'' if len(view.owing) == 1 else 's'}"
        said = [f"view {view.number}: {'the run is finished' if view.over else f'{count} training'}"]
    return said + [_line(seat, view, present.get(seat), now) for seat in sorted({*view.lives, *present})]


def _line(seat: int, view: "View", known: "Announcement | None", now: float) -> str:
    role = "catching up" if seat in view.following else "training" if seat in view.lives else "not a member"
    if known is None:
        return f"worker {seat}: {role}, not present"
    if seat in view.lives and view.lives[seat] != known.life:
        role = "started again, not yet a member"
    since = f" for {clock_text(max(0.0, now - known.since))}" if known.since else ""
    return f"worker {seat}: {role}, present{since}, at {', '.join(known.addresses) or 'no address'}"
