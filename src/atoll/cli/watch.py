"""Defines `atoll watch`, which serves the page of a run until it is interrupted."""

import asyncio
import gc
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from atoll.cli.security import load_security
from atoll.errors import ConfigError

if TYPE_CHECKING:  # starlette and uvicorn are imported by the command alone
    from atoll.watch.server import Watch
    from atoll.watch.source import Source

_NICE = 19  # training on the same machine comes first


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[RUN...]", help="Folder of a run, or folders of its workers on this machine."),
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Of an elastic run: HOST:PORT of `atoll registry`, or etcd://..."),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --registry: folder of the observer's keys.")
    ] = None,
    security: Annotated[
        str, typer.Option(metavar="HOW", help="With --registry: keys, or none if the run has link.security = none.")
    ] = "keys",
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port of the page; 0: any free one.")] = 8420,
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="Where to listen; other than 127.0.0.1, viewers need a token.")
    ] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            envvar="ATOLL_WATCH_TOKEN",
            help="Secret of 16 characters or more that viewers send; default: random unless --host is this machine.",
        ),
    ] = None,
) -> None:
    """Serve a page that shows a run while it trains.

    The page shows state and time left, losses, members over time, bytes, faults
    and settings. /metrics is for Prometheus. Ctrl-C stops it; the run does not
    notice.

    [bold]Examples:[/]
      atoll watch runs/run
      atoll watch runs/run/worker-0 /mnt/other/runs/run/worker-1
      atoll watch runs/run --host 0.0.0.0
      atoll watch --registry 10.0.0.1:29400 --keys runs/run/keys/observer
    """
    serve(_source(runs or [], registry, keys, security), host, port, token)


def _source(runs: list[Path], registry: str | None, keys: Path | None, security: str) -> "Source":
    """Returns where the events come from: folders on this machine, or a registry."""
    if not runs and registry is None:
        raise ConfigError("no run given: name its folders, or --registry ADDRESS", setting="registry")
    if runs and registry is not None:
        raise ConfigError(f"got folders and --registry {registry}: leave one out", setting="registry")
    if registry is None:
        if keys is not None or security != "keys":
            raise ConfigError("--keys and --security belong to --registry: leave them out", setting="keys")
        from atoll.watch.folders import Folders

        return Folders(runs)
    from atoll.watch.registry_source import RegistryRun

    return RegistryRun(registry, load_security(keys, security, "observer"))


def serve(source: "Source", host: str, port: int, token: str | None) -> None:
    """Serves a run until Ctrl-C or SIGTERM; prints the address."""
    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        problem = f"atoll watch needs {' and '.join(missing)}, not installed here"
        raise ConfigError(f"{problem}: pip install 'atoll[watch]'")
    from atoll.watch.guard import Admission
    from atoll.watch.server import Watch

    is_local = host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)
    if token is not None and len(token) < 16:
        problem = f"the token (--token, ATOLL_WATCH_TOKEN) has {len(token)} characters and needs 16"
        raise ConfigError(f"{problem}: a short one can be guessed", setting="token")
    if token is None and not is_local:
        token = secrets.token_urlsafe(32)
    with _listening(host, port) as listener:
        port = listener.getsockname()[1]
        named = socket.gethostname() if host in ("0.0.0.0", "::") else host
        shown = f"[{named}]" if ":" in named else named
        names = [*dict.fromkeys(["localhost", "127.0.0.1", "[::1]", shown.lower()])]
        admission = Admission(token=token, hosts=names if is_local else None, cookie=f"atoll_watch_{port}")
        os.nice(_NICE)
        gc.freeze()  # what was imported stays: the collector need not look at it
        typer.echo(f"the page is at http://{shown}:{port}/{f'?token={token}' if token else ''}; Ctrl-C stops it")
        asyncio.run(_serve(Watch(source, admission), listener))
    typer.echo("stopped; the run is not affected")


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        ip_address(host)
        return True
    return False


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket that listens, so that a port that is taken is one clear error."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=512)
    except OSError as fault:
        problem = f"cannot listen on {host}, port {port}: {fault.strerror}; give another --port or --host"
        raise ConfigError(problem, setting="port", value=port) from fault
    with listener:
        yield listener


async def _serve(app: "Watch", listener: socket.socket) -> None:
    import uvicorn

    from atoll.watch.connections import ACCEPTED_AT_ONCE, BoundedProtocol

    class Server(uvicorn.Server):
        """Leaves signals to the command, and looks twice a second whether to end instead of ten times."""

        @contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

        async def main_loop(self) -> None:
            tenths = 0
            while not await self.on_tick(tenths):
                tenths += 5
                await asyncio.sleep(0.5)

    server = Server(
        uvicorn.Config(
            app,
            http=BoundedProtocol,
            backlog=ACCEPTED_AT_ONCE,
            ws="none",
            log_level="critical",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=1,
        )
    )

    def stop() -> None:
        app.board.close()
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    await server.serve(sockets=[listener])
