"""The cores of a machine that several processes of a run share: left alone, each would compute on all of them.

`atoll launch` and torchrun divide them beforehand (OMP_NUM_THREADS); workers started one by one find out here.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from atoll.link.net.link import NetLink
from atoll.settings.config import RunConfig
from atoll.train.ranks.worker_ranks import Team


def share_cores(
    link: NetLink | None, config: RunConfig, team: Team, environment: Mapping[str, str] = os.environ
) -> str | None:
    """Take this process's share of the cores, and say so in words; None if nothing was changed.

    What the user has set stays: `threads` of the run file, or OMP_NUM_THREADS. All processes of the run must call it.
    """
    if link is None:
        return None
    # Where one link serves all ranks of a worker, it speaks for all of them.
    mine = {"machine": machine(), "processes": team.ranks if team.whole else 1}
    said = link.gather("machine", mine).values()
    sharing = sum(_whole(theirs.get("processes")) for theirs in said if theirs.get("machine") == mine["machine"])
    if config.threads or "OMP_NUM_THREADS" in environment or sharing < 2 or team.ranks > 1:
        return None
    cores = torch.get_num_threads()
    share = max(1, cores // sharing)
    if share == cores:
        return None
    torch.set_num_threads(share)
    return (
        f"{sharing} processes of this run share this machine: this one computes with {share} of {cores} threads "
        "(OMP_NUM_THREADS or the setting `threads` says otherwise)"
    )


def machine() -> str:
    """What tells this machine from all others; a container with a name of its own counts as one."""
    boot = ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"


def _whole(number: object) -> int:
    return number if isinstance(number, int) else 1
