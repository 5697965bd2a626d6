"""Compares what all workers, and a run and its continuation, must have alike; errors name what differs."""

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from atoll.core.flat import Window, checksum, fingerprint, frozen, local_part, plain_name
from atoll.core.fragments import unsynchronised_buffers
from atoll.errors import ConfigError
from atoll.link.base import Link, describe_differences
from atoll.outer.presets import Gradients, Sync

MOST_TERMS = 512
"""For parameters: those of a model that has more are compared several together, so that messages stay small."""


def check_arguments(model: object, sync: object, link: Link, weight: float, observer: object) -> None:
    """Raise a ConfigError for what an OuterLoop cannot be made of."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if not isinstance(sync, Sync | Gradients):
        raise ConfigError(f"sync must be made by DiLoCo(...), Streaming(...) or another preset, got {sync!r}")
    if not hasattr(link, "worker"):
        raise ConfigError(
            f"link must be one worker's end of a link, got {type(link).__name__}: give each its own, links[i]"
        )
    if not hasattr(weight, "__float__") or not 0 < weight <= 1e18:
        raise ConfigError(f"weight of worker {link.worker} must be a number above 0, at most 1e18, got {weight!r}")
    if link.elastic:
        _check_elastic(sync)
    if observer is not None and not callable(observer):
        raise ConfigError(f"observer must be a function that takes an atoll.Applied, or None, got {observer!r}")


def _check_elastic(sync: Sync | Gradients) -> None:
    if isinstance(sync, Gradients):
        problem = "DataParallel has no elastic form: every step waits for every worker"
        advice = "use DiLoCo(...) or another preset, or fix the members"
        raise ConfigError(f"{problem}; {advice}", setting="sync", value=sync)
    if len(set(sync.delays)) > 1:
        problem = f"delay must be the same for all workers where they may join and leave, got {sync.delay}"
        why = "one that joins takes over the state of any other"
        raise ConfigError(f"{problem}: {why}", setting="delay", value=sync.delay)


def warn_of(model: nn.Module, sync: Sync | Gradients) -> None:
    """Warn of buffers, which are each worker's own, and of outer momentum beside top64."""
    if buffers := unsynchronised_buffers(model):
        warnings.warn(
            f"{len(buffers)} buffers such as {buffers[0]!r} change in training but are not parameters: "
            "each worker keeps its own",
            stacklevel=3,
        )
    if isinstance(sync, Sync) and sync.codec.format == "top64" and getattr(sync.outer, "momentum", 0) > 0:
        warnings.warn(
            f"codec 'top64' is published for an outer optimizer without momentum, and outer is {sync.outer}: use "
            'outer=atoll.SGD(lr=1.0); in a run file, sync.outer = "sgd" and sync.outer_lr = 1.0',
            stacklevel=3,
        )


def terms_of(
    link: Link, sync: Sync | Gradients, windows: Sequence[Window], outlier_ratio: float | None
) -> dict[str, str]:
    """Return the settings that all workers, and a run and its continuation, must have alike."""
    layouts = {f"layout of fragment {number}": window.layout() for number, window in enumerate(windows)}
    ratio = None if outlier_ratio is None else float(outlier_ratio)
    return {"workers": str(link.workers), **sync.terms(), **layouts, "outlier_ratio": str(ratio)}


def starting_terms(starts: Iterable[Tensor]) -> dict[str, str]:
    """Return the checksum of a new run's trained parameters, from its fragments' vectors."""
    sums = " ".join(f"{fingerprint(start):016x}" for start in starts)
    key = "starting parameters (seed alike before the model is made, or load the same)"
    return {key: f"checksum {zlib.crc32(sums.encode()):08x}"}


def trained_terms(windows: Sequence[Window]) -> dict[str, str]:
    """Return shapes and dtypes of the trained parameters by name, so that an error can name the first that differs."""
    parameters = [named for window in windows for named in zip(window.names, window.parameters(), strict=True)]
    described = [(name, f"{tuple(local_part(p).shape)} {p.dtype}") for name, p in parameters]
    return _terms_by_name("trained", described, "make the same model on all")


def frozen_terms(model: nn.Module) -> dict[str, str]:
    """Return checksums of the frozen parameters by name: a LoRA trained over another model is another LoRA."""
    parameters = frozen(model).items()
    described = [(n, f"{tuple(local_part(p).shape)} {p.dtype} checksum {checksum(p):08x}") for n, p in parameters]
    return _terms_by_name("frozen", described, "load the same on all")


def _terms_by_name(kind: str, parameters: Sequence[tuple[str, str]], advice: str) -> dict[str, str]:
    """Return a term for each parameter, or for several together where there are many."""
    size = -(-len(parameters) // MOST_TERMS) or 1
    terms = {}
    for at in range(0, len(parameters), size):
        group = [(plain_name(name), described) for name, described in parameters[at : at + size]]
        if len(group) == 1:
            terms[f"{kind} parameter {group[0][0]!r} ({advice})"] = group[0][1].replace("torch.", "")
        else:
            exact = "; ".join(f"{name} {described}" for name, described in group)
            key = f"{kind} parameters from {group[0][0]!r} to {group[-1][0]!r} ({advice})"
            terms[key] = f"{len(group)}, checksum {zlib.crc32(exact.encode()):08x}"
    return terms


def live_checksums(windows: Sequence[Window]) -> list[list[int]]:
    """Return a checksum of every trained parameter, by fragment, for `check_saved` to compare."""
    return [[checksum(parameter) for parameter in window.parameters()] for window in windows]


def check_saved(state: Mapping[str, Any], here: Mapping[str, Any], windows: Sequence[Window]) -> None:
    """Raise a ConfigError that says why a saved state is not of this loop and this model.

    States of older versions, which hold less, are compared as far as they go.
    """
    if state["finished"]:
        raise ConfigError("the state is that of a run after finish(): start a new run from its model instead")
    if state["worker"] != here["worker"]:
        raise ConfigError(f"this is the state of worker {state['worker']}; this is worker {here['worker']}")
    ratio = {"outlier_ratio": here["terms"]["outlier_ratio"]}
    if differs := describe_differences({**ratio, **state["terms"]}, here["terms"]):
        raise ConfigError(f"the state was saved with other settings than these: {differs}")
    if (weight := state.get("weight", here["weight"])) != here["weight"]:
        raise ConfigError(
            f"weight: the state was saved with {weight!r}, this is {here['weight']!r}: resume with the same"
        )
    if differs := describe_differences(state.get("frozen", here["frozen"]), here["frozen"]):
        raise ConfigError(f"the state was saved beside another model: {differs}")
    live = zip(windows, state.get("live", here["live"]), here["live"], strict=True)
    for fragment, (window, before, now) in enumerate(live):
        other = [name for name, a, b in zip(window.names, before, now, strict=True) if a != b]
        if other:
            raise ConfigError(
                f"parameter {other[0]!r} of fragment {fragment} ({len(other)} of its {len(now)} parameters) is not as "
                "it was when this state was saved: restore the model of the same checkpoint first, then the outer state"
            )
