"""The page of a real elastic run, served by `atoll watch`: it follows, and says that a worker is lost and is back."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_fleet import running, when

Visit = Callable[..., Any]
CHIP = "([worker, kind]) => document.querySelectorAll('.chip')[worker]?.classList.contains(kind)"


@contextmanager
def watching(*folders: Path) -> Iterator[str]:
    """Starts `atoll watch` on a free port, and yields the address of the page."""
    command = [sys.executable, "-m", "atoll", "watch", *map(str, folders), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


def test_the_page_follows_a_worker_that_is_killed_and_comes_back(tmp_path: Path, visit: Visit) -> None:
    """How soon its lane says so is measured by benchmarks/watch.py: machines that test have other things to do."""
    with running(tmp_path, workers=3, steps=100_000) as run:
        workers = [run.start(worker) for worker in range(3)]
        when(lambda: run.step(0) >= 12)
        with watching(run.folder / "runs" / "run") as url:
            page = visit(url)
            page.wait_for_function(CHIP, arg=[1, "training"])
            workers[1].kill()
            page.wait_for_function(CHIP, arg=[1, "away"])
            workers[1] = run.start(1)
            page.wait_for_function(CHIP, arg=[1, "training"], timeout=90_000)
            step = page.locator(".progress").inner_text()
            page.wait_for_function("(before) => document.querySelector('.progress').innerText !== before", arg=step)
            assert "worker 1" in page.get_by_role("region", name="Faults", exact=True).inner_text()
            page.locator("summary", has_text="members").click()
            assert "joined" in page.get_by_role("region", name="members and their waits").inner_text()
            page.goto("about:blank")  # before the server goes, which the page would tell the console
