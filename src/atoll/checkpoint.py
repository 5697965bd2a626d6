"""Saves and loads a worker's whole state as an atomic, versioned folder.

    root/
      .lock                    held while a process saves
      .saving-1f6e02ab/        a save under way, or what a crash left of one; the next save deletes it
      step-000000100/
        tensors.safetensors    every tensor, named by its path in the state
        manifest.json          format, version, step, the tree around the tensors, their length and SHA-256
      step-000000100.old/      set aside while step 100 is saved again; read if that save died half-way

A folder gets its `step-` name once all of it is on disk. Later damage is caught by SHA-256; the manifest ends with the
digest of every byte before it. That guards against accidents, not against forgery; yet loading runs nothing and opens
only those two files.
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
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from textwrap import shorten
from typing import Any, Final, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll._util.checks import config_error
from atoll._util.disk import DEEPEST, locked, parse_json, read_limited, sha256_of, whole_folder
from atoll._util.tensor_tree import decode, encode, unshared
from atoll._util.units import bytes_text
from atoll.errors import CheckpointError

FORMAT: Final = "atoll-checkpoint"
VERSION: Final = 1
MANIFEST: Final = "manifest.json"
TENSORS: Final = "tensors.safetensors"
MOST_MANIFEST: Final = 2**26
"""Most bytes of a manifest, which is read whole: long values belong in tensors."""

_STEP_FOLDER = re.compile(r"step-([0-9]{9}|[1-9][0-9]{9,})(\.old)?")
# Torch raises RuntimeError for an impossible shape and for lack of memory.
_UNREADABLE = (
    *(OSError, LookupError, TypeError, ValueError, SafetensorError, struct.error),
    *(ArithmeticError, MemoryError, RuntimeError),
)


def save(root: Path | str, step: int, state: Mapping[str, Any], *, keep: int = 2, ahead: int | None = None) -> Path:
    """Save `state` as root/step-000000123 atomically, and delete whole checkpoints that are no longer needed.

    `state` nests dicts (keys str or int), lists and tuples of None, bool, int, float, str, bytes and tensors. All come
    back bit for bit; dict subclasses as dict, each tensor as a plain one with its own CPU memory. Damaged folders are
    neither counted nor deleted. With `keep` of 2 or more, other processes may load meanwhile.

    Args:
        root: A folder for the checkpoints of this worker alone.
        step: Inner steps made so far; all workers save after the same ones.
        state: The state to save.
        keep: How many of the newest checkpoints stay at least.
        ahead: Inner steps that this worker can be ahead of another, whose newest checkpoint must be kept here too: all
            stay that are newer than `step - ahead`, and one that is not. None takes it from the
            `OuterLoop.state_dict()` in `state`, else 0.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: The state holds a value that cannot be saved, or the disk refuses it.
    """
    if type(step) is not int or step < 0:
        raise config_error("step", step, "an int of at least 0", "it names the folder")
    if keep < 1:
        raise config_error("keep", keep, "at least 1", "the checkpoint just written always stays")
    if ahead is None:
        ahead = _ahead(state)
    tensors: dict[str, Tensor] = {}
    tree = encode(dict(state), "", tensors)  # refuses a bad state before touching the disk
    root = Path(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        with _save_lock(root):
            _recover(root)
            folder = _write(root, step, tree, tensors)
            for surplus in _surplus(root, step, keep, ahead):
                _delete(surplus)
    except (OSError, SafetensorError) as fault:
        problem = f"step {step} cannot be saved under {root}: {fault}"
        problem += "; make room there or save elsewhere, earlier checkpoints are intact"
        raise CheckpointError(problem, path=root) from fault
    return folder


def load(root_or_folder: Path | str, step: int | None = None) -> tuple[int, dict[str, Any]]:
    """Load the newest whole checkpoint under a root, or the one of exactly `step`, or a step folder.

    A damaged newer checkpoint is skipped with a warning that says why.

    Returns:
        Its step and state.

    Raises:
        CheckpointError: None can be loaded; the message lists each candidate and what is wrong with it.
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
    problem = "\n  - ".join([f"no {wanted} can be loaded from {place}:", *reasons])
    raise CheckpointError(problem, path=place)


def _ahead(state: Mapping[str, Any]) -> int:
    """Return the steps that this worker can be ahead of another; 0 without an outer loop in the state."""
    said = [part.get("ahead") for part in state.values() if isinstance(part, Mapping)]
    return max((number for number in said if type(number) is int), default=0)


