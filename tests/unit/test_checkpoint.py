"""Checkpoints: what comes back, what is refused and why, and what a crash at any moment leaves behind."""

import errno
import fcntl
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
import tracemalloc
import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from atoll import checkpoint
from atoll.checkpoint import MANIFEST, TENSORS, load, rng_state, save, set_rng_state, steps
from atoll.errors import CheckpointError, ConfigError
from bitwise import DTYPES, bits
from kills import forked

GOLDEN = Path(__file__).parents[1] / "golden" / "checkpoint-v1"


def there_and_back(root: Path, state: dict[str, Any]) -> dict[str, Any]:
    save(root, 1, state)
    return load(root)[1]


def names(root: Path) -> set[str]:
    """What is under a root, but for its lock."""
    return {entry.name for entry in root.iterdir()} - {".lock"}


def reseal(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    """Edit a manifest and close it with the right digest, as a forger would."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    edit(manifest)
    body = json.dumps(manifest).encode().removesuffix(b"}")
    (folder / MANIFEST).write_bytes(body + b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode())


# ---- what comes back


def test_every_kind_of_value_comes_back_as_it_was(tmp_path: Path) -> None:
    state = {
        "none": None,
        "bools": [True, False],
        "ints": [0, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 7**9000],
        "floats": [0.0, -0.0, 0.1, 5e-324, math.inf, -math.inf, math.nan, -math.nan],
        "signalling nan": struct.unpack(">d", bytes.fromhex("7ff4000000000001"))[0],
        "texts": ["", "é\n\0\U0001f3dd", '"}\\'],
        "bytes": [b"", bytes(range(256))],
        "nested": ([], (), {}, ((),), [[()]]),
        "keys": {1: "int", "1": "str", -5: 0, -(2**63): 0, "": 0},
    }
    assert bits(there_and_back(tmp_path, state)) == bits(state)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2  # zeros and ones are valid even as bool
    state = {
        "matrix": raw.view(dtype).reshape(2, -1),
        "scalar": raw.view(dtype)[1],
        "empty": raw.view(dtype)[:0],
    }
    assert bits(there_and_back(tmp_path, state)) == bits(state)


def test_views_and_shared_memory_come_back_as_separate_copies(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    wave = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    state = {
        "base": base,
        "same": base,
        "row": base[1],
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[:1].expand(5, 4),
        "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "conjugate": wave.conj(),
        "negative": wave.conj().imag[:1],
        "parameter": nn.Parameter(base.clone()),
        "graph": nn.Parameter(base.clone()) * 2,
    }
    back = there_and_back(tmp_path, state)
    for name, tensor in state.items():
        assert torch.equal(back[name], tensor), name
        assert type(back[name]) is Tensor
        assert back[name].is_contiguous()
        assert not back[name].requires_grad
    assert len({tensor.untyped_storage().data_ptr() for tensor in back.values()}) == len(state)


def test_the_state_saved_is_left_alone(tmp_path: Path) -> None:
    state = {"weight": nn.Parameter(torch.ones(2, 3)).t(), "list": [1, (2,)]}
    before = dict(state)
    save(tmp_path, 1, state)
    assert state == before


def test_names_that_collide_in_the_tensor_file_keep_their_own_tensors(tmp_path: Path) -> None:
    state = {
        "a.b": torch.tensor(1),
        "a": {"b": torch.tensor(2)},
        "a.b'": torch.tensor(3),
        "__metadata__": torch.tensor(4),
        "x": {0: torch.tensor(5)},
        "x[0]": torch.tensor(6),
        "": torch.tensor(7),
    }
    assert bits(there_and_back(tmp_path, state)) == bits(state)


def test_tensors_are_named_by_their_path(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = save(tmp_path, 1, {"model": {"layers.0.weight": torch.ones(1)}, "state": {0: [torch.ones(1)]}})
    with safe_open(folder / TENSORS, framework="pt") as file:
        assert set(file.keys()) == {"model.layers.0.weight", "state[0][0]"}


def test_dict_subclasses_come_back_as_dict(tmp_path: Path) -> None:
    back = there_and_back(tmp_path, {"model": OrderedDict(b=1, a=2)})
    assert bits(back) == bits({"model": {"b": 1, "a": 2}})


def test_what_was_loaded_outlives_its_file(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, {"weight": torch.arange(1000)})
    _, state = load(tmp_path)
    with (folder / TENSORS).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(state["weight"], torch.arange(1000))


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.Muon])
def test_training_continues_with_the_same_bits(
    tmp_path: Path, optimizer_class: type[torch.optim.AdamW] | type[torch.optim.Muon]
) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Tanh(), nn.Linear(16, 4, bias=False))
        return model, optimizer_class(model.parameters(), lr=0.01)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randn(5, 8)).square().mean().backward()
            optimizer.step()

    model, optimizer = fresh()
    train(model, optimizer)
    save(tmp_path, 3, {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": rng_state()})
    train(model, optimizer)

    resumed_model, resumed_optimizer = fresh()
    step, state = load(tmp_path)
    resumed_model.load_state_dict(state["model"])
    resumed_optimizer.load_state_dict(state["optimizer"])
    set_rng_state(state["rng"])
    train(resumed_model, resumed_optimizer)

    assert step == 3
    assert bits(resumed_model.state_dict()) == bits(model.state_dict())
    assert bits(resumed_optimizer.state_dict()) == bits(optimizer.state_dict())


def test_a_checkpoint_of_version_1_still_loads() -> None:
    """Written on 2026-11-15 by `save(GOLDEN, 7, golden_state())`; never to be written again."""
    step, state = load(GOLDEN)
    assert step == 7
    assert bits(state) == bits(golden_state())


def golden_state() -> dict[str, Any]:
    return {
        "model": {"weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "bias": torch.zeros(0)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0)}}, "param_groups": [{"betas": (0.9, 0.95)}]},
        "payload": b"\x00\xff",
        "fp8": torch.tensor([1.0, -2.0]).to(torch.float8_e4m3fn),
        "numbers": [True, None, -0.0, math.inf, -math.nan, 1e-300, 2**100, "é"],
    }


# ---- randomness


def draw() -> list[Any]:
    return [torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.randn(), np.random.rand()]


def test_random_numbers_go_on_where_they_were(tmp_path: Path) -> None:
    draw()  # leaves half a pair of normal numbers behind in Python's and in NumPy's generator
    state = there_and_back(tmp_path, {"rng": rng_state()})
    expected = [draw(), draw()]
    set_rng_state(state["rng"])
    assert [draw(), draw()] == expected


def test_cuda_generators_are_saved_once_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rng_state()["cuda"] == [] or torch.cuda.is_available()
    restored: list[Tensor] = []
    generators = [torch.tensor([1], dtype=torch.uint8), torch.tensor([2], dtype=torch.uint8)]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: generators)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", restored.extend)
    set_rng_state(rng_state())
    assert restored == generators


def test_cuda_generators_without_their_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    state = rng_state() | {"cuda": [torch.zeros(16, dtype=torch.uint8)] * 2}
    expected = draw_after(lambda: None)
    with pytest.raises(CheckpointError, match="2 CUDA devices, but 1 are visible: resume with 2"):
        set_rng_state(state)
    assert draw_after(lambda: None) == expected


def draw_after(act: Callable[[], None]) -> list[Any]:
    """What would be drawn after `act`, without moving on."""
    act()
    before = torch.get_rng_state()
    try:
        return torch.rand(3).tolist()
    finally:
        torch.set_rng_state(before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_tensors_and_generators_come_back(tmp_path: Path) -> None:
    weight = torch.randn(3, 4, device="cuda")
    back = there_and_back(tmp_path, {"weight": weight.t(), "rng": rng_state()})
    expected = torch.randn(5, device="cuda")
    set_rng_state(back["rng"])
    assert torch.equal(back["weight"], weight.t().cpu())
    assert torch.equal(torch.randn(5, device="cuda"), expected)


# ---- what is refused when saving


class Colour(IntEnum):
    RED = 1


Pair = namedtuple("Pair", "a b")  # noqa: PYI024
looped: list[Any] = []
looped.append(looped)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(
    ("state", "message"),
    [
        (
            {"optimizer": {"param_groups": [{"foo": {1}}]}},
            r"optimizer\.param_groups\[0\]\.foo is a set; .* holds",
        ),
        ({"state": {3: object()}}, r"state\[3\] is a object"),
        ({"enum": Colour.RED}, "enum is a Colour"),
        ({"pair": Pair(1, 2)}, "pair is a Pair"),
        ({"array": np.zeros(2)}, "array is a ndarray"),
        ({"number": np.float64(1)}, "number is a float64"),
        ({"text": "\ud83d"}, r"text is a str; .* str \(valid Unicode\)"),
        ({"\ud83d": 1}, r"a key of the state is a str; .* str \(valid Unicode\)"),
        ({"outer": {(1, 2): 0}}, "a key of outer is a tuple; keys must be str or 64-bit int"),
        ({"outer": {2**63: 0}}, "a key of outer is a int; keys must be str or 64-bit int"),
        ({True: 0}, "a key of the state is a bool"),
        ({"loop": looped}, r"loop(\[0\])+ is nested more than 100 levels deep"),
        ({"x": torch.zeros(2, dtype=torch.complex128)}, r"x is a Tensor \(torch\.complex128"),
        ({"x": torch.zeros(2).to_sparse()}, "x is a Tensor .*torch.sparse_coo"),
        ({"x": torch.zeros(2, device="meta")}, "x is a Tensor .*on meta"),
        ({"x": nn.parameter.UninitializedParameter()}, "x is a UninitializedParameter"),
    ],
)
def test_what_cannot_be_saved_is_named_and_nothing_is_written(
    tmp_path: Path, state: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        save(tmp_path / "new" / "root", 1, state)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("step", [-1, True, 1.0])
def test_a_step_that_names_no_folder_is_refused(tmp_path: Path, step: Any) -> None:
    with pytest.raises(ConfigError, match="step must be an int of at least 0, got"):
        save(tmp_path / "root", step, {})


def test_keeping_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep must be at least 1, got 0"):
        save(tmp_path / "root", 1, {}, keep=0)


def test_two_savers_of_one_root_are_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, {})
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        with pytest.raises(CheckpointError, match="in use by another save: give each worker its own"):
            save(tmp_path, 2, {})
    save(tmp_path, 3, {})
    assert steps(tmp_path) == (1, 3)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="finds the lock's descriptor in /proc")
def test_a_child_forked_while_saving_does_not_hold_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inherited: list[int] = []

    def fsync_while_forking(descriptor: int) -> None:
        for entry in os.listdir("/proc/self/fd"):
            if os.path.realpath(f"/proc/self/fd/{entry}") == str(tmp_path / ".lock"):
                inherited.append(os.dup(int(entry)))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync_while_forking)
        save(tmp_path, 1, {})
    save(tmp_path, 2, {})
    assert inherited
    for descriptor in inherited:
        os.close(descriptor)


# ---- what is refused when loading


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)


def lengthen(file: Path, by: int) -> None:
    os.truncate(file, file.stat().st_size + by)


def replace_by_link(file: Path) -> None:
    os.symlink(file.rename(file.parent.parent / "elsewhere"), file)


def replace_by_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def replace_by_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def edit_files(files: Any) -> Callable[[Path], None]:
    return lambda folder: reseal(folder, lambda manifest: manifest.update(files=files))


def reseal_with(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: reseal(folder, lambda manifest: manifest.update(changes))


def edit_tree(tree: Any) -> Callable[[Path], None]:
    return lambda folder: reseal(folder, lambda manifest: manifest.update(state=tree))


def nested(depth: int, opening: str = "[", closing: str = "]") -> Callable[[Path], None]:
    """A manifest with the right digest whose state is nested so deep."""

    def damage(folder: Path) -> None:
        reseal(folder, lambda manifest: manifest.update(state="HERE"))
        body = (folder / MANIFEST).read_bytes().rpartition(b',"sha256"')[0]
        body = body.replace(b'"HERE"', opening.encode() * depth + closing.encode() * depth)
        seal = b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()
        (folder / MANIFEST).write_bytes(body + seal)

    return damage


def edit_bytes(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Another text in a manifest, with the right digest."""

    def damage(folder: Path) -> None:
        body = (folder / MANIFEST).read_bytes().rpartition(b',"sha256"')[0]
        assert body.count(old) == 1
        body = body.replace(old, new)
        seal = b',"sha256":"%s"}\n' % hashlib.sha256(body).hexdigest().encode()
        (folder / MANIFEST).write_bytes(body + seal)

    return damage


def edit_header(header: Any, data: bytes = b"") -> Callable[[Path], None]:
    """Another file of tensors, with the right length and digest in the manifest."""

    def damage(folder: Path) -> None:
        text = header if isinstance(header, bytes) else json.dumps(header).encode()
        file = len(text).to_bytes(8, "little") + text + data
        (folder / TENSORS).write_bytes(file)
        edit_files({TENSORS: {"bytes": len(file), "sha256": hashlib.sha256(file).hexdigest()}})(folder)

    return damage


def tensor_of(shape: list[int], length: int = 0, dtype: str = "F32") -> dict[str, Any]:
    return {"weight": {"dtype": dtype, "shape": shape, "data_offsets": [0, length]}}


def long_header(folder: Path) -> None:
    """A file that says its header is as long as a number can be."""
    (folder / TENSORS).write_bytes(b"\xff" * 8)
    edit_files({TENSORS: {"bytes": 8, "sha256": hashlib.sha256(b"\xff" * 8).hexdigest()}})(folder)


TWICE = {"dict": [["generation", 2], ["weight", {"tensor": "weight"}], ["again", {"bytes": "weight"}]]}
HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "state 900 deep": (nested(900), "nested more than"),
    "state 250 deep": (nested(250), "nested more than"),
    "state 100,000 deep": (nested(100_000), "nested more than"),
    "objects 100 deep": (nested(105, '{"tuple":[', "]}"), "nested more than"),
    "manifest of 4 GB": (lambda f: os.truncate(f / MANIFEST, 2**32), "it has more than 67.1 MB"),
    "manifest of zeros": (lambda f: (f / MANIFEST).write_bytes(bytes(999)), "it is no longer JSON"),
    "manifest of a device": (lambda f: replace_by_device(f / MANIFEST), "no plain file"),
    "tensors of a pipe": (lambda f: replace_by_pipe(f / TENSORS), "no plain file"),
    "not UTF-8": (edit_bytes(b'"generation"', b'"\xff"'), "it is no longer JSON"),
    "a key twice": (edit_bytes(b'"step":', b'"step": 2, "step":'), "the key 'step' is there twice"),
    "NaN": (edit_tree({"dict": [["generation", math.nan]]}), "NaN is no JSON"),
    "a number too long": (edit_bytes(b'"step":2', b'"step":2' + b"0" * 5000), "it is no longer JSON"),
    "a step that is no number": (reseal_with(step=[2]), "is of step"),
    "a huge length": (edit_files({TENSORS: {"bytes": 10**4000, "sha256": ""}}), "is torn"),
    "a tensor said twice": (edit_tree(TWICE), "cannot be read: KeyError"),
    "a key that cannot be one": (edit_tree({"dict": [[[], 1]]}), "cannot be read: TypeError"),
    "a header without end": (long_header, "cannot be read: SafetensorError"),
    "a header 100,000 deep": (edit_header(b"[" * 100_000), "cannot be read: SafetensorError"),
    "a negative shape": (edit_header(tensor_of([-1])), "cannot be read: SafetensorError"),
    "a shape that overflows": (edit_header(tensor_of([2**62, 2**62])), "cannot be read: SafetensorError"),
    "an empty shape that overflows": (edit_header(tensor_of([0, 2**63])), "cannot be read"),
    "half a byte": (edit_header(tensor_of([1], 1, "F4"), b"0"), "cannot be read"),
}

