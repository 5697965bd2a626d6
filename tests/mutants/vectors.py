"""Flat vectors, fragments, and who is a member."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_flat.py",
    "tests/unit/test_fragments.py",
    "tests/unit/test_local.py",
]

MUTANTS = [
    Mutant("last tensor skipped", "core/flat.py", "        part.copy_(piece.view(part.shape))",
           "        part.copy_(piece.view(part.shape)) if part is not parts[-1] or len(parts) == 1 else None"),
    Mutant("fingerprint says nothing", "core/flat.py", "    return total\n", "    return 0\n"),
    Mutant("members in order of arrival", "link/local.py", "in sorted(posted.offers.items()) if offer",
           "in posted.offers.items() if offer"),
    Mutant("embeddings in no fragment", "core/fragments.py", "    if rest:\n        groups.append",
           "    if False:\n        groups.append"),
]  # fmt: skip
