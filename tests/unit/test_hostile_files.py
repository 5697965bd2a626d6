"""Files that are endless, nested without end or of absurd sizes end in one clear line, in bounded memory."""

import gzip
import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from atoll._util.disk import is_deeper, lines_limited, open_plain, parse_json, read_limited
from atoll.errors import AtollError, ConfigError, DataError
from atoll.report.load import load
from atoll.runs.events import read
from atoll.runs.layout import ABOUT, METRICS, RUN
from atoll.runs.tail import Tail
from atoll.settings import config, study
from atoll.settings.config import RunConfig
from atoll.settings.model_presets import preset
from atoll.settings.run_settings import DataSection
from atoll.train.data import cache, corpus, token_files
from atoll.train.data.corpus import MOST_ROW, documents
from atoll.train.data.tokenizer import open_tokenizer
from atoll.train.model import hub
from atoll.train.model.export import load_export
from atoll.train.step.recipe import check_room

MOST_MEMORY = 2**29


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if what happens inside takes much memory."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


def zeros(path: Path) -> None:
    """Eight gigabytes that take no room on a disk."""
    path.touch()
    os.truncate(path, 2**33)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def deep(path: Path) -> None:
    path.write_text("[" * 100_000 + "]" * 100_000 + "\n")


def deep_by_dots(path: Path) -> None:
    path.write_text(".".join("a" * 20_000) + " = 1\n")


def binary(path: Path) -> None:
    path.write_bytes(bytes(range(256)))


Damage = Callable[[Path], None]
HOSTILE: list[Damage] = [zeros, device, os.mkfifo, deep, binary]


# ---- the shared readers


def test_what_is_no_plain_file_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(OSError, match="it is a pipe or a device, not a plain file"):
            open_plain(path)
    with pytest.raises(IsADirectoryError):
        open_plain(tmp_path)
    with pytest.raises(FileNotFoundError):
        open_plain(tmp_path / "nothing")


def test_a_file_is_read_up_to_its_limit_and_not_further(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_limited(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="it has more than 4 B, the most that is read"):
        read_limited(tmp_path / "file", 4)
    with pytest.raises(OSError, match=r"more than 1\.00 MB"):
        read_limited(Path("/dev/zero"), 10**6, pipe=True)


def test_lines_are_read_up_to_their_limit(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"123\n12\n1")
    with path.open("rb") as file:
        assert list(lines_limited(path, file, 4)) == [b"123\n", b"12\n", b"1"]
    path.write_bytes(b"123\n1234\n")
    with path.open("rb") as file, pytest.raises(OSError, match="line 2 has more than 4 B"):
        list(lines_limited(path, file, 4))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 9 + "1" + "]" * 9, "nested more than 8 levels deep"),
        ("[" * 100_000, "nested more than 8 levels deep"),
        ('{"a": 1, "b": {"a": 1, "a": 2}}', "the key 'a' is there twice"),
        ("[NaN]", "NaN is no JSON"),
        ("-Infinity", "-Infinity is no JSON"),
        ("1" * 5000, "integer string conversion"),
        (b'"\xff"', "utf-8"),
    ],
)
def test_json_that_could_harm_is_refused(text: str | bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_json(text, deepest=8)


def test_json_within_the_limits_is_what_json_says() -> None:
    value = {"a": [[[1, 2.5, None, True]]], "b": {"a": "x"}}
    assert parse_json(json.dumps(value), deepest=4) == value
    assert not is_deeper(value, 4)
    assert is_deeper(value, 3)


# ---- each reader of users' files


def metrics(path: Path) -> object:
    return read(path)


def study_of(path: Path) -> object:
    return study.read([path])


def hub_model(path: Path) -> object:
    return hub.load(str(path.parent), weights=False)


def tail(path: Path) -> object:
    return Tail(path).new()


def decoder_of(path: Path) -> object:
    (path.parent / "config.json").write_text("{}")
    return load_export(path.parent)


READERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "run file": (config.load, "run.toml"),
    "study": (study_of, "study.toml"),
    "tokenizer": (open_tokenizer, "tokenizer.json"),
    "metrics": (metrics, METRICS),
    "tail": (tail, METRICS),
    "manifest of tokens": (lambda path: cache.check(path.parent, cache.no_progress), cache.MANIFEST),
    "exported model": (lambda path: load_export(path.parent), "config.json"),
    "exported decoder": (decoder_of, "atoll.json"),
    "rows": (lambda path: list(documents(str(path))), "rows.jsonl"),
    "parquet": (lambda path: list(documents(str(path))), "rows.parquet"),
    "model of the hub": (hub_model, "config.json"),
}


