"""When fragments are sent and applied."""

from mutants.seed import Mutant

TESTS = [
    "tests/property/test_schedule.py",
]

MUTANTS = [
    Mutant("inverted modulo", "core/schedule.py", "since % self.period == 0", "since % self.period != 0"),
    Mutant("first round off by one", "core/schedule.py", "since >= 0", "since > 0"),
    Mutant("first round a period early", "core/schedule.py", "return self.period + self.offset(fragment)", "return self.offset(fragment)"),
]  # fmt: skip
