"""Bugs that once went through without a word."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_silent_faults.py"]
EDGES = ("tests/unit/test_loop_edges.py",)

MUTANTS = [
    Mutant(
        "a refused finish leaves deltas behind",
        "outer/loop.py",
        "        self._sending = {}  # of an operation that was refused\n",
        "",
        tests=EDGES,
    ),
    Mutant(
        "frozen parts restored with a checkpoint are compared",
        "outer/loop.py",
        "        self._watch.loads.frozen = False\n",
        "",
        tests=EDGES,
    ),
    Mutant(
        "Adagrad starts from nothing after a roll-back",
        "outer/roll_back.py",
        '.fill_(optimizer.defaults["initial_accumulator_value"])',
        ".zero_()",
        tests=EDGES,
    ),
    Mutant(
        "a run without a step of the loop is not warned about",
        "outer/finish.py",
        "    if moved and",
        "    if False and",
        tests=EDGES,
    ),
    Mutant(
        "a guard takes any switch",
        "outer/roll_back.py",
        "if not isinstance(self.leave_out_nonfinite, bool):",
        "if False:",
        tests=EDGES,
    ),
    Mutant("frozen parameters not compared", "outer/loop.py", ", **self._watch.base}\n", "}\n"),
    Mutant("frozen parameters loaded later not compared", "outer/watch.py", "if self.loads.frozen:", "if False:"),
    Mutant(
        "averages of each worker compared on resume", "outer/loop.py", '            "base": self._watch.base,\n', ""
    ),
    Mutant(
        "top64 has momentum without a word",
        "outer/agreement.py",
        'getattr(sync.outer, "momentum", 0) > 0',
        "False",
        tests=("tests/unit/test_loop.py::TestModels",),
    ),
    Mutant(
        "frozen parameters compared by layout only", "outer/agreement.py", "checksum {checksum(p):08x}", "checksum 0"
    ),
    Mutant(
        "a base model not compared on resume",
        "outer/agreement.py",
        'describe_differences(state.get("frozen", here["frozen"]), here["frozen"])',
        "None",
    ),
    Mutant(
        "names of compiled copies differ", "outer/agreement.py", "[(plain_name(name), described)", "[(name, described)"
    ),
    Mutant(
        "groups hide all but their first",
        "outer/agreement.py",
        "for name, described in group)",
        "for name, described in group[:1])",
    ),
    Mutant(
        "checksum of the first eight bytes",
        "core/flat.py",
        "fingerprint(raw.view(torch.int64))",
        "fingerprint(raw.view(torch.int64)[:1])",
    ),
    Mutant(
        "checksum without the last bytes",
        "core/flat.py",
        "raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])",
        "raw = raw[: raw.numel() // 8 * 8].clone()",
    ),
    Mutant("quantised parts not looked into", "core/flat.py", "for name in inside]", "for name in inside[:1]]"),
    Mutant(
        "loads of a part unnoticed",
        "outer/watch.py",
        "for path, module in model.named_modules():",
        'for path, module in [("", model)]:',
    ),
    Mutant("what is put back counts as loaded", "outer/watch.py", "self._changed.pop(name, None)", "pass"),
    Mutant(
        "a load inside anchor() counts",
        "outer/watch.py",
        "self.loads.watching = not lent",
        "self.__dict__.setdefault('_l', lent)",
    ),
    Mutant(
        "what was loaded is remembered for ever",
        "outer/watch.py",
        "        self.forget()\n\n    def forget",
        "\n    def forget",
    ),
    Mutant(
        "a copy of the model reports to the loop",
        "outer/watch.py",
        "        return type(self)()\n",
        "        return self\n",
    ),
    Mutant("a state without its model", "outer/agreement.py", "if a != b]", "if False]"),
    Mutant("weight not compared on resume", "outer/agreement.py", ') != here["weight"]:', ") is None:"),
    Mutant(
        "masters never found out", "outer/watch.py", "return down_from_after <", "return down_from_after < 0 and 1 <"
    ),
    Mutant(
        "a newton step taken for masters",
        "outer/watch.py",
        "return down_from_after < max(STRAIGHT, down_from_before - 0.01)",
        "return True",
    ),
    Mutant(
        "small merges judged",
        "outer/watch.py",
        "FAR = 3.0",
        "FAR = 0.0",
        also=("outer/watch.py", "return down_from_after < max(STRAIGHT, down_from_before - 0.01)", "return True"),
    ),
    Mutant("every merge sampled", "outer/watch.py", "self._left -= 1", "pass"),
    Mutant(
        "merged never told", "outer/watch.py", "self.merged |= self._merges.merging(step)", "self._merges.merging(step)"
    ),
    Mutant(
        "a group of all workers allowed",
        "link/net/torchrun.py",
        "or distributed.get_world_size() == 1:",
        "or distributed.get_world_size() > 0:",
    ),
    Mutant("a group of one refused", "link/net/torchrun.py", " or distributed.get_world_size() == 1:", ":"),
    Mutant("rolled back for ever", "outer/roll_back.py", "if self.in_a_row > 1 and", "if False and"),
    Mutant(
        "one good round does not count",
        "outer/loop.py",
        "            self._roll_backs.in_a_row = 0\n        self._rounds.send",
        "            pass\n        self._rounds.send",
    ),
    Mutant(
        "the optimizer is not reset", "outer/roll_back.py", "            self._on_roll_back()\n", "            pass\n"
    ),
    Mutant("the last error is not told", "link/net/fixed_link.py", 'getattr(sys, "last_value", None)', "None"),
    Mutant(
        "an anchor is as old as its newest fragment",
        "outer/loop.py",
        "return min((replica.step",
        "return max((replica.step",
    ),
    Mutant("an anchor is as old as its apply", "outer/fragment.py", "completed.round_id.step\n", "self.step + 1\n"),
    Mutant("the age of an anchor is not saved", "outer/fragment.py", 'state.get("step", 0)', "0"),
]