def _surplus(root: Path, step: int, keep: int, ahead: int) -> list[Path]:
    """Return the checkpoints to delete once `step` is saved: those that no worker needs to resume."""
    good = [folder for folder in _step_folders(root) if _looks_whole(folder)]
    common = max((number for folder in good if (number := _step_of(folder)) <= step - ahead), default=0)
    # After a rollback, the one just written may be the oldest, and those of later steps the newest.
    return [folder for folder in good[keep:] if not common <= _step_of(folder) <= step]


class Gathers(Protocol):
    """Gathers a value from every process of a run, as links do."""

    def gather(self, key: str, value: Any) -> Mapping[Any, Any]:
        """Publish a JSON value under a key and return that of every process."""


def load_common(root: Path | str, link: Gathers) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that every worker has, and delete later ones: the run makes these again.

    Every worker calls it with its own folder, before its `OuterLoop` joins the others.

    Args:
        root: The folder of this worker's checkpoints; it may be missing.
        link: This worker's link, made by `atoll.connect(...)`; in a run of one worker, any. Several workers in one
            process compare their `steps` with `common_step`.

    Returns:
        Its step and state; None if all workers are at their beginning.

    Raises:
        CheckpointError: Workers have checkpoints, but none in common, or it cannot be loaded.
    """
    step = common_step(link.gather("checkpoints", list(steps(root))))
    if step is None:
        return None
    found = load(root, step)
    drop_after(root, step)
    return found


def common_step(saved: Mapping[Any, Collection[int]]) -> int | None:
    """Return the newest step that every worker has saved; None if all are at their beginning.

    `load_common` asks the workers of a link. Once a step is chosen, every worker calls `drop_after(folder, step)`: the
    run does not continue from later ones.

    Args:
        saved: Worker -> its `steps`.

    Raises:
        CheckpointError: Workers have checkpoints, but none in common.
    """
    shared = set.intersection(*({step for step in steps if type(step) is int} for steps in saved.values()))
    if shared:
        return max(shared)
    if not any(any(steps) for steps in saved.values()):  # step 0 is easily repeated
        return None
    have = "; ".join(f"{worker} has {_listed(steps)}" for worker, steps in saved.items())
    raise CheckpointError(
        f"no checkpoint exists on every worker, so none can be resumed from: {have}. "
        "Restore the missing folders, or start another run in new folders"
    )


def _listed(steps: Collection[int]) -> str:
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(map(str, sorted(steps)))}" if steps else "none"


def steps(root: Path | str) -> tuple[int, ...]:
    """Return the steps under `root` that look whole, ascending; tensors are not read."""
    found = _step_folders(Path(root)) if Path(root).exists() else []
    return tuple(sorted({_step_of(folder) for folder in found if _looks_whole(folder)}))


def drop_after(root: Path | str, step: int) -> None:
    """Delete the checkpoints under `root` of steps after `step`."""
    root = Path(root)
    if not root.exists():
        return
    try:
        with _save_lock(root):
            for folder in _step_folders(root):
                if _step_of(folder) > step:
                    _delete(folder)
    except OSError as fault:
        problem = f"checkpoints after step {step} cannot be deleted under {root}: {fault}"
        raise CheckpointError(problem, path=root) from fault


def rng_state() -> dict[str, Any]:
    """Return the state of the global generators of torch (CPU, and CUDA once in use), Python and NumPy."""
    name, key, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(key)), *rest),
    }


def set_rng_state(state: Mapping[str, Any]) -> None:
    """Restore what `rng_state` returned, so that the next random numbers are the same."""
    if (saved := len(state["cuda"])) > (visible := torch.cuda.device_count()):
        problem = f"the random state is of {saved} CUDA devices, but {visible} are visible"
        raise CheckpointError(f"{problem}: resume with {saved}, or set 'cuda' to [] for other numbers there")
    name, key, *rest = state["numpy"]
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state_all(state["cuda"])
    random.setstate(state["python"])
    np.random.set_state((name, key.numpy(), *rest))


# ---------------------------------------------------------------------- one folder


def _write(root: Path, step: int, tree: Any, tensors: dict[str, Tensor]) -> Path:
    """Write a checkpoint and return its folder, which gets its name once all is on disk."""
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
            raise CheckpointError(f"the state without its tensors takes {size}: put long lists into tensors")
        manifest.write_bytes(sealed)
        shutil.copymode(manifest, data)  # safetensors ignores the umask
    return folder


def _read(folder: Path) -> dict[str, Any]:
    """Read the state in `folder`, checking every byte; CheckpointError says which file is damaged, and how."""
    data = folder / TENSORS
    try:
        manifest = _read_manifest(folder)
        if sha256_of(data) != manifest["files"][TENSORS]["sha256"]:
            raise CheckpointError(f"{data} is damaged: its SHA-256 is not the one in {MANIFEST}", path=data)
        # Cloned because load_file maps the file: checked bytes must not change under the reader.
        tensors = {name: tensor.clone() for name, tensor in load_file(data).items()}
        return dict(decode(manifest["state"], tensors))
    except CheckpointError:
        raise
    except _UNREADABLE as fault:
        raise CheckpointError(f"{folder} cannot be read: {shorten(repr(fault), 300)}", path=folder) from fault


def _read_manifest(folder: Path) -> dict[str, Any]:
    """Read a manifest, checked against its own digest, the folder's name and the data file's length."""
    path, data = folder / MANIFEST, folder / TENSORS
    for file in (path, data):
        if file.is_symlink() or not file.is_file():  # a symlink leads out of the folder, a pipe may not end
            raise CheckpointError(f"{file} is missing or no plain file: copy the whole checkpoint again", path=file)
    sealed = read_limited(path, MOST_MANIFEST)
    try:
        manifest = parse_json(sealed, deepest=3 * DEEPEST + 9)  # a dict takes three levels
    except ValueError as fault:
        raise CheckpointError(f"{path} is damaged: it is no longer JSON ({fault})", path=path) from fault
    # Format and version come before the digest, which another format or version may compute in another way.
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not the manifest of an {FORMAT}: another program wrote it", path=path)
    if (version := manifest.get("version")) != VERSION:
        problem = f"{path} is of format version {version!r}, written by a newer atoll"
        raise CheckpointError(f"{problem}; this one reads version {VERSION}: upgrade it", path=path)
    if sealed != _sealed(sealed[: -len(_sealed(b""))]):
        raise CheckpointError(f"{path} is damaged: its SHA-256 is not the one at its end", path=path)
    if (written := manifest["step"]) != _step_of(folder):
        problem = f"{path} is of step {written}: the folder was renamed, give it its old name"
        raise CheckpointError(problem, path=path)
    if (names := list(manifest["files"])) != [TENSORS]:
        raise CheckpointError(f"{path} names the files {names}, but only {TENSORS} can belong to it", path=path)
    if (length := data.stat().st_size) != (whole := manifest["files"][TENSORS]["bytes"]):
        raise CheckpointError(f"{data} is torn: it has {length} bytes of {whole}", path=data)
    return manifest


def _looks_whole(folder: Path) -> bool:
    """Return whether everything but the tensors' bytes, which take long to read, is valid."""
    try:
        _read_manifest(folder)
    except _UNREADABLE:  # CheckpointError is one of them
        return False
    return True