PASSWORDS = {"../../etc/passwd": {"bytes": 1, "sha256": ""}}
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), r"manifest\.json is missing"),
    "no tensors": (lambda f: (f / TENSORS).unlink(), r"tensors\.safetensors is missing"),
    "linked tensors": (lambda f: replace_by_link(f / TENSORS), "no plain file"),
    "piped manifest": (lambda f: replace_by_pipe(f / MANIFEST), "no plain file"),
    "torn tensors": (
        lambda f: lengthen(f / TENSORS, -1),
        r"tensors\.safetensors is torn: it has \d+ bytes of \d+",
    ),
    "long tensors": (lambda f: lengthen(f / TENSORS, +1), "is torn"),
    "flipped tensors": (lambda f: flip(f / TENSORS, -1), r"tensors\.safetensors is damaged: its SHA-256"),
    "flipped tree": (
        lambda f: flip(f / MANIFEST, (f / MANIFEST).read_bytes().index(b'"generation",2') + 13),
        r"manifest\.json is damaged: its SHA-256",
    ),
    "torn manifest": (
        lambda f: lengthen(f / MANIFEST, -9),
        r"manifest\.json is damaged: it is no longer JSON",
    ),
    "deep manifest": (lambda f: (f / MANIFEST).write_text("[" * 100_000), "is damaged: it is no longer JSON"),
    "another program's": (lambda f: (f / MANIFEST).write_text('{"format": "pt"}'), "another program wrote it"),
    "not an object": (lambda f: (f / MANIFEST).write_text("[]"), "another program wrote it"),
    "newer version": (
        lambda f: reseal(f, lambda manifest: manifest.update(version=2)),
        "format version 2, written by a newer atoll; this one reads version 1",
    ),
    "renamed": (lambda f: f.rename(f.with_name("step-000000009")), "is of step 2: the folder was renamed"),
    "a file outside": (edit_files(PASSWORDS), r"names the files \['\.\./\.\./etc/passwd'\]"),
    "files of no kind": (edit_files(7), "cannot be read: TypeError"),
    "no step": (lambda f: reseal(f, lambda manifest: manifest.pop("step")), "cannot be read: KeyError"),
    "unknown kind": (edit_tree({"dict": [["x", {"set": []}]]}), "the tree holds a 'set', which version 1"),
    "unknown tensor": (edit_tree({"tensor": "nowhere"}), "cannot be read: KeyError"),
    "no dict": (edit_tree(3), "cannot be read: TypeError"),
    "short float": (edit_tree({"dict": [["x", {"float": "00"}]]}), "cannot be read: error"),
}


