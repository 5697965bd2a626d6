"""Between the memory that payloads are used in and the host's, from which they are sent.

On a GPU, copies go on a stream of their own through pinned memory, in the thread that carries the round: neither the
training thread nor the stream it trains on waits for them. Pinned memory comes from torch's cache, so that after the
first rounds none is made.
"""

from functools import cache

import torch
from torch import Tensor


class Stage:
    """For payloads in the host's memory: there is little to do."""

    pinned = False
    """Whether what arrives should be received into pinned memory."""

    def begin(self) -> None:
        """Called first by the thread that carries the round."""

    def room(self, size: int) -> Tensor:
        """So many bytes of the host's memory, uint8, for `down`."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)

    def down(self, payload: Tensor, room: Tensor) -> None:
        """Put the payload into `room`; waits for it."""
        room.copy_(payload)

    def host(self, payload: Tensor) -> Tensor:
        """The payload in the host's memory; waits for it."""
        return payload

    def up(self, payload: Tensor) -> Tensor:
        """The payload where it is used, once `arrive` has been called."""
        return payload

    def arrive(self) -> None:
        """Let whatever this thread does from now on with the payloads wait until they are there."""


class _GpuStage(Stage):
    """For one round of payloads on a GPU; made by the thread that trains, when what it sends has been queued."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._stream = _side_stream(device)
        self._queued = torch.cuda.Event()
        self._queued.record(torch.cuda.current_stream(device))
        self._there = torch.cuda.Event()
        self._brought: list[Tensor] = []

    def begin(self) -> None:
        torch.cuda.set_device(self._stream.device)  # or a new thread takes the first GPU, and memory on it

    def down(self, payload: Tensor, room: Tensor) -> None:
        done = torch.cuda.Event(blocking=True)  # leaves the core to others meanwhile
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._queued)
            room.copy_(payload, non_blocking=True)
            done.record(self._stream)
        done.synchronize()

    def host(self, payload: Tensor) -> Tensor:
        room = self.room(payload.numel())
        self.down(payload, room)
        return room

    def up(self, payload: Tensor) -> Tensor:
        with torch.cuda.stream(self._stream):
            pinned = payload if payload.is_pinned() else payload.pin_memory()
            brought = pinned.to(self._stream.device, non_blocking=True)
            self._there.record(self._stream)
        self._brought.append(brought)
        return brought

    def arrive(self) -> None:
        here = torch.cuda.current_stream(self._stream.device)
        here.wait_event(self._there)
        for payload in self._brought:
            payload.record_stream(here)  # its memory is the side stream's, which must not give it away meanwhile
        self._brought = []


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def stage(device: torch.device) -> Stage:
    """For one round whose payloads are used on this device."""
    return _GpuStage(device) if device.type == "cuda" else Stage()
