"""Means that cross in two shots."""

from mutants.seed import Mutant

TESTS = [
    "tests/property/test_shots.py",
]

MUTANTS = [
    Mutant("the mean of many not rounded again", "link/local.py", "if counted and shots(len(members)) == 2 and",
           "if False and"),
    Mutant("shots counted by who arrived", "link/local.py", "shots(len(members)) == 2", "shots(len(arrived)) == 2"),
    Mutant("shots counted by who could be there", "link/local.py", "shots(len(members)) == 2",
           "shots(self.workers) == 2"),
    Mutant("parts across blocks", "core/cargo.py", "BLOCK * (blocks * edge // count)", "numel * edge // count"),
    Mutant("one noise for all parts of a mean", "core/cargo.py", "return codec.encode(mean, self.seed + part)",
           "return codec.encode(mean, self.seed)"),
    Mutant("a mean rounded with a member's noise", "exchange.py", "seed = 2**31 + ", "seed = 2**32 + "),
    Mutant("one noise for parts of two rounds", "exchange.py", "MOST_PARTS_EACH * self._seed(round_id)",
           "self._seed(round_id)"),
]  # fmt: skip
