"""Bugs in what is left out for its size, and in means that are rounded again."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_outliers.py"]
_MEANS = ("tests/unit/test_means.py",)
_MUON = ("tests/unit/test_muon.py",)

MUTANTS = [
    Mutant(
        "rounding of a worker that did not train is what is expected of the others",
        "core/outliers.py",
        "norm=norm if norm > floor else 0.0",
        "norm=norm",
        tests=(
            "tests/property/test_oracle.py::"
            "test_rounding_of_a_worker_that_did_not_train_makes_no_outlier_of_the_others",
        ),
    ),
    Mutant("the largest of the others is expected", "core/outliers.py", "others[(len(others) - 1) // 2]", "others[-1]"),
    Mutant("a past does not count", "core/outliers.py", "max(usual, others", "max(0.0, others"),
    Mutant("the others do not count", "core/outliers.py", "expected = max(usual, others[(len(others) - 1) // 2])",
           "expected = usual"),
    Mutant("a first delta is judged as strictly", "core/outliers.py", "(ratio if usual else ratio**3)", "ratio"),
    Mutant("whatever all do together counts", "core/outliers.py", "exploded = 0 < ratio**3 * usual < norm",
           "exploded = False"),
    Mutant("outliers of the last exchange are not counted", "outer/rounds.py",
           "        self.exchange.counters.count_outliers(len(completed.outliers), own=outlier)\n", ""),
    Mutant("small fragments are not judged", "outer/exchange.py", "return ratio**3 if ratio is not None and small else ratio",
           "return None if small else ratio"),
    Mutant("an outlier becomes usual", "outer/rounds.py", "            norms.left_out()\n",
           "            norms.counted(flight.offer.settled().member.size.norm)\n"),
    Mutant("a lasting change keeps a worker out", "core/outliers.py", "            self._last.clear()\n",
           "            pass\n"),
    Mutant("an outlier trains on from where it is", "outer/roll_back.py",
           "self._roll_back_less([fragment for fragment, holds in outliers.items() if holds])", "pass"),
    Mutant("a runaway trains on from where it is", "outer/roll_back.py", "self._roll_back_less(runaways, sending)", "pass"),
    Mutant("moments outlive a roll-back", "outer/roll_back.py", "        self._optimizers.reset()\n", ""),
    Mutant("one of two optimizers forgets", "outer/roll_back.py", "for optimizer in self._found:",
           "for optimizer in list(self._found)[:1]:", tests=_MUON),
    Mutant("one of two optimizers is noticed", "outer/roll_back.py", "if optimizer in self._found or optimizer in self._others:",
           "if self._found or optimizer in self._others:", tests=_MUON),
    Mutant("an optimizer of some parameters is nobody's", "outer/roll_back.py", "trains = any(id(p) in ours for group",
           "trains = len(ours) == sum(id(p) in ours for group", tests=_MUON),
    Mutant("every optimizer is reset", "outer/roll_back.py", "(self._found if trains else self._others)", "self._found",
           ("outer/roll_back.py", "for parameter in () if model is None else model.parameters():",
            "for parameter in list(optimizer.state):")),
    Mutant("what is usual is not resumed", "outer/fragment.py", 'self.norms.load_state_dict(state.get("norms", ()))', "pass"),
    Mutant("outliers are not counted", "outer/stats.py", "self.outliers_seen += seen", "pass"),
    Mutant("what rounding a mean lost is forgotten", "core/allreduce.py", "            mean.add_(lost.to(mean.device), alpha=float(codec.feedback))\n",
           "            pass\n", tests=_MEANS),
    Mutant("a mean is rounded like a delta", "core/codec.py",
           'if self.format in ("int4", "e3m0", "e2m1") else self', "if False else self", tests=_MEANS),
    Mutant("losses of a mean pile up", "core/allreduce.py", "            if order < newest:\n                del",
           "            if False:\n                del", tests=_MEANS),
    Mutant("a part's loss is added to another cut", "core/allreduce.py", "if dealt == members else None",
           "if True else None", tests=_MEANS),
    Mutant("lloyd4 never clips", "core/block_formats.py", "torch.where(losses[1] < losses[0], smaller, whole)", "whole",
           tests=_MEANS),
    Mutant("a table in the default dtype", "core/block_formats.py", "torch.tensor(levels, dtype=torch.float32, device=device)",
           "torch.tensor(levels, device=device)", tests=("tests/unit/test_defaults.py",)),
    Mutant("noise in the default dtype", "core/block_formats.py", "generator=generator, dtype=torch.float32, device=CPU",
           "generator=generator, device=CPU", tests=("tests/unit/test_defaults.py",)),
]  # fmt: skip
