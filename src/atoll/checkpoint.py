"""Everything a worker is, in one atomic, versioned folder.

    root/
      .lock                    held while somebody saves
      .saving-1f6e02ab/        a save under way, or what a crash left of one; the next save sweeps it
      step-000000100/
        tensors.safetensors    every tensor, named by its path in the state
        manifest.json          format, version, step, the tree around the tensors, their length and SHA-256
      step-000000100.old/      set aside while step 100 is saved again; read if that save died half-way

A folder gets its `step-` name once all of it is on disk, so it is there whole or not at all. Later damage is
caught by SHA-256 (`sha256sum` is everywhere); the manifest ends with the digest of every byte before it. That guards
against accidents, not forgers; yet reading runs nothing and opens only those two files.
"""

import hashlib
import json
import os
import random
import re
import secrets
import shutil
import struct
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from textwrap import shorten
from typing import Any, Final

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll._util.disk import locked, parse_json, read_limited, sha256_of, whole_folder
from atoll._util.tensor_tree import MAX_DEPTH, decode, encode, unshared
from atoll._util.units import bytes_text
from atoll.errors import CheckpointError, ConfigError

FORMAT: Final = "atoll-checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
TENSORS: Final = "tensors.safetensors"
MOST_MANIFEST: Final = 2**26
"""Bytes of a manifest, which is read whole: what is long belongs into tensors."""

_STEP_FOLDER = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,})(\.old)?")
# Torch says RuntimeError of a shape that it cannot make and of memory that it cannot get.
_UNREADABLE = (
    *(OSError, LookupError, TypeError, ValueError, SafetensorError, struct.error),
    *(ArithmeticError, MemoryError, RuntimeError),
)


def save(root: Path | str, step: int, state: Mapping[str, Any], *, keep: int = 2, ahead: int | None = None) -> Path:
    """Write `state` as root/step-000000123 atomically and drop the good ones that nobody needs any more.

    `state` nests dicts (keys str or int), lists and tuples of None, bool, int, float, str, bytes and tensors.
    All come back bit for bit, dict subclasses as dict, each tensor as a plain one with its own CPU memory.
    Damaged folders are neither counted nor dropped. With `keep` of 2 or more, others may load meanwhile.

    Args:
        root: A folder for the checkpoints of this worker alone.
        step: Inner steps made so far; all workers save after the same ones.
        state: What to save.
        keep: How many of the newest stay at least.
        ahead: Inner steps that this worker can be ahead of another, whose newest checkpoint has to be here too: all
            stay that are newer than `step - ahead`, and one that is not. None: what the `OuterLoop.state_dict()` in
            `state` says of itself, else 0.

    Raises:
        CheckpointError: If the state holds what no checkpoint can, or the disk refuses it.
    """
    if type(step) is not int or step < 0:
        raise ConfigError(f"step must be an int of at least 0, got {step!r}: it names the folder")
    if keep < 1:
        raise ConfigError(f"keep must be at least 1, got {keep}: the checkpoint just written always stays")
    if ahead is None:
        ahead = _ahead(state)
    tensors: dict[str, Tensor] = {}
    tree = encode(dict(state), "", tensors)  # what cannot be saved is refused before the disk is touched
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _only_saver(root):
            _recover(root)
            folder = _write(root, step, tree, tensors)
            for surplus in _surplus(root, step, keep, ahead):
                _discard(surplus)
    except (OSError, SafetensorError) as fault:
        problem = f"step {step} cannot be saved under {root}: {fault}"
        raise CheckpointError(f"{problem}; make room there or save elsewhere, what was there is intact") from fault
    return folder


