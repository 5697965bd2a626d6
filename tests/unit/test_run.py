"""Whole runs through files: the folder, resuming to the bit, kills at any moment, and what is refused."""

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from atoll import checkpoint
from atoll.errors import AtollError, CheckpointError, ConfigError, DataError, LinkError
from atoll.runs.events import End, Eval, Failed, Fault, Resumed, RoundApplied, Start, Step, read
from atoll.settings import config
from atoll.settings.config import RunConfig
from atoll.train.model.export import load_export
from atoll.train.run import train
from fleet import free_port

SMALL: dict[str, Any] = {
    "model": {"preset": "tiny", "layers": 2, "width": 16, "heads": 1, "feedforward": 32, "context": 16},
    "train": {"steps": 20, "batch": 2, "eval_every": 5, "eval_tokens": 256, "save_every": 3, "log_every": 2},
    "sync": {"workers": 3, "method": "streaming", "period": 4, "fragments": "blocks:1"},
    "log": {"view": "none", "sample": 4},
}


@pytest.fixture(autouse=True, scope="module")
def _no_waiting_for_the_disk() -> Iterator[None]:
    """No test can cut the power, and what a killed process has written is not lost."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    words = random.Random(0).choices(["reef", "lagoon", "islet", "tide", "surf", "sand"], k=6000)
    for number in range(12):
        (folder / f"{number}.txt").write_text(" ".join(words[number * 500 : (number + 1) * 500]))
    return folder


@pytest.fixture
def make(corpus: Path, tmp_path: Path) -> Any:
    def make(name: str = "run", **changes: Any) -> RunConfig:
        base = {**SMALL, "data": {"source": str(corpus), "cache": str(tmp_path / "tokens"), "held_out": 0.1}}
        made = config.parse({**base, "name": name, "out": str(tmp_path / "runs")})
        return made.changed(**changes) if changes else made

    return make


def weights(folder: Path) -> dict[str, bytes]:
    return {name: array.tobytes() for name, array in load_file(folder / "model" / "model.safetensors").items()}


def happened(folder: Path) -> list[dict[str, Any]]:
    """What a run reports, without what depends on the clock or on having been resumed."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = ("began", "seconds", "step_s", "tokens_per_s", "wait_s", "hidden_s", "opened_s", "done_s", "waited_s")
    kept = [line for line in lines if line["event"] not in ("saved", "resumed")]
    return [{key: value for key, value in line.items() if key not in timed} for line in kept]


METHODS: dict[str, dict[str, Any]] = {
    "streaming": {},
    "diloco": {"sync.method": "diloco", "sync.fragments": None},
    "eager": {"sync.method": "eager", "sync.fragments": None},
    "delayed": {"sync.method": "delayed", "sync.fragments": None, "sync.codec": "int8"},
    "data-parallel": {"sync.method": "data-parallel", "sync.fragments": None},
    "alone": {"sync.method": "none", "sync.fragments": None, "sync.workers": 1},
    "muon": {"train.optimizer": "muon", "train.accumulate": 2},
    "clusters, faults": {
        "data.split": "clusters",
        "faults.drop": 0.3,
        "faults.absences": [{"worker": 2, "first": 5, "last": 11}],
        "faults.speeds": {"1": 0.5},
    },
}


