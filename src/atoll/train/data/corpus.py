"""Reads documents from sources of text, one str each, as a stream.

A source is "stdlib" (the source of Python's standard library), a file, a folder, a glob, or "hf:NAME[:CONFIG]" (the
train split of a Hugging Face dataset, or of a local dataset folder). The ending of a file says what it holds:

    .jsonl .ndjson .json   one JSON object a line, whose `field` is the document
    .parquet               one row a document, in the column `field`
    anything else          text, UTF-8, one document

All but Parquet may also end in .gz or .zst.
"""

import glob
import gzip
import io
import json
import os
import platform
import sysconfig
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from difflib import get_close_matches
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Final, cast

from atoll._util.disk import lines_limited
from atoll._util.quiet_hub import quiet_hub
from atoll.errors import ConfigError, DataError

WHOLE: Final = 2**22
"""Characters from which on a text is split into several documents, so that memory stays bounded."""
PIECE: Final = 2**16
"""Characters of such a document, which ends at the end of a line."""

MOST_ROW: Final = 2**26
"""Most bytes of a row, which is read whole: a compressed file of a few megabytes may hold gigabytes."""
_ROWS_AT_ONCE = 8  # of Parquet, whose rows may share one long text in the file but not in memory

_ROWS = (".jsonl", ".ndjson", ".json")
_PACKED = (".gz", ".zst")
# A folder's plain .json files are mostly settings, not text; packed ones are mostly JSON lines, as those of C4.
_TEXTS = (".txt", ".md", ".rst", ".py")
_KNOWN = (".parquet", *_TEXTS, *(e + p for e in (".txt", *_ROWS) for p in _PACKED), ".jsonl", ".ndjson")
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idlelib", "lib2to3"}


def documents(
    source: str | Sequence[str], *, field: str = "text", limit: int | None = None
) -> Generator[str, None, None]:
    """Yield the documents of one or several sources in order; none is empty, all are valid Unicode.

    Args:
        source: One or several sources.
        field: The field or column that holds the text of a row; a null counts as empty.
        limit: Most documents to read; None reads all.

    Raises:
        DataError: if something cannot be read, with its file and line, or if there is no document at all.
    """
    with closing(_documents(_sources(source), field)) as found:
        document = None
        for document in islice(found, limit):
            yield document
    if document is None:
        raise DataError(f"data.source {source!r} holds no text: every document in it is empty")


def identity(source: str | Sequence[str], field: str, limit: int | None) -> str:
    """Return what the documents depend on: settings, and files with size and modification time.

    A dataset of the Hugging Face hub is identified by its name alone.
    """
    parts: list[Any] = []
    for each in _sources(source):
        if each.startswith("hf:"):
            name, config = _dataset(each)
            parts.append(["hf", name, config, _stamps(_walk(Path(name))) if Path(name).is_dir() else None])
        else:
            python = platform.python_version() if each == "stdlib" else None
            parts.append(["files", python, _stamps(_files(each))])
    return json.dumps([parts, field, limit])


def text_bytes(source: str | Sequence[str], limit: int | None) -> int | None:
    """Return the bytes of all documents if known without reading them: plain text without a limit; else None."""
    sources = _sources(source)
    if limit is not None or any(each.startswith("hf:") for each in sources):
        return None
    files = [path for each in sources for path in _files(each)]
    if any(_kind(path) != "text" or path.suffix.lower() in _PACKED for path in files):
        return None
    return sum(size for _, size, _ in _stamps(files))


