"""Hugging Face models as the trainer's: tiny ones made from their configs; nothing is downloaded."""

import copy
import json
import logging
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from atoll import Lockstep, OuterLoop, Streaming, local
from atoll.checkpoint import rng_state, set_rng_state
from atoll.core.fragments import Blocks, find_blocks, split
from atoll.errors import ConfigError, DataError
from atoll.train.model.decoder import Loss
from atoll.train.model.hub import HubModel, load, save
from fleet import free_port

transformers: Any = import_module("transformers")  # its types are half there

SHAPE = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 16,
}
GPT2 = {"vocab_size": 50, "n_positions": 16, "n_embd": 16, "n_layer": 4, "n_head": 2, "bos_token_id": 0}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", SHAPE),
    "tied llama": ("LlamaConfig", SHAPE | {"tie_word_embeddings": True}),
    "gpt2": ("GPT2Config", GPT2 | {"eos_token_id": 0}),  # tied, with dropout
    "mixtral": ("MixtralConfig", SHAPE | {"num_local_experts": 4, "output_router_logits": True}),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(state)


def bare(kind: str, **changes: Any) -> Any:
    """The model as transformers makes it, in train() mode."""
    config_class, settings = KINDS[kind]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings | changes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def tiny(kind: str = "llama", **changes: Any) -> HubModel:
    return HubModel(bare(kind, **changes))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch(sequences: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, 50, (sequences, length), generator=seeded(seed))


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = dict(one.named_parameters()), dict(other.named_parameters())
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


# --- the same numbers as transformers


@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2"])
def test_logits_and_loss_are_those_of_transformers(kind: str) -> None:
    model, tokens = tiny(kind).eval(), batch(3, 13)
    theirs = model.module(input_ids=tokens, labels=tokens)
    torch.testing.assert_close(model(tokens), theirs.logits)
    loss = model.loss(tokens)
    torch.testing.assert_close(loss.total, theirs.loss)
    assert isinstance(loss, Loss) and loss.total.requires_grad and not loss.cross_entropy.requires_grad
    assert loss.total.item() == loss.cross_entropy.item()


@pytest.mark.parametrize("asked", [True, False])
def test_a_router_loss_is_descended_if_the_config_asks_for_it_and_never_reported(asked: bool) -> None:
    model, tokens = tiny("mixtral", output_router_logits=asked, router_aux_loss_coef=0.3), batch(3, 13)
    loss = model.loss(tokens)
    routers = model.module(input_ids=tokens[:, :-1], output_router_logits=True).aux_loss
    assert routers > 1
    torch.testing.assert_close(loss.total, loss.cross_entropy + (0.3 * routers if asked else 0))
    torch.testing.assert_close(loss.cross_entropy, tiny("mixtral", output_router_logits=False).loss(tokens)[1])


def test_a_router_loss_of_unknown_weight_is_refused() -> None:
    model = tiny("mixtral")
    model._router_weight = None  # as for a model that names it in some new way
    with pytest.raises(ConfigError, match=r"^MixtralForCausalLM has a router loss but no weight for it: set "):
        model.loss(batch(2, 5))


def test_bf16_autocast_stays_close_to_fp32() -> None:
    model, tokens = tiny(), batch(4, 17)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens[:, :-1]).dtype == torch.bfloat16
        rounded = model.loss(tokens)
    assert rounded.total.dtype == rounded.cross_entropy.dtype == torch.float32
    assert rounded.total.item() == pytest.approx(model.loss(tokens).total.item(), abs=0.02)


