"""Turns documents into token files on disk, built once and mapped into memory.

    cache/4fa8c6e01b72d935/      named after the corpus, the tokenizer and the share held out
      train.bin  held_out.bin    tokens, little-endian, 1, 2 or 4 bytes each; a separator ends every document
      lengths.bin                tokens of each training document with its separator, 8 bytes each
      tokenizer.json
      manifest.json
      clusters-4/                the same training documents, one file for each of four workers
        worker-0.bin ...  manifest.json

Memory holds some documents at a time and eight bytes for each of all, so a corpus may be larger than memory.
"""

import hashlib
import json
import os
import shutil
from array import array
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np

from atoll._util.disk import sha256_of
from atoll.errors import ConfigError, DataError
from atoll.settings.run_settings import DataSection
from atoll.settings.value_types import BPE_VOCABULARY
from atoll.train.data.cache import MANIFEST, Meter, OnProgress, build_once, check, no_progress
from atoll.train.data.clusters import assign
from atoll.train.data.corpus import documents, identity, missing, text_bytes
from atoll.train.data.tokenizer import (
    FILE,
    Bytes,
    Ids,
    Tokenizer,
    dtype_of,
    open_tokenizer,
    train_bpe,
)

VERSION: Final = 1
"""Version of the files; part of a folder's name, so another version builds its own."""
BPE_BYTES: Final = 2**28
"""Most bytes of text that a BPE is trained on: more hardly changes it."""


@dataclass(frozen=True, eq=False)
class TokenData:
    """Holds a corpus as token ids [tokens], uint8, uint16 or uint32, mapped into memory read-only."""

    tokenizer: Tokenizer
    train: tuple[Ids, ...]
    """One file for all workers, or one per worker."""
    held_out: Ids
    documents: int
    """Documents of training and held-out text together."""
    folder: Path


def prepare(settings: DataSection, *, workers: int = 1, on_progress: OnProgress = no_progress) -> TokenData:
    """Return the tokens of a corpus from the cache, building them first if they are not there.

    A hash of its text decides whether a document is held out, so order does not matter and copies stay together. If
    that picks none (or all), the document whose length fits the share best changes sides; a corpus of one document is
    cut in two. If another process builds the same tokens, this one waits for it. A source that is a folder of tokens is
    used as it is.

    Raises:
        ConfigError: if the tokenizer cannot be used, or the settings do not fit a folder of tokens.
        DataError: if the text cannot be read, or the tokens are damaged.
    """
    ready = _ready(settings)
    folder = ready or Path(os.path.expanduser(settings.cache)) / _key(settings)
    if ready is None:
        meter = Meter(on_progress, "tokens", text_bytes(settings.source, settings.limit))
        build_once(folder, folder, meter, partial(_fill, settings=settings, meter=meter))
    manifest = check(folder, on_progress)
    tokenizer = open_tokenizer(folder)
    if ready is not None:
        _check_ready(folder, tokenizer, settings)
    open_file = partial(_map, dtype=dtype_of(tokenizer.vocabulary))
    train = open_file(folder / "train.bin")
    files: tuple[Ids, ...] = (train,)
    if settings.split == "clusters" and workers > 1:
        clusters = folder / f"clusters-{workers}"
        meter = Meter(on_progress, "clusters", train.nbytes)
        lengths = np.fromfile(folder / "lengths.bin", "<i8")
        fill = partial(_fill_clusters, train=train, lengths=lengths, workers=workers, meter=meter)
        build_once(clusters, folder, meter, fill)
        check(clusters, on_progress)
        files = tuple(open_file(clusters / f"worker-{i}.bin") for i in range(workers))
    return TokenData(tokenizer, files, open_file(folder / "held_out.bin"), manifest["documents"], folder)


def check_there(settings: DataSection) -> None:
    """Refuse a source or a tokenizer that does not exist or does not fit, as `prepare` does, without reading text."""
    if (ready := _ready(settings)) is None:
        _key(settings)
    else:
        _check_ready(ready, open_tokenizer(ready), settings)


def known_vocabulary(settings: DataSection) -> int:
    """Return the size of the vocabulary as far as it is known without reading text: a BPE may come out smaller."""
    if (ready := _ready(settings)) is not None:
        return open_tokenizer(ready).vocabulary
    if (given := _given_tokenizer(settings)) is not None:
        return given.vocabulary
    return Bytes.vocabulary if settings.tokenizer == "bytes" else settings.vocabulary or BPE_VOCABULARY


