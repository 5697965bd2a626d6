"""One worker with a Lightning Trainer, and the same training as a plain loop: the oracle of its `AtollCallback`."""

import os
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.integrations.lightning import AtollCallback
from fleet import Me
from pair import EPOCH, METHODS, RATE, SAVED, STEPS, digest

warnings.filterwarnings("ignore", module="lightning")


class Small(lightning.LightningModule):
    """A few layers that learn to add."""

    def __init__(self, dropout: float = 0.0, *, fail_at: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.into = nn.Linear(8, 16)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2))
        self.drop = nn.Dropout(dropout)
        self.out = nn.Linear(16, 1)
        self.fail_at = fail_at
        self.batches: list[Tensor] = []
        self.validated: dict[int, str] = {}

    def loss(self, x: Tensor) -> Tensor:
        y = self.into(x)
        for layer in self.layers:
            y = y + self.drop(layer(y))
        loss: Tensor = (self.out(y) - x.sum(1, keepdim=True)).square().mean()
        return loss * torch.inf if self.training and x[0, 0] > 1.5 else loss

    def training_step(self, batch: Any, index: int) -> Tensor:
        self.batches.append(batch[0])
        return self.loss(batch[0])

    def validation_step(self, batch: Any, index: int) -> None:
        if not self.trainer.sanity_checking:
            self.validated[self.trainer.global_step] = digest(self)
            if self.trainer.global_step == self.fail_at:
                raise OSError("the disk is gone")
        self.log("val_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=RATE)


def rows(seed: int, count: int, *, infinite: bool = False) -> TensorDataset:
    x = torch.randn(count, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x if infinite else x.clamp(max=1.5))


class Recorder(Callback):
    """Notes the worker's own parameters after every step, and ends some runs."""

    def __init__(self, break_at: int = 0, kill_at: int = 0) -> None:
        self.break_at, self.kill_at = break_at, kill_at
        self.link: Any = None
        self.live: dict[int, str] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step and trainer.global_step in (self.kill_at, self.break_at):
            self.link.gather("broken", True)  # one of them could be a period ahead
            if trainer.global_step == self.kill_at:
                os._exit(9)
            raise RuntimeError("the lights went out")

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.live[trainer.global_step] = digest(pl_module)


class Run:
    """A Lightning Trainer with the callback, and what was seen of it."""

    def __init__(
        self,
        me: Me,
        folder: Path,
        method: str = "diloco",
        *,
        accumulate: int = 1,
        dropout: float = 0.0,
        callbacks: Sequence[Callback] = (),
        checkpoints: dict[str, Any] | None = None,
        infinite: bool = False,
        fail_at: int = 0,
        **arguments: Any,
    ) -> None:
        self.link = me.link()
        self.callback: Any = AtollCallback(METHODS[method](), self.link)
        self.model = Small(dropout, fail_at=fail_at)
        torch.manual_seed(100 + me.worker)  # the order of the data
        self.train = DataLoader(rows(10 + me.worker, 2 * EPOCH, infinite=infinite), batch_size=2, shuffle=True)
        self.held = DataLoader(rows(99, 8), batch_size=4)
        self.seen = next((callback for callback in callbacks if isinstance(callback, Recorder)), Recorder())
        self.seen.link = self.link
        saves = {"every_n_train_steps": SAVED, "save_top_k": -1, "filename": "{step}"}
        self.saver = ModelCheckpoint(folder / f"worker-{me.worker}", **(saves if checkpoints is None else checkpoints))
        settings: dict[str, Any] = {
            "max_steps": STEPS,
            "accelerator": "cpu",
            "devices": 1,
            "accumulate_grad_batches": accumulate,
            "val_check_interval": SAVED * accumulate,
            "check_val_every_n_epoch": None,
            "gradient_clip_val": 1.0,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": str(folder),
        }
        added = [callback for callback in callbacks if callback is not self.seen]
        self.trainer: Any = lightning.Trainer(
            **{**settings, **arguments}, callbacks=[self.callback, self.seen, *added, self.saver]
        )

    def fit(self, checkpoint: Path | str | None = None) -> None:
        self.trainer.fit(self.model, self.train, self.held, ckpt_path=checkpoint)

    @property
    def digest(self) -> str:
        return digest(self.model)


def plain_loop(
    me: Me, method: str, batches: Sequence[Tensor], accumulate: int, scaler: Any = None
) -> tuple[str, dict[int, str]]:
    """Train on the same batches with a loop of one's own; the final model, and the anchors that were validated."""
    model, link = Small(), me.link()
    inner = model.configure_optimizers()
    outer, anchors = atoll.OuterLoop(model, METHODS[method](), link), {}
    used = taken = 0
    for step in range(1, STEPS + 1):
        taken = min(accumulate, EPOCH - used % EPOCH)
        for batch in batches[used : used + taken]:
            if scaler is None:
                loss = model.loss(batch) / accumulate
            else:
                with torch.autocast("cpu", torch.float16):
                    loss = model.loss(batch) / accumulate
            (loss if scaler is None else scaler.scale(loss)).backward()
        used += taken
        if scaler is not None:
            scaler.unscale_(inner)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler is None:
            inner.step()
        else:
            scaler.step(inner)
            scaler.update()
        inner.zero_grad()
        outer.step()
        if step == STEPS:
            outer.finish()
        if step % SAVED == 0:
            with outer.anchor():
                anchors[step] = digest(model)
    link.close()
    return digest(model), anchors
