"""Fills in what a run file leaves out, by the recipe of the scaling-laws paper (arXiv 2503.09799).

AdamW with a cosine to 5 % of the peak, weight decay 1 / steps, 20 tokens per parameter. Its fits start at 35 million
parameters; for smaller models its learning rate would grow without bound and is capped (`plan.scaling_laws`).
"""

import math
import os
from typing import Any

import torch

from atoll._util.units import bytes_text, count_words
from atoll.core.outer_step import Blend, Momentum, Nesterov
from atoll.errors import ConfigError
from atoll.outer.presets import Sync
from atoll.plan.scaling_laws import TOKENS_PER_PARAMETER, learning_rate
from atoll.settings.config import RunConfig
from atoll.settings.model_presets import ModelConfig


def resolve(config: RunConfig, *, parameters: int, context: int | None) -> RunConfig:
    """Return the settings with every value that training depends on.

    Args:
        config: The settings as given.
        parameters: Parameters of the model.
        context: The model's longest sequence in tokens; None if it sets no limit.
    """
    train, workers = config.train, config.sync.workers
    longest = min(context or 1024, 1024) if config.model.hf else context
    sequence = train.sequence or longest or 1024
    if context is not None and sequence > context:
        raise ConfigError(
            f"train.sequence: must be at most the model's context of {context} tokens, got {sequence}: "
            f"shorten it{'' if config.model.hf else ', or give the model a larger model.context'}"
        )
    steps = train.steps or max(1, math.ceil(TOKENS_PER_PARAMETER * parameters / (workers * train.batch * sequence)))
    if config.sync.offload and not device_of(config).startswith("cuda"):
        raise ConfigError(f"sync.offload: is for GPUs, and this run trains on {device_of(config)}: leave it out")
    filled: dict[str, Any] = {
        "threads": config.threads or torch.get_num_threads(),
        "device": device_of(config),
        "train.sequence": sequence,
        "train.steps": steps,
        "train.lr": train.lr or learning_rate(parameters, workers),
        "train.warmup": min(1000, steps // 10) if train.warmup is None else train.warmup,
        "train.weight_decay": 1 / steps if train.weight_decay is None else train.weight_decay,
        "train.eval_every": train.eval_every or max(1, steps // 20, min(steps, config.sync.used_period)),
        "train.save_every": train.save_every or min(1000, max(1, steps // 10)),
    }
    return config.changed(**filled, **_method_defaults(config))


def check_room(config: RunConfig, shape: ModelConfig) -> None:
    """Refuse a decoder or a batch that this machine's memory cannot hold, before allocating it."""
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    sizes = ("layers", "width", "heads", "head_width", "feedforward", "vocabulary")
    if (needed := 4 * shape.parameters) > room:
        smaller = ", ".join(f"model.{name} ({getattr(shape, name)})" for name in sizes)
        raise ConfigError(
            f"model: its {count_words(shape.parameters)} parameters take {bytes_text(needed)}, and this machine has "
            f"{bytes_text(room)} of memory: lower {smaller}, or choose a smaller model.preset"
        )
    sequence = config.train.sequence or shape.context
    if (needed := 8 * config.train.batch * (sequence + 1)) > room:
        raise ConfigError(
            f"train.batch: {config.train.batch} sequences of {sequence} tokens take {bytes_text(needed)}, and this "
            f"machine has {bytes_text(room)} of memory: lower train.batch or train.sequence"
        )


def _method_defaults(config: RunConfig) -> dict[str, Any]:
    """Return the values that the method and the device give to settings left out."""
    on_gpu, sync = device_of(config) != "cpu", config.synchronisation()
    used: dict[str, Any] = {
        "precision": ("bf16" if on_gpu else "fp32") if config.precision == "auto" else config.precision,
        "compile": on_gpu if config.compile == "auto" else config.compile,
    }
    if sync is not None:
        used["sync.codec"] = sync.codec.format
    if isinstance(sync, Sync):
        used["sync.period"] = sync.period
        used["sync.fragments"] = config.sync.fragments or ("blocks" if config.sync.method == "streaming" else "whole")
        used["sync.outer_lr"] = sync.outer.lr
        if isinstance(sync.outer, Nesterov | Momentum):
            used["sync.outer_momentum"] = sync.outer.momentum
        if isinstance(sync.merge, Blend) and config.sync.method != "delayed":
            used |= {"sync.delay": sync.delay, "sync.alpha": sync.merge.alpha}
    return used


def device_of(config: RunConfig) -> str:
    """Return the device to train on; ConfigError if torch does not see it."""
    if config.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if config.device.startswith("cuda"):
        index, found = torch.device(config.device).index or 0, torch.cuda.device_count()
        if index >= found:
            raise ConfigError(f'device: "{config.device}" is not here, torch sees {found} GPUs: use "auto" or "cpu"')
    return config.device
