"""Trains one model on workers that are far apart: DiLoCo, Streaming DiLoCo and Eager Updates for PyTorch.

Names are imported when they are first used: `atoll --help` and a look at a run file need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

from atoll.version import __version__ as __version__

if TYPE_CHECKING:
    from atoll.core.codec import Codec
    from atoll.core.fragments import Balanced, Blocks, Patterns, Whole
    from atoll.core.outer_step import SGD, Adam, Blend, EagerMerge, Momentum, Nesterov
    from atoll.errors import AtollError, CheckpointError, ConfigError, DataError, LinkError, NonFiniteError
    from atoll.link.local import Absence, Faults, local, run_local
    from atoll.link.net.elastic_link import elastic
    from atoll.link.net.fixed_link import connect
    from atoll.link.shaped import Outage, Shape, shaped
    from atoll.outer.lockstep import Lockstep
    from atoll.outer.loop import OuterLoop
    from atoll.outer.presets import DataParallel, Delayed, DiLoCo, Eager, Streaming, Sync
    from atoll.outer.roll_back import Guard

_HOMES = {
    "core.codec": ("Codec",),
    "core.fragments": ("Balanced", "Blocks", "Patterns", "Whole"),
    "core.outer_step": ("SGD", "Adam", "Blend", "EagerMerge", "Momentum", "Nesterov"),
    "errors": ("AtollError", "CheckpointError", "ConfigError", "DataError", "LinkError", "NonFiniteError"),
    "link.local": ("Absence", "Faults", "local", "run_local"),
    "link.net.elastic_link": ("elastic",),
    "link.net.fixed_link": ("connect",),
    "link.shaped": ("Outage", "Shape", "shaped"),
    "outer.lockstep": ("Lockstep",),
    "outer.loop": ("OuterLoop",),
    "outer.presets": ("DataParallel", "Delayed", "DiLoCo", "Eager", "Streaming", "Sync"),
    "outer.roll_back": ("Guard",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}
_MODULES = ("checkpoint",)

__all__ = [
    "SGD",
    "Absence",
    "Adam",
    "AtollError",
    "Balanced",
    "Blend",
    "Blocks",
    "CheckpointError",
    "Codec",
    "ConfigError",
    "DataError",
    "DataParallel",
    "Delayed",
    "DiLoCo",
    "Eager",
    "EagerMerge",
    "Faults",
    "Guard",
    "LinkError",
    "Lockstep",
    "Momentum",
    "Nesterov",
    "NonFiniteError",
    "Outage",
    "OuterLoop",
    "Patterns",
    "Shape",
    "Streaming",
    "Sync",
    "Whole",
    "checkpoint",
    "connect",
    "elastic",
    "local",
    "run_local",
    "shaped",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"atoll.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'atoll' has no attribute {name!r}")
    return getattr(importlib.import_module(f"atoll.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
