"""benchmarks/books.py on books made here, in the shape of Project Gutenberg's files."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from atoll.settings.run_settings import DataSection
from atoll.train.data.token_files import prepare

ROOT = Path(__file__).resolve().parents[2]
HEADER = "The Project Gutenberg EBook of A Book\r\n\r\n*** START OF THIS PROJECT GUTENBERG EBOOK ***\r\n"
FOOTER = "\r\n\r\nEnd of Project Gutenberg's A Book\r\n\r\n*** END OF THIS PROJECT GUTENBERG EBOOK ***\r\nlicence\r\n"
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "that",
    "a",
    "was",
    "sailor",
    "harbour",
    "evening",
    "letter",
    "garden",
    "window",
)


@pytest.fixture
def books(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return __import__("books")


def prose(seed: int, sentences: int) -> list[str]:
    """Sentences of twelve words, three to a paragraph."""
    dice = random.Random(seed)
    made = [" ".join(dice.choices(WORDS, k=14)).capitalize() + "." for _ in range(sentences)]
    return [" ".join(made[i : i + 3]) for i in range(0, sentences, 3)]


def wrapped(paragraphs: list[str]) -> bytes:
    """As Project Gutenberg has it: short lines, CRLF, and its own words before and after."""
    lines: list[str] = []
    for paragraph in paragraphs:
        words, line = paragraph.split(), ""
        for word in words:
            if len(line) + len(word) > 70:
                lines, line = [*lines, line.strip()], ""
            line += " " + word
        lines += [line.strip(), ""]
    return (HEADER + "\r\n".join(["", "Produced by Somebody", "", *lines]) + FOOTER).encode()


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    """Forty books, and four that are to be left out."""
    folder = tmp_path / "shelf"
    (folder / "An Author").mkdir(parents=True)
    for i in range(40):
        (folder / "An Author" / f"{i}.txt").write_bytes(wrapped(prose(i, 200)))
    (folder / "part of book 3.txt").write_bytes(wrapped(prose(3, 200)[5:]))
    (folder / "short.txt").write_bytes(wrapped(prose(50, 3)))
    (folder / "no start.txt").write_bytes(wrapped(prose(51, 200)).replace(b"*** START", b"*** BEGIN"))
    (folder / "Latein.txt").write_bytes(wrapped(["arma virumque cano troiae qui primus ab oris."] * 400))
    return folder


def test_what_is_around_a_book_goes_and_lines_of_prose_are_joined(books: ModuleType) -> None:
    paragraphs = prose(0, 30)
    assert books.body(wrapped(paragraphs)) == "\n\n".join(paragraphs)
    verses = b"Tyger Tyger, burning bright,\nIn the forests of the night;"
    assert books.body(verses) == verses.decode()


def test_copies_short_ones_and_other_languages_are_left_out(books: ModuleType, shelf: Path, tmp_path: Path) -> None:
    found = books.read([shelf], tmp_path / "text")
    assert found["left out"] == {
        "in longer books": 1,
        "under 10,000 characters": 1,
        "start not found": 1,
        "not English": 1,
    }
    assert found["train"]["books"] + found["held out"]["books"] == 40
    both = [list(books.texts(tmp_path / "text" / name)) for name in ("books.jsonl", "held_out.jsonl")]
    assert not set(both[0]) & set(both[1])
    assert "\n\n".join(prose(3, 200)) in both[0] + both[1]


@pytest.mark.parametrize(("share", "counts"), [(0.0, (3, 0)), (1.0, (0, 3))])
def test_too_few_books_for_both_parts_are_refused(
    books: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, counts: tuple[int, int]
) -> None:
    monkeypatch.setattr(books, "HELD_OUT", share)
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    for i, sentences in enumerate((200, 200, 200, 3)):
        (shelf / f"{i}.txt").write_bytes(wrapped(prose(i, sentences)))
    found = "of 4 files {} are books to train on and {} are held-out books".format(*counts)
    with pytest.raises(SystemExit, match=rf"^{found} \(left out: 1 under 10,000 characters\): .* give more books$"):
        books.read([shelf], tmp_path / "text")
    assert not (tmp_path / "text").exists()


def test_a_git_directory_is_read_like_a_folder(books: ModuleType, shelf: Path) -> None:
    plain = dict(books.files(shelf))
    git = ["git", "-C", str(shelf), "-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "core.autocrlf=false"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-qm", "books"], check=True)
    assert dict(books.files(shelf)) == plain


def test_tokens_that_travelled_are_those_that_were_packed(
    books: ModuleType, shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(books, "HELD_OUT", 0.2)
    monkeypatch.setattr(books, "CHUNK_BYTES", 50_000)
    monkeypatch.setattr(books, "PART_BYTES", 30_000)
    text, target = tmp_path / "text", tmp_path / "there"
    books.read([shelf], text)
    counted = books.tokens(text, 300, 10**9)
    assert counted["vocabulary"] == 300
    data = prepare(DataSection(source=str(text / "tokens"), cache=str(tmp_path)))
    whole = [data.tokenizer.encode(book).tolist() for book in books.texts(text / "books.jsonl")]
    assert data.train[0].tolist() == [i for ids in whole for i in (*ids, data.tokenizer.separator)]
    count = len(data.held_out) // 64
    origins = books.origins(text, 64, count)
    held_out = list(books.texts(text / "held_out.jsonl"))
    assert len(set(origins.tolist())) > 1
    for row, origin in zip(data.held_out[: count * 64].reshape(count, 64), origins, strict=True):
        quarters = [data.tokenizer.decode(row[at : at + 16].tolist()) for at in range(0, 64, 16)]
        assert (
            sum(text in held_out[origin] for text in quarters) >= 2
        )  # a sequence may begin in one book and end in another
    books.pack(text)
    parts = sorted((text / "parts").iterdir())
    assert len(parts) > 2
    late = tmp_path / "late"
    shutil.move(parts[1], late)
    books.unpack(text / "parts", target)
    assert "not complete" in capsys.readouterr().out
    books.unpack(late, target)
    assert "is complete" in capsys.readouterr().out
    for file in (text / "tokens").iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()


def test_the_manifest_says_what_there_is(shelf: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "books.py"), "read", str(shelf), str(tmp_path / "text")]
    subprocess.run(command, check=True, capture_output=True)
    known = json.loads((tmp_path / "text" / "manifest.json").read_text())["text"]
    assert known["train"]["words"] + known["held out"]["words"] == 40 * 200 * 14
