"""Lost rounds, joiners, roll-backs, the end of a run."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_loop.py",
    "tests/unit/test_left_out.py",
    "tests/unit/test_laws.py",
]

MUTANTS = [
    Mutant("a lost round merges anyway", "rounds.py",
           "lost = missed and not flight.forgotten", "lost = False"),
    Mutant("who was away when a round was sent does not merge it", "rounds.py",
           "missed = flight.offer is not None and all(", "missed = all("),
    Mutant("what was lost while a worker was away is waited for", "rounds.py",
           "lost = missed and not flight.forgotten", "lost = missed and not outlier"),
    Mutant("what was blended away is sent again at the end", "rounds.py", "flight.held *= keep", "pass"),
    Mutant("a lost eager delta is forgotten", "replica.py", "if lost and lost.offer else None", "if False else None"),
    Mutant("a joiner keeps its random parameters", "state.py",
           "        self.newest = None\n        self.window.write(self.anchor)\n", "        self.newest = None\n"),
    Mutant("a joiner keeps its old momentum", "state.py", "for vector in (self.residual, self.own):",
           "for vector in (self.residual,):"),
    Mutant("residual kept when the payload is lost", "state.py", "self.residual.add_(lost.restore)", "pass"),
    Mutant("residual undone under eager too", "state.py", "undoes = self.residual - lost if self.own is None else None",
           "undoes = self.residual - lost", ("replica.py", "        local = torch.empty_like(state.anchor)\n",
            "        local = torch.empty_like(state.anchor)\n        if lost and lost.restore is not None:\n"
            "            state.residual.add_(lost.restore)\n")),
    Mutant("finish sends twice what is in flight", "replica.py", "alpha=lost - held)", "alpha=lost - 0.0)"),
    Mutant("finish forgets what was lost last", "loop.py", "return recent_gap or not", "return not"),
]  # fmt: skip
