"""Defines every exception that atoll raises on purpose, and makes text from other machines safe to print.

AtollError
├── ConfigError      a setting, or a model that does not fit it: setting, value
├── NonFiniteError   a NaN or an infinity in a delta or a gradient
├── LinkError        a round that cannot be completed: worker, round_id
│   └── RegistryError   the registry cannot be reached, or refuses: key, uncertain
├── CheckpointError  a checkpoint that is torn, foreign or from another run: path
└── DataError        text or tokens that are missing, empty or damaged: path

The message says what failed, the value, what is allowed and what to do. The fields hold the same facts for programs;
a field is None where it does not apply.
"""

import unicodedata


def printable(text: str) -> str:
    r"""Escape control characters, such as \x1b, so that no terminal obeys them.

    Invisible characters and those that change the direction of text are escaped too. Newlines and tabs stay.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    harmless = character in "\n\t\u200c\u200d" or unicodedata.category(character) in ("Zs", "Cn", "Co")
    if harmless or character.isprintable():
        return character
    return character.encode("unicode-escape").decode("ascii")


class AtollError(Exception):
    """Base class of every error that atoll raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())  # the message may quote another machine


class ConfigError(AtollError, ValueError):
    """A setting has a value that cannot work.

    Args:
        message: The setting, its value, what is allowed and why.
        setting: Name of the setting, such as "sync.period" or "timeout_s".
        value: The refused value.
    """

    def __init__(self, message: str = "", *, setting: str | None = None, value: object = None) -> None:
        super().__init__(message)
        self.setting, self.value = setting, value


class NonFiniteError(AtollError, ArithmeticError):
    """A vector to be sent holds a NaN or an infinity."""


class LinkError(AtollError, RuntimeError):
    """A link cannot complete a round, or cannot be joined.

    Args:
        message: The round, the worker and what happened to it.
        worker: Number of the worker that is missing, left or failed.
        round_id: The round, as (step, fragment, last).
    """

    def __init__(
        self, message: str = "", *, worker: int | None = None, round_id: tuple[int, int, bool] | None = None
    ) -> None:
        super().__init__(message)
        self.worker, self.round_id = worker, round_id


class ExcludedError(LinkError):
    """The other workers go on without this one, which was cut off from them; it may join again."""


class RegistryError(LinkError):
    """The registry cannot be reached, refuses an operation, or cannot store it.

    Args:
        message: The operation, the registry's address and what happened.
        key: The key of the operation.
        uncertain: Whether the operation may have been carried out nevertheless.
    """

    def __init__(self, message: str = "", *, key: str | None = None, uncertain: bool = False) -> None:
        super().__init__(message)
        self.key, self.uncertain = key, uncertain


class _FileError(AtollError):
    def __init__(self, message: str = "", *, path: object = None) -> None:
        super().__init__(message)
        self.path = path


class CheckpointError(_FileError, RuntimeError):
    """A checkpoint cannot be written, read or trusted; `path` is its file or folder."""


class DataError(_FileError):
    """Text or tokens at `path` cannot be read: missing, empty, damaged, or not what the run file says."""
