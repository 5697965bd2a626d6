"""Reads a file of events while another process writes it."""

from itertools import islice
from pathlib import Path

from atoll._util.disk import open_plain
from atoll.errors import DataError
from atoll.runs.events import Event, parsed


class Tail:
    """Reads a file of events while another process writes it."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lines = 0
        self._last = b""  # the bytes before the offset, to notice a file that was cut and has grown past it
        self.offset = 0
        """Bytes of the file that have been read."""

    def new(self, most: int | None = None) -> list[Event]:
        """Returns the events since the last call: none without a file, all again after it was cut and rewritten.

        Args:
            most: The largest number of events to return; the next call returns the others.

        Raises:
            DataError: the next line is damaged, or the file cannot be read. Events before that line are returned first.
        """
        found: list[tuple[bytes, Event]] = []
        try:
            with open_plain(self._path) as file:
                file.seek(self.offset - len(self._last))
                if file.read(len(self._last)) != self._last:
                    self._forget()
                    file.seek(0)
                found.extend(islice(parsed(self._path, file, after=self._lines), most))
        except FileNotFoundError:
            self._forget()
            return []
        except DataError:
            if not found:
                raise
        except OSError as fault:
            if not found:
                raise DataError(f"{self._path} cannot be read: {fault.strerror}") from fault
        if not found:
            return []
        lines, events = zip(*found, strict=True)
        self.offset += sum(map(len, lines))
        self._lines += len(lines)
        self._last = lines[-1][-64:]
        return list(events)

    def _forget(self) -> None:
        self.offset, self._lines, self._last = 0, 0, b""
