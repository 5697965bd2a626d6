"""One exception tree, and text from other machines made fit for a terminal.

AtollError
├── ConfigError      a setting, or a model it does not fit: its name, its value, what is allowed and why
├── NonFiniteError   a NaN or an infinity where a delta or a gradient should be sent
├── LinkError        a round that could not be completed: which round, which worker
├── CheckpointError  a checkpoint that is torn, foreign or of another run
└── DataError        text or tokens that cannot be read: missing, empty, damaged
"""

import unicodedata


def printable(text: str) -> str:
    r"""Writes control characters as escapes, such as \x1b, so that no terminal obeys them.

    So it writes characters that nobody sees or that turn the order of others round. Ends of lines and tabs stay.
    """
    return text if text.isprintable() else "".join(map(_printable, text))


def _printable(character: str) -> str:
    harmless = character in "\n\t\u200c\u200d" or unicodedata.category(character) in ("Zs", "Cn", "Co")
    if harmless or character.isprintable():
        return character
    return character.encode("unicode-escape").decode("ascii")


class AtollError(Exception):
    """Anything atoll raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())  # it may quote what another machine has sent


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
