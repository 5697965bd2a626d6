"""Trains one decoder on two machines of several GPUs each; FSDP2 shards the model inside a machine.

    torchrun --nproc-per-node 8 examples/fsdp2.py 0 10.0.0.1:29500 --keys runs/x/keys/worker-0    # on 10.0.0.1
    torchrun --nproc-per-node 8 examples/fsdp2.py 1 10.0.0.1:29500 --keys runs/x/keys/worker-1    # on another machine

Every rank exchanges its shard with the same rank of the other machine. `atoll keys new` makes the keys.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import atoll
from atoll.link.ranks import RankGroup, ShardedLink


class Decoder(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def forward(self, rows: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(rows.shape[1] - 1, device=rows.device)
        logits = self.head(self.body(self.tokens(rows[:, :-1]), mask=mask, is_causal=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", type=int)
    parser.add_argument("address")
    parser.add_argument("--keys", default="none")
    parser.add_argument("--steps", type=int, default=300)
    given = parser.parse_args()

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()  # between the ranks of this worker
    mesh = init_device_mesh(kind, (dist.get_world_size(),))
    rank, ranks = mesh.get_rank(), mesh.size()
    torch.manual_seed(0)  # every worker starts from the same parameters
    model = Decoder().to(kind)
    for layer in model.body.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]  # the standard library, as bytes
    rows = torch.tensor(list(b"".join(file.read_bytes() for file in files)[:400_000]), device=kind).view(-1, 50)
    shard = rows[:-64][given.worker * ranks + rank :: 2 * ranks]  # every rank of every worker has its own part
    batches = torch.Generator().manual_seed(given.worker * ranks + rank)

    far = atoll.connect(given.address, worker=given.worker, workers=2, keys=given.keys, rank=rank, ranks=ranks)
    link = ShardedLink(RankGroup(dist.new_group(backend="gloo")), far)  # all ranks succeed or fail together
    outer = atoll.OuterLoop(model, atoll.Streaming(period=given.steps // 10, fragments=atoll.Blocks(each=2)), link)
    for _ in range(given.steps):
        loss = model(shard[torch.randint(len(shard), (8,), generator=batches)])
        inner.zero_grad()
        loss.backward()
        inner.step()
        outer.step()
    outer.finish()
    link.close()
    loss = model(rows[-64:]).item()  # on every rank: FSDP gathers the parameters
    if rank == 0:
        print(f"worker {given.worker}: held-out loss {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
