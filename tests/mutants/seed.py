"""A seeded bug, and the catalogues of them: every module of this folder that has TESTS and MUTANTS."""

import pkgutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE, BENCHMARKS = "src/atoll", "benchmarks/"
_NOT_CATALOGUES = ("__main__", "seed")


@dataclass(frozen=True)
class Mutant:
    """A bug: `old`, which occurs once in a file below src/atoll, or in benchmarks/, becomes `new`."""

    name: str
    file: str
    old: str
    new: str
    also: tuple[str, str, str] | None = None
    """A second edit (file, old, new), for bugs that take two."""
    tests: tuple[str, ...] = ()
    """What must turn red, files or tests in them; the catalogue's TESTS unless given."""

    @property
    def edits(self) -> list[tuple[str, str, str]]:
        """Each edit as (file, old, new)."""
        return [(self.file, self.old, self.new), *([self.also] if self.also else [])]

    @property
    def is_in_package(self) -> bool:
        """Whether it is in the package, and not in benchmarks/."""
        return not self.file.startswith(BENCHMARKS)

    def problems(self, root: Path = ROOT) -> list[str]:
        """Why this bug cannot be seeded into a tree; none if it can."""
        found = []
        for file, old, _ in self.edits:
            path = _path(root, file)
            source = path.read_text() if path.is_file() else ""
            if source.count(old) != 1:
                found.append(f"its text occurs {source.count(old)} times in {file}: {old!r}")
        return found

    def seed(self, root: Path) -> None:
        """Put the bug into a copy of the tree."""
        for file, old, new in self.edits:
            path = _path(root, file)
            path.write_text(path.read_text().replace(old, new))


def _path(root: Path, file: str) -> Path:
    return root / file if file.startswith(BENCHMARKS) else root / PACKAGE / file


def catalogues() -> Iterator[tuple[str, list[Mutant]]]:
    """Every catalogue's name, and its mutants with the tests that must turn red."""
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name not in _NOT_CATALOGUES:
            catalogue = import_module(f"mutants.{module.name}")
            tests = tuple(catalogue.TESTS)
            yield module.name, [m if m.tests else replace(m, tests=tests) for m in catalogue.MUTANTS]
