"""The reference decoder against plain NumPy, and the papers' sizes."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from atoll.core.fragments import Blocks, find_blocks, split
from atoll.errors import ConfigError
from atoll.settings.model_presets import PRESETS, ModelConfig, preset
from atoll.train.model.decoder import Decoder, Loss, RotaryTables, rotary_tables
from example_counts import examples

NANO = ModelConfig(layers=2, width=24, heads=2, head_width=8, feedforward=40, vocabulary=50, context=16)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def nano(**changes: Any) -> Decoder:
    return Decoder(replace(NANO, **changes), generator=seeded())


def batch(sequences: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, NANO.vocabulary, (sequences, length), generator=seeded(seed))


def gradients(model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    model.loss(tokens).total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


# --- sizes


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        *[("35M", 35.3), ("100M", 88.3), ("200M", 184), ("300M", 336), ("500M", 559), ("1B", 1270), ("4B", 4180)],
        *[("60M", 58.9), ("150M", 149.8), ("400M", 388.9)],
        *[("tiny", 0.18), ("small", 1.89), ("7M", 7.15)],
    ],
)
def test_presets_have_the_papers_sizes(name: str, millions: float) -> None:
    assert preset(name).parameters == pytest.approx(millions * 1e6, rel=0.01)


@pytest.mark.parametrize("name", PRESETS)
def test_the_count_is_that_of_the_model(name: str) -> None:
    with torch.device("meta"):
        model = Decoder(preset(name))
    assert sum(p.numel() for p in model.parameters()) == preset(name).parameters
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_the_count_is_that_of_a_model_with_values() -> None:
    for name in ("tiny", "small"):
        assert sum(p.numel() for p in Decoder(preset(name)).parameters()) == preset(name).parameters


@examples(40)
@given(
    sizes=st.tuples(*[st.integers(1, 9)] * 6),
    half_head=st.integers(1, 5),
    tied=st.booleans(),
    qk_norm=st.booleans(),
)
def test_the_counts_of_any_shape(sizes: tuple[int, ...], half_head: int, tied: bool, qk_norm: bool) -> None:
    layers, width, heads, feedforward, vocabulary, context = sizes
    config = ModelConfig(
        layers=layers,
        width=width,
        heads=heads,
        head_width=2 * half_head,
        feedforward=feedforward,
        vocabulary=vocabulary,
        context=context,
        tied=tied,
        qk_norm=qk_norm,
    )
    with torch.device("meta"):
        model = Decoder(config)
    assert sum(p.numel() for p in model.parameters()) == config.parameters
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)
    assert config.matmul_parameters == matrices - (0 if tied else model.embedding.weight.numel())


# --- the same numbers as plain NumPy


def norm(x: Any, weight: Any) -> Any:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * weight


def turned(x: Any, base: float) -> Any:
    """RoPE on [time, head_width] as it is written in its paper: pairs are complex numbers."""
    time, head_width = x.shape
    pairs = x[:, : head_width // 2] + 1j * x[:, head_width // 2 :]
    pairs = pairs * np.exp(1j * np.outer(np.arange(time), base ** (-2 * np.arange(head_width // 2) / head_width)))
    return np.concatenate([pairs.real, pairs.imag], 1)


def oracle(config: ModelConfig, weights: dict[str, Any], tokens: Any) -> Any:
    """Logits [time, vocabulary] of one sequence [time]."""
    x = weights["embedding.weight"][tokens]
    for layer in range(config.layers):
        w = {name.removeprefix(f"blocks.{layer}."): value for name, value in weights.items()}
        queries, keys, values = np.split(norm(x, w["attention_norm.weight"]) @ w["qkv.weight"].T, 3, axis=1)
        heads = []
        for head in range(config.heads):
            columns = slice(head * config.head_width, (head + 1) * config.head_width)
            q, k = queries[:, columns], keys[:, columns]
            if config.qk_norm:
                q, k = norm(q, w["query_norm.weight"]), norm(k, w["key_norm.weight"])
            scores = turned(q, config.rope_base) @ turned(k, config.rope_base).T / math.sqrt(config.head_width)
            scores[np.triu_indices(len(tokens), 1)] = -np.inf
            chances = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(chances / chances.sum(1, keepdims=True) @ values[:, columns])
        x = x + np.concatenate(heads, 1) @ w["attention_out.weight"].T
        u = norm(x, w["feedforward_norm.weight"]) @ w["feedforward_in.weight"].T
        gelu = u / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (u + 0.044715 * u**3)))
        x = x + gelu @ w["feedforward_out.weight"].T
    return norm(x, weights["norm.weight"]) @ weights.get("head.weight", weights["embedding.weight"]).T


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_logits_and_loss_are_those_of_plain_numpy(tied: bool, qk_norm: bool) -> None:
    model = nano(tied=tied, qk_norm=qk_norm, z_loss=0.01, rope_base=100.0).double()
    generator = seeded(5)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of all ones would hide one that is not applied
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    tokens = batch(3, 13)
    weights = {name: value.numpy() for name, value in model.state_dict().items()}
    expected = np.stack([oracle(model.config, weights, sequence[:-1].numpy()) for sequence in tokens])
    np.testing.assert_allclose(model(tokens[:, :-1]).detach().numpy(), expected, rtol=0, atol=1e-11)

    log_total = np.log(np.exp(expected).sum(-1))
    cross_entropy = (log_total - np.take_along_axis(expected, tokens[:, 1:, None].numpy(), -1)[..., 0]).mean()
    loss = model.loss(tokens)
    assert loss.cross_entropy.item() == pytest.approx(cross_entropy, abs=1e-11)
    assert loss.total.item() == pytest.approx(cross_entropy + 0.01 * (log_total**2).mean(), abs=1e-11)


def tables(time: int, dtype: torch.dtype = torch.float32) -> RotaryTables:
    return rotary_tables(time, 8, 10000.0, torch.device("cpu"), dtype)


def test_attention_scores_depend_on_distance_alone() -> None:
    q, k = torch.randn(2, 1, 8, generator=seeded())
    q, k = (tables(40).rotate(x.expand(40, 1, 8)).squeeze(1) for x in (q, k))
    scores = q @ k.T
    for distance in range(-20, 21):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)
    assert scores[0].std() > 0.1


def test_positions_are_kept_in_fp32_whatever_the_model_is() -> None:
    for dtype, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        angles = tables(300, dtype)
        assert angles.cos.dtype == angles.sin.dtype == expected
        assert angles.rotate(torch.ones(300, 1, 8, dtype=dtype)).dtype == expected
        assert angles.cos[257, 0].item() == pytest.approx(math.cos(257), abs=1e-6)


def test_tables_made_in_inference_mode_can_be_trained_with() -> None:
    rotary_tables.cache_clear()
    model, tokens = nano(), batch(2, 12)
    with torch.inference_mode():
        model(tokens)
    model.loss(tokens).total.backward()


# --- what a decoder must do


def test_a_later_token_changes_no_earlier_logits() -> None:
    model, tokens = nano(), batch(2, 16)
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % NANO.vocabulary
    here, there = model(tokens), model(changed)
    assert torch.equal(here[:, :9], there[:, :9])
    assert not torch.isclose(here[:, 9:], there[:, 9:]).all(-1).any()


def test_tied_is_one_parameter_with_one_name() -> None:
    tied, untied = nano(), nano(tied=False)
    assert set(untied.state_dict()) - set(tied.state_dict()) == {"head.weight"}
    with torch.no_grad():
        tied.embedding.weight[7] = 0
    assert (tied(batch(1, 5))[..., 7] == 0).all()
    seen = batch(1, 8)
    unseen = next(token for token in range(NANO.vocabulary) if token not in seen)
    # As head the matrix learns about every token, as embedding only about those that were read.
    assert gradients(tied, seen)["embedding.weight"][unseen].any()
    assert not gradients(untied, seen)["embedding.weight"][unseen].any()


def test_qk_norm_makes_the_size_of_queries_and_keys_irrelevant() -> None:
    for qk_norm in (True, False):
        model, tokens = nano(qk_norm=qk_norm), batch(2, 10)
        before = model(tokens)
        with torch.no_grad():
            for block in model.blocks:
                block.get_parameter("qkv.weight")[: 2 * NANO.heads * NANO.head_width] *= 100
        assert torch.allclose(before, model(tokens), atol=1e-3) is qk_norm


def test_the_z_loss_is_added_to_what_is_descended_and_not_to_what_is_reported() -> None:
    model, tokens = nano(z_loss=0.3), batch(4, 12)
    logits = model(tokens[:, :-1])
    cross_entropy = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss = model.loss(tokens)
    assert isinstance(loss, Loss) and not loss.cross_entropy.requires_grad
    torch.testing.assert_close(loss.cross_entropy, cross_entropy.detach())
    torch.testing.assert_close(loss.total, cross_entropy + 0.3 * logits.logsumexp(-1).square().mean())
    plain = nano(z_loss=0.0).loss(tokens)
    assert torch.equal(plain.total, plain.cross_entropy)


def test_an_untrained_model_knows_little() -> None:
    model = Decoder(preset("tiny"), generator=seeded())
    loss = model.loss(torch.randint(0, 256, (4, 129), generator=seeded(1))).cross_entropy
    assert math.log(256) < loss < math.log(256) + 1


def test_recomputed_activations_give_the_same_gradients() -> None:
    tokens = batch(3, 17)
    plain, recomputed = gradients(nano(), tokens), gradients(nano(checkpoint_activations=True), tokens)
    assert plain.keys() == recomputed.keys() == dict(nano().named_parameters()).keys()
    assert all(torch.equal(plain[name], recomputed[name]) for name in plain)


def remembered_bytes(act: Callable[[], object]) -> int:
    """What autograd keeps for a backward pass."""
    sizes: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        sizes.append(tensor.nbytes)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        act()
    return sum(sizes)


def test_recomputing_remembers_less() -> None:
    plain, recomputing, tokens = nano(), nano(checkpoint_activations=True), batch(3, 17)
    assert remembered_bytes(lambda: recomputing.loss(tokens)) < remembered_bytes(lambda: plain.loss(tokens)) / 2
    assert remembered_bytes(lambda: plain.generate(tokens, 2)) == 0


@pytest.mark.parametrize("qk_norm", [True, False])
def test_bf16_autocast_stays_close_to_fp32(qk_norm: bool) -> None:
    model, tokens = nano(qk_norm=qk_norm), batch(4, 17)
    exact = gradients(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens[:, :-1]).dtype == torch.bfloat16
        loss = model.loss(tokens)
        rounded = gradients(model, tokens)
    assert loss.total.dtype == loss.cross_entropy.dtype == torch.float32
    assert loss.total.item() == pytest.approx(model.loss(tokens).total.item(), abs=0.02)
    for name, gradient in exact.items():
        assert functional.cosine_similarity(rounded[name].flatten(), gradient.flatten(), dim=0) > 0.99, name


def test_a_model_in_bf16_stays_close_to_fp32() -> None:
    tokens = batch(4, 17)
    loss = nano().bfloat16().loss(tokens).total
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(nano().loss(tokens).total.item(), abs=0.05)


def test_a_copy_of_a_compiled_model_is_its_own() -> None:
    model, tokens = nano(), batch(2, 12)
    model.compile(backend="eager")
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert not twin(tokens).any() and model(tokens).any()
    torch.compiler.reset()


def test_compiles_to_one_graph() -> None:
    tokens = batch(2, 12)
    for checkpoint_activations in (False, True):
        model = nano(checkpoint_activations=checkpoint_activations)
        expected = gradients(model, tokens)
        model.compile(backend="eager", fullgraph=True)
        compiled = gradients(model, tokens)
        assert all(torch.equal(expected[name], compiled[name]) for name in expected)
    torch.compiler.reset()


def test_learns_a_batch_by_heart() -> None:
    model, tokens = nano(), batch(4, 17)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model.loss(tokens)
        loss.total.backward()
        optimizer.step()
        losses.append(loss.cross_entropy.item())
    assert losses[0] > 3.5 and losses[-1] < 0.5


# --- the start


def test_the_same_seed_gives_the_same_model() -> None:
    def vector(model: Decoder) -> Tensor:
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    before = torch.get_rng_state()
    assert torch.equal(vector(nano()), vector(nano()))
    assert torch.equal(torch.get_rng_state(), before)  # with its own generator it leaves the global one alone
    assert not torch.equal(vector(nano()), vector(Decoder(NANO, generator=seeded(1))))

    torch.manual_seed(3)
    drawn = vector(Decoder(NANO))
    torch.manual_seed(3)
    assert torch.equal(vector(Decoder(NANO)), drawn)
    torch.set_rng_state(before)


def test_the_start_has_the_stated_spread() -> None:
    config = replace(NANO, layers=8, width=64, heads=4, head_width=32, feedforward=256, vocabulary=500, tied=False)
    for name, parameter in Decoder(config, generator=seeded()).named_parameters():
        if parameter.dim() == 1:
            assert (parameter == 1).all()
            continue
        inputs = {"attention_out": 128, "feedforward_out": 256}.get(name.split(".")[-2], 64)
        spread = inputs**-0.5 / (4 if name.endswith("_out.weight") else 1)
        assert parameter.std().item() == pytest.approx(spread, rel=0.03), name


def test_a_model_made_without_memory_gets_its_values_later() -> None:
    with torch.device("meta"):
        model = Decoder(NANO)
    model.to_empty(device="cpu")
    model.initialise(seeded())
    expected, tokens = nano(), batch(2, 9)
    assert model.state_dict().keys() == expected.state_dict().keys()
    assert torch.equal(model(tokens), expected(tokens))


# --- fragments and sampling


def test_its_blocks_become_fragments() -> None:
    with torch.device("meta"):
        model = Decoder(preset("35M"))
    assert find_blocks(model) == tuple(f"blocks.{layer}" for layer in range(6))
    fragments = split(model, Blocks())
    assert [fragment.name for fragment in fragments] == ["blocks 0, 2, 4", "blocks 1, 3, 5", "rest"]
    assert fragments[-1].parameters == ("embedding.weight", "norm.weight")
    assert sum(fragment.numel for fragment in fragments) == preset("35M").parameters


def test_generated_tokens_follow_the_generator_and_may_pass_the_context() -> None:
    model, prompt = nano(), batch(2, 5)
    drawn = model.generate(prompt, 20, generator=seeded(2))
    assert drawn.shape == (2, 25) and drawn.dtype == torch.int64 and not drawn.is_inference()
    assert torch.equal(drawn[:, :5], prompt)
    assert drawn.min() >= 0 and drawn.max() < NANO.vocabulary
    assert torch.equal(drawn, model.generate(prompt, 20, generator=seeded(2)))
    assert not torch.equal(drawn, model.generate(prompt, 20, generator=seeded(3)))


def test_a_temperature_of_0_takes_the_likeliest_token() -> None:
    model, tokens = nano(checkpoint_activations=True), batch(3, 14)
    likeliest = model.generate(tokens, 6, temperature=0)
    for end in range(14, 20):
        seen = likeliest[:, max(0, end - NANO.context) : end]
        assert torch.equal(likeliest[:, end], model(seen)[:, -1].argmax(-1))
    assert torch.equal(likeliest, model.generate(tokens, 6, temperature=1e-6, generator=seeded()))


def test_logits_that_are_not_finite_draw_a_token_all_the_same() -> None:
    model = nano()
    with torch.no_grad():
        model.embedding.weight.fill_(float("nan"))
    assert model.generate(batch(1, 4), 3, generator=seeded()).shape == (1, 7)


def test_a_temperature_flattens_the_chances() -> None:
    model, prompt = nano(), batch(1, 4).expand(4000, 4)
    expected = (model(prompt[:1])[0, -1] / 2).softmax(-1)
    drawn = model.generate(prompt, 1, temperature=2.0, generator=seeded())[:, -1]
    seen = drawn.bincount(minlength=NANO.vocabulary) / len(drawn)
    torch.testing.assert_close(seen, expected.detach(), rtol=0, atol=0.015)


# --- refusals


WHOLE = ("layers", "width", "heads", "head_width", "feedforward", "vocabulary", "context")


@pytest.mark.parametrize("setting", WHOLE)
@pytest.mark.parametrize("value", [0, -2, 2.0, "8", True, None])
def test_sizes_must_be_whole_numbers(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"^{setting} must be a whole number of at least 1, got {value!r}: "):
        replace(NANO, **{setting: value})


def test_a_head_must_have_pairs() -> None:
    with pytest.raises(ConfigError, match="head_width must be even, got 7: RoPE turns its values in pairs"):
        replace(NANO, head_width=7)


@pytest.mark.parametrize("value", [-1e-4, math.inf, math.nan, "1e-4"])
def test_weights_and_bases_must_be_finite_numbers(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"^z_loss must be a finite number of at least 0, got .*: below 0 "):
        replace(NANO, z_loss=value)
    with pytest.raises(ConfigError, match=r"^rope_base must be a finite number of at least 1, got .*: below 1 "):
        replace(NANO, rope_base=value)
    with pytest.raises(ConfigError, match=r"^temperature must be a finite number of at least 0, got "):
        nano().generate(batch(1, 2), 1, temperature=value)


@pytest.mark.parametrize(("name", "meant"), [("Tiny", "tiny"), ("1b", "1B"), ("500", "500M"), ("smal", "small")])
def test_a_slip_in_a_preset_name_is_corrected(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"^preset must be one of tiny, .*, got '{name}': did you mean '{meant}'\?"):
        preset(name)


def test_another_preset_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"got 'gigantic': for another shape, make a ModelConfig"):
        preset("gigantic")


def test_a_preset_can_be_changed() -> None:
    assert preset("tiny", context=64, tied=False) == replace(PRESETS["tiny"], context=64, tied=False)
    with pytest.raises(TypeError, match="contxt"):
        preset("tiny", contxt=64)
    with pytest.raises(ConfigError, match="context must be"):
        preset("tiny", context=0)


def test_sequences_must_fit_the_context() -> None:
    model = nano()
    assert model(batch(1, 16)).shape == (1, 16, NANO.vocabulary)
    assert model.loss(batch(1, 17)).total.isfinite()
    with pytest.raises(ConfigError, match=r"at least 1 token and at most 16, the model's context, got 17 "):
        model(batch(1, 17))
    with pytest.raises(ConfigError, match=r"at least 1 token and at most 16, the model's context, got 17 "):
        model.loss(batch(1, 18))
    with pytest.raises(ConfigError, match=r"at most 16, the model's context, got 0 \(loss takes one more"):
        model.loss(batch(1, 1))
    with pytest.raises(ConfigError, match=r"at least 1 token and at most 16, the model's context, got 0 "):
        model.generate(batch(1, 0), 3)
    with pytest.raises(ConfigError, match="count must be a whole number of at least 1, got 0"):
        model.generate(batch(1, 3), 0)
