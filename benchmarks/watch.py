"""What `atoll watch` costs a worker that trains on the same machine, and how fast the page of a long run opens.

    python benchmarks/watch.py speed [--pairs 150] [--block-s 1] [--viewers 10]
    python benchmarks/watch.py open [--events 1000000]

speed: a worker trains on all cores and writes its events; blocks of steps with a server and its viewers alternate with
blocks in which both are stopped (SIGSTOP), so that a busy machine slows both. The figure is the geometric mean of the
ratios of neighbouring blocks with its standard error, with all viewers reading, and with one among them that reads
nothing. Blocks are short, for the speed of a shared machine wanders; each begins with the work that a server which goes
on has left from the time before, so the figure is rather too low than too high.

open: writes a run of two workers with so many events, starts the server, waits until it has read them, and opens the
page in the system's Chromium, at the widths of a desktop and of a phone. The figures are the server's reading time,
the time from the request to a page with its curves and lanes drawn, and the times between frames while it scrolls.
"""

import argparse
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import torch

from atoll.link.local import local
from atoll.runs.events import Jsonl
from atoll.settings import config
from atoll.train import run
from atoll.train.data.batches import Batches, held_out
from atoll.train.trainer import Trainer

VIEWER = """
import selectors, socket, sys
host, port, count, stuck = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
ready = selectors.DefaultSelector()
kept = []
for n in range(count + stuck):
    viewer = socket.socket()
    viewer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096 if n >= count else 2**20)
    viewer.connect((host, port))
    viewer.sendall(b"GET /updates HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n")
    kept.append(viewer)
    if n < count:
        ready.register(viewer, selectors.EVENT_READ)
print("ready", flush=True)
while True:
    for key, _ in ready.select():
        key.fileobj.recv(2**20)
"""
"""A program with some viewers that read, and some that do not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "open"])
    parser.add_argument("--pairs", type=int, default=150, help="pairs of blocks")
    parser.add_argument("--block-s", type=float, default=1.0, help="seconds of a block, at least")
    parser.add_argument("--viewers", type=int, default=10)
    parser.add_argument("--events", type=int, default=1_000_000)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.what == "speed":
            measure_speed(Path(folder), arguments)
        else:
            measure_opening(Path(folder), arguments.events)


@contextmanager
def watching(*what: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts `atoll watch`; yields the process and the address of its page."""
    command = [sys.executable, "-m", "atoll", "watch", *what, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        assert found is not None
        yield process, found[0]
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGINT)
        process.wait(60)
        process.stdout.close()


# ---------------------------------------------------------------------- speed of training


def measure_speed(folder: Path, arguments: argparse.Namespace) -> None:
    trainer = make_trainer(folder)
    train(trainer, 20)  # warm up
    steps = 10
    while seconds(partial(train, trainer, steps)) < arguments.block_s:
        steps *= 2
    print(f"blocks of {steps} steps, {torch.get_num_threads()} threads, an event every 10 steps")
    block = partial(train, trainer, steps)
    for stuck in (0, 1):
        with watching(str(folder / "run")) as (server, url), viewing(url, arguments.viewers, stuck) as viewers:
            ratios, before, total_s = [], cpu_s(server), 0.0
            for pair in range(arguments.pairs):
                first_s = seconds(block) if pair % 2 else stopped(partial(seconds, block), server, viewers)
                second_s = stopped(partial(seconds, block), server, viewers) if pair % 2 else seconds(block)
                alone_s, watched_s = (second_s, first_s) if pair % 2 else (first_s, second_s)
                ratios.append(math.log(alone_s / watched_s))
                total_s += watched_s
            busy = (cpu_s(server) - before) / total_s
        who = f"{arguments.viewers} viewers" + (" and one that reads nothing" if stuck else "")
        error = statistics.stdev(ratios) / len(ratios) ** 0.5
        print(
            f"with {who}: {math.exp(statistics.mean(ratios)):.4f} +- {error:.4f} of the speed without a server", end=""
        )
        low, middle, high = (math.exp(f(ratios)) for f in (min, statistics.median, max))
        print(f" (median {middle:.4f}, {low:.2f} to {high:.2f}); the server takes {busy:.2%} of a core", flush=True)


def make_trainer(folder: Path) -> Trainer:
    settings = config.parse(
        {
            "model": {"preset": "tiny"},
            "data": {"cache": str(folder)},
            "train": {"steps": 10**6, "batch": 2, "sequence": 64, "log_every": 10},
            "sync": {"method": "streaming", "workers": 2, "period": 20},
            "log": {"view": "none"},
        }
    )
    data = run.prepare(settings)
    model, settings = run.start(settings, data)
    assert settings.train.sequence is not None
    batches = Batches(data.train, workers=2, batch=2, sequence=settings.train.sequence, seed=0)
    checks = held_out(data.held_out, sequence=settings.train.sequence, tokens=1024, batch=8)
    trainer = Trainer(settings, model, batches, checks, local(2))
    (folder / "run").mkdir()
    trainer.reporter.sink = Jsonl(folder / "run" / "metrics.jsonl")
    trainer.reporter.write_start(trainer.parameters, model.vocabulary)
    return trainer


def train(trainer: Trainer, steps: int) -> None:
    for _ in range(steps):
        trainer.step()


