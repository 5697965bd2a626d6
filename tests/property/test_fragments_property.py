"""What must hold for every model and every policy that fits it."""

from dataclasses import dataclass
from itertools import chain
from math import ceil

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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
)

DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@dataclass(frozen=True)
class Layout:
    """A generated model in numbers: values per parameter, 0 included; the rest stands around the blocks."""

    blocks: tuple[tuple[int, ...], ...]
    before: tuple[int, ...]
    after: tuple[int, ...]
    frozen: frozenset[int]
    dtypes: tuple[torch.dtype, ...]

    def build(self) -> nn.Module:
        """The same model each time."""
        model = nn.Module()
        model.before = nn.ParameterList(self._parameters(self.before))
        model.layers = nn.ModuleList(nn.ParameterList(self._parameters(sizes)) for sizes in self.blocks)
        model.after = nn.ParameterList(self._parameters(self.after))
        # Each block keeps a parameter that trains, so that its number is its place in the list.
        keep = {f"layers.{number}.0" for number in range(len(self.blocks))}
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.requires_grad_(number not in self.frozen or name in keep)
        return model

    def _parameters(self, sizes: tuple[int, ...]) -> list[nn.Parameter]:
        return [
            nn.Parameter(torch.empty(size, dtype=self.dtypes[number % len(self.dtypes)]))
            for number, size in enumerate(sizes)
        ]


def sizes(*, at_least: int, at_most: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(st.integers(0, 50), min_size=at_least, max_size=at_most).map(tuple)


def layouts(*, max_blocks: int = 12) -> st.SearchStrategy[Layout]:
    return st.builds(
        Layout,
        blocks=st.lists(sizes(at_least=1, at_most=3), min_size=2, max_size=max_blocks).map(tuple),
        before=sizes(at_least=0, at_most=4),
        after=sizes(at_least=0, at_most=4),
        frozen=st.frozensets(st.integers(0, 40), max_size=10),
        dtypes=st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3).map(tuple),
    )


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def block_of(name: str) -> int | None:
    """The number of the block a parameter of a generated model is in."""
    first, number, *_ = name.split(".")
    return int(number) if first == "layers" else None


def blocks_in(fragment: Fragment) -> list[int]:
    return sorted({number for name in fragment.parameters if (number := block_of(name)) is not None})


def size_of(*parameters: nn.Parameter) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in parameters)


@st.composite
def fitting_policies(draw: st.DrawFn, layout: Layout) -> FragmentPolicy:
    names = list(trainable(layout.build()))
    outside = [name for name in names if block_of(name) is None]
    kind = draw(st.sampled_from((Whole, Blocks, Balanced, Patterns)))
    if kind is Whole:
        return Whole()
    if kind is Balanced:
        return Balanced(count=draw(st.integers(1, len(layout.blocks) + len(outside))))
    if kind is Patterns:
        group_of = {name: draw(st.integers(0, 3)) for name in names}
        groups = (tuple(name for name in names if group_of[name] == group) for group in range(4))
        return Patterns(groups=tuple(group for group in groups if group))
    number = draw(st.integers(1, len(layout.blocks)))
    each, count = draw(st.sampled_from(((number, None), (None, number), (None, None))))
    return Blocks(
        each=each,
        count=count,
        order=draw(st.sampled_from(("strided", "sequential"))),
        rest=draw(st.sampled_from(("own", "spread"))),
    )


@given(st.data(), layouts())
def test_each_trainable_parameter_is_in_one_fragment_in_model_order(data: st.DataObject, layout: Layout) -> None:
    model, policy = layout.build(), data.draw(fitting_policies(layout))
    expected = trainable(model)
    fragments = split(model, policy)

    dealt = [name for fragment in fragments for name in fragment.parameters]
    assert sorted(dealt) == sorted(expected)
    position = {name: number for number, name in enumerate(expected)}
    for fragment in fragments:
        parameters = [expected[name] for name in fragment.parameters]
        assert fragment.parameters
        assert sorted(fragment.parameters, key=position.__getitem__) == list(fragment.parameters)
        assert fragment.numel == sum(parameter.numel() for parameter in parameters)
        assert fragment.bytes == size_of(*parameters)


@given(st.data(), layouts())
def test_the_same_model_gives_the_same_fragments(data: st.DataObject, layout: Layout) -> None:
    policy = data.draw(fitting_policies(layout))
    model = layout.build()
    assert split(model, policy) == split(model, policy) == split(layout.build(), policy)


@given(st.data(), layouts())
def test_only_patterns_may_cut_a_block(data: st.DataObject, layout: Layout) -> None:
    policy = data.draw(fitting_policies(layout).filter(lambda policy: not isinstance(policy, Patterns)))
    model = layout.build()
    owned = [number for fragment in split(model, policy) for number in blocks_in(fragment)]
    assert sorted(owned) == list(range(len(layout.blocks)))


