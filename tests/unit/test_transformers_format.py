"""Exports that transformers reads by itself: the same logits, the same text, the same ids."""

import json
import string
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from atoll.settings.model_presets import PRESETS, ModelConfig
from atoll.train.data.tokenizer import Bytes, open_tokenizer, train_bpe
from atoll.train.model import hub
from atoll.train.model.decoder import Decoder
from atoll.train.model.export import export, load_export
from atoll.train.model.hub import HubModel
from atoll.train.model.transformers_format import describe, misfit, to_architecture
from example_counts import examples

NANO = ModelConfig(layers=2, width=16, heads=2, head_width=6, feedforward=24, vocabulary=256, context=32)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return import_module("transformers")


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    torch.set_rng_state(state)


def decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder none of whose parameters is at its start: norms are, and one could stand for another."""
    chance = torch.Generator().manual_seed(seed)
    model = Decoder(config, generator=chance)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0, std=0.3, generator=chance)
    return model.eval()


def some_tokens(config: ModelConfig, seed: int = 0) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(config.vocabulary, (1, config.context), generator=chance)


def distance(ours: Decoder, theirs: Any, tokens: Tensor) -> float:
    """Largest difference of any logit, as a share of the largest logit."""
    with torch.no_grad():
        expected, found = ours(tokens), theirs(tokens).logits
    assert expected.shape == found.shape
    return float((expected - found).abs().max() / expected.abs().max())


# --- logits


@pytest.mark.thorough_after(4)
@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_model_of_transformers(name: str, transformers: Any, tmp_path: Path) -> None:
    whole = PRESETS[name]
    with torch.device("meta"):
        ours = to_architecture(whole, Decoder(whole).state_dict())
        config = transformers.AutoConfig.for_model(**describe(whole, torch.float32, 0))
        theirs = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    theirs.pop("lm_head.weight")  # the embedding's, for presets are tied
    assert {key: value.shape for key, value in ours.items()} == {key: value.shape for key, value in theirs.items()}
    cut = replace(whole, layers=2 if whole.width < 512 else 1, feedforward=64, vocabulary=300)
    export(model := decoder(cut), Bytes(), tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert distance(model, loaded, some_tokens(cut)) < 1e-5


@examples(40)
@given(
    sizes=st.tuples(*[st.integers(1, 5)] * 6),
    tied=st.booleans(),
    qk_norm=st.booleans(),
    rope_base=st.floats(1, 1e6),
    seed=st.integers(0, 2**32),
)
def test_any_decoder_has_the_same_logits_in_transformers(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: tuple[int, ...],
    tied: bool,
    qk_norm: bool,
    rope_base: float,
    seed: int,
) -> None:
    transformers: Any = import_module("transformers")
    layers, width, heads, half_head, feedforward, context = sizes
    shape: dict[str, Any] = {"layers": layers, "width": 2 * width, "heads": heads, "head_width": 2 * half_head}
    others: dict[str, Any] = {"feedforward": 3 * feedforward, "context": 7 * context, "tied": tied, "qk_norm": qk_norm}
    config = replace(NANO, **shape, **others, rope_base=rope_base)
    model, folder = decoder(config, seed), tmp_path_factory.mktemp("any") / "model"
    export(model, Bytes(), folder)
    described = json.loads((folder / "config.json").read_text())
    if misfit(config) is not None:
        assert not qk_norm and config.width % heads and "model_type" not in described
        return
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert type(loaded).__name__ == ("ApertusForCausalLM" if qk_norm else "ArceeForCausalLM")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}
    assert loaded.config.tie_word_embeddings == tied
    assert distance(model, loaded, some_tokens(config, seed)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parameters_keep_their_dtype(dtype: torch.dtype, transformers: Any, tmp_path: Path) -> None:
    export(decoder(NANO).to(dtype), Bytes(), tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}


# --- text


@pytest.mark.parametrize("qk_norm", [True, False])
def test_generate_writes_what_atoll_writes(qk_norm: bool, transformers: Any, tmp_path: Path) -> None:
    export(model := decoder(replace(NANO, qk_norm=qk_norm)), Bytes(), tmp_path / "model")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompt = torch.tensor([list(b"reef")])
    expected = model.generate(prompt, 20, temperature=0)[0].tolist()
    if 0 in expected:  # where a document ends, so does generate
        expected = expected[: expected.index(0) + 1]
    assert loaded.generate(prompt, max_new_tokens=20, do_sample=False)[0].tolist() == expected
    assert loaded.generate(max_new_tokens=1)[0, 0] == 0, "without a prompt, a document begins"
    settings = loaded.generation_config
    assert settings.eos_token_id == settings.bos_token_id == settings.pad_token_id == 0
    assert loaded.config.pad_token_id is None, "its embedding would get no gradient"


LETTERS = st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("\0Āé\u2028" + string.printable))


@pytest.fixture(scope="module")
def byte_tokenizer(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bytes") / "model"
    export(decoder(NANO), Bytes(), folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


@examples(200)
@given(text=st.text(LETTERS), raw=st.binary(max_size=20))
def test_bytes_are_the_same_ids_and_the_same_text_in_transformers(byte_tokenizer: Any, text: str, raw: bytes) -> None:
    ids = Bytes().encode(text).tolist()
    assert byte_tokenizer(text)["input_ids"] == ids
    assert byte_tokenizer.decode(ids) == text
    assert byte_tokenizer.decode(list(raw)) == Bytes().decode(list(raw))
    assert byte_tokenizer.decode(list(raw), skip_special_tokens=True) == Bytes().decode([b for b in raw if b])


def test_bytes_end_a_document_as_in_training(byte_tokenizer: Any) -> None:
    assert (byte_tokenizer.eos_token_id, len(byte_tokenizer), byte_tokenizer.model_max_length) == (0, 256, 32)


def test_a_bpe_is_the_same_in_transformers(transformers: Any, tmp_path: Path) -> None:
    bpe = train_bpe(["der Rochen im Riff " * 9, "reef and ray " * 9], 300)
    export(decoder(replace(NANO, vocabulary=bpe.vocabulary)), bpe, tmp_path / "model")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert theirs("der Ray im reef")["input_ids"] == bpe.encode("der Ray im reef").tolist()
    assert theirs.eos_token_id == bpe.separator


# --- from there, and back again


def test_an_export_can_be_trained_further_as_a_hugging_face_model(transformers: Any, tmp_path: Path) -> None:
    export(model := decoder(NANO), Bytes(), tmp_path / "model")
    tokens = some_tokens(NANO)
    again = hub.load(str(tmp_path / "model"), weights=True)
    assert again.context == NANO.context and again.vocabulary == NANO.vocabulary
    assert distance(model, again.eval().module, tokens) < 1e-5
    again.loss(tokens).total.backward()
    module: Any = again.module
    assert module.get_input_embeddings().weight.grad[0].any(), "also the token between documents learns"


def test_what_transformers_saves_again_is_read(transformers: Any, tmp_path: Path) -> None:
    export(model := decoder(NANO), Bytes(), tmp_path / "model")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "saved")
    transformers.AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "saved")
    again, tokenizer = load_export(tmp_path / "saved")
    assert isinstance(again, HubModel) and isinstance(tokenizer, Bytes)
    assert distance(model, again.eval().module, some_tokens(NANO)) < 1e-5


def test_a_decoder_that_no_architecture_fits_says_why_and_keeps_its_own_form(tmp_path: Path) -> None:
    odd = replace(NANO, heads=3, qk_norm=False)
    export(model := decoder(odd), Bytes(), tmp_path / "model")
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    assert "width (16) must be a multiple of heads (3); set qk_norm = true" in described["no_architecture"]
    assert described["version"] == 1 and not (tmp_path / "model" / "atoll.json").exists()
    again, _ = load_export(tmp_path / "model")
    assert isinstance(again, Decoder) and again.config == odd
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters(), strict=True))
    assert isinstance(open_tokenizer(tmp_path / "model"), Bytes)
