"""Measures how soon the page of a run says that a worker is gone, and that it is back.

    python benchmarks/watch_lanes.py [--times 7] [--by-registry]

Three workers of an elastic run train on this machine as fast as they can, with keys and a registry, and `atoll watch`
serves the page, from the run's folder or, with --by-registry, by the registry as from another machine. One worker is
killed (kill -9) and started again, several times. "away" is the time from the kill until its name is marked in
the system's Chromium; "back" that from its first step until the mark is gone. Workers, server and browser share the
cores of one machine, so a run between machines is shown sooner.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from atoll.link.net.run_keys import throw_away_folder
from atoll.runs.events import Step, read
from watch import watching

WORKERS, VICTIM = 3, 1
RUN = """
device = "cpu"
threads = 1
model = {{preset = "tiny"}}
data = {{cache = "{folder}/tokens"}}
train = {{steps = 1000000, batch = 2, sequence = 64, log_every = 5, save_every = 50, eval_every = 200}}
sync = {{method = "streaming", workers = 3, period = 20, delay = 5}}
link = {{elastic = true, registry = "{address}", keys = "{keys}/worker-{{worker}}", listen = "127.0.0.1:0"}}
"""
MARKED = "([worker, kind]) => document.querySelectorAll('.chip')[worker]?.classList.contains(kind)"
PATIENCE_S = 120.0


class Fleet:
    """Runs a registry and the workers of a run as processes.

    Args:
        folder: Where all of it lies.
        keys: A folder with the keys of all seats.
        stack: Ends the processes.
    """

    def __init__(self, folder: Path, keys: Path, stack: ExitStack) -> None:
        self.run, self._folder, self._stack = folder / "runs" / "run", folder, stack
        registry = self.spawn(
            "registry", str(folder / "registry"), "--listen", "127.0.0.1:0", "--keys", str(keys / "registry")
        )
        assert registry.stdout is not None
        self.address = registry.stdout.readline().split("listens on ")[1].split()[0].rstrip(".,:;")
        (folder / "run.toml").write_text(RUN.format(folder=folder, address=self.address, keys=keys))
        self.workers = {worker: self.start(worker) for worker in range(WORKERS)}

    def spawn(self, *words: str) -> subprocess.Popen[str]:
        """Starts a command of atoll."""
        log = self._stack.enter_context((self._folder / "log").open("a"))
        pipe = subprocess.PIPE if words[0] == "registry" else log
        command = [sys.executable, "-m", "atoll", *words]
        process = subprocess.Popen(
            command, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=pipe, stderr=log, text=True
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def start(self, worker: int) -> subprocess.Popen[str]:
        """Starts a worker."""
        return self.spawn("train", "run.toml", "--worker", str(worker), "--view", "lines")

    def kill(self, worker: int) -> None:
        """Ends a worker without a word."""
        self.workers[worker].kill()
        self.workers[worker].wait()

    def steps(self, worker: int) -> int:
        """Returns how many events of steps a worker has written, in all of its lives."""
        file = self.run / f"worker-{worker}" / "metrics.jsonl"
        return sum(isinstance(event, Step) for event in read(file)) if file.exists() else 0

    def wait_for(self, happens: Callable[[], bool]) -> None:
        """Waits until something happens.

        Raises:
            RuntimeError: It does not within two minutes.
        """
        deadline = time.monotonic() + PATIENCE_S
        while not happens():
            if time.monotonic() > deadline:
                raise RuntimeError(f"nothing has happened for {PATIENCE_S:g} s:\n{(self._folder / 'log').read_text()}")
            time.sleep(0.02)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=7)
    parser.add_argument("--by-registry", action="store_true", help="watch by the registry, as from another machine")
    arguments = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    os.environ["OMP_NUM_THREADS"] = "1"
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        keys = stack.enter_context(throw_away_folder(WORKERS))
        fleet = Fleet(folder, keys, stack)
        fleet.wait_for(lambda: all(fleet.steps(worker) > 2 for worker in range(WORKERS)))
        watched = ["--registry", fleet.address, "--keys", str(keys / "observer")]
        _, url = stack.enter_context(watching(*(watched if arguments.by_registry else [str(fleet.run)])))
        playwright = stack.enter_context(sync_playwright())
        page = playwright.chromium.launch(executable_path=chromium).new_page()
        page.goto(url)
        page.wait_for_function(MARKED, arg=[VICTIM, "training"])
        found: dict[str, list[float]] = {"away": [], "back": []}
        for _ in range(arguments.times):
            began, known = time.monotonic(), fleet.steps(VICTIM)
            fleet.kill(VICTIM)
            page.wait_for_function(MARKED, arg=[VICTIM, "away"])
            found["away"].append(time.monotonic() - began)
            fleet.workers[VICTIM] = fleet.start(VICTIM)
            fleet.wait_for(lambda: fleet.steps(VICTIM) > known)  # noqa: B023
            began = time.monotonic()
            page.wait_for_function(MARKED, arg=[VICTIM, "training"])
            found["back"].append(time.monotonic() - began)
            time.sleep(3.0)
        page.goto("about:blank")
        for what, delays in found.items():
            print(f"{what}: {statistics.median(delays):.1f} s; {', '.join(f'{delay:.1f}' for delay in delays)}")


if __name__ == "__main__":
    main()
