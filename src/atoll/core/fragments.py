"""Splits a model into fragments: disjoint sets of parameters synchronised together.

A policy is a frozen value that says how to divide a model; `split` applies it and checks the result: every
trainable parameter is in exactly one fragment. One in none would drift apart on each worker, unnoticed.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise
from math import ceil
from typing import Literal, NamedTuple, get_args

from torch import nn

from atoll._util.checks import check_whole
from atoll._util.units import bytes_text
from atoll.core.flat import trainable
from atoll.errors import ConfigError

BlockOrder = Literal["strided", "sequential"]
RestPlace = Literal["own", "spread"]


@dataclass(frozen=True, slots=True)
class Fragment:
    """Names parameters that are sent and applied together."""

    name: str
    """For people: "blocks 0, 3, 6", "rest", "whole model"."""
    parameters: tuple[str, ...]
    """Names as in `model.named_parameters()`, in model order."""
    numel: int
    """Values in all the parameters."""
    bytes: int
    """Size of those values in the parameters' own dtypes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """Puts everything into one fragment, as in plain DiLoCo."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Deals the model's repeated blocks whole to fragments, as in Streaming DiLoCo; `Blocks()` deals three to each."""

    each: int | None = None
    """Blocks per fragment; excludes `count`."""
    count: int | None = None
    """Fragments of blocks in all, not counting the rest; excludes `each`."""
    order: BlockOrder = "strided"
    """Of P fragments the p-th owns blocks p, p+P, p+2P ... (strided) or consecutive ones (sequential)."""
    rest: RestPlace = "own"
    """Parameters outside blocks form a last fragment (own) or even out the bytes of the others (spread)."""

    def __post_init__(self) -> None:
        if self.each is not None and self.count is not None:
            raise ConfigError(
                f"Blocks takes each or count, not both, got each={self.each!r} and count={self.count!r}: "
                f"with the model's number of blocks, one follows from the other; leave one out"
            )
        for setting, value in (("Blocks each", self.each), ("Blocks count", self.count)):
            if value is not None:
                check_whole(setting, value, why="leave it out for 3 blocks to a fragment")
        _check_choice("Blocks order", self.order, get_args(BlockOrder), "it says which blocks travel together")
        _check_choice("Blocks rest", self.rest, get_args(RestPlace), "it places what is outside blocks")


@dataclass(frozen=True, slots=True, kw_only=True)
class Balanced:
    """Makes fragments of nearly equal bytes: blocks and other parameters, largest first, to the smallest so far."""

    count: int
    """Fragments in all."""

    def __post_init__(self) -> None:
        check_whole("Balanced count", self.count, why="1 is the whole model as one fragment")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """Makes one fragment per group of glob patterns; every parameter name must fit exactly one group."""

    groups: tuple[tuple[str, ...], ...]
    """Such as (("h.*",), ("wte.*", "ln_f.*")); case matters, and "*" crosses dots."""

    def __post_init__(self) -> None:
        def filled(value: object, kind: type) -> bool:  # a bare string would pass as a group of letters
            return isinstance(value, tuple) and len(value) > 0 and all(isinstance(v, kind) for v in value)

        if not filled(self.groups, tuple) or not all(filled(group, str) for group in self.groups):
            raise ConfigError(
                f"Patterns groups must be a tuple of tuples of strings, none empty, got {self.groups!r}: "
                f'each inner tuple is one fragment; write (("h.*",), ("wte.*", "ln_f.*"))'
            )


FragmentPolicy = Whole | Blocks | Balanced | Patterns

_Group = tuple[str, list[str]]  # a fragment in the making: its name, its parameters in any order
_Stack = tuple[type[nn.Module], list[str]]  # blocks in one container: their type, their module paths


def split(model: nn.Module, policy: FragmentPolicy) -> tuple[Fragment, ...]:
    """Split a model into fragments that hold every trainable parameter once; the same model gives the same ones."""
    parameters = trainable(model)
    if not parameters:
        raise ConfigError(
            f"the model must have a parameter with requires_grad=True, {type(model).__name__} has none: "
            f"only those are synchronised; unfreeze what should train before splitting it into fragments"
        )
    match policy:
        case Whole():
            groups = [("whole model", list(parameters))]
        case Blocks():
            groups = _split_by_blocks(model, policy)
        case Balanced():
            groups = _split_by_bytes(model, policy)
        case Patterns():
            groups = _split_by_patterns(list(parameters), policy)
        case _:
            raise ConfigError(f"the policy must be Whole, Blocks, Balanced or Patterns, got {policy!r}")
    fragments = tuple(_fragment(group, parameters) for group in groups)
    _check_partition(parameters, fragments, policy)
    return fragments


def describe(fragments: Sequence[Fragment]) -> str:
    """Return a table with a line per fragment and a total: values, bytes and the share of all bytes."""
    numel, size = sum(f.numel for f in fragments), sum(f.bytes for f in fragments)
    rows = [("fragment", "name", "parameters", "bytes", "share")]
    for number, f in enumerate(fragments):
        share = f.bytes / max(size, 1)
        rows.append((str(number), f.name, f"{f.numel:,}", bytes_text(f.bytes), f"{share:.1%}"))
    rows.append(("total", "", f"{numel:,}", bytes_text(size), "100.0%"))

    a, b, c, d, e = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(f"{r[0]:>{a}}  {r[1]:<{b}}  {r[2]:>{c}}  {r[3]:>{d}}  {r[4]:>{e}}" for r in rows)


def find_blocks(model: nn.Module) -> tuple[str, ...]:
    """Return the module paths of the repeated blocks that own a trainable parameter, in model order.

    The longest stack says what a block is; the other stacks of that type join it (T5: encoder and decoder).
    A stack inside a block is part of the block, however long: experts never win over layers.
    """
    parameters_under = Counter(path for name in trainable(model) for path in _modules_around(name))
    stacks = list(_outermost_stacks(model, "", parameters_under))
    if not stacks:
        return ()
    # Of equally long ones the most parameters win: a list of embeddings can be as long as that of layers.
    longest, _ = max(stacks, key=lambda s: (len(s[1]), sum(parameters_under[path] for path in s[1])))
    return tuple(path for block_type, paths in stacks if block_type is longest for path in paths)


def unsynchronised_buffers(model: nn.Module) -> tuple[str, ...]:
    """Return the buffers that training changes, such as BatchNorm's statistics; they are in no fragment."""
    trained = ("running_", "num_batches_tracked")
    return tuple(name for name, _ in model.named_buffers() if name.rpartition(".")[2].startswith(trained))


