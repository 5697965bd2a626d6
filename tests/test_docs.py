"""The examples in README and docs run as they stand."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
]


@pytest.mark.parametrize("block", BLOCKS)
def test_example_runs(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "example", "exec"), {"__name__": "__main__"})


def test_the_first_block_of_the_readme_is_a_training_loop_that_learns(capsys: pytest.CaptureFixture[str]) -> None:
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    assert first is not None
    namespace: dict[str, object] = {}
    exec(compile(first.group(1), "README", "exec"), namespace)
    losses = [float(x) for x in capsys.readouterr().out.strip(" []\n").split(",")]
    assert len(losses) == 4
    assert max(losses) < 1.0, "the target has variance 8"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
