"""Turns public-domain books into tokens: enough text that a model need not read it many times.

    python benchmarks/books.py read BOOKS FOLDER      # a folder or a git directory of Project Gutenberg's .txt files
    python benchmarks/books.py tokens FOLDER          # a BPE of 32,000, and the books as its tokens: FOLDER/tokens
    python benchmarks/books.py origins FOLDER RESULTS # the book of each held-out sequence, for papers.py's errors
    python benchmarks/books.py pack FOLDER            # the tokens, compressed, in parts of 60 MB to copy: FOLDER/parts
    python benchmarks/books.py unpack PARTS TOKENS    # on another machine; `atoll train` takes TOKENS as data.source

`read` removes Project Gutenberg's own text around each book and joins the lines of paragraphs. It leaves out books that
are not English, and books of which more than a fifth is in longer books too. It writes books.jsonl and held_out.jsonl,
one book a line, in the order of a hash of the text; three books in a hundred are held out. `tokens` cuts held-out books
into passages and shuffles these, so that the first few million tokens have some of each book. manifest.json has the
counts and digests of everything.
"""

import argparse
import bz2
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from atoll.errors import DataError
from atoll.train.data.cache import check, no_progress, seal
from atoll.train.data.tokenizer import Ids, Tokenizer, dtype_of, open_tokenizer, train_bpe

_pool = partial(ProcessPoolExecutor, mp_context=multiprocessing.get_context("spawn"))  # a fork may copy held locks
VOCABULARY = 32_000
HELD_OUT = 0.03
HELD_OUT_TOKENS = 2**22
"""Number of held-out tokens, about; no run evaluates more."""
PASSAGE = 2**15
"""Characters of a held-out passage, at least."""
SEEN = 0.2
"""A book is left out if more than this share of its sentences, by length, is in longer books."""
BPE_BYTES = 2**26
"""Bytes of text that the BPE is trained on."""
CHUNK_BYTES = 2**23
"""Bytes of a file that are compressed by themselves, so that processes can share the work."""
PART_BYTES = 60_500_000
STARTS = re.compile(r"^\W*(START OF (THE|THIS) PROJECT|END.{0,3}THE SMALL PRINT).*$", re.M | re.I)
ENDS = re.compile(r"^\W*END OF (THE |THIS )?PROJECT GUTENBERG", re.M | re.I)
NOT_THE_BOOK = re.compile(r"\W*(produced|prepared|transcribed|e-?text prepared) by\b|.*\bgutenberg\b", re.I | re.S)
COMMON = (
    "the",
    "and",
    "of",
    "to",
    "a",
    "in",
    "that",
    "it",
    "was",
    "he",
    "his",
    "with",
    "as",
    "for",
    "had",
    "is",
    "not",
)


class Book(NamedTuple):
    """Holds the text of one book, without anything around it."""

    name: str
    text: str
    sentences: dict[int, int]
    """Length of each sentence, by its checksum."""

    @property
    def place(self) -> float:
        """A number from 0 to 1 that depends on the text alone."""
        return int.from_bytes(digest(self.text)[:8], "big") / 2**64


