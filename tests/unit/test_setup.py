"""What the set-up and the source may not take for granted of a machine."""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for folder in ("src", "tools") for path in (ROOT / folder).rglob("*.py"))


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}


def test_every_constraint_is_an_exact_version() -> None:
    assert len(pins()) > 50 and all(pins().values())


def test_what_torch_pins_is_not_pinned_again() -> None:
    """Two pins of one package part ways when torch is upgraded, or differ between its wheels for CPUs and GPUs."""
    needed = [Requirement(text) for text in requires("torch") or ()]
    pinned = {canonicalize_name(one.name) for one in needed if any(pin.operator == "==" for pin in one.specifier)}
    cuda = {name for name in pins() if name.startswith(("nvidia-", "cuda-", "triton", "pytorch-triton"))}
    assert not (pinned | cuda) & set(pins())


def without_encoding(tree: ast.AST) -> Iterator[int]:
    """Lines that read or write text in whatever encoding the machine's locale has."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        given = {keyword.arg for keyword in call.keywords}
        modes = [arg.value for arg in call.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
        if name in ("read_text", "write_text"):
            at = 0 if name == "read_text" else 1
            wrong = "encoding" not in given and len(call.args) <= at
        elif name in ("open", "fdopen"):
            opens = name == "fdopen" or isinstance(call.func, ast.Name) or bool(modes) or not call.args
            wrong = opens and "encoding" not in given and not any("b" in mode for mode in modes[-1:])
        else:
            texts = [keyword.value for keyword in call.keywords if keyword.arg in ("text", "universal_newlines")]
            wrong = "encoding" not in given and any(
                isinstance(one, ast.Constant) and one.value is True for one in texts
            )
        if wrong:
            yield call.lineno


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("path.read_text()", True),
        ("path.write_text(words)", True),
        ("open(path)", True),
        ("path.open()", True),
        ("path.open('w')", True),
        ("run(line, text=True)", True),
        ("path.read_text('utf-8')", False),
        ("path.write_text(words, encoding='utf-8')", False),
        ("path.open('rb')", False),
        ("open(path, 'rb')", False),
        ("link.open(round_id, sent)", False),
    ],
)
def test_the_next_test_finds_what_it_looks_for(line: str, found: bool) -> None:
    assert bool(list(without_encoding(ast.parse(line)))) == found


def test_no_file_is_read_or_written_in_the_encoding_of_the_locale() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in SOURCES
        for line in without_encoding(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert len(SOURCES) > 100 and not wrong


def test_a_terminal_that_lacks_a_character_ends_no_command(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "atoll", "init", "日.toml"]
    done = subprocess.run(line, cwd=tmp_path, env=os.environ | {"PYTHONIOENCODING": "latin-1"}, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"") and done.stdout.startswith(b"wrote ?.toml")
