"""Connects workers that one torchrun has started, and refuses a process group that spans them."""

import json
import os
import socket
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch.distributed
from torch import distributed

from atoll.errors import ConfigError
from atoll.link.net.identity import Certificate, Identity
from atoll.link.net.run_keys import throw_away

_calls = count()  # of torchrun_place: all processes count alike, and each link gets its own address
_c10d: Any = torch.distributed  # torch's annotations leave its stores out


class Place(NamedTuple):
    """Tells a process where the workers of its torchrun meet."""

    address: str
    """HOST:PORT at which worker 0 listens."""
    identity: Identity | None
    """Throw-away keys of its worker, if they were asked for."""


def torchrun_rank() -> tuple[int, int]:
    """Return this process's number in its torchrun, and how many there are; ConfigError if there is no torchrun."""
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError) as fault:
        raise _not_by_torchrun(fault) from fault


def _not_by_torchrun(fault: Exception) -> ConfigError:
    problem = f"address is missing, and this process was not started by torchrun ({fault})"
    return ConfigError(f"{problem}: give address, worker and workers", setting="address")


def torchrun_place(worker: int, workers: int, join_s: float, *, with_keys: bool) -> Place:
    """Return where worker 0 listens, if one torchrun has started all processes, and keys if they are needed.

    The first process makes the keys, and hands them out through torchrun's own store: that is open to every program
    that reaches it, and so are the processes that torchrun starts.

    Args:
        worker: This process's worker.
        workers: Number of workers.
        join_s: Seconds to wait for the first process.
        with_keys: Whether to hand out throw-away keys.

    Raises:
        ConfigError: This process was not started by torchrun, or its store cannot be used for keys.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as fault:
        raise _not_by_torchrun(fault) from fault
    first = torchrun_rank()[0] == 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        if with_keys:
            problem = "keys is missing, and there is no store of torchrun to hand them out: give this worker's folder"
            raise ConfigError(f'{problem}, made by `atoll keys new`; on a private cable, keys="none"', setting="keys")
        return Place(f"{host}:{port}", None)
    # The port belongs to torchrun's own store: through it, the first process publishes a free one.
    timeout = timedelta(seconds=join_s)
    store = _c10d.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    place = f"atoll/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"
    if first:
        for number, identity in enumerate(throw_away(workers).workers if with_keys else ()):
            store.set(f"{place}/keys/{number}", _pack(identity))
        store.set(f"{place}/address", f"{host}:{_free_port(host)}")
    address = str(store.get(f"{place}/address").decode())
    return Place(address, _unpack(store.get(f"{place}/keys/{worker}")) if with_keys else None)


def _pack(identity: Identity) -> str:
    return json.dumps([part.decode() for part in (identity.run_certificate, identity.certificate, identity.key)])


def _unpack(text: bytes) -> Identity:
    run_certificate, certificate, key = (part.encode() for part in json.loads(text))
    return Identity(Certificate.read(certificate).bearer, run_certificate, certificate, key)


def _free_port(host: str) -> int:
    family, kind, *_, target = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind) as probe:
        probe.bind(target)
        return int(probe.getsockname()[1])


def refuse_a_group_of_workers() -> None:
    """Raise a ConfigError if torch's default process group spans workers.

    A Hugging Face Trainer, Lightning or the script itself would wrap the model in DDP over that group, and average
    gradients over all workers at every step.
    """
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return
    host, rank, size = os.environ.get("MASTER_ADDR"), os.environ.get("RANK"), os.environ.get("WORLD_SIZE")
    raise ConfigError(
        f"a default process group spans {distributed.get_world_size()} processes of this torchrun, and every one of "
        "them is a worker: DDP, or a Trainer that uses it, averages their gradients at every step. Start each worker "
        'by itself, without torchrun, and give it connect("HOST:PORT", worker=..., workers=...); if nothing of the '
        f'model goes through the group, give the same here: connect("{host}:PORT", worker={rank}, workers={size})'
    )
