"""Defines `atoll registry`, which serves a registry until it is interrupted."""

import asyncio
import resource
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.security import load_security
from atoll.errors import ConfigError

if TYPE_CHECKING:  # gRPC is imported by the command alone
    from atoll.link.net.identity import Identity
    from atoll.link.net.registry import Insecure


def registry(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Where the registry keeps its journal.")],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where workers reach it.")],
    keys: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder of the registry's certificate and key.")
    ] = None,
    security: Annotated[
        str, typer.Option(metavar="HOW", help="keys, or none on a private cable: then anyone may write.")
    ] = "keys",
) -> None:
    """Serve the registry through which workers find each other.

    It may be killed and started again with the same folder: nothing is lost, and
    workers wait for it meanwhile. Ctrl-C stops it.

    [bold]Examples:[/]
      atoll registry runs/x/registry --listen 10.0.0.1:29400 --keys runs/x/keys/registry
    """
    proof = _proof(keys, security)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # every connection is a file
    asyncio.run(_serve(folder, listen, proof))
    typer.echo("the registry has stopped; the same command goes on from there")


def _proof(keys: Path | None, security: str) -> "Identity | Insecure":
    """Return what the registry proves itself with."""
    proof = load_security(keys, security, "registry")
    if not isinstance(proof, str) and proof.bearer.role != "registry":
        problem = f"--keys {keys}: these are the keys of {proof.bearer.role} {proof.bearer.seat}"
        raise ConfigError(f"{problem}; give the folder of the registry's", setting="keys", value=str(keys))
    return proof


async def _serve(folder: Path, listen: str, security: "Identity | Insecure") -> None:
    from atoll.link.net.embedded import RegistryServer
    from atoll.link.net.registry import INSECURE

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    server = await RegistryServer.start(folder, listen, security)
    try:
        if security == INSECURE:
            typer.echo("no security: any program that reaches this address may change the registry")
        typer.echo(f"the registry listens on {server.address}; Ctrl-C stops it")
        await stopped.wait()
    finally:
        await server.close()
