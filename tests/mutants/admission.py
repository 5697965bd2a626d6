"""Workers that join a run under way, and that were cut off and join again."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_admission.py"]
REJOIN = ("tests/unit/test_rejoin.py",)
ADMISSION = "outer/admission.py"

MUTANTS = [
    Mutant(
        "a joiner of a run that ends starts after its last step",
        "outer/admission.py",
        "        newest = self._held = max(self._opened.values())\n",
        "        self._held = max(self._opened.values())\n        newest = self._held + self._schedule.delay\n",
        tests=("tests/unit/test_admission.py::test_a_joiner_of_a_run_that_ends_starts_at_its_last_step",),
    ),
    Mutant("a joiner counts at once", ADMISSION, "- boundary < loop._schedule.period", "- boundary < 0"),
    Mutant(
        "a joiner counts a period late",
        ADMISSION,
        "- boundary < loop._schedule.period",
        "- boundary <= loop._schedule.period",
    ),
    Mutant("a joiner keeps its own parameters", ADMISSION, "    loop._roll_backs.start_anew()\n", ""),
    Mutant(
        "a joiner forgets the rounds in flight",
        ADMISSION,
        "    loop._sending = {}\n",
        "    loop._sending = {}\n    loop._rounds.forget()\n",
    ),
    Mutant("a joiner applies what is not due", ADMISSION, "if round_id.step <= applied:", "if round_id.step <= step:"),
    Mutant(
        "a joiner misses the round after the state",
        "core/schedule.py",
        "range(self.next_send(fragment, after), until + 1,",
        "range(self.next_send(fragment, after + 1), until + 1,",
    ),
    Mutant(
        "a joiner misses the round at the boundary",
        "core/schedule.py",
        "until + 1, self.period)",
        "until, self.period)",
    ),
    Mutant(
        "a joiner opens rounds twice",
        "outer/loop.py",
        "            admission.enter(self, admitted)\n",
        "            admission.enter(self, admitted)\n            self._rounds.reopen()\n",
    ),
    Mutant(
        "a joiner has no momentum",
        "outer/fragment.py",
        "            vector.copy_(vectors[name])\n",
        '            vector.copy_(vectors[name] if name == "anchor" else 0)\n',
    ),
    Mutant(
        "a joiner does not count rounds",
        "outer/fragment.py",
        'self.version, self.step, self.gap = counts["version"], counts["step"], counts["gap"]\n',
        'self.step, self.gap = counts["step"], counts["gap"]\n',
    ),
    Mutant("a donor gives its live state away", "outer/rounds.py", "vector.to(CPU, copy=True)", "vector.to(CPU)"),
    Mutant(
        "a donor says that it is further than it is", "outer/loop.py", "max(0, step - self._schedule.delay)", "step"
    ),
    Mutant("a state of another shape is taken", "outer/fragment.py", "if theirs != mine or", "if"),
    Mutant(
        "the step of the joiner counts as the run's",
        "outer/loop.py",
        "                return  # the inner step before it was not the run's\n",
        "                pass\n",
    ),
    Mutant(
        "work that counted is put back", ADMISSION, "carried=newest >= round_id.step", "carried=False", tests=REJOIN
    ),
    Mutant(
        "work that did not count is given up",
        ADMISSION,
        "carried=newest >= round_id.step",
        "carried=True",
        tests=REJOIN,
    ),
    Mutant(
        "what a followed round tells is ignored",
        ADMISSION,
        "carried=self._loop.link.worker in flight.counted",
        "carried=True",
        tests=REJOIN,
    ),
    Mutant("what was sent is taken for unsent", ADMISSION, "delta, lost=False)", "delta, lost=True)", tests=REJOIN),
    Mutant(
        "unsent work is dropped",
        ADMISSION,
        "replica.window.write(replica.anchor - delta.to(replica.window.device))",
        "pass",
        tests=REJOIN,
    ),
    Mutant("kept work is left out of its round", ADMISSION, "        replica.left_out = False\n", "", tests=REJOIN),
    Mutant(
        "old work is kept", ADMISSION, "if loop.steps - unsent.step > loop._schedule.period:", "if False:", tests=REJOIN
    ),
    Mutant(
        "work a period old is dropped",
        ADMISSION,
        "unsent.step > loop._schedule.period:",
        "unsent.step >= loop._schedule.period:",
        tests=REJOIN,
    ),
    Mutant("a merge drops work that was put back", ADMISSION, "flight.keeps = True", "pass", tests=REJOIN),
    Mutant(
        "work in flight at the boundary is given up",
        ADMISSION,
        "flight.owed = sent.get(round_id)",
        "pass",
        tests=REJOIN,
    ),
    Mutant(
        "a send cut off in the middle counts as a period of training",
        "outer/fragment.py",
        "        if self.merge.begun:\n",
        "        if True:\n",
        tests=REJOIN,
    ),
    Mutant(
        "a refused send is forgotten",
        "outer/rounds.py",
        "            self._flights[round_id] = flight  # even if the link refuses: the payload has been taken off what is "
        "left\n            flight.pending = self.exchange.open(round_id, flight.offer)\n",
        "            flight.pending = self.exchange.open(round_id, flight.offer)\n"
        "            self._flights[round_id] = flight\n",
        tests=REJOIN,
    ),
    Mutant(
        "rounds of before the cut stay in flight",
        "outer/rounds.py",
        "        self._flights = {}\n        self.exchange.mean_residuals",
        "        self.exchange.mean_residuals",
        tests=REJOIN,
    ),
    Mutant(
        "finish() rejoins without an exchange",
        "outer/finish.py",
        "if loop.link.elastic or _has",
        "if _has",
        tests=REJOIN,
    ),
]
