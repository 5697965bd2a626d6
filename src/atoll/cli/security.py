"""Reads --keys and --security, by which a command proves itself to a registry or to workers."""

from pathlib import Path
from typing import TYPE_CHECKING

from atoll.errors import ConfigError

if TYPE_CHECKING:  # gRPC is imported by the commands alone
    from atoll.link.net.identity import Identity
    from atoll.link.net.registry import Insecure


def load_security(keys: Path | None, security: str, whose: str) -> "Identity | Insecure":
    """Return the identity in a folder of keys, or "none" where that was written out.

    Args:
        keys: The folder.
        security: "keys" or "none".
        whose: The bearer whose keys are needed, for the message if they are missing.
    """
    from atoll.link.net.registry import INSECURE
    from atoll.link.net.revocations import load_bundle

    if security not in ("keys", INSECURE):
        problem = f"--security {security}: allowed are keys and {INSECURE}"
        raise ConfigError(problem, setting="security", value=security)
    if security == INSECURE:
        if keys is not None:
            raise ConfigError("--security none uses no --keys: leave one of them out", setting="keys", value=str(keys))
        return INSECURE
    if keys is None:
        problem = f"--keys is missing: give the folder of the {whose}'s keys, made by `atoll keys new`"
        raise ConfigError(f"{problem}; on a private cable, --security none", setting="keys")
    return load_bundle(keys)[0]
