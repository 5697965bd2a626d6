"""Shows the way through the code: files, functions and calls from file to file.

    python tools/walk.py delta      # one Streaming fragment, from outer.step() to the wire and back to the model
    python tools/walk.py run        # `atoll train RUN.toml` of a few steps, from the command line to the export

Functions are those of this package that Python calls meanwhile, in all threads; what runs at import is left out. Of a
delta's way, `*` marks the functions that hold its values themselves: the delta, its payload, or a mean of such.
"""

import argparse
import multiprocessing
import os
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import atoll
from atoll.link.net.event_loop import event_loop

PACKAGE = str(Path(atoll.__file__).parent) + os.sep


class Walk:
    """Notes calls into the package."""

    def __init__(self, held_bytes: int = 0) -> None:
        self.functions: dict[tuple[str, str], bool] = {}
        """File and qualified name, in the order of their first call; whether the function held the values."""
        self._held_bytes = held_bytes  # a buffer of at least this size holds them
        self.crossings: Counter[tuple[str, str]] = Counter()
        """From one file to another, how often."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what is called inside, in this thread and in new ones."""
        threading.setprofile_all_threads(self._called) if hasattr(threading, "setprofile_all_threads") else None
        threading.setprofile(self._called)
        event_loop().run(_profile(self._called))
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)
            event_loop().run(_profile(None))
            threading.setprofile(None)

    def _called(self, frame: FrameType, event: str, _: Any) -> None:
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        name = frame.f_code.co_qualname
        if name.endswith(("<module>", "<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>", "<lambda>")):
            return
        callers = [code for code in _codes(frame.f_back) if code.co_filename.startswith(PACKAGE)]
        if any(code.co_name == "<module>" for code in callers):  # a class body, or what a module calls at its import
            return
        here = frame.f_code.co_filename.removeprefix(PACKAGE)
        if event == "return":
            if self._held_bytes and any(bytes_of(value) >= self._held_bytes for value in frame.f_locals.values()):
                self.functions[here, name] = True
            return
        self.functions.setdefault((here, name), False)
        if callers and (there := callers[0].co_filename.removeprefix(PACKAGE)) != here:
            self.crossings[there, here] += 1

    @property
    def files(self) -> dict[str, list[str]]:
        """Functions by file, both in the order of their first call."""
        found: dict[str, list[str]] = {}
        for (file, name), held in self.functions.items():
            found.setdefault(file, []).append(f"{name}*" if held else name)
        return found

    def tell(self) -> None:
        """Print the chain and what it comes to."""
        calls = sum(self.crossings.values())
        for file, names in self.files.items():
            into = sum(count for (_, there), count in self.crossings.items() if there == file)
            print(f"{file} ({into} calls from other files)\n    {', '.join(names)}")
        print(f"{len(self.files)} files, {len(self.functions)} functions, {calls} calls from file to file")
        if self._held_bytes:
            held = [file for (file, _), marked in self.functions.items() if marked]
            print(f"{len(set(held))} files and {len(held)} functions of them hold the values")


def bytes_of(value: object) -> int:
    """Return the size of a buffer, or of the largest in a collection; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, bytes | bytearray | memoryview):
        return memoryview(value).nbytes
    if isinstance(value, list | tuple):
        return max(map(bytes_of, value), default=0)
    return 0


async def _profile(called: Any) -> None:
    """Note calls in the thread of the links' event loop, which runs already."""
    sys.setprofile(called)


def _codes(frame: FrameType | None) -> Iterator[CodeType]:
    """Yield the code of a frame and of those that called it."""
    while frame:
        yield frame.f_code
        frame = frame.f_back


def _worker(number: int, address: str, walk: Walk | None = None) -> None:
    """Train a little with one fragment due in the middle; the walk notes its send and its apply."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 300)
    sync = atoll.Streaming(period=4, delay=1, fragments=_whole())
    with atoll.connect(address, worker=number, workers=2, keys="none") as link, ExitStack() as noting:
        outer = atoll.OuterLoop(model, sync, link)
        optimizer = torch.optim.AdamW(model.parameters())
        for step in range(1, 10):
            optimizer.zero_grad()
            model(torch.randn(8, 300)).square().mean().backward()
            optimizer.step()
            if step == 8 and walk is not None:
                noting.enter_context(walk.noted())
            elif step == 8:
                time.sleep(0.5)  # so that what it sends arrives while calls are noted
            outer.step()
        noting.close()
        outer.finish()


def _whole() -> Any:
    from atoll.core.fragments import Whole

    return Whole()


def delta() -> Walk:
    """Between two processes: one is noted, the other only there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    other = multiprocessing.get_context("spawn").Process(target=_worker, args=(1, address), daemon=True)
    other.start()
    walk = Walk(held_bytes=20_000)  # its 4-bit payload has 45 kB
    _worker(0, address, walk)
    other.join()
    return walk


def run() -> Walk:
    """The command itself, in this process, of a run file as `atoll init` writes it."""
    walk = Walk()
    settings = ["data.source=text.txt", "train.steps=12", "sync.period=4", "log.view=lines"]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        text = "".join(f"line {n} of a text that is long enough to be split\n\n" for n in range(5000))
        Path("text.txt").write_text(text, encoding="utf-8")
        _command("init")
        with walk.noted():
            _command("train", "run.toml", *(part for setting in settings for part in ("--set", setting)))
    return walk


def _command(*arguments: str) -> None:
    """Run `atoll` with these arguments."""
    from atoll.cli.main import main

    sys.argv = ["atoll", *arguments]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["delta", "run"])
    ({"delta": delta, "run": run}[parser.parse_args().what])().tell()
