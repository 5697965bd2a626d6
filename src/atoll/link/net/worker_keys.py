"""Reads the bundle with which a worker proves its seat."""

from pathlib import Path

from atoll.errors import ConfigError
from atoll.link.net.identity import Identity
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.revocations import load_bundle


def load_keys(keys: str | Path | None, worker: int, setting: str = "keys") -> Identity | Insecure:
    """Read a worker's bundle.

    Args:
        keys: Its folder, or "none".
        worker: The worker whose keys they must be.
        setting: What errors call it.

    Raises:
        ConfigError: There is none, it cannot be read, is expired or revoked, or is another worker's.
    """
    if keys is None:
        problem = (
            f"{setting} is missing: give the folder of this worker's keys, made by `atoll keys new RUN --workers N`"
        )
        raise ConfigError(f'{problem}; on a private cable, {setting}="none"', setting=setting)
    if keys == INSECURE:
        return INSECURE
    identity, _ = load_bundle(Path(keys))
    if (identity.bearer.role, identity.bearer.seat) != ("worker", worker):
        problem = f"{setting}: {keys} holds the keys of {identity.bearer}, and this is worker {worker}"
        raise ConfigError(f"{problem}: give its own folder", setting=setting, value=str(keys))
    return identity
