"""Bugs in the tables of the papers' comparison, and in the books that it trains on."""

from mutants.seed import Mutant

_PAPERS, _BOOKS, _FIGURES = "tests/unit/test_papers.py", "tests/unit/test_books.py", "tests/test_result_figures.py"
TESTS = [_PAPERS]
TABLE, ROWS, BOOKS = "benchmarks/papers_table.py", "benchmarks/papers_rows.py", "benchmarks/books.py"
MUTANTS = [
    Mutant("an error is that of a difference, not of a ratio", TABLE, "self.losses - ratio * reference.losses", "self.losses - reference.losses"),
    Mutant("neighbours count as one observation, not books", TABLE, "self.books if self.books is not None else np.arange", "np.arange"),
    Mutant("every sequence is an observation", TABLE, "np.arange(len(apart)) // 16", "np.arange(len(apart))", tests=(_FIGURES,)),
    Mutant("an error does not shrink with more books", TABLE, "math.sqrt(len(sums) / max(1, len(sums) - 1) * (sums**2).sum()) / len(apart)", "sums.std()"),
    Mutant("every seed is compared with seed 0", TABLE, "{seed[0] if seed else ''}", ""),
    Mutant("rows of another text are compared", TABLE, "same = self.text == reference.text", "same = True"),
    Mutant("rows of another length are compared", TABLE, "return same and self.end.tokens == reference.end.tokens", "return same"),
    Mutant("rows are in the order of their names", TABLE, "sorted(found, key=lambda name: Row.named(name).order)", "sorted(found)", tests=(_FIGURES,)),
    Mutant("seeds of one setting are not together", ROWS, 'for key, value in self.changes if key != "seed"]', "for key, value in self.changes]", tests=(_FIGURES,)),
    Mutant("a row is named by the shortest method", ROWS, "key=len)\n", "key=lambda method: -len(method))\n"),
    Mutant("held-out books are trained on", BOOKS, "if book.place >= HELD_OUT]", "]", tests=(_BOOKS,)),
    Mutant("copies of books are kept", BOOKS, "new = seen <= SEEN", "new = 0 <= SEEN", tests=(_BOOKS,)),
    Mutant("a part of a book is kept, and the book is not", BOOKS, "key=lambda book: (-len(book.text)", "key=lambda book: (len(book.text)", tests=(_BOOKS,)),
    Mutant("too few books are too few only to train on", BOOKS, "if not train or not held_out:", "if not train:", tests=(_BOOKS,)),
    Mutant("a sequence is of the book that it ends in", BOOKS, "np.bincount(row).argmax() for row", "row[-1] for row", tests=(_BOOKS,)),
]  # fmt: skip
