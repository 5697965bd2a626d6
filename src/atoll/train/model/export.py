"""Exports a trained model as a folder that does not depend on its run, and loads it again.

model/
  config.json            the model as transformers describes it
  generation_config.json where generated text begins and ends
  model.safetensors      the parameters, under the names of transformers
  tokenizer.json         the tokenizer, in the format of the package tokenizers
  tokenizer_config.json  what transformers needs besides
  atoll.json             for a decoder: its shape as atoll describes it, and the checksum of the parameters
.model.old/            the earlier export while model/ is replaced; read if that was interrupted
.model.new/            an export under way, or what a crash left of one; the next export deletes it
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from atoll._util.disk import parse_json, read_limited, sha256_of, whole_folder
from atoll.errors import ConfigError, DataError
from atoll.runs.layout import BEST, MODEL, RUN, worker_folder, worker_folders, worker_of
from atoll.settings.model_presets import ModelConfig
from atoll.train.data.tokenizer import Tokenizer, open_tokenizer
from atoll.train.model import hub, transformers_format
from atoll.train.model.decoder import Decoder
from atoll.train.model.hub import HubModel

FORMAT: Final = "atoll decoder"
VERSION: Final = 2
"""Version of atoll.json. In version 1, the shape is in config.json, and parameters have the decoder's names."""
CONFIG: Final = "config.json"
OWN: Final = "atoll.json"
NO_ARCHITECTURE: Final = "no_architecture"
"""The key under which config.json says why transformers cannot read a decoder."""
WEIGHTS: Final = "model.safetensors"


