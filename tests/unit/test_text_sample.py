"""Texts that a run samples at its evaluations: they cost training nothing, and follow the model alone."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.numpy import load_file

from atoll.runs.events import Eval, read
from atoll.runs.sample import Sample
from atoll.settings import config
from atoll.train import run
from atoll.train.model.decoder import Decoder
from atoll.train.progress.text_sample import write_sample
from atoll.train.trainer import Trainer

SMALL: dict[str, Any] = {
    "model": {"preset": "tiny", "layers": 1, "width": 16, "heads": 1, "feedforward": 16, "context": 16},
    "train": {"steps": 6, "batch": 2, "eval_every": 2, "eval_tokens": 64, "save_every": 6, "log_every": 2},
    "sync": {"workers": 2, "period": 3, "fragments": "whole"},
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("text") / "reef.txt"
    file.write_text(" ".join(random.Random(0).choices(["réef", "lagoon", "islet", "tide"], k=2000)), encoding="utf-8")
    return file


def trained(source: Path, out: Path, tokens: int | None) -> tuple[dict[str, bytes], list[Sample], list[Eval]]:
    log = {"view": "none"} if tokens is None else {"view": "none", "sample": tokens}
    data = {"source": str(source), "cache": str(out / "tokens"), "held_out": 0.2}
    folder = run.train(config.parse({**SMALL, "data": data, "log": log, "name": "run", "out": str(out)}))
    events = read(folder / "metrics.jsonl")
    weights = {name: array.tobytes() for name, array in load_file(folder / "model" / "model.safetensors").items()}
    samples = [event for event in events if isinstance(event, Sample)]
    return weights, samples, [event for event in events if isinstance(event, Eval)]


def test_every_evaluation_has_a_text_and_training_is_the_same_without(source: Path, tmp_path: Path) -> None:
    weights, samples, evals = trained(source, tmp_path / "with", None)
    assert [sample.step for sample in samples] == [evaluated.step for evaluated in evals] == [2, 4, 6]
    assert all(sample.seconds > evaluated.seconds for sample, evaluated in zip(samples, evals, strict=True))
    (prompt,) = {sample.prompt for sample in samples}
    assert prompt.strip("\ufffd") in source.read_text(encoding="utf-8")
    assert all(len(sample.text.encode(errors="replace")) >= 32 for sample in samples)
    assert samples[0].text != samples[-1].text, "the model has changed"
    plain, none, _ = trained(source, tmp_path / "without", 0)
    assert not none and plain == weights


def test_torchs_random_numbers_are_left_alone(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def watched(trainer: Trainer, data: Any) -> None:
        before, parameters = torch.get_rng_state(), [p.clone() for p in trainer.models[0].parameters()]
        write_sample(trainer, data)
        assert torch.equal(torch.get_rng_state(), before) and trainer.models[0].training
        assert all(map(torch.equal, parameters, trainer.models[0].parameters()))
        seen.append(trainer.steps)

    monkeypatch.setattr(run, "write_sample", watched)
    trained(source, tmp_path, 8)
    assert seen == [2, 4, 6]


def test_the_text_is_of_the_outer_parameters(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[torch.Tensor] = []
    generate = Decoder.generate

    def watched(self: Decoder, *arguments: Any, **options: Any) -> torch.Tensor:
        used.append(self.embedding.weight.detach().clone())
        return generate(self, *arguments, **options)

    def compare(trainer: Trainer, data: Any) -> None:
        write_sample(trainer, data)
        with trainer.outer_model() as model:
            assert torch.equal(used[-1], model.get_parameter("embedding.weight"))
        assert trainer.done or not torch.equal(used[-1], trainer.models[0].get_parameter("embedding.weight"))

    monkeypatch.setattr(Decoder, "generate", watched)
    monkeypatch.setattr(run, "write_sample", compare)
    trained(source, tmp_path, 8)
    assert len(used) == 3


def test_a_compiled_model_is_not_compiled_again_for_every_length(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiled(self: Decoder, *_: Any) -> None:
        def body(tokens: torch.Tensor, *rest: Any) -> torch.Tensor:
            assert tokens.shape[1] == 16, "only the length of training is compiled"
            return self._body(tokens, *rest)

        self._compiled = body

    monkeypatch.setattr(Decoder, "compile", compiled)
    monkeypatch.setitem(SMALL, "compile", True)
    assert len(trained(source, tmp_path, 8)[1]) == 3


def test_a_model_that_has_diverged_ends_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def spoilt(trainer: Trainer, data: Any) -> None:
        with torch.no_grad():
            kept = [p.clone() for p in trainer.models[0].parameters()]
            for loop in trainer.reporter.loops:
                for replica in loop._rounds.replicas:
                    replica.anchor.fill_(float("nan"))
        write_sample(trainer, data)
        assert all(map(torch.equal, kept, trainer.models[0].parameters()))
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "write_sample", spoilt)
    with pytest.raises(KeyboardInterrupt):
        trained(source, tmp_path, 8)
