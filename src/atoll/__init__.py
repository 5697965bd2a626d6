"""One model, trained on workers that are far apart: DiLoCo, Streaming DiLoCo and Eager Updates for PyTorch."""

from atoll.core.outer import Nesterov
from atoll.errors import AtollError
from atoll.link.local import local, run_local
from atoll.loop import Crew, OuterLoop
from atoll.sync import DataParallel, Delayed, DiLoCo, Eager, Streaming, Sync

__version__ = "0.1.0"

__all__ = [
    "AtollError",
    "Crew",
    "DataParallel",
    "Delayed",
    "DiLoCo",
    "Eager",
    "Nesterov",
    "OuterLoop",
    "Streaming",
    "Sync",
    "local",
    "run_local",
]
