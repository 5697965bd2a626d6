"""How long an inner step takes on this machine, measured: a few real ones on random tokens."""

import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch

from atoll.errors import ConfigError
from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Decoder
from atoll.train.ranks.worker_ranks import Team
from atoll.train.step.backward import Backward
from atoll.train.step.cuda_graph import Act, recorded_where_it_pays
from atoll.train.step.optimizer import InnerOptimizer, learning_rate
from atoll.train.step.recipe import resolve

STEPS = 7
WARM_UP = 2
"""Steps that are not counted: memory is found and kernels are chosen or compiled."""


class StepTime(NamedTuple):
    """What was measured."""

    step_s: float
    """Seconds of forward, backward and inner optimizer, the median."""
    tokens: int
    """Of a step."""
    device: str
    """Where, for people."""


def probe_step(config: RunConfig, vocabulary: int, *, tell: Callable[[str], None] = print) -> StepTime:
    """Make a few steps of a run's worker and time them; neither its data nor other workers are needed."""
    if config.model.hf is not None:
        raise ConfigError(f"a step of {config.model.hf} cannot be measured without its weights: give --step-time")
    shape = config.shape(vocabulary)
    config = resolve(config, parameters=shape.parameters, context=shape.context)
    if config.train.parallel == "fsdp":
        config = config.changed(compile=False)  # as its ranks do; nor is a pass of theirs recorded
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
    acts = recorded_where_it_pays(config, [model], [Backward(Team().wrap(model), inner, config)])
    taken = [_step(acts[0], inner, tokens, rate=learning_rate(n, config.train)) for n in range(1, STEPS + 1)]
    return StepTime(median(taken[WARM_UP:]), config.train.batch * sequence, name)


def _step(backward: Act, inner: InnerOptimizer, tokens: torch.Tensor, rate: float) -> float:
    """One step as the trainer makes it; returns its seconds."""
    began = time.perf_counter()
    backward(tokens)
    inner.clip()
    inner.step(rate)
    if tokens.is_cuda:
        torch.cuda.synchronize(tokens.device)
    return time.perf_counter() - began
