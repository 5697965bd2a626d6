"""Runs a small model's forward and backward pass as one CUDA graph.

A small pass is hundreds of kernels that finish before Python launches the next, so the GPU waits for the host. A graph
launches them all at once. For a large model the host is ahead anyway, and a graph would only keep memory to itself.
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
"""Floating-point operations of a pass that is captured: a few milliseconds of a fast GPU."""
MOST_FLOPS = 4e12
"""The same for the passes of all workers of a process: each graph keeps the memory of a pass."""
MOST_PARTS = 16
"""Microbatches (`train.accumulate`) that one graph holds, one after the other."""

BackwardPass = Callable[[Tensor], Tensor]
"""Computes the gradients of a batch into the parameters, and returns a scalar."""


def pass_flops(config: RunConfig, model: Decoder) -> float:
    """Return the operations of a worker's forward and backward pass without attention; `config` must be resolved."""
    assert config.train.sequence is not None
    return 6.0 * model.config.matmul_parameters * config.train.batch * config.train.sequence


def capture_small_passes(
    config: RunConfig, models: Sequence[nn.Module], passes: Sequence[BackwardPass]
) -> Sequence[BackwardPass]:
    """Return the passes of a process's workers, as CUDA graphs if they are small; `config` must be resolved.

    Only for atoll's decoder: another model may synchronise with the GPU, which a graph cannot. Not on ROCm, where a
    link's threads that use the GPU meanwhile would break the capture.
    """
    model = models[0]
    nvidia = torch.device(config.device).type == "cuda" and torch.version.hip is None
    if not (nvidia and config.compile is True and isinstance(model, Decoder)):
        return passes
    flops = pass_flops(config, model)
    if flops > LARGEST_FLOPS or flops * len(models) > MOST_FLOPS or config.train.accumulate > MOST_PARTS:
        return passes
    return [GraphedPass(each, list(model.parameters())) for each, model in zip(passes, models, strict=True)]


class _Graph(NamedTuple):
    """A captured pass, its input and its outputs."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    result: Tensor
    gradients: list[Tensor | None]
    addresses: list[int]


class GraphedPass:
    """Captures a backward pass in its first call and replays it afterwards.

    If parameters have moved since, or a batch has another shape, it calls the pass itself. Dtypes and the set of
    trained parameters must not change. Each graph has its own memory: in a shared pool, one that is replayed out of
    turn would overwrite another's gradients.
    """

    def __init__(self, backward: BackwardPass, parameters: Sequence[nn.Parameter]) -> None:
        self._backward, self._parameters = backward, parameters
        self._graph: _Graph | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        """Return what the pass returns; a replay leaves gradients in the same memory every time."""
        captured = self._graph = self._graph or self._capture(batch)
        if batch.shape != captured.batch.shape or self._addresses() != captured.addresses:
            return self._backward(batch)
        captured.batch.copy_(batch)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient  # another tensor may have taken its place
        return captured.result.clone()

    def _addresses(self) -> list[int]:
        return [parameter.data_ptr() for parameter in self._parameters]

    def _capture(self, batch: Tensor) -> _Graph:
        graph, static_batch = torch.cuda.CUDAGraph(), batch.clone()
        with torch.cuda.device(batch.device):
            current, side = torch.cuda.current_stream(), _side_stream(batch.device)
            side.wait_stream(current)
            with torch.cuda.stream(side):
                for _ in range(2):  # compiles, and lets libraries allocate their workspaces
                    self._backward(static_batch)
            current.wait_stream(side)
            for parameter in self._parameters:
                parameter.grad = None
            gc.collect()  # or the warm-up's tensors may be freed, and their streams awaited, during the capture
            try:
                # A link's threads may use the GPU meanwhile, on other streams.
                with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                    result = self._backward(static_batch)
            except torch.OutOfMemoryError:
                raise  # its message says what to do
            except RuntimeError as error:
                raise AtollError(
                    f"a pass of this model could not be captured on {torch.cuda.get_device_name()}: {error}\n"
                    "Set compile = false to train without CUDA graphs"
                ) from error
        gradients = [parameter.grad for parameter in self._parameters]
        return _Graph(graph, static_batch, result, gradients, self._addresses())


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return one stream for all captures: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)