@given(st.data(), layouts(), st.sampled_from(("own", "spread")))
def test_strided_fragments_step_by_their_number(data: st.DataObject, layout: Layout, rest: str) -> None:
    total = len(layout.blocks)
    each = data.draw(st.integers(1, total + 2))
    policies = [Blocks(each=each, rest=rest), Blocks(count=min(each, total), rest=rest)]  # type: ignore[arg-type]
    for policy, count in zip(policies, (ceil(total / each), min(each, total)), strict=True):
        dealt = [numbers for f in split(layout.build(), policy) if (numbers := blocks_in(f))]
        assert dealt == [[block for block in range(total) if block % count == p] for p in range(count)]


@given(st.data(), layouts())
def test_sequential_fragments_are_runs_of_the_stated_lengths(data: st.DataObject, layout: Layout) -> None:
    total = len(layout.blocks)
    number = data.draw(st.integers(1, total))

    by_each = split(layout.build(), Blocks(each=number, order="sequential"))
    dealt = [numbers for f in by_each if (numbers := blocks_in(f))]
    assert list(chain(*dealt)) == list(range(total))
    assert all(len(numbers) == number for numbers in dealt[:-1])
    assert 1 <= len(dealt[-1]) <= number

    by_count = split(layout.build(), Blocks(count=number, order="sequential"))
    dealt = [numbers for f in by_count if (numbers := blocks_in(f))]
    assert list(chain(*dealt)) == list(range(total))
    assert len(dealt) == number
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(layouts(), st.integers(1, 4))
def test_the_rest_is_one_last_fragment_or_none(layout: Layout, each: int) -> None:
    model = layout.build()
    outside = tuple(name for name in trainable(model) if block_of(name) is None)
    *fragments, last = split(model, Blocks(each=each))
    if outside:
        assert (last.name, last.parameters) == ("rest", outside)
    else:
        fragments.append(last)
    assert len(fragments) == ceil(len(layout.blocks) / each)
    assert all(block_of(name) is not None for fragment in fragments for name in fragment.parameters)


@given(st.data(), layouts())
def test_a_spread_rest_never_widens_the_gap_by_more_than_its_largest(data: st.DataObject, layout: Layout) -> None:
    model = layout.build()
    count = data.draw(st.integers(1, len(layout.blocks)))
    outside = [parameter for name, parameter in trainable(model).items() if block_of(name) is None]
    bare = [f.bytes for f in split(model, Blocks(count=count)) if f.name != "rest"]
    spread = [f.bytes for f in split(model, Blocks(count=count, rest="spread"))]
    assert sum(spread) == sum(bare) + size_of(*outside)
    assert all(after >= before for before, after in zip(bare, spread, strict=True))
    largest = max((size_of(parameter) for parameter in outside), default=0)
    # What received a parameter was the smallest then, and the smallest never exceeds the final mean.
    for before, after in zip(bare, spread, strict=True):
        assert after == before or after <= sum(spread) / count + largest


@given(st.data(), layouts())
def test_balanced_fragments_exceed_the_mean_by_at_most_one_part(data: st.DataObject, layout: Layout) -> None:
    model = layout.build()
    parameters = trainable(model)
    outside = [size_of(parameter) for name, parameter in parameters.items() if block_of(name) is None]
    whole_blocks = [
        size_of(*(parameter for name, parameter in parameters.items() if block_of(name) == number))
        for number in range(len(layout.blocks))
    ]
    count = data.draw(st.integers(1, len(outside) + len(whole_blocks)))
    fragments = split(model, Balanced(count=count))
    assert len(fragments) == count
    mean = size_of(*parameters.values()) / count
    assert max(f.bytes for f in fragments) <= mean + max(outside + whole_blocks)


@given(layouts(), st.integers(1, 3))
def test_tied_and_wrapped_models_split_alike(layout: Layout, each: int) -> None:
    model = layout.build()
    plain = split(model, Blocks(each=each))
    model.tie = model.get_submodule("layers")
    assert find_blocks(model) == tuple(f"layers.{number}" for number in range(len(layout.blocks)))
    assert split(model, Blocks(each=each)) == plain

    wrapper = nn.Module()
    wrapper.module = model
    for bare, wrapped in zip(plain, split(wrapper, Blocks(each=each)), strict=True):
        assert tuple(f"module.{name}" for name in bare.parameters) == wrapped.parameters
        assert (bare.name, bare.bytes) == (wrapped.name, wrapped.bytes)


@given(st.lists(st.builds(Fragment, st.text("abc, 0", max_size=20), st.just(("p",)), *[st.integers(0, 10**14)] * 2)))
def test_describe_has_a_line_per_fragment_all_equally_long(fragments: list[Fragment]) -> None:
    lines = describe(fragments).splitlines()
    assert len(lines) == len(fragments) + 2
    assert len({len(line) for line in lines}) == 1
