"""Token files: what is in them, that they are built once, and what faults at any moment leave behind."""

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from atoll.errors import ConfigError, DataError
from atoll.settings.run_settings import DataSection
from atoll.settings.value_types import BPE_VOCABULARY
from atoll.train.data import token_files as tokens_module
from atoll.train.data.cache import MANIFEST
from atoll.train.data.corpus import documents
from atoll.train.data.token_files import TokenData, check_there, known_vocabulary, prepare
from atoll.train.data.tokenizer import FILE, Bytes, Ids, train_bpe
from atoll.train.ranks.control import tokenizer_terms


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """200 documents, about 80 kB."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text(i)}) + "\n" for i in range(200)))
    return str(path)


KINDS = ("cat", "dog", "cow", "hen")


def text(i: int) -> str:
    return f"{i}: " + f"the {KINDS[i % 4]} sat, " * (5 + i % 40)


def tokens_of(source: str | Sequence[str], *, cache: Path, **settings: Any) -> TokenData:
    given = {name: settings.pop(name) for name in ("workers", "on_progress") if name in settings}
    return prepare(section(source, cache, **settings), **given)


def section(source: str | Sequence[str], cache: Path, **settings: Any) -> DataSection:
    return DataSection(source=source if isinstance(source, str) else tuple(source), cache=str(cache), **settings)


def made(corpus: str, tmp_path: Path, **settings: Any) -> TokenData:
    return tokens_of(corpus, cache=tmp_path / "cache", **settings)


def texts_in(tokens: Ids) -> list[str]:
    """The documents in a file of bytes."""
    parts = tokens.tobytes().split(b"\0")
    assert parts.pop() == b""
    return [part.decode() for part in parts]


def names(cache: Path) -> list[str]:
    """What is in a cache, but for its locks."""
    return sorted(entry.name for entry in cache.iterdir() if entry.suffix != ".lock")


# ---- tokens that are there already


def test_a_folder_of_tokens_is_a_source(corpus: str, tmp_path: Path) -> None:
    one = made(corpus, tmp_path, tokenizer="bpe", vocabulary=300, held_out=0.2)
    again = tokens_of([str(one.folder)], cache=tmp_path / "other", vocabulary=300)
    assert again.folder == one.folder
    assert not (tmp_path / "other").exists()
    assert np.array_equal(again.train[0], one.train[0])
    assert np.array_equal(again.held_out, one.held_out)
    assert again.tokenizer.vocabulary == 300
    check_there(section(str(one.folder), tmp_path, tokenizer="bpe", vocabulary=300))


@pytest.mark.parametrize(("setting", "value"), [("vocabulary", 301), ("limit", 10)])
def test_tokens_that_are_there_follow_no_other_settings(corpus: str, tmp_path: Path, setting: str, value: int) -> None:
    one = made(corpus, tmp_path, tokenizer="bpe", vocabulary=300)
    with pytest.raises(ConfigError, match=rf"data\.{setting}"):
        made(str(one.folder), tmp_path, tokenizer="bpe", **{setting: value})


def test_bpe_is_refused_for_a_folder_of_byte_tokens(corpus: str, tmp_path: Path) -> None:
    one = made(corpus, tmp_path)
    with pytest.raises(ConfigError, match='set it to "bytes"') as caught:
        made(str(one.folder), tmp_path, tokenizer="bpe", vocabulary=300)
    assert (caught.value.setting, caught.value.value) == ("data.tokenizer", "bpe")


def test_a_folder_of_tokens_keeps_its_own_tokenizer(corpus: str, tmp_path: Path) -> None:
    for name, words in {"own": corpus, "other": "other words of the same number"}.items():
        (tmp_path / name).mkdir()
        train_bpe([words], 270).save(tmp_path / name)
    one = made(corpus, tmp_path, tokenizer=str(tmp_path / "own"))
    assert made(str(one.folder), tmp_path, tokenizer=str(tmp_path / "own" / FILE)).folder == one.folder
    with pytest.raises(ConfigError, match="made with another tokenizer") as caught:
        made(str(one.folder), tmp_path, tokenizer=str(tmp_path / "other"))
    assert (caught.value.setting, caught.value.value) == ("data.tokenizer", str(tmp_path / "other"))
    for name, why in {"other": "made with another tokenizer", "nowhere": r"data\.tokenizer must be"}.items():
        with pytest.raises(ConfigError, match=why):
            check_there(section(str(one.folder), tmp_path, tokenizer=str(tmp_path / name)))


def test_the_vocabulary_is_known_without_reading_text(corpus: str, tmp_path: Path) -> None:
    one = made(corpus, tmp_path, tokenizer="bpe", vocabulary=300)
    missing = str(tmp_path / "no text")
    assert known_vocabulary(section(missing, tmp_path)) == 256
    assert known_vocabulary(section(missing, tmp_path, tokenizer="bpe")) == BPE_VOCABULARY
    assert known_vocabulary(section(missing, tmp_path, tokenizer="bpe", vocabulary=400)) == 400
    assert known_vocabulary(section(missing, tmp_path, tokenizer=str(one.folder))) == 300
    assert known_vocabulary(section(str(one.folder), tmp_path)) == 300  # whatever data.tokenizer is by default


def test_a_user_that_does_not_exist_is_no_tokenizer(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.tokenizer must be"):
        made(corpus, tmp_path, tokenizer="~nobody-of-this-name/tokenizer.json")


def test_tokens_that_are_there_but_damaged_are_refused(corpus: str, tmp_path: Path) -> None:
    one = made(corpus, tmp_path)
    (one.folder / "train.bin").write_bytes(b"\0" * len(one.train[0]))
    with pytest.raises(DataError, match="damaged"):
        tokens_of(str(one.folder), cache=tmp_path / "other")


# ---- what is in the files


def test_every_document_is_on_one_side(corpus: str, tmp_path: Path) -> None:
    data = made(corpus, tmp_path, held_out=0.2)
    assert data.documents == 200
    train, held_out = texts_in(data.train[0]), texts_in(data.held_out)
    assert Counter(train + held_out) == Counter(documents(corpus))
    assert train == [each for each in documents(corpus) if each in set(train)]  # in order
    assert 20 <= len(held_out) <= 60
    assert isinstance(data.tokenizer, Bytes)
    assert data.folder.parent == tmp_path / "cache"


def test_files_are_read_only_maps(corpus: str, tmp_path: Path) -> None:
    data = made(corpus, tmp_path)
    file = data.train[0]
    assert type(file) is np.ndarray
    assert file.dtype == np.uint8
    assert len(file) == (data.folder / "train.bin").stat().st_size
    with pytest.raises(ValueError, match="read-only"):
        file[0] = 1


def test_the_same_documents_are_held_out_whatever_their_order_and_number(corpus: str, tmp_path: Path) -> None:
    lines = Path(corpus).read_text().splitlines(keepends=True)
    held_out = set(texts_in(made(corpus, tmp_path, held_out=0.2).held_out))
    for name, some in {"reversed": lines[::-1], "half": lines[:100], "twice": lines * 2}.items():
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(some))
        data = made(str(path), tmp_path, held_out=0.2)
        present = {json.loads(line)["text"] for line in some}
        assert set(texts_in(data.held_out)) == held_out & present
        assert not set(texts_in(data.train[0])) & held_out


@pytest.mark.parametrize("share", [0.0001, 0.02, 0.5, 0.98, 0.9999])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_few_documents_leave_no_side_empty_whatever_their_order(tmp_path: Path, share: float, count: int) -> None:
    sides = []
    for order in (1, -1):
        path = tmp_path / f"few{order}.jsonl"
        some = [chr(97 + i) * (3 + i // 2) for i in range(count)][::order]
        path.write_text("".join(json.dumps({"text": each}) + "\n" for each in some))
        data = made(str(path), tmp_path, held_out=share)
        train, held_out = texts_in(data.train[0]), texts_in(data.held_out)
        assert train
        assert held_out
        assert sorted(train + held_out) == sorted(some)
        sides.append(sorted(held_out))
    assert sides[0] == sides[1]


def test_if_none_is_picked_the_document_that_fits_the_share_best_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "few.jsonl"
    lengths = [5000, 40, 3, 99, 60, 2000]
    path.write_text("".join(json.dumps({"text": chr(97 + i) * length}) + "\n" for i, length in enumerate(lengths)))
    data = made(str(path), tmp_path, held_out=0.0139)  # of about 7200 tokens
    assert texts_in(data.held_out) == ["d" * 99]
    assert texts_in(data.train[0]) == [chr(97 + i) * n for i, n in enumerate(lengths) if n != 99]
    lengths_on_disk = np.fromfile(data.folder / "lengths.bin", "<i8")
    assert lengths_on_disk.tolist() == [n + 1 for n in lengths if n != 99]


@pytest.mark.parametrize(("share", "held_out"), [(0.02, 20), (0.5, 500), (0.0001, 1), (0.9999, 999)])
def test_a_single_document_is_cut(tmp_path: Path, share: float, held_out: int) -> None:
    (tmp_path / "book.txt").write_text("".join(chr(97 + i % 26) for i in range(1000)))
    data = made(str(tmp_path / "book.txt"), tmp_path, held_out=share)
    ((start,), (end,)) = texts_in(data.train[0]), texts_in(data.held_out)
    assert start + end == (tmp_path / "book.txt").read_text()
    assert len(end) == held_out
    assert data.documents == 1


def test_a_single_token_cannot_be_cut(tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("a")
    with pytest.raises(DataError, match="the only document has 1 token, which cannot be split"):
        made(str(tmp_path / "book.txt"), tmp_path)
    assert names(tmp_path / "cache") == []


def test_a_bpe_is_trained_once_and_kept(corpus: str, tmp_path: Path) -> None:
    data = made(corpus, tmp_path, tokenizer="bpe", vocabulary=300)
    file = data.train[0]
    assert data.tokenizer.vocabulary == 300
    assert file.dtype == np.dtype("<u2")
    assert len(file) < 0.6 * len(made(corpus, tmp_path).train[0])
    parts = np.split(file, np.flatnonzero(file == data.tokenizer.separator) + 1)
    assert parts.pop().size == 0
    decoded = [data.tokenizer.decode(part[:-1].tolist()) for part in parts]
    assert set(decoded) < set(documents(corpus))
    lengths = np.fromfile(data.folder / "lengths.bin", "<i8")
    assert lengths.tolist() == [len(part) for part in parts]


def test_a_tokenizer_file_is_known_by_its_content(corpus: str, tmp_path: Path) -> None:
    for name, vocabulary in {"a": 262, "b": 264}.items():
        (tmp_path / name).mkdir()
        train_bpe([text(i) for i in range(9)], vocabulary).save(tmp_path / name)
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    folders = [made(corpus, tmp_path, tokenizer=str(tmp_path / name)).folder for name in "abc"]
    assert folders[0] == folders[2] != folders[1]
    assert made(corpus, tmp_path, tokenizer=str(tmp_path / "a" / FILE)).folder == folders[0]


def test_workers_whose_tokens_are_bytes_agree_whichever_version_cached_them(corpus: str, tmp_path: Path) -> None:
    data = made(corpus, tmp_path)
    now = tokenizer_terms(data)
    (data.folder / FILE).write_text('{"atoll": "bytes"}\n')
    assert tokenizer_terms(data) == now == {"tokenizer": "bytes", "vocabulary": "256"}
    one, other = (made(corpus, tmp_path, tokenizer="bpe", vocabulary=size) for size in (270, 280))
    assert tokenizer_terms(one)["tokenizer"] != tokenizer_terms(other)["tokenizer"]


def test_clusters_share_out_the_same_documents(corpus: str, tmp_path: Path) -> None:
    iid = made(corpus, tmp_path)
    data = made(corpus, tmp_path, split="clusters", workers=4)
    assert len(data.train) == 4
    shards = [texts_in(file) for file in data.train]
    assert all(shards)
    assert Counter(chain.from_iterable(shards)) == Counter(texts_in(iid.train[0]))
    assert np.array_equal(data.held_out, iid.held_out)
    kinds = [Counter(each.split()[2] for each in shard) for shard in shards]
    assert all(len(kind) == 1 for kind in kinds)  # cats to one worker, dogs to another
    assert len(made(corpus, tmp_path, split="clusters", workers=2).train) == 2
    (whole,) = made(corpus, tmp_path, split="clusters").train
    assert np.array_equal(whole, iid.train[0])


def test_fewer_documents_than_workers_are_refused(corpus: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="documents cannot be split into 8 clusters"):
        made(corpus, tmp_path, split="clusters", workers=8, limit=5)
    assert len(made(corpus, tmp_path, limit=5).train[0])  # the tokens themselves are fine


def test_much_text_in_little_documents_is_read_in_batches(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    path.write_text("".join(f'{{"text": "{i}"}}\n' for i in range(10_000)))
    data = made(str(path), tmp_path)
    assert data.documents == 10_000
    assert sorted(map(int, texts_in(data.train[0]) + texts_in(data.held_out))) == list(range(10_000))


# ---- built once


def stages(corpus: str, tmp_path: Path, **settings: Any) -> list[str]:
    """The stages of a call, each once."""
    told: list[tuple[str, int, int | None]] = []
    made(corpus, tmp_path, on_progress=lambda *words: told.append(words), **settings)
    assert all(total is None or 0 <= done <= total for _, done, total in told)
    return list(dict.fromkeys(stage for stage, _, _ in told))


def test_what_was_built_is_used_again(corpus: str, tmp_path: Path) -> None:
    bpe = {"tokenizer": "bpe", "vocabulary": 260}
    assert stages(corpus, tmp_path) == ["tokens", "checking"]
    assert stages(corpus, tmp_path) == ["checking"]
    assert stages(corpus, tmp_path, **bpe) == ["training the tokenizer", "tokens", "checking"]
    assert stages(corpus, tmp_path, split="clusters", workers=2) == ["checking", "clusters"]
    assert stages(corpus, tmp_path, split="clusters", workers=2) == ["checking"]
    assert stages(corpus, tmp_path, held_out=0.1) == ["tokens", "checking"]
    assert stages(corpus, tmp_path, limit=100) == ["tokens", "checking"]
    os.utime(corpus, ns=(1, 1))
    assert stages(corpus, tmp_path) == ["tokens", "checking"]


def test_progress_over_plain_text_ends_at_its_total(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text("é" * 100_000)
    told: list[tuple[str, int, int | None]] = []
    made(str(tmp_path), tmp_path, on_progress=lambda *words: told.append(words))
    tokens = [(done, total) for stage, done, total in told if stage == "tokens"]
    assert len(tokens) > 1
    assert tokens == sorted(tokens)
    assert tokens[-1] == (4_000_000, 4_000_000)


def test_a_read_only_cache_that_has_the_tokens_will_do(corpus: str, tmp_path: Path, tiny_disk: Path) -> None:
    expected = tokens_of(corpus, cache=tiny_disk).held_out
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    assert np.array_equal(tokens_of(corpus, cache=tiny_disk).held_out, expected)
    with pytest.raises(DataError, match=r"tokens cannot be kept in data\.cache .*: Read-only file system"):
        tokens_of(corpus, cache=tiny_disk, limit=5)


# ---- damage


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "flipped": (flip, "is damaged: its CRC-32 is not the one in manifest"),
    "torn": (lambda path: os.truncate(path, path.stat().st_size - 1), r"is torn: it has \d+ bytes of \d+"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), r"is torn: it has \d+ bytes of \d+"),
    "missing": (lambda path: path.unlink(), r"cannot be read \(No such file or directory\)"),
}


@pytest.mark.parametrize("name", ["train.bin", "held_out.bin", "lengths.bin", FILE, "clusters-2/worker-1.bin"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_named_and_nothing_is_deleted(corpus: str, tmp_path: Path, name: str, damage: str) -> None:
    settings: dict[str, Any] = {"split": "clusters", "workers": 2}
    data = made(corpus, tmp_path, **settings)
    path = data.folder / name
    harm, message = DAMAGES[damage]
    harm(path)
    before = {file: file.read_bytes() for file in data.folder.rglob("*") if file.is_file()}
    with pytest.raises(DataError, match=rf"{name} {message}.*; delete the folder {path.parent} to") as caught:
        made(corpus, tmp_path, **settings)
    assert "\n" not in str(caught.value)
    assert {file: file.read_bytes() for file in data.folder.rglob("*") if file.is_file()} == before
    shutil.rmtree(path.parent)  # as told
    assert np.array_equal(made(corpus, tmp_path, **settings).train[0], data.train[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"manifest\.json cannot be read \(No such file"),
        ("{", r"manifest\.json cannot be read \(JSONDecodeError"),
        ("[]", r"manifest\.json cannot be read \(TypeError"),
        ('{"manifest": 1}', r"manifest\.json cannot be read \(KeyError"),
        ("documents", r"manifest\.json is damaged: its CRC-32 is not the one at its end"),
    ],
)
def test_a_damaged_manifest_is_refused(corpus: str, tmp_path: Path, content: str | None, message: str) -> None:
    path = made(corpus, tmp_path).folder / MANIFEST
    text = path.read_text()
    path.unlink()
    if content is not None:
        path.write_text(text.replace('"documents": 200', '"documents": 201') if content == "documents" else content)
    with pytest.raises(DataError, match=message):
        made(corpus, tmp_path)


# ---- a build that fails, dies, or meets another


@pytest.fixture
def tiny_disk(small_disk: Callable[[str], Path]) -> Path:
    """A file system of 1 MiB."""
    return small_disk("1m")


def test_a_full_disk_is_told_with_the_room_needed(tmp_path: Path, tiny_disk: Path, corpus: str) -> None:
    before = tokens_of(corpus, cache=tiny_disk).folder
    large = tmp_path / "large"
    large.mkdir()
    for i in range(40):
        (large / f"{i}.txt").write_text(f"{i}: " + "0123456789" * 10_000)
    with pytest.raises(
        DataError, match=r"disk is full: the tokens need about 4\.00 MB, and [\d.]+ [kM]B is free; make"
    ):
        tokens_of(str(large), cache=tiny_disk)
    assert names(tiny_disk) == [before.name]
    assert tokens_of(corpus, cache=tiny_disk).folder == before


def test_a_disk_that_fills_up_during_clustering(tmp_path: Path, tiny_disk: Path) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": f"{i} " * 5000}) + "\n" for i in range(40)))
    data = tokens_of(str(path), cache=tiny_disk)
    with pytest.raises(DataError, match=r"disk is full: the tokens need about \d+ kB, and [\d.]+ [kM]B is free; make"):
        tokens_of(str(path), cache=tiny_disk, split="clusters", workers=2)
    assert names(tiny_disk) == [data.folder.name]
    assert not list(data.folder.glob("clusters*"))
    assert len(tokens_of(str(path), cache=tiny_disk).train[0]) == len(data.train[0])


def test_a_disk_that_fills_up_while_flushing(corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="is full: the tokens need more than"):
        made(corpus, tmp_path)
    assert names(tmp_path / "cache") == []


def test_an_interrupted_build_leaves_nothing(corpus: str, tmp_path: Path) -> None:
    def interrupt(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(corpus, tmp_path, on_progress=interrupt)
    assert names(tmp_path / "cache") == []


def test_a_bad_corpus_leaves_nothing(corpus: str, tmp_path: Path) -> None:
    with Path(corpus).open("a") as file:
        file.write("{")
    for settings in ({}, {"tokenizer": "bpe", "vocabulary": 300}):
        with pytest.raises(DataError, match="line 201 is not JSON"):
            made(corpus, tmp_path, **settings)
        assert names(tmp_path / "cache") == []


def test_a_cache_that_is_a_file_is_refused(corpus: str, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    with pytest.raises(DataError, match=r"tokens cannot be kept in data\.cache .*cache: File exists"):
        made(corpus, tmp_path)
    assert (tmp_path / "cache").read_text() == "mine"


CHILD = """
import sys
from atoll.settings.run_settings import DataSection
from atoll.train.data.token_files import prepare

