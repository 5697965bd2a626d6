"""Finds this process's place in a run and connects it to the other processes."""

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from atoll.errors import ConfigError
from atoll.link.base import Link
from atoll.link.local import local
from atoll.link.net.fixed_link import Limits, NetLink, NetOptions
from atoll.link.net.registry import INSECURE
from atoll.link.net.torchrun import torchrun_place
from atoll.link.seat import Seat
from atoll.link.shaped import Outage, Shape, shaped
from atoll.plan.line import parse_line
from atoll.settings.config import RunConfig
from atoll.settings.conflicts import given_faults
from atoll.train.ranks.security import security_of
from atoll.train.ranks.worker_ranks import WorkerRanks


def find_seat(config: RunConfig, worker: int | None, environment: Mapping[str, str] = os.environ) -> Seat | None:
    """Return this process's seat in the run, or None if it trains all workers by itself.

    With `worker`, the processes of one torchrun are the ranks of that worker. Without it, one torchrun has started the
    ranks of all workers.

    Raises:
        ConfigError: if address, worker number, method or number of processes do not fit each other.
    """
    rank, ranks = 0, 1
    workers = config.sync.workers
    under_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if under_torchrun:
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if (worker is not None or under_torchrun) and (faults := given_faults(config.faults)):
        # `settings/conflicts.py` sees only runs with an address
        raise ConfigError(f"faults.{faults[0]}: is for workers of one process; between processes, members are fixed")
    if config.link.elastic and worker is None:
        raise ConfigError("link.elastic: say which worker this is: --worker 0 or another", setting="link.elastic")
    if worker is not None:
        if config.link.address is None and not config.link.elastic:
            raise ConfigError(
                "link.address: is left out, but a worker in a separate process needs the address of worker 0: give "
                "it with --address HOST:PORT, or in the run file"
            )
        if config.sync.method == "none":
            raise ConfigError('sync.method: "none" does not synchronise workers, so none can be on another machine')
        if not 0 <= worker < workers:
            raise ConfigError(f"--worker {worker}: must be from 0 to {workers - 1} (sync.workers = {workers})")
        return Seat(worker, workers, rank, ranks)
    if under_torchrun:
        if ranks % workers:
            raise ConfigError(
                f"sync.workers: {workers} do not divide the {ranks} processes that torchrun has started; "
                "start a multiple of them, or start each worker with a separate torchrun and --worker"
            )
        each = ranks // workers
        return Seat(rank // each, workers, rank % each, each)
    if config.link.address is not None:
        raise ConfigError(
            f"link.address: is {config.link.address}, so say which worker this is (--worker 0 or another), or leave it "
            "out of the run file to train all workers in this process"
        )
    return None


def connect_links(config: RunConfig, seat: Seat | None, ranks: WorkerRanks) -> tuple[list[Link], NetLink | None]:
    """Return the links of the workers in this process, and the link to other processes without its emulation.

    Returns:
        One link per worker, in worker order, none if workers do not synchronise; and the link to other processes, or
        None on a rank that has none. Ranks that hold the whole model share the link of their leader.
    """
    if config.sync.method == "none":
        return [], None
    ends: list[Link] = []
    to_others: NetLink | None = None
    if seat is None:
        ends += local(config.sync.workers, faults=config.faults_of_link(), timeout_s=config.link.deadline_s)
    elif ranks.is_leader or not ranks.hold_whole_model:
        to_others = NetLink(_options(config, seat), replace(seat, rank=0, ranks=1) if ranks.hold_whole_model else seat)
        if config.log.view != "none":
            to_others.waiting = replace(to_others.waiting, on_wait=partial(print, flush=True))
        ends.append(to_others)
    if config.link.emulate is not None and ends:
        ends = [*shaped(ends, emulated_line(config, 1 if ranks.hold_whole_model else ranks.count))]
    return [ranks.wrap_link(end) for end in ends] or [ranks.wrap_link(None)], to_others


def _options(config: RunConfig, seat: Seat) -> NetOptions:
    """Return how this process takes part; without an address, as torchrun's store has it."""
    link = config.link
    limits = Limits(deadline_s=link.deadline_s, silent_s=link.silent_s, join_s=link.join_s)
    if link.address is not None:
        return NetOptions(address=link.address, security=security_of(config, seat.worker), **limits)
    has_own = link.keys is not None or link.security == INSECURE
    place = torchrun_place(seat.worker, seat.workers, link.join_s, with_keys=not has_own)
    return NetOptions(address=place.address, security=place.identity or security_of(config, seat.worker), **limits)


def emulated_line(config: RunConfig, ranks: int = 1) -> Shape:
    """Return the slow line that `link.emulate` asks for, divided among the ranks that share it."""
    settings = config.link
    assert settings.emulate is not None
    try:
        line = parse_line(settings.emulate)
    except ConfigError as error:
        raise ConfigError(f"link.emulate: {error}") from error
    return Shape(
        bits_per_s=line.bits_per_s / ranks,
        latency_s=line.latency_s,
        jitter_s=settings.jitter_s,
        loss=settings.loss,
        outages=tuple(Outage(start_s=outage.start_s, length_s=outage.length_s) for outage in settings.outages),
        seed=config.seed,
    )
