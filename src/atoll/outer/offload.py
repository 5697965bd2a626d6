"""Keeps fragments' state in pinned host memory and prefetches it one step early.

A fragment is due twice a period and the schedule tells when, so its vectors are fetched while the step before is still
computed, and put away while the next one is. Both copies go on a stream of their own.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.outer.fragment import FragmentReplica


class HostState:  # pragma: no cover (needs CUDA: tests/unit/test_cuda.py)
    """Moves one replica's vectors between the host and the device."""

    def __init__(self, replica: FragmentReplica, stream: torch.cuda.Stream) -> None:
        self._replica = replica
        self._stream = stream
        self._host = {name: vector.cpu().pin_memory() for name, vector in replica.vectors().items()}
        self._device: dict[str, Tensor] = {}
        self._fetched = torch.cuda.Event()
        replica.replace_vectors(self._host)

    def fetch(self) -> None:
        """Begin to bring the vectors to the device."""
        if self._device:
            return
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            self._device = {name: v.to(self._stream.device, non_blocking=True) for name, v in self._host.items()}
            self._fetched.record(self._stream)
        self._replica.replace_vectors(self._device)

    def use(self) -> None:
        """Have the vectors on the device: what is queued from now on waits for them."""
        self.fetch()
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_event(self._fetched)
        for vector in self._device.values():
            vector.record_stream(current)

    def put_away(self) -> None:
        """Begin to take the vectors back, as they are when all that is queued now has been done."""
        if not self._device:
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.device(self._stream.device), torch.cuda.stream(self._stream):
            for name, vector in self._device.items():
                self._host[name].copy_(vector, non_blocking=True)
        self._replica.replace_vectors(self._host)
        self._device = {}


class OnDevice:
    """Leaves every replica's vectors where the parameters are."""

    def add(self, replica: FragmentReplica) -> None:
        """Take over the next fragment's replica; before the one after it is made, for not all may fit."""

    def use(self, fragments: Collection[int]) -> None:
        """Have the vectors of these fragments, which are due, on the device."""

    def use_again(self) -> None:
        """Have on the device what was last in use there."""

    def use_only(self, fragment: int) -> None:
        """Have this fragment's vectors on the device, and no other's."""

    def prefetch(self, fragments: Collection[int]) -> None:
        """Put all others away and begin to fetch these, which are due next."""

    def bring_home(self) -> None:
        """Have everything where it can be read and written from any stream."""

    def kept(self, vector: Tensor) -> Tensor:
        """Return a vector that is needed again later, where there is room for it."""
        return vector


class Offload(OnDevice):  # pragma: no cover (needs CUDA: tests/unit/test_cuda.py)
    """Keeps all replicas of one worker in the host's memory, but for the fragments that are due."""

    def __init__(self) -> None:
        self._states: list[HostState] = []
        self._stream: torch.cuda.Stream | None = None
        self._in_use: Collection[int] = ()

    def add(self, replica: FragmentReplica) -> None:
        """Take over the next fragment's replica; before the one after it is made, for not all may fit."""
        device = replica.window.device
        if device.type != "cuda":
            raise ConfigError("offload is for parameters on a GPU: elsewhere there is no other memory to put things in")
        self._stream = self._stream or torch.cuda.Stream(device)
        self._states.append(HostState(replica, self._stream))

    def use(self, fragments: Collection[int]) -> None:
        """Have the vectors of these fragments, which are due, on the device."""
        self._in_use = fragments
        for fragment in fragments:
            self._states[fragment].use()

    def use_again(self) -> None:
        """Have on the device what was last in use there."""
        self.use(self._in_use)

    def use_only(self, fragment: int) -> None:
        """Have this fragment's vectors on the device, and no other's."""
        self.prefetch({fragment})
        self.use({fragment})

    def kept(self, vector: Tensor) -> Tensor:
        """Return a vector that is needed again later, in the host's memory."""
        return vector.cpu()

    def prefetch(self, fragments: Collection[int]) -> None:
        """Put all others away and begin to fetch these, which are due next."""
        for fragment, state in enumerate(self._states):
            if fragment not in fragments:
                state.put_away()
        for fragment in fragments:
            self._states[fragment].fetch()

    def bring_home(self) -> None:
        """Have everything in the host's memory, to be read or written."""
        self.prefetch(())
        if self._stream is not None:
            self._stream.synchronize()