# --- the policies at work


class _Part(NamedTuple):
    """Holds what is never cut: a block, by its number, or a parameter outside blocks, whose number is None."""

    block: int | None
    parameters: list[str]
    bytes: int


def _split_by_blocks(model: nn.Module, policy: Blocks) -> list[_Group]:
    blocks, rest = _blocks_and_rest(model)
    if not blocks:
        raise ConfigError(
            f"{policy!r} needs repeated blocks, an nn.ModuleList or nn.Sequential whose members are all of one type, "
            f"and found none with trained parameters in {type(model).__name__}: put the layers in an nn.ModuleList of "
            f"their own, or use atoll.Balanced(count=...) or atoll.Patterns(groups=...)"
        )
    if policy.count is not None and policy.count > len(blocks):
        raise ConfigError(
            f"Blocks count must be at most {len(blocks)}, the blocks of {type(model).__name__}, got "
            f"{policy.count}: a fragment holds whole blocks; lower it or use Balanced(count={policy.count})"
        )
    fragments = [[blocks[number] for number in numbers] for numbers in _deal(len(blocks), policy)]
    if policy.rest == "spread":
        return [_group(parts) for parts in _even_out(fragments, rest)]
    groups = [_group(parts) for parts in fragments]
    if rest:
        groups.append(("rest", [name for part in rest for name in part.parameters]))
    return groups


