"""Holds the options of `atoll plan`, and refuses those that contradict each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Holds the command line as it was typed; `cli.plan.command` explains each option."""

    run: Path | None = None
    changes: Sequence[str] = ()
    params: str | None = None
    layers: str | None = None
    preset: str | None = None
    workers: str | None = None
    link: str | None = None
    probe_link: str | None = None
    methods: Sequence[str] = ()
    period: str | None = None
    fragments: str | None = None
    step_time: str | None = None
    tokens: str | None = None
    chip: str | None = None
    flops: str | None = None
    chips: str | None = None
    mfu: str | None = None
    memory: str | None = None
    probe: bool = False
    steps: str | None = None
    tokens_total: str | None = None
    price: str | None = None
    target: str = "0.95"


_EXCLUSIVE = {
    "--step-time": ("--probe", "--chip", "--flops", "--mfu"),
    "--probe": ("--chip", "--flops", "--mfu"),
    "--chip": ("--flops",),
    "--steps": ("--tokens-total",),
    "--link": ("--probe-link",),
}


def check_conflicts(options: PlanOptions) -> None:
    """Raise ConfigError for options that would be ignored or say the same twice."""

    def given(*names: str) -> list[str]:
        values = [getattr(options, name.removeprefix("--").replace("-", "_")) for name in names]
        return [name for name, value in zip(names, values, strict=True) if value not in (None, False)]

    for one, others in _EXCLUSIVE.items():
        if given(one) and (both := given(*others)):
            raise ConfigError(f"give {one} or {both[0]}, not both: they say the same in two ways")
    if options.chips is not None and not given("--chip", "--flops", "--memory"):
        raise ConfigError("--chips is for --chip, --flops or --memory, and none of them is given")
    streaming = not options.methods or any(method.startswith("streaming") for method in options.methods)
    if options.fragments is not None and not streaming:
        raise ConfigError("--fragments is for streaming, and --method names none of its methods")
    if options.period is not None and set(options.methods) == {"data-parallel"}:
        raise ConfigError("--period is for methods that have one, and data-parallel exchanges on every step")
    if options.changes and options.run is None:
        raise ConfigError("--set changes a run file, and none is given")
