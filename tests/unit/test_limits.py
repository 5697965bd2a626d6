"""Files, functions, classes, parameter lists and docstrings that are too large are found, and no others."""

from pathlib import Path

import pytest

import limits

OFFENDERS = {
    "400 lines": ("pass\n" * 401, "401 lines"),
    "60 lines": ("def long():\n" + "    pass\n" * 60, "long: 61 lines without its docstring"),
    "7 parameters": ("def many(a, b, c, d, /, e, f, *, g, h): ...\n", "many: 8 parameters"),
    "12 attributes": (
        "class Large:\n    def __init__(self):\n" + "".join(f"        self.a{n} = {n}\n" for n in range(13)),
        "Large: 13 attributes",
    ),
    "20 words": (f'"""Says {"more " * 20}. And more."""\n', "the docstring's first sentence has 22 words"),
}


@pytest.mark.parametrize("limit", OFFENDERS)
def test_an_offender_is_found(limit: str, tmp_path: Path) -> None:
    source, expected = OFFENDERS[limit]
    (tmp_path / "made_up.py").write_text(source)
    (found,) = limits.problems(tmp_path / "made_up.py")
    assert found.endswith(expected)


def test_what_is_just_small_enough_is_not(tmp_path: Path) -> None:
    large = "class Large:\n    def __init__(self, a, b, c, d, e, f, g):\n"
    large += "".join(f"        self.a{n} = {n}\n" for n in range(12))
    long = "def long():\n" + f'    """Says {"more " * 18}now."""\n' + "    pass\n" * 59
    (tmp_path / "made_up.py").write_text(large + long)
    assert not list(limits.problems(tmp_path / "made_up.py"))


def test_the_command_line_may_have_as_many_options_as_it_needs(tmp_path: Path) -> None:
    (tmp_path / "made_up.py").write_text(OFFENDERS["7 parameters"][0] + OFFENDERS["60 lines"][0])
    assert not list(limits.problems(tmp_path / "made_up.py", in_command_line=True))
