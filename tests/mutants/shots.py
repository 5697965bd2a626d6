"""Means that cross in two shots."""

from mutants.seed import Mutant

LOOP = ("tests/unit/test_loop.py::TestCounting",)
ORACLE = ("tests/unit/test_laws.py::test_losses_absences_and_rounding_together_as_in_the_oracle",)
NOISE = ("tests/unit/test_laws.py::test_no_payload_and_no_part_of_a_mean_share_their_noise",)
SLOWEST = (
    "tests/unit/test_resume.py::test_a_mean_that_only_the_slowest_have_still_to_apply_is_reduced_again_before_the_next",
)
TESTS = [
    "tests/property/test_shots.py",
]

MUTANTS = [
    Mutant("the mean of many not rounded again", "link/local.py", "if counted and shots(len(members)) == 2 and",
           "if False and", tests=LOOP),
    Mutant("shots counted by who arrived", "link/local.py", "shots(len(members)) == 2", "shots(len(arrived)) == 2",
           tests=ORACLE),
    Mutant("shots counted by who could be there", "link/local.py", "shots(len(members)) == 2",
           "shots(self.workers) == 2", tests=LOOP),
    Mutant("a resumed mean is reduced after the next", "link/local.py", "self.settle(worker, earlier, reduction)", "pass",
           tests=SLOWEST),
    Mutant("parts across blocks", "core/allreduce.py", "grain * (grains * edge // count)", "numel * edge // count"),
    Mutant("one noise for all parts of a mean", "core/allreduce.py", "return codec.encode(mean, self.seed + part)",
           "return codec.encode(mean, self.seed)"),
    Mutant("a mean rounded with a member's noise", "outer/exchange.py", "seed = 2**31 + ", "seed = 2**32 + ",
           tests=("tests/unit/test_noise.py",)),
    Mutant("one noise for parts of two rounds", "outer/exchange.py", "MOST_PARTS_EACH * self._seeds(round_id)",
           "self._seeds(round_id)", tests=NOISE),
]  # fmt: skip
