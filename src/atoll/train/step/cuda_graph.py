"""Runs a small model's forward and backward pass as one CUDA graph.

A small pass is hundreds of kernels that each finish before Python launches the next, so the GPU waits for the host. A
graph launches them all at once. For a large model the host is ahead anyway, and a graph would only hold memory.

The graphs of a process share one memory pool, because its passes run one after the other and read nothing that another
left there. A pass's loss and gradients must outlive it: the graph's last kernels copy them out of the pool.
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
"""Most floating-point operations of a pass that is captured: a few milliseconds of a fast GPU."""
MOST_PARTS = 16
"""Most microbatches (`train.accumulate`) of a pass that is captured; one graph holds all of them."""

BackwardPass = Callable[[Tensor], Tensor]
"""Computes the gradients of a batch into the parameters, and returns a scalar."""


def pass_flops(config: RunConfig, model: Decoder) -> float:
    """Return the FLOPs of a worker's forward and backward pass without attention; `config` must be resolved."""
    assert config.train.sequence is not None
    return 6.0 * model.config.matmul_parameters * config.train.batch * config.train.sequence


def capture_small_passes(
    config: RunConfig, models: Sequence[nn.Module], passes: Sequence[BackwardPass]
) -> Sequence[BackwardPass]:
    """Return the passes of a process's workers, as CUDA graphs if they are small; `config` must be resolved.

    Only passes of atoll's decoder are captured: another model may synchronise with the GPU, which a graph cannot. On
    ROCm none is, because threads of a link that use the GPU at the same time would break the capture.
    """
    model = models[0]
    nvidia = torch.device(config.device).type == "cuda" and torch.version.hip is None
    if not (nvidia and config.compile is True and isinstance(model, Decoder)):
        return passes
    if pass_flops(config, model) > LARGEST_FLOPS or config.train.accumulate > MOST_PARTS:
        return passes
    pool = torch.cuda.graph_pool_handle()
    return [GraphedPass(each, list(model.parameters()), pool) for each, model in zip(passes, models, strict=True)]


class _Graph(NamedTuple):
    """Holds a captured pass with its input and outputs, which lie outside the shared pool."""

    graph: torch.cuda.CUDAGraph
    batch: Tensor
    result: Tensor
    gradients: list[Tensor | None]
    addresses: list[int]


class GraphedPass:
    """Captures a backward pass in its first call and replays it afterwards.

    It calls the pass itself if parameters have moved in memory since then, or if a batch has another shape. Dtypes and
    the set of trained parameters must not change.

    Args:
        backward: The pass.
        parameters: The parameters whose gradients it computes.
        pool: The memory pool that this graph shares with others; they may run in any order, but not at the same time.
    """

    def __init__(
        self, backward: BackwardPass, parameters: Sequence[nn.Parameter], pool: "torch.cuda._POOL_HANDLE"
    ) -> None:
        self._backward, self._parameters, self._pool = backward, parameters, pool
        self._graph: _Graph | None = None

    def __call__(self, batch: Tensor) -> Tensor:
        """Return what the pass returns; a replay leaves gradients in the same memory every time."""
        captured = self._graph = self._graph or self._capture(batch)
        if batch.shape != captured.batch.shape or self._addresses() != captured.addresses:
            return self._backward(batch)
        captured.batch.copy_(batch)
        captured.graph.replay()
        for parameter, gradient in zip(self._parameters, captured.gradients, strict=True):
            parameter.grad = gradient  # it may have been set to another tensor, or to None
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
                    result = self._backward(static_batch).clone()
            current.wait_stream(side)
            gradients = [None if p.grad is None else torch.empty_like(p.grad) for p in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None
            gc.collect()  # or the warm-up's tensors may be freed, and their streams awaited, during the capture
            try:
                # A link's threads may use the GPU meanwhile, on other streams.
                with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                    result.copy_(self._backward(static_batch))
                    self._move_gradients(gradients)
            except torch.OutOfMemoryError:
                raise  # its message says what to do
            except RuntimeError as error:
                raise AtollError(
                    f"a pass of this model could not be captured on {torch.cuda.get_device_name()}: {error}\n"
                    "Set compile = false to train without CUDA graphs"
                ) from error
        return _Graph(graph, static_batch, result, gradients, self._addresses())

    def _move_gradients(self, targets: Sequence[Tensor | None]) -> None:
        """Copy the gradients out of the pool and set those of the parameters to None."""
        for target, parameter in zip(targets, self._parameters, strict=True):
            if target is not None and parameter.grad is not None:
                target.copy_(parameter.grad)
            parameter.grad = None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream of all captures: libraries keep a workspace for every stream they have seen."""
    return torch.cuda.Stream(device)
