"""A frozen page: one file that is opened from a disk and asks for nothing."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.plan.line import Line
from atoll.watch.frozen import frozen_page
from atoll.watch.report_page import write
from browser.conftest import serious_faults
from made_up_runs import MadeUpRun, save_workers
from page_content import report, sections

Visit = Callable[..., Any]
SIDEWAYS = "() => document.documentElement.scrollWidth - document.documentElement.clientWidth"


def section(page: Any, title: str) -> Any:
    return page.locator("section.part").filter(has=page.get_by_role("heading", name=title, exact=True))


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


def test_the_words_of_an_ended_run(visit: Visit, tmp_path: Path) -> None:
    run = sections(state="interrupted", tokens_per_s=20_000.0, utilisation=0.5)
    fault = {"at_s": 7000.0, "step": 1200, "worker": 3, "kind": "lost", "words": "silent"}
    run["faults"] = {"count": 60, "latest": [fault] * 60}
    page = opened(visit, tmp_path, {"runs": [run]})
    for fold in page.locator("details.folded").all():
        fold.locator("summary").first.click()
    text = page.locator("main").inner_text()
    for wanted in ("rate at the end", "Rate at the end", "4 workers took part.", "60 in all.", "the lowest of the run"):
        assert wanted in text
    assert "tokens a second, mean" in text
    speed = "20 k tokens a second on average, computing for 50 % of the time; learning rate 0.0003 at the end."
    assert speed in text.replace("\xa0", " ")
    for live in ("rate now", "Rate now", "so far.", "of 4 train"):
        assert live not in text
    faults = section(page, "Faults")
    assert faults.locator(".scroll").count() == 0
    assert faults.locator("ul").evaluate("(list) => list.clientHeight") > 1000


def test_a_wide_table_hints_at_its_edge_that_it_scrolls(visit: Visit, tmp_path: Path) -> None:
    content = report([sections(name="slow"), sections(name="quick")])
    command = "atoll train run.toml --set sync.method=streaming --resume"
    content["summary"]["columns"] += [f"column {n}" for n in range(12)]
    content["summary"]["rows"] = [[*row, *["1.234 MB"] * 12] for row in content["summary"]["rows"]]
    content["tables"][0]["rows"].append(["command", command, f"{command} now"])
    page = opened(visit, tmp_path, content, width=390)
    box = section(page, "Numbers").locator(".scroll")
    box.locator("table").evaluate("(table) => { table.style.visibility = 'hidden'; }")  # the shade alone is left
    box.scroll_into_view_if_needed()
    whole = box.bounding_box()
    for scrolled, edge in ((0, whole["x"] + whole["width"] - 6), (9999, whole["x"])):
        clip = {"x": edge, "y": whole["y"], "width": 6, "height": 40}
        box.evaluate("(box, place) => { box.scrollLeft = place; box.style.background = ''; }", scrolled)
        shaded = page.screenshot(clip=clip)
        box.evaluate("(box) => { box.style.background = 'none'; }")
        assert page.screenshot(clip=clip) != shaded
    assert page.evaluate(SIDEWAYS) == 0
    cell = section(page, "Facts").locator("td").last
    assert cell.inner_text() == f"{command} now"
    broken = """(cell) => [...cell.querySelectorAll('.word')].filter((word) => {
        const range = document.createRange();
        range.selectNodeContents(word);
        return new Set([...range.getClientRects()].map((box) => box.top)).size > 1;
    }).map((word) => word.textContent)"""
    assert cell.evaluate(broken) == []
    assert cell.bounding_box()["height"] > 40, "it has several lines"


@pytest.mark.parametrize(("width", "dark"), [(360, True), (1280, False)])
def test_several_runs(visit: Visit, tmp_path: Path, width: int, dark: bool) -> None:
    runs = [sections(name="slow"), sections(workers=2, seconds=3600.0, name="quick")]
    page = opened(visit, tmp_path, report(runs), width=width, dark=dark)
    assert page.locator("h1").inner_text() == "Runs side by side"
    assert page.locator(".lead").inner_text() == "The reference ends at a held-out loss of 3.210."
    assert page.get_by_role("note").all_inner_texts() == ["They have not trained on the same number of tokens."]
    numbers = section(page, "Numbers").get_by_role("rowheader").all_inner_texts()
    assert [name.split("\n") for name in numbers] == [["slow", "reference"], ["quick"]]
    loss = section(page, "Loss of all runs")
    assert loss.locator(".curve").count() == 4 and loss.locator(".legend .name").all_inner_texts() == [
        "slow",
        "quick",
        "training",
    ]
    loss.get_by_role("button", name="slow").click()
    assert loss.locator(".curve").count() == 3
    folds = page.locator("details.one-run")
    assert folds.count() == 2 and page.locator(".run").count() == 0
    folds.nth(1).locator("summary").first.click()
    page.wait_for_selector(".run .picture .curve")
    assert page.locator(".run .name").first.inner_text() == "quick"
    assert page.evaluate(SIDEWAYS) == 0
    assert serious_faults(page) == []


def test_runs_are_compared_to_scale(visit: Visit, tmp_path: Path) -> None:
    page = opened(visit, tmp_path, report([sections(name="slow"), sections(name="quick")]))
    whole, part = (bar.bounding_box()["width"] for bar in section(page, "Bytes sent per worker").locator("i").all())
    assert whole / part == pytest.approx(40, rel=0.1)
    times = section(page, "Time at 100 Mbit/s, modelled")
    assert [text.replace("\u00a0", " ") for text in times.locator(".tick:not([dy])").all_text_contents()] == [
        "1 min",
        "10 min",
        "1 h",
    ]
    assert times.locator(".modelled li p").all_inner_texts()[1].startswith("quick, workers 0, 2")
    assert times.locator(".solid.idle").first.get_attribute("d") == "M200.00 0H600.00V12H200.00Z"
    facts = section(page, "Facts").get_by_role("row")
    assert facts.nth(1).get_by_role("cell").all_inner_texts() == ["e3m0"], "what all have in common is said once"
    assert facts.nth(2).get_by_role("cell").all_inner_texts() == ["0", "1"]


def test_the_report_of_a_real_folder_zooms_to_single_rounds(visit: Visit, tmp_path: Path) -> None:
    run = save_workers(tmp_path / "far", MadeUpRun().events())
    (path,) = write([run], tmp_path / "report.html", link=Line(1e6))
    page = visit(path.as_uri())
    page.wait_for_selector(".picture .curve", state="attached")
    assert page.locator("h1").inner_text() == "Run far"
    assert "data-parallel" in section(page, "Traffic").inner_text()
    lanes = page.locator(".zooms")
    lanes.scroll_into_view_if_needed()
    lanes.focus()
    for _ in range(3):
        lanes.press("+")
    box = lanes.bounding_box()
    for place in range(100, 1100, 10):  # rounds are on their way most of the time
        page.mouse.move(box["x"] + place, box["y"] + 10)
        if "round of step" in page.locator(".zooms .readout").inner_text():
            break
    else:
        pytest.fail("no single round is shown")
    assert page.evaluate(SIDEWAYS) == 0
    assert serious_faults(page) == []
