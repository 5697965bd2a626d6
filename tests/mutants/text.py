"""Bugs in reading a folder of tokens."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_token_files.py"]
MUTANTS = [
    Mutant(
        "tokens of another vocabulary are taken",
        "train/data/token_files.py",
        "if settings.vocabulary not in (None, vocabulary):",
        "if settings.vocabulary == 0:",
    ),
    Mutant(
        "bytes that are there are taken for a BPE's tokens",
        "train/data/token_files.py",
        'if settings.tokenizer == "bpe" and isinstance(tokenizer, Bytes):',
        "if False:",
    ),
    Mutant(
        "tokens of another tokenizer are taken",
        "train/data/token_files.py",
        "given.to_json() != tokenizer.to_json():",
        "given.vocabulary != tokenizer.vocabulary:",
    ),
    Mutant(
        "settings that do not fit a folder of tokens are found late",
        "train/data/token_files.py",
        "    else:\n        _check_ready(ready, open_tokenizer(ready), settings)\n",
        "",
    ),
    Mutant(
        "a plan takes the tokens of a folder for bytes",
        "train/data/token_files.py",
        "        return open_tokenizer(ready).vocabulary\n",
        "        pass\n",
    ),
    Mutant(
        "a limit is passed over where tokens are there",
        "train/data/token_files.py",
        "if settings.limit is not None:\n        raise",
        "if settings.limit == 0:\n        raise",
    ),
    Mutant(
        "a folder of tokens is looked through for text",
        "train/data/token_files.py",
        "    if (ready := _ready(settings)) is None:\n",
        "    if True:\n",
    ),
    Mutant(
        "a folder of tokens in a list is taken for text",
        "train/data/token_files.py",
        "if len(sources) != 1:",
        "if len(sources) != 2:",
    ),
]