DAMAGES |= HOSTILE


@pytest.mark.parametrize(("damage", "reason"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    save(tmp_path, 1, {"generation": 1, "weight": torch.ones(2)})
    damage(save(tmp_path, 2, {"generation": 2, "weight": torch.ones(2)}))
    with pytest.warns(RuntimeWarning, match=rf"(?s)step-00000000.*{reason}.*; loading .*step-000000001 instead"):
        assert load(tmp_path)[0] == 1
    assert load(tmp_path, 1)[1]["generation"] == 1

    shutil.rmtree(tmp_path / "step-000000001")
    with pytest.raises(CheckpointError, match=rf"no checkpoint can be loaded from .*:\n  - .*{reason}"):
        load(tmp_path)


def test_an_endless_manifest_takes_little_memory(tmp_path: Path) -> None:
    save(tmp_path, 1, {})
    os.truncate(save(tmp_path, 2, {}) / MANIFEST, 2**33)
    tracemalloc.start()
    try:
        assert steps(tmp_path) == (1,)
        assert tracemalloc.get_traced_memory()[1] < 2**28
    finally:
        tracemalloc.stop()


def test_a_state_that_no_manifest_holds_is_refused_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "MOST_MANIFEST", 2000)
    with pytest.raises(CheckpointError, match=r"takes 2\.\d+ kB, at most 2\.00 kB are allowed: put long lists into"):
        save(tmp_path, 1, {"text": "x" * 2000})
    assert names(tmp_path) == set()


def test_a_lock_that_is_a_link_or_a_pipe_harms_nobody(tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / "root"
    victim.write_text("precious")
    root.mkdir()
    (root / ".lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match="step 1 cannot be saved under"):
        save(root, 1, {})
    assert victim.read_text() == "precious"
    replace_by_pipe(root / ".lock")
    assert save(root, 1, {}).exists()


def test_tensors_that_are_no_tensors_are_refused(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, {})
    (folder / TENSORS).write_bytes(b"not safetensors")
    entry = {"bytes": 15, "sha256": hashlib.sha256(b"not safetensors").hexdigest()}
    edit_files({TENSORS: entry})(folder)
    with pytest.raises(CheckpointError, match="cannot be read: SafetensorError"):
        load(tmp_path)


def test_steps_lists_what_looks_whole(tmp_path: Path) -> None:
    assert steps(tmp_path / "nowhere") == ()
    for step in (5, 30, 10**9, 2):
        save(tmp_path, step, {}, keep=9)
    (tmp_path / "step-000000005" / MANIFEST).unlink()
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-000000008").touch()
    assert steps(tmp_path) == (2, 30, 10**9)
    assert load(tmp_path)[0] == 10**9


def test_a_step_or_a_folder_can_be_asked_for(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, {"step": step})
    (tmp_path / "latest").symlink_to("step-000000002")
    assert load(tmp_path, 1) == (1, {"step": 1})
    assert load(tmp_path / "step-000000001") == (1, {"step": 1})
    assert load(str(tmp_path / "latest")) == (2, {"step": 2})
    with pytest.raises(CheckpointError, match=r"of step 3 can be loaded .*\n.*it holds step-000000002, step-000000001"):
        load(tmp_path, 3)
    with pytest.raises(CheckpointError, match="it holds step-000000001"):
        load(tmp_path / "step-000000001", 2)


def test_a_root_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="it holds no step folder"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=r"nowhere cannot be listed \(No such file or directory\)"):
        load(tmp_path / "nowhere")


# ---- old ones


def test_only_the_newest_good_ones_are_kept(tmp_path: Path) -> None:
    for step in range(6):
        folder = save(tmp_path, step, {"step": step}, keep=3)
        assert folder == tmp_path / f"step-{step:09d}"
    assert names(tmp_path) == {"step-000000003", "step-000000004", "step-000000005"}
    assert save(tmp_path, 6, {}, keep=1).name == "step-000000006"
    assert names(tmp_path) == {"step-000000006"}


def test_damaged_ones_are_neither_counted_nor_dropped(tmp_path: Path) -> None:
    for step in range(3):
        save(tmp_path, step, {}, keep=3)
    lengthen(tmp_path / "step-000000001" / TENSORS, -1)
    save(tmp_path, 3, {}, keep=2)
    assert names(tmp_path) == {"step-000000001", "step-000000002", "step-000000003"}


def test_after_a_rollback_the_one_just_written_stays(tmp_path: Path) -> None:
    for step in (100, 200, 50, 51):
        save(tmp_path, step, {}, keep=2)
    assert steps(tmp_path) == (51, 100, 200)


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    for generation in range(3):
        save(tmp_path, 1, {"generation": generation})
    assert load(tmp_path) == (1, {"generation": 2})
    assert names(tmp_path) == {"step-000000001"}


def test_a_checkpoint_set_aside_by_a_dead_save_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, {"generation": 1})
    folder.rename(tmp_path / "step-000000001.old")
    assert steps(tmp_path) == (1,)
    assert load(tmp_path) == load(tmp_path, 1) == (1, {"generation": 1})
    save(tmp_path, 2, {})
    assert names(tmp_path) == {"step-000000001", "step-000000002"}


def test_a_checkpoint_set_aside_is_second_to_the_one_that_replaced_it(tmp_path: Path) -> None:
    for step in range(9):
        set_aside = save(tmp_path, step, {"generation": "old"}, keep=9).rename(tmp_path / "aside")
        save(tmp_path, step, {"generation": "new"}, keep=9)
        set_aside.rename(tmp_path / f"step-{step:09d}.old")
        assert load(tmp_path) == (step, {"generation": "new"})
        lengthen(tmp_path / f"step-{step:09d}" / TENSORS, -1)
        with pytest.warns(RuntimeWarning, match=r"is torn.*loading .*\.old instead"):
            assert load(tmp_path) == (step, {"generation": "old"})


def test_leftovers_of_dead_saves_are_swept(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, {"generation": 1})
    shutil.copytree(folder, tmp_path / ".saving-00000000")
    shutil.copytree(folder, tmp_path / "step-000000001.old")
    assert steps(tmp_path) == (1,)
    save(tmp_path, 2, {})
    assert names(tmp_path) == {"step-000000001", "step-000000002"}


def test_both_files_have_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = save(tmp_path, 1, {})
    finally:
        os.umask(before)
    assert [oct(path.stat().st_mode & 0o777) for path in (folder, folder / MANIFEST, folder / TENSORS)] == [
        "0o750",
        "0o640",
        "0o640",
    ]


# ---- trouble with the disk


@pytest.fixture
def tiny_disk(small_disk: Callable[[str], Path]) -> Path:
    """A file system of 1 MiB."""
    return small_disk("1m")


@pytest.mark.parametrize("too_much", [torch.zeros(2**19), "x" * 2**20], ids=["tensors", "manifest"])
def test_a_full_disk_leaves_the_earlier_checkpoint(tiny_disk: Path, too_much: Any) -> None:
    root = tiny_disk / "root"
    save(root, 1, {"generation": 1})
    with pytest.raises(CheckpointError, match=r"step 2 cannot be saved under .*No space left on device") as caught:
        save(root, 2, {"too much": too_much})
    assert caught.value.__cause__ is not None
    assert names(root) == {"step-000000001"}
    assert load(root) == (1, {"generation": 1})
    save(root, 2, {"generation": 2})


def test_a_read_only_disk_can_be_loaded_from_but_not_saved_to(tiny_disk: Path) -> None:
    save(tiny_disk, 1, {"generation": 1})
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_disk)], check=True)
    with pytest.raises(CheckpointError, match="Read-only file system"):
        save(tiny_disk, 2, {})
    assert load(tiny_disk) == (1, {"generation": 1})


