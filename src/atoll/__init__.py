"""One model, trained on workers that are far apart: DiLoCo, Streaming DiLoCo and Eager Updates for PyTorch."""

from atoll import checkpoint  # noqa: F401 - so that `atoll.checkpoint` works after `import atoll`
from atoll.core.outer import Nesterov
from atoll.crew import Crew
from atoll.errors import AtollError
from atoll.link.local import local, run_local
from atoll.loop import OuterLoop
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
