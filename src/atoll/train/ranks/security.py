"""Finds what a worker of a run proves itself with to the others."""

import sys
from pathlib import Path

from atoll.errors import ConfigError
from atoll.link.net.identity import Identity
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.worker_keys import load_keys
from atoll.settings.config import RunConfig


def security_of(config: RunConfig, worker: int) -> Identity | Insecure:
    """Return a worker's identity, or "none" where the run file says so.

    Raises:
        ConfigError: There are no keys, or they cannot be read or are another worker's.
    """
    if config.link.security == INSECURE:
        print("no security (link.security): any program that reaches this worker may change the run", file=sys.stderr)
        return INSECURE
    command = f"atoll keys new {config.out}/{config.name} --workers {config.sync.workers}"
    if config.link.keys is None:
        problem = f"link.keys: is left out: make keys with `{command}`, and give the folder of this worker's (--keys)"
        raise ConfigError(f'{problem}; on a private cable, link.security = "none"', setting="link.keys")
    folder = Path(config.link.keys.replace("{worker}", str(worker))).expanduser()
    if not folder.is_dir():
        problem = f"link.keys: there is no folder {folder}; copy this worker's from the machine with the run's keys"
        raise ConfigError(f"{problem}, or make them there: `{command}`", setting="link.keys", value=str(folder))
    return load_keys(folder, worker, "link.keys")
