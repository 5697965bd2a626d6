"""Defines `atoll status`, which shows who takes part in an elastic run."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

import typer

from atoll._util.units import bytes_text, clock_text
from atoll.cli.security import load_security
from atoll.errors import RegistryError, printable

if TYPE_CHECKING:  # gRPC is imported by the command alone
    from atoll.link.net.identity import Identity
    from atoll.link.net.membership import Announcement
    from atoll.link.net.registry import Insecure, Update
    from atoll.link.net.views import View
    from atoll.link.net.worker_status import WorkerStatus

WAIT_S = 10.0
"""Seconds to wait for the registry."""
OVER_S = 2.0
"""Seconds between the two looks at workers of which rates are made."""
_NAMED = 3  # rounds on their way


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
    """Show who takes part in an elastic run, and how fast it goes.

    The view is what the workers have agreed on; a worker is present while it
    renews its announcement in the registry. Workers that can be reached from
    here tell their steps, bytes and rounds on their way; rates are over 2 s.

    [bold]Examples:[/]
      atoll status 10.0.0.1:29400 --keys runs/run/keys/observer
    """
    proof = load_security(keys, security, "observer")
    for line in asyncio.run(_told(registry, proof)):
        typer.echo(printable(line))


async def _told(registry: str, security: "Identity | Insecure") -> list[str]:
    from atoll.link.net.worker_status import ask

    update = await _look(registry, security)
    _, present = _held(update)
    addresses = {seat: known.addresses for seat, known in present.items() if known is not None and known.addresses}
    before, began_s = await ask(addresses, security), time.monotonic()
    if before:
        await asyncio.sleep(OVER_S)
    now = await ask({seat: addresses[seat] for seat in before}, security)
    over_s = time.monotonic() - began_s
    paces = {seat: pace(before[seat], status, over_s) for seat, status in now.items()}
    return lines(update, time.time(), paces)


async def _look(address: str, security: "Identity | Insecure") -> "Update":
    from atoll.link.net.open_registry import open_registry

    async with open_registry(address, security) as registry:
        updates = registry.watch("")
        try:
            async with asyncio.timeout(WAIT_S):
                return await anext(updates)
        except TimeoutError:
            problem = f"the registry at {address} does not answer within {WAIT_S:g} s"
            raise RegistryError(f"{problem}: check that `atoll registry` runs there, with keys of this run") from None
        finally:
            await updates.aclose()


def _held(update: "Update") -> "tuple[View, dict[int, Announcement | None]]":
    """Return the view that a registry holds, and the announcements by seat."""
    from atoll.link.net.membership import Announcement
    from atoll.link.net.registry import VIEW, seat_of
    from atoll.link.net.view_record import decode_view
    from atoll.link.net.views import View

    held = {key: entry for key, entry in update.entries.items() if entry is not None}
    view = decode_view(held.pop(VIEW).value) if VIEW in held else View(0, {})
    present = {
        seat: Announcement.parse(entry.value) for key, entry in held.items() if (seat := seat_of(key)) is not None
    }
    return view, present


def pace(before: "WorkerStatus", now: "WorkerStatus", over_s: float) -> str:
    """Return how a worker is doing, from two looks at it."""

    def per_s(earlier: int, later: int) -> float:
        return max(0, later - earlier) / over_s  # counts begin anew with every connection

    steps = f"step {now.step}, {per_s(before.step, now.step):.3g} steps/s"
    sent, received = per_s(before.sent_bytes, now.sent_bytes), per_s(before.received_bytes, now.received_bytes)
    named = "; ".join(f"step {step}, fragment {fragment}" for step, fragment in now.rounds[:_NAMED])
    more = f" and {len(now.rounds) - _NAMED} more" if len(now.rounds) > _NAMED else ""
    under_way = f"rounds on their way: {named}{more}" if now.rounds else "no round on its way"
    return f"{steps}, {bytes_text(sent)}/s out and {bytes_text(received)}/s in, {under_way}"


def lines(update: "Update", now: float, paces: Mapping[int, str] = MappingProxyType({})) -> list[str]:
    """Return what a registry holds as lines for a user.

    Args:
        update: All keys of the registry.
        now: The Unix time.
        paces: By seat, how the workers that have answered are doing.
    """
    view, present = _held(update)
    if view.number == 0:
        said = ["no view yet: the run has not begun"]
    else:
        count = f"{len(view.owing)} worker{'' if len(view.owing) == 1 else 's'}"
        said = [f"view {view.number}: {'the run is finished' if view.over else f'{count} training'}"]
    for seat in sorted({*view.lives, *present}):
        said.append(_line(seat, view, present.get(seat), now))
        if seat in paces:
            said.append(f"  {paces[seat]}")
    return said


def _line(seat: int, view: "View", known: "Announcement | None", now: float) -> str:
    trains = "finished" if view.over else "training"
    role = "catching up" if seat in view.following else trains if seat in view.lives else "not a member"
    if known is None:
        return f"worker {seat}: {role}, not present"
    if seat in view.lives and view.lives[seat] != known.life:
        role = "started again, not yet a member"
    since = f" for {clock_text(max(0.0, now - known.since))}" if known.since else ""
    return f"worker {seat}: {role}, present{since}, at {', '.join(known.addresses) or 'no address'}"