def tell(stage, done, total):
    print(stage, flush=True)
    if stage == "tokens":
        sys.stdin.readline()

data = prepare(DataSection(source=sys.argv[1], cache=sys.argv[2]), on_progress=tell)
print("done", data.folder.name, len(data.train[0]), flush=True)
"""


def child(corpus: str, tmp_path: Path) -> "subprocess.Popen[str]":
    """A process that builds the tokens, and stops amid them until it is given a line."""
    command = [sys.executable, "-c", CHILD, corpus, str(tmp_path / "cache")]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_a_killed_build_is_swept_and_built_again(corpus: str, tmp_path: Path) -> None:
    with child(corpus, tmp_path) as builder:
        assert line(builder) == "tokens"
        builder.send_signal(signal.SIGKILL)
    (left,) = names(tmp_path / "cache")
    assert left.startswith(".building-")
    assert made(corpus, tmp_path, limit=3).documents == 3  # sweeps what the dead left, though it was building another
    assert left not in names(tmp_path / "cache")
    data = made(corpus, tmp_path)
    assert data.documents == 200
    assert Counter(texts_in(data.train[0]) + texts_in(data.held_out)) == Counter(documents(corpus))


def test_of_two_that_build_the_same_one_waits(corpus: str, tmp_path: Path) -> None:
    told: SimpleQueue[str] = SimpleQueue()
    with child(corpus, tmp_path) as builder, ThreadPoolExecutor() as threads:
        assert line(builder) == "tokens"
        waiter = threads.submit(made, corpus, tmp_path, on_progress=lambda stage, *_: told.put(stage))
        assert told.get() == "waiting for another process that builds the same"
        made(corpus, tmp_path, limit=3)  # another corpus need not wait, and leaves the builder alone
        assert any(name.startswith(".building-") for name in names(tmp_path / "cache"))
        built, _ = builder.communicate("\n")
        data = waiter.result()
    assert built.splitlines()[-1] == f"done {data.folder.name} {len(data.train[0])}"
    assert "tokens" not in {told.get() for _ in range(told.qsize())}
    assert len(names(tmp_path / "cache")) == 2


def test_who_waits_for_a_process_that_is_killed_builds_instead(corpus: str, tmp_path: Path) -> None:
    told: SimpleQueue[str] = SimpleQueue()
    with child(corpus, tmp_path) as builder, ThreadPoolExecutor() as threads:
        assert line(builder) == "tokens"
        waiter = threads.submit(made, corpus, tmp_path, on_progress=lambda stage, *_: told.put(stage))
        assert told.get().startswith("waiting")
        builder.send_signal(signal.SIGKILL)
        data = waiter.result()
    assert told.get() == "tokens"
    assert names(tmp_path / "cache") == [data.folder.name]
    assert data.documents == 200


def test_a_lock_left_by_a_forked_child_is_let_go(corpus: str, tmp_path: Path) -> None:
    """A child forked amid a build shares the lock's descriptor."""
    inherited: list[int] = []

    def tell(stage: str, done: int, total: int | None) -> None:
        for entry in os.listdir("/proc/self/fd"):
            if stage == "tokens" and os.path.realpath(f"/proc/self/fd/{entry}").endswith(".lock"):
                inherited.append(os.dup(int(entry)))

    data = made(corpus, tmp_path, on_progress=tell)
    with (tmp_path / "cache" / f".{data.folder.name}.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert inherited
    for descriptor in inherited:
        os.close(descriptor)


# ---- settings


def test_a_tokenizer_that_does_not_exist_is_refused(corpus: str, tmp_path: Path) -> None:
    message = r"data\.tokenizer must be bytes, bpe or the path of a tokenizer\.json, got './bpee'"
    with pytest.raises(ConfigError, match=message):
        made(corpus, tmp_path, tokenizer="./bpee")
    assert not (tmp_path / "cache").exists()


def test_a_bpe_is_trained_on_no_more_text_than_it_needs(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = made(corpus, tmp_path, tokenizer="bpe", vocabulary=400).tokenizer
    monkeypatch.setattr(tokens_module, "BPE_BYTES", 500)
    part = made(corpus, tmp_path, tokenizer="bpe", vocabulary=400, limit=199).tokenizer
    assert part.vocabulary < whole.vocabulary
