"""Exports: the same bits and the same text come back, at any moment one is whole, and faults are one line."""

import hashlib
import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll.errors import AtollError, ConfigError, DataError
from atoll.settings.model_presets import ModelConfig
from atoll.train.data.tokenizer import Bytes, Subwords, train_bpe
from atoll.train.model.decoder import Decoder
from atoll.train.model.export import exists, export, load_export
from atoll.train.model.hub import HubModel
from atoll.train.model.sample import sample
from example_counts import examples
from kills import forked

NANO = ModelConfig(layers=2, width=16, heads=2, head_width=4, feedforward=24, vocabulary=256, context=32)
TEXTS = ["def one():\n    return 1\n", "the quick brown fox", "für Elise"] * 9


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(state)


@pytest.fixture(autouse=True)
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was flushed, in order; the disk itself is not waited for, as no test can cut the power."""
    seen: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: seen.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
    )
    return seen


def nano(seed: int = 0, **changes: Any) -> Decoder:
    return Decoder(replace(NANO, **changes), generator=torch.Generator().manual_seed(seed))


def llama(vocabulary: int = 256) -> HubModel:
    transformers: Any = import_module("transformers")
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=vocabulary, max_position_embeddings=32, **shape)
    torch.manual_seed(0)
    return HubModel(transformers.LlamaForCausalLM(config))


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- there and back


@examples(15)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 6),
    tied=st.booleans(),
    qk_norm=st.booleans(),
    z_loss=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_any_decoder_comes_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, ...],
    tied: bool,
    qk_norm: bool,
    z_loss: float,
    dtype: torch.dtype,
) -> None:
    layers, width, heads, half_head, feedforward, context = sizes
    shape = {"layers": layers, "width": width, "heads": heads, "head_width": 2 * half_head, "feedforward": feedforward}
    model = nano(**shape, context=context, tied=tied, qk_norm=qk_norm, z_loss=z_loss).to(dtype)
    folder = tmp_path_factory.mktemp("any") / "model"
    export(model, Bytes(), folder)
    again, tokenizer = load_export(folder)
    assert isinstance(again, Decoder) and again.config == model.config and same_bits(model, again)
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert isinstance(tokenizer, Bytes)


def test_what_is_in_the_folder(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        export(nano(), Bytes(), tmp_path / "run" / "model")
    finally:
        os.umask(before)
    folder = tmp_path / "run" / "model"
    assert names(tmp_path / "run") == {"model"}
    jsons = {"atoll.json", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names(folder) == jsons | {"model.safetensors"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o644}
    own = json.loads((folder / "atoll.json").read_text())
    assert (own["format"], own["version"], own["layers"], own["tied"]) == ("atoll decoder", 2, 2, True)


def test_a_hugging_face_model_is_one_that_transformers_loads(tmp_path: Path) -> None:
    bpe = train_bpe(TEXTS, 300)
    model = llama(bpe.vocabulary)
    export(model, bpe, tmp_path / "model")
    again, tokenizer = load_export(tmp_path / "model")
    assert isinstance(again, HubModel) and same_bits(model, again)
    assert isinstance(tokenizer, Subwords)
    assert tokenizer.encode(TEXTS[0]).tolist() == bpe.encode(TEXTS[0]).tolist()

    transformers: Any = import_module("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert same_bits(model.module, theirs)
    assert theirs.generation_config.eos_token_id == bpe.separator
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    for text in TEXTS[:3]:
        assert their_tokenizer(text)["input_ids"] == bpe.encode(text).tolist()
        assert their_tokenizer.decode(bpe.encode(text)) == text
    assert (their_tokenizer.eos_token_id, their_tokenizer.model_max_length) == (bpe.separator, 32)


def test_a_hugging_face_model_may_read_bytes(tmp_path: Path) -> None:
    model = llama()
    export(model, Bytes(), tmp_path / "model")
    again, tokenizer = load_export(tmp_path / "model")
    assert same_bits(model, again) and isinstance(tokenizer, Bytes)
    assert same_bits(
        model.module, import_module("transformers").AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    )


def test_ends_that_a_hugging_face_model_has_already_are_kept(tmp_path: Path) -> None:
    model: Any = llama()
    model.module.generation_config.eos_token_id = [7, 0]
    export(model, Bytes(), tmp_path / "model")
    transformers: Any = import_module("transformers")
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "model").eos_token_id == [7, 0]


# --- replacing


def test_a_new_export_takes_the_place_of_the_old(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for model in (nano(1), llama(), nano(2, layers=1)):
        export(model, Bytes(), folder)
        assert same_bits(load_export(folder)[0], model)
        assert names(tmp_path) == {"model"}


def test_an_export_whose_replacement_was_cut_short_is_found_where_it_was_set_aside(tmp_path: Path) -> None:
    folder, model = tmp_path / "model", nano(1)
    export(model, Bytes(), folder)
    folder.rename(tmp_path / ".model.old")
    assert exists(folder) and same_bits(load_export(folder)[0], model)
    export(nano(2), Bytes(), folder)
    assert same_bits(load_export(folder)[0], nano(2)) and names(tmp_path) == {"model"}


def test_all_is_on_disk_before_it_gets_its_name(tmp_path: Path, flushed: list[str]) -> None:
    for model in (nano(), llama()):
        flushed.clear()
        export(model, Bytes(), tmp_path / "model")
        *files, folder, parent = flushed
        assert sorted(files) == sorted(names(tmp_path / "model")) and len(files) > 2
        assert (folder, parent) == (".model.new", tmp_path.name)


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    export(nano(1), Bytes(), tmp_path / "model")
    (tmp_path / "link").symlink_to("model")
    export(nano(2), Bytes(), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and names(tmp_path) == {"link", "model"}
    assert same_bits(load_export(tmp_path / "link")[0], nano(2))


def test_what_is_no_export_is_not_deleted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    for folder in (tmp_path, tmp_path / "config.json"):
        with pytest.raises(ConfigError, match=r"is not an exported model: choose another folder"):
            export(nano(), Bytes(), folder)
    assert (tmp_path / "config.json").read_text() == "mine" and names(tmp_path) == {"config.json"}


@pytest.fixture
def tiny_disk(small_disk: Callable[[str], Path]) -> Path:
    """A file system of 256 KiB."""
    return small_disk("256k")


def test_a_full_disk_leaves_the_old_export(tiny_disk: Path) -> None:
    folder = tiny_disk / "model"
    export(nano(), Bytes(), folder)
    for model in (nano(vocabulary=5000), llama(5000)):
        with pytest.raises(
            DataError, match=r"cannot be exported to .*No space left on device.*; make room or"
        ) as caught:
            export(model, Bytes(), folder)
        assert "\n" not in str(caught.value)
        assert names(tiny_disk) == {"model"} and same_bits(load_export(folder)[0], nano())
    export(nano(3), Bytes(), folder)


def test_an_interruption_after_the_old_one_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export(nano(1), Bytes(), tmp_path / "model")
    rename = Path.rename

    def interrupted(path: Path, target: Path) -> Path:
        if path.name == ".model.new":
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export(nano(2), Bytes(), tmp_path / "model")
    assert names(tmp_path) == {"model"} and same_bits(load_export(tmp_path / "model")[0], nano(1))


def generation_of(folder: Path) -> int:
    """Which of the models that were exported is there; it must be whole."""
    model, _ = load_export(folder)
    return next(seed for seed in range(4) if same_bits(model, nano(seed)))


def kill_at_every_touch_of_the_disk(folder: Path) -> None:
    """An export that replaces another dies before its nth touch of the disk, any n; so may the one after it."""
    touches = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")
    chance = random.Random(1)

    def dying_export(seed: int, dies_at: int) -> None:
        count = itertools.count(1)

        def watch(event: str, _: object) -> None:
            if event in touches and next(count) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        export(nano(seed), Bytes(), folder)

    for dies_at in itertools.count(1):
        export(nano(0), Bytes(), folder)
        finished = forked(partial(dying_export, 1, dies_at))
        assert exists(folder) and generation_of(folder) in ((1,) if finished else (0, 1))
        if chance.random() < 0.5:
            forked(partial(dying_export, 2, chance.randrange(1, 30)))
            assert generation_of(folder) in (0, 1, 2)
        export(nano(3), Bytes(), folder)
        assert generation_of(folder) == 3 and names(folder.parent) == {"model"}
        if finished:
            assert dies_at > 15
            return


def kill_at_random_moments(folder: Path) -> None:
    """Exporters that go on and on are killed 10 times."""

    def on_and_on() -> None:
        for seed in itertools.cycle(range(4)):
            export(nano(seed), Bytes(), folder)

    chance = random.Random(1)
    export(nano(0), Bytes(), folder)
    for _ in range(10):
        forked(on_and_on, kill_after_s=chance.uniform(0.0, 0.05))
        assert generation_of(folder) in range(4)


def kill_exporters(folder: Path) -> None:
    warnings.simplefilter("error")
    os.fsync = lambda fd: None  # what a killed process has written is not lost
    kill_at_every_touch_of_the_disk(folder / "every" / "model")
    kill_at_random_moments(folder / "random" / "model")


@pytest.mark.processes
def test_a_killed_export_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=kill_exporters, args=(tmp_path,))
    process.start()
    process.join(timeout=120)
    assert process.exitcode == 0


# --- faults


@pytest.fixture(params=["now", "earlier"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """An export of this version, or of the one before transformers could read them."""
    if request.param == "now":
        export(nano(), Bytes(), tmp_path / "model")
    else:
        export_as_earlier(nano(), tmp_path / "model")
    return tmp_path / "model"


def export_as_earlier(model: Decoder, folder: Path) -> None:
    """Write the parameters under the decoder's names, and the shape into config.json."""
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    about = {"format": "atoll decoder", "version": 1, **asdict(model.config), "sha256": digest}
    (folder / "config.json").write_text(json.dumps(about))
    (folder / "tokenizer.json").write_text('{"atoll": "bytes"}\n')


