"""Numbers that a device works out, on their way to the host: whoever asks waits, and nobody else does."""

import threading
from typing import Any

import torch
from torch import Tensor


class Late:
    """What is in a tensor once all that is queued now has been done; to be asked from any thread."""

    def __init__(self, numbers: Tensor) -> None:
        self._numbers: Tensor | None = numbers
        self._there: torch.cuda.Event | None = None
        self._values: tuple[Any, ...] = ()
        self._lock = threading.Lock()
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
            self._numbers.copy_(numbers, non_blocking=True)
            self._there = torch.cuda.Event(blocking=True)  # leaves the core to others meanwhile
            self._there.record(torch.cuda.current_stream(numbers.device))

    @property
    def values(self) -> tuple[Any, ...]:
        """All of them; waits until they are here."""
        with self._lock:
            if self._numbers is not None:
                if self._there is not None:
                    self._there.synchronize()
                self._values = tuple(self._numbers.tolist())
                self._numbers = self._there = None  # pinned memory is not to be kept for long
            return self._values