@pytest.mark.thorough_after(3)
@pytest.mark.parametrize("method", METHODS)
def test_interrupted_and_resumed_is_the_same_run(make: Any, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(make("whole", **METHODS[method]))
    cut = make("cut", **METHODS[method])
    for stop_at in (4, 10, 19):
        interrupt_after(stop_at, monkeypatch)
        with pytest.raises(SystemExit) as stopped:
            train(cut, resume=True)
        assert stopped.value.code == 130
    monkeypatch.undo()
    folder = train(cut, resume=True)
    assert weights(folder) == weights(whole)
    first, second = happened(folder), happened(whole)
    assert [{**line, "name": ""} for line in first] == [{**line, "name": ""} for line in second]
    events = read(folder / "metrics.jsonl")
    assert [event.step for event in events if isinstance(event, Resumed)] == [4, 10, 19]
    assert isinstance(events[-1], End) and events[-1].outcome == "finished"


def test_what_fails_has_written_down_its_last_round(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.train.trainer import LocalWorker, Trainer

    original = Trainer._backward

    def failing(self: Trainer, worker: LocalWorker) -> torch.Tensor:
        if self.steps == 8:
            raise LinkError("the cable was pulled")
        return original(self, worker)

    monkeypatch.setattr(Trainer, "_backward", failing)
    seldom = {"train.log_every": 100, "train.eval_every": 100, "train.save_every": 100}
    run = make(**METHODS["diloco"], **seldom, **{"sync.period": 1})
    with pytest.raises(LinkError, match="the cable was pulled"):
        train(run)
    events = read(Path(run.out) / run.name / "metrics.jsonl")
    assert [event.applied for event in events if isinstance(event, RoundApplied)] == list(range(1, 8))


def interrupt_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives during this inner step."""
    from atoll.train.trainer import Trainer

    original = Trainer.step

    def interrupted(self: Trainer) -> None:
        original(self)
        if self.steps == step:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", interrupted)


def test_a_run_says_what_it_was_and_what_happened(make: Any) -> None:
    folder = train(make())
    events = read(folder / "metrics.jsonl")
    start = events[0]
    assert isinstance(start, Start) and start.workers == 3 and sum(start.fragments) == start.parameters
    steps = [event for event in events if isinstance(event, Step)]
    assert [event.step for event in steps] == [1, *range(2, 21, 2)]
    assert steps[-1].tokens == 20 * 3 * 2 * 16
    assert all(loss is not None and 0 < loss < 7 for event in steps for loss in event.loss)
    evals = [event for event in events if isinstance(event, Eval)]
    assert [event.step for event in evals] == [5, 10, 15, 20] and evals[-1].loss < evals[0].loss
    behind = [event.is_behind for event in evals]  # a round is applied a step after it was sent
    assert behind == [True, True, True, False] and evals[-1].anchor_step == 20
    rounds = [event for event in events if isinstance(event, RoundApplied)]
    assert rounds and all(event.cosine is not None and event.members == [0, 1, 2] for event in rounds)
    about = json.loads((folder / "about.json").read_text())
    assert about["parameters"] == start.parameters and "torch" in about["versions"]
    again = config.load(folder / "run.toml")
    assert again.train.lr and again.train.warmup == 2 and again.train.sequence == 16
    assert checkpoint.steps(folder / "checkpoints") == (18, 20)
    assert load_export(folder / "best")[0].state_dict().keys() == load_export(folder / "model")[0].state_dict().keys()
    assert (again.sync.codec, again.sync.delay, again.sync.alpha, again.sync.outer_lr) == ("e3m0", 1, 0.25, 0.6)


def test_all_methods_see_the_same_data_in_the_same_order(make: Any) -> None:
    first = {}
    for method in ("data-parallel", "diloco", "streaming", "eager"):
        folder = train(make(method, **METHODS[method], **{"train.steps": 1, "train.log_every": 1}))
        first[method] = next(event.loss for event in read(folder / "metrics.jsonl") if isinstance(event, Step))
    assert len({tuple(loss) for loss in first.values()}) == 1


def test_a_worker_whose_loss_is_not_finite_is_left_out_and_the_run_goes_on(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.train.trainer import LocalWorker, Trainer

    original = Trainer._backward

    def spoilt(self: Trainer, worker: LocalWorker) -> Any:
        loss = original(self, worker)
        return loss * float("nan") if worker.number == 1 and self.steps == 6 else loss

    monkeypatch.setattr(Trainer, "_backward", spoilt)
    folder = train(make(**METHODS["diloco"]))
    events = read(folder / "metrics.jsonl")
    faults = [event for event in events if isinstance(event, Fault)]
    assert [(event.step, event.worker) for event in faults] == [(6, 1), (8, 1)]
    members = {event.step: event.members for event in events if isinstance(event, RoundApplied)}
    assert members == {4: [0, 1, 2], 8: [0, 2], 12: [0, 1, 2], 16: [0, 1, 2], 20: [0, 1, 2]}
    assert isinstance(events[-1], End) and events[-1].loss < 6


def test_a_hugging_face_model_is_trained_resumed_and_exported_for_transformers(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 256, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32}
    transformers.LlamaConfig(**shape, **heads).save_pretrained(tmp_path / "llama")
    changes = {"model": {"hf": str(tmp_path / "llama"), "hf_weights": False}, "train.steps": 8, "train.sequence": 16}
    whole = train(make("whole", **changes))
    interrupt_after(5, monkeypatch)
    with pytest.raises(SystemExit):
        train(make("cut", **changes))
    monkeypatch.undo()
    folder = train(make("cut", **changes), resume=True)
    assert weights(folder) == weights(whole)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder / "model")
    assert sum(p.numel() for p in loaded.parameters()) == json.loads((folder / "about.json").read_text())["parameters"]


@pytest.mark.parametrize("shape", [{}, {"model.qk_norm": False, "model.heads": 3}], ids=["apertus", "no architecture"])
def test_a_run_starts_from_the_decoder_of_another_run_without_transformers(
    shape: dict[str, Any], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    first = train(make("first", **{"model.z_loss": 1e-3, **shape}))
    model = {"hf": str(first / "model")}
    still = train(make("still", **{"model": model, "train.steps": 4, "train.lr": 1e-30}))  # rounds away
    assert weights(still) == weights(first), "it starts with the parameters of the other"
    further = train(make("further", **{"model": model, "train.steps": 4}))
    assert weights(further) != weights(first)
    anew = train(make("anew", **{"model": {**model, "hf_weights": False}, "train.steps": 4, "train.lr": 1e-30}))
    assert weights(anew) != weights(first), "hf_weights = false takes the shape alone"
    shapes: list[Any] = [load_export(folder / "model")[0].config for folder in (first, still, further, anew)]
    assert all(shape == shapes[0] for shape in shapes) and shapes[0].z_loss == 1e-3


# ---- kill -9


def start(config_file: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-c", "import sys; from atoll.cli.main import main; main()", "train", str(config_file)]
    return subprocess.Popen([*command, "--resume"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


@pytest.mark.slow
def test_killed_at_twenty_moments_it_ends_with_the_same_bits(make: Any, tmp_path: Path) -> None:
    """Every third kill comes while a checkpoint is being written."""
    whole = train(make("whole", **{"train.save_every": 1, "train.steps": 60}))
    cut = make("cut", **{"train.save_every": 1, "train.steps": 60})
    file = tmp_path / "cut.toml"
    file.write_text(cut.to_toml())
    folder, rng = tmp_path / "runs" / "cut", random.Random(5)
    for kill in range(20):
        process = start(file)
        reached = max(checkpoint.steps(folder / "checkpoints"), default=0)
        wanted = min(58, 3 * kill)
        while process.poll() is None and max(checkpoint.steps(folder / "checkpoints"), default=0) <= max(
            wanted, reached
        ):
            time.sleep(0.005)
        if kill % 3 == 0:
            for _ in range(2000):
                if process.poll() is not None or any((folder / "checkpoints").glob(".saving-*")):
                    break
        else:
            time.sleep(rng.uniform(0, 0.05))
        process.kill()
        process.communicate()
    process = start(file)
    _, errors = process.communicate()
    assert process.returncode == 0, errors.decode()
    assert weights(folder) == weights(whole)
    assert [{**line, "name": ""} for line in happened(folder)] == [{**line, "name": ""} for line in happened(whole)]
    assert sum(isinstance(event, Resumed) for event in read(folder / "metrics.jsonl")) >= 10


# ---- what is refused


def test_a_finished_run_is_left_alone_and_a_begun_one_is_not_started_over(make: Any) -> None:
    folder = train(make())
    before = (folder / "metrics.jsonl").read_bytes()
    assert train(make(), resume=True) == folder
    with pytest.raises(ConfigError, match="holds a run already: continue it with --resume"):
        train(make())
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_one_process_and_processes_of_their_own_are_not_mixed_in_one_folder(make: Any) -> None:
    config = make()
    folder = Path(config.out) / config.name
    (folder / "worker-1").mkdir(parents=True)
    (folder / "worker-1" / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=r"run whose workers have separate processes \(worker-1\): continue it"):
        train(config)
    (folder / "worker-1" / "run.toml").rename(folder / "run.toml")
    with pytest.raises(ConfigError, match="holds a run whose workers are all in one process, and this is one of"):
        train(config.changed(**{"link.address": "127.0.0.1:29500"}), worker=1)


def test_text_that_is_not_there_is_told_before_anybody_is_waited_for(make: Any) -> None:
    link = {"link.address": f"127.0.0.1:{free_port()}", "link.join_s": 600.0, "link.security": "none"}
    config = make(**link, **{"data.source": "/nowhere"})
    with pytest.raises(DataError, match="/nowhere"):
        train(config, worker=0)


def test_other_settings_cannot_be_resumed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(5, monkeypatch)
    with pytest.raises(SystemExit):
        train(make())
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"sync\.period was 4, is 5"):
        train(make(**{"sync.period": 5}), resume=True)
    with pytest.raises(ConfigError, match=r"model\.width was 16, is 32"):
        train(make(**{"model.width": 32}), resume=True)
    train(make(**{"train.save_every": 10}), resume=True)


def test_what_was_set_is_known_when_a_folder_is_resumed(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupted(make(**{"sync.period": 5}), 5, monkeypatch)
    with pytest.raises(ConfigError, match=rf"as `atoll train {re.escape(str(folder))} --resume` does"):
        train(make(), resume=True)
    train(config.load(folder / "run.toml"), resume=True)


def test_a_text_that_is_too_short_for_its_vocabulary_is_trained_on(make: Any) -> None:
    settings = {"data.tokenizer": "bpe", "train.steps": 2}
    folder = train(make(**settings))
    known = json.loads((folder / "about.json").read_text())["vocabulary"]
    assert 257 < known < 8192
    assert train(make(**settings), resume=True) == folder
    with pytest.raises(ConfigError, match=rf"must be at least the tokenizer's \({known}\), got {known - 1}"):
        train(make("small", **settings, **{"model.vocabulary": known - 1}))


def test_a_checkpoint_of_another_model_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, width in (("one", 16), ("two", 32)):
        interrupt_after(5, monkeypatch)
        with pytest.raises(SystemExit):
            train(make(name, **{"model.width": width}))
        monkeypatch.undo()
    root = Path(make().out)
    (root / "one" / "checkpoints").rename(root / "aside")
    (root / "two" / "checkpoints").rename(root / "one" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"other settings: model\.width was 32, is 16"):
        train(make("one"), resume=True)


@pytest.mark.processes
def test_two_processes_do_not_train_one_folder(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.train.trainer import Trainer

    inner_error: list[Exception] = []
    original = Trainer.step

    def meanwhile(self: Trainer) -> None:
        if self.steps == 3:
            code = "import sys; from atoll.cli.main import main; main()"
            file = tmp_path / "again.toml"
            file.write_text(make().to_toml())
            command = [sys.executable, "-c", code, "train", str(file), "--resume"]
            second = subprocess.run(command, capture_output=True, text=True, check=False)
            if second.returncode != 1 or "another process" not in second.stderr:
                inner_error.append(AssertionError(second.stderr))
        original(self)

    monkeypatch.setattr(Trainer, "step", meanwhile)
    train(make())
    assert not inner_error


def test_a_loss_that_is_not_finite_without_other_workers_stops_the_run(make: Any) -> None:
    with pytest.raises(AtollError, match="loss or gradient is not finite; checkpoints of earlier steps are intact"):
        train(make(**METHODS["alone"], **{"train.lr": 1e30, "train.clip": 0, "train.warmup": 0}))


def test_a_run_that_fails_writes_why(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.train.trainer import Trainer

    config = make()
    original = Trainer.step

    def failing(self: Trainer) -> None:
        if self.steps == 3:
            raise RuntimeError("the disk of this machine is full")
        original(self)

    monkeypatch.setattr(Trainer, "step", failing)
    with pytest.raises(RuntimeError):
        train(config)
    monkeypatch.undo()
    *_, last = read(Path(config.out) / config.name / "metrics.jsonl")
    assert isinstance(last, Failed) and (last.step, last.why) == (3, "the disk of this machine is full")


def interrupted(config: RunConfig, step: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    interrupt_after(step, monkeypatch)
    with pytest.raises(SystemExit):
        train(config)
    monkeypatch.undo()
    return Path(config.out) / config.name


def test_what_is_refused_leaves_the_folder_as_it_was(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = interrupted(make(), 13, monkeypatch)
    metrics = (folder / "metrics.jsonl").read_bytes()
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("seed = 0", "seed = 5", 1))  # also an edit behind our back
    with pytest.raises(CheckpointError, match="of a run with other settings: seed was 0, is 5"):
        train(config.load(folder / "run.toml"), resume=True)
    (folder / "run.toml").write_text(text)
    (folder / "checkpoints").rename(folder / "aside")
    checkpoint.save(folder / "checkpoints", 3, {"something": "else"})
    with pytest.raises(CheckpointError, match="is not that of a run: it holds something"):
        train(make(), resume=True)
    assert (folder / "metrics.jsonl").read_bytes() == metrics
    (folder / "run.toml").unlink()
    with pytest.raises(ConfigError, match=r"holds checkpoints but no run\.toml"):
        train(make(seed=5))


def test_a_start_that_fails_claims_no_folder(make: Any) -> None:
    with pytest.raises(AtollError, match="give more text, fewer workers"):
        train(make(**{"sync.workers": 4000}))
    with pytest.raises(ConfigError, match='"muon" is for the matrices of repeated blocks'):
        train(make(**{**METHODS["diloco"], "train.optimizer": "muon", "model.layers": 1}))
    with pytest.raises(ConfigError, match=r'^sync\.fragments: "blocks" does not fit this model, "whole" and'):
        train(make(**{"sync.fragments": None, "model.layers": 1}))
    train(make())


def test_lost_metrics_are_told_and_the_run_can_still_be_read(
    make: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = interrupted(make(), 13, monkeypatch)
    (folder / "metrics.jsonl").unlink()
    (folder / "about.json").write_text("torn")
    train(make(**{"log.tensorboard": True}), resume=True)  # where events go is free to change
    assert "has lost" in capsys.readouterr().err
    events = read(folder / "metrics.jsonl")
    assert isinstance(events[0], Start) and isinstance(events[1], Resumed) and isinstance(events[-1], End)


def test_training_that_diverges_is_not_called_finished(make: Any) -> None:
    wild = {"train.lr": 1e30, "train.clip": 0, "train.warmup": 0}
    with pytest.raises(AtollError, match="gradient of every worker is not finite"):
        train(make(**METHODS["data-parallel"], **wild))
    assert not (Path(make().out) / "run" / "model").exists()


def test_who_is_left_out_at_the_very_end_is_reported(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from atoll.train.trainer import Trainer

    original = Trainer.step

    def spoilt(self: Trainer) -> None:
        original(self)
        if self.steps == 18:
            with torch.no_grad():
                next(self.models[1].parameters()).fill_(float("nan"))

    monkeypatch.setattr(Trainer, "step", spoilt)
    folder = train(make(**METHODS["diloco"], **{"train.steps": 18}))
    faults = [event for event in read(folder / "metrics.jsonl") if isinstance(event, Fault)]
    assert {event.worker for event in faults} == {1} and faults[-1].step == 18


def test_a_ctrl_c_that_gets_lost_while_preparing_still_stops_the_run(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from atoll.train import run

    original = run.prepare

    def losing(config: RunConfig) -> Any:
        with contextlib.suppress(KeyboardInterrupt):  # as Python does when it is raised inside an import
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        return original(config)

    monkeypatch.setattr(run, "prepare", losing)
    with pytest.raises(KeyboardInterrupt):
        train(make())
    monkeypatch.undo()
    assert not (Path(make().out) / "run" / "run.toml").exists()
    train(make())