def described(folder: Path) -> Path:
    """The file with the shape of a decoder."""
    own = folder / "atoll.json"
    return own if own.exists() else folder / "config.json"


def told_of(folder: Path, message: str) -> str:
    """The message as it is said of this folder."""
    return message.replace("config.json", described(folder).name)


def test_an_earlier_export_comes_back(folder: Path) -> None:
    model, tokenizer = load_export(folder)
    assert isinstance(model, Decoder) and model.config == NANO and same_bits(model, nano())
    assert isinstance(tokenizer, Bytes)
    assert sample(folder, "def ", tokens=9)


def refused(folder: Path) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        load_export(folder)
    message = str(caught.value)
    assert "\n" not in message and str(folder) in message
    return message


def change_config(folder: Path, **changes: Any) -> None:
    path = described(folder)
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}, default=str))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """As somebody would who knows what they do: without the checksum."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, sha256=...)


def test_nothing_to_load(folder: Path, tmp_path: Path) -> None:
    assert refused(tmp_path).endswith("holds no exported model: there is no config.json")
    refused(tmp_path / "nothing")
    (folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in refused(folder)
    (folder / "model.safetensors").unlink()
    assert "model.safetensors cannot be read" in refused(folder)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "config.json cannot be read: Expecting value"),
        ("\xff", "config.json cannot be read: "),
        ("[" * 10**5, "config.json cannot be read: "),
        ("[]", "config.json is damaged: it must hold a JSON object"),
        ("{}", "describes no model: format must be"),
        (
            '{"format": "atoll decoder", "version": 3}',
            ", got 3: upgrade atoll, which wrote it",
        ),
    ],
)
def test_a_config_that_cannot_be_read(folder: Path, text: str, expected: str) -> None:
    described(folder).write_bytes(text.encode("latin-1"))
    assert told_of(folder, expected) in refused(folder)


def test_a_config_that_is_neither_ours_nor_of_transformers(tmp_path: Path) -> None:
    export_as_earlier(nano(), tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text('{"model_type": "nonsense"}')
    assert "describes no model that transformers knows" in refused(tmp_path / "model")
    export(nano(), Bytes(), tmp_path / "model")
    (tmp_path / "model" / "atoll.json").write_text('{"model_type": "apertus"}')
    assert "atoll.json describes no model: format must be" in refused(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"layers": ...}, "config.json is damaged: 'layers' is missing"),
        ({"leyers": 3}, "config.json is damaged: 'leyers' is no setting"),
        ({"layers": "2"}, "config.json is damaged: layers must be a whole number of at least 1, got '2'"),
        ({"tied": "no"}, "config.json is damaged: tied must be true or false, got 'no'"),
        ({"layers": 10**9}, "config.json is damaged: layers must be at most 10000000, got 1000000000"),
        ({"context": 2**40}, "config.json is damaged: context must be at most 10000000, got 1099511627776"),
        ({"layers": 10**7}, "model.safetensors holds 6,752 values"),
        ({"layers": 1}, "model.safetensors holds 6,752 values"),
        ({"heads": 4, "head_width": 2, "qk_norm": True}, "model.safetensors holds 6,752 values"),
        ({"vocabulary": 16, "width": 256, "layers": 2}, "model.safetensors holds 6,752 values"),
        ({"heads": 1, "head_width": 8, "qk_norm": False}, "model.safetensors holds 6,752 values"),
        ({"sha256": "0"}, "model.safetensors is damaged: its SHA-256 is not the one in config.json; if it was changed"),
    ],
)
def test_a_config_that_does_not_fit(folder: Path, changes: dict[str, Any], expected: str) -> None:
    change_config(folder, **changes)
    assert told_of(folder, expected) in refused(folder)


def test_weights_that_cannot_be_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for torn in (b"", b"nonsense" * 9, whole[:-9], whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(torn)
        assert "model.safetensors is damaged: its SHA-256" in refused(folder)
    change_config(folder, sha256=...)
    for torn in (b"", b"nonsense" * 9, whole[:-9], whole + b"x"):
        path.write_bytes(torn)
        assert "model.safetensors cannot be read" in refused(folder)
    path.write_bytes(whole)
    assert same_bits(load_export(folder)[0], nano())


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda t, n: t.update({n: t[n].view(2, 8)}),
            "config.json, which asks for norm.weight of shape (16,)",
        ),
        (lambda t, n: t.update({n: t[n].long()}), "it has torch.int64 (16,)"),
        (lambda t, n: t.update({"norm.bias": t.pop(n)}), "point; it has none"),
        (lambda t, n: t.pop(n), "values where config.json asks for "),
        (lambda t, n: t.update({"more": torch.ones(1)}), "values where config.json asks for "),
    ],
)
def test_weights_that_do_not_fit(
    folder: Path, change: Callable[[dict[str, Tensor], str], object], expected: str
) -> None:
    norm = "norm.weight" if described(folder).name == "config.json" else "model.norm.weight"
    change_weights(folder, lambda tensors: change(tensors, norm))
    assert told_of(folder, expected) in refused(folder)


@pytest.mark.parametrize("part", ["q", "k", "v"])
@pytest.mark.parametrize("change", [torch.Tensor.double, torch.Tensor.long, lambda t: t.view(16, 8)])
def test_a_part_of_a_matrix_that_does_not_fit(tmp_path: Path, part: str, change: Callable[[Tensor], Tensor]) -> None:
    name = f"model.layers.1.self_attn.{part}_proj.weight"
    export(nano(), Bytes(), tmp_path / "model")
    change_weights(tmp_path / "model", lambda tensors: tensors.update({name: change(tensors[name])}))
    told = refused(tmp_path / "model")
    assert "asks for blocks.1.qkv.weight of shape (24, 16), in floating point; it has none" in told


def test_a_tokenizer_of_another_model(folder: Path) -> None:
    train_bpe(TEXTS, 300).save(folder)
    assert "is not of one piece: its tokenizer has " in refused(folder) and "the model knows 256" in refused(folder)


def outcome(folder: Path) -> nn.Module | str:
    """What comes of loading: a model, or what is said instead."""
    try:
        return load_export(folder)[0]
    except AtollError as fault:
        return str(fault)


@examples(60)
@given(data=st.data())
def test_no_damage_ends_in_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("fuzz") / "model"
    export(nano(), Bytes(), folder)
    path = folder / data.draw(st.sampled_from(sorted(names(folder))))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 4))] = data.draw(st.binary(max_size=4))
    path.write_bytes(content)
    result = outcome(folder)
    if isinstance(result, str):
        assert "\n" not in result
    else:  # only the checksum and settings that are no shape can change unnoticed
        assert same_bits(result, nano())
    shutil.rmtree(folder.parent)


# --- text


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder as a finished run leaves it."""
    export(nano(), Bytes(), tmp_path / "run" / "model")
    (tmp_path / "run" / "run.toml").touch()
    return tmp_path / "run"


