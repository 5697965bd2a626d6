"""Prints the error of a command as one line, and sets its exit code."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from atoll._util.signals import interruptible
from atoll.errors import AtollError, ConfigError, printable


class Commands(TyperGroup):
    """Prints errors of commands as one line; --debug, anywhere on the line, shows the traceback instead."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # noqa: D102 - typer's
        ctx.obj = "--debug" in args
        return super().parse_args(ctx, [arg for arg in args if arg != "--debug"])

    def invoke(self, ctx: Any) -> Any:  # noqa: D102 - typer's
        try:
            with interruptible():  # already here: importing torch takes seconds
                return super().invoke(ctx)
        except KeyboardInterrupt as stop:
            if ctx.obj:
                raise
            typer.echo(printable(str(stop)) or "interrupted", err=True)
            raise SystemExit(130) from None
        except Exception as error:
            message = None if ctx.obj else _message(error)
            if message is None:
                raise
            from rich.console import Console
            from rich.text import Text

            line = Text.assemble(("error: ", "bold red"), printable(message))
            Console(stderr=True).print(line, soft_wrap=True)
            raise SystemExit(2 if isinstance(error, ConfigError) else 1) from None


@contextmanager
def saying(words: str) -> Iterator[None]:
    """Answer Ctrl-C inside this context with `words`; training prints its own."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(words) from None


def _message(error: Exception) -> str | None:
    """Return what went wrong, for people; None if only a traceback can tell."""
    if isinstance(error, AtollError):
        return str(error)
    # Torch's error types are compared by name: importing torch only to fail would take seconds.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "allocate memory" in str(error):
        return (
            "out of memory: lower train.batch (of atoll eval, --batch) or raise train.accumulate, set "
            "model.checkpoint_activations=true, or choose a smaller model.preset or fewer sync.workers"
        )
    if isinstance(error, OSError) and error.errno not in (None, errno.EPIPE):
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}{_ADVICE.get(error.errno or 0, '')}"
    return None


_FULL = "; free some space or choose another folder (out, --out); what was saved before is unharmed"
_CLOSED = "; choose a folder you may write to (out, --out)"
_ADVICE = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EACCES: _CLOSED,
    errno.EPERM: _CLOSED,
    errno.EROFS: _CLOSED,
}
