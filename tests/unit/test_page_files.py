"""The files of the page, without a browser: no markup from text, the report's colours, and one frozen file."""

import base64
import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest

from atoll.report.canvas import DARK, LIGHT, Palette
from atoll.watch.frozen import frozen_page

PAGE = Path(str(files("atoll.watch"))) / "page"
MODULES = sorted(PAGE.glob("*.js"))


def test_no_module_turns_text_into_markup_or_code() -> None:
    forbidden = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|srcdoc|cssText"
        r"|setAttribute\(\"style|https?://(?!www\.w3\.org/2000/svg)"
    )
    assert MODULES
    found = [(file.name, text) for file in MODULES for text in forbidden.findall(file.read_text(encoding="utf-8"))]
    assert found == []


def test_the_page_loads_its_own_files_only() -> None:
    index = (PAGE / "index.html").read_text(encoding="utf-8")
    assert re.findall(r'(?:src|href)="([^"]*)"', index) == ["data:,", "style.css", "app.js"]
    assert "style=" not in index and "<script>" not in index
    assert "@import" not in (style := (PAGE / "style.css").read_text(encoding="utf-8")) and "url(" not in style


def test_files_are_short_enough_to_read() -> None:
    texts = {file.name: file.read_text(encoding="utf-8").splitlines() for file in PAGE.iterdir()}
    assert [name for name, lines in texts.items() if len(lines) > 400] == []
    assert [(name, line) for name, lines in texts.items() for line in lines if len(line) > 120] == []


@pytest.mark.parametrize(("palette", "block"), [(LIGHT, 0), (DARK, 1)])
def test_colours_are_those_of_the_report(palette: Palette, block: int) -> None:
    style = (PAGE / "style.css").read_text(encoding="utf-8")
    root = re.findall(r":root \{(.*?)\}", style, re.DOTALL)[block]
    found = dict(re.findall(r"--([\w-]+): (#\w+);", root))
    assert {name: found[name] for name in ("paper", "ink", "muted")} == {
        "paper": palette.paper,
        "ink": palette.ink,
        "muted": palette.muted,
    }
    assert tuple(found[f"run-{n}"] for n in range(8)) == palette.series


def test_a_frozen_page_holds_all_modules_and_its_policy_allows_them_alone() -> None:
    content = {"runs": [], "title": "</script><script>alert(1)</script><!--"}
    page = frozen_page(content, title="<b>")
    assert "<title>&lt;b&gt; - atoll</title>" in page
    assert "import {" not in page and "export " not in page
    assert page.count("</script>") == 2
    data = re.search(r'id="frozen">(.*?)</script>', page, re.DOTALL)
    assert data is not None and json.loads(data[1]) == content
    for tag in ("script", "style"):
        inline = re.search(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        assert inline is not None
        digest = base64.b64encode(hashlib.sha256(inline[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in page
    assert "unsafe" not in page.partition("</head>")[0]


def test_a_frozen_page_refuses_numbers_that_are_not_finite() -> None:
    with pytest.raises(ValueError, match="Out of range"):
        frozen_page({"runs": [{"run": {"step": float("nan")}}]}, title="")