def test_compiles_to_one_graph() -> None:
    tokens = batch(2, 12)
    model, compiled = tiny(), tiny()
    compiled.compile(backend="eager", fullgraph=True)
    for each in (model, compiled):
        each.loss(tokens).total.backward()
    for ours, theirs in zip(model.parameters(), compiled.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        # On some processors the last bit differs: a graph may add up gradients in another order.
        torch.testing.assert_close(theirs.grad, ours.grad, rtol=1e-5, atol=1e-7)
    torch.compiler.reset()


# --- in the outer loop


@pytest.mark.parametrize(
    ("kind", "layers", "rest"),
    [
        ("llama", "module.model.layers", ("model.embed_tokens", "model.norm", "lm_head")),
        ("tied llama", "module.model.layers", ("model.embed_tokens", "model.norm")),
        (
            "gpt2",
            "module.transformer.h",
            ("transformer.wte", "transformer.wpe", "transformer.ln_f", "transformer.ln_f"),
        ),
    ],
)
def test_its_layers_become_fragments(kind: str, layers: str, rest: tuple[str, ...]) -> None:
    model = tiny(kind)
    assert find_blocks(model) == tuple(f"{layers}.{layer}" for layer in range(4))
    fragments = split(model, Blocks())
    assert [fragment.name for fragment in fragments] == ["blocks 0, 2", "blocks 1, 3", "rest"]
    assert [name.rpartition(".")[0].removeprefix("module.") for name in fragments[-1].parameters] == list(rest)


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2", "mixtral"])
def test_workers_far_apart_train_it_together(kind: str) -> None:
    start, workers = tiny(kind), 2
    models = [copy.deepcopy(start) for _ in range(workers)]
    crew = Lockstep([OuterLoop(m, Streaming(period=6), link) for m, link in zip(models, local(workers), strict=True)])
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    shards = [batch(4, 17, seed) for seed in range(workers)]
    for _ in range(18):
        for model, optimizer, shard in zip(models, optimizers, shards, strict=True):
            optimizer.zero_grad()
            model.loss(shard).total.backward()
            optimizer.step()
        crew.step()
    assert not same_bits(*models)
    crew.finish()
    assert same_bits(*models)
    for model in models:
        inner: Any = model.module
        tied = inner.get_input_embeddings().weight is inner.get_output_embeddings().weight
        assert tied is (kind in ("tied llama", "gpt2"))
        model.eval()
        for shard in shards:
            assert model.loss(shard).cross_entropy < start.eval().loss(shard).cross_entropy - 0.3


def test_a_worker_with_the_bare_model_can_join() -> None:
    links = local(2)
    crew = Lockstep(
        [OuterLoop(tiny(), Streaming(period=3), links[0]), OuterLoop(bare("llama"), Streaming(period=3), links[1])]
    )
    for _ in range(4):
        crew.step()
    crew.finish()


def test_dropout_follows_the_global_generator_that_checkpoints_hold() -> None:
    model, tokens = tiny("gpt2"), batch(3, 13)
    state = rng_state()
    first, second = model.loss(tokens).total, model.loss(tokens).total
    assert first.item() != second.item()
    set_rng_state(state)
    assert torch.equal(model.loss(tokens).total, first) and torch.equal(model.loss(tokens).total, second)
    model.eval()
    assert torch.equal(model.loss(tokens).total, model.loss(tokens).total)


# --- sampling


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_generated_tokens_follow_the_generator_and_may_pass_the_context(kind: str) -> None:
    model, prompt = tiny(kind), batch(2, 5)
    before = torch.get_rng_state()
    drawn = model.generate(prompt, 20, generator=seeded(2))
    assert drawn.shape == (2, 25) and drawn.dtype == torch.int64 and not drawn.is_inference()
    assert torch.equal(drawn[:, :5], prompt)
    assert drawn.min() >= 0 and drawn.max() < 50
    assert torch.equal(drawn, model.generate(prompt, 20, generator=seeded(2)))
    assert not torch.equal(drawn, model.generate(prompt, 20, generator=seeded(3)))
    assert model.training and torch.equal(torch.get_rng_state(), before)  # dropout was off, and is on again


def mamba() -> HubModel:
    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    torch.manual_seed(0)
    return HubModel(transformers.MambaForCausalLM(config))


def test_what_is_remembered_of_earlier_tokens_changes_nothing() -> None:
    unlimited = tiny("gpt2")
    unlimited.context = None
    for model in (tiny("llama"), tiny("gpt2"), mamba(), unlimited):
        length = 12 if model is not unlimited else 4
        likeliest = model.generate(batch(3, length), 11, temperature=0)
        model.eval()
        for end in range(length, length + 11):
            seen = likeliest[:, max(0, end - (model.context or end)) : end]
            assert torch.equal(likeliest[:, end], model(seen)[:, -1].argmax(-1))


def test_a_temperature_flattens_the_chances() -> None:
    model, prompt = tiny("llama", initializer_range=0.5).eval(), batch(1, 4).expand(4000, 4)
    expected = (model(prompt[:1])[0, -1] / 2).softmax(-1)
    drawn = model.generate(prompt, 1, temperature=2.0, generator=seeded())[:, -1]
    torch.testing.assert_close(drawn.bincount(minlength=50) / 4000, expected.detach(), rtol=0, atol=0.02)
    for cold in (1e-6, 1e-300):
        assert torch.equal(
            model.generate(prompt[:2], 3, temperature=cold), model.generate(prompt[:2], 3, temperature=0)
        )


def test_a_failed_generation_turns_dropout_on_again() -> None:
    model = tiny("gpt2")
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[77]]), 1)
    assert model.training


