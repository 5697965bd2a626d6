"""Payloads of 8 and 4 bits, and of the largest values alone."""

from mutants.seed import Mutant

TESTS = [
    "tests/property/test_codec.py",
]
_TWO_BITS = ("tests/property/test_lloyd2.py",)
_SPARSE = ("tests/property/test_top64.py",)
_ORACLE = ("tests/property/test_oracle.py",)

MUTANTS = [
    Mutant("nibbles swapped", "core/block_formats.py", "(both | (both >> 4)).to(torch.uint8)",
           "((both << 4) | (both >> 8)).to(torch.uint8)"),
    Mutant("unit one too small", "core/block_formats.py", ".add_(1 + 127)", ".add_(127)"),
    Mutant("rounded down instead of to nearest", "core/block_formats.py", "((quarters + 1) >> 1)", "(quarters >> 1)"),
    Mutant("the highest level wraps around", "core/block_formats.py", ".floor_().clamp_(max=127)", ".floor_()"),
    Mutant("2-bit codes in the wrong order", "core/block_formats.py", "(four >> 6) | (four >> 12)", "(four >> 4) | (four >> 12)", tests=_TWO_BITS),
    Mutant("lloyd2 never clips", "core/block_formats.py", "for more in (4, 3, 2, 1, 0):", "for more in (4,):", tests=_TWO_BITS),
    Mutant("what fills up a block counts", "core/block_formats.py", "            lost[-1, BLOCK - filled :] = 0\n", "", tests=_TWO_BITS),
    Mutant("a block of zeros gets a level", "core/block_formats.py", "_lloyd_scale(unit) * (unit > 0)", "_lloyd_scale(unit)", tests=_TWO_BITS),
    Mutant("the last of equals is kept", "core/top64.py", "torch.arange(CHUNK - 1, -1, -1,", "torch.arange(CHUNK,", tests=_SPARSE),
    Mutant("top64 is advised with any outer optimizer", "core/codec.py", " with outer=atoll.SGD(lr=1.0);", ";",
           tests=("tests/property/test_codec.py::test_refusals",)),
    Mutant("a kept zero gets a level", "core/top64.py", "counts = within & (bits > 0)", "counts = within", tests=_SPARSE),
    Mutant("a kept value goes to the lower level", "core/top64.py", "2 * whole >= 256 * (low + high)",
           "2 * whole > 257 * (low + high)", tests=_SPARSE),
    Mutant("places end at 256", "core/top64.py", "(_unpacked(high, 2)[:kept].long() << 8)", "0", tests=_SPARSE),
    Mutant("the last chunk keeps as many as a whole one", "core/top64.py", "    within[-1, last:] = False\n", "", tests=_SPARSE),
    Mutant("parts end within a chunk", "core/codec.py", 'CHUNK if self.format == "top64" else BLOCK', "BLOCK", tests=_SPARSE),
    Mutant("what a delta lost never fades", "outer/fragment.py", "delta.add_(self.residual, alpha=self._feedback)",
           "delta.add_(self.residual)", tests=_ORACLE),
    Mutant("what a mean lost never fades", "core/allreduce.py", ", alpha=float(codec.feedback))", ")", tests=_ORACLE),
]  # fmt: skip