def need(module: str, what: str, extra: str = "data") -> Any:
    """Import an optional module; ConfigError says what it is for and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(f"{what} needs the package {package} ({error}): pip install 'atoll[{extra}]'") from error


def missing(path: Path) -> str:
    """Say which part of a path is missing, and what is there with a similar name."""
    while not os.path.exists(path.parent):
        path = path.parent
    try:
        close = get_close_matches(path.name, os.listdir(path.parent), n=1, cutoff=0.4)
    except OSError as error:
        return f"{path.parent} cannot be listed: {error.strerror}"
    return f"{path} does not exist" + (f"; did you mean {path.parent / close[0]}?" if close else "")


def _sources(source: str | Sequence[str]) -> list[str]:
    """Return sources as a list; refuse an empty one, which would be the current folder."""
    sources = [source] if isinstance(source, str) else list(source)
    if not sources or not all(sources):
        allowed = "stdlib, a file, a folder, a glob or hf:NAME"
        raise ConfigError(f"data.source must name at least one source and no empty one ({allowed}), got {source!r}")
    return sources


# ---- the files of a source


def _files(source: str) -> list[Path]:
    """Return the files of a source that is not a dataset, in the order they are read."""
    if source == "stdlib":
        return list(_walk(Path(sysconfig.get_path("stdlib")), (".py",), _NOT_LIBRARY))
    path = Path(source).expanduser()
    if os.path.isdir(path):  # which, unlike Path.is_dir, never raises
        found = list(_walk(path, _KNOWN))
        if not found:
            raise DataError(f"the folder {path} holds no file with a known ending: {' '.join(_KNOWN)}")
        return found
    if os.path.isfile(path):
        return [path]
    if os.path.exists(path):
        raise DataError(f"{path} is neither a file nor a folder: write what it gives to a file first")
    if glob.has_magic(source):
        found = [Path(name) for name in sorted(glob.glob(str(path), recursive=True)) if os.path.isfile(name)]
        if not found:
            raise DataError(f"data.source {source!r} matches no file: {missing(path)}")
        return found
    raise DataError(f"data.source {source!r} cannot be read: {missing(path)}")


def _walk(root: Path, endings: tuple[str, ...] = ("",), skipped: Iterable[str] = ()) -> Iterator[Path]:
    """Yield files with one of these endings under a folder, sorted folder by folder, without hidden ones."""

    def refuse(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} cannot be listed: {error.strerror}") from error

    for folder, folders, names in os.walk(root, onerror=refuse):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in skipped)
        for name in sorted(names):
            if name.lower().endswith(endings) and not name.startswith("."):
                yield Path(folder, name)


def _stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Return path, bytes and modification time in nanoseconds of every file."""
    stamps = []
    for path in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        stamps.append((str(path.resolve()), status.st_size, status.st_mtime_ns))
    return stamps


def _kind(path: Path) -> str:
    """Return what a file holds by its ending: rows, parquet or text."""
    name = path.name.lower()
    inner = Path(name).stem if name.endswith(_PACKED) else name
    return "parquet" if name.endswith(".parquet") else "rows" if inner.endswith(_ROWS) else "text"


# ---- reading each kind


def _documents(sources: list[str], field: str) -> Generator[str, None, None]:
    """Yield every document that is not empty, as valid Unicode."""
    readers = {"parquet": _parquet, "rows": _rows, "text": _text}
    for source in sources:
        if source.startswith("hf:"):
            texts = _dataset_rows(source, field)
        else:
            texts = chain.from_iterable(readers[_kind(path)](path, field) for path in _files(source))
        for text in texts:
            if text:
                yield text.encode(errors="replace").decode()  # JSON allows lone surrogates, UTF-8 does not


def _open(path: Path) -> IO[bytes]:
    """Open a file, decompressed; reading raises OSError, EOFError or zlib.error if it is torn or damaged."""
    match path.suffix.lower():
        case ".gz":
            return cast(IO[bytes], gzip.open(path, "rb"))
        case ".zst":
            # Not the package zstandard, whose reader takes the end of a torn file for the end of the text.
            return io.BufferedReader(need("pyarrow", f"reading {path}").input_stream(str(path), compression="zstd"))
    return path.open("rb")


_UNREADABLE = (OSError, EOFError, zlib.error)


def _text(path: Path, field: str) -> Iterator[str]:
    """Yield a text file as one document, or several if it is large; invalid UTF-8 is replaced."""
    try:
        with _open(path) as binary, io.TextIOWrapper(binary, "utf-8-sig", errors="replace", newline="") as stream:
            start = stream.read(WHOLE)
            if "\0" in start[:1024]:
                raise DataError(f"{path} is not text, it has NUL bytes: text must be UTF-8, not UTF-16 nor binary")
            if len(start) < WHOLE:
                yield start
                return
            for part in (io.StringIO(start, newline=""), stream):
                while piece := part.read(PIECE) + part.readline(PIECE):
                    yield piece
    except _UNREADABLE as error:
        raise DataError(f"{path} cannot be read: {_reason(error)}") from error