def _sealed(body: bytes) -> bytes:
    """Close a JSON object that is still open with the SHA-256 of every byte before."""
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'


@cache
def versions() -> dict[str, str]:
    """Return the versions of atoll and its libraries, for people; uninstalled ones are left out."""
    libraries = ("atoll", "torch", "numpy", "safetensors")
    return {name: package.version for name in libraries for package in distributions(name=name)}


# ---------------------------------------------------------------------- all folders of one root


def _save_lock(root: Path) -> AbstractContextManager[None]:
    """Hold the root's lock, which its holder's death releases: temporary folders are then leftovers."""
    busy = CheckpointError(f"{root} is in use by another save: give each worker its own", path=root)
    return locked(root / ".lock", busy)


def _step_folders(root: Path) -> list[Path]:
    """Return the step folders under `root`, newest first; an .old one follows the one that replaced it."""
    try:
        folders = [entry for entry in root.iterdir() if _STEP_FOLDER.fullmatch(entry.name) and entry.is_dir()]
    except OSError as fault:
        raise CheckpointError(
            f"{root} cannot be listed ({fault.strerror}): give the root saved to", path=root
        ) from fault
    return sorted(folders, key=lambda folder: (-_step_of(folder), folder.name))


def _step_of(folder: Path) -> int:
    """Return the step in a step folder's name."""
    return int(folder.name.removeprefix("step-").removesuffix(".old"))


def _temporary_name(root: Path) -> Path:
    """Return an unused name under `root` that no reader takes for a checkpoint."""
    return root / f".saving-{secrets.token_hex(4)}"


def _recover(root: Path) -> None:
    """Delete what dead saves left, and rename back a checkpoint that was set aside but never replaced."""
    for leftover in root.glob(".saving-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for folder in _step_folders(root):
        if folder.suffix == ".old" and folder.with_suffix("").exists():
            _delete(folder)
        elif folder.suffix == ".old":
            folder.rename(folder.with_suffix(""))


def _delete(folder: Path) -> None:
    """Delete a checkpoint, after renaming it, so that a crash half-way leaves no torn one."""
    shutil.rmtree(folder.rename(_temporary_name(folder.parent)), ignore_errors=True)
