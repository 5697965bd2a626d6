"""Lets a gRPC server listen, bounded against strangers: connections, handshakes and streams are limited."""

import resource
from typing import Final

import grpc
import grpc.aio

from atoll.errors import ConfigError
from atoll.link.net.credentials import server_credentials
from atoll.link.net.identity import Identity
from atoll.link.net.registry import INSECURE, Insecure

_HANDSHAKE_MS: Final = 5000
_STREAMS: Final = 128  # of one connection


def server_options(message_bytes: int, connections: int) -> list[tuple[str, int]]:
    """Return options of a server that any stranger may reach.

    Args:
        message_bytes: Most bytes of one message.
        connections: Most connections, strangers' included; and at most a quarter of the files the process may open.
    """
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return [
        ("grpc.so_reuseport", 0),  # or two servers would share the port
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_concurrent_streams", _STREAMS),
        ("grpc.max_allowed_incoming_connections", min(connections, files // 4) if files > 0 else connections),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.keepalive_time_ms", 30_000),  # finds connections whose other end has vanished
        ("grpc.keepalive_timeout_ms", 10_000),
    ]


def listen_on(server: grpc.aio.Server, listen: str, security: Identity | Insecure, what: str) -> str:
    """Add a port to a server; return the HOST:PORT where it will listen.

    Args:
        server: Not started yet.
        listen: HOST:PORT; port 0 takes a free one.
        security: The server's identity, or `INSECURE` for a private cable.
        what: Begins the error, such as "registry".

    Raises:
        ConfigError: The address cannot be used.
    """
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isascii() and port.isdecimal() and int(port) < 1 << 16):
        problem = f"{what}: cannot listen on {listen!r}; use HOST:PORT, such as 10.0.0.1:29400"
        raise ConfigError(problem, setting="listen", value=listen)
    try:
        if security == INSECURE:
            return f"{host}:{server.add_insecure_port(listen)}"
        return f"{host}:{server.add_secure_port(listen, server_credentials(security))}"
    except RuntimeError as fault:
        problem = f"{what}: cannot listen on {listen!r}: another program does, or it is not this machine's address"
        raise ConfigError(problem, setting="listen", value=listen) from fault
