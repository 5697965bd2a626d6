"""Turns text into token ids and back: bytes, a BPE trained on the corpus, or any tokenizer.json.

Special tokens inside a text are plain text: only atoll puts the separator between documents.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import tokenizers

from atoll._util.disk import parse_json, read_limited
from atoll.errors import ConfigError, DataError
from atoll.train.data.corpus import missing

FILE: Final = "tokenizer.json"
MOST_BYTES: Final = 2**28
"""Most bytes of a tokenizer.json, which is read whole; the largest in use have tens of millions."""
END: Final = "<|end|>"
"""The separator of a BPE trained here."""
SEPARATORS: Final = ("<|endoftext|>", END, "</s>", "<eos>", "<|end_of_text|>")
"""Tokens that may separate documents in a given tokenizer.json; the first that it has is used."""

Ids = npt.NDArray[Any]
"""Token ids, 1-D, of an unsigned integer type that holds the vocabulary."""


class Tokenizer(Protocol):
    """Turns text into token ids and back."""

    @property
    def vocabulary(self) -> int:
        """One more than the largest token id."""

    @property
    def separator(self) -> int:
        """The id that goes between documents."""

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without a separator."""

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; ids without text become nothing or a replacement character."""

    def to_json(self) -> str:
        """Return the text of a tokenizer.json, which is the same for the same tokenizer."""

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a folder, to be read by `open_tokenizer`."""


def dtype_of(vocabulary: int) -> np.dtype[Any]:
    """Return the smallest unsigned integer type that holds every id, little-endian."""
    return np.dtype("u1" if vocabulary <= 2**8 else "<u2" if vocabulary <= 2**16 else "<u4")


class Bytes:
    """Uses the bytes of UTF-8 as tokens, and NUL, which text does not hold, as the separator."""

    vocabulary: Final = 256
    separator: Final = 0

    def encode(self, text: str) -> Ids:
        """Return the bytes of a text."""
        return np.frombuffer(text.encode(), np.uint8)

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Return the bytes of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of these bytes; invalid UTF-8 becomes a replacement character."""
        return bytes(i if 0 <= i < 256 else 0xFF for i in map(int, ids)).decode(errors="replace")

    def to_json(self) -> str:
        """Return a tokenizer.json in the package's format, with the same ids: a BPE without merges."""
        inner = _byte_level(tokenizers.models.BPE(vocab=_byte_vocabulary(), merges=[]))
        inner.add_special_tokens(["\0"])
        text: str = inner.to_str(pretty=True)
        return text

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a folder."""
        (folder / FILE).write_text(self.to_json(), encoding="utf-8")


def _byte_level(model: Any) -> Any:
    """Return a tokenizer of the package that gives the bytes of a text to this model."""
    inner: Any = tokenizers.Tokenizer(model)
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    return inner


def _byte_vocabulary() -> dict[str, int]:
    """Return a token for every byte: the letter that `tokenizers` writes for it, and NUL for itself.

    As its own token, NUL can be special without taking the letter for it out of texts.
    """
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    own = {ord(letter): letter for letter in letters if ord(letter) < 256}
    others = iter(letter for letter in letters if ord(letter) >= 256)
    spelled = [own.get(byte) or next(others) for byte in range(256)]
    return {letter: byte for byte, letter in enumerate(["\0", *spelled[1:]])}


class Subwords:
    """Wraps a tokenizer of the package `tokenizers`: a BPE trained here, or any tokenizer.json."""

    def __init__(self, inner: Any, separator: int) -> None:
        inner.no_truncation()  # a tokenizer.json may truncate or pad what it encodes
        inner.no_padding()
        inner.encode_special_tokens = True
        self._inner = inner
        self.separator = separator
        self.vocabulary = max(inner.get_vocab(with_added_tokens=True).values()) + 1  # there may be holes
        self._dtype = dtype_of(self.vocabulary)

    def encode(self, text: str) -> Ids:
        """Return the ids of a text, without a separator."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: list[str]) -> list[Ids]:
        """Return the ids of each text, encoded on all cores."""
        encoded = self._inner.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, self._dtype) for each in encoded]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids without special tokens and ids past the vocabulary."""
        text: str = self._inner.decode([int(i) for i in ids], skip_special_tokens=True)
        return text

    def to_json(self) -> str:
        """Return a tokenizer.json in the package's format."""
        text: str = self._inner.to_str(pretty=True)
        return text

    def save(self, folder: Path) -> None:
        """Write tokenizer.json into a folder."""
        (folder / FILE).write_text(self.to_json(), encoding="utf-8")


def train_bpe(documents: Iterable[str], vocabulary: int) -> Subwords:
    """Train a byte-level BPE of 257 to `vocabulary` tokens; the same text gives the same BPE."""
    inner = _byte_level(tokenizers.models.BPE())
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator(documents, trainer)
    return Subwords(inner, separator=0)


def open_tokenizer(folder_or_file: Path) -> Tokenizer:
    """Open the tokenizer.json in a folder, or a file of the package tokenizers.

    Raises:
        ConfigError: if it has no token to separate documents with.
        DataError: if it cannot be read.
    """
    path = Path(folder_or_file)
    if path.is_dir():
        path = path / FILE
    try:
        text = read_limited(path, MOST_BYTES).decode()
        if len(text) < 64 and parse_json(text) == {"atoll": "bytes"}:  # as earlier versions wrote it
            return Bytes()
    except FileNotFoundError as error:
        raise DataError(f"the tokenizer cannot be read: {missing(path)}") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"the tokenizer {path} cannot be read: {reason}") from error
    try:
        inner: Any = tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package raises nothing more exact
        raise DataError(f"{path} is not a tokenizer.json of the package tokenizers: {error}") from error
    if inner.get_vocab_size() == 256 and inner.get_vocab() == _byte_vocabulary():
        return Bytes()
    separators = [inner.token_to_id(token) for token in SEPARATORS if inner.token_to_id(token) is not None]
    if not separators:
        known = " ".join(SEPARATORS)
        raise ConfigError(f"{path} has no token to put between documents: add one of {known} as a special token")
    return Subwords(inner, separators[0])
