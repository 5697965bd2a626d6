"""Finds the address at which other machines reach this one."""

import socket

from atoll.link.net.open_registry import ETCD

_EVERYWHERE = ("0.0.0.0", "[::]", "::", "*")


def addresses_of(listening: str, registry: str) -> list[str]:
    """Return HOST:PORT to announce for a process.

    One that listens on all addresses announces the one from which it reaches the registry: by that the others, which
    reach the registry too, are likely to reach it.

    Args:
        listening: HOST:PORT where it listens.
        registry: The registry's address, in one of the forms of `open_registry`.
    """
    host, _, port = listening.rpartition(":")
    if host not in _EVERYWHERE:
        return [listening]
    first = registry.removeprefix(ETCD).partition("/")[0].partition(",")[0]
    to, _, to_port = first.rpartition(":")
    try:
        family, kind, *_, target = socket.getaddrinfo(to.strip("[]"), int(to_port), type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            found = str(probe.getsockname()[0])
    except (OSError, ValueError):
        found = socket.gethostname()
    return [f"[{found}]:{port}" if ":" in found else f"{found}:{port}"]
