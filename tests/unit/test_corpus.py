"""Where documents come from, and what is said when they cannot be read."""

import gzip
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import ConfigError, DataError
from atoll.train.data import corpus
from atoll.train.data.corpus import documents, identity, text_bytes

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def read(*sources: object, **settings: Any) -> list[str]:
    return list(documents([str(source) for source in sources], **settings))


def rows(*texts: object, field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: text}).encode() + b"\n" for text in texts)


def zst(data: bytes) -> bytes:
    packed: bytes = pyarrow.compress(data, "zstd", asbytes=True)
    return packed


def write_parquet(path: Path, **columns: list[Any]) -> Path:
    parquet.write_table(pyarrow.table(columns), path)
    return path


# ---- what is read


def test_the_standard_library_is_read_file_by_file() -> None:
    first, second = list(documents("stdlib", limit=40)), list(documents("stdlib", limit=41))
    assert len(first) == 40
    assert second[:40] == first
    names = [Path(name).parts for name, _, _ in json.loads(identity("stdlib", "text", None))[0][0][2]]
    assert len(names) > 300
    assert all(parts[-1].endswith(".py") for parts in names)
    assert not any(set(parts) & {"test", "tests", "site-packages", "idlelib", "__pycache__"} for parts in names)
    assert Path(os.__file__).resolve().parts in names


def test_a_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "book"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\xff\n")
    assert read(path) == ["one\r\ntwo\ufffd\n"]
    assert list(documents(str(path))) == read(path)


