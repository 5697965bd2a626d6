"""Names the rows of the papers' comparison: the methods, and the settings that a row may change."""

import argparse
import re
from typing import Any, NamedTuple

STREAMING = {"method": "streaming", "delay": 1, "alpha": 0.5}
REFERENCE = "data-parallel"
METHODS: dict[str, dict[str, Any]] = {
    "data-parallel": {"method": "data-parallel"},
    "streaming-30": {**STREAMING, "period": 30},
    "diloco-30": {"method": "diloco", "period": 30},
    "eager-30": {"method": "eager", "period": 30},
    "streaming-eager-30": {"method": "eager", "period": 30, "fragments": "blocks:3"},
    "streaming-100": {**STREAMING, "period": 100},
    "streaming-30-fp32": {**STREAMING, "period": 30, "codec": "fp32"},
    "delayed-30": {"method": "delayed", "period": 30},
}
KEYS = {
    "lr": "sync.outer_lr",
    "m": "sync.outer_momentum",
    "alpha": "sync.alpha",
    "delay": "sync.delay",
    "codec": "sync.codec",
    "feedback": "sync.feedback",
    "outer": "sync.outer",
    "fragments": "sync.fragments",
    "workers": "sync.workers",
    "batch": "train.batch",
    "inner": "train.lr",
    "final": "train.final_lr",
    "optimizer": "train.optimizer",
    "seed": "seed",
}
"""Settings that a row may change, by their short names."""


class Row(NamedTuple):
    """Names one run of the table: a method and the settings that it changes."""

    method: str
    changes: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Read METHOD[,key=value ...]."""
        method, *rest = text.split(",")
        changes = tuple((key, value) for key, _, value in (change.partition("=") for change in rest))
        if method not in METHODS or not all(key in KEYS and value for key, value in changes):
            known = f"METHOD is one of {', '.join(METHODS)}, and key one of {', '.join(KEYS)}"
            raise argparse.ArgumentTypeError(f"a row must be METHOD[,key=value ...], got {text!r}: {known}")
        return cls(method, changes)

    @classmethod
    def named(cls, name: str) -> "Row":
        """Return the row of a run's name."""
        method = max((method for method in METHODS if f"{name}-".startswith(f"{method}-")), key=len)
        keys = "|".join(sorted(KEYS, key=len, reverse=True))
        return cls(method, tuple(re.findall(rf"-({keys})([^-]+)", name.removeprefix(method))))

    @property
    def order(self) -> tuple[int, int, str, str]:
        """Return what rows are sorted by: methods as in METHODS, each as it is first, seeds of one setting together."""
        settings = [f"{key}={value}" for key, value in self.changes if key != "seed"]
        return list(METHODS).index(self.method), len(settings), ",".join(settings), dict(self.changes).get("seed", "0")

    @property
    def name(self) -> str:
        """Return the name of the run and of its results."""
        return "-".join([self.method, *(f"{key}{value}" for key, value in self.changes)])

    @property
    def text(self) -> str:
        """Return what `parse` reads."""
        return ",".join([self.method, *(f"{key}={value}" for key, value in self.changes)])
