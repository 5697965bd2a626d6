"""The ranks of one worker: how they split its batch, hold its model and decide together.

A worker is one process, or several that torchrun has started. Each rank takes its rows of the batch, so the worker
computes the mean gradient that one rank would compute, up to the order of sums.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from itertools import count
from textwrap import shorten
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from atoll.core.fragments import find_blocks
from atoll.errors import AtollError, CheckpointError, ConfigError, LinkError
from atoll.link.base import Link
from atoll.link.elastic_ranks import ElasticRanksLink
from atoll.link.elastic_shards import ElasticShardsLink
from atoll.link.ranks import RankGroup, ReplicatedLink, ShardedLink
from atoll.link.seat import Seat
from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Decoder, Loss
from atoll.train.model.hub import HubModel
from atoll.train.step.backward import LossFunction
from atoll.train.step.recipe import device_of

Model = Decoder | HubModel
Value = TypeVar("Value")
_c10d: Any = distributed  # torch's annotations leave its stores out
_groups = count()  # numbers the process groups made here; the ranks of a worker count alike
_TIMEOUT_S = 3600.0  # for a rank that evaluates, exports or saves; one that dies is noticed at once

_WITHOUT_END = timedelta(days=365)  # the leader may wait for other workers, as in a pause, while the others wait for it


class WorkerRanks:
    """Runs as one rank of a worker whose ranks each hold the whole model (DDP), or as its only rank.

    The leader exchanges with other workers. `FSDPRanks` has what differs where each rank holds a shard.

    Args:
        seat: This process's place in the run; None if it is the only one.
        rank_group: The ranks of the worker; None if it has one.
    """

    hold_whole_model = True
    """Whether each rank holds all of every parameter."""

    def __init__(self, seat: Seat | None = None, rank_group: RankGroup | None = None) -> None:
        self._seat = seat or Seat(0, 1)
        self._rank_group = rank_group
        self.rank, self.count = self._seat.rank, self._seat.ranks

    @property
    def is_leader(self) -> bool:
        """Whether this rank logs, exports and prints for its worker."""
        return self.rank == 0

    def local_config(self, config: RunConfig) -> RunConfig:
        """Return the settings as this rank uses them."""
        if self.is_leader:
            return config
        nothing = {"log.tensorboard": False, "log.wandb": None, "log.trackio": None, "log.alert": None}
        return config.changed(**{"log.view": "none", **nothing})

    def seed(self, seed: int) -> None:
        """Seed this rank's random numbers (dropout) differently from the leader's."""
        if self.rank:
            torch.manual_seed(seed + self._seat.worker * self.count + self.rank)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Turn the loss of another rank of this worker into a LinkError."""
        try:
            yield
        except RuntimeError as error:
            of_torch = isinstance(error, distributed.DistError) or "gloo" in str(error)
            if self._rank_group is None or isinstance(error, AtollError) or not of_torch:
                raise
            raise self._rank_group.rank_lost_error(error) from error

    # ------------------------------------------------------------------ the model

    def own_rows(self, batch: Tensor) -> Tensor:
        """Return this rank's rows of the worker's batch."""
        return batch.chunk(self.count)[self.rank]

    def own_batches(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """Yield this rank's batches, equally many on each rank; False marks one that does not count."""
        for first in range(0, len(batches), self.count):
            mine = first + self.rank
            yield batches[min(mine, len(batches) - 1)], mine < len(batches)

    def wrap(self, model: Model) -> LossFunction:
        """Return the model's loss function; may shard the parameters, so call it before making optimizers."""
        if self.count == 1:
            return lambda tokens, *, last=True: model.loss(tokens)
        # A mixture of experts leaves some experts without gradients in some steps.
        experts = isinstance(model, HubModel) and model.has_routers
        module = DistributedDataParallel(_LossOf(model), gradient_as_bucket_view=True, find_unused_parameters=experts)

        def loss(tokens: Tensor, *, last: bool = True) -> Loss:
            if not torch.is_grad_enabled():
                return model.loss(tokens)
            with nullcontext() if last else module.no_sync():
                return Loss(*module(tokens))

        return loss

    # ------------------------------------------------------------------ numbers and decisions

    def mean(self, value: Tensor) -> Tensor:
        """Return the mean of a scalar over all ranks, on its device."""
        if self.count == 1:
            return value
        summed = value.clone()
        distributed.all_reduce(summed)
        return summed / self.count

    def sum(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over all ranks."""
        if self._rank_group is None:
            return list(numbers)
        return [float(number) for number in self._rank_group.all_reduce_sum(torch.tensor(numbers, dtype=torch.float64))]

    def sum_over_shards(self, numbers: Sequence[float]) -> list[float]:
        """Return sums over the ranks that exchange a shard each; the leader's numbers if it exchanges alone."""
        return list(numbers) if self.hold_whole_model else self.sum(numbers)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return self.sum([flag])[0] > 0

    def from_leader(self, ask: Callable[[], Value]) -> Value:
        """Return what the leader finds, as JSON; the other ranks do not call `ask`."""
        if self._rank_group is None:
            return ask()
        found = json.dumps(self._rank_group.raise_on_all(lambda: ask() if self.is_leader else None))
        heard: Value = json.loads(self._rank_group.broadcast_text(found if self.is_leader else None))
        return heard

    def decide(self, ask: Callable[[], Value]) -> Value:
        """Return what the ranks with a link to other workers find, as JSON; all return it or all fail."""
        return self.from_leader(ask)

    def wrap_link(self, end: Link | None) -> Link:
        """Return this rank's end of the worker's link, given the one to other processes if it has one."""
        if self._rank_group is not None:
            return ReplicatedLink(self._rank_group, end, self._seat.worker, self._seat.workers)
        assert end is not None
        return end

    def wrap_elastic(self, end: Link | None) -> Link:
        """Return this rank's end of an elastic worker's link, which only the leader has."""
        if self._rank_group is not None:
            return ElasticRanksLink(self._rank_group, end, self._seat.worker, self._seat.workers)
        assert end is not None
        return end

    def common_steps(self, steps: Sequence[int], *, required: bool = True) -> list[int]:
        """Return the steps of checkpoints that every rank has, ascending, given those of this one.

        Raises:
            CheckpointError: Ranks have checkpoints, but none in common, and one is `required`.
        """
        if self._rank_group is None:
            return list(steps)
        everyone = [json.loads(said) for said in self._rank_group.all_gather_text(json.dumps(steps))]
        shared = set.intersection(*(set(theirs) for theirs in everyone))
        if required and any(everyone) and not shared:
            have = "; ".join(f"rank {rank} those of steps {theirs}" for rank, theirs in enumerate(everyone))
            raise CheckpointError(f"no checkpoint is there on every rank of this worker: {have}")
        return sorted(shared)


class FSDPRanks(WorkerRanks):
    """Runs as one rank of several that each hold a shard of every parameter (FSDP2).

    Each rank exchanges its shard with the same rank of other workers; where workers come and go, through the leader.

    Args:
        seat: This process's place in the run.
        rank_group: The ranks of the worker.
        offers: The same ranks, for threads that pass offers to the leader; None if members are fixed.
    """

    hold_whole_model = False

    def __init__(self, seat: Seat, rank_group: RankGroup, offers: RankGroup | None = None) -> None:
        super().__init__(seat, rank_group)
        self._shards = rank_group
        self._offers = offers

    def local_config(self, config: RunConfig) -> RunConfig:
        """Return the settings as this rank uses them; ConfigError if they compile the model."""
        if config.compile is True:
            raise ConfigError('compile: true does not go with train.parallel = "fsdp": leave it out, or use "ddp"')
        return super().local_config(config).changed(compile=False)

    def wrap(self, model: Model) -> LossFunction:
        """Shard the model; return its loss function."""
        module: Any = _shard(model, init_device_mesh(next(model.parameters()).device.type, (self.count,)))

        def loss(tokens: Tensor, *, last: bool = True) -> Loss:
            found = Loss(*module(tokens))
            if not torch.is_grad_enabled():
                module.reshard()  # otherwise the backward pass does it, and until then parameters are whole
            return found

        return loss

    def decide(self, ask: Callable[[], Value]) -> Value:
        """Return what this rank finds; all ranks succeed or all fail."""
        return self._shards.raise_on_all(ask)

    def wrap_link(self, end: Link | None) -> Link:
        """Return this rank's end of the worker's link."""
        assert end is not None
        return ShardedLink(self._shards, end)

    def wrap_elastic(self, end: Link | None) -> Link:
        """Return this rank's end of an elastic worker's link, which only the leader has."""
        assert self._offers is not None
        return ElasticShardsLink(self._shards, self._offers, end, self._seat.worker, self._seat.workers)


class _LossOf(nn.Module):
    """Makes a model's loss its forward pass, the only pass that DDP and FSDP hook into."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.model.loss(tokens)
        return loss.total, loss.cross_entropy


def _shard(model: Model, mesh: DeviceMesh) -> nn.Module:
    """Shard every parameter along its first dimension; FSDP gathers one block at a time."""
    from torch.distributed.fsdp import fully_shard  # takes 0.2 s, and few runs need it

    module = _LossOf(model)
    stacks = dict.fromkeys(path.rpartition(".")[0] for path in find_blocks(model))
    for stack in stacks:
        for block in model.get_submodule(stack).children():  # frozen ones too: FSDP wants one type per stack
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


# ---------------------------------------------------------------------- set-up


@contextmanager
def connect_ranks(config: RunConfig, seat: Seat | None) -> Iterator[WorkerRanks]:
    """Connect the ranks of this process's worker; inside, torch's default process group is theirs."""
    on_gpu = "LOCAL_RANK" in os.environ and device_of(config).startswith("cuda")
    if on_gpu and seat is not None:
        _set_gpu(config, seat.ranks)
    if seat is None or seat.ranks == 1:
        yield WorkerRanks(seat)
        return
    parts = seat.ranks * config.train.accumulate
    if config.train.batch % parts:
        raise ConfigError(
            f"train.batch: must be a multiple of ranks * train.accumulate ({seat.ranks} * {config.train.accumulate}), "
            f"got {config.train.batch}: each rank computes equally many sequences"
        )
    timeout = timedelta(seconds=_TIMEOUT_S + config.link.deadline_s + config.link.join_s)
    if config.link.elastic:
        timeout = _WITHOUT_END
    _init_process_group(seat, on_gpu, timeout)
    try:
        groups = [RankGroup(distributed.new_group(backend="gloo", timeout=timeout))]
        shards = config.train.parallel == "fsdp"
        if shards and config.link.elastic:
            groups.append(RankGroup(distributed.new_group(backend="gloo", timeout=timeout)))
        yield FSDPRanks(seat, *groups) if shards else WorkerRanks(seat, *groups)
    except BaseException:
        if not on_gpu:  # NCCL would wait for ranks that are gone; the process ends anyway
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def _init_process_group(seat: Seat, on_gpu: bool, timeout: timedelta) -> None:
    world = int(os.environ["WORLD_SIZE"])
    try:
        # One torchrun may have started several workers, so each uses its own prefix of torchrun's store.
        store, *_ = next(rendezvous("env://", int(os.environ["RANK"]), world, timeout=timeout))
        prefix = f"atoll/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_groups)}/worker-{seat.worker}"
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=_c10d.PrefixStore(prefix, store),
            rank=seat.rank,
            world_size=seat.ranks,
            timeout=timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
        )
    except RuntimeError as error:
        problem = shorten(str(error), 300, placeholder=" ...")
        raise LinkError(f"{seat} cannot connect to the other ranks of its worker: {problem}") from error


def _set_gpu(config: RunConfig, ranks: int) -> None:
    """Make "cuda" mean this process's own GPU among those of this machine."""
    found, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if ranks > 1 and (config.device not in ("auto", "cuda") or local >= found):
        problem = f"and this machine has {found} GPUs for {os.environ.get('LOCAL_WORLD_SIZE')} ranks"
        raise ConfigError(
            f'device: "{config.device}", {problem}: every rank needs its own GPU; use "cuda" with at most {found} '
            'ranks here, or "cpu"'
        )
    if found and config.device in ("auto", "cuda"):
        torch.cuda.set_device(local % found)
