"""Trains one small decoder on two machines with Lightning; the callback is all that makes it a worker.

    pip install -e '.[lightning]'
    python examples/lightning_trainer.py 0 10.0.0.1:29500 --keys runs/x/keys/worker-0    # on 10.0.0.1
    python examples/lightning_trainer.py 1 10.0.0.1:29500 --keys runs/x/keys/worker-1    # on another machine

`atoll keys new` makes the keys; on one machine or a private cable, --keys none does. To continue a run that was killed,
start both again with --resume STEP, of the newest checkpoint that both have.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import atoll
from atoll.integrations.lightning import AtollCallback


class Decoder(lightning.LightningModule):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def loss(self, rows: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1] - 1, device=rows.device)
        logits = self.head(self.body(self.tokens(rows[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def training_step(self, batch: Any, index: int) -> Tensor:
        return self.loss(batch[0])

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("held_out_loss", self.loss(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", type=int)
    parser.add_argument("address")
    parser.add_argument("--keys", default="none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/lightning")
    parser.add_argument("--resume", type=int)
    given = parser.parse_args()

    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]  # the standard library, as bytes
    rows = torch.tensor(list(b"".join(file.read_bytes() for file in files)[:400_000])).view(-1, 50)
    train = DataLoader(TensorDataset(rows[:-64][given.worker :: 2]), batch_size=8, shuffle=True)  # its own part
    held = DataLoader(TensorDataset(rows[-64:]), batch_size=32)
    lightning.seed_everything(0)  # every worker starts from the same parameters
    model = Decoder()

    link = atoll.connect(given.address, worker=given.worker, workers=2, keys=given.keys)
    sync = atoll.Streaming(period=given.steps // 10, fragments=atoll.Blocks(each=2))
    third, folder = given.steps // 3, f"{given.out}/worker-{given.worker}"
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=third, save_top_k=-1)
    length = {"max_steps": given.steps, "val_check_interval": third, "check_val_every_n_epoch": None}
    trainer = lightning.Trainer(**length, callbacks=[AtollCallback(sync, link), saver], logger=False)
    trainer.fit(model, train, held, ckpt_path=f"{folder}/step={given.resume}.ckpt" if given.resume else None)
    print(f"worker {given.worker}: held-out loss {trainer.callback_metrics['held_out_loss']:.4f}")


if __name__ == "__main__":
    main()
