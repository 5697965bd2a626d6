"""Divides the CPU cores of a machine among the processes of a run that share it.

`atoll launch` and torchrun divide them beforehand (OMP_NUM_THREADS); workers started one by one do it here.
"""

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import torch

from atoll.settings.config import RunConfig
from atoll.train.ranks.control import ControlPlane


def share_cores(control: ControlPlane, config: RunConfig, environment: Mapping[str, str] = os.environ) -> str | None:
    """Give torch this process's share of the cores; called by all processes of the run.

    `threads` in the run file and OMP_NUM_THREADS win over the share.

    Returns:
        A line for the user, or None if nothing changed.
    """
    ranks, here = control.ranks, machine_id()
    # Where one link serves all ranks of a worker, its rank counts for all of them.
    mine = {"machine": here, "processes": ranks.count if ranks.hold_whole_model else 1}
    everyone = ranks.decide(lambda: list(control.gather("machine", mine).values()))
    sharing = sum(int(theirs["processes"]) for theirs in everyone if theirs["machine"] == here)
    cores = torch.get_num_threads()
    share = max(1, cores // max(1, sharing))
    if config.threads or "OMP_NUM_THREADS" in environment or share == cores or ranks.count > 1:
        return None
    torch.set_num_threads(share)
    return (
        f"{sharing} processes of this run share this machine: this one computes with {share} of {cores} threads "
        "(OMP_NUM_THREADS or the setting `threads` says otherwise)"
    )


def machine_id() -> str:
    """Return a text that differs between machines, and between containers with different host names."""
    boot = ""
    with suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{socket.gethostname()} {boot}"
