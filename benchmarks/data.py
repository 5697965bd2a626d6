"""What the data pipeline delivers, against what training on the CPU eats.

    python benchmarks/data.py

The standard library as bytes, sequences of 256, batches of 8, four workers that share one file; the tiny decoder with
AdamW in fp32. Both take turns, so that noise hits them alike; the figure is the ratio of their tokens a second.
"""

import argparse
import tempfile
import time

import torch

from atoll.settings.model_presets import preset
from atoll.settings.run_settings import DataSection
from atoll.train.data.batches import Batches
from atoll.train.data.token_files import prepare
from atoll.train.model.decoder import Decoder

SEQUENCE, BATCH, WORKERS = 256, 8, 4
DRAWS = 32  # batches for each one that is trained on


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    steps: int = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as cache:
        start = time.perf_counter()
        data = prepare(DataSection(source="stdlib", cache=cache))
        built = time.perf_counter() - start
        tokens = len(data.train[0]) + len(data.held_out)
        print(f"build:    {tokens / 1e6:8.1f} million tokens of {data.documents} documents in {built:.2f} s")
        batches = Batches(data.train, workers=WORKERS, batch=BATCH, sequence=SEQUENCE, seed=0)
        model = Decoder(preset("tiny", context=SEQUENCE), generator=torch.Generator().manual_seed(0))
        inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        seconds = {"pipeline": 0.0, "training": 0.0}
        for step in range(-5, steps):  # the first steps warm up
            start = time.perf_counter()
            for draw in range(DRAWS):
                batch = batches.batch(draw % WORKERS, (max(step, 0) * DRAWS + draw) // WORKERS)
            drawn = time.perf_counter()
            model.loss(batch).total.backward()
            inner.step()
            inner.zero_grad()
            if step >= 0:
                seconds["pipeline"] += drawn - start
                seconds["training"] += time.perf_counter() - drawn
    speed = {"pipeline": DRAWS / seconds["pipeline"], "training": 1 / seconds["training"]}
    for name, batches_per_s in speed.items():
        print(f"{name + ':':9} {batches_per_s * steps * BATCH * SEQUENCE / 1e6:8.3f} million tokens/s")
    print(f"ratio:    {speed['pipeline'] / speed['training']:8.1f} (wanted: at least 20)")


if __name__ == "__main__":
    main()