def export(
    model: Decoder | HubModel, tokenizer: Tokenizer, folder: Path, tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Write the model as a folder, replacing an earlier export once the new one is whole on disk.

    Killed at any moment, it leaves the old or the new export for `load_export`. Only one process at a time may export
    to a folder. transformers reads it, unless no architecture fits a decoder: config.json then says why, in version 1.

    Args:
        model: The model to export.
        tokenizer: Its tokenizer.
        folder: The folder to write; if it exists, it must be empty or an export.
        tensors: The full state dict, if this rank's model holds only a shard of it.

    Raises:
        ConfigError: if the folder holds anything else.
        DataError: if the disk is full or refuses the files.
    """
    folder = Path(os.path.realpath(folder))
    _check_replaceable(folder)
    try:
        aside = _aside(folder, "new"), _aside(folder, "old")
        _clear_leftovers(folder, *aside)
        with whole_folder(folder, *aside) as new:
            if isinstance(model, HubModel):
                hub.save(model, new, tensors=tensors, end=tokenizer.separator)
            else:
                full = model.state_dict() if tensors is None else tensors
                _save_decoder(model.config, full, tokenizer.separator, new)
            tokenizer.save(new)
            _write_tokenizer_config(new, tokenizer.separator, model.context)
            for path in new.iterdir():
                shutil.copymode(new / CONFIG, path)  # safetensors hides its file from other users, whatever the umask
    except (OSError, SafetensorError) as error:
        problem = f"the model cannot be exported to {folder}: {' '.join(str(error).split())}"
        raise DataError(f"{problem}; make room or choose another folder, what was there is intact") from error


def load_export(folder: Path) -> tuple[Decoder | HubModel, Tokenizer]:
    """Return the model, on the CPU, and the tokenizer that `export` wrote.

    Raises:
        DataError: if there is no export, or it is damaged.
    """
    folder = Path(os.path.realpath(folder))
    if not exists(folder):
        raise DataError(f"{folder} holds no exported model: there is no {CONFIG}")
    if not folder.exists():  # a replacement died between its two renames
        folder = _aside(folder, "old")
    described, config = _description(folder)
    model: Decoder | HubModel
    if config.get("format") == FORMAT:
        model = _load_decoder(described, config)
    elif described.name == CONFIG and "model_type" in config:
        model = hub.load(str(folder), weights=True)
    else:
        found = f'format must be "{FORMAT}", got {config.get("format")!r}, and there is no model_type'
        raise DataError(f"{described} describes no model: {found}; give the folder of an exported model")
    tokenizer = open_tokenizer(folder)
    if tokenizer.vocabulary > model.vocabulary:
        sizes = f"{tokenizer.vocabulary} tokens, the model knows {model.vocabulary}"
        raise DataError(f"{folder} is not of one piece: its tokenizer has {sizes}; export it again")
    return model, tokenizer


def load_start(where: str, *, weights: bool) -> Decoder | HubModel:
    """Load the model that a run starts from, in fp32 and in train() mode.

    A decoder that atoll has exported stays a decoder, with its z-loss and without transformers.

    Args:
        where: The folder of an exported decoder or of a Hugging Face model, or a name on the hub, "owner/name".
        weights: False reads only the shape and initialises parameters from torch's global generator.

    Raises:
        ConfigError: if there is no such model, or it is not a causal language model.
        DataError: if its weights are missing or damaged.
    """
    folder = Path(where).expanduser()
    if (folder / CONFIG).is_file():
        described, config = _description(folder)
        if config.get("format") == FORMAT:
            model = _load_decoder(described, config) if weights else Decoder(_shape(described, config))
            return model.float().train()
    return hub.load(where, weights=weights)


def exists(folder: Path) -> bool:
    """Return whether there is an export to load, also if its replacement was interrupted."""
    return any((place / CONFIG).is_file() for place in (folder, _aside(folder, "old")))


def find_export(folder: Path, *, best: bool, command: str) -> Path:
    """Return the export in a run's folder, or the folder itself if it is one.

    Args:
        folder: A run, or an export.
        best: Whether the run's best export is meant, instead of the final one.
        command: The subcommand that asks, for messages.

    Raises:
        DataError: if there is none.
    """
    if not (folder / RUN).is_file():
        if not exists(folder) and (workers := worker_folders(folder)):
            raise DataError(
                f"{folder} holds the workers of a run: say whose model, as in `atoll {command} {workers[0]}`"
            )
        if not exists(folder):
            raise DataError(f"{folder} is neither a run nor an exported model: it has no {RUN} and no config.json")
        return folder
    meant = folder / (BEST if best else MODEL)
    if not exists(meant):
        worker = worker_of(folder)
        if best and worker:
            first = folder.parent / worker_folder(0)
            raise DataError(f"{folder} has no {BEST}/, for only worker 0 evaluates: `atoll {command} {first} --best`")
        problem = (
            f"the run in {folder} has not {'been evaluated' if best else 'finished'}, so it has no {meant.name}/ yet"
        )
        goes_on = f"`atoll train {folder}{'' if worker is None else f' --worker {worker}'} --resume` goes on with it"
        hint = "" if best or worker else ", and --best takes the best so far"
        raise DataError(f"{problem}: {goes_on}{hint}")
    return meant


# --- atoll's own decoder


def _save_decoder(config: ModelConfig, tensors: Mapping[str, Tensor], end: int, folder: Path) -> None:
    misfit = transformers_format.misfit(config)
    stored = tensors if misfit else transformers_format.to_architecture(config, tensors)
    dense = {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}
    save_file(dense, folder / WEIGHTS, metadata={"format": "pt"})
    own = {"format": FORMAT, "version": VERSION, **asdict(config), "sha256": sha256_of(folder / WEIGHTS)}
    if misfit:
        _write_json(folder / CONFIG, {**own, "version": 1, NO_ARCHITECTURE: misfit})
        return
    _write_json(folder / OWN, own)
    dtype = tensors["embedding.weight"].dtype
    _write_json(folder / CONFIG, transformers_format.describe(config, dtype, end))
    _write_json(folder / "generation_config.json", dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end))


def _load_decoder(described: Path, config: Mapping[str, Any]) -> Decoder:
    shape, weights = _shape(described, config), described.with_name(WEIGHTS)
    try:
        if config.get("sha256", digest := sha256_of(weights)) != digest:
            hint = f"take sha256 out of {CONFIG}" if described.name == CONFIG else f"delete {OWN}"
            problem = f"{weights} is damaged: its SHA-256 is not the one in {described.name}"
            raise DataError(f"{problem}; if it was changed on purpose, {hint}")
        # Cloned: load_file maps the file, which may change or be deleted.
        tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}
    except (OSError, SafetensorError) as error:
        raise DataError(f"{weights} cannot be read: {error}") from error
    found = sum(tensor.numel() for tensor in tensors.values())
    if found != shape.parameters:  # before making a model, which could have any size
        raise DataError(
            f"{weights} holds {found:,} values where {described.name} asks for {shape.parameters:,}: export it again"
        )
    if config["version"] == VERSION:
        tensors = transformers_format.from_architecture(shape, tensors)
    return _assemble(shape, tensors, f"{weights} does not fit {described.name}")


def _assemble(shape: ModelConfig, tensors: dict[str, Tensor], misfit: str) -> Decoder:
    """Return a decoder of this shape with these parameters; DataError if they do not fit."""
    with torch.device("meta"):
        model = Decoder(shape)
    for name, parameter in model.state_dict().items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != parameter.shape or not tensor.is_floating_point():
            have = "none" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            wanted = f"{name} of shape {tuple(parameter.shape)}, in floating point"
            raise DataError(f"{misfit}, which asks for {wanted}; it has {have}")
    model.load_state_dict({name: tensors[name] for name in model.state_dict()}, assign=True)
    return model


def _shape(path: Path, config: Mapping[str, Any]) -> ModelConfig:
    known_version = 1 if path.name == CONFIG else VERSION
    if (version := config.get("version")) != known_version:
        advice = "upgrade atoll, which wrote it in a newer version, or export the model again"
        raise DataError(f"{path}: version must be {known_version}, got {version!r}: {advice}")
    others = ("format", "version", "sha256", NO_ARCHITECTURE)
    settings = {name: value for name, value in config.items() if name not in others}
    known = {field.name: field.type for field in fields(ModelConfig)}
    if wrong := sorted(settings.keys() ^ known.keys()):
        raise DataError(f"{path} is damaged: {wrong[0]!r} is {'missing' if wrong[0] in known else 'no setting'}")
    for name, value in settings.items():
        if known[name] is bool and type(value) is not bool:
            raise DataError(f"{path} is damaged: {name} must be true or false, got {value!r}")
    try:
        return ModelConfig(**settings)
    except ConfigError as error:
        raise DataError(f"{path} is damaged: {error}") from error


def _description(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Return the file that describes the model in a folder, atoll's if there is one, and its content."""
    path = folder / (OWN if os.path.lexists(folder / OWN) else CONFIG)
    return path, _read_config(path)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = parse_json(read_limited(path, hub.MOST_JSON))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(config, dict):
        raise DataError(f"{path} is damaged: it must hold a JSON object")
    return config


# --- for transformers


def _write_tokenizer_config(folder: Path, separator: int, context: int | None) -> None:
    """Write what `transformers.AutoTokenizer` needs besides tokenizer.json."""
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    end = next((token["content"] for token in added if token["id"] == separator), None)
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "model_max_length": context}
    known = {name: value for name, value in about.items() if value is not None}
    _write_json(folder / "tokenizer_config.json", known)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


# --- one folder in place of another


def _aside(folder: Path, which: str) -> Path:
    return folder.with_name(f".{folder.name}.{which}")


def _check_replaceable(folder: Path) -> None:
    """Refuse to replace anything but an export or an empty folder."""
    if folder.is_dir():
        names = {entry.name for entry in folder.iterdir()}
        if not names or (CONFIG in names and any(name.endswith(".safetensors") for name in names)):
            return
    if folder.exists():
        raise ConfigError(f"{folder} exists and is not an exported model: choose another folder for the export")


def _clear_leftovers(folder: Path, new: Path, old: Path) -> None:
    """Restore or delete what an interrupted export left."""
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (new, old):
        if leftover.exists():
            shutil.rmtree(leftover)