def digest(text: str) -> bytes:
    """Hash a text."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def files(source: Path) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of every .txt file of a folder, or of the newest commit of a git directory."""
    git = ["git", "-C", str(source)]
    if not (source / "HEAD").exists() and not (source / ".git").exists():
        for path in sorted(source.rglob("*.txt")):
            yield str(path.relative_to(source)), path.read_bytes()
        return
    listed = subprocess.run([*git, "ls-tree", "-rz", "HEAD"], capture_output=True, check=True).stdout
    with subprocess.Popen([*git, "cat-file", "--batch"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as batch:
        assert batch.stdin is not None and batch.stdout is not None
        for entry in listed.split(b"\0"):
            about, _, name = entry.partition(b"\t")
            if not name.endswith(b".txt"):
                continue
            batch.stdin.write(about.split()[2] + b"\n")
            batch.stdin.flush()
            found = batch.stdout.readline().split()
            if found[1] != b"missing":  # a mirror need not have its largest files
                yield name.decode(errors="replace"), batch.stdout.read(int(found[2]))
                batch.stdout.read(1)


def body(raw: bytes) -> str | None:
    """Return the book in a file, without what Project Gutenberg put around it; None if its start cannot be found."""
    text = "\n".join(line.rstrip() for line in raw.decode("utf-8-sig", errors="replace").splitlines())
    starts = list(STARTS.finditer(text, 0, 50_000))
    if not starts and "gutenberg" in text[:5000].lower():
        return None
    start = starts[-1].end() if starts else 0
    end = ENDS.search(text, start)
    text = text[start : end.start() if end else len(text)]
    paragraphs = (part.strip("\n") for part in re.split(r"\n{2,}", text))
    return "\n\n".join(joined(part) for part in paragraphs if part and not NOT_THE_BOOK.match(part))


def judged(file: tuple[str, bytes]) -> Book | str:
    """Return the book in a file, or why it is left out."""
    name, raw = file
    text = body(raw)
    if text is None:
        return "start not found"
    if len(text) < 10_000:
        return "under 10,000 characters"
    return Book(name, text, sentences(text)) if english(text) else "not English"


def joined(paragraph: str) -> str:
    """Put the lines of prose into one; verses and tables stay as they are."""
    lines = paragraph.split("\n")
    prose = all(len(line) >= 45 for line in lines[:-1]) and not any(line.startswith(" ") for line in lines[1:])
    return " ".join(lines) if prose else paragraph


def english(text: str) -> bool:
    """Tell whether a text is English: the commonest words of English are a fifth of its words or more."""
    middle = len(text) // 2
    words = Counter(re.findall(r"[^\W\d_]+", text[max(0, middle - 20_000) : middle + 20_000].lower()))
    return sum(words[word] for word in COMMON) >= 0.2 * max(1, words.total())


def sentences(text: str) -> dict[int, int]:
    """Return the number of letters of every sentence of forty letters or more, by the sentence's checksum."""
    parts = re.sub(r"[^a-z.!?;:]+", "", text.lower()).translate({ord(mark): "." for mark in "!?;:"}).split(".")
    return {zlib.crc32(letters.encode()): len(letters) for letters in parts if len(letters) >= 40}


def distinct(books: Iterable[Book]) -> Iterator[tuple[Book, bool]]:
    """Yield every book, longest first, and whether little of it is in longer books."""
    known: set[int] = set()
    for book in sorted(books, key=lambda book: (-len(book.text), book.name)):
        seen = sum(length for key, length in book.sentences.items() if key in known)
        new = seen <= SEEN * sum(book.sentences.values())
        if new:
            known.update(book.sentences)
        yield book, new


def read(sources: list[Path], folder: Path) -> dict[str, Any]:
    """Write the books of all sources, and return counts of what was found and left out."""
    left_out: Counter[str] = Counter()
    good, kept = [], []
    found = [file for source in sources for file in files(source)]  # before there are processes that share git's pipes
    with _pool() as pool:
        for judgement in pool.map(judged, found, chunksize=16):
            if isinstance(judgement, str):
                left_out[judgement] += 1
            else:
                good.append(judgement)
    for book, new in distinct(good):
        if new:
            kept.append(book)
        else:
            left_out["in longer books"] += 1
    kept.sort(key=lambda book: book.place)
    held_out = [book for book in kept if book.place < HELD_OUT]
    train = [book for book in kept if book.place >= HELD_OUT]
    if not train or not held_out:
        parts = f"of {len(found)} files {len(train)} are books to train on and {len(held_out)} are held-out books"
        others = ", ".join(f"{count} {reason}" for reason, count in left_out.items()) or "none"
        sys.exit(f"{parts} (left out: {others}): both parts need at least one, so give more books")
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "left out": dict(left_out),
        "train": write(folder / "books.jsonl", train),
        "held out": write(folder / "held_out.jsonl", held_out),
    }


def write(path: Path, books: list[Book]) -> dict[str, Any]:
    """Write books, one a line, and return their number, their size and a digest."""
    whole = hashlib.sha256()
    with path.open("w", encoding="utf-8") as file:
        for book in books:
            line = json.dumps({"name": book.name, "text": book.text}, ensure_ascii=False) + "\n"
            whole.update(line.encode())
            file.write(line)
    return {
        "books": len(books),
        "bytes": sum(len(book.text.encode()) for book in books),
        "words": sum(book.text.count(" ") + book.text.count("\n\n") + 1 for book in books),
        "sha256": whole.hexdigest(),
    }


def texts(path: Path) -> Iterator[str]:
    """Yield the books of a file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def passages(text: str) -> Iterator[str]:
    """Cut a book at the ends of paragraphs."""
    part: list[str] = []
    for paragraph in text.split("\n\n"):
        part.append(paragraph)
        if sum(map(len, part)) >= PASSAGE:
            yield "\n\n".join(part)
            part = []
    if part:
        yield "\n\n".join(part)


def tokens(folder: Path, vocabulary: int, most: int) -> dict[str, Any]:
    """Write the books as tokens, in the files of atoll's cache."""

    def some() -> Iterator[str]:
        read = 0
        for text in texts(folder / "books.jsonl"):
            yield text
            read += len(text.encode())
            if read >= BPE_BYTES:
                return

    target = folder / "tokens"
    target.mkdir(exist_ok=True)
    tokenizer = train_bpe(some(), vocabulary)
    tokenizer.save(target)
    lengths = encode(target / "train.bin", texts(folder / "books.jsonl"), target, most)
    (target / "lengths.bin").write_bytes(np.asarray(lengths, "<i8").tobytes())
    cut = sorted((part for text in texts(folder / "held_out.jsonl") for part in passages(text)), key=digest)
    held_out = encode(target / "held_out.bin", cut, target, HELD_OUT_TOKENS)
    seal(target, {"documents": len(lengths) + len(held_out), "vocabulary": tokenizer.vocabulary})
    return {"vocabulary": tokenizer.vocabulary, "train tokens": sum(lengths), "held-out tokens": sum(held_out)}


def encode(path: Path, documents: Iterable[str], folder: Path, most: int) -> list[int]:
    """Write documents as tokens, each with a separator, until there are `most`; return the length of each."""
    lengths: list[int] = []
    left = iter(documents)
    with path.open("wb") as file, _pool(initializer=Words.open, initargs=(folder,)) as pool:
        while sum(lengths) < most and (some := list(islice(left, 64))):
            for ids in pool.map(Words.encode, some):
                file.write(ids.tobytes())
                lengths.append(len(ids))
    return lengths


class Words:
    """Encodes every different word once: five times as fast as the tokenizer alone, with the same tokens."""

    pattern = re.compile(r"'(?:[stmd]|re|ve|ll)| ?[^\W\d_]+| ?\d+| ?(?:[^\w\s]|_)+|\s+(?!\S)|\s+")
    known: ClassVar[dict[str, list[int]]]
    tokenizer: ClassVar[Tokenizer]

    @classmethod
    def open(cls, folder: Path) -> None:
        """Prepare a process of the pool: open the tokenizer, with no word known."""
        cls.tokenizer, cls.known = open_tokenizer(folder), {}

    @classmethod
    def encode(cls, text: str) -> Ids:
        """Return the tokens of a text, and the separator."""
        words = cls.pattern.findall(text)
        if new := [word for word in dict.fromkeys(words) if word not in cls.known]:
            cls.known |= zip(new, (ids.tolist() for ids in cls.tokenizer.encode_batch(new)), strict=True)
        ids = chain.from_iterable(map(cls.known.__getitem__, words))
        return np.fromiter(chain(ids, [cls.tokenizer.separator]), dtype_of(cls.tokenizer.vocabulary))


def origins(folder: Path, sequence: int, count: int) -> npt.NDArray[np.uint16]:
    """Return the number of the held-out book that most of each held-out sequence is from, for the first `count`."""
    books, tokenizer = enumerate(texts(folder / "held_out.jsonl")), open_tokenizer(folder / "tokens")
    cut = sorted((digest(part), number) for number, text in books for part in passages(text))
    tokens = np.fromfile(folder / "tokens" / "held_out.bin", dtype_of(tokenizer.vocabulary))
    ends = np.flatnonzero(tokens == tokenizer.separator) + 1  # one ends each passage
    of_token = np.repeat([number for _, number in cut[: len(ends)]], np.diff(ends, prepend=0))
    rows = of_token[: count * sequence].reshape(count, sequence)
    return np.array([np.bincount(row).argmax() for row in rows], np.uint16)


def pack(folder: Path) -> dict[str, Any]:
    """Compress the tokens into FOLDER/parts/N/FILE.CHUNK.bz2, and return the size and digest of each chunk."""
    sources = sorted(path for path in (folder / "tokens").iterdir())
    chunks = [(path, number) for path in sources for number in range(-(-path.stat().st_size // CHUNK_BYTES))]
    shutil.rmtree(folder / "parts", ignore_errors=True)
    found, part, size = {}, 1, 0
    with _pool() as pool:
        for (path, number), packed in zip(chunks, pool.map(compressed, chunks), strict=True):
            if size and size + len(packed) > PART_BYTES:
                part, size = part + 1, 0
            size += len(packed)
            file = folder / "parts" / str(part) / f"{path.name}.{number:03}.bz2"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(packed)
            found[f"{part}/{file.name}"] = {"bytes": len(packed), "sha256": hashlib.sha256(packed).hexdigest()}
    return found


def compressed(chunk: tuple[Path, int]) -> bytes:
    """Read and compress a chunk of a file."""
    path, number = chunk
    with path.open("rb") as file:
        file.seek(number * CHUNK_BYTES)
        return bz2.compress(swapped(file.read(CHUNK_BYTES)))


def swapped(raw: bytes) -> bytes:
    """Swap the bytes of each pair, which compresses tokens 4 % better; doing it twice restores them."""
    pairs = np.frombuffer(raw[: len(raw) // 2 * 2], np.uint16).byteswap().tobytes()
    return pairs + raw[len(pairs) :]


def unpack(parts: Path, target: Path) -> None:
    """Write the chunks that are here to their places, and check all files if none is missing."""
    target.mkdir(parents=True, exist_ok=True)
    with _pool() as pool:
        list(pool.map(partial(place, target), sorted(parts.rglob("*.bz2"))))
    try:
        check(target, no_progress)
        print(f"{target} is complete")
    except DataError:
        print(f"{target} is not complete")


def place(target: Path, packed: Path) -> None:
    """Write a chunk to where it belongs."""
    name, number = packed.name.removesuffix(".bz2").rsplit(".", 1)
    with os.fdopen(os.open(target / name, os.O_RDWR | os.O_CREAT, 0o644), "r+b") as file:
        file.seek(int(number) * CHUNK_BYTES)
        file.write(swapped(bz2.decompress(packed.read_bytes())))


def note(folder: Path, facts: dict[str, Any]) -> None:
    """Add facts to a folder's manifest, and print them."""
    path = folder / "manifest.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(known | facts, indent=1) + "\n")
    print(json.dumps(facts, indent=1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    acts = parser.add_subparsers(dest="act", required=True)
    act = acts.add_parser("read")
    act.add_argument("sources", type=Path, nargs="+")
    act.add_argument("folder", type=Path)
    act = acts.add_parser("tokens")
    act.add_argument("folder", type=Path)
    act.add_argument("--vocabulary", type=int, default=VOCABULARY)
    act.add_argument("--tokens", type=int, default=260_000_000, help="of training text, about; more is left out")
    act = acts.add_parser("origins")
    act.add_argument("folder", type=Path)
    act.add_argument("target", type=Path, help="folder of results of papers.py")
    act.add_argument("--sequence", type=int, default=1024, help="tokens of a sequence")
    act.add_argument("--sequences", type=int, default=2048, help="that papers.py evaluates")
    act = acts.add_parser("pack")
    act.add_argument("folder", type=Path)
    act = acts.add_parser("unpack")
    act.add_argument("parts", type=Path)
    act.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.act == "read":
        note(arguments.folder, {"text": read(arguments.sources, arguments.folder)})
    elif arguments.act == "tokens":
        note(arguments.folder, {"tokens": tokens(arguments.folder, arguments.vocabulary, arguments.tokens)})
    elif arguments.act == "origins":
        found = origins(arguments.folder, arguments.sequence, arguments.sequences)
        np.save(arguments.target / "held_out_books.npy", found)
        print(f"{len(found)} held-out sequences of {len(set(found))} books")
    elif arguments.act == "pack":
        note(arguments.folder, {"parts": pack(arguments.folder)})
    else:
        unpack(arguments.parts, arguments.target)


if __name__ == "__main__":
    main()
