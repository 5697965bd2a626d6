"""What a fragment remembers, in the host's memory but while it is used: a GPU has better uses for its own.

A fragment is due twice a period and the schedule tells when, so its vectors are fetched while the step before is still
computed, and put away while the next one is. Both copies go on a stream of their own, from and to pinned memory.
"""

from collections.abc import Collection

import torch
from torch import Tensor

from atoll.errors import ConfigError
from atoll.outer.fragment import FragmentState


class Shelf:
    """Of one fragment; `state` holds the vectors wherever they are."""

    def __init__(self, state: FragmentState, stream: torch.cuda.Stream) -> None:
        self._state = state
        self.stream = stream
        """On which copies go, one for all fragments."""
        self._home = {name: vector.cpu().pin_memory() for name, vector in state.vectors().items()}
        self._here: dict[str, Tensor] = {}
        self._fetched = torch.cuda.Event()
        state.put(self._home)

    def fetch(self) -> None:
        """Begin to bring the vectors to the device."""
        if self._here:
            return
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            self._here = {name: v.to(self.stream.device, non_blocking=True) for name, v in self._home.items()}
            self._fetched.record(self.stream)
        self._state.put(self._here)

    def use(self) -> None:
        """Have them on the device: what is queued from now on waits for them."""
        self.fetch()
        current = torch.cuda.current_stream(self.stream.device)
        current.wait_event(self._fetched)
        for vector in self._here.values():
            vector.record_stream(current)

    def put_away(self) -> None:
        """Begin to take them back, as they are when all that is queued now has been done."""
        if not self._here:
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.device(self.stream.device), torch.cuda.stream(self.stream):
            for name, vector in self._here.items():
                self._home[name].copy_(vector, non_blocking=True)
        self._state.put(self._home)
        self._here = {}


class Shelves:
    """Of all fragments of one worker. These hold nothing: what fragments remember stays where the parameters are."""

    def take(self, state: FragmentState) -> None:
        """Look after the vectors of the next fragment; before the one after it is made, for not all may fit."""

    def use(self, fragments: Collection[int]) -> None:
        """Have the vectors of these fragments, which are due, on the device."""

    def turn_to(self, fragments: Collection[int]) -> None:
        """Put all others away and begin to fetch these, which are due next."""

    def kept(self, vector: Tensor) -> Tensor:
        """A vector that is needed again later, where there is room for it."""
        return vector

    def settle(self) -> None:
        """Have everything at home, to be read or written by whoever."""


class _HostShelves(Shelves):
    def __init__(self) -> None:
        self._shelves: list[Shelf] = []

    def take(self, state: FragmentState) -> None:
        device = state.window.device
        if device.type != "cuda":
            raise ConfigError("offload is for parameters on a GPU: elsewhere there is no other memory to put things in")
        self._shelves.append(Shelf(state, self._shelves[0].stream if self._shelves else torch.cuda.Stream(device)))

    def use(self, fragments: Collection[int]) -> None:
        for fragment in fragments:
            self._shelves[fragment].use()

    def turn_to(self, fragments: Collection[int]) -> None:
        for fragment, shelf in enumerate(self._shelves):
            if fragment not in fragments:
                shelf.put_away()
        for fragment in fragments:
            self._shelves[fragment].fetch()

    def kept(self, vector: Tensor) -> Tensor:
        return vector.cpu()

    def settle(self) -> None:
        self.turn_to(())
        if self._shelves:
            self._shelves[0].stream.synchronize()


def shelves(*, offload: bool) -> Shelves:
    """For the fragments of one worker: in the host's memory if `offload` asks for it."""
    return _HostShelves() if offload else Shelves()
