"""The ranks of one worker: how they share its batch, its model and its decisions.

A worker is one process, or several that torchrun has started. Either way the trainer asks its `Team` and has no cases:
a worker of one rank is `Team` itself, which does nothing. With several, each takes its rows of the worker's batch, so
that the worker computes the mean gradient that one rank would compute, but for the order of its sums.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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

from atoll.core.fragments import Fragment, find_blocks
from atoll.errors import AtollError, CheckpointError, ConfigError, LinkError
from atoll.link.base import Link
from atoll.link.net.seat import Seat
from atoll.link.ranks import RankGroup, ReplicatedLink, ShardedLink
from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Decoder, Loss
from atoll.train.model.hub import HubModel
from atoll.train.ranks import fsdp as shards
from atoll.train.step.backward import Pass

Model = Decoder | HubModel
Value = TypeVar("Value")
_c10d: Any = distributed  # torch's annotations leave its stores out
_calls = count()  # of this process; the ranks of a worker count alike, so each call has a place of its own to meet
_PATIENCE_S = 3600.0  # for a rank that evaluates, exports or saves; one that dies is noticed at once


class Team:
    """A worker of one rank, and what a worker of several overrides."""

    rank = 0
    ranks = 1
    whole = True
    """Whether this rank holds all of every parameter."""

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for the worker: it logs, exports and prints."""
        return self.rank == 0

    def settled(self, config: RunConfig) -> RunConfig:
        """The run as this rank has it."""
        return config

    def seed(self, seed: int) -> None:
        """Let this rank draw random numbers of its own (dropout)."""

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """Inside, the loss of another rank of this worker is a LinkError."""
        yield

    # ------------------------------------------------------------------ the model

    def share(self, batch: Tensor) -> Tensor:
        """This rank's rows of the worker's batch."""
        return batch

    def deal(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        """This rank's share of some batches, equally many for each; False: it is only there to keep step."""
        return ((batch, True) for batch in batches)

    def wrap(self, model: Model) -> Pass:
        """How to compute a loss; the parameters may be cut into parts, so this comes before any optimizer."""
        return lambda tokens, *, last=True: model.loss(tokens)

    def check_fragments(self, model: Model, fragments: Sequence[Fragment]) -> None:
        """Refuse fragments of which some rank would hold nothing."""

    def make_alike(self, model: Model) -> None:
        """After a backward pass: if some rank has found its gradient not finite, all have."""

    def tensors(self, model: Model) -> Mapping[str, Tensor] | None:
        """The state dict for whoever leads, where no rank has all of it: then all must ask. None: the model has it."""
        return None

    # ------------------------------------------------------------------ numbers and decisions

    def mean(self, value: Tensor) -> Tensor:
        """Of a scalar over all ranks, on its device."""
        return value

    def total(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks."""
        return list(numbers)

    def over_parts(self, numbers: Sequence[float]) -> list[float]:
        """Sums over all ranks that exchange a part with other workers; where one exchanges for all, its numbers."""
        return list(numbers)

    def any(self, flag: bool) -> bool:
        """Whether it is so on some rank."""
        return flag

    def first(self, ask: Callable[[], Value]) -> Value:
        """What the leading rank finds out, JSON; the others do not ask."""
        return ask()

    def each(self, value: Any) -> list[Any]:
        """What every rank says, JSON, in rank order."""
        return [value]

    def settle(self, ask: Callable[[], Value]) -> Value:
        """What those find out, JSON, who have a link to other workers: all know it then, or fail alike."""
        return ask()

    def link(self, end: Link | None) -> Link:
        """This rank's end of the worker's link, given the one to other processes, if it has one."""
        assert end is not None
        return end

    def common(self, steps: Sequence[int]) -> list[int]:
        """Which checkpoints every rank has, given those of this one, ascending."""
        everyone = self.each(list(steps))
        shared = set.intersection(*(set(theirs) for theirs in everyone))
        if any(everyone) and not shared:
            have = "; ".join(f"rank {rank} those of steps {theirs}" for rank, theirs in enumerate(everyone))
            raise CheckpointError(f"no checkpoint is there on every rank of this worker: {have}")
        return sorted(shared)


class _Several(Team):
    """What is the same however the ranks hold the model."""

    def __init__(self, config: RunConfig, seat: Seat, rank_group: RankGroup) -> None:
        self.rank, self.ranks = seat.rank, seat.ranks
        self._seat = seat
        self._rank_group = rank_group
        self._cuda = _on_gpu(config)

    def settled(self, config: RunConfig) -> RunConfig:
        if self.leads:
            return config
        return config.changed(**{"log.view": "none", "log.tensorboard": False, "log.wandb": None, "log.trackio": None})

    def seed(self, seed: int) -> None:
        if self.rank:
            torch.manual_seed(seed + self._seat.worker * self.ranks + self.rank)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as fault:
            of_torch = isinstance(fault, distributed.DistError) or "gloo" in str(fault)
            if isinstance(fault, AtollError) or not of_torch:
                raise
            raise self._rank_group.rank_lost_error(fault) from fault

    def share(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.ranks)[self.rank]

    def deal(self, batches: Sequence[Tensor]) -> Iterator[tuple[Tensor, bool]]:
        for first in range(0, len(batches), self.ranks):
            mine = first + self.rank
            yield batches[min(mine, len(batches) - 1)], mine < len(batches)

    def mean(self, value: Tensor) -> Tensor:
        summed = value.clone()
        distributed.all_reduce(summed)
        return summed / self.ranks

    def total(self, numbers: Sequence[float]) -> list[float]:
        return [float(number) for number in self._rank_group.all_reduce_sum(torch.tensor(numbers, dtype=torch.float64))]

    def any(self, flag: bool) -> bool:
        return self.total([flag])[0] > 0

    def first(self, ask: Callable[[], Value]) -> Value:
        found = json.dumps(self._rank_group.raise_on_all(lambda: ask() if self.leads else None))
        heard: Value = json.loads(self._rank_group.broadcast_text(found if self.leads else None))
        return heard

    def each(self, value: Any) -> list[Any]:
        return [json.loads(said) for said in self._rank_group.all_gather_text(json.dumps(value))]


class _Mirrored(_Several):
    """Every rank has the whole model, the same bits (DDP); the first exchanges with other workers."""

    def wrap(self, model: Model) -> Pass:
        # A mixture of experts leaves some without gradients in some steps.
        experts = isinstance(model, HubModel) and model.has_routers
        module = DistributedDataParallel(_LossOf(model), gradient_as_bucket_view=True, find_unused_parameters=experts)

        def loss(tokens: Tensor, *, last: bool = True) -> Loss:
            if not torch.is_grad_enabled():
                return model.loss(tokens)
            with nullcontext() if last else module.no_sync():
                return Loss(*module(tokens))

        return loss

    def settle(self, ask: Callable[[], Value]) -> Value:
        return self.first(ask)

    def link(self, end: Link | None) -> Link:
        return ReplicatedLink(self._rank_group, end, self._seat.worker, self._seat.workers)


class _Sharded(_Several):
    """Every rank has a part of every parameter (FSDP2), and exchanges it with the same rank of other workers."""

    whole = False

    def settled(self, config: RunConfig) -> RunConfig:
        config = super().settled(config)
        if config.compile is True:
            raise ConfigError('compile: true does not go with train.parallel = "fsdp": leave it out, or use "ddp"')
        return config.changed(compile=False)

    def wrap(self, model: Model) -> Pass:
        module: Any = _sharded(model, init_device_mesh("cuda" if self._cuda else "cpu", (self.ranks,)))

        def loss(tokens: Tensor, *, last: bool = True) -> Loss:
            found = Loss(*module(tokens))
            if not torch.is_grad_enabled():
                module.reshard()  # otherwise the backward pass does it, and until then parameters are no parts
            return found

        return loss

    def check_fragments(self, model: Model, fragments: Sequence[Fragment]) -> None:
        sizes = {name: parameter.shape[0] for name, parameter in model.named_parameters()}
        for fragment in fragments:
            rows = max(sizes[name] for name in fragment.parameters)
            if -(-rows // self.ranks) * (self.ranks - 1) >= rows:
                raise ConfigError(
                    f"train.parallel: {self.ranks} ranks are too many, the last one would hold nothing of fragment "
                    f'"{fragment.name}", whose largest dimension to cut is {rows}: use fewer, or "ddp"'
                )

    def make_alike(self, model: Model) -> None:
        shards.alike(model)

    def tensors(self, model: Model) -> Mapping[str, Tensor] | None:
        return shards.gathered(model, keep=self.leads)

    def over_parts(self, numbers: Sequence[float]) -> list[float]:
        return self.total(numbers)

    def settle(self, ask: Callable[[], Value]) -> Value:
        return self._rank_group.raise_on_all(ask)

    def link(self, end: Link | None) -> Link:
        assert end is not None
        return ShardedLink(self._rank_group, end)


class _LossOf(nn.Module):
    """A model whose forward pass is its loss: DDP and FSDP act before and after a forward pass, and know no other."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        loss = self.model.loss(tokens)
        return loss.total, loss.cross_entropy


def _sharded(model: Model, mesh: DeviceMesh) -> nn.Module:
    """Cut every parameter along its first dimension; one block's are put together at a time."""
    from torch.distributed.fsdp import fully_shard  # a fifth of a second that few need

    module = _LossOf(model)
    stacks = dict.fromkeys(path.rpartition(".")[0] for path in find_blocks(model))
    for stack in stacks:
        for block in model.get_submodule(stack).children():  # frozen ones too: blocks of two types would be no stack
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


# ---------------------------------------------------------------------- set-up


@contextmanager
def team_of(config: RunConfig, seat: Seat | None) -> Iterator[Team]:
    """The ranks of this process's worker, connected: torch's default process group is theirs meanwhile."""
    on_gpu = _on_gpu(config) and "LOCAL_RANK" in os.environ
    if on_gpu and seat is not None:
        _take_gpu(config, seat.ranks)
    if seat is None or seat.ranks == 1:
        yield Team()
        return
    parts = seat.ranks * config.train.accumulate
    if config.train.batch % parts:
        raise ConfigError(
            f"train.batch: must be a multiple of ranks * train.accumulate ({seat.ranks} * {config.train.accumulate}), "
            f"got {config.train.batch}: each rank computes equally many sequences"
        )
    timeout = timedelta(seconds=_PATIENCE_S + config.link.deadline_s + config.link.join_s)
    _connect(seat, on_gpu, timeout)
    try:
        rank_group = RankGroup(distributed.new_group(backend="gloo", timeout=timeout))
        yield (_Sharded if config.train.parallel == "fsdp" else _Mirrored)(config, seat, rank_group)
    except BaseException:
        if not on_gpu:  # NCCL would wait for the ranks that are gone; the process is about to end anyway
            distributed.destroy_process_group()
        raise
    distributed.destroy_process_group()


def _connect(seat: Seat, on_gpu: bool, timeout: timedelta) -> None:
    world = int(os.environ["WORLD_SIZE"])
    try:
        # torchrun's store: its processes may be those of several workers, so each worker has a place of its own there.
        store, *_ = next(rendezvous("env://", int(os.environ["RANK"]), world, timeout=timeout))
        place = f"atoll/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_calls)}/worker-{seat.worker}"
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            store=_c10d.PrefixStore(place, store),
            rank=seat.rank,
            world_size=seat.ranks,
            timeout=timeout,
            device_id=torch.device("cuda", torch.cuda.current_device()) if on_gpu else None,
        )
    except RuntimeError as fault:
        problem = shorten(str(fault), 300, placeholder=" ...")
        raise LinkError(f"{seat} cannot connect to the other ranks of its worker: {problem}") from fault


def _on_gpu(config: RunConfig) -> bool:
    return config.device.startswith("cuda") or (config.device == "auto" and torch.cuda.is_available())


def _take_gpu(config: RunConfig, ranks: int) -> None:
    """Let "cuda" mean this process's own GPU among those that torchrun's processes on this machine share."""
    found, local = torch.cuda.device_count(), int(os.environ["LOCAL_RANK"])
    if ranks > 1 and (config.device not in ("auto", "cuda") or local >= found):
        problem = f"and this machine has {found} GPUs for {os.environ.get('LOCAL_WORLD_SIZE')} ranks"
        raise ConfigError(
            f'device: "{config.device}", {problem}: every rank needs one of its own; use "cuda" with at most {found} '
            'ranks here, or "cpu"'
        )
    if found and config.device in ("auto", "cuda"):
        torch.cuda.set_device(local % found)