def _deal(blocks: int, policy: Blocks) -> list[range]:
    """Return the block numbers of each fragment."""
    each = policy.each or 3  # the Streaming DiLoCo paper's choice
    count = policy.count or ceil(blocks / each)
    if policy.order == "strided":
        return [range(first, blocks, count) for first in range(count)]
    if policy.count:
        edges = [fragment * blocks // count for fragment in range(count + 1)]
    else:
        edges = [*range(0, blocks, each), blocks]
    return [range(start, stop) for start, stop in pairwise(edges)]


def _split_by_bytes(model: nn.Module, policy: Balanced) -> list[_Group]:
    blocks, rest = _blocks_and_rest(model)
    if policy.count > len(blocks) + len(rest):
        raise ConfigError(
            f"Balanced count must be at most {len(blocks) + len(rest)} for {type(model).__name__}, got "
            f"{policy.count}: {len(blocks)} blocks and {len(rest)} other parameters are never cut; lower it"
        )
    return [_group(parts) for parts in _even_out([[] for _ in range(policy.count)], blocks + rest)]


def _even_out(fragments: Sequence[Sequence[_Part]], parts: Sequence[_Part]) -> list[list[_Part]]:
    """Add every part, the largest first, each to the fragment with fewest bytes so far."""
    grown = [list(fragment) for fragment in fragments]
    sizes = [sum(part.bytes for part in fragment) for fragment in fragments]
    for part in sorted(parts, key=lambda part: part.bytes, reverse=True):  # equal ones stay in model order
        # Ties go to the lowest number, but an empty fragment first: parts of 0 bytes must fill it too.
        smallest = min(range(len(grown)), key=lambda number: (sizes[number], bool(grown[number])))
        grown[smallest].append(part)
        sizes[smallest] += part.bytes
    return grown


def _group(parts: Sequence[_Part]) -> _Group:
    """Group the parts' parameters under a name that tells them: "blocks 0, 3, 6", "block 2 + lm_head.weight"."""
    blocks = sorted(part.block for part in parts if part.block is not None)
    others = [part.parameters[0] for part in parts if part.block is None]
    words = []
    if blocks:
        words.append(f"block{'s' if len(blocks) > 1 else ''} {_listing(blocks)}")
    if others:
        words.append(_listing(others))
    return " + ".join(words), [name for part in parts for name in part.parameters]


def _split_by_patterns(names: Sequence[str], policy: Patterns) -> list[_Group]:
    hits = {p: [n for n in names if fnmatchcase(n, p)] for patterns in policy.groups for p in patterns}
    if idle := [pattern for pattern, matching in hits.items() if not matching]:
        raise ConfigError(
            f"each pattern in Patterns groups must match a trainable parameter, {_listing(idle)} matches "
            f"none: it is misspelt or means a frozen one; correct or drop it; names here: {_listing(names)}"
        )
    return [(", ".join(patterns), [n for p in patterns for n in hits[p]]) for patterns in policy.groups]


# --- blocks


def _outermost_stacks(module: nn.Module, prefix: str, parameters_under: Counter[str]) -> Iterator[_Stack]:
    """Yield stacks in model order, none inside another; `prefix` is the module's own path and a dot, or ""."""
    children = [(prefix + name, child) for name, child in module.named_children()]
    types = {type(_unwrapped(child)) for _, child in children}
    if _is_list(module) and len(types) == 1:
        # A frozen block, or a repeat of a shared one, owns nothing and would make an empty fragment.
        if paths := [path for path, _ in children if parameters_under[path]]:
            yield types.pop(), paths
    else:
        for path, child in children:
            yield from _outermost_stacks(child, f"{path}.", parameters_under)


def _is_list(module: nn.Module) -> bool:
    """Whether it lists two modules or more; a dict with numbers for keys does too (torchtitan's layers)."""
    if isinstance(module, nn.ModuleDict) and not all(key.isdecimal() for key in module):
        return False
    return isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict) and len(module) > 1


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside DDP, torch.compile, activation checkpointing or FSDP1; only some may be wrapped."""
    wrapped_as = ("module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")
    match list(module.named_children()):
        case [(name, inner)] if name in wrapped_as:
            return _unwrapped(inner)
    return module


def _blocks_and_rest(model: nn.Module) -> tuple[list[_Part], list[_Part]]:
    """Return the blocks, and each parameter outside them; one that two blocks share is the first block's."""
    parameters = trainable(model)
    members: dict[str, list[str]] = {path: [] for path in find_blocks(model)}
    rest = []
    for name, parameter in parameters.items():
        if path := next((path for path in _modules_around(name) if path in members), None):
            members[path].append(name)
        else:
            rest.append(_Part(None, [name], parameter.nbytes))
    sizes = [sum(parameters[name].nbytes for name in names) for names in members.values()]
    return list(map(_Part, range(len(members)), members.values(), sizes)), rest


def _modules_around(parameter: str) -> Iterator[str]:
    """Yield the paths of the modules that hold a parameter: "h.0.mlp.weight" gives "h", "h.0", "h.0.mlp"."""
    return accumulate(parameter.split(".")[:-1], "{}.{}".format)


# --- checks and words


def _fragment(group: _Group, parameters: Mapping[str, nn.Parameter]) -> Fragment:
    label, members = group[0], set(group[1])
    own = {name: parameter for name, parameter in parameters.items() if name in members}  # in model order
    numel, size = sum(p.numel() for p in own.values()), sum(p.nbytes for p in own.values())
    return Fragment(label, tuple(own), numel, size)


def _check_partition(names: Iterable[str], fragments: Sequence[Fragment], policy: FragmentPolicy) -> None:
    """Raise unless each parameter is in exactly one fragment; a slip in Patterns is what can break this."""
    assert all(f.parameters for f in fragments), f"{policy!r} made an empty fragment"
    homes = Counter(name for f in fragments for name in f.parameters)
    if wrong := [f"{name} is in {homes[name] or 'none'}" for name in names if homes[name] != 1]:
        raise ConfigError(
            f"each trainable parameter must be in exactly one fragment, or workers drift apart on it, but "
            f"{_listing(wrong)}: add or narrow a pattern, or freeze the parameter; got {policy!r}"
        )


def _check_choice(setting: str, value: object, allowed: tuple[str, ...], hint: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{setting} must be {' or '.join(map(repr, allowed))}, got {value!r}: {hint}")


def _listing(items: Sequence[object], shown: int = 6) -> str:
    """Return items for a sentence, many cut short: "0, 2, 4, 6, 8, 10 and 30 more"."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(map(str, items[:shown])) + more
