"""Names, samples, errors and settings are shown as text, whatever they hold."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from atoll.watch.frozen import frozen_page
from page_content import Sections, sections
from page_server import PageServer

SCRIPTS = [
    "<script>window.hacked = true</script>",
    "</script><script>window.hacked = true</script>",
    "<!--<script>window.hacked = true</script>",
    "<img src=x onerror='window.hacked = true'>",
    "<svg onload='window.hacked = true'>",
    "\"><a href='javascript:window.hacked = true'>x</a>",
    "javascript:window.hacked = true",
    "'; window.hacked = true; //",
    "${window.hacked = true}",
    "__proto__",
    "constructor",
    "\u202egnp.\u2066exe\u2069 \u200f",
    "\x00\x07\x1b[31m\x9b\ufeff",
    "\ud800 \udfff",
    "Z\u0351\u036b\u0343\u036a\u0302\u036b" * 50,
    "\u2028\u2029\r\n\n\n\ndata: {}\n\n",
    "W" * 10_000,
    "\U0001f4a3" * 10_000,
]


def hostile(seed: int) -> Sections:
    """Returns sections whose every text is one of a stranger."""
    choose = random.Random(seed)

    def bad(value: Any) -> Any:
        if isinstance(value, str):
            return "".join(choose.choice(SCRIPTS) for _ in range(choose.randint(1, 3)))
        if isinstance(value, list):
            return [bad(one) for one in value]
        return {key: bad(one) for key, one in value.items()} if isinstance(value, dict) else value

    made: Sections = bad(sections())
    keys = choose.sample(SCRIPTS, 4)
    made["loss"]["workers"] = dict(zip(keys, made["loss"]["workers"].values(), strict=True))
    return made


def harmless(page: Any) -> None:
    """Asserts that the page holds no element that text has made."""
    page.wait_for_selector(".state .mark.waits, .report .part")
    for fold in page.locator("details").all():
        fold.evaluate("(fold) => { fold.open = true; }")
    assert page.evaluate("() => window.hacked") is None
    assert page.evaluate("() => Object.prototype.mean") is None
    made = "img, iframe, object, embed, form, base, [onload], [onerror], [href^='javascript:'], body svg:not(.picture)"
    assert page.locator(made).count() == 0
    assert page.evaluate("() => [...document.querySelectorAll('[style]')].every((one) => !one.matches('a'))")
    assert page.evaluate("() => document.documentElement.scrollWidth - document.documentElement.clientWidth") == 0
    seen = page.evaluate("() => document.body.innerText")
    assert not any(mark in seen for mark in "\u202e\u2066\u200f\x1b\x07\ufeff")
    assert len(seen) < 200_000
    assert len(page.title()) < 200


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.thorough_after(4)
def test_live(visit: Callable[..., Any], seed: int, width: int) -> None:
    with PageServer(hostile(seed)) as server:
        page = visit(server.url, width=width)
        harmless(page)
        assert page.locator("script").count() == 1


@pytest.mark.parametrize("seed", range(2))
def test_frozen(visit: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    runs = [hostile(seed), hostile(seed + 1)]
    content = {
        "runs": runs,
        "title": SCRIPTS[1],
        "summary": {"columns": SCRIPTS[:4], "rows": [SCRIPTS[:4], SCRIPTS[4:8]]},
        "claims": SCRIPTS,
    }
    path = tmp_path / "report.html"
    path.write_text(frozen_page(content, title=SCRIPTS[1]), encoding="utf-8")
    page = visit(path.as_uri())
    harmless(page)
    assert page.locator("script").count() == 2