def load(root_or_folder: Path | str, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Step and state of the newest whole checkpoint under a root, or of exactly `step`, or of a step folder.

    A damaged newer one is passed over with a warning that says why; with nothing loadable, CheckpointError
    lists each candidate and its fault.
    """
    place = Path(os.path.realpath(root_or_folder))
    found = [place] if _STEP_FOLDER.fullmatch(place.name) else _step_folders(place)
    faults: list[str] = []
    for folder in [folder for folder in found if step in (None, _step_of(folder))]:
        try:
            state = _read(folder)
        except CheckpointError as fault:
            faults.append(str(fault))
            continue
        for fault_of_newer in faults:
            warnings.warn(f"{fault_of_newer}; loading {folder} instead", RuntimeWarning, stacklevel=2)
        return _step_of(folder), state
    wanted = "checkpoint" if step is None else f"checkpoint of step {step}"
    reasons = faults or [f"it holds {', '.join(folder.name for folder in found) or 'no step folder'}"]
    raise CheckpointError("\n  - ".join([f"no {wanted} can be loaded from {place}:", *reasons]))


def _ahead(state: Mapping[str, Any]) -> int:
    """Steps that a worker with these outer loops can be ahead of another; 0 without an outer loop."""
    said = [part.get("ahead") for part in state.values() if isinstance(part, Mapping)]
    return max((number for number in said if type(number) is int), default=0)


def _surplus(root: Path, step: int, keep: int, ahead: int) -> list[Path]:
    """Checkpoints to drop once `step` is written: not the newest, and older than what every worker has."""
    good = [folder for folder in _step_folders(root) if _looks_whole(folder)]
    common = max((number for folder in good if (number := _step_of(folder)) <= step - ahead), default=0)
    # After a rollback, the one just written may be the oldest, and those of later steps the newest.
    return [folder for folder in good[keep:] if not common <= _step_of(folder) <= step]


def common_step(saved: Mapping[Any, Collection[int]]) -> int | None:
    """The newest step that every worker has saved, given the `steps` of each; None if all are at their beginning.

    Between machines `link.gather("saved", checkpoint.steps(folder))` tells them. Once it is chosen, every worker calls
    `drop_after(folder, step)`: later ones are of a past that the run does not continue.
    """
    shared = set.intersection(*({step for step in steps if type(step) is int} for steps in saved.values()))
    if shared:
        return max(shared)
    if not any(any(steps) for steps in saved.values()):  # step 0 is easily made again
        return None
    have = "; ".join(f"{worker} has {_listed(steps)}" for worker, steps in saved.items())
    raise CheckpointError(
        f"no checkpoint is there on every worker, so none can be resumed from: {have}. "
        "Bring the missing folders back, or begin another run in new folders"
    )


def _listed(steps: Collection[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, sorted(steps)))}" if steps else "none"


def steps(root: Path | str) -> tuple[int, ...]:
    """Steps under `root` that look whole (tensors are not read), ascending; none if there is no root yet."""
    found = _step_folders(Path(root)) if Path(root).exists() else []
    return tuple(sorted({_step_of(folder) for folder in found if _looks_whole(folder)}))


def drop_after(root: Path | str, step: int) -> None:
    """Delete the checkpoints under `root` of steps after `step`."""
    root = Path(root)
    if not root.exists():
        return
    try:
        with _only_saver(root):
            for folder in _step_folders(root):
                if _step_of(folder) > step:
                    _discard(folder)
    except OSError as fault:
        raise CheckpointError(f"checkpoints after step {step} cannot be deleted under {root}: {fault}") from fault


def rng_state() -> dict[str, Any]:
    """Where the global randomness of torch (CPU, and CUDA once it is in use), Python and NumPy stands."""
    name, key, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(key)), *rest),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Go back to where `rng_state` was taken, so that the next random numbers are the same."""
    if (saved := len(state["cuda"])) > (visible := torch.cuda.device_count()):
        problem = f"the random state is of {saved} CUDA devices, but {visible} are visible"
        raise CheckpointError(f"{problem}: resume with {saved}, or set 'cuda' to [] for other numbers there")
    name, key, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state((name, key.numpy(), *rest))


# One folder: how it is written, and every reason not to believe it.


def _write(root: Path, step: int, tree: Any, tensors: dict[str, Tensor]) -> Path:
    """Write a whole checkpoint and return its folder, which gets its name only once all is on disk."""
    folder = root / f"step-{step:09d}"
    with whole_folder(folder, _temporary_name(root), folder.with_suffix(".old")) as new:
        data, manifest = new / TENSORS, new / MANIFEST
        save_file(unshared(tensors), data)
        body = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "written_by": versions(),
            "files": {TENSORS: {"bytes": data.stat().st_size, "sha256": sha256_of(data)}},
            "state": tree,
        }
        text = json.dumps(body, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        sealed = _sealed(text.encode().removesuffix(b"}"))
        if len(sealed) > MOST_MANIFEST:
            size = f"{bytes_text(len(sealed))}, at most {bytes_text(MOST_MANIFEST)} are allowed"
            raise CheckpointError(f"all but the tensors of the state takes {size}: put long lists into tensors")
        manifest.write_bytes(sealed)
        shutil.copymode(manifest, data)  # safetensors hides the file from all others, whatever the umask
    return folder


def _read(folder: Path) -> dict[str, Any]:
    """The state in `folder`, every byte of it checked, or CheckpointError that says what is wrong where."""
    data = folder / TENSORS
    try:
        manifest = _read_manifest(folder)
        if sha256_of(data) != manifest["files"][TENSORS]["sha256"]:
            raise CheckpointError(f"{data} is damaged: its SHA-256 is not the one in {MANIFEST}")
        # Cloned because load_file maps the file: what was checked must not change under the reader.
        tensors = {name: tensor.clone() for name, tensor in load_file(data).items()}
        return dict(decode(manifest["state"], tensors))
    except CheckpointError:
        raise
    except _UNREADABLE as fault:
        raise CheckpointError(f"{folder} cannot be read: {shorten(repr(fault), 300)}") from fault


def _read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of `folder`, checked against itself, the folder's name and the length of the data file."""
    path, data = folder / MANIFEST, folder / TENSORS
    for file in (path, data):
        if file.is_symlink() or not file.is_file():  # a link would lead out of the folder, a pipe never end
            raise CheckpointError(f"{file} is missing or no plain file: copy the whole checkpoint again")
    sealed = read_limited(path, MOST_MANIFEST)
    try:
        manifest = parse_json(sealed, deepest=3 * MAX_DEPTH + 9)  # a dict takes three levels; the tree is below some
    except ValueError as fault:
        raise CheckpointError(f"{path} is damaged: it is no longer JSON ({fault})") from fault
    # Format and version come before the seal: another format or a later version may be sealed in another way.
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of an {FORMAT}: something else wrote it")
    if (version := manifest.get("version")) != VERSION:
        problem = f"{path} is of format version {version!r}, written by a newer atoll"
        raise CheckpointError(f"{problem}; this one reads version {VERSION}: upgrade it")
    if sealed != _sealed(sealed[: -len(_sealed(b""))]):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one at its end")
    if (written := manifest["step"]) != _step_of(folder):
        raise CheckpointError(f"{path} is of step {written}: the folder was renamed, give it its old name")
    if (names := list(manifest["files"])) != [TENSORS]:
        raise CheckpointError(f"{path} names the files {names}, but only {TENSORS} can belong to it")
    if (length := data.stat().st_size) != (whole := manifest["files"][TENSORS]["bytes"]):
        raise CheckpointError(f"{data} is torn: it has {length} bytes of {whole}")
    return manifest


def _looks_whole(folder: Path) -> bool:
    """Whether all but the bytes of the tensors, which take long to read, has been found good."""
    try:
        _read_manifest(folder)
    except _UNREADABLE:  # CheckpointError is one of them
        return False
    return True


def _sealed(body: bytes) -> bytes:
    """A JSON object still open at its end, closed with the SHA-256 of every byte before."""
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@cache
def versions() -> dict[str, str]:
    """Versions of what writes a checkpoint, for people to read; an uninstalled library is left out."""
    libraries = ("atoll", "torch", "numpy", "safetensors")
    return {name: package.version for name in libraries for package in distributions(name=name)}


# The folders of one root: who may write, what is a checkpoint, and how one comes and goes.


@contextmanager
def _only_saver(root: Path) -> Iterator[None]:
    """Hold the root's lock, which dies with its holder: what is temporary under it was left by the dead."""

    def refuse() -> None:
        raise CheckpointError(f"{root} is in use by another save: give each worker its own")

    with locked(root / ".lock", refuse):
        yield


def _step_folders(root: Path) -> list[Path]:
    """Step folders under `root`, newest first; one set aside comes right after the one that replaced it."""
    try:
        folders = [entry for entry in root.iterdir() if _STEP_FOLDER.fullmatch(entry.name) and entry.is_dir()]
    except OSError as fault:
        raise CheckpointError(f"{root} cannot be listed ({fault.strerror}): give the root saved to") from fault
    return sorted(folders, key=lambda folder: (-_step_of(folder), folder.name))


def _step_of(folder: Path) -> int:
    """The step in a step folder's name."""
    return int(folder.name.removeprefix("step-").removesuffix(".old"))


def _temporary_name(root: Path) -> Path:
    """A name under `root` that nobody else uses and no reader takes for a checkpoint."""
    return root / f".saving-{secrets.token_hex(4)}"


def _recover(root: Path) -> None:
    """Sweep what dead saves left, and give a checkpoint set aside but never replaced its name back."""
    for leftover in root.glob(".saving-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder in _step_folders(root):
        if folder.suffix == ".old" and folder.with_suffix("").exists():
            _discard(folder)
        elif folder.suffix == ".old":
            folder.rename(folder.with_suffix(""))


def _discard(folder: Path) -> None:
    """Delete a checkpoint, its name first, so that a crash half-way leaves no torn one."""
    shutil.rmtree(folder.rename(_temporary_name(folder.parent)), ignore_errors=True)
