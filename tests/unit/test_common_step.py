"""A worker dies while the others go on and save: a step that all have saved is still there on every one of them."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import DataParallel, DiLoCo, Eager, OuterLoop, Streaming, checkpoint, connect, local, run_local
from atoll.core.fragments import Balanced
from atoll.errors import CheckpointError, ConfigError, LinkError
from atoll.link.local import LocalLink
from atoll.outer.presets import Gradients, Sync
from fleet import free_port

START = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
PERIOD = 4
METHODS: dict[str, Sync | Gradients] = {
    "diloco": DiLoCo(period=PERIOD),
    "late": DiLoCo(period=PERIOD, delay=2),
    "streaming": Streaming(period=PERIOD, fragments=Balanced(count=2)),
    "eager": Eager(period=PERIOD),
    "data-parallel": DataParallel(),
}


@pytest.fixture(autouse=True)
def _disks_are_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)


def train(link: LocalLink, sync: Sync | Gradients, root: Path, every: int, dies: int) -> None:
    """Save after the same steps as the others, as README says; worker 1 is killed before the save of step `dies`."""
    model = copy.deepcopy(START)
    outer = OuterLoop(model, sync, link)
    for _ in range(dies + 3 * PERIOD):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        try:
            outer.average_gradients()
            outer.step()
        except LinkError:
            return
        if link.worker == 1 and outer.steps == dies:
            return
        if outer.steps % every == 0:
            state = {"model": model.state_dict(), "outer": outer.state_dict()}
            checkpoint.save(root / f"worker-{link.worker}", outer.steps, state, keep=1)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", METHODS)
def test_a_step_that_all_have_survives_a_kill_before_any_save(name: str, every: int, tmp_path: Path) -> None:
    for dies in (2 * PERIOD, 3 * PERIOD - 1):
        root = tmp_path / str(dies)
        run_local(partial(train, sync=METHODS[name], root=root, every=every, dies=dies), local(2))
        saved = {worker: checkpoint.steps(root / f"worker-{worker}") for worker in range(2)}
        assert checkpoint.common_step(saved) == (dies - 1) // every * every, saved


def test_no_more_is_kept_than_a_worker_can_be_ahead(tmp_path: Path) -> None:
    loop = OuterLoop(torch.nn.Linear(2, 1), DiLoCo(period=3, delay=1), local(2)[0])
    for step in range(12):
        checkpoint.save(tmp_path / "two", step, {"outer": loop.state_dict()}, keep=1)
    assert checkpoint.steps(tmp_path / "two") == (7, 8, 9, 10, 11)
    alone = OuterLoop(torch.nn.Linear(2, 1), DiLoCo(period=3, delay=1), local(1)[0])
    for step in range(4):
        checkpoint.save(tmp_path / "one", step, {"outer": alone.state_dict()})
    assert checkpoint.steps(tmp_path / "one") == (2, 3)


def test_what_is_kept_by_name_counts_more_than_what_a_state_says(tmp_path: Path) -> None:
    for step in range(4):
        checkpoint.save(tmp_path, step, {"outer": {"ahead": 9}}, keep=1, ahead=1)
    assert checkpoint.steps(tmp_path) == (2, 3)


def test_the_newest_common_step_is_found() -> None:
    assert checkpoint.common_step({0: (1, 2, 3), 1: [2, 3, 4], 2: {0, 2}}) == 2
    assert checkpoint.common_step({0: (0,), 1: ()}) is None
    with pytest.raises(CheckpointError, match="from: 0 has steps 1, 3; 1 has step 2; 2 has none"):
        checkpoint.common_step({0: (3, 1), 1: (2,), 2: ()})


def saved(root: Path, *steps: int) -> Path:
    for step in steps:
        checkpoint.save(root, step, {"made": torch.tensor(step)}, keep=9)
    return root


def test_workers_of_a_link_load_the_newest_step_that_all_have(tmp_path: Path) -> None:
    roots = [saved(tmp_path / "0", 0, 2, 4, 6), saved(tmp_path / "1", 0, 2, 4)]
    others = [saved(tmp_path / "2", 4, 6), saved(tmp_path / "3", 6)]
    address = f"127.0.0.1:{free_port()}"

    def load(worker: int) -> Any:
        link = connect(address, worker=worker, workers=2, keys="none", join_s=60.0)
        try:
            assert list(link.gather("pair", (worker, 2)).values()) == [[0, 2], [1, 2]]
            first = checkpoint.load_common(roots[worker], link)
            time.sleep(worker)  # the other one must not take what this one said before
            return first, checkpoint.load_common(others[worker], link)
        finally:
            link.gather("done", True)  # worker 0 hosts the meeting point
            link.close()

    with ThreadPoolExecutor(2) as both:
        found = [(4, {"made": torch.tensor(4)}), (6, {"made": torch.tensor(6)})]
        assert list(both.map(load, range(2))) == [tuple(found)] * 2
    assert checkpoint.steps(roots[0]) == (0, 2, 4), "the run makes step 6 again"


def test_one_worker_loads_its_newest_step_and_none_at_the_beginning(tmp_path: Path) -> None:
    link = local(1)[0]
    assert checkpoint.load_common(tmp_path / "missing", link) is None
    assert checkpoint.load_common(saved(tmp_path / "here", 0, 1, 3), link) == (3, {"made": torch.tensor(3)})
    with pytest.raises(ConfigError, match=r"link must be made by atoll.connect\(...\), got LocalLink: 2 workers tell"):
        checkpoint.load_common(tmp_path / "here", local(2)[0])


def test_later_steps_of_an_abandoned_past_are_dropped_by_name(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {}, keep=3)
    checkpoint.drop_after(tmp_path, 1)
    assert checkpoint.steps(tmp_path) == (1,)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("Saved!", 1, "key must be 1 to 48 lower-case letters, digits, spaces, - and _, got 'Saved!'"),
        ("saved", {1, 2}, "value of 'saved' must be JSON to be gathered: Object of type set"),
        ("saved", "x" * (1 << 21), "value of 'saved' has 2097154 characters as JSON, allowed are 1048576: gather less"),
    ],
)
def test_what_cannot_be_gathered_is_refused_before_anybody_is_met(key: str, value: object, told: str) -> None:
    link = connect(f"127.0.0.1:{free_port()}", worker=1, workers=2, keys="none", join_s=60.0)
    with pytest.raises(ConfigError, match=told):
        link.gather(key, value)
