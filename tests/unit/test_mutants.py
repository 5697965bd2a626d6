"""Seeded bugs must fit the source, or they are lost without anyone noticing; `make mutants` seeds them."""

from collections import Counter

from mutants.seed import ROOT, catalogues

KNOWN = [(name, mutant) for name, mutants in catalogues() for mutant in mutants]


def test_every_seeded_bug_fits_the_source() -> None:
    misfits = [f"{name}: {mutant.name}: {why}" for name, mutant in KNOWN for why in mutant.problems()]
    assert not misfits, "\n".join(misfits)


def test_every_seeded_bug_changes_something() -> None:
    assert not [mutant.name for _, mutant in KNOWN for _, old, new in mutant.edits if old == new]


def test_there_are_enough_of_them_with_names_of_their_own() -> None:
    assert len(KNOWN) >= 120
    assert [name for name, times in Counter(mutant.name for _, mutant in KNOWN).items() if times > 1] == []


def test_the_tests_that_must_turn_red_are_there() -> None:
    for test in sorted({test for _, mutant in KNOWN for test in mutant.tests}):
        file, _, name = test.partition("::")
        assert (ROOT / file).is_file(), test
        assert not name or f" {name.partition('[')[0]}" in (ROOT / file).read_text(), test
