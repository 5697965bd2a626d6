"""Lost rounds, joiners, roll-backs, the end of a run."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_loop.py",
    "tests/unit/test_left_out.py",
    "tests/unit/test_laws.py",
]

MUTANTS = [
    Mutant("a lost round merges anyway", "outer/rounds.py",
           "lost = missed and not flight.forgotten", "lost = False"),
    Mutant("who was away when a round was sent does not merge it", "outer/rounds.py",
           "missed = flight.offer is not None and all(", "missed = all("),
    Mutant("what was lost while a worker was away is waited for", "outer/rounds.py",
           "lost = missed and not flight.forgotten", "lost = missed and not outlier"),
    Mutant("what was blended away is sent again at the end", "outer/rounds.py", "flight.held *= alpha", "pass"),
    Mutant("a lost eager delta is forgotten", "outer/rounds.py", "if lost and lost.offer else None", "if False else None"),
    Mutant("a joiner keeps its random parameters", "outer/fragment.py",
           "        self.merge.forget()\n        self.window.write(self.anchor)\n", "        self.merge.forget()\n"),
    Mutant("a joiner keeps its old momentum", "outer/fragment.py", "        self.own.zero_()\n", ""),
    Mutant("residual kept when the payload is lost", "outer/fragment.py", "self.residual.add_(undo)", "pass"),
    Mutant("residual undone under eager too", "outer/fragment.py", "undo = self.residual - lost if self.merge.own is None else None",
           "undo = self.residual - lost", ("outer/rounds.py", "        payload = lost.offer.payload if lost and lost.offer else None\n",
            "        payload = lost.offer.payload if lost and lost.offer else None\n        if lost and lost.undo is not None:\n"
            "            replica.residual.add_(lost.undo)\n")),
    Mutant("finish sends twice what is in flight", "outer/rounds.py", "alpha=lost - held)", "alpha=lost - 0.0)"),
    Mutant("finish forgets what was lost last", "outer/finish.py", "return recent_gap or not", "return not"),
]  # fmt: skip
