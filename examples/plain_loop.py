"""Trains one small decoder on two machines with a plain PyTorch loop; it continues where it was killed.

    python examples/plain_loop.py 0 10.0.0.1:29500 --keys runs/plain/keys/worker-0    # on 10.0.0.1
    python examples/plain_loop.py 1 10.0.0.1:29500 --keys runs/plain/keys/worker-1    # on another machine

`atoll keys new` makes the keys (--keys none: on one machine). To continue a run that was killed, start both again.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor, nn

import atoll


class Decoder(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, rows: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1] - 1)
        logits = self.head(self.body(self.tokens(rows[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", type=int)
    parser.add_argument("address")
    parser.add_argument("--keys", default="none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/plain")
    given = parser.parse_args()

    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]  # the standard library, as bytes
    rows = torch.tensor(list(b"".join(file.read_bytes() for file in files)[:400_000])).view(-1, 50)
    train, held = rows[:-64][given.worker :: 2], rows[-64:]  # every worker has its own part of the data ...
    batches = torch.Generator().manual_seed(given.worker)
    torch.manual_seed(0)  # ... and starts from the same parameters
    model = Decoder()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    link = atoll.connect(given.address, worker=given.worker, workers=2, keys=given.keys)
    folder = f"{given.out}/worker-{given.worker}/checkpoints"
    found = atoll.checkpoint.load_common(folder, link)  # the newest that both have
    if found is not None:
        _, state = found
        model.load_state_dict(state["model"])  # the model first, then the outer loop around it
        inner.load_state_dict(state["inner"])
        batches.set_state(state["batches"])
    outer = atoll.OuterLoop(model, atoll.Streaming(period=given.steps // 10, fragments=atoll.Blocks(each=2)), link)
    if found is not None:
        outer.load_state_dict(state["outer"])

    while outer.steps < given.steps:
        if outer.steps % (given.steps // 5) == 0:  # also before the first step: a checkpoint that both have
            state = {"model": model.state_dict(), "inner": inner.state_dict(), "batches": batches.get_state()}
            atoll.checkpoint.save(folder, outer.steps, {**state, "outer": outer.state_dict()})
        loss = model(train[torch.randint(len(train), (8,), generator=batches)])
        inner.zero_grad()
        loss.backward()
        inner.step()
        outer.step()
    outer.finish()  # both have the same model now: save it once more
    link.close()
    torch.save(model.state_dict(), f"{given.out}/worker-{given.worker}/model.pt")
    print(f"worker {given.worker}: held-out loss {model.eval()(held).item():.4f}")


if __name__ == "__main__":
    main()
