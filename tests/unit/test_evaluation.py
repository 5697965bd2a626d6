"""Evaluation on tasks: the harness's own numbers, to the last digit, for transformers' models and for atoll's."""

import json
import math
import random
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install -e '.[eval]'")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.evaluator import evaluate as harness_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from atoll._util.disk import locked  # noqa: E402
from atoll.cli import main as cli  # noqa: E402
from atoll.errors import AtollError, ConfigError, DataError  # noqa: E402
from atoll.evaluation.causal_lm import CausalLM, HubEncoder, PlainEncoder, encoder_of  # noqa: E402
from atoll.evaluation.evaluate import evaluate  # noqa: E402
from atoll.evaluation.harness import TASKS  # noqa: E402
from atoll.evaluation.tasks import find_tasks  # noqa: E402
from atoll.runs.events import read  # noqa: E402
from atoll.runs.scored import Scored  # noqa: E402
from atoll.settings.model_presets import ModelConfig  # noqa: E402
from atoll.train.data.tokenizer import Bytes, train_bpe  # noqa: E402
from atoll.train.folder import LOCK  # noqa: E402
from atoll.train.model.decoder import Decoder  # noqa: E402
from atoll.train.model.export import export, load_export  # noqa: E402
from atoll.train.model.hub import HubModel  # noqa: E402
from full_disk import files_no_longer_than  # noqa: E402
from task_files import MadeTask, made, words, write_data, write_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("default::DeprecationWarning", "default::FutureWarning")

CONTEXT = 32
LENGTH_TOO = ("arc_easy", "openbookqa", "piqa")
"""Tasks that also have an accuracy by length."""
METRICS = [{"metric": metric, "aggregation": "mean", "higher_is_better": True} for metric in ("acc", "acc_norm")]
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
        metrics = METRICS if name in LENGTH_TOO else METRICS[:1]
        specs.append({"task": name, "dataset_path": "json", "dataset_kwargs": where, "metric_list": metrics, **splits})
    folders = ["arc", "openbookqa", "piqa", "super_glue/boolq", "lambada", "winogrande", "blimp"]
    manager = TaskManager(include_path=[TASKS / each for each in folders], include_defaults=False)
    loaded = manager.load([{"group": "made", "task": specs}])
    found: dict[str, Any] = harness_evaluate(lm=hflm(folder, batch), task_dict=loaded)
    return found


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
    answers = lm.loglikelihood(requested("loglikelihood", [texts for texts, _ in asked]))
    assert answers == [answer for _, answer in asked]
    assert (lm.cut, lm.requests) == (found.cut, found.requests)
    assert 0 < lm.cut < lm.requests == len(asked)  # some texts were longer than the context


def opened(folder: Path, batch: int) -> CausalLM:
    model, tokenizer = load_export(folder)
    return CausalLM(model, encoder_of(folder, model, tokenizer), torch.device("cpu"), batch)


def requested(kind: Any, texts: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, each, index) for index, each in enumerate(texts)]


# ---------------------------------------------------------------------- atoll's own models


def decoder(context: int = CONTEXT) -> Decoder:
    sizes = {"layers": 2, "width": 16, "heads": 2, "head_width": 8, "feedforward": 24}
    config = ModelConfig(**sizes, vocabulary=256, context=context)  # type: ignore[arg-type]
    return Decoder(config, generator=torch.Generator().manual_seed(0))


def by_hand(model: Decoder, context: bytes, continuation: bytes) -> tuple[float, bool]:
    """The likelihood of bytes, one after the other."""
    total, greedy = 0.0, True
    for index, byte in enumerate(continuation):
        before = list(context + continuation[:index])
        logits = model(torch.tensor([before[-CONTEXT:]]))[0, -1].detach().double()
        total += float(logits.log_softmax(-1)[byte])
        greedy &= int(logits.argmax()) == byte
    return total, greedy


