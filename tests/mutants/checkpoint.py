"""Files that a run is resumed from."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_checkpoint.py",
]

MUTANTS = [
    Mutant("checkpoint data not checked", "checkpoint.py", "if sha256_of(data) != manifest", "if False and manifest"),
]  # fmt: skip
