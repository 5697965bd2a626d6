"""How much is tested: `make test` takes a part of the cases and examples, ATOLL_TESTS=thorough takes them all.

And Hypothesis without deadlines, for the machines that run this are shared, and a disk that is soon full.
"""

import gc
import os
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import Phase, settings

from example_counts import THOROUGH

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports Triton: kernels run on the CPU then

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as for whatever a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("shared machines", deadline=None, max_examples=100 if THOROUGH else 20)
settings.register_profile(
    "any example", deadline=None, max_examples=100, phases=(Phase.explicit, Phase.generate)
)  # not the smallest
settings.load_profile("shared machines")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases beyond the first few, where a test says how few, to `make thorough`."""
    seen: Counter[str] = Counter()
    for item in items:
        if (mark := item.get_closest_marker("thorough_after")) is not None:
            name = item.nodeid.partition("[")[0]
            seen[name] += 1
            if seen[name] > mark.args[0]:
                item.add_marker(pytest.mark.thorough)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mounts a file system of a given size, such as "1m"; skips where that is not allowed."""
    mounted: list[Path] = []

    def mount(size: str) -> Path:
        folder = tmp_path / "disk"
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        try:
            subprocess.run(command, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as fault:
            pytest.skip(f"cannot mount a file system here: {fault}")
        mounted.append(folder)
        return folder

    yield mount
    gc.collect()  # the frames of an error that was caught may still hold maps of files in there
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True)
