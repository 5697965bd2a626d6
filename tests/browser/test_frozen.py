"""A frozen page: one file that is opened from a disk and asks for nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.watch.frozen import frozen_page
from browser.conftest import serious_faults
from page_content import sections

Visit = Callable[..., Any]
SUMMARY = {"columns": ["run", "held-out loss"], "rows": [["slow", "3.210"], ["quick", "3.300"]]}


def opened(visit: Visit, folder: Path, content: dict[str, Any], **options: Any) -> Any:
    path = folder / "report.html"
    path.write_text(frozen_page(content, title="Runs"), encoding="utf-8")
    page = visit(path.as_uri(), **options)
    page.wait_for_selector(".picture .curve", state="attached")
    return page


def test_one_run(visit: Visit, tmp_path: Path) -> None:
    content = {"runs": [sections(state="finished")], "title": "A night on four sites", "claims": ["It went well."]}
    page = opened(visit, tmp_path, content)
    assert page.locator("h1").inner_text() == "A night on four sites"
    assert page.locator(".claims li").all_inner_texts() == ["It went well."]
    assert page.get_by_role("heading", name="The whole run").is_visible()
    assert not page.get_by_role("heading", name="The last minute").is_visible()
    assert not page.locator(".connection").count()
    lanes = page.locator(".zooms")
    lanes.focus()
    lanes.press("+")
    page.wait_for_function(
        "() => document.querySelector('.lanes:not([hidden]) .hint').innerText.includes('double-click')"
    )


@pytest.mark.parametrize("width", [360, 1280])
def test_several_runs(visit: Visit, tmp_path: Path, width: int) -> None:
    runs = [sections(name="slow"), sections(workers=2, seconds=3600.0, name="quick")]
    page = opened(visit, tmp_path, {"runs": runs, "title": "", "summary": SUMMARY, "claims": []}, width=width)
    assert page.locator("h1").inner_text() == "2 runs"
    assert page.get_by_role("table").first.locator("tbody th").all_inner_texts() == ["slow", "quick"]
    assert page.locator(".picture .curve").count() == 2
    assert page.locator(".legend .name").all_inner_texts() == ["slow", "quick"]
    folds = page.locator("details.one-run")
    assert folds.count() == 2 and page.locator(".run").count() == 0
    folds.nth(1).locator("summary").first.click()
    page.wait_for_selector(".run .picture .curve")
    assert page.locator(".run .name").first.inner_text() == "quick"
    assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    assert serious_faults(page) == []
