"""Laws of the file of events: what is written comes back, wherever it was cut and however it is read."""

import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from hypothesis import given
from hypothesis import strategies as st

from atoll.errors import DataError
from atoll.runs.events import _LONG_NUMBER, Event, Jsonl, _line, read
from atoll.runs.tail import Tail


def readable(event: Event) -> bool:
    """Whether no number is so long that a file with it is refused."""
    return not _LONG_NUMBER.search(_line(event))


events: st.SearchStrategy[Event] = st.one_of([st.builds(kind) for kind in get_args(Event)]).filter(readable)
some_events = st.lists(events, max_size=6)


@contextmanager
def a_file(content: list[Event]) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, content)
        yield path


def write(path: Path, content: list[Event], at: int | None = None) -> None:
    file = Jsonl(path, at)
    for event in content:
        file.write(event)
    file.close()


def as_written(value: Any) -> Any:
    """An event, or a part of one, with None for what JSON has no number for."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [as_written(item) for item in value]
    if isinstance(value, dict):
        return {key: as_written(item) for key, item in value.items()}
    return value if isinstance(value, int | str | None) else (type(value), as_written(asdict(value)))


@given(some_events)
def test_what_is_written_comes_back(content: list[Event]) -> None:
    with a_file(content) as path:
        back = read(path)
        assert as_written(back) == as_written(content)
        before = path.read_bytes()
        write(path, back)
        assert path.read_bytes() == before
    assert before.count(b"\n") == len(content)


@given(some_events, some_events, st.data())
def test_a_file_cut_anywhere_holds_its_whole_lines_and_goes_on(
    content: list[Event], more: list[Event], data: st.DataObject
) -> None:
    with a_file(content) as path:
        whole = path.read_bytes()
        cut = whole[: data.draw(st.integers(0, len(whole)))]
        path.write_bytes(cut)
        kept = content[: cut.count(b"\n")]
        assert as_written(read(path)) == as_written(kept)
        write(path, more, at=data.draw(st.integers(len(cut), len(whole))))
        assert as_written(read(path)) == as_written([*kept, *more])


@given(some_events, st.data())
def test_a_tail_tells_everything_once_however_the_file_grows(content: list[Event], data: st.DataObject) -> None:
    with a_file(content) as path:
        whole = path.read_bytes()
        tail, told = Tail(path), list[Event]()
        for length in sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=5))):
            path.write_bytes(whole[:length])
            told += tail.new()
        path.write_bytes(whole)
        assert as_written([*told, *tail.new()]) == as_written(content)


@given(st.lists(events, min_size=1, max_size=4), st.data())
def test_damage_is_a_data_error_or_goes_unseen_but_never_anything_else(
    content: list[Event], data: st.DataObject
) -> None:
    with a_file(content) as path:
        damaged = bytearray(path.read_bytes())
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(damaged)
        try:
            read(path)
        except DataError as error:
            complaint = str(error)
        else:
            complaint = f"{path}, line none"
    assert complaint.startswith(f"{path}, line ")
