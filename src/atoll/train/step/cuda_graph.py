"""A small model's forward and backward pass as one launch: recorded once, then played (a CUDA graph).

Such a pass is hundreds of kernels that are done before Python has launched the next one, so the GPU waits for the host.
Played, they follow each other by themselves. For a large model the host is ahead anyway, and a recording would only
keep memory to itself.
"""

import gc
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor, nn

from atoll.errors import AtollError
from atoll.settings.config import RunConfig
from atoll.train.model.decoder import Decoder

LARGEST_FLOPS = 2e12
"""Of a pass that is recorded: a few milliseconds of a fast GPU."""
MOST_FLOPS = 4e12
"""Of the passes of all workers of a process: each recording keeps the memory of a pass."""
MOST_PARTS = 16
"""Of a batch (`train.accumulate`) that is recorded: all of them are in it one after the other."""

Act = Callable[[Tensor], Tensor]
"""Leaves the gradients of a batch in the parameters, and returns a scalar."""


def pass_flops(config: RunConfig, model: Decoder) -> float:
    """Of a worker's forward and backward pass, attention aside; `config` must be resolved."""
    assert config.train.sequence is not None
    return 6.0 * model.config.matmul_parameters * config.train.batch * config.train.sequence


def recorded_where_it_pays(config: RunConfig, models: Sequence[nn.Module], acts: Sequence[Act]) -> Sequence[Act]:
    """What the workers of a process do with a batch, played if it is short; `config` must be resolved.

    Only with our own decoder: another model may ask the GPU something on its way, which no recording can. Not on ROCm,
    where a thread that asks it something meanwhile, as a link's do, would break a recording.
    """
    model = models[0]
    nvidia = torch.device(config.device).type == "cuda" and torch.version.hip is None
    if not (nvidia and config.compile is True and isinstance(model, Decoder)):
        return acts
    flops = pass_flops(config, model)
    if flops > LARGEST_FLOPS or flops * len(models) > MOST_FLOPS or config.train.accumulate > MOST_PARTS:
        return acts
    return [Recorded(act, list(each.parameters())) for act, each in zip(acts, models, strict=True)]


class Recording(NamedTuple):
    """A pass, what it reads and what it leaves."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    found: Tensor
    gradients: list[Tensor | None]
    addresses: list[int]
    """Of the parameters when it was recorded."""


class Recorded:
    """Plays what `act` does on the GPU with a batch and these parameters; what it does on the host is not done again.

    It is recorded in the first call. Where parameters have moved since, or a batch has another shape, `act` is called;
    dtypes, and which parameters are trained, must not change. Each recording has memory of its own: in shared memory,
    one that is played out of turn would write over another's gradients.
    """

    def __init__(self, act: Act, parameters: Sequence[nn.Parameter]) -> None:
        self._act, self._parameters = act, parameters
        self._recording: Recording | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        """As `act(batch)`; gradients are in the same memory whenever it is played."""
        played = self._recording = self._recording or self._record(batch)
        if batch.shape != played.batch.shape or self._addresses() != played.addresses:
            return self._act(batch)
        played.batch.copy_(batch)
        played.graph.replay()
        for parameter, gradient in zip(self._parameters, played.gradients, strict=True):
            parameter.grad = gradient  # whatever has been put there since
        return played.found.clone()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def _record(self, batch: Tensor) -> Recording:
        graph, read = torch.cuda.CUDAGraph(), batch.clone()
        with torch.cuda.device(batch.device):
            here, aside = torch.cuda.current_stream(), _aside(batch.device)
            aside.wait_stream(here)
            with torch.cuda.stream(aside):
                for _ in range(2):  # compiles, and has libraries take the memory that they work in
                    self._act(read)
            here.wait_stream(aside)
            for parameter in self._parameters:
                parameter.grad = None
            gc.collect()  # or what is left of those passes may be freed, and its streams awaited, in between
            try:
                # Threads of a link may use the GPU meanwhile, on streams of their own.
                with torch.cuda.graph(graph, stream=aside, capture_error_mode="thread_local"):
                    found = self._act(read)
            except torch.OutOfMemoryError:
                raise  # which has advice of its own
            except RuntimeError as error:
                raise AtollError(
                    f"a pass of this model could not be recorded on {torch.cuda.get_device_name()}: {error}\n"
                    "With compile = false it is not tried"
                ) from error
        return Recording(graph, read, found, [parameter.grad for parameter in self._parameters], self._addresses())


@cache
def _aside(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: libraries keep memory for every stream that they have seen."""
    return torch.cuda.Stream(device)