def _key(settings: DataSection) -> str:
    """Return the name of a corpus's folder: a hash of everything that its tokens depend on."""
    tokenizer, corpus = _tokenizer_identity(settings), identity(settings.source, settings.field, settings.limit)
    return hashlib.sha256(json.dumps([VERSION, corpus, tokenizer, settings.held_out]).encode()).hexdigest()[:16]


def _ready(settings: DataSection) -> Path | None:
    """Return the folder of a source that holds tokens already, or None."""
    sources = [settings.source] if isinstance(settings.source, str) else settings.source
    if len(sources) != 1:
        return None
    folder = Path(os.path.expanduser(sources[0]))
    return folder if all(os.path.isfile(folder / name) for name in (MANIFEST, "train.bin")) else None


def _check_ready(folder: Path, tokenizer: Tokenizer, settings: DataSection) -> None:
    """Refuse settings for text that a folder of tokens cannot follow."""
    vocabulary = tokenizer.vocabulary
    if settings.tokenizer == "bpe" and isinstance(tokenizer, Bytes):
        why = f'data.tokenizer is "bpe", but the tokens in {folder} are bytes'
        why += ': set it to "bytes", or give the text instead'
        raise ConfigError(why, setting="data.tokenizer", value="bpe")
    if (given := _given_tokenizer(settings)) is not None and given.to_json() != tokenizer.to_json():
        why = f"data.tokenizer is {settings.tokenizer!r}, but the tokens in {folder} were made with another tokenizer"
        why += f", that in {folder / FILE}: leave the setting out, or give the text instead; for a run that has begun, "
        why += "put a copy of that file in the place of yours"
        raise ConfigError(why, setting="data.tokenizer", value=settings.tokenizer)
    if settings.vocabulary not in (None, vocabulary):
        problem = f"data.vocabulary is {settings.vocabulary}, but the tokens in {folder} have a vocabulary of"
        raise ConfigError(f"{problem} {vocabulary}: leave it out, or give the text instead")
    if settings.limit is not None:
        raise ConfigError(f"data.limit is for text, but {folder} holds tokens already: leave it out")


def _map(path: Path, dtype: np.dtype[Any]) -> Ids:
    # A plain view of the map: slices of np.memmap itself are slow.
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


# ---- the tokenizer


def _tokenizer_identity(settings: DataSection) -> str:
    """Return what a tokenizer depends on besides the corpus; refuse one that cannot be opened."""
    name = settings.tokenizer
    if name == "bpe":
        return f"bpe {settings.vocabulary or BPE_VOCABULARY}"
    if _given_tokenizer(settings) is None:
        return name
    path = Path(os.path.expanduser(name))
    return f"file {sha256_of(path / FILE if path.is_dir() else path)}"


def _given_tokenizer(settings: DataSection) -> Tokenizer | None:
    """Return the tokenizer of the file that the settings name; None if they name no file."""
    name = settings.tokenizer
    if name in ("bytes", "bpe"):
        return None
    path = Path(os.path.expanduser(name))
    if not os.path.exists(path):
        allowed = "bytes, bpe or the path of a tokenizer.json"
        raise ConfigError(f"data.tokenizer must be {allowed}, got {name!r}: {missing(path)}")
    return open_tokenizer(path)


def _make_tokenizer(settings: DataSection, texts: Iterable[str], meter: Meter) -> Tokenizer:
    """Return a byte tokenizer, a BPE trained on these texts, or the one in a file."""
    if settings.tokenizer == "bytes":
        return Bytes()
    if (given := _given_tokenizer(settings)) is not None:
        return given
    progress = Meter(meter.on_progress, "training the tokenizer", meter.total and min(meter.total, BPE_BYTES))

    def beginning() -> Iterator[str]:
        for text in texts:
            yield text
            progress.add(len(text.encode()))
            if progress.read >= BPE_BYTES:
                return

    return train_bpe(beginning(), settings.vocabulary or BPE_VOCABULARY)


# ---- the files


