"""Kernels, as Triton's interpreter runs them."""

from mutants.seed import Mutant

TESTS = [
    "tests/unit/test_kernels.py",
]
_DELTA, _MEAN, _PRODUCTS, _MANY = (
    (f"tests/unit/test_kernels.py::{test}",)
    for test in (
        "test_a_delta_is_encoded_as_if_it_had_been_written_down",
        "test_payloads_are_decoded_into_their_mean",
        "test_inner_products_are_those_of_what_was_decoded",
        "test_inner_products_of_many_members_and_values",
    )
)
_SPARSE = ("tests/unit/test_kernels_top64.py",)
TOP64 = "kernels/top64.py"

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
    Mutant("a kernel takes one half of a set of members twice", "kernels/products.py", "else upper - 1)", "else lower)",
           tests=_MANY),
    Mutant("a kernel multiplies the first share of values again and again", "kernels/products.py",
           "at = share * (SHARE // BLOCK)", "at = share * 0", tests=_MANY),
    Mutant("a kernel's product of two members is the square of one", "kernels/products.py",
           "_product(tiles[one], tiles[other], FORMAT", "_product(tiles[one], tiles[one], FORMAT", tests=_PRODUCTS),
    Mutant("a kernel loses the sign of a level of zero", "kernels/codec.py", " | (signs & -0x80000000)", "",
           ("kernels/codec.py", "return (level.to(tl.float32)", "return (tl.where(signs < 0, -level, level).to(tl.float32)"), tests=_MEAN),
    Mutant("a kernel's lloyd2 never clips", "kernels/codec.py", "in tl.static_range(5)", "in tl.static_range(1)", tests=_DELTA),
    Mutant("a kernel's lloyd2 counts what lies beyond the end", "kernels/codec.py",
           "tl.where(there[:, None], lost * lost, 0)", "lost * lost", tests=_DELTA),
    Mutant("a kernel multiplies lloyd2 beyond the end", "kernels/codec.py", "(unit > 0) & (at < numel)", "unit > 0",
           tests=_PRODUCTS),
    Mutant("a kernel packs pairs of lloyd2 the other way round", "kernels/codec.py", "(both | (later << 4))",
           "(later | (both << 4))", tests=_DELTA),
    Mutant("a kernel's top64 keeps the last of equals", TOP64, "(before >> 16) <= missing", "(before >> 16) > tl.sum(equal.to(tl.int32), 0) - missing", tests=_SPARSE),
    Mutant("a kernel's top64 keeps too many of the last chunk", TOP64, "tl.minimum(numel - chunk * CHUNK, CHUNK)",
           "(0 * numel + CHUNK)", tests=_SPARSE),
    Mutant("a kernel's top64 stops its search too soon", TOP64, "(high - low > 1)", "(high - low > 4096)", tests=_SPARSE),
    Mutant("a kernel's top64 gives zeros a level", TOP64, " & (magnitude > 0)", "", tests=_SPARSE),
    Mutant("a kernel's top64 leaves a gap where few values count", TOP64, "number += tl.where(entry > largest, kept - many, 0)",
           "number += 0", tests=_SPARSE),
    Mutant("a kernel's top64 has one level", TOP64, "tl.store(heads + 1, lower.", "tl.store(heads + 1, higher.", tests=_SPARSE),
    Mutant("a kernel's top64 has no NaN", TOP64, "tl.atomic_max(worst, peak)", "pass", tests=_SPARSE),
    Mutant("a kernel's top64 adds to the last chunk's end", TOP64, "there & (chunk * CHUNK + place < numel)", "there",
           tests=_SPARSE),
    Mutant("a kernel's top64 weighs all members like the first", TOP64, "tl.load(shares + member)", "tl.load(shares)", tests=_SPARSE),
    Mutant("a kernel's top64 keeps a member's negative zero", TOP64, "tl.load(mean + first, first_inside, 0.0) + 0.0",
           "tl.load(mean + first, first_inside, 0.0)", tests=_SPARSE),
    Mutant("a kernel's top64 never has a negative zero", TOP64, "tl.store(mean + first, value, first_inside)",
           "tl.store(mean + first, value + 0.0, first_inside)", tests=_SPARSE),
    Mutant("a kernel multiplies an entry of top64 that is there twice", TOP64, "(number == 0) | (place != before)", "number >= 0", tests=_SPARSE),
    Mutant("a kernel's refusal of top64 is sent", "kernels/fragment.py",
           "None if coding.is_bad(self._codec, int(worst)) else payload", "payload", tests=_SPARSE),
]  # fmt: skip