@pytest.mark.parametrize("damage", HOSTILE, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", READERS)
def test_a_hostile_file_ends_in_one_line_that_names_it(name: str, damage: Damage, tmp_path: Path) -> None:
    opened, file = READERS[name]
    if file.endswith(".toml") and damage is os.mkfifo:
        pytest.skip("a run file may come out of a pipe")
    if opened is hub_model and damage in (deep, binary):
        pytest.skip("transformers refuses it, and takes seconds to import")
    damage(tmp_path / file)
    with bounded(), pytest.raises(AtollError) as refused:
        opened(tmp_path / file)
    text = str(refused.value)
    assert str(tmp_path) in text and "\n" not in text and len(text) < 600, text


@pytest.mark.parametrize("opened", [config.load, study_of], ids=["run", "study"])
def test_keys_with_thousands_of_dots_are_refused(opened: Callable[[Path], object], tmp_path: Path) -> None:
    deep_by_dots(tmp_path / "run.toml")
    began_s = time.process_time()
    with pytest.raises(ConfigError, match="brackets or dots are nested too deeply"):
        opened(tmp_path / "run.toml")
    assert time.process_time() - began_s < 1
    with pytest.raises(ConfigError, match="must be KEY=VALUE"):
        config.parse("", [".".join("a" * 5000) + "=1"])


DOTS = ".".join("a" * 60)
QUOTED = ".".join(['"a"', "'b'"] * 60)


@pytest.mark.parametrize("text", [f"[{DOTS}]\n{DOTS} = 1", f"x = [{{{QUOTED} = 1}}]", f"[[ {QUOTED} ]]"])
def test_keys_nest_in_headers_and_in_inline_tables_too(text: str) -> None:
    with pytest.raises(ConfigError, match="brackets or dots are nested too deeply"):
        config.parse(text)


@pytest.mark.parametrize("value", [f"{{{QUOTED} = 1}}", "[" * 5000])
def test_an_override_nests_no_deeper_than_a_file(value: str) -> None:
    with pytest.raises(ConfigError, match=r"sync\.delay: .* nested too deeply"):
        config.parse("", [f"sync.delay={value}"])


def test_many_dots_on_a_line_are_fine_where_they_do_not_nest() -> None:
    files = [f"texts/{number}.txt" for number in range(300)]
    assert len(config.parse(f"[data]\nsource = {files} # {'.' * 200}").data.source) == 300


START = {
    "event": "start",
    "name": "run",
    "method": "diloco",
    "workers": 1,
    "steps": 9,
    "parameters": 9,
    "tokens_per_step": 9,
    "period": 3,
    "delay": [0],
    "codec": "fp32",
    "fragments": [9],
    "payload_bytes": [36],
    "vocabulary": 9,
    "device": "cpu",
    "threads": 1,
    "weights": [1.0],
}


@pytest.mark.parametrize("damage", [zeros, device, deep, binary], ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("file", [METRICS, RUN, ABOUT])
def test_a_report_of_a_hostile_folder_is_refused(file: str, damage: Damage, tmp_path: Path) -> None:
    folder = tmp_path / "worker-0"
    folder.mkdir()
    (folder / METRICS).write_text(json.dumps(START) + "\n")
    (folder / RUN).write_text("")
    assert load(folder).start.steps == 9
    (folder / file).unlink(missing_ok=True)
    damage(folder / file)
    for given in (folder, tmp_path):  # by itself, and as that of one of several workers
        with bounded(), pytest.raises(DataError, match="worker-0"):
            load(given)


@pytest.mark.parametrize("digits", [30, 400])
@pytest.mark.parametrize("field", ["parameters", "steps", "payload_bytes"])
def test_numbers_that_no_float_holds_are_damage(field: str, digits: int, tmp_path: Path) -> None:
    long = int(("123456789" * 50)[:digits])
    number = [long] if isinstance(START[field], list) else long
    (tmp_path / METRICS).write_text(json.dumps({**START, field: number}) + "\n")
    with pytest.raises(DataError, match="line 1 is damaged: it holds a number of 30 digits or more"):
        read(tmp_path / METRICS)


def test_a_packed_row_of_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(b'{"text": "first"}\n{"text": "')
        for _ in range(2 * MOST_ROW // 2**20):
            file.write(b" " * 2**20)
    assert path.stat().st_size < 2**20
    found = documents(str(path))
    assert next(found) == "first"
    with bounded(), pytest.raises(DataError, match=r"past line 1: line 2 has more than 67\.1 MB, the most"):
        next(found)


def test_a_text_that_many_rows_of_parquet_share_is_not_made_many_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.parquet"
    texts = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 512, pyarrow.int32()), pyarrow.array(["a" * 2**20]))
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", store_schema=False)
    before = pyarrow.total_allocated_bytes()
    found = documents(str(path))
    assert len(next(found)) == 2**20
    assert pyarrow.total_allocated_bytes() - before < 2**25  # and not 512 times a megabyte
    found.close()
    monkeypatch.setattr(corpus, "MOST_ROW", 2**19)
    with pytest.raises(DataError, match="row 1 has 1048576 characters: at most 524288 are read"):
        next(documents(str(path)))


def test_a_device_among_the_files_of_a_cache_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "train.bin").touch()
    cache.seal(tmp_path, {})
    (tmp_path / "train.bin").unlink()
    device(tmp_path / "train.bin")
    with pytest.raises(DataError, match="is not a plain file; delete the folder"):
        cache.check(tmp_path, cache.no_progress)


