"""The way of a delta in docs/design.md is the one that `tools/walk.py delta` finds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.processes
def test_the_page_has_the_files_on_a_deltas_way_and_marks_those_that_hold_its_values() -> None:
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    table = dict(re.findall(r"^\| `([\w/]+\.py)` \| (\*?) ?\|", page, re.MULTILINE))
    command = [sys.executable, str(ROOT / "tools" / "walk.py"), "delta"]
    printed = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True).stdout
    found = dict(re.findall(r"^(\S+\.py) \(.*\)\n +(.+)$", printed, re.MULTILINE))
    assert table == {file: "*" if "*" in functions else "" for file, functions in found.items()}