class _Writer:
    """Writes a token file and keeps the lengths of its documents."""

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self._path, self._dtype = path, dtype_of(tokenizer.vocabulary)
        self._separator = np.array([tokenizer.separator], self._dtype).tobytes()
        self._file = path.open("wb", buffering=2**20)
        self.item_bytes = self._dtype.itemsize
        self.lengths = array("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, ids: Ids) -> None:
        """Append a document and its separator."""
        self._file.write(ids.astype(self._dtype, copy=False).tobytes())
        self._file.write(self._separator)
        self.lengths.append(len(ids) + 1)

    def take(self, index: int) -> Ids:
        """Remove a document and return it, without its separator."""
        self._file.flush()
        first = sum(self.lengths[:index]) * self.item_bytes
        length = self.lengths.pop(index)
        with self._path.open("rb") as reader:
            reader.seek(first)
            ids = np.frombuffer(reader.read(length * self.item_bytes), self._dtype)
            self._file.seek(first)
            shutil.copyfileobj(reader, self._file)  # moves what follows down; the reader stays ahead of the writer
        self._file.truncate()
        return ids[:-1]

    def nearest(self, length: float) -> int:
        """Return the document whose length is nearest; of several, the one whose bytes sort first."""
        self._file.flush()
        tokens = _map(self._path, self._dtype)
        lengths = np.asarray(self.lengths)
        ends = np.cumsum(lengths)
        gaps = np.abs(lengths - length)
        equal = np.flatnonzero(gaps == gaps.min()).tolist()
        return int(min(equal, key=lambda i: tokens[ends[i] - lengths[i] : ends[i]].tobytes()))


def _fill(folder: Path, settings: DataSection, meter: Meter) -> dict[str, Any]:
    """Write the files of a corpus; return what else the manifest says."""
    read, share = partial(documents, settings.source, field=settings.field, limit=settings.limit), settings.held_out
    with closing(read()) as texts:
        tokenizer = _make_tokenizer(settings, texts, meter)
    tokenizer.save(folder)
    with _Writer(folder / "train.bin", tokenizer) as train, _Writer(folder / "held_out.bin", tokenizer) as held_out:
        for batch in _batched(read()):
            raw = [text.encode() for text in batch]
            tokens = tokenizer.encode_batch(batch)
            meter.add(sum(map(len, raw)), sum(len(ids) + 1 for ids in tokens) * train.item_bytes)
            for each, ids in zip(raw, tokens, strict=True):
                (held_out if _hash01(each) < share else train).add(ids)
        count = len(train.lengths) + len(held_out.lengths)
        _fill_empty_side(train, held_out, share)
        (folder / "lengths.bin").write_bytes(np.asarray(train.lengths, "<i8").tobytes())
    return {"documents": count, "vocabulary": tokenizer.vocabulary}


def _batched(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of documents of about a million characters: enough to keep all cores busy."""
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if characters >= 2**20 or len(batch) == 4096:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _hash01(raw: bytes) -> float:
    """Return a hash of a text in 0..1."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "big") / 2**64


def _fill_empty_side(train: _Writer, held_out: _Writer, share: float) -> None:
    """Move or cut a document if training or held-out text is empty."""
    total = sum(train.lengths) + sum(held_out.lengths)
    if len(train.lengths) + len(held_out.lengths) == 1:
        ids = (train if train.lengths else held_out).take(0)
        if len(ids) < 2:
            raise DataError(f"the only document has {len(ids)} token, which cannot be split: give more text")
        cut = min(max(1, round(len(ids) * (1 - share))), len(ids) - 1)
        train.add(ids[:cut])
        held_out.add(ids[cut:])
    elif not held_out.lengths:
        held_out.add(train.take(train.nearest(total * share)))
    elif not train.lengths:
        train.add(held_out.take(held_out.nearest(total * (1 - share))))


def _fill_clusters(folder: Path, train: Ids, lengths: Ids, workers: int, meter: Meter) -> dict[str, Any]:
    """Write one file per worker with the documents of one cluster, in their old order."""
    meter.add(0)
    assigned = assign(train, lengths, workers)
    with ExitStack() as stack:
        files = [stack.enter_context((folder / f"worker-{i}.bin").open("wb", 2**20)) for i in range(workers)]
        first = 0
        for worker, length in zip(assigned.tolist(), lengths.tolist(), strict=True):
            document = train[first : first + length].tobytes()
            meter.add(len(document), len(document))
            files[worker].write(document)
            first += length
    return {"workers": workers}
