"""Slips that once went through without a word."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_slips.py"]
MUTANTS = [
    Mutant("frozen parameters not compared", "loop.py", ", **self._frozen}\n", "}\n"),
    Mutant("frozen parameters loaded later not compared", "loop.py", "if self._loads.frozen:", "if False:"),
    Mutant("averages of each worker compared on resume", "loop.py", '            "base": self._frozen,\n', ""),
    Mutant("frozen parameters compared by layout only", "agreement.py", "checksum {checksum(p):08x}", "checksum 0"),
    Mutant(
        "a base model not compared on resume",
        "agreement.py",
        'difference(state.get("frozen", here["frozen"]), here["frozen"])',
        "None",
    ),
    Mutant("names of compiled copies differ", "agreement.py", "(plain_name(name), parameter)", "(name, parameter)"),
    Mutant(
        "groups hide all but their first",
        "agreement.py",
        "for (name, _), words in zip(group, what, strict=True)",
        "for (name, _), words in zip(group[:1], what[:1], strict=True)",
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
        "loaded.py",
        "for path, module in model.named_modules():",
        'for path, module in [("", model)]:',
    ),
    Mutant("what is put back counts as loaded", "loaded.py", "self._changed.pop(name, None)", "pass"),
    Mutant(
        "a load inside anchor() counts",
        "loop.py",
        "self._lent, self._loads.watching = True, False",
        "self._lent = True",
    ),
    Mutant(
        "what was loaded is remembered for ever",
        "loaded.py",
        "        self.forget()\n\n    def forget",
        "\n    def forget",
    ),
    Mutant(
        "a copy of the model reports to the loop", "loaded.py", "        return type(self)()\n", "        return self\n"
    ),
    Mutant("a state without its model", "agreement.py", "if a != b]", "if False]"),
    Mutant("weight not compared on resume", "agreement.py", ') != here["weight"]:', ") is None:"),
    Mutant("a message's weight is believed", "link/mail.py", "brought.member.weight != self._weight:", "False:"),
    Mutant("masters never found out", "undone.py", "return down_from_after <", "return down_from_after < 0 and 1 <"),
    Mutant(
        "a newton step taken for masters",
        "undone.py",
        "return down_from_after < max(STRAIGHT, down_from_before - 0.01)",
        "return True",
    ),
    Mutant(
        "small merges judged",
        "undone.py",
        "FAR = 3.0",
        "FAR = 0.0",
        also=("undone.py", "return down_from_after < max(STRAIGHT, down_from_before - 0.01)", "return True"),
    ),
    Mutant("every merge sampled", "undone.py", "self._left -= 1", "pass"),
    Mutant("merged never told", "loop.py", "self._merged |= self._watch.merging(step)", "self._watch.merging(step)"),
    Mutant(
        "a group of all workers allowed",
        "link/torchrun.py",
        "or distributed.get_world_size() == 1:",
        "or distributed.get_world_size() > 0:",
    ),
    Mutant("a group of one refused", "link/torchrun.py", " or distributed.get_world_size() == 1:", ":"),
    Mutant("rolled back for ever", "loop.py", "if self._in_a_row > 1 and", "if False and"),
    Mutant(
        "one good round does not count",
        "loop.py",
        "            self._in_a_row = 0\n        self._rounds.send",
        "            pass\n        self._rounds.send",
    ),
    Mutant("the optimizer is not reset", "loop.py", "            self._on_roll_back()\n", "            pass\n"),
    Mutant("the last error is not told", "link/dist.py", 'getattr(sys, "last_value", None)', "None"),
    Mutant("an anchor is as old as its newest fragment", "loop.py", "return min((state.step", "return max((state.step"),
    Mutant("an anchor is as old as its apply", "replica.py", "completed.round_id.step\n", "state.step + 1\n"),
    Mutant("the age of an anchor is not saved", "state.py", 'state.get("step", 0)', "0"),
]