def test_a_disk_that_fills_up_while_flushing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path, 1, {"generation": 1})
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            save(tmp_path, 1, {"generation": 2})
    assert isinstance(caught.value.__cause__, OSError)
    assert names(tmp_path) == {"step-000000001"}
    assert load(tmp_path) == (1, {"generation": 1})


@contextmanager
def nobody() -> Iterator[None]:
    """Without root's right to read and write everything."""
    before = os.geteuid()
    os.seteuid(before or 65534)
    try:
        yield
    finally:
        os.seteuid(before)


def test_a_forbidden_root_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "root"
    save(root, 1, {})
    root.chmod(0)
    with nobody():
        with pytest.raises(CheckpointError, match="Permission denied"):
            save(root, 2, {})
        with pytest.raises(CheckpointError, match=r"cannot be listed \(Permission denied\)"):
            load(root)
    root.chmod(0o700)
    assert steps(root) == (1,)


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").touch()
    for act in (
        lambda: save(tmp_path / "root", 1, {}),
        lambda: load(tmp_path / "root"),
        lambda: steps(tmp_path / "root"),
    ):
        with pytest.raises(CheckpointError, match="root"):
            act()


# ---- crashes: real processes, killed with SIGKILL
#
# One process is spawned and forks the savers that die, since importing torch takes far longer than saving.
# A generation is saved as step generation // 2, so that half of them replace one of the same step.


