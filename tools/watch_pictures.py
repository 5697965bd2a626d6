"""Makes the pictures of `atoll watch` in docs/images from a run that trains meanwhile.

    python tools/watch_pictures.py [RUN]

Trains an elastic run of four workers on this machine for two minutes, kills one of them on the way, and photographs its
page with the system's Chromium as a desktop and a phone show it. With RUN, the folder of a run, it photographs that.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
RUN = """
name = "four-sites"
seed = 3
threads = 1
model = {preset = "tiny", layers = 2, width = 64, heads = 2, head_width = 32, feedforward = 256, context = 64}
train = {steps = 1200, batch = 8, lr = 8e-3, warmup = 100, eval_tokens = 16384, eval_every = 50, log_every = 5}
sync = {workers = 4, period = 20, delay = 5, fragments = "blocks:1", alpha = 0.25, outer_lr = 0.5, outer_momentum = 0.7}
link = {elastic = true, silent_s = 20.0}
"""
PHOTOS = [("desktop", 1280, 1420, 1.0, "light"), ("phone", 360, 780, 1.5, "dark")]
"""Name, width and height in CSS pixels, pixels of the picture for each, and colours."""
PATIENCE_S = 300.0


def main() -> None:
    """Photograph the run that is given, or one of its own."""
    if len(sys.argv) > 1:
        with watched(Path(sys.argv[1])) as url:
            photograph(url)
        return
    with tempfile.TemporaryDirectory() as scratch, training(Path(scratch)) as run, watched(run) as url:
        photograph(url, run)


@contextmanager
def training(folder: Path) -> Iterator[Path]:
    """Trains a run, and yields its folder."""
    (folder / "run.toml").write_text(RUN, encoding="utf-8")
    command = [sys.executable, "-m", "atoll", "launch", "run.toml", "--restart", "--out", str(folder / "runs")]
    log = (folder / "log.txt").open("w", encoding="utf-8")
    with log, subprocess.Popen(command, cwd=folder, stdout=log, stderr=log) as process:
        try:
            wait_until(lambda: (folder / "runs" / "four-sites" / "worker-0" / "metrics.jsonl").exists())
            yield folder / "runs" / "four-sites"
        finally:
            process.send_signal(signal.SIGINT)


@contextmanager
def watched(run: Path) -> Iterator[str]:
    """Serves the page of a run, and yields its address."""
    command = [sys.executable, "-m", "atoll", "watch", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        try:
            yield re.findall(r"http://\S+/", process.stdout.readline())[0]
        finally:
            process.send_signal(signal.SIGINT)


def photograph(url: str, run: Path | None = None) -> None:
    """Saves the pictures; of a run that trains, once a worker was lost and is back."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("Chromium is not installed: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium)
        if run is not None:
            lose_a_worker(browser, url, run)
        for name, width, height, scale, scheme in PHOTOS:
            page = browser.new_page(
                viewport={"width": width, "height": height},
                device_scale_factor=scale,
                color_scheme="dark" if scheme == "dark" else "light",
                reduced_motion="reduce",
            )
            page.goto(url)
            page.wait_for_selector(".curve", state="attached")
            page.wait_for_timeout(1500)
            path = IMAGES / f"watch-{name}.png"
            page.screenshot(path=path)
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB")
            page.close()
        browser.close()


def lose_a_worker(browser: Browser, url: str, run: Path) -> None:
    """Kills worker 2 in the middle of the run, and waits until it trains again."""
    page = browser.new_page()
    page.set_default_timeout(1000 * PATIENCE_S)
    page.goto(url)
    step = "Number(document.querySelector('.progress').innerText.replace(',', '').match(/\\d+/))"
    page.wait_for_function(f"() => {step} > 400")
    os.kill(process_of(run, 2), signal.SIGKILL)
    page.wait_for_selector(".chip.away")
    page.wait_for_function("() => document.querySelectorAll('.chip.training').length === 4")
    page.wait_for_function(f"() => {step} > 900")
    page.close()


def process_of(run: Path, worker: int) -> int:
    """Returns the process that trains a worker: the only one that has its events open."""
    log = run / f"worker-{worker}" / "metrics.jsonl"
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if handle.resolve() == log.resolve():
                return int(handle.parts[2])
        except OSError:
            continue
    raise SystemExit(f"no process writes {log}")


def wait_until(happens: Callable[[], bool]) -> None:
    """Waits for a condition."""
    until = time.monotonic() + PATIENCE_S
    while not happens():
        if time.monotonic() > until:
            sys.exit("the run did not begin")
        time.sleep(0.1)


if __name__ == "__main__":
    main()
