"""Kernels, as Triton's interpreter runs them."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_kernels.py",
]

MUTANTS = [
    Mutant("a kernel's unit is one too small", "kernels/codec.py", "((peak - LIMIT) >> 23) + 128",
           "((peak - LIMIT) >> 23) + 127"),
    Mutant("a kernel packs halves the other way round", "kernels/codec.py", "even | (odd << 4)", "odd | (even << 4)"),
    Mutant("a kernel weighs all members like the first", "kernels/codec.py", "tl.load(shares + member)",
           "tl.load(shares)"),
    Mutant("a kernel's NaN goes unnoticed", "kernels/codec.py", "tl.atomic_max(worst, tl.max(peak, 0))", "pass"),
    Mutant("a kernel's Nesterov is heavy ball", "kernels/outer.py",
           'move = momentum * speed + move if KIND == "nesterov" else speed', "move = speed"),
    Mutant("a kernel blends by the wrong share", "kernels/outer.py", "keep * tl.load(local, inside, 0.0)",
           "take * tl.load(local, inside, 0.0)"),
    Mutant("a table of parameters that have moved", "kernels/live.py",
           "return [t.data_ptr() for t in tensors] == [t.data_ptr() for t in self.tensors]", "return True"),
    Mutant("a kernel multiplies without units", "kernels/products.py", "+ (1023 - 2 * 127)", "* 0 + 1023"),
]  # fmt: skip
