"""Whole runs of `atoll train` against a plain training loop: every loss, rate, norm and the parameters at the end."""

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parameters_to_vector

from atoll.runs.events import End, Eval, Fault, Step, read
from atoll.settings import config
from atoll.settings.config import RunConfig
from atoll.settings.model_presets import ModelConfig
from atoll.train.data.batches import Batches, held_out
from atoll.train.model.decoder import Decoder
from atoll.train.model.export import load_export
from atoll.train.run import prepare, start, train
from atoll.train.trainer import LocalWorker, Trainer
from oracle import trainer as oracle

SEQUENCE = 16
SHAPE: dict[str, Any] = {
    "layers": 2, "width": 16, "heads": 2, "head_width": 8, "feedforward": 24, "context": SEQUENCE, "tied": True,
    "z_loss": 0.02,
}  # fmt: skip
TRAIN: dict[str, Any] = {
    "steps": 17, "batch": 4, "lr": 0.02, "warmup": 4, "final_lr": 0.2, "weight_decay": 0.3, "betas": [0.8, 0.95],
    "clip": 0.6, "optimizer": "adamw", "accumulate": 1, "eval_every": 5, "eval_tokens": 7 * SEQUENCE, "log_every": 1,
    "save_every": 100,
}  # fmt: skip
ALONE = {"sync": {"method": "none", "workers": 1}}
PARALLEL = {"sync": {"method": "data-parallel", "codec": "fp64", "workers": 2}}
DILOCO = {
    "sync": {"method": "diloco", "period": 4, "workers": 2, "codec": "fp64", "outer_lr": 0.7, "outer_momentum": 0.8}
}
STREAMING = {
    "sync": {
        "method": "streaming", "period": 5, "workers": 2, "codec": "fp64", "outer_lr": 0.5, "outer_momentum": 0.9,
        "fragments": "whole", "delay": 2, "alpha": 0.4,
    }
}  # fmt: skip
RUNS: dict[str, dict[str, Any]] = {
    "alone": ALONE,
    "alone, no limits": {**ALONE, "train": {"clip": 0.0, "warmup": 0, "final_lr": 0.0, "weight_decay": 0.0}},
    "alone, too fast": {**ALONE, "train": {"lr": 0.5, "eval_every": 1}},
    "alone, in parts": {**ALONE, "train": {"accumulate": 4, "clip": 1.7}, "model": {"z_loss": 0.0}},
    "alone, untied, muon": {**ALONE, "train": {"optimizer": "muon", "accumulate": 2}, "model": {"tied": False}},
    "data-parallel": {**PARALLEL, "train": {"accumulate": 2}},
    "data-parallel, muon": {**PARALLEL, "train": {"optimizer": "muon", "clip": 0.3}},
    "data-parallel, shards": {**PARALLEL, "data": {"split": "clusters"}},
    "diloco, muon": {**DILOCO, "train": {"optimizer": "muon", "clip": 0.0, "accumulate": 2}},
    "diloco, shards": {"sync": {**DILOCO["sync"], "workers": 3}, "data": {"split": "clusters"}},
    "diloco, equal shards": {**DILOCO, "data": {"split": "clusters", "weighting": "equal"}, "model": {"tied": False}},
    "streaming": {**STREAMING, "train": {"accumulate": 2}},
}


