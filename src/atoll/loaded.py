"""Notices parameters that are loaded into a model behind the back of the outer loop that keeps it in step."""

import weakref
from collections.abc import Callable
from typing import Any, Self

from torch import nn

from atoll.core.flat import checksum
from atoll.errors import AtollError


class Loads:
    """What `load_state_dict` has changed of a model's trained parameters since the last `check`.

    The anchor was taken before: all that was loaded would be sent as if it had been trained.
    """

    def __init__(self, model: nn.Module) -> None:
        self.watching = True
        """Whether what is loaded stays: inside `OuterLoop.anchor()` it does not."""
        self.frozen = False
        """Whether parameters that are not trained were loaded."""
        self._before: dict[str, int] = {}
        self._changed: dict[str, None] = {}  # in order
        handles = []
        for path, module in model.named_modules():  # each by itself, for a part of a model can be loaded too
            handles.append(module.register_load_state_dict_pre_hook(_Hook(self, Loads._begin, path)))
            handles.append(module.register_load_state_dict_post_hook(_Hook(self, Loads._end, path)))
        weakref.finalize(self, lambda: [handle.remove() for handle in handles]).atexit = False

    def _begin(self, path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.requires_grad and name not in self._before:
                self._before[name] = checksum(parameter)

    def _end(self, path: str, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(path, recurse=False):
            self.frozen |= not parameter.requires_grad
            if name in self._before:
                self._changed.pop(name, None)
                if checksum(parameter) != self._before[name]:  # it may also have been put back
                    self._changed[name] = None

    def check(self) -> None:
        """Raise an AtollError that names a parameter that is not what it was."""
        if self._changed:
            raise AtollError(
                f"parameter {next(iter(self._changed))!r} ({len(self._changed)} in all) was loaded into the model "
                "after the outer loop was made: load first, then make OuterLoop; to resume a run, call "
                "outer.load_state_dict() after it; to train on from the outer parameters, outer.roll_back()"
            )
        self.forget()

    def forget(self) -> None:
        """Take the parameters as they are: the loop has compared or replaced them."""
        self._before, self._changed = {}, {}


class _Hook:
    """Tells a model's `Loads` of a module that is loaded; copies of the model, and pickled ones, tell nobody."""

    def __init__(
        self, loads: Loads | None = None, tell: Callable[[Loads, str, nn.Module], None] | None = None, path: str = ""
    ) -> None:
        self._loads = None if loads is None else weakref.ref(loads)
        self._tell = tell
        self._path = path

    def __call__(self, module: nn.Module, *_: Any) -> None:
        loads = self._loads() if self._loads is not None else None
        if loads is not None and self._tell is not None and loads.watching:
            self._tell(loads, self._path, module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)()

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        return type(self), ()
