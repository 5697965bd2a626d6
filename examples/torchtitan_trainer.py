"""Makes a worker of torchtitan's Trainer; written for torchtitan 0.2.2, at commit b5bcd76c of August 2026.

    export PYTHONPATH=examples WORKER="--worker 0 --address 10.0.0.1:29500 --keys runs/x/keys/worker-0"
    torchrun --nproc-per-node 8 -m torchtitan.train --module torchtitan_trainer --config llama3_debugmodel $WORKER

Every machine is a worker with a torchrun of its own, and FSDP2 shards the model inside it. Pipeline parallelism is not
supported, and validation sees the worker's own parameters. With --checkpoint.enable, the same commands continue a run.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torchtitan.components.data import GrainDataLoader
from torchtitan.models.llama3 import config_registry
from torchtitan.trainer import Trainer

import atoll
from atoll.link.ranks import RankGroup, ShardedLink


class WorkerLoader(GrainDataLoader):
    """Gives every rank of every worker its own part of the data."""

    @dataclass(kw_only=True, slots=True)
    class Config(GrainDataLoader.Config):
        worker: int = 0
        workers: int = 1

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, **rest: Any) -> None:
        dp_rank += config.worker * dp_world_size
        super().__init__(config, dp_world_size=config.workers * dp_world_size, dp_rank=dp_rank, **rest)


class AtollTrainer(Trainer):
    """Counts train steps in an outer loop, whose state is saved beside torchtitan's checkpoints."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        worker: int = 0
        workers: int = 2
        address: str = "127.0.0.1:29500"
        keys: str = "none"
        period: int = 100

    def __init__(self, config: Config) -> None:
        config.debug.seed = config.debug.seed or 42  # the same parameters on every worker
        config.dataloader = extended(WorkerLoader, config.dataloader, worker=config.worker, workers=config.workers)
        super().__init__(config)
        rank, seat = dist.get_rank(), {"worker": config.worker, "workers": config.workers, "keys": config.keys}
        far = atoll.connect(config.address, **seat, rank=rank, ranks=dist.get_world_size())
        self.folder = f"{config.dump_folder}/outer/rank-{rank}"
        whole = Path(config.dump_folder, config.checkpoint.folder)  # torchtitan writes .metadata last
        saved = [n for n in atoll.checkpoint.steps(self.folder) if (whole / f"step-{n}" / ".metadata").exists()]
        config.checkpoint.load_step = atoll.checkpoint.common_step(far.gather("saved", saved)) or -1
        self.link = ShardedLink(RankGroup(dist.new_group(backend="gloo")), far)
        self.outer: atoll.OuterLoop | None = None

    def train_step(self, data_iterator: Any) -> None:
        if self.outer is None:  # once the checkpoint is loaded; a model of one part, without pipeline
            self.outer = atoll.OuterLoop(*self.model_parts, atoll.Streaming(period=self.config.period), self.link)
            if self.step > 1:
                self.outer.load_state_dict(atoll.checkpoint.load(self.folder, self.step - 1)[1]["outer"])
        super().train_step(data_iterator)
        self.outer.step()
        if self.step == self.config.training.steps:
            self.outer.finish()  # before the last checkpoint: the same model on every worker
            self.link.close()
        elif self.config.checkpoint.enable and self.step % self.config.checkpoint.interval == 0:
            atoll.checkpoint.save(self.folder, self.step, {"outer": self.outer.state_dict()}, keep=10)


def extended(owner: Any, config: Any, **more: Any) -> Any:
    return owner.Config(**{field.name: getattr(config, field.name) for field in fields(config)}, **more)


def llama3_debugmodel() -> Any:
    return extended(AtollTrainer, config_registry.llama3_debugmodel())