@pytest.mark.parametrize("batch", [1, 3])
def test_a_decoder_reads_text_after_a_separator_and_forgets_on_the_left(batch: int) -> None:
    model = decoder()
    lm = CausalLM(model, PlainEncoder(Bytes()), torch.device("cpu"), batch)
    likely = next(  # what greedy decoding gives
        (letter, chr(byte))
        for letter in "abcdefghijklmnopqrstuvwxyz"
        if chr(byte := int(model(torch.tensor([[ord(letter)]]))[0, -1].argmax())).isalpha() and byte < 128
    )
    texts = [("", "reef"), ("the ", "tide"), ("a", "b"), ("a", "c"), likely, ("x" * 90, " islet"), ("é", "ü")]
    answers = lm.loglikelihood(requested("loglikelihood", texts))
    cut = ("x" * 90).encode()[-CONTEXT + len(" islet") - 1 :]  # what one window of the context leaves of it
    for (context, continuation), (total, greedy) in zip(texts, answers, strict=True):
        moved = len(context) - len(context.rstrip())  # the harness counts the last spaces to the continuation
        before, after = context[: len(context) - moved], context[len(context) - moved :] + continuation
        known = cut if len(context) > CONTEXT else before.encode() or bytes([Bytes.separator])
        expected, is_greedy = by_hand(model, known, after.encode())
        assert total == pytest.approx(expected, rel=1e-5)
        assert greedy == is_greedy
    assert answers[4][1] and (lm.cut, lm.requests) == (1, len(texts))


def test_a_decoder_is_evaluated_without_dropout_or_gradients(tmp_path: Path, data: Path) -> None:
    export(decoder(256), Bytes(), tmp_path / "model")
    found = evaluate(tmp_path / "model", ["piqa", "blimp_wh_island"], data, device="cpu")
    assert [(each.task, each.documents, each.chance) for each in found.scores] == [
        ("piqa", 12, 0.5),
        ("blimp_wh_island", 12, 0.5),
    ]
    assert found.scores[0].by_length is not None and found.scores[1].by_length is None
    assert found.context == 256 and found.model == tmp_path / "model"
    again = evaluate(tmp_path / "model", ["piqa", "blimp_wh_island"], data, device="cpu", batch=1)
    assert again.scores == found.scores
    assert not (tmp_path / "metrics.jsonl").exists()  # an export has no run to record it in


def write_blimp(folder: Path) -> None:
    pairs = [task.files[0] for task in find_tasks(["blimp"], TASKS)]
    assert len(pairs) == 67
    chance = random.Random(5)
    for number, pair in enumerate(pairs):
        count = 2 + number % 3  # the mean counts tasks, not documents
        rows = [{"sentence_good": words(chance, 2, 5), "sentence_bad": words(chance, 2, 5)} for _ in range(count)]
        write_rows(folder / f"{pair}.jsonl", rows)


def test_all_of_blimp_is_one_number_and_its_parts(tmp_path: Path) -> None:
    write_blimp(tmp_path / "data")
    export(decoder(64), Bytes(), tmp_path / "model")
    group, *parts = evaluate(tmp_path / "model", ["blimp", "blimp_wh_island"], tmp_path / "data", device="cpu").scores
    assert (group.task, group.group, group.chance, group.sha256) == ("blimp", None, 0.5, None)
    assert len(parts) == 67 and {part.group for part in parts} == {"blimp"}
    assert group.documents == sum(part.documents for part in parts)
    assert group.accuracy == pytest.approx(sum(part.accuracy for part in parts) / 67, rel=1e-12)
    assert group.stderr == pytest.approx(math.hypot(*(part.stderr or 0.0 for part in parts)) / 67, rel=1e-12)


def test_one_document_has_no_standard_error(tmp_path: Path) -> None:
    export(decoder(), Bytes(), tmp_path / "model")
    write_rows(tmp_path / "lambada_openai.jsonl", [{"context": "the old", "continuation": "stone"}])
    (only,) = evaluate(tmp_path / "model", ["lambada_openai"], tmp_path, device="cpu").scores
    assert (only.documents, only.chance, only.stderr) == (1, 0.0, None)


# ---------------------------------------------------------------------- refusals


