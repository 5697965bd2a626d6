"""Numbers that a device works out, on their way to the host: whoever asks waits, and nobody else does."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor


class DeviceValues:
    """What is in a tensor once all that is queued now has been done; to be asked from any thread."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers: Tensor | None = numbers
        self._there: torch.cuda.Event | None = None
        self._device = numbers.device
        self._values: tuple[Any, ...] = ()
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event(blocking=True)  # leaves the core to others meanwhile
            self._there.record(torch.cuda.current_stream(numbers.device))

    @property
    def values(self) -> tuple[Any, ...]:
        """All of them; waits until they are here."""
        # Two threads may be here at once: both find the same values, and nothing is cleared before these are set.
        numbers, there = self._numbers, self._there
        if numbers is not None:
            if there is not None:
                with torch.cuda.device(self._device):  # or a new thread takes the first GPU, and memory on it
                    there.synchronize()
            self._values = tuple(numbers.tolist())
            self._numbers = None  # pinned memory is not to be kept for long
            self._there = None
        return self._values

    def __reduce__(self) -> tuple[Callable[[tuple[Any, ...]], Self], tuple[tuple[Any, ...]]]:
        """A copy has the values."""
        return type(self)._of, (self.values,)

    @classmethod
    def _of(cls, values: tuple[Any, ...]) -> Self:
        late = cls.__new__(cls)
        late._numbers, late._there, late._device, late._values = None, None, torch.device("cpu"), values
        return late
