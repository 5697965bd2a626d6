"""The folder of a run, out/name/: what is in it, and what it is called.

run.toml        every setting, also those that the run file left out; once it is there, the run has begun
about.json      versions, seed, device, sizes
metrics.jsonl   what happened (atoll.events)
checkpoints/    the latest whole states of the run
best/           the outer parameters with the lowest held-out loss, exported like model/
model/          the final model, exported
"""

from typing import Final

RUN: Final = "run.toml"
ABOUT: Final = "about.json"
METRICS: Final = "metrics.jsonl"
CHECKPOINTS: Final = "checkpoints"
BEST: Final = "best"
MODEL: Final = "model"
