"""Codec speed as a ratio to a clone() of the same tensor, and what becomes of a Gaussian delta's direction and size.

    python benchmarks/codec.py

One core; 10 million fp32 values; the median of several runs, clones interleaved so that noise hits both alike.
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from torch import Tensor

from atoll.core.codec import Codec

VALUES = 10_000_000
REPEATS = 9


def seconds(action: Callable[[], object]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def main() -> None:
    torch.set_num_threads(1)
    vector = torch.randn(VALUES, generator=torch.Generator().manual_seed(0)) * 1e-4
    print(
        f"{'codec':6} {'bits':>7} {'clone ms':>9} {'encode/clone':>13} {'decode/clone':>13} {'cosine':>9} {'size':>7}"
    )
    for name in ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "e2m1"):
        codec = Codec(name)
        payload = codec.encode(vector)
        clones, encodes, decodes = [], [], []
        for _ in range(REPEATS):
            clones.append(seconds(vector.clone))
            encodes.append(seconds(partial(codec.encode, vector)))
            decodes.append(seconds(partial(codec.decode, payload, VALUES)))
        clone = median(clones)
        decoded = codec.decode(payload, VALUES)
        size = float(decoded.abs().mean() / vector.abs().mean())
        print(
            f"{name:6} {8 * payload.numel() / VALUES:7.4f} {1e3 * clone:9.1f} {median(encodes) / clone:13.2f} "
            f"{median(decodes) / clone:13.2f} {cosine(vector, decoded):9.6f} {size:7.4f}"
        )


def cosine(a: Tensor, b: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=0))


if __name__ == "__main__":
    main()
