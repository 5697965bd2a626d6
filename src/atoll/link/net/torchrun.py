"""Connects workers that one torchrun has started, and refuses a process group that spans them."""

import os
import socket
from itertools import count

from torch import distributed

from atoll.errors import ConfigError
from atoll.link.net.rendezvous import open_store

_calls = count()  # of torchrun_address: all processes count alike, and each link gets its own address


def torchrun_address(join_s: float) -> str:
    """Return where worker 0 listens, HOST:PORT, if one torchrun has started all processes."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        first = int(os.environ["RANK"]) == 0 and int(os.environ["WORLD_SIZE"]) > 0
    except (KeyError, ValueError) as fault:
        problem = f"address is missing, and this process was not started by torchrun ({fault})"
        raise ConfigError(f"{problem}: give address, worker and workers", setting="address") from fault
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return f"{host}:{port}"
    # The port belongs to torchrun's own store: through it, worker 0 publishes a free one.
    key = f"atoll/address/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}"
    store = open_store(host, port, join_s, is_master=False)
    if first:
        store.set(key, f"{host}:{_free_port(host)}")
    return str(store.get(key).decode())


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