def test_the_tokenizer_of_a_run_is_refused_before_any_text_is_read(tmp_path: Path) -> None:
    zeros(tmp_path / "tokenizer.json")
    with bounded(), pytest.raises(DataError, match=r"tokenizer\.json cannot be read: it has more than 268 MB"):
        token_files.check_there(DataSection(tokenizer=str(tmp_path / "tokenizer.json")))


# ---- absurd sizes


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model.layers": 10**7}, r"model: its .* parameters take .*: lower model\.layers \(10000000\)"),
        (
            {"model.width": 10**7, "model.vocabulary": 10**7},
            r"model: its .* parameters .*model\.width \(10000000\)",
        ),
        ({"model.feedforward": 10**7, "model.width": 10**6}, r"model: its .* parameters take"),
        ({"train.batch": 10**12}, r"train\.batch: 1000000000000 sequences of 128 tokens take .* lower train\.batch"),
        ({"model.context": 10**7, "model.head_width": 10**6}, r"context \* head_width must be at most"),
    ],
)
def test_what_no_memory_holds_is_refused_before_it_is_made(changes: dict[str, Any], problem: str) -> None:
    run = RunConfig().changed(**changes)
    with pytest.raises(ConfigError, match=problem):
        check_room(run, run.shape(256))


def test_sizes_in_use_are_not_refused() -> None:
    check_room(RunConfig(), RunConfig().shape(256))


@pytest.mark.parametrize("name", ["layers", "width", "heads", "head_width", "feedforward", "vocabulary", "context"])
def test_a_shape_of_absurd_size_is_no_shape(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be at most 10000000, got 1099511627776"):
        preset("tiny", **{name: 2**40})
    with pytest.raises(ConfigError, match=f"{name} must be at most 10000000, got a number of 20001 bits"):
        preset("tiny", **{name: 2**20_000})