def test_the_same_seed_gives_the_same_text(run: Path) -> None:
    texts = sample(run, "def ", tokens=40, count=3, seed=5)
    assert texts == sample(run / "model", "def ", tokens=40, count=3, seed=5)
    assert texts != sample(run, "def ", tokens=40, count=3, seed=6)
    assert len(set(texts)) == 3
    assert all(text.startswith("def ") and len(text) > 10 for text in texts)


def test_a_temperature_of_0_gives_one_text(run: Path) -> None:
    one, other = sample(run, "def ", tokens=20, temperature=0, count=2)
    assert one == other == sample(run, "def ", tokens=20, temperature=0, seed=1)[0]


def test_an_empty_prompt_begins_a_document(run: Path) -> None:
    start = torch.tensor([[Bytes.separator]])
    drawn = nano().generate(start, 30, temperature=0.8, generator=torch.Generator().manual_seed(0))[0, 1:].tolist()
    assert 0 not in drawn
    assert sample(run, "", tokens=30) == [Bytes().decode(drawn)]


@pytest.mark.parametrize("prompt", ["é" * 40, "\udcff\ud800", "\x00", "a\x00b"])
def test_prompts_that_are_long_or_odd(run: Path, prompt: str) -> None:
    (text,) = sample(run, prompt, tokens=50, temperature=5.0)  # nearly any bytes, hardly ever UTF-8
    assert "\ufffd" in text and "\x00" not in text
    if prompt == "a\x00b":
        assert text.startswith("a\n\nb")


