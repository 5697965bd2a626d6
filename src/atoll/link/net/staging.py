"""Copies payloads between a device and the host memory that they are sent from.

On a GPU, copies run on a side stream through pinned memory, in the thread of the transfer: neither the training thread
nor its stream waits for them. Torch caches pinned memory, so after the first rounds none is allocated.
"""

from functools import cache

import torch
from torch import Tensor


class HostStaging:
    """Stages payloads that are in host memory already: nothing is copied but into send buffers."""

    pinned = False
    """Whether messages should be received into pinned memory."""

    def enter_thread(self) -> None:
        """Prepare the calling thread, which carries the round."""

    def buffer(self, size: int) -> Tensor:
        """Allocate `size` bytes of host memory, uint8."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)

    def copy_to_host(self, payload: Tensor, buffer: Tensor) -> None:
        """Copy the payload into a host buffer, and wait for the copy."""
        buffer.copy_(payload)

    def to_host(self, payload: Tensor) -> Tensor:
        """Return the payload in host memory; waits for the copy."""
        return payload

    def to_device(self, payload: Tensor) -> Tensor:
        """Return the payload on its device; usable after `wait_on_current_stream`."""
        return payload

    def wait_on_current_stream(self) -> None:
        """Let the caller's stream wait until the payloads are on the device."""


class _CudaStaging(HostStaging):
    """Stages one round's payloads on a GPU; made by the training thread after it has queued what it sends."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device)
        self._queued = torch.cuda.Event()
        self._queued.record(torch.cuda.current_stream(device))
        self._copied = torch.cuda.Event()
        self._on_device: list[Tensor] = []

    def enter_thread(self) -> None:
        torch.cuda.set_device(self._stream.device)  # a new thread would otherwise allocate on the first GPU

    def copy_to_host(self, payload: Tensor, buffer: Tensor) -> None:
        done = torch.cuda.Event(blocking=True)  # does not spin on a core
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._queued)
            buffer.copy_(payload, non_blocking=True)
            done.record(self._stream)
        done.synchronize()

    def to_host(self, payload: Tensor) -> Tensor:
        buffer = self.buffer(payload.numel())
        self.copy_to_host(payload, buffer)
        return buffer

    def to_device(self, payload: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            pinned = payload if payload.is_pinned() else payload.pin_memory()
            copy = pinned.to(self._stream.device, non_blocking=True)
            self._copied.record(self._stream)
        self._on_device.append(copy)
        return copy

    def wait_on_current_stream(self) -> None:
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._copied)
        for payload in self._on_device:
            payload.record_stream(current)  # the side stream owns the memory and must not reuse it meanwhile
        self._on_device = []


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def staging_for(device: torch.device) -> HostStaging:
    """Return the staging of one round whose payloads are used on this device."""
    return _CudaStaging(device) if device.type == "cuda" else HostStaging()
