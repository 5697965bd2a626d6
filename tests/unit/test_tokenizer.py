"""Text to ids and back, by bytes, by a BPE made here, and by somebody else's tokenizer.json."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from atoll.errors import ConfigError, DataError
from atoll.train.data.tokenizer import END, FILE, Bytes, Subwords, Tokenizer, dtype_of, open_tokenizer, train_bpe

tokenizers = pytest.importorskip("tokenizers")

TEXTS = ["the cat sat on the mat. " * 20, "die Katze saß auf der Matte\n" * 20, "def f(x):\n    return x\n" * 20]
ODD = ["", " ", "é\n\0\U0001f3dd", "a<|end|>b", "  two  spaces\r\n\ttab", "\u2028 unseen: 汉字"]


@pytest.fixture(scope="module")
def bpe() -> Subwords:
    return train_bpe(TEXTS, 300)


@pytest.fixture(params=["bytes", "bpe", "file"])
def tokenizer(request: pytest.FixtureRequest, bpe: Subwords, tmp_path: Path) -> Tokenizer:
    if request.param == "bytes":
        return Bytes()
    if request.param == "bpe":
        return bpe
    bpe.save(tmp_path)
    return open_tokenizer(tmp_path)


def test_text_comes_back(tokenizer: Tokenizer) -> None:
    for text in TEXTS + ODD:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids.tolist()) == text
        assert ids.dtype == dtype_of(tokenizer.vocabulary)
        assert ids.ndim == 1
        assert all(0 <= i < tokenizer.vocabulary for i in ids)
    batch = tokenizer.encode_batch(TEXTS + ODD)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in TEXTS + ODD]


def test_what_is_saved_can_be_opened(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    folder.mkdir()
    tokenizer.save(folder)
    for place in (folder, folder / FILE):
        again = open_tokenizer(place)
        assert (again.vocabulary, again.separator) == (tokenizer.vocabulary, tokenizer.separator)
        assert [again.encode(text).tolist() for text in ODD] == [tokenizer.encode(text).tolist() for text in ODD]


def test_bytes_are_known_however_their_file_was_written(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"atoll": "bytes"}\n')  # as earlier versions did
    assert isinstance(open_tokenizer(tmp_path), Bytes)
    Bytes().save(tmp_path)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / FILE))
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="$A", special_tokens=[])
    inner.save(str(tmp_path / FILE))  # as transformers does
    assert isinstance(open_tokenizer(tmp_path), Bytes)
    others = {str(number): number for number in range(255)} | {"</s>": 255}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(others, unk_token="0")).save(str(tmp_path / FILE))
    assert open_tokenizer(tmp_path).separator == 255, "somebody else's 256 tokens"


def test_bytes_need_no_setup() -> None:
    tokenizer = Bytes()
    assert (tokenizer.vocabulary, tokenizer.separator) == (256, 0)
    assert tokenizer.encode("é").tolist() == [0xC3, 0xA9]
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert tokenizer.decode([97, 256, -1, 98]) == "a\ufffd\ufffdb"  # a model may have a larger vocabulary
    assert tokenizer.decode(np.array([104, 105], np.uint8).tolist()) == "hi"


def test_a_bpe_is_shorter_than_bytes_and_no_text_can_spell_its_separator(bpe: Subwords) -> None:
    assert bpe.vocabulary == 300
    assert bpe.separator == 0
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2
    assert 0 not in bpe.encode(f"a{END}b")
    assert bpe.decode([0, *bpe.encode("cat"), 0, 299 + 5]) == "cat"


def test_a_bpe_has_no_more_tokens_than_its_text_gives() -> None:
    assert 257 < train_bpe(["abab abab"], 5000).vocabulary < 270
    assert train_bpe([], 257).vocabulary == 257


def test_the_same_text_gives_the_same_bpe_in_another_process(bpe: Subwords, tmp_path: Path) -> None:
    script = (
        f"from atoll.train.data.tokenizer import *\ntrain_bpe(reversed({TEXTS!r}), 300).save(Path({str(tmp_path)!r}))"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    (tmp_path / "here").mkdir()
    bpe.save(tmp_path / "here")
    assert (tmp_path / FILE).read_bytes() == (tmp_path / "here" / FILE).read_bytes()


def test_errors_of_the_text_pass_through_the_training() -> None:
    def texts() -> Any:
        yield "fine"
        raise DataError("line 7")

    with pytest.raises(DataError, match="line 7"):
        train_bpe(texts(), 300)


def words(*special: str) -> Any:
    """Somebody else's tokenizer: whole words, with a hole in the ids, that cuts and fills up what it encodes."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"cat": 0, "dog": 5, "?": 70_000}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(list(special))
    inner.enable_truncation(4)
    inner.enable_padding(length=8)
    return inner


@pytest.mark.parametrize(
    ("special", "separator"),
    [(["</s>"], "</s>"), (["<eos>", "<|endoftext|>"], "<|endoftext|>"), (["<|end_of_text|>"], "<|end_of_text|>")],
)
def test_any_tokenizer_json_can_be_used(tmp_path: Path, special: list[str], separator: str) -> None:
    inner = words(*special)
    inner.save(str(tmp_path / "words.json"))
    tokenizer = open_tokenizer(tmp_path / "words.json")
    assert tokenizer.separator == inner.token_to_id(separator)
    assert tokenizer.vocabulary == 70_001  # ids count, not words
    assert tokenizer.encode("cat dog " * 5).tolist() == [0, 5] * 5  # neither cut nor filled up
    assert tokenizer.encode("cat").tolist() == [0]
    assert tokenizer.encode("cat").dtype == np.dtype("<u4")


def test_what_a_tokenizer_would_put_around_a_text_is_left_out(tmp_path: Path) -> None:
    inner = words("</s>")
    end = inner.token_to_id("</s>")
    template = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", end)])
    inner.post_processor = template
    inner.save(str(tmp_path / "tokenizer.json"))
    assert open_tokenizer(tmp_path).encode("cat dog").tolist() == [0, 5]


def test_a_tokenizer_without_a_separator_is_refused(tmp_path: Path) -> None:
    words("[PAD]").save(str(tmp_path / FILE))
    with pytest.raises(ConfigError, match=r"has no token to put between documents: add one of <\|endoftext\|> <\|end"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "cannot be read"),
        (b"\xff", "cannot be read"),
        (b"[" * 100_000, r"is not a tokenizer\.json of the package tokenizers"),
        (b'{"version":' * 100_000, r"is not a tokenizer\.json of the package tokenizers"),
        (b"{}", r"is not a tokenizer\.json of the package tokenizers"),
        (b"[]", r"is not a tokenizer\.json of the package tokenizers"),
        (json.dumps({"atoll": "words"}).encode(), r"is not a tokenizer\.json of the package tokenizers"),
    ],
)
def test_damaged_tokenizers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / FILE).write_bytes(content)
    with pytest.raises(DataError, match=rf"{FILE} {message}"):
        open_tokenizer(tmp_path)


def test_a_missing_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.jsn").touch()
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist; did you mean .*tokenizer\.jsn\?"):
        open_tokenizer(tmp_path)


@pytest.mark.parametrize(("vocabulary", "size"), [(1, 1), (256, 1), (257, 2), (65536, 2), (65537, 4)])
def test_ids_take_as_few_bytes_as_they_can(vocabulary: int, size: int) -> None:
    assert dtype_of(vocabulary).itemsize == size
