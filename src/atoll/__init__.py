"""atoll: one model, trained on workers that are far apart.

Names are imported when they are first used: `atoll --help` and a look at a run file need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from atoll.version import __version__ as __version__

if TYPE_CHECKING:
    from atoll.core.outer import Nesterov
    from atoll.crew import Crew
    from atoll.errors import AtollError
    from atoll.link.dist import connect
    from atoll.link.local import local, run_local
    from atoll.loop import OuterLoop
    from atoll.sync import DataParallel, Delayed, DiLoCo, Eager, Streaming, Sync

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
    "connect",
    "local",
    "run_local",
]

_HOMES = {
    "AtollError": "errors",
    "Crew": "crew",
    "Nesterov": "core.outer",
    "OuterLoop": "loop",
    "connect": "link.dist",
    "local": "link.local",
    "run_local": "link.local",
    "checkpoint": "",  # a module
}


def __getattr__(name: str) -> Any:
    if name not in __all__ and name not in _HOMES:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    home = _HOMES.get(name, "sync")
    if not home:
        return importlib.import_module(f"atoll.{name}")
    return getattr(importlib.import_module(f"atoll.{home}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