@contextmanager
def viewing(url: str, count: int, stuck: int) -> Iterator[subprocess.Popen[str]]:
    """Starts a process with so many viewers, which read with the lowest priority: browsers are on other machines."""
    host, _, port = url.removeprefix("http://").strip("/").partition(":")
    command = ["nice", "-n", "19", sys.executable, "-c", VIEWER, host, port, str(count), str(stuck)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def stopped(measure: Callable[[], float], *processes: subprocess.Popen[str]) -> float:
    """Measures while some processes are stopped."""
    for process in processes:
        process.send_signal(signal.SIGSTOP)
    found = measure()
    for process in processes:
        process.send_signal(signal.SIGCONT)
    return found


def seconds(block: Callable[[], None]) -> float:
    began = time.perf_counter()
    block()
    return time.perf_counter() - began


def cpu_s(process: subprocess.Popen[str]) -> float:
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


# ---------------------------------------------------------------------- opening the page


def measure_opening(folder: Path, events: int) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("needs Chromium: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    for worker in range(2):
        write_events(folder / "run" / f"worker-{worker}", worker, events // 2)
    size = sum(file.stat().st_size for file in folder.rglob("metrics.jsonl"))
    with watching(str(folder / "run")) as (server, url), sync_playwright() as playwright:
        began, busy = time.perf_counter(), cpu_s(server)
        while state_of(url) in ("", "reading"):
            time.sleep(0.1)
        print(f"{events:,} events, {size / 1e6:.0f} MB: read in {time.perf_counter() - began:.1f} s", end="")
        print(f" ({cpu_s(server) - busy:.1f} s of a core), {memory_bytes(server) / 1e6:.0f} MB of memory")
        browser = playwright.chromium.launch(executable_path=chromium)
        for width in (1280, 360):
            found = [opened(browser, url, width) for _ in range(5)]
            opening, frames = zip(*found, strict=True)
            print(
                f"{width} px wide: shown after {statistics.median(opening):.2f} s (longest {max(opening):.2f} s)",
                end="",
            )
            late = sorted(ms for times in frames for ms in times)
            print(f"; while scrolling a frame takes {late[len(late) // 2]:.0f} ms, 95 % at most", end="")
            print(f" {late[int(0.95 * len(late))]:.0f} ms")
        browser.close()


def write_events(folder: Path, worker: int, count: int) -> None:
    """Writes a run of streaming with rounds and steps, as one of two workers would."""
    start = {
        "event": "start", "name": "long", "method": "streaming", "workers": 2, "steps": 10**7, "parameters": 10**8,
        "tokens_per_step": 4096, "period": 30, "delay": [5, 5], "codec": "e3m0", "fragments": [5 * 10**6] * 10,
        "payload_bytes": [26 * 10**5] * 10, "vocabulary": 32000, "device": "cuda", "threads": 1, "weights": [1.0, 1.0],
        "worker": worker, "began": time.time() - count,
    }  # fmt: skip
    mine = [worker == n for n in range(2)]
    folder.mkdir(parents=True)
    with (folder / "metrics.jsonl").open("w", encoding="utf-8") as file:
        file.write(json.dumps(start) + "\n")
        for n in range(1, count):
            step, at = 3 * n, float(n)
            noise = ((n * 7919) % 1000) / 1000
            if n % 5:
                event = {
                    "event": "round", "step": step, "fragment": n % 10, "applied": step + 5, "members": [0, 1],
                    "expected": 2, "norm": 1.0 + noise, "cosine": 0.5 + 0.3 * noise, "bytes": 26 * 10**5,
                    "worker": worker, "opened_s": at - 1.7, "done_s": at - 0.1 - 0.5 * noise, "waited_s": 0.2 * noise,
                    "hidden_s": 1.0, "wire_sent": 26 * 10**5, "wire_received": 26 * 10**5,
                }  # fmt: skip
            else:
                totals = {name: [n * 26 * 10**5 * is_mine for is_mine in mine] for name in TOTALS}
                event = {
                    "event": "step", "step": step, "tokens": 8192 * step, "seconds": at, "step_s": 0.3,
                    **totals, "wait_s": [0.08 * n * is_mine for is_mine in mine], "hidden_s": [at, at],
                    "loss": [2 + 5 / (1 + n / 1e4) + noise if is_mine else None for is_mine in mine], "lr": 1e-3,
                    "grad_norm": [1.0 if is_mine else None for is_mine in mine], "tokens_per_s": 24576.0 + 1000 * noise,
                    "participants": 2,
                }  # fmt: skip
            file.write(json.dumps(event, separators=(",", ":")) + "\n")


TOTALS = ("bytes_sent", "bytes_received", "wire_sent", "wire_received")


def state_of(url: str) -> str:
    """Returns the state of the run by its metrics."""
    with suppress(OSError), urlopen(f"{url}metrics", timeout=30) as answer:
        found = re.search(r'state="([a-z ]+)"} 1\.0', answer.read().decode())
        return found[1] if found else ""
    return ""


def opened(browser: Any, url: str, width: int) -> tuple[float, list[float]]:
    """Opens the page; returns the seconds until it is drawn, and the milliseconds of frames while it scrolls."""
    context = browser.new_context(viewport={"width": width, "height": 800})
    page = context.new_page()
    began = time.perf_counter()
    page.goto(url)
    page.wait_for_function(
        """() => {
            const curves = [...document.querySelectorAll("svg path.curve")];
            return document.querySelector("h1")?.innerText.includes("long")
                && curves.some((curve) => curve.getBBox().width > 50)
                && document.querySelectorAll(".chip").length === 2;
        }"""
    )
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    opening_s = time.perf_counter() - began
    frames = page.evaluate(
        """() => new Promise((done) => {
            const times = [];
            let before = performance.now();
            const frame = (now) => {
                times.push(now - before);
                before = now;
                window.scrollBy(0, 30);
                if (times.length < 120) requestAnimationFrame(frame); else done(times.slice(1));
            };
            requestAnimationFrame(frame);
        })"""
    )
    context.close()
    return opening_s, frames


def memory_bytes(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


if __name__ == "__main__":
    main()
