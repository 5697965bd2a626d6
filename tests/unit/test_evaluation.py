"""Evaluation on tasks: the harness's own numbers, to the last digit, for transformers' models and for atoll's."""

import json
import math
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install atoll[eval]")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install atoll[hf]")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.evaluator import evaluate as harness_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from atoll._util.disk import locked  # noqa: E402
from atoll.cli import main as cli  # noqa: E402
from atoll.errors import AtollError, ConfigError, DataError  # noqa: E402
from atoll.evaluation.causal_lm import CausalLM, HubEncoder, PlainEncoder, encoder_of  # noqa: E402
from atoll.evaluation.harness import TASKS, score  # noqa: E402
from atoll.evaluation.run import evaluate  # noqa: E402
from atoll.evaluation.tasks import find_tasks, read_task  # noqa: E402
from atoll.runs.events import read  # noqa: E402
from atoll.runs.task_score import TaskScore  # noqa: E402
from atoll.settings.model_presets import ModelConfig  # noqa: E402
from atoll.train.data.tokenizer import Bytes, train_bpe  # noqa: E402
from atoll.train.folder import LOCK  # noqa: E402
from atoll.train.model.decoder import CausalModel, Decoder  # noqa: E402
from atoll.train.model.export import export, load_export  # noqa: E402
from atoll.train.model.hub import HubModel  # noqa: E402
from task_files import BLIMP, MadeTask, made, words, write_data, write_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning", "default::ResourceWarning")

CONTEXT = 32
METRICS = {name: ("acc", "acc_norm") for name in ("arc_easy", "openbookqa", "piqa")}
METRICS |= {name: ("acc",) for name in ("boolq", "lambada_openai", "winogrande", *(f"blimp_{pair}" for pair in BLIMP))}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails every connection that a test makes."""
    import socket

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("an evaluation must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def tasks() -> dict[str, MadeTask]:
    return made()


@pytest.fixture
def data(tmp_path: Path, tasks: dict[str, MadeTask]) -> Path:
    return write_data(tmp_path / "data", tasks)


def tokenizer_text() -> list[str]:
    chance = random.Random(7)
    return [words(chance, 20, 60) for _ in range(40)]


def gpt2(folder: Path) -> Path:
    """Exports a GPT-2 with random weights by atoll."""
    torch.manual_seed(1)
    tokenizer = train_bpe(tokenizer_text(), 290)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 0, "eos_token_id": 0}
    config = transformers.GPT2Config(vocab_size=tokenizer.vocabulary, initializer_range=0.4, **sizes)
    export(HubModel(transformers.GPT2LMHeadModel(config)), tokenizer, folder)
    return folder


def llama(folder: Path) -> Path:
    """Saves a Llama with random weights as public ones are: its tokenizer puts a first token before every text."""
    tokenizers: Any = import_module("tokenizers")
    torch.manual_seed(2)
    train_bpe(tokenizer_text(), 290).save(folder)
    inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    inner.add_special_tokens(["<s>", "</s>"])
    first = inner.token_to_id("<s>")
    inner.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", first)])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>")
    fast.save_pretrained(folder)
    config = transformers.LlamaConfig(
        vocab_size=len(fast), max_position_embeddings=CONTEXT, initializer_range=0.4, **SIZES
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


MODELS = {"gpt2": gpt2, "llama": llama}


def harness_numbers(folder: Path, tasks: dict[str, MadeTask], scratch: Path, batch: int) -> dict[str, Any]:
    """The harness alone: its class for transformers, its tasks, and documents in its own shape, from JSON files."""
    specs = []
    for name, task in tasks.items():
        file = write_rows(scratch / f"{name}.jsonl", task.harness)
        where = {"data_files": {"rows": str(file)}, "cache_dir": str(scratch / "cache")}
        splits = {"training_split": None, "validation_split": None, "test_split": "rows", "dataset_name": None}
        metrics = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in METRICS[name]]
        specs.append({"task": name, "dataset_path": "json", "dataset_kwargs": where, "metric_list": metrics, **splits})
    folders = ["arc", "openbookqa", "piqa", "super_glue/boolq", "lambada", "winogrande", "blimp"]
    manager = TaskManager(include_path=[TASKS / each for each in folders], include_defaults=False)
    loaded = manager.load([{"group": "made", "task": specs}])
    return harness_evaluate(lm=hflm(folder, batch), task_dict=loaded)


def hflm(folder: Path, batch: int) -> Any:
    return HFLM(pretrained=str(folder), dtype="float32", batch_size=batch, device="cpu")


@pytest.mark.parametrize(("kind", "batch"), [("gpt2", 1), ("gpt2", 4), ("llama", 4)])
def test_a_public_architecture_gets_the_harness_own_numbers(
    tmp_path: Path, data: Path, tasks: dict[str, MadeTask], kind: str, batch: int
) -> None:
    (tmp_path / kind).mkdir()
    folder = MODELS[kind](tmp_path / kind)
    expected = harness_numbers(folder, tasks, tmp_path / "scratch", batch)
    found = evaluate(folder, [*tasks], data, batch=batch, device="cpu")
    assert [each.task for each in found.scores] == [*tasks]
    for ours in found.scores:
        theirs = expected["results"][ours.task]
        assert (ours.accuracy, ours.stderr) == (theirs["acc,none"], theirs["acc_stderr,none"])
        assert ours.by_length == theirs.get("acc_norm,none")
        assert ours.by_length_stderr == theirs.get("acc_norm_stderr,none")
        assert ours.documents == len(tasks[ours.task].local)
    assert len({ours.accuracy for ours in found.scores} - {0.0, 1.0}) > 2  # no number is that of a broken model

    # Not only the right ones are the same: every log-likelihood has the same bits.
    asked = [
        (tuple(arguments), tuple(sample["resps"][index][0]))
        for name in tasks
        for sample in expected["samples"][name]
        for index, arguments in enumerate(sample["arguments"])
    ]
    lm = opened(folder, batch)
    assert lm.loglikelihood(requested("loglikelihood", [texts for texts, _ in asked])) == [answer for _, answer in asked]
    assert (lm.cut, lm.requests) == (found.cut, found.requests)
    assert 0 < lm.cut < lm.requests == len(asked)  # some texts were longer than the context


def opened(folder: Path, batch: int) -> CausalLM:
    model, tokenizer = load_export(folder)
    return CausalLM(model, encoder_of(folder, model, tokenizer), torch.device("cpu"), batch)


def requested(kind: Any, texts: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(texts)]
