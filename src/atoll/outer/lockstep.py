"""Takes several workers of one process through each operation together."""

from collections.abc import Callable, Sequence

import torch

from atoll.core.flat import trainable
from atoll.errors import ConfigError
from atoll.outer.loop import OuterLoop


class Lockstep:
    """Steps the workers of one process together: all prepare, then all send, then all apply."""

    def __init__(self, loops: Sequence[OuterLoop]) -> None:
        self.loops = list(loops)
        owners: dict[int, int] = {}
        for loop in self.loops:
            for parameter in trainable(loop.model).values():
                first = owners.setdefault(id(parameter), loop.link.worker)
                if first != loop.link.worker:
                    who = f"workers {first} and {loop.link.worker}"
                    raise ConfigError(f"{who} train the same parameters: give each its own copy.deepcopy(model)")

    def step(self) -> None:
        """Call every worker's `OuterLoop.step()`."""
        if len(self.loops) == 1:
            self.loops[0].step()  # which may join the others again
        else:
            self._run(OuterLoop.STEP)

    def average_gradients(self) -> None:
        """Call every worker's `OuterLoop.average_gradients()`."""
        self._run(OuterLoop.AVERAGE_GRADIENTS)

    def finish(self) -> None:
        """Call every worker's `OuterLoop.finish()`."""
        self._run(OuterLoop.FINISH)

    def _run(self, phases: Sequence[Callable[[OuterLoop], None]]) -> None:
        with torch.no_grad():
            for phase in phases:
                for loop in self.loops:
                    phase(loop)