def test_a_continuation_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    export(decoder(), Bytes(), tmp_path / "model")
    write_rows(tmp_path / "wh_island.jsonl", [{"sentence_good": "tide " * 20, "sentence_bad": "reef"}])
    with pytest.raises(ConfigError, match="1 to 32 tokens, which is the model's context; ' tide tide") as refused:
        evaluate(tmp_path / "model", ["blimp_wh_island"], tmp_path, device="cpu")
    assert refused.value.setting == "tasks"


def test_a_model_that_diverged_is_refused(tmp_path: Path, data: Path) -> None:
    model = decoder()
    with torch.no_grad():
        model.embedding.weight[3, 1] = math.nan
    export(model, Bytes(), tmp_path / "model")
    with pytest.raises(DataError, match="NaNs or infinities"):
        evaluate(tmp_path / "model", ["piqa"], data, device="cpu")


@pytest.mark.parametrize("device", ["tpu", "cuda:99", "mps", "cpu:x"])
def test_an_unknown_device_is_refused(tmp_path: Path, data: Path, device: str) -> None:
    export(decoder(), Bytes(), tmp_path / "model")
    with pytest.raises(ConfigError) as refused:
        evaluate(tmp_path / "model", ["piqa"], data, device=device)
    assert (refused.value.setting, refused.value.value) == ("device", device)


def test_tasks_without_continuations_are_refused() -> None:
    lm = CausalLM(decoder(), PlainEncoder(Bytes()), torch.device("cpu"), 1)
    with pytest.raises(ConfigError, match="log-likelihood"):
        lm.generate_until(requested("generate_until", [("a", {})]))
    with pytest.raises(ConfigError, match="whole texts"):
        lm.loglikelihood_rolling(requested("loglikelihood_rolling", [("a",)]))


def test_a_tokenizer_without_a_first_or_last_token_is_refused(tmp_path: Path) -> None:
    tokenizers: Any = import_module("tokenizers")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0}, merges=[]))
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="bos_token"):
        HubEncoder(tmp_path)


# ---------------------------------------------------------------------- a run, from end to end

RUN = """
threads = 1
model = {{layers = 2, width = 16, heads = 1, head_width = 16, feedforward = 16, context = 64}}
data = {{source = '{source}', cache = '{cache}'}}
train = {{steps = 4, batch = 1, eval_every = 2, eval_tokens = 64}}
"""


def atoll(*arguments: object) -> Any:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TQDM_DISABLE"):
        monkeypatch.setenv(name, "1")  # the command sets them, which must end with the test
    Path("texts").mkdir()
    for number in range(8):
        Path(f"texts/{number}.txt").write_text(f"{number} reef lagoon islet " * 20)
    Path("one.toml").write_text(RUN.format(source=tmp_path / "texts", cache=tmp_path / "tokens"))
    trained = atoll("train", "one.toml", "--view", "none")
    assert trained.exit_code == 0, trained.output
    return tmp_path / "runs" / "one"


