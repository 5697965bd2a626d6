"""Starts the system's Chromium, and watches every page for errors and for requests to other places."""

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "browser" in item.path.parent.name:
            item.add_marker(pytest.mark.processes)
            item.add_marker(pytest.mark.xdist_group("browser"))


@pytest.fixture(scope="module")  # while it runs, so does an event loop, and no other test may start one
def chromium() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens an address; errors on the page and requests to other places fail the test."""
    contexts: list[Any] = []
    problems: list[str] = []

    def visit(
        url: str,
        *,
        width: int = 1280,
        dark: bool = False,
        still: bool = True,
        touch: bool = False,
        refused: bool = False,
    ) -> Any:
        context = chromium.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if dark else "light",
            reduced_motion="reduce" if still else "no-preference",
            has_touch=touch,
        )
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.allowed_errors = refused  # set also by tests that take the server away
        origin = url.partition("?")[0]
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on("console", lambda said: None if page.allowed_errors else problems.append(f"{said.type}: {said.text}"))
        page.on("request", lambda asked: problems.extend(_elsewhere(asked.url, origin)))
        page.goto(url)
        page.wait_for_selector("main")
        return page

    yield visit
    for context in contexts:
        context.close()
    assert problems == []


def _elsewhere(url: str, origin: str) -> list[str]:
    return [] if url.startswith((origin, "data:")) else [f"request to {url}"]


def serious_faults(page: Any) -> list[tuple[str, str]]:
    """Returns what axe-core finds serious or critical: a rule, and the first element that breaks it."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    found = axe.run(page).response["violations"]
    return [(one["id"], one["nodes"][0]["html"][:120]) for one in found if one["impact"] in ("serious", "critical")]
