"""Copies numbers from a device to the host without blocking; only the reader waits."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor


class DeviceValues:
    """Holds a tensor's values as of the work queued now; any thread may read them."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers: Tensor | None = numbers
        self._there: torch.cuda.Event | None = None
        self._device = numbers.device
        self._values: tuple[Any, ...] = ()
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event(blocking=True)  # does not spin on a core
            self._there.record(torch.cuda.current_stream(numbers.device))

    @property
    def values(self) -> tuple[Any, ...]:
        """The values; waits until they are on the host."""
        # Two threads may run this at once: both find the same values, set before anything is cleared.
        numbers, there = self._numbers, self._there
        if numbers is not None:
            if there is not None:
                with torch.cuda.device(self._device):  # a new thread would otherwise allocate on the first GPU
                    there.synchronize()
            self._values = tuple(numbers.tolist())
            self._numbers = None  # frees pinned memory
            self._there = None
        return self._values

    def __reduce__(self) -> tuple[Callable[[tuple[Any, ...]], Self], tuple[tuple[Any, ...]]]:
        """Pickle the values, not the tensor."""
        return type(self)._of, (self.values,)

    @classmethod
    def _of(cls, values: tuple[Any, ...]) -> Self:
        loaded = cls.__new__(cls)
        loaded._numbers, loaded._there, loaded._device, loaded._values = None, None, torch.device("cpu"), values
        return loaded
