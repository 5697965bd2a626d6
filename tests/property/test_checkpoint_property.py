"""Laws of checkpoints: any state comes back exactly, and no damage goes unnoticed."""

import functools
import struct
import tempfile
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from atoll.checkpoint import MANIFEST, TENSORS, load, save
from atoll.errors import CheckpointError
from bitwise import DTYPES, bits
from example_counts import examples


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, up to three dimensions (some of them 0 or 1), any bits, any layout in memory."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    count = functools.reduce(int.__mul__, shape, 1)
    raw = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if dtype == torch.bool:
        raw = bytes(byte % 2 for byte in raw)
    tensor = torch.tensor(list(raw), dtype=torch.uint8).view(dtype).reshape(shape)
    view: Callable[[Tensor], Tensor] = draw(
        st.sampled_from(
            [
                lambda whole: whole,
                lambda whole: whole.movedim(0, -1) if whole.dim() else whole,
                lambda whole: whole[::2] if whole.dim() else whole,
                lambda whole: whole.expand(2, *whole.shape),
            ]
        )
    )
    return view(tensor)


leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**9_000), 2**9_000)
    | st.floats()
    | st.binary(min_size=8, max_size=8).map(lambda raw: struct.unpack(">d", raw)[0])
    | st.text()
    | st.binary()
    | tensors()
)
keys: st.SearchStrategy[Hashable] = (
    st.text() | st.integers(-(2**63), 2**63 - 1) | st.sampled_from(["a", "a.b", "b", "a[0]", 0])
)


def deeper(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(keys, children, max_size=4)
    )


states = st.dictionaries(st.text() | st.sampled_from(["a", "a.b"]), st.recursive(leaves, deeper), max_size=4)


@given(states, st.integers(0, 10**12))
@examples(150)
def test_any_state_comes_back_exactly(state: dict[str, Any], step: int) -> None:
    with tempfile.TemporaryDirectory() as root:
        save(root, step, state)
        found, back = load(root)
    assert found == step
    assert bits(back) == bits(state)


@functools.cache
def good_files() -> dict[str, bytes]:
    """The files of one checkpoint that has some of everything."""
    state = {
        "weights": {0: torch.arange(20.0), "half": torch.ones(3, dtype=torch.float16)},
        "others": [(1, None, True), 0.1, float("nan"), 2**80, "text", b"bytes"],
    }
    with tempfile.TemporaryDirectory() as root:
        folder = save(root, 1, state)
        return {name: (folder / name).read_bytes() for name in (MANIFEST, TENSORS)}


@st.composite
def damages(draw: st.DrawFn) -> tuple[str, bytes]:
    """A file's name and its bytes with one of them changed, or some cut off or added at the end."""
    name = draw(st.sampled_from([MANIFEST, TENSORS]))
    good = good_files()[name]
    position = draw(st.integers(0, len(good) - 1))
    flipped = bytes([good[position] ^ draw(st.integers(1, 255))])
    return name, draw(
        st.sampled_from(
            [
                good[:position] + flipped + good[position + 1 :],
                good[:position],
                good + flipped,
                good + good[position:],
            ]
        )
    )


@given(damages())
@examples(400)
def test_any_damage_to_any_file_is_refused(damage: tuple[str, bytes]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "step-000000001"
        folder.mkdir()
        for name, data in (good_files() | dict([damage])).items():
            (folder / name).write_bytes(data)
        with pytest.raises(CheckpointError, match="step-000000001"):
            load(root)
