"""Workers of several ranks: the same training as with one, whatever the ranks hold, and they stand or fall together."""

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from atoll import checkpoint
from atoll.cli.launch import free_ports
from atoll.errors import ConfigError
from atoll.link.net.run_keys import throw_away
from atoll.runs.events import End, Eval, Event, Fault, RoundApplied, Start, Step, read
from atoll.runs.lines import Lines
from atoll.runs.sample import Sample
from atoll.settings import config
from atoll.settings.config import RunConfig
from atoll.train.run import train
from bitwise import bits

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ranks")]  # all look at the same runs, of half a minute

TOLERANCE = 1e-6
"""Of parameters up to 1 in size, after 12 steps: fp32 sums in another order. The largest difference seen is 2.7e-7."""

BASE: dict[str, Any] = {
    "device": "cpu",
    "model": {"preset": "tiny", "layers": 2, "width": 16, "heads": 1, "feedforward": 32, "context": 16},
    "train": {"steps": 12, "batch": 4, "eval_every": 4, "eval_tokens": 256, "save_every": 3, "log_every": 2},
    "sync": {"workers": 2, "method": "streaming", "period": 4, "fragments": "blocks:1", "codec": "fp32"},
    "log": {"view": "none", "sample": 4},
}
RUNS: dict[str, dict[str, Any]] = {
    "streaming": {},
    "eager": {"sync.method": "eager", "sync.fragments": None, "train.accumulate": 2, "model.tied": True},
    "data-parallel": {"sync.method": "data-parallel", "sync.fragments": None},
    "none": {"sync.method": "none", "sync.fragments": None, "sync.codec": None, "sync.workers": 1},  # of 4 ranks
}
KINDS = ("ddp", "fsdp")


class Case:
    """One run of the driver."""

    def __init__(self, run: str, kind: str, fault: str = "", *, resume: bool = False, address: bool = True) -> None:
        self.run, self.kind, self.fault, self.resume, self.address = run, kind, fault, resume, address
        self.folder = f"{run}-{kind}-{fault}" if fault else f"{run}-{kind}"
        self.name = f"{self.folder}-resumed" if resume else self.folder


