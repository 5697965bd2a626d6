"""Runs of every preset, codec and link end with the bits that they have always ended with."""

import json

import pytest

from digests import GOLDEN, cases

CASES = cases()
KNOWN: dict[str, str] = json.loads(GOLDEN.read_text())


def test_every_case_is_recorded() -> None:
    assert set(CASES) == set(KNOWN)


@pytest.mark.thorough_after(35)
@pytest.mark.parametrize("name", CASES)
def test_a_run_ends_with_the_recorded_bits(name: str) -> None:
    assert CASES[name]() == KNOWN[name]