@pytest.mark.parametrize("kind", [nano, llama])
def test_subwords_become_text(tmp_path: Path, kind: Callable[..., Any]) -> None:
    bpe = train_bpe(TEXTS, 300)
    export(kind(vocabulary=bpe.vocabulary + 7), bpe, tmp_path / "model")  # the model may know more tokens
    for prompt in ("für", ""):
        (text,) = sample(tmp_path / "model", prompt, tokens=60, temperature=3.0)
        assert text.startswith(prompt) and "<|end|>" not in text and len(text) > 30


def test_folders_to_sample_from(run: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing is neither a run nor an exported model: it has no run.toml and no"):
        sample(tmp_path / "nothing", "a")
    shutil.rmtree(run / "model")
    with pytest.raises(DataError, match=r"run has not finished, so it has no model/ yet: `atoll train .*run --resume`"):
        sample(run, "a")


def test_whose_model_to_sample_of_a_run_with_a_folder_for_each_worker(run: Path, tmp_path: Path) -> None:
    for worker in (0, 1):
        shutil.copytree(run, tmp_path / "all" / f"worker-{worker}")
    with pytest.raises(DataError, match=r"holds the workers of a run: say whose .*`atoll sample .*all/worker-0`"):
        sample(tmp_path / "all", "a")
    second = tmp_path / "all" / "worker-1"
    shutil.rmtree(second / "best", ignore_errors=True)
    with pytest.raises(DataError, match=r"only worker 0 evaluates: `atoll sample .*all/worker-0 --best`"):
        sample(second, "a", best=True)
    shutil.rmtree(second / "model")
    with pytest.raises(DataError, match=r"`atoll train .*worker-1 --worker 1 --resume` goes on with it$"):
        sample(second, "a")


def test_a_model_that_diverged_says_so(tmp_path: Path) -> None:
    model = nano()
    with torch.no_grad():
        model.norm.weight[3] = float("nan")
    export(model, Bytes(), tmp_path / "model")
    with pytest.raises(DataError, match=r"holds NaNs or infinities: its training diverged"):
        sample(tmp_path / "model", "a")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"tokens": 0}, "tokens must be a whole number of at least 1, got 0"),
        ({"count": 0}, "count must be a whole number of at least 1, got 0"),
        ({"temperature": -1.0}, "temperature must be a finite number of at least 0, got -1.0"),
        ({"seed": -1}, r"seed must be a whole number from 0 to 2\*\*63 - 1, got -1"),
        ({"seed": 2**63}, "seed must be a whole number from 0"),
    ],
)
def test_settings_that_cannot_work(run: Path, settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        sample(run, "a", **settings)
