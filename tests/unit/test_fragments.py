"""Fragments of real architectures: what a block is, who owns what, and what a wrong policy is told."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from atoll.core.fragments import (
    Balanced,
    Blocks,
    Fragment,
    FragmentPolicy,
    Patterns,
    Whole,
    describe,
    find_blocks,
    split,
    unsynchronised_buffers,
)
from atoll.errors import ConfigError

# --- models


class Block(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.attention = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


class NanoGPT(nn.Module):
    """The nanoGPT layout: a ModuleDict around everything, and the head tied to the embedding."""

    def __init__(self, layers: int = 6, *, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(16, 4),
                "wpe": nn.Embedding(8, 4),
                "h": nn.ModuleList(block() for _ in range(layers)),
                "ln_f": nn.LayerNorm(4),
            }
        )
        self.lm_head = nn.Linear(4, 16, bias=False)
        self.lm_head.weight = self.transformer["wte"].weight  # type: ignore[assignment]


class Mixture(nn.Module):
    """A block with more experts in it than the model has blocks."""

    def __init__(self, experts: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(4, experts)
        self.experts = nn.ModuleList(Block() for _ in range(experts))


class Wrapper(nn.Module):
    """What DDP looks like from outside, without a process group."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module


class Net(nn.Module):
    """Named children, nothing else."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(Block() for _ in range(count))


def hugging_face(kind: str, **config: int) -> nn.Module:
    """A randomly initialised model of this class; nothing is downloaded."""
    model_class: Any = getattr(transformers, kind)
    model: nn.Module = model_class(model_class.config_class(**config))
    return model


SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def gpt2() -> nn.Module:
    return hugging_face("GPT2LMHeadModel", vocab_size=32, n_positions=16, n_embd=8, n_layer=5, n_head=2)


def llama() -> nn.Module:
    return hugging_face("LlamaForCausalLM", **SMALL, num_hidden_layers=4)


def tied_llama() -> nn.Module:
    return hugging_face("LlamaForCausalLM", **SMALL, num_hidden_layers=4, tie_word_embeddings=True)


def qwen3() -> nn.Module:
    return hugging_face("Qwen3ForCausalLM", **SMALL, num_hidden_layers=3, head_dim=4)


def t5() -> nn.Module:
    sizes = {"vocab_size": 32, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    return hugging_face("T5ForConditionalGeneration", **sizes, num_layers=2, num_decoder_layers=3)


def mixtral() -> nn.Module:
    return hugging_face("MixtralForCausalLM", **SMALL, num_hidden_layers=3, num_local_experts=6)


HUGGING_FACE: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt2": (gpt2, [f"transformer.h.{i}" for i in range(5)]),
    "llama": (llama, [f"model.layers.{i}" for i in range(4)]),
    "tied llama": (tied_llama, [f"model.layers.{i}" for i in range(4)]),
    "qwen3": (qwen3, [f"model.layers.{i}" for i in range(3)]),
    "t5": (t5, [f"encoder.block.{i}" for i in range(2)] + [f"decoder.block.{i}" for i in range(3)]),
    "mixtral": (mixtral, [f"model.layers.{i}" for i in range(3)]),
}


# --- helpers


def trainable(model: nn.Module) -> list[str]:
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def under(model: nn.Module, *paths: str) -> tuple[str, ...]:
    """Trainable parameters below these modules, in model order."""
    return tuple(name for name in trainable(model) if name.startswith(tuple(f"{path}." for path in paths)))


def names(model: nn.Module, policy: FragmentPolicy) -> list[str]:
    return [fragment.name for fragment in split(model, policy)]


def covered(fragments: tuple[Fragment, ...]) -> list[str]:
    return sorted(name for fragment in fragments for name in fragment.parameters)


# --- find_blocks


@pytest.mark.parametrize("case", HUGGING_FACE)
def test_the_blocks_of_hugging_face_models_are_their_layers(case: str) -> None:
    build, expected = HUGGING_FACE[case]
    assert list(find_blocks(build())) == expected


@pytest.mark.parametrize("case", HUGGING_FACE)
@pytest.mark.parametrize(
    "policy",
    [
        Whole(),
        Blocks(),
        Blocks(each=1, order="sequential"),
        Blocks(count=2, rest="spread"),
        Balanced(count=4),
    ],
    ids=repr,
)
def test_every_trainable_parameter_is_in_exactly_one_fragment(case: str, policy: FragmentPolicy) -> None:
    model = HUGGING_FACE[case][0]()
    fragments = split(model, policy)
    assert covered(fragments) == sorted(trainable(model))
    assert all(fragment.parameters for fragment in fragments)


def test_blocks_are_found_in_a_module_dict_model() -> None:
    assert find_blocks(NanoGPT(3)) == ("transformer.h.0", "transformer.h.1", "transformer.h.2")


def test_a_dict_counts_as_a_list_when_its_keys_are_numbers() -> None:
    numbered = Net(layers=nn.ModuleDict({str(i): Block() for i in range(2, 5)}))
    named = Net(heads=nn.ModuleDict({"policy": nn.Linear(2, 2), "value": nn.Linear(2, 2)}))
    assert find_blocks(numbered) == ("layers.2", "layers.3", "layers.4")
    assert find_blocks(named) == ()


def test_a_sequential_of_one_type_is_a_stack_and_the_model_itself_can_be_it() -> None:
    assert find_blocks(nn.Sequential(Block(), Block())) == ("0", "1")


def test_experts_never_win_over_layers() -> None:
    assert find_blocks(NanoGPT(3, block=Mixture)) == tuple(f"transformer.h.{i}" for i in range(3))


def test_a_short_list_does_not_win_over_the_layers() -> None:
    model = Net(embeddings=nn.ModuleList([nn.Embedding(4, 4), nn.Embedding(4, 4)]), layers=blocks(12))
    assert find_blocks(model) == tuple(f"layers.{i}" for i in range(12))


def test_of_equally_long_lists_the_one_with_more_parameters_wins() -> None:
    model = Net(codebooks=nn.ModuleList(nn.Embedding(64, 4) for _ in range(4)), layers=blocks(4))
    assert find_blocks(model) == tuple(f"layers.{i}" for i in range(4))


def test_a_list_of_mixed_types_is_looked_into() -> None:
    model = nn.ModuleList([nn.Linear(2, 2), blocks(2)])
    assert find_blocks(model) == ("1.0", "1.1")


def test_lists_of_one_module_or_none_are_not_repeated_blocks() -> None:
    model = Net(one=blocks(1), none=nn.ModuleList(), activations=nn.Sequential(nn.ReLU(), nn.ReLU()))
    assert find_blocks(model) == ()


def test_blocks_that_do_not_train_are_left_out() -> None:
    model = NanoGPT(4)
    for path in ("transformer.h.0", "transformer.h.2"):
        model.get_submodule(path).requires_grad_(False)
    assert find_blocks(model) == ("transformer.h.1", "transformer.h.3")


def test_a_long_frozen_tower_does_not_win() -> None:
    model = Net(vision=nn.ModuleList(nn.Linear(4, 4) for _ in range(9)), layers=blocks(2))
    model.get_submodule("vision").requires_grad_(False)
    assert find_blocks(model) == ("layers.0", "layers.1")


def test_a_single_block_left_to_train_is_not_replaced_by_its_experts() -> None:
    model = NanoGPT(3, block=Mixture)
    for path in ("transformer.h.0", "transformer.h.1"):
        model.get_submodule(path).requires_grad_(False)
    assert find_blocks(model) == ("transformer.h.2",)


def test_a_wrapped_model_has_the_same_blocks_below_its_prefix() -> None:
    model = NanoGPT(3)
    plain = find_blocks(model)
    assert find_blocks(Wrapper(model)) == tuple(f"module.{path}" for path in plain)
    assert find_blocks(torch.compile(model, backend="eager")) == tuple(f"_orig_mod.{path}" for path in plain)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrap",
    [Wrapper, checkpoint_wrapper, lambda block: torch.compile(block, backend="eager")],
    ids=["ddp", "checkpoint", "compile"],
)
def test_blocks_of_which_only_some_are_wrapped_are_still_of_one_type(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = NanoGPT(4)
    layers: Any = model.transformer["h"]
    layers[1], layers[3] = wrap(layers[1]), Wrapper(wrap(layers[3]))
    assert find_blocks(model) == tuple(f"transformer.h.{i}" for i in range(4))
    fragments = split(model, Blocks(each=1))
    assert fragments[1].parameters == under(model, "transformer.h.1")
    assert covered(fragments) == sorted(trainable(model))


def test_a_wrapper_does_not_make_different_modules_one_type() -> None:
    assert find_blocks(nn.Sequential(Wrapper(nn.Linear(2, 2)), Wrapper(nn.LayerNorm(2)))) == ()


# --- Whole, Blocks


def test_whole_is_one_fragment_in_model_order() -> None:
    model = NanoGPT(2)
    (fragment,) = split(model, Whole())
    assert fragment.name == "whole model"
    assert list(fragment.parameters) == trainable(model)


def test_strided_blocks_skip_by_the_number_of_fragments() -> None:
    model = NanoGPT(7)
    fragments = split(model, Blocks(each=3))
    assert [f.name for f in fragments] == ["blocks 0, 3, 6", "blocks 1, 4", "blocks 2, 5", "rest"]
    assert fragments[1].parameters == under(model, "transformer.h.1", "transformer.h.4")


def test_the_default_is_three_strided_blocks_to_a_fragment_and_the_rest_apart() -> None:
    model = NanoGPT(8)
    assert split(model, Blocks()) == split(model, Blocks(each=3, order="strided", rest="own"))


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (Blocks(each=3, order="sequential"), ["blocks 0, 1, 2", "blocks 3, 4, 5", "block 6", "rest"]),
        (Blocks(count=3, order="sequential"), ["blocks 0, 1", "blocks 2, 3", "blocks 4, 5, 6", "rest"]),
        (Blocks(count=2), ["blocks 0, 2, 4, 6", "blocks 1, 3, 5", "rest"]),
        (Blocks(each=100), ["blocks 0, 1, 2, 3, 4, 5 and 1 more", "rest"]),
    ],
    ids=repr,
)
def test_blocks_are_dealt_as_the_policy_says(policy: FragmentPolicy, expected: list[str]) -> None:
    assert names(NanoGPT(7), policy) == expected


def test_the_rest_is_everything_outside_blocks_and_tied_weights_once() -> None:
    rest = split(NanoGPT(3), Blocks())[-1]
    assert rest.name == "rest"
    assert rest.parameters == (
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "transformer.ln_f.weight",
        "transformer.ln_f.bias",
    )


def test_a_tied_head_is_in_the_rest_once_and_an_untied_one_is_in_it_too() -> None:
    assert split(tied_llama(), Blocks())[-1].parameters == ("model.embed_tokens.weight", "model.norm.weight")
    assert split(llama(), Blocks())[-1].parameters[-1] == "lm_head.weight"


def test_no_rest_makes_no_fragment() -> None:
    assert names(Net(layers=blocks(2)), Blocks(each=1)) == ["block 0", "block 1"]
    assert names(Net(layers=blocks(2)), Blocks(each=1, rest="spread")) == ["block 0", "block 1"]


def test_a_spread_rest_goes_largest_first_to_the_smallest_fragment() -> None:
    model = Net(
        layers=nn.ModuleList([nn.Linear(10, 10, bias=False), nn.Linear(4, 10, bias=False)]),
        small=nn.Linear(5, 1, bias=False),
        large=nn.Linear(9, 9, bias=False),
        equal=nn.Linear(5, 1, bias=False),
    )  # blocks of 100 and 40 values: 81 to the second makes 121, both fives to the first make 110
    first, second = split(model, Blocks(each=1, rest="spread"))
    assert first.parameters == ("layers.0.weight", "small.weight", "equal.weight")
    assert second.parameters == ("layers.1.weight", "large.weight")
    assert (first.name, second.name) == ("block 0 + small.weight, equal.weight", "block 1 + large.weight")


def test_a_spread_tie_goes_to_the_lowest_fragment() -> None:
    model = Net(layers=nn.ModuleList(nn.Linear(2, 2) for _ in range(3)), head=nn.Linear(2, 2, bias=False))
    assert names(model, Blocks(each=1, rest="spread")) == ["block 0 + head.weight", "block 1", "block 2"]


def test_a_parameter_two_blocks_share_belongs_to_the_first() -> None:
    model = NanoGPT(2)
    first, second = (model.get_submodule(f"transformer.h.{i}.attention") for i in range(2))
    second.weight = first.weight
    owner, other, _ = split(model, Blocks(each=1))
    assert "transformer.h.0.attention.weight" in owner.parameters
    assert not any(name.endswith("attention.weight") for name in other.parameters)


def test_repeats_of_one_shared_block_are_one_block() -> None:
    block, twin = Block(), Block()
    model = Net(layers=nn.ModuleList([block, twin, block, twin]), head=nn.Linear(2, 2))
    assert find_blocks(model) == ("layers.0", "layers.1")
    assert names(model, Blocks(each=1)) == ["block 0", "block 1", "rest"]
    alone = Net(layers=nn.ModuleList([block] * 3), head=nn.Linear(2, 2))
    assert names(alone, Blocks(each=1)) == ["block 0", "rest"]


def test_frozen_parameters_are_in_no_fragment() -> None:
    model = NanoGPT(4).requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".h." in name and "attention" in name)  # as adapters do
    fragments = split(model, Blocks(each=2))
    assert [f.name for f in fragments] == ["blocks 0, 2", "blocks 1, 3"]
    assert covered(fragments) == sorted(trainable(model))
    assert len(trainable(model)) == 8


def test_sizes_are_counted_in_the_parameters_own_dtypes() -> None:
    model = Net(short=nn.Linear(3, 5, bias=False).bfloat16(), long=nn.Linear(2, 2, bias=False).double())
    (fragment,) = split(model, Whole())
    assert (fragment.numel, fragment.bytes) == (19, 15 * 2 + 4 * 8)


# --- Balanced


def test_balanced_keeps_blocks_whole_and_evens_out_bytes() -> None:
    model = Net(
        embedding=nn.Embedding(10, 10),  # 100 values
        layers=nn.ModuleList(nn.Linear(5, 6, bias=False) for _ in range(5)),  # 30 each
        norm=nn.LayerNorm(7, bias=False),
    )  # 100 | 30+30+30+30, so the fifth block goes to the first: 130 | 120, and the norm to the second
    fragments = split(model, Balanced(count=2))
    assert [f.name for f in fragments] == ["block 4 + embedding.weight", "blocks 0, 1, 2, 3 + norm.weight"]
    assert [f.numel for f in fragments] == [130, 127]


def test_balanced_names_blocks_in_model_order() -> None:
    model = Net(layers=nn.ModuleList(nn.Linear(width, 1, bias=False) for width in (1, 2, 9)))
    assert names(model, Balanced(count=1)) == ["blocks 0, 1, 2"]


def test_balanced_works_without_repeated_blocks() -> None:
    fragments = split(mlp(), Balanced(count=2))
    assert [f.parameters for f in fragments] == [
        ("2.weight",),
        ("0.weight", "0.bias", "2.bias", "4.weight", "4.bias"),
    ]


def test_balanced_fills_every_fragment_even_with_parameters_of_no_bytes() -> None:
    model = Net(a=nn.Linear(2, 2, bias=False), b=nn.Linear(2, 2, bias=False), c=nn.Linear(2, 2, bias=False))
    for name in ("b", "c"):
        model.get_submodule(name).weight = nn.Parameter(torch.empty(0))
    assert names(model, Balanced(count=3)) == ["a.weight", "b.weight", "c.weight"]


# --- Patterns


def test_patterns_make_a_fragment_per_group_in_the_order_of_the_groups() -> None:
    model = NanoGPT(3)
    policy = Patterns(groups=(("*.ln_f.*", "*.wte.*", "*.wpe.*", "*.w?e.weight"), ("*.h.[02].*",), ("*.h.1.*",)))
    outside, even, odd = split(model, policy)
    assert outside.name == "*.ln_f.*, *.wte.*, *.wpe.*, *.w?e.weight"
    assert outside.parameters == split(model, Blocks())[-1].parameters
    assert even.parameters == under(model, "transformer.h.0", "transformer.h.2")
    assert odd.parameters == under(model, "transformer.h.1")


# --- what a wrong policy is told


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (lambda: Blocks(each=3, count=4), ["each=3", "count=4", "leave one out"]),
        (lambda: Blocks(each=0), ["Blocks each", "at least 1", "got 0"]),
        (lambda: Blocks(count=-2), ["Blocks count", "at least 1", "got -2"]),
        (lambda: Blocks(each=True), ["Blocks each", "got True"]),
        (lambda: Blocks(order="random"), ["Blocks order", "'strided' or 'sequential'", "'random'"]),  # type: ignore[arg-type]
        (lambda: Blocks(rest="drop"), ["Blocks rest", "'own' or 'spread'", "'drop'"]),  # type: ignore[arg-type]
        (lambda: Balanced(count=0), ["Balanced count", "at least 1", "got 0"]),
        (lambda: Balanced(count=2.0), ["Balanced count", "got 2.0"]),  # type: ignore[arg-type]
        (lambda: Patterns(groups=()), ["Patterns groups", "got ()"]),
        (lambda: Patterns(groups=((),)), ["Patterns groups", "got ((),)"]),
        (lambda: Patterns(groups=("h.*",)), ["Patterns groups", "tuple of tuples", "h.*"]),  # type: ignore[arg-type]
        (lambda: Patterns(groups=((1,),)), ["Patterns groups", "strings", "((1,),)"]),  # type: ignore[arg-type]
        (lambda: Patterns(groups=[("h.*",)]), ["Patterns groups", "[('h.*',)]"]),  # type: ignore[arg-type]
    ],
)
def test_a_policy_that_cannot_work_cannot_be_built(build: Callable[[], object], says: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        build()
    assert all(words in str(error.value) for words in says), str(error.value)


@pytest.mark.parametrize(
    ("model", "policy", "says"),
    [
        (mlp, Blocks(), ["Sequential", "repeated blocks", "Balanced(count=...)", "Patterns(groups=...)"]),
        (NanoGPT, Blocks(count=7), ["Blocks count", "at most 6", "NanoGPT", "got 7"]),
        (mlp, Balanced(count=7), ["Balanced count", "at most 6", "Sequential", "got 7"]),
        (
            mlp,
            Patterns(groups=(("0.*", "2.*"),)),
            ["4.weight is in none", "4.bias is in none", "('0.*', '2.*')"],
        ),
        (mlp, Patterns(groups=(("*",), ("2.b*",))), ["2.bias is in 2", "exactly one"]),
        (mlp, Patterns(groups=(("*", "h.*"),)), ["h.* matches none", "0.weight"]),
        (lambda: mlp().requires_grad_(False), Whole(), ["Sequential", "requires_grad=True", "unfreeze"]),
        (mlp, "balanced", ["Balanced", "got 'balanced'"]),
    ],
)
def test_a_policy_that_does_not_fit_the_model_says_why(
    model: Callable[[], nn.Module], policy: FragmentPolicy, says: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        split(model(), policy)
    assert all(words in str(error.value) for words in says), str(error.value)


def test_a_pattern_that_only_matches_frozen_parameters_is_an_error() -> None:
    model = mlp()
    model.get_submodule("4").requires_grad_(False)
    with pytest.raises(ConfigError, match=r"4\.\* matches none"):
        split(model, Patterns(groups=(("0.*", "2.*"), ("4.*",))))


# --- the rest of the API


def test_equal_models_give_equal_fragments() -> None:
    model = gpt2()
    assert split(model, Balanced(count=3)) == split(copy.deepcopy(model), Balanced(count=3))


def test_describe_is_an_aligned_table_with_a_total() -> None:
    fragments = [
        Fragment("blocks 0, 2", ("a",), 1_500_000, 6_000_000),
        Fragment("block 1", ("b",), 499_750, 1_999_000),
        Fragment("rest", ("c",), 250, 1_000),
        Fragment("tail", ("d",), 0, 0),
    ]
    assert describe(fragments).splitlines() == [
        "fragment  name         parameters    bytes   share",
        "       0  blocks 0, 2   1,500,000  6.00 MB   75.0%",
        "       1  block 1         499,750  2.00 MB   25.0%",
        "       2  rest                250  1.00 kB    0.0%",
        "       3  tail                  0      0 B    0.0%",
        "   total                2,000,000  8.00 MB  100.0%",
    ]


def test_describe_of_nothing_is_an_empty_table() -> None:
    assert len(describe([]).splitlines()) == 2


def test_buffers_that_train_are_named_and_others_are_not() -> None:
    model = Net(body=nn.Sequential(nn.Conv1d(2, 2, 1), nn.BatchNorm1d(2)), head=nn.Linear(2, 2))
    model.register_buffer("positions", torch.arange(4))
    model.register_buffer("still_running_", torch.zeros(1))
    assert unsynchronised_buffers(model) == (
        "body.1.running_mean",
        "body.1.running_var",
        "body.1.num_batches_tracked",
    )
    assert unsynchronised_buffers(gpt2()) == ()