def save_generation(root: Path, generation: int, keep: int) -> None:
    state = {
        "generation": generation,
        "small": torch.tensor(generation),
        "large": torch.full((2**14,), generation),
    }
    save(root, generation // 2, state, keep=keep)


def loaded_generation(root: Path) -> int:
    """The generation of the newest checkpoint, which must be whole and found without a warning."""
    step, state = load(root)
    generation = int(state["generation"])
    assert step == generation // 2
    assert torch.equal(state["large"], torch.full((2**14,), generation))
    return generation


def kill_at_random_moments(root: Path) -> None:
    """Savers are killed 20 times, each after some saves and a part of one; a save that returned is never lost."""
    log = root.with_name("log")

    def confirm(generation: int) -> None:
        with log.open("a") as lines:
            lines.write(f"{generation}\n")  # one write: a kill leaves the whole line or none of it

    def last_confirmed() -> int:
        return int(log.read_text().split()[-1])

    save_generation(root, 0, keep=1)
    start_s = time.perf_counter()
    save_generation(root, 1, keep=1)
    one_save_s = min(time.perf_counter() - start_s, 0.2)
    generation = 1
    chance = random.Random(1)
    for _ in range(20):

        def save_on_and_on(first: int = generation + 1) -> None:
            for following in itertools.count(first):
                save_generation(root, following, keep=1)
                confirm(following)

        def saved_some(least: int = generation + chance.randrange(4)) -> bool:
            return last_confirmed() >= least

        confirm(generation)
        forked(save_on_and_on, kill_after_s=chance.uniform(0.0, one_save_s), once=saved_some)
        assert saved_some()
        generation = loaded_generation(root)
        assert generation >= last_confirmed()
    save_generation(root, generation + 2, keep=1)
    assert names(root) == {f"step-{generation // 2 + 1:09d}"}


def kill_at_every_touch_of_the_disk(root: Path) -> None:
    """A save that replaces a step and drops another is killed before its nth touch of the disk, any n."""
    touches = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "fcntl.flock")
    prepared = root.with_name("prepared")
    chance = random.Random(1)
    save_generation(prepared, 1, keep=2)
    save_generation(prepared, 2, keep=2)

    def dying_save(generation: int, dies_at: int) -> None:
        count = itertools.count(1)

        def watch(event: str, _: object) -> None:
            if event in touches and next(count) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        save_generation(root, generation, keep=1)

    for dies_at in itertools.count(1):
        shutil.copytree(prepared, root)
        finished = forked(partial(dying_save, 3, dies_at))
        assert loaded_generation(root) in (2, 3)
        forked(partial(dying_save, 3, chance.randrange(1, 40)))  # the save that was to recover may die too
        assert loaded_generation(root) in (2, 3)
        save_generation(root, 4, keep=1)
        assert names(root) == {"step-000000002"}
        shutil.rmtree(root)
        if finished:
            assert dies_at > 15
            return


def kill_savers(folder: Path) -> None:
    warnings.simplefilter("error")
    kill_at_random_moments(folder / "random" / "root")
    kill_at_every_touch_of_the_disk(folder / "every" / "root")


@pytest.mark.processes
def test_a_killed_save_leaves_a_whole_recent_checkpoint(tmp_path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=kill_savers, args=(tmp_path,))
    process.start()
    process.join(timeout=240)
    assert process.exitcode == 0