def test_sequences_must_fit_the_context() -> None:
    model = tiny()
    assert (model.context, model.vocabulary, mamba().context) == (16, 50, None)
    assert model(batch(1, 16)).shape == (1, 16, 50)
    for act in (lambda: model(batch(1, 17)), lambda: model.loss(batch(1, 18))):
        with pytest.raises(ConfigError, match=r"at most 16, the model's context, got 17 \(loss"):
            act()
    with pytest.raises(ConfigError, match=r"at least 1 token and at most 16, .*, got 0 "):
        model.generate(batch(1, 0), 3)
    with pytest.raises(ConfigError, match=r"at least 1 token, got 0 "):
        mamba().loss(batch(1, 1))
    with pytest.raises(ConfigError, match="count must be a whole number of at least 1, got 0"):
        model.generate(batch(1, 3), 0)
    with pytest.raises(ConfigError, match="temperature must be a finite number of at least 0, got -1"):
        model.generate(batch(1, 3), 1, temperature=-1)


# --- folders


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tiny(), tmp_path / "llama")
    return tmp_path / "llama"


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_weights(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_saved_is_what_transformers_loads(tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    model = tiny(kind)
    save(model, tmp_path)
    again = load(str(tmp_path), weights=True)
    assert capfd.readouterr() == ("", "")
    assert again.training and same_bits(model, again) and again.vocabulary == 50 and again.context == 16
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(theirs) is type(model.module) and same_bits(model.module, theirs)


def test_transformers_keeps_its_own_voice(folder: Path) -> None:
    log: Any = transformers.logging
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    load(str(folder), weights=True)
    assert (log.get_verbosity(), log.is_progress_bar_enabled()) == before


def test_a_config_alone_gives_a_model_drawn_from_the_seed(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    change_config(folder, dtype="bfloat16")
    torch.manual_seed(5)
    model = load(str(folder), weights=False)
    torch.manual_seed(5)
    assert same_bits(model, load(str(folder), weights=False))
    assert not same_bits(model, load(str(folder), weights=False)) and not same_bits(model, tiny())
    assert model.training and {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_in_bf16_are_trained_in_fp32(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.update({k: v.bfloat16() for k, v in tensors.items()}))
    change_config(folder, dtype="bfloat16")
    model = load(str(folder), weights=True)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    expected = tiny().bfloat16().float()
    assert same_bits(model, expected)


def test_settings_for_sampling_that_contradict_each_other_do_not_keep_a_model_from_being_saved(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.3, "do_sample": false, "eos_token_id": 2}')
    model = load(str(folder), weights=True)
    save(model, folder.parent / "again")
    assert same_bits(model, load(str(folder.parent / "again"), weights=True))


def test_home_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(folder.parent))
    assert same_bits(load("~/llama", weights=True), tiny())


# --- refusals


def refused(where: Path | str, *, weights: bool = True) -> str:
    with pytest.raises((ConfigError, DataError)) as caught:
        load(str(where), weights=weights)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 500 and message.isascii()
    return f"{type(caught.value).__name__}: {message}"


def test_folders_that_hold_no_model(folder: Path, tmp_path: Path) -> None:
    assert refused(tmp_path / "nothing").endswith("nothing', and a name on the hub looks like owner/name")
    assert "a/b/c', and a name on the hub" in refused("a/b/c")
    assert refused(tmp_path).endswith("holds no config.json: give the folder of a Hugging Face model")
    assert "config.json is a file: give the folder" in refused(folder / "config.json")


def test_a_model_that_neither_a_folder_nor_the_hub_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    for weights in (True, False):
        message = refused("nobody/nothing", weights=weights)
        assert message.startswith(
            "ConfigError: model.hf: 'nobody/nothing' is not a folder here, and the Hugging Face hub"
        )


def test_a_hub_that_cannot_be_reached_is_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", nowhere)
    template = f"{nowhere}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    log = logging.getLogger("huggingface_hub")
    log.addHandler(caplog.handler)  # its records are not handed on to the root
    before = log.level
    try:
        message = refused("nobody/nothing")
    finally:
        log.removeHandler(caplog.handler)
    assert "; check the name and the connection, or give the folder of a copy (" in message
    assert naps and not caplog.records, "it tries again, and says nothing of it"
    assert log.level == before


@pytest.mark.thorough_after(2)
@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{", "is not a valid JSON file"),
        ("[1]", "Should have a `model_type` key"),
        ('{"model_type": "nonsense"}', "has model type `nonsense`"),
        ('{"model_type": "t5"}', "a t5 model is not a causal language model"),
        ('{"model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}', "as below"),
        ('{"model_type": "llama", "hidden_size": "8"}', "Field 'hidden_size' expected int, got str"),
        ('{"model_type": "llama", "hidden_act": "nonsense", "vocab_size": 9}', "KeyError: 'nonsense'"),
        ('{"model_type": "llama", "quantization_config": {"quant_method": "x"}}', "weights are quantised"),
    ],
)
def test_configs_of_no_causal_model(folder: Path, text: str, expected: str, weights: bool) -> None:
    (folder / "config.json").write_text(text)
    if "bert" in text:  # loads without complaint and would learn to copy
        config = transformers.AutoConfig.from_pretrained(folder)
        transformers.BertLMHeadModel(config).save_pretrained(folder)
        expected = "BertLMHeadModel is not a causal language model: it sees the tokens it is to predict"
    message = refused(folder, weights=weights)
    assert message.startswith("ConfigError: ") and str(folder) in message and expected in message


@pytest.mark.parametrize("weights", [True, False])
def test_code_that_comes_with_a_model_is_not_run(folder: Path, weights: bool) -> None:
    trap = folder / "trap"
    (folder / "code.py").write_text(f"open({str(trap)!r}, 'w')")
    change_config(folder, model_type="own", auto_map={"AutoConfig": "code.A", "AutoModelForCausalLM": "code.B"})
    assert "the model comes with code, which is never run" in refused(folder, weights=weights)
    assert not trap.exists()


def test_weights_that_cannot_be_read(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for torn in (b"", b"nonsense" * 9, whole[:-9], whole + b"x"):
        path.write_bytes(torn)
        assert refused(folder).startswith(f"DataError: {folder}: its safetensors weights cannot be read: ")
    path.unlink()
    torch.save({}, folder / "pytorch_model.bin")  # a pickle, which could run anything
    assert "cannot be read: Error no file named model.safetensors" in refused(folder)


def test_weights_of_another_model(folder: Path) -> None:
    change_weights(folder, lambda tensors: tensors.pop("model.layers.3.mlp.up_proj.weight"))
    assert "its weights lack model.layers.3.mlp.up_proj.weight (1 in all): the file" in refused(folder)
    change_config(folder, num_hidden_layers=3, vocab_size=49)
    message = refused(folder)
    assert message.startswith(f"DataError: {folder}: its weights hold ")
    assert ".weight with shape (50, 16) where config.json asks for (49, 16): the two " in message


def test_without_transformers_the_extra_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for weights in (True, False):
        assert refused(folder, weights=weights).endswith(": pip install 'atoll[hf]'")


def test_transformers_is_imported_only_when_it_is_used() -> None:
    code = "import sys, atoll.train.model.hub; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