CASES = [
    Case("streaming", "ddp", address=False),  # torchrun says where worker 0 is
    Case("streaming", "fsdp"),
    *(Case(run, kind) for run in ("eager", "data-parallel") for kind in KINDS),
    Case("none", "fsdp", address=False),
    *(Case("streaming", kind, "cut", resume=resume) for kind in KINDS for resume in (False, True)),
    *(Case("streaming", kind, fault) for kind in KINDS for fault in ("stop", "unlink")),
    *(Case("streaming", "fsdp", fault) for fault in ("disagree", "spoil", "blot")),
]


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Processes of pytest-xdist share what takes long: the second waits for the first and finds it done."""
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.getbasetemp()
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "ranks"
    folder.mkdir(exist_ok=True)
    with one_at_a_time(folder / "lock"):
        if not (folder / "text").exists():
            (folder / "text").mkdir()
            words = random.Random(0).choices(["reef", "lagoon", "islet", "tide", "surf", "sand"], k=6000)
            for number in range(12):
                (folder / "text" / f"{number}.txt").write_text(" ".join(words[number * 500 : (number + 1) * 500]))
    return folder


def settings(place: Path, name: str, changes: dict[str, Any]) -> RunConfig:
    data = {"source": str(place / "text"), "cache": str(place / "tokens"), "held_out": 0.1}
    made = config.parse({**BASE, "data": data, "name": name, "out": str(place / "runs")})
    return made.changed(**changes)


@pytest.fixture(scope="module")
def alone(place: Path) -> dict[str, Path]:
    """The runs with one rank a worker, all workers in this process."""
    with one_at_a_time(place / "lock"):
        return {run: train(settings(place, f"{run}-alone", changes), resume=True) for run, changes in RUNS.items()}


@pytest.fixture(scope="module")
def became(place: Path, alone: dict[str, Path]) -> list[dict[str, str]]:
    """The same by 2 workers of 2 ranks, and what became of every case in each of the four processes."""
    with one_at_a_time(place / "lock"):
        if not (place / "3.json").exists():
            launch(place)
    return [json.loads((place / f"{rank}.json").read_text()) for rank in range(4)]


def launch(place: Path) -> None:
    """All cases in one torchrun: to start four processes takes longer than most of them."""
    cases = []
    throw_away(2).save(place / "keys")
    for case, port in zip(CASES, free_ports(len(CASES)), strict=True):
        changes = {**RUNS[case.run], "train.parallel": case.kind}
        if case.address:
            changes |= {"link.address": f"127.0.0.1:{port}", "link.keys": str(place / "keys" / "worker-{worker}")}
            changes |= {"link.deadline_s": 60.0, "link.join_s": 60.0, "link.silent_s": 30.0}
        file = place / f"{case.name}.toml"
        file.write_text(settings(place, case.folder, changes).to_toml())
        fault = "" if case.resume else case.fault
        cases.append({"name": case.name, "file": str(file), "fault": fault, "resume": case.resume})
    (place / "cases.json").write_text(json.dumps(cases))
    driver = Path(__file__).parents[1] / "rank_driver.py"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port"]
    command = [*torchrun, str(free_ports(1)[0]), str(driver), str(place / "cases.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def model_of(folder: Path) -> dict[str, Tensor]:
    return dict(load_file(folder / "model" / "model.safetensors"))


def workers_of(place: Path, name: str) -> list[Path]:
    return [place / "runs" / name / f"worker-{worker}" for worker in range(2)]


def events(folder: Path, kind: type[Event]) -> list[Any]:
    return [event for event in read(folder / "metrics.jsonl") if isinstance(event, kind)]


def seats_of(place: Path, name: str) -> list[Path]:
    """Worker-major."""
    return [folder for worker in workers_of(place, name) for folder in (worker, worker / "rank-1")]


PLAIN = [case for case in CASES if not case.fault]


@pytest.mark.parametrize("case", PLAIN, ids=[case.name for case in PLAIN])
def test_as_with_one_rank(place: Path, alone: dict[str, Path], became: Any, case: Case) -> None:
    assert [told[case.name] for told in became] == ["done"] * 4
    folders = workers_of(place, case.name)[: 1 if case.run == "none" else 2]
    models, expected = [model_of(folder) for folder in folders], model_of(alone[case.run])
    assert bits(models[0]) == bits(models[-1]) and models[0].keys() == expected.keys()
    assert max((models[0][key] - expected[key]).abs().max().item() for key in expected) < TOLERANCE

    losses = [event.loss for event in events(alone[case.run], Eval)]
    assert [event.loss for event in events(folders[0], Eval)] == pytest.approx(losses, rel=1e-6)
    for worker, folder in enumerate(folders):
        steps = zip(events(folder, Step), events(alone[case.run], Step), strict=True)
        for here, there in steps:
            assert here.loss[worker] == pytest.approx(there.loss[worker], rel=1e-6)
            assert here.grad_norm[worker] == pytest.approx(there.grad_norm[worker], rel=1e-5)
            assert here.tokens == there.tokens
    start, whole = events(folders[0], Start)[0], events(alone[case.run], Start)[0]
    assert (start.parameters, start.fragments, start.payload_bytes) == (
        (whole.parameters, whole.fragments, whole.payload_bytes)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_rounds_are_those_of_the_whole_worker(place: Path, alone: dict[str, Path], became: Any, kind: str) -> None:
    here, there = (
        events(workers_of(place, f"streaming-{kind}")[1], RoundApplied),
        events(alone["streaming"], RoundApplied),
    )
    assert [(r.step, r.fragment, r.applied, r.members) for r in here] == (
        [(r.step, r.fragment, r.applied, r.members) for r in there]
    )
    assert [r.norm for r in here] == pytest.approx([r.norm for r in there], rel=1e-5)
    assert [r.cosine for r in here] == pytest.approx([r.cosine for r in there], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_bytes_go_over_the_far_link_as_with_one_rank(
    place: Path, alone: dict[str, Path], became: Any, kind: str
) -> None:
    (there,) = events(alone["streaming"], End)
    for worker, folder in enumerate(workers_of(place, f"streaming-{kind}")):
        (end,) = events(folder, End)
        assert end.bytes_sent[worker] == there.bytes_sent[worker]
        assert end.bytes_received[worker] == there.bytes_received[worker]
        headers = end.wire_sent[worker] - end.bytes_sent[worker]
        assert 0 < headers < 0.05 * end.bytes_sent[worker]
        assert sum(r.wire_sent for r in events(folder, RoundApplied)) == end.wire_sent[worker]
        lines = events(folder, Lines)[-1]
        assert end.bytes_sent[worker] <= lines.sent_bytes[1 - worker] <= end.wire_sent[worker], (lines, end)
        assert end.bytes_received[worker] <= lines.received_bytes[1 - worker] <= end.wire_received[worker]
        samples = events(folder, Sample)
        assert bool(samples) == (worker == 0 and kind == "ddp"), "with FSDP, every token would gather the whole model"
        counted = [state_of(seat)["outer"][0]["counters"]["wire_sent"] for seat in (folder, folder / "rank-1")]
        assert all(counted) if kind == "fsdp" else counted[0] and not counted[1]


def state_of(folder: Path, step: int | None = None) -> dict[str, Any]:
    return dict(checkpoint.load(folder / "checkpoints", step)[1]["trainer"])


def test_all_hold_the_same_anchors(place: Path, became: Any) -> None:
    def anchors(seat: Path) -> Any:
        return bits([fragment["anchor"] for fragment in state_of(seat)["outer"][0]["fragments"]])

    mirrored = [anchors(seat) for seat in seats_of(place, "streaming-ddp")]
    assert all(anchor == mirrored[0] for anchor in mirrored)
    parts = [anchors(seat) for seat in seats_of(place, "streaming-fsdp")]
    assert parts[0] == parts[2] and parts[1] == parts[3] and parts[0] != parts[1]


def test_the_first_rank_speaks_for_its_worker(place: Path, became: Any) -> None:
    for name in ("streaming-ddp", "streaming-fsdp"):
        for worker in workers_of(place, name):
            assert {entry.name for entry in (worker / "rank-1").iterdir() if entry.name[0] != "."} == (
                {"run.toml", "about.json", "checkpoints"}
            )
            assert (worker / "metrics.jsonl").exists() and (worker / "model").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_cut_and_resumed_is_the_same_run(place: Path, became: Any, kind: str) -> None:
    name = f"streaming-{kind}-cut"
    assert not {told[name] for told in became} & {"done"}
    assert [told[f"{name}-resumed"] for told in became] == ["done"] * 4
    for cut, whole in zip(seats_of(place, name), seats_of(place, f"streaming-{kind}"), strict=True):
        ours, theirs = (state_of(seat) for seat in (cut, whole))
        for key in ("models", "inner", "draws", "best"):
            assert bits(ours[key]) == bits(theirs[key]), key
    for cut, whole in zip(workers_of(place, name), workers_of(place, f"streaming-{kind}"), strict=True):
        assert bits(model_of(cut)) == bits(model_of(whole))
        assert [event.loss for event in events(cut, Eval)] == [event.loss for event in events(whole, Eval)]


@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_is_told_to_stop_and_all_stop_after_the_same_step(place: Path, became: Any, kind: str) -> None:
    name = f"streaming-{kind}-stop"
    assert [told[name] for told in became] == ["Stopped: 130"] * 4
    assert len({checkpoint.steps(seat / "checkpoints")[-1] for seat in seats_of(place, name)}) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_link_that_fails_on_one_rank_fails_on_all(place: Path, became: Any, kind: str) -> None:
    told = [told[f"streaming-{kind}-unlink"] for told in became]
    assert all(words.startswith("LinkError: a cable was pulled") for words in told[:2]), told
    assert all("worker 0 left: a cable was pulled" in words for words in told[2:]), told


def test_who_fails_before_the_start_is_not_waited_for_by_the_other_rank(became: Any) -> None:
    told = [told["streaming-fsdp-disagree"] for told in became]
    assert told[:2] == ["LinkError: a page is missing"] * 2
    assert all("worker 0" in words and "left: a page is missing" in words for words in told[2:]), told


def test_what_is_not_finite_in_one_part_rolls_back_the_whole_worker(place: Path, became: Any) -> None:
    assert [told["streaming-fsdp-spoil"] for told in became] == ["done"] * 4
    first, second = workers_of(place, "streaming-fsdp-spoil")
    assert bits(model_of(first)) == bits(model_of(second))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model_of(first).values())
    assert not events(first, Fault)
    assert next((fault.worker, fault.step) for fault in events(second, Fault)) == (1, 6)
    left_out = [state_of(seat)["outer"][0]["counters"] for seat in seats_of(place, "streaming-fsdp-spoil")[2:]]
    assert all(counters["roll_backs"] == 1 and counters["rounds_left_out"] == 3 for counters in left_out)


def test_a_delta_that_one_rank_cannot_send_is_sent_by_none(place: Path, became: Any) -> None:
    assert [told["streaming-fsdp-blot"] for told in became] == ["done"] * 4
    first, second = workers_of(place, "streaming-fsdp-blot")
    assert bits(model_of(first)) == bits(model_of(second))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model_of(first).values())
    assert next((fault.worker, fault.step) for fault in events(second, Fault)) == (1, 8)
    left_out = [state_of(seat)["outer"][0]["counters"] for seat in seats_of(place, "streaming-fsdp-blot")[2:]]
    assert all(counters["roll_backs"] == 1 and counters["rounds_left_out"] == 3 for counters in left_out)


def test_a_batch_that_ranks_cannot_share_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=r"train.batch: must be a multiple of ranks \* train.accumulate \(2 \* 4\)"):
        train(settings(place, "odd", {"train.accumulate": 4}))
    assert not (place / "runs" / "odd").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
@pytest.mark.parametrize("kind", KINDS)
def test_launched_killed_and_resumed_is_the_same_run(place: Path, tmp_path: Path, kind: str) -> None:
    changes = {"train.parallel": kind, "train.steps": 100, "out": str(tmp_path)}
    for name in ("whole", "cut"):
        (tmp_path / f"{name}.toml").write_text(settings(place, name, changes).to_toml())
    command = [sys.executable, "-m", "atoll", "launch", "--ranks", "2"]
    subprocess.run([*command, str(tmp_path / "whole.toml")], check=True, capture_output=True, timeout=250)
    with subprocess.Popen(
        [*command, str(tmp_path / "cut.toml")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        last = tmp_path / "cut" / "worker-1" / "rank-1" / "checkpoints"
        until = time.monotonic() + 120
        while not last.exists() or max(checkpoint.steps(last), default=0) < 20:
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        os.kill(rank_process(str(tmp_path / "cut.toml"), worker=1, rank=1), signal.SIGKILL)
        _, said = process.communicate(timeout=120)
    assert process.returncode == 1 and "worker 1 failed first" in said and "lost another rank" in said
    subprocess.run([*command, str(tmp_path / "cut.toml"), "--resume"], check=True, capture_output=True, timeout=250)
    for worker in ("worker-0", "worker-1"):
        assert bits(model_of(tmp_path / "cut" / worker)) == bits(model_of(tmp_path / "whole" / worker))


def rank_process(file: str, worker: int, rank: int) -> int:
    """Who trains that rank of a run of this file."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_text().split("\0")
            variables = (folder / "environ").read_text().split("\0")
        except OSError:
            continue
        of_worker = file in words and f"--worker {worker}" in " ".join(words)  # torchrun's own process is one, too
        if of_worker and f"RANK={rank}" in variables:
            return int(folder.name)
    raise AssertionError("no such process")
