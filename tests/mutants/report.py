"""The frozen page of `atoll report`: its words, tables, modelled times and detail."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_report.py"]

_FROZEN = "tests/browser/test_frozen.py"
_WAITS = ("tests/unit/test_worker_folders.py::test_a_worker_waits_for_one_round_after_the_other",)

MUTANTS = [
    Mutant("the best of many are not told", "report/words.py", "if len(others) <= _MOST_SENTENCES:", "if others:"),
    Mutant("an unfinished run ends", "report/words.py", '"ends at" if row.record.finished else begun', '"ends at"'),
    Mutant("other vocabularies are not noted", "report/words.py", "len({r.start.vocabulary for r in records}) > 1", "False"),
    Mutant("settings that agree differ", "report/facts.py", "if len(set(values)) > 1}", "if values}"),
    Mutant("every payload reached its round", "report/facts.py", "sum(worker in r.members for r in rounds)", "len(rounds)"),
    Mutant("all members are there at the end", "report/facts.py", "{len(newest.members)} of", "{record.start.workers} of"),
    Mutant("data-parallel is drawn beside itself", "report/table.py", "if would and not any(", "if would or any("),
    Mutant("data-parallel would have sent one gradient", "report/record.py", "return self.step * Codec", "return Codec"),
    Mutant("workers of one delay have a lane each", "report/lanes.py", "named = workers if", "named = workers[:1] if"),
    Mutant("waits lie over each other", "report/lanes.py", "            free_s = wait.end_s\n", "", tests=_WAITS),
    Mutant("a page has no single rounds", "watch/report_page.py", '    sections["now"] = _detail(run, most)\n', ""),
    Mutant("a page has all single rounds", "watch/report_page.py", "return len(flights) + waits > most or", "return"),
    Mutant("twins have one name on the page", "watch/report_page.py", '    sections["run"]["name"] = record.name\n', ""),
    Mutant("a large file is read in part", "watch/live_run.py", "    while source.share < 1:\n", "    while False:\n"),
    Mutant("modelled times are of the wrong step", "watch/report_page.py", "[clock(row.job, link, step) for step in steps]",
           "[clock(row.job, link, step - 1) for step in steps]"),
    Mutant("bars of bytes have no scale", "watch/page/comparison.js", "100 * sent_bytes / most", "100",
           tests=(f"{_FROZEN}::test_runs_are_compared_to_scale",)),
    Mutant("a slow run hides the others", "watch/page/modelled.js", "Math.max(...ends) >= TIMES_LONGER", "Math.max(...ends) < 0",
           tests=(f"{_FROZEN}::test_runs_are_compared_to_scale",)),
    Mutant("what is common is said for each run", "watch/page/comparison.js", "const isCommon = isSeveral &&", "const isCommon = false &&",
           tests=(f"{_FROZEN}::test_runs_are_compared_to_scale",)),
]  # fmt: skip
