"""Takes lists of revoked certificates out of a process's bundle, at its start and while it runs."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from atoll.errors import ConfigError
from atoll.link.net.credentials import Gate
from atoll.link.net.identity import Identity
from atoll.link.net.revocations import Revocations

LOOK_S: Final = 2.0
"""Seconds between two looks at the list."""
_FAILURES = 3  # after which the user is told
_log = logging.getLogger(__name__)


def list_of(identity: Identity) -> Revocations:
    """Return the list in the folder that an identity was read from; without a folder or a list, an empty one.

    Raises:
        ConfigError: The list cannot be read, or is not what this run's authority has signed.
    """
    if identity.folder is None:
        return Revocations(identity.bearer.run)
    return Revocations.load(identity.folder, identity.bearer.run, identity.run_certificate)


async def watch_revocations(identity: Identity, gate: Gate, on_taken: Callable[[], None]) -> None:
    """Give a gate every newer list that appears in an identity's folder; runs until it is cancelled.

    Args:
        identity: This process's.
        gate: Refuses what its list has.
        on_taken: Called after it has taken a list.
    """
    failures = 0
    while identity.folder is not None:
        await asyncio.sleep(LOOK_S)
        try:
            newest = await asyncio.to_thread(list_of, identity)
        except (ConfigError, OSError) as fault:  # it may be half copied
            failures += 1
            if failures == _FAILURES:
                _log.warning("%s; until then, the list that was read before counts", fault)
            continue
        failures = 0
        if newest.least != gate.revocations.least and gate.update(newest):
            on_taken()
