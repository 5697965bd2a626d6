"""Measures how long an inner step takes on this machine, on random tokens."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from atoll.errors import ConfigError
from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Decoder
from atoll.train.ranks.worker_ranks import WorkerRanks
from atoll.train.step.backward import Backward
from atoll.train.step.cuda_graph import BackwardPass, capture_small_passes
from atoll.train.step.inner_optimizer import InnerOptimizer, learning_rate
from atoll.train.step.recipe import resolve

STEPS = 7
WARM_UP = 2
"""Steps that are not counted: memory is allocated and kernels are chosen or compiled."""


class StepTime(NamedTuple):
    """The measured time of an inner step."""

    step_s: float
    """Median seconds of forward pass, backward pass and inner optimizer."""
    tokens: int
    """Tokens of a step."""
    device: str
    """Name of the device."""


def probe_step(config: RunConfig, vocabulary: int, *, tell: Callable[[str], None] = print) -> StepTime:
    """Time a few steps of one worker of a run, without its data or other workers.

    Raises:
        ConfigError: for a Hugging Face model, whose weights would have to be downloaded.
    """
    if config.model.hf is not None:
        raise ConfigError(f"a step of {config.model.hf} cannot be measured without its weights: give --step-time")
    shape = config.shape(vocabulary)
    config = resolve(config, parameters=shape.parameters, context=shape.context)
    if config.train.parallel == "fsdp":
        config = config.changed(compile=False)  # as on its ranks
    device = torch.device(config.device)
    if config.threads:
        torch.set_num_threads(config.threads)
    with device:
        model = Decoder(shape)
    model.train()
    if config.compile is True:
        model.compile()
    inner, sequence = InnerOptimizer(model, config.train), config.train.sequence
    assert sequence is not None
    tokens = torch.randint(shape.vocabulary, (config.train.batch, sequence + 1), device=device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    tell(f"measuring {STEPS} steps of {tokens.shape[0]} x {sequence} tokens on {name}")
    (backward,) = capture_small_passes(config, [model], [Backward(WorkerRanks().wrap(model), inner, config)])
    taken = [_step(backward, inner, tokens, rate=learning_rate(n, config.train)) for n in range(1, STEPS + 1)]
    return StepTime(median(taken[WARM_UP:]), config.train.batch * sequence, name)


def _step(backward: BackwardPass, inner: InnerOptimizer, tokens: torch.Tensor, rate: float) -> float:
    """Make one step as the trainer does; return its seconds."""
    began = time.perf_counter()
    backward(tokens)
    inner.clip()
    inner.step(rate)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - began
