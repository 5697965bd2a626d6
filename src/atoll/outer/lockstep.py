"""Several workers of one process, taken through each operation together by one caller."""

from collections.abc import Sequence

from atoll.core.flat import trainable
from atoll.errors import ConfigError
from atoll.outer.loop import OuterLoop, in_turn


class Lockstep:
    """The workers of one process that one caller steps together: all send, then all apply."""

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
        """One `OuterLoop.step()` for every worker."""
        in_turn([loop._step() for loop in self.loops])

    def average_gradients(self) -> None:
        """One `OuterLoop.average_gradients()` for every worker."""
        in_turn([loop._average_gradients() for loop in self.loops])

    def finish(self) -> None:
        """One `OuterLoop.finish()` for every worker."""
        in_turn([loop._finish() for loop in self.loops])
