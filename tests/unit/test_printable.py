"""Text from elsewhere never commands a terminal."""

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.errors import AtollError, ConfigError, LinkError, printable
from atoll.runs.events import Fault
from atoll.train.progress.view import Board, view

HOSTILE = "\x1b]0;title\x07\x1b[2J\r\u202eerror\u2066\u200b\x9b31m\x7f\u2028"
SHOWN = r"\x1b]0;title\x07\x1b[2J\r\u202eerror\u2066\u200b\x9b31m\x7f\u2028"


def test_control_characters_are_written_out() -> None:
    assert printable(HOSTILE) == SHOWN
    assert printable("a half: \ud83d") == r"a half: \ud83d"


@pytest.mark.parametrize(
    "text", ["", "plain [red]", "café 日本 🏝 \u00a0", "two\n\tlines", "👩\u200d👧", r"C:\x1b", "\ue0a0"]
)
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text


@given(st.text())
def test_nothing_but_ends_of_lines_and_tabs_is_left_to_obey(text: str) -> None:
    shown = printable(text)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown if character not in "\n\t")
    assert printable(shown) == shown
    shown.encode()  # halves of pairs could not be printed at all


@pytest.mark.parametrize("kind", [AtollError, ConfigError, LinkError])
def test_errors_quote_others_safely(kind: type[AtollError]) -> None:
    """Also where no command of ours prints them: in the traceback of somebody's own loop."""
    assert str(kind(f"worker 1 left: {HOSTILE}")) == f"worker 1 left: {SHOWN}"
    assert str(kind()) == ""


@pytest.mark.parametrize("kind", ["lines", "live"])
def test_faults_of_other_machines_are_shown_safely(kind: str) -> None:
    stream = io.StringIO()
    sink = view(kind, stream)
    sink.write(Fault(step=1, worker=1, what=HOSTILE))
    sink.close()
    board = Board(["one"], kind, stream)
    board.fail("one", HOSTILE)
    board.close()
    shown = stream.getvalue()
    assert SHOWN in shown
    assert not [wrong for wrong in ("\x07", "\u202e", "\x9b", "\x1b]", "\x1b[2J") if wrong in shown]


def test_a_command_that_fails_says_why_safely(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["train", str(tmp_path / f"{HOSTILE}.toml")])
    assert result.exit_code == 2 and SHOWN in result.stderr and not set("\x07\x1b\u202e") & set(result.stderr)
