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


def check_conflicts(options: PlanOptions) -> None:
    """Raise ConfigError for options that would be ignored or say the same twice."""
    given = {
        "--step-time": options.step_time is not None,
        "--probe": options.probe,
        "--chip": options.chip is not None,
        "--flops": options.flops is not None,
        "--mfu": options.mfu is not None,
        "--steps": options.steps is not None,
        "--tokens-total": options.tokens_total is not None,
        "--link": options.link is not None,
        "--probe-link": options.probe_link is not None,
    }
    estimated = ("--chip", "--flops", "--mfu")
    excluded = {
        "--step-time": ("--probe", *estimated),
        "--probe": estimated,
        "--chip": ("--flops",),
        "--steps": ("--tokens-total",),
        "--link": ("--probe-link",),
    }
    for one, others in excluded.items():
        if both := [other for other in others if given[one] and given[other]]:
            raise ConfigError(f"give {one} or {both[0]}, not both: they say the same in two ways")
    if options.chips is not None and not (given["--chip"] or given["--flops"] or options.memory is not None):
        raise ConfigError("--chips is for --chip, --flops or --memory, and none of them is given")
    if (
        options.fragments is not None
        and options.methods
        and not any(m.startswith("streaming") for m in options.methods)
    ):
        raise ConfigError("--fragments is for streaming, and no --method of it is asked for")
    if options.period is not None and set(options.methods) == {"data-parallel"}:
        raise ConfigError("--period is for methods that have one, and data-parallel exchanges on every step")
    if options.changes and options.run is None:
        raise ConfigError("--set changes a run file, and none is given")
