"""Bugs in reading a folder of tokens."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_tokens.py"]
MUTANTS = [
    Mutant(
        "tokens of another vocabulary are taken",
        "train/data/tokens.py",
        "if vocabulary not in (None, has):",
        "if vocabulary == 0:",
    ),
    Mutant(
        "a limit is passed over where tokens are there",
        "train/data/tokens.py",
        "if limit is not None:\n        raise",
        "if limit == 0:\n        raise",
    ),
    Mutant(
        "a folder of tokens is looked through for text",
        "train/data/tokens.py",
        "    if _ready(source) is not None:\n        return\n",
        "",
    ),
    Mutant(
        "a folder of tokens in a list is taken for text",
        "train/data/tokens.py",
        "if len(source) != 1:",
        "if len(source) != 2:",
    ),
]
