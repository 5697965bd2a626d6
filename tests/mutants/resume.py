"""What a saved outer loop forgets."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_resume.py",
]

MUTANTS = [
    Mutant("velocity not saved", "outer/fragment.py", "            slot.copy_(state[\"slots\"][name])", "            pass"),
    Mutant("step inside the period forgotten", "outer/loop.py", "        self.steps = state[\"steps\"]\n", ""),
    Mutant("rounds in flight not saved", "outer/rounds.py", "for saved in state[\"flights\"]:", "for saved in []:"),
    Mutant("own momentum not saved", "outer/fragment.py", "\"own\": copy_of(self.own),",
           "\"own\": None if self.own is None else torch.zeros_like(self.own),"),
]  # fmt: skip