@pytest.mark.parametrize("pack", [gzip.compress, zst, lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])])
def test_packed_files_are_unpacked(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    ending = ".zst" if pack is zst else ".gz"
    (tmp_path / f"a.txt{ending}").write_bytes(pack(b"one\ntwo \xc3\xa9\n"))
    (tmp_path / f"b.jsonl{ending}").write_bytes(pack(rows("three", "four\n")))
    (tmp_path / f"c.json{ending}").write_bytes(pack(rows("five")))
    assert read(tmp_path) == ["one\ntwo é\n", "three", "four\n", "five"]


def test_rows_come_from_their_field(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b"\xef\xbb\xbf" + rows("x", field="body") + b"\n  \n" + rows("y", "", None, field="body"))
    table = write_parquet(tmp_path / "b.parquet", n=[1, 2, 3, 4], body=["p", None, "", "q"])
    assert read(lines, table, field="body") == ["x", "y", "p", "q"]


def test_parquet_is_read_across_batches_and_row_groups(tmp_path: Path) -> None:
    texts = [f"document {i}" for i in range(1500)]
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": pyarrow.array(texts, pyarrow.large_string())}), path, 400)
    assert read(path) == texts


def test_a_folder_is_read_in_order_without_hidden_and_unknown_files(tmp_path: Path) -> None:
    for name in ("b.txt", "a.MD", ".hidden.txt", "c.png", "z/d.py", ".git/e.txt", "y/x.rst", "settings.json"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    assert read(tmp_path) == ["a.MD", "b.txt", "y/x.rst", "z/d.py"]


def test_globs_match_files_of_any_ending(tmp_path: Path) -> None:
    for name in ("b.log", "a.log", "c.txt", "deep/d.log"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.log") == ["a.log", "b.log"]
    assert read(tmp_path / "**" / "*.log") == ["a.log", "b.log", "deep/d.log"]
    (tmp_path / "odd[1].txt").write_text("odd")
    assert read(tmp_path / "odd[1].txt") == ["odd"]  # a file of this name goes before what the name might match


def test_sources_are_read_one_after_another_up_to_the_limit(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(rows("", "1", "2"))
    (tmp_path / "b.txt").write_text("3")
    assert read(tmp_path / "b.txt", tmp_path / "a.jsonl") == ["3", "1", "2"]
    assert read(tmp_path, limit=2) == ["1", "2"]
    assert read(tmp_path / "a.jsonl", tmp_path / "missing.txt", limit=2) == ["1", "2"]  # no further than needed


def test_large_text_becomes_many_documents_that_end_with_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WHOLE", 1000)
    monkeypatch.setattr(corpus, "PIECE", 100)
    text = "".join(f"line {i} é\r\n" for i in range(300))
    (tmp_path / "large.txt").write_text(text, newline="")
    (tmp_path / "small.txt").write_text(text[:999], newline="")
    pieces = read(tmp_path / "large.txt")
    assert "".join(pieces) == text
    assert all(len(piece) <= 200 for piece in pieces)
    assert sum(not piece.endswith("\n") for piece in pieces) <= 1  # where what was read at first ends
    assert read(tmp_path / "small.txt") == [text[:999]]


def test_a_line_without_end_is_cut_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "WHOLE", 1000)
    monkeypatch.setattr(corpus, "PIECE", 100)
    (tmp_path / "large.txt").write_text("é" * 5000)
    assert [len(piece) for piece in read(tmp_path / "large.txt")] == [200] * 25


def test_lone_surrogates_become_question_marks(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a\\ud83db"}\n{"text": "\\ud83c\\udfdd"}\n')
    assert read(tmp_path / "a.jsonl") == ["a?b", "\U0001f3dd"]


@pytest.fixture
def datasets_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package's lock files go to a temporary folder."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "home"))


@pytest.mark.usefixtures("datasets_at_home")
def test_a_local_dataset_folder_is_streamed(tmp_path: Path) -> None:
    table = tmp_path / "table"
    lines = tmp_path / "lines"
    table.mkdir()
    lines.mkdir()
    write_parquet(table / "train.parquet", text=[f"row {i}" for i in range(1200)], n=list(range(1200)))
    (lines / "train.jsonl").write_bytes(rows("a", "", "b", field="body"))
    assert read(f"hf:{table}") == [f"row {i}" for i in range(1200)]
    assert read(f"hf:{table}:default", limit=3) == ["row 0", "row 1", "row 2"]
    assert read(f"hf:{lines}", field="body") == ["a", "b"]
    with pytest.raises(DataError, match=r"table, row 1 has no field 'body' but text, n: set data\.field"):
        read(f"hf:{table}", field="body")
    with pytest.raises(DataError, match=r"row 1: the field 'n' is a int, not text; fields with text: text"):
        read(f"hf:{table}", field="n")
    with pytest.raises(DataError, match=r"table:other cannot be read: BuilderConfig 'other' not found"):
        read(f"hf:{table}:other")
    before = identity(f"hf:{table}", "text", None)
    write_parquet(table / "train.parquet", text=["other"])
    assert identity(f"hf:{table}", "text", None) != before


def test_a_dataset_of_the_hub_is_known_by_name_and_config() -> None:
    names = ["hf:a/b", "hf:a/b:en", "hf:a/c"]
    assert len({identity(name, "text", None) for name in names}) == 3
    assert text_bytes("hf:a/b", None) is None


# ---- identity


def test_the_identity_changes_with_everything_that_documents_depend_on(tmp_path: Path) -> None:
    path, other = tmp_path / "a.txt", tmp_path / "b.txt"
    path.write_text("one")
    other.write_text("one")
    here = identity(str(path), "text", None)
    assert identity([str(path)], "text", None) == here
    changed = [identity(str(path), "body", None), identity(str(path), "text", 5), identity(str(other), "text", None)]
    changed += [identity([str(path), str(other)], "text", None), identity([str(other), str(path)], "text", None)]
    os.utime(path, ns=(1, 1))
    changed.append(identity(str(path), "text", None))
    path.write_text("longer")
    os.utime(path, ns=(1, 1))
    changed.append(identity(str(path), "text", None))
    assert len({here, *changed}) == 8


def test_the_identity_of_a_relative_path_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("one")
    monkeypatch.chdir(tmp_path)
    assert identity("a.txt", "text", None) == identity(str(tmp_path / "a.txt"), "text", None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/a.txt") == ["one"]


def test_bytes_of_plain_text_are_known_beforehand(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("é\n")
    (tmp_path / "b.md").write_text("12345")
    assert text_bytes(str(tmp_path), None) == 8
    assert text_bytes(str(tmp_path), 1) is None
    (tmp_path / "c.jsonl").write_bytes(rows("x"))
    assert text_bytes(str(tmp_path), None) is None


# ---- what is refused

GOOD = rows("one", "two", "three")
TABLE: dict[str, list[Any]] = {"text": ["one", "two"], "n": [1, 2]}
FAULTS: dict[str, tuple[str, bytes, str]] = {
    "bad JSON": ("a.jsonl", GOOD + b'{"text": "fo', r"a\.jsonl, line 4 is not JSON \(Unterminated string"),
    "not UTF-8": ("a.jsonl", GOOD + b'{"text": "\xff"}', r"a\.jsonl, line 4 is not JSON \('utf-8' codec"),
    "deep JSON": ("a.jsonl", b"[" * 100_000 + b"\n", r"line 1 is not JSON \(maximum recursion"),
    "no object": ("a.jsonl", GOOD + b"[1]\n", r"line 4 is a JSON list: each line must be one object"),
    "pretty JSON": ("a.json", b'{\n "text": "one"\n}', r"a\.json, line 1 is not JSON"),
    "no field": (
        "a.jsonl",
        GOOD + rows("x", field="body"),
        r"line 4 has no field 'text' but id, body: set data\.field",
    ),
    "no fields": ("a.jsonl", b"{}", r"line 1 has no field 'text' but none"),
    "no text": ("a.jsonl", rows(7), r"line 1: the field 'text' is a int, not text; fields with text: none"),
    "torn gz": (
        "a.jsonl.gz",
        gzip.compress(GOOD)[:-12],
        r"a\.jsonl\.gz cannot be read past line \d: Compressed file end",
    ),
    "no gz": ("a.txt.gz", b"hello", r"a\.txt\.gz cannot be read: Not a gzipped file"),
    "bent gz": ("a.txt.gz", gzip.compress(bytes(99))[:10] + b"\xff" * 9, r"a\.txt\.gz cannot be read: Error -3"),
    "torn zst": (
        "a.jsonl.zst",
        zst(GOOD)[:-5],
        r"a\.jsonl\.zst cannot be read past line 0: Truncated compressed stream",
    ),
    "torn zst text": ("a.txt.zst", zst(GOOD)[:5], r"a\.txt\.zst cannot be read: Truncated compressed stream"),
    "no zst": ("a.txt.zst", b"hello", r"a\.txt\.zst cannot be read: ZSTD decompress failed"),
    "no parquet": (
        "a.parquet",
        b"PAR1 or is it",
        r"a\.parquet cannot be read past row 0: Parquet magic bytes not found",
    ),
    "empty parquet": ("a.parquet", b"", r"a\.parquet cannot be read past row 0"),
    "UTF-16": ("a.txt", "hello".encode("utf-16"), r"a\.txt is not text, it has NUL bytes: text must be UTF-8"),
    "binary": ("a.bin", bytes(1000), r"a\.bin is not text, it has NUL bytes"),
    "empty": ("a.txt", b"", r"a\.txt'\] holds no text: every document in it is empty"),
    "empty rows": ("a.jsonl", rows("", None), "holds no text"),
}


@pytest.mark.parametrize("case", FAULTS)
def test_what_cannot_be_read_is_named(tmp_path: Path, case: str) -> None:
    name, content, message = FAULTS[case]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_documents_before_a_fault_are_delivered(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(GOOD + b"?")
    found = documents(str(tmp_path / "a.jsonl"))
    assert [next(found), next(found), next(found)] == ["one", "two", "three"]
    with pytest.raises(DataError, match="line 4"):
        next(found)


@pytest.mark.parametrize("position", [40, 0.5, -200])
def test_a_damaged_parquet_is_an_error_and_no_crash(tmp_path: Path, position: float) -> None:
    texts = [f"{i} {'x' * 50}" for i in range(400)]
    path = write_parquet(tmp_path / "a.parquet", text=texts)
    parquet.write_table(pyarrow.table({"text": texts}), path, write_page_checksum=True)
    data = bytearray(path.read_bytes())
    place = int(position * len(data)) if isinstance(position, float) else position
    data[place : place + 20] = bytes(byte ^ 0x5A for byte in data[place : place + 20])
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"a\.parquet cannot be read past row"):
        read(path)


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("body", r"a\.parquet has no column 'body'; its columns are text \(string\), n \(int64\): set data\.field"),
        ("n", r"a\.parquet has a column 'n' of int64, not of string; its columns are text"),
    ],
)
def test_a_parquet_without_the_column_is_refused(tmp_path: Path, field: str, message: str) -> None:
    write_parquet(tmp_path / "a.parquet", **TABLE)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.parquet", field=field)


@pytest.mark.parametrize("act", [read, lambda source: identity(str(source), "text", None)])
def test_what_is_not_there_is_named_with_what_comes_close(tmp_path: Path, act: Callable[[object], object]) -> None:
    (tmp_path / "stories").mkdir()
    (tmp_path / "stories" / "grimm.txt").write_text("once")
    (tmp_path / "empty").mkdir()
    for source, message in {
        "stories/grim.txt": r"grim\.txt does not exist; did you mean .*stories/grimm\.txt\?",
        "storys/grimm.txt": r"storys does not exist; did you mean .*stories\?",
        "stories/grimm.txt/more": r"grimm\.txt cannot be listed: Not a directory",
        "stories/xyz": r"xyz does not exist$",
        "stories/*.text": r"matches no file: .*text does not exist; did you mean .*stories/grimm\.txt\?",
        "storys/*.txt": r"matches no file: .*storys does not exist; did you mean",
        "empty/*": r"matches no file: .*empty/\* does not exist",
        "empty": r"empty holds no file with a known ending: \.parquet \.txt",
        "stories/\0": "does not exist",
        "x" * 300: "does not exist",
    }.items():
        with pytest.raises(DataError, match=message):
            act(tmp_path / source)
    with pytest.raises(DataError, match="missing does not exist"):
        act("hf:" + str(tmp_path / "missing"))


def test_pipes_are_refused_rather_than_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DataError, match=r"pipe\.txt is neither a file nor a folder"):
        read(tmp_path / "pipe.txt")


def test_a_link_to_nothing_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to("nowhere")
    for act in (read, lambda source: identity(str(source), "text", None)):
        with pytest.raises(DataError, match=r"a\.txt cannot be read: No such file"):
            act(tmp_path)


def test_forbidden_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("secret")
    (tmp_path / "folder").chmod(0)
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        for source in ("folder", "folder/a.txt", "folder/*.txt"):
            with pytest.raises(DataError, match="cannot be listed: Permission denied"):
                read(tmp_path / source)
    finally:
        os.seteuid(before)
        (tmp_path / "folder").chmod(0o700)


@pytest.mark.parametrize("source", ["", [], ["stdlib", ""]])
def test_no_source_is_refused(source: Any) -> None:
    with pytest.raises(ConfigError, match=r"data\.source must name at least one source"):
        list(documents(source))


def test_a_dataset_without_a_name_is_refused() -> None:
    with pytest.raises(ConfigError, match="names no dataset"):
        identity("hf:", "text", None)


@pytest.mark.parametrize(
    ("name", "package"),
    [("a.parquet", "pyarrow"), ("a.txt.zst", "pyarrow"), ("a.jsonl.zst", "pyarrow"), ("hf:a", "datasets")],
)
def test_missing_packages_are_named_with_the_command_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    path = name if name.startswith("hf:") else str(tmp_path / name)
    if path != name:
        Path(path).write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"needs the package {package} .*: pip install 'atoll\[data\]'"):
        read(path)


def test_reading_text_needs_no_optional_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("pyarrow", "datasets", "tokenizers"):
        monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_bytes(rows("two"))
    assert read(tmp_path) == ["one", "two"]