@pytest.fixture(autouse=True)
def _fp64(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """So that what is compared differs by rounding alone; and no waiting for the disk."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    drawn = random.Random(0)
    for number in range(30):
        letters = "abcdefgh" if number % 3 else "uvwxyz .,;"
        (folder / f"{number}.txt").write_text("".join(drawn.choices(letters, k=300 + 40 * (number % 3))))
    return folder


@dataclass
class Compared:
    """A run beside the plain loop's."""

    folder: Path
    events: list[Any]
    log: list[Any]
    evals: dict[int, float]
    outers: dict[int, torch.Tensor]

    def check(self, tolerance: float) -> None:
        """Everything that both tell."""
        steps = [event for event in self.events if isinstance(event, Step)]
        assert [event.step for event in steps] == list(range(1, len(self.log) + 1))
        for event, (rate, losses, norms) in zip(steps, self.log, strict=True):
            assert event.lr == pytest.approx(rate, rel=1e-12)
            assert event.grad_norm == pytest.approx(norms, rel=tolerance)
            told = [(a, b) for a, b in zip(event.loss, losses, strict=True) if a is not None and np.isfinite(a)]
            assert len(told) >= len(losses) - 1
            assert [a for a, _ in told] == pytest.approx([b for _, b in told], rel=tolerance), event.step
        lowest = np.inf
        for measured in (event for event in self.events if isinstance(event, Eval)):
            assert measured.best == (measured.loss < lowest)
            lowest = min(measured.loss, lowest)
        evals = {event.step: event.loss for event in self.events if isinstance(event, Eval)}
        assert evals == pytest.approx(self.evals, rel=tolerance)
        end, best = self.events[-1], min(evals, key=lambda step: evals[step])
        assert isinstance(end, End) and (end.loss, end.best_loss) == (evals[end.step], evals[best])
        for name, step in (("model", end.step), ("best", best)):
            made = parameters_to_vector(load_export(self.folder / name)[0].parameters()).detach()
            torch.testing.assert_close(made, self.outers[step].to(made.dtype), rtol=0, atol=tolerance)


def config_of(
    tmp_path: Path, corpus: Path, changes: dict[str, Any], left_out: tuple[str, ...] = (), precision: str = "fp32"
) -> RunConfig:
    """The run that these changes make, some of its settings left out."""
    asked = {name: value for name, value in {**TRAIN, **changes.get("train", {})}.items() if name not in left_out}
    data = {"source": str(corpus), "cache": str(tmp_path / "tokens"), "held_out": 0.1, **changes.get("data", {})}
    shape = {**SHAPE, **changes.get("model", {})}
    table = {
        "model": shape,
        "train": asked,
        "sync": changes["sync"],
        "data": data,
        "log": {"view": "none", "sample": 4},
    }
    fixed = {"device": "cpu", "threads": 1, "seed": 3, "name": "run", "out": str(tmp_path), "precision": precision}
    return config.parse({**table, **fixed})


def run_both(
    tmp_path: Path,
    corpus: Path,
    changes: dict[str, Any],
    *,
    spoilt: Any = (),
    left_out: tuple[str, ...] = (),
    precision: str = "fp32",
) -> Compared:
    """Train a run, and the same by hand: from the settings as they are given, not as they are resolved."""
    given = config_of(tmp_path, corpus, changes, left_out, precision)
    folder = train(given)
    sync, settings = changes["sync"], {**TRAIN, **changes.get("train", {})}
    shape = {**SHAPE, **changes.get("model", {})}
    made = prepare(given)
    batches = Batches(made.train, workers=sync["workers"], batch=settings["batch"], sequence=SEQUENCE, seed=3)
    rows = settings["eval_tokens"] // SEQUENCE
    tokens = made.held_out[: rows * SEQUENCE + 1].astype(np.int64)
    rows_held_out = np.stack([tokens[r * SEQUENCE : (r + 1) * SEQUENCE + 1] for r in range(rows)])
    weights = [1.0] * sync["workers"]
    if len(made.train) > 1 and given.data.weighting == "examples":
        assert len({len(file) for file in made.train}) > 1
        weights = [float((len(file) - 1) // SEQUENCE) for file in made.train]
    model = Decoder(ModelConfig(vocabulary=256, **shape), generator=torch.Generator().manual_seed(3))
    passed_over = ("batch", "accumulate", "eval_tokens", "log_every", "save_every")
    log, evals, outers = oracle.train(
        model, batches.batch, torch.from_numpy(rows_held_out), weights=weights, z_loss=shape["z_loss"], spoilt=spoilt,
        **{name: value for name, value in settings.items() if name not in passed_over},
        **{name: value for name, value in sync.items() if name not in ("workers", "codec", "fragments")},
    )  # fmt: skip
    return Compared(folder, read(folder / "metrics.jsonl"), log, evals, outers)


@pytest.mark.thorough_after(6)
@pytest.mark.parametrize("name", RUNS)
def test_a_run_is_what_the_plain_loop_makes_of_it(name: str, tmp_path: Path, corpus: Path) -> None:
    run_both(tmp_path, corpus, RUNS[name]).check(1e-9)


def test_what_is_left_out_is_the_recipe_of_the_docs(tmp_path: Path, corpus: Path) -> None:
    recipe = {"lr": 0.003, "warmup": 2, "final_lr": 0.05, "weight_decay": 1 / 20, "betas": [0.9, 0.99], "clip": 1.0}
    left_out = {**TRAIN, **recipe, "steps": 20}
    run_both(tmp_path, corpus, {**ALONE, "train": left_out}, left_out=tuple(recipe)).check(1e-9)


def test_in_fp32_a_run_is_the_same_up_to_rounding(tmp_path: Path, corpus: Path) -> None:
    torch.set_default_dtype(torch.float32)
    run_both(tmp_path, corpus, {"sync": {**DILOCO["sync"], "codec": "fp32"}}).check(2e-4)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_worker_that_was_rolled_back_starts_with_a_fresh_optimizer(
    optimizer: str, tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._backward

    def spoilt(self: Trainer, worker: LocalWorker) -> torch.Tensor:
        entropy = original(self, worker)
        return entropy * float("nan") if (self.steps, worker.number) == (6, 1) else entropy

    monkeypatch.setattr(Trainer, "_backward", spoilt)
    compared = run_both(tmp_path, corpus, {**DILOCO, "train": {"optimizer": optimizer}}, spoilt={(6, 1)})
    faults = [(event.step, event.worker) for event in compared.events if isinstance(event, Fault)]
    assert faults == [(6, 1), (8, 1)]
    compared.check(1e-9)


def test_under_data_parallel_a_gradient_that_is_not_finite_is_left_out_of_the_mean(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Trainer._backward

    def spoilt(self: Trainer, worker: LocalWorker) -> torch.Tensor:
        entropy = original(self, worker)
        if (self.steps, worker.number) == (6, 1):
            gradient = next(worker.model.parameters()).grad
            assert gradient is not None
            gradient[0] = float("inf")
        return entropy

    monkeypatch.setattr(Trainer, "_backward", spoilt)
    run_both(tmp_path, corpus, PARALLEL, spoilt={(6, 1)}).check(1e-9)


def test_a_line_of_metrics_has_the_mean_loss_since_the_last_one(tmp_path: Path, corpus: Path) -> None:
    compared = run_both(tmp_path, corpus, {**PARALLEL, "train": {"log_every": 5}})
    steps = [event for event in compared.events if isinstance(event, Step)]
    assert [event.step for event in steps] == [1, 5, 10, 15, 17]
    first = 0
    for event in steps:
        rates, losses, norms = zip(*compared.log[first : event.step], strict=True)
        assert event.loss == pytest.approx(np.mean(losses, axis=0).tolist(), rel=1e-9)
        assert event.lr == pytest.approx(rates[-1], rel=1e-12)
        assert event.grad_norm == pytest.approx(norms[-1], rel=1e-9)
        assert (event.tokens, event.participants) == (event.step * 2 * 4 * SEQUENCE, 2)
        first = event.step


def test_a_run_in_bf16_is_computed_and_measured_in_bf16(tmp_path: Path, corpus: Path) -> None:
    torch.set_default_dtype(torch.float32)
    still = {**ALONE, "train": {"steps": 1, "lr": 1e-12, "warmup": 0, "weight_decay": 0.0}}
    rough = run_both(tmp_path / "rough", corpus, still, precision="bf16")
    with torch.autocast("cpu", torch.bfloat16):
        expected = run_both(tmp_path / "fine", corpus, still)
    (step,), (measured,) = ([e for e in rough.events if isinstance(e, kind)] for kind in (Step, Eval))
    assert step.loss == pytest.approx(expected.log[0][1], rel=1e-6)
    assert measured.loss == pytest.approx(expected.evals[1], rel=1e-6)
    assert step.loss != pytest.approx(rough.log[0][1], rel=1e-6)
    assert measured.loss != pytest.approx(rough.evals[1], rel=1e-6)


def test_a_model_is_measured_without_dropout_and_trains_on_with_it(tmp_path: Path, corpus: Path) -> None:
    given = config_of(tmp_path, corpus, ALONE)
    data = prepare(given)
    model, settings = start(given, data)
    batches = Batches(data.train, workers=1, batch=4, sequence=SEQUENCE, seed=3)
    trainer = Trainer(settings, model, batches, held_out(data.held_out, sequence=SEQUENCE, tokens=99, batch=4))
    modes = []
    norm = model.get_submodule("norm")
    hook = norm.register_forward_hook(lambda module, inputs, output: modes.append(module.training))
    trainer.step()
    trainer.evaluate()
    trainer.step()
    hook.remove()
    assert modes == [True, False, False, True]
