"""Payloads of 8 and 4 bits."""

from mutants.seed import Mutant

TESTS = [
    "tests/property/test_codec.py",
]

MUTANTS = [
    Mutant("nibbles swapped", "core/codec.py", "(both | (both >> 4)).to(torch.uint8)",
           "((both << 4) | (both >> 8)).to(torch.uint8)"),
    Mutant("unit one too small", "core/codec.py", ".add_(1 + 127)", ".add_(127)"),
    Mutant("rounded down instead of to nearest", "core/codec.py", "((quarters + 1) >> 1)", "(quarters >> 1)"),
    Mutant("the highest level wraps around", "core/codec.py", ".floor_().clamp_(max=127)", ".floor_()"),
]  # fmt: skip
