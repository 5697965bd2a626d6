"""One exception tree.

AtollError
├── ConfigError      a setting, or a model it does not fit: its name, its value, what is allowed and why
├── NonFiniteError   a NaN or an infinity where a delta or a gradient should be sent
├── LinkError        a round that could not be completed: which round, which worker
├── CheckpointError  a checkpoint that is torn, foreign or of another run
└── DataError        text or tokens that cannot be read: missing, empty, damaged
"""

from atoll.visible import visible


class AtollError(Exception):
    """Anything atoll raises on purpose."""

    def __str__(self) -> str:
        return visible(super().__str__())  # it may quote what another machine has sent


class ConfigError(AtollError, ValueError):
    """A setting that cannot work: the message names it, its value, what is allowed and why."""


class NonFiniteError(AtollError, ArithmeticError):
    """A NaN or an infinity in a vector that was to be sent."""


class LinkError(AtollError, RuntimeError):
    """A round that could not be completed; the message names the round and the worker."""


class CheckpointError(AtollError, RuntimeError):
    """A checkpoint that cannot be trusted: the message says which file and why."""


class DataError(AtollError):
    """Text or tokens cannot be read: missing, empty, damaged, or not what the run file says."""