def test_scores_of_a_run_are_told_recorded_and_reported(run: Path, data: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    told = atoll("eval", run, "--tasks", "lambada_openai, blimp_wh_island", "--data", data, "--device", "cpu")
    assert told.exit_code == 0, told.output
    assert "blimp_wh_island" in told.stdout and "50.0 %" in told.stdout and "context of 64 tokens" in told.stdout
    assert told.stdout.endswith(f"\nthe scores were recorded in {run / 'metrics.jsonl'}\n")
    after = (run / "metrics.jsonl").read_bytes()
    assert after.startswith(before)
    scores = [event for event in read(run / "metrics.jsonl") if isinstance(event, Scored)]
    assert [(each.task, each.weights) for each in scores] == [("lambada_openai", "final"), ("blimp_wh_island", "final")]

    told = atoll("eval", run, "--tasks", "blimp_wh_island", "--data", data, "--best", "--json", "--batch", "5")
    found = json.loads(told.stdout)
    assert found["model"] == str(run / "best") and found["requests"] == 24
    (best,) = found["tasks"]
    assert best["weights"] == "best" and best["documents"] == 12 and best["accuracy"] == scores[1].accuracy

    assert atoll("report", run).exit_code == 0
    page = (run / "report.html").read_text()
    share = f"{100 * scores[1].accuracy:.2f} ± {100 * (scores[1].stderr or 0):.2f} %"
    assert "Accuracy on tasks" in page and "blimp_wh_island (best)" in page and share in page
    assert atoll("train", run, "--resume", "--view", "none").exit_code == 0  # a finished run stays as it is
    assert [event for event in read(run / "metrics.jsonl") if isinstance(event, Scored)][:2] == scores


def test_scores_of_trained_rows_stand_in_the_papers_table(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    papers = __import__("papers")
    runs, results, files = (run.parent.parent / name for name in ("rows", "results", "tasks"))
    shutil.copytree(run, runs / "data-parallel")
    shutil.copytree(run, runs / "not-finished")
    (runs / "data-parallel" / "took").write_text("1")
    results.mkdir()
    papers.keep_metrics(run, results / "data-parallel.jsonl")
    write_blimp(files)
    write_rows(files / "lambada_openai.jsonl", [{"context": "the old", "continuation": "stone"}])
    for _ in range(2):  # the second finds nothing to do
        papers.score(runs, results, files)
    events = list(read(results / "data-parallel.jsonl"))
    group = [event for event in events if isinstance(event, Scored) and event.task == "blimp"]
    assert len(group) == 1 and len([event for event in events if isinstance(event, Scored)]) == 69
    head, _, row = papers.table(papers.load(results))
    assert head.endswith("| BLiMP | LAMBADA |") and f"| {100 * group[0].accuracy:.2f} % ± " in row
    assert [path.name for path in results.iterdir()] == ["data-parallel.jsonl"]


def test_a_run_that_is_being_trained_is_left_alone(run: Path, data: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    with locked(run / LOCK, AtollError("busy")):
        refused = atoll("eval", run, "--tasks", "piqa", "--data", data)
        assert refused.exit_code == 1 and "is being trained" in refused.stderr and str(run / "model") in refused.stderr
        told = atoll("eval", run / "model", "--tasks", "blimp_wh_island", "--data", data)
        assert told.exit_code == 0 and "recorded" not in told.output
    assert (run / "metrics.jsonl").read_bytes() == before


def test_metrics_that_cannot_be_written_are_told_before_anything_is_read(run: Path, tmp_path: Path) -> None:
    for lose in (Path.unlink, Path.mkdir):
        lose(run / "metrics.jsonl")
        refused = atoll("eval", run, "--tasks", "piqa", "--data", tmp_path / "nowhere")
        assert refused.exit_code == 1 and str(run / "metrics.jsonl") in refused.stderr
        assert f"evaluate {run / 'model'}, which records none" in refused.stderr


def test_scores_are_printed_when_the_disk_is_full(run: Path, data: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    tasks = ["blimp_wh_island", "piqa"]
    asked = ("eval", run, "--tasks", ",".join(tasks), "--data", data)
    with files_no_longer_than(len(before) + 400):  # room for the first score, but not for both
        table, as_json = atoll(*asked), atoll(*asked, "--json")
    assert table.exit_code == as_json.exit_code == 1
    assert "blimp_wh_island" in table.stdout and "50.0 %" in table.stdout and "were recorded" not in table.output
    assert [score["task"] for score in json.loads(as_json.stdout)["tasks"]] == tasks
    for told in (table, as_json):
        assert f"error: the scores were not recorded: {run / 'metrics.jsonl'} cannot be written" in told.stderr
    assert (run / "metrics.jsonl").read_bytes() == before


def test_mistakes_are_told_in_one_line(run: Path, data: Path, tmp_path: Path) -> None:
    unknown = atoll("eval", run, "--tasks", "arc_eazy", "--data", data)
    assert unknown.exit_code == 2 and "did you mean arc_easy?" in unknown.stderr and "winogrande" in unknown.stderr
    assert atoll("eval", run, "--tasks", ",", "--data", data).exit_code == 2
    missing = atoll("eval", run, "--tasks", "piqa", "--data", tmp_path / "texts")
    assert missing.exit_code == 1 and "piqa.jsonl" in missing.stderr
    assert "neither a run nor an exported model" in atoll("eval", data, "--tasks", "piqa", "--data", data).stderr
    assert [event for event in read(run / "metrics.jsonl") if isinstance(event, Scored)] == []