def _rows(path: Path, field: str) -> Iterator[str]:
    """Yield the text of each JSON line; blank lines are skipped."""
    number = 0
    try:
        with _open(path) as lines:
            for number, line in enumerate(lines_limited(path, lines, MOST_ROW), 1):
                if not line.isspace():
                    yield _field(_row(line, f"{path}, line {number}"), field, f"{path}, line {number}")
    except _UNREADABLE as error:
        raise DataError(f"{path} cannot be read past line {number}: {_reason(error)}") from error


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not JSON ({_reason(error)}): each line must be one object") from error
    if not isinstance(row, dict):
        raise DataError(f"{where} is a JSON {type(row).__name__}: each line must be one object")
    return row


def _field(row: dict[str, Any], field: str, where: str) -> str:
    """Return the text of a row; a null counts as empty."""
    if field not in row:
        raise DataError(f"{where} has no field {field!r} but {', '.join(map(str, row)) or 'none'}: set data.field")
    text = row[field]
    if text is not None and not isinstance(text, str):
        problem = f"{where}: the field {field!r} is a {type(text).__name__}, not text"
        texts = ", ".join(name for name, value in row.items() if isinstance(value, str))
        raise DataError(f"{problem}; fields with text: {texts or 'none'}")
    return text or ""


def _parquet(path: Path, field: str) -> Iterator[str]:
    """Yield one column of a Parquet file, a few rows at a time."""
    arrow, parquet = need("pyarrow", f"reading {path}"), need("pyarrow.parquet", f"reading {path}")
    row = 0
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            columns = {column.name: column.type for column in file.schema_arrow}
            kind = columns.get(field)
            if not any(is_text(kind) for is_text in (arrow.types.is_string, arrow.types.is_large_string) if kind):
                problem = f"no column {field!r}" if kind is None else f"a column {field!r} of {kind}, not of string"
                others = ", ".join(f"{name} ({kind})" for name, kind in columns.items())
                raise DataError(f"{path} has {problem}; its columns are {others}: set data.field")
            for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=[field]):
                for value in batch.column(0):
                    row += 1
                    text = value.as_py() or ""  # a null counts as empty
                    if len(text) > MOST_ROW:
                        raise DataError(f"{path}, row {row} has {len(text)} characters: at most {MOST_ROW} are read")
                    yield text
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path} cannot be read past row {row}: {_reason(error)}") from error


def _dataset(source: str) -> tuple[str, str | None]:
    """Return name (or folder) and config of "hf:NAME[:CONFIG]"."""
    whole = os.path.expanduser(source.removeprefix("hf:"))
    name, _, config = (whole, "", "") if os.path.isdir(whole) else whole.partition(":")
    if not name:
        raise ConfigError(f"data.source {source!r} names no dataset: write hf:NAME, hf:NAME:CONFIG or hf:FOLDER")
    if not os.path.isdir(name) and (name.startswith((".", "/")) or name.count("/") > 1):
        raise DataError(f"data.source {source!r} cannot be read: {missing(Path(name))}")
    return name, config or None


def _dataset_rows(source: str, field: str) -> Iterator[str]:
    """Yield the train split of a Hugging Face dataset, streamed."""
    name, config = _dataset(source)
    datasets = need("datasets", f"reading {source}")
    number = 0
    try:
        with quiet_hub(), closing(iter(datasets.load_dataset(name, config, split="train", streaming=True))) as rows:
            for number, row in enumerate(rows, 1):
                yield _field(row, field, f"{source}, row {number}")
    except (DataError, ConfigError):
        raise
    except Exception as error:  # the package and its dependencies raise any type
        if number:
            raise DataError(f"{source} cannot be read past row {number}: {_reason(error)}") from error
        advice = "check the name and the connection, or give the folder of a copy"
        raise DataError(f"{source} cannot be read: {_reason(error)}; {advice}") from error


def _reason(error: BaseException) -> str:
    """Return the first line of a library's error message, or the error's type."""
    words = getattr(error, "strerror", None) or str(error)
    return words.splitlines()[0].rstrip(".") if words else type(error).__name__
