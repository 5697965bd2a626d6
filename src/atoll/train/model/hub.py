"""Loads and saves causal language models of Hugging Face transformers, an optional extra.

Only config.json and safetensors are read: no code that comes with a model is run, and nothing is unpickled.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from atoll._util.quiet_hub import quiet_hub
from atoll._util.units import bytes_text
from atoll.errors import ConfigError, DataError
from atoll.train.data.corpus import need
from atoll.train.model.decoder import CausalModel, Loss

MOST_JSON: Final = 2**28
"""Most bytes of a JSON file in the folder of a model."""
_NAME_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class HubModel(CausalModel):
    """Gives a causal language model of transformers the methods of `Decoder`.

    The wrapped model is called `module`, as in DDP: the outer loop removes that prefix, so workers that train the bare
    model can join. In train() mode a model with dropout draws from torch's global generator.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        config: Any = module.config
        shape = config.get_text_config()
        self.vocabulary = shape.vocab_size
        positions = getattr(shape, "max_position_embeddings", None)
        self.context = positions if isinstance(positions, int) and positions > 0 else None
        self._has_cache = "past_key_values" in signature(module.forward).parameters
        names = ("router_aux_loss_coef", "aux_loss_coef")
        weights = [getattr(owner, name, None) for owner in (module, shape) for name in names]
        self._router_weight: float | None = next((weight for weight in weights if weight is not None), None)

    @property
    def has_routers(self) -> bool:
        """Whether it is a mixture of experts, some of which may get no gradient in a step."""
        return self._router_weight is not None

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, time, vocabulary] of tokens [batch, time], int64; time is at most `context`."""
        logits: Tensor = self._outputs(tokens).logits
        return logits

    def loss(self, tokens: Tensor) -> Loss:
        """Return the loss of predicting each token of [batch, time + 1], int64, from those before it.

        `total` includes the router loss of a mixture of experts if its config asks for it (output_router_logits).
        """
        outputs = self._outputs(tokens[:, :-1])
        logits: Tensor = outputs.logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 is too coarse for the sums
        cross_entropy = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        total, routers = cross_entropy, getattr(outputs, "aux_loss", None)
        if routers is not None:
            if self._router_weight is None:
                kind = type(self.module).__name__
                raise ConfigError(f"{kind} has a router loss but no weight for it: set output_router_logits to false")
            total = total + self._router_weight * routers
        return Loss(total, cross_entropy.detach())

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped model for `loss`; `generate` runs uncompiled, since its shapes change."""
        self.module.compile(*args, **kwargs)

    def _outputs(self, tokens: Tensor) -> Any:
        self.check_length(tokens)
        return self.module(input_ids=tokens, use_cache=False)

    def next_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the logits [batch, vocabulary] of the next token, and the cache for the next call, or None."""
        self.check_length(tokens[:, : self.context])
        if not self._has_cache or (self.context is not None and tokens.shape[1] > self.context):
            # Once the window slides, every token's position differs from the one in the cache.
            window = tokens if self.context is None else tokens[:, -self.context :]
            return self.module.forward(input_ids=window, use_cache=False).logits[:, -1].float(), None
        new = tokens if cache is None else tokens[:, -1:]
        outputs = self.module.forward(input_ids=new, past_key_values=cache, use_cache=True)
        return outputs.logits[:, -1].float(), outputs.past_key_values


def is_missing(where: str) -> bool:
    """Return whether `where` is neither a path here nor what a name on the hub looks like."""
    return not Path(where).expanduser().exists() and not _NAME_ON_THE_HUB.fullmatch(where)


def load(where: str, *, weights: bool) -> HubModel:
    """Load a model from a local folder or the hub, in fp32 and in train() mode.

    Args:
        where: A folder with a config.json, or a name on the hub, "owner/name".
        weights: False reads only the config and initialises parameters from torch's global generator.

    Raises:
        ConfigError: if it cannot be found, or is not a causal language model that transformers knows.
        DataError: if its weights are missing or damaged.
    """
    local = Path(where).expanduser().exists()
    place = str(Path(where).expanduser()) if local else where
    if local:
        _check_folder(Path(place))
    elif is_missing(where):
        raise ConfigError(f"model.hf: there is no folder {where!r}, and a name on the hub looks like owner/name")
    transformers = need("transformers", "a Hugging Face model", extra="hf")
    with _quiet(transformers, bars=not local):
        try:
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=local)
        except Exception as error:  # the library raises any type for a bad file or network
            raise ConfigError(_config_problem(where, local, error)) from error
        if getattr(config, "quantization_config", None):
            raise ConfigError(f"{where}: its weights are quantised and cannot be trained: take the original model")
        model = HubModel(_make(transformers, place, config, weights=weights, local=local))
        _check_causal(model, where)
    return model.train()


def save(model: HubModel, folder: Path, *, end: int | None = None, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write config.json and safetensors, which `transformers.AutoModelForCausalLM.from_pretrained` reads.

    Args:
        model: The model to save.
        folder: An existing folder.
        end: The token that ended documents in training, where transformers' `generate` stops.
        tensors: The full state dict, if this rank's model holds only a shard of it.
    """
    transformers = need("transformers", "a Hugging Face model", extra="hf")
    module: Any = model.module
    with _quiet(transformers, bars=False):
        if module.can_generate():
            try:
                module.generation_config.validate(strict=True)
            except ValueError:  # from_pretrained lets it pass, save_pretrained would fail: not after all the training
                module.generation_config = transformers.GenerationConfig.from_model_config(module.config)
            known = module.generation_config.eos_token_id
            if end is not None and end not in (known if isinstance(known, list) else [known]):
                module.generation_config.eos_token_id = end
        given = tensors and {name.removeprefix("module."): tensor for name, tensor in tensors.items()}
        module.save_pretrained(folder, state_dict=given)


# --- loading


@contextmanager
def _quiet(transformers: Any, *, bars: bool) -> Iterator[None]:
    """Silence the logs of transformers and the hub, and progress bars unless something may be downloaded."""
    log = transformers.logging
    verbosity, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    if not bars:
        log.disable_progress_bar()
    try:
        with quiet_hub():
            yield
    finally:
        log.set_verbosity(verbosity)
        if had_bars:
            log.enable_progress_bar()


def _check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"model.hf: {folder} is a file: give the folder with the model's config.json")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model.hf: {folder} holds no config.json: give the folder of a Hugging Face model")
    for path in folder.glob("*.json"):  # transformers reads them whole
        if not path.is_file() or path.stat().st_size > MOST_JSON:
            allowed = f"a plain file of at most {bytes_text(MOST_JSON)}"
            raise ConfigError(
                f"model.hf: {path} must be {allowed}, has {bytes_text(path.stat().st_size)}: download it again"
            )


def _config_problem(where: str, local: bool, error: Exception) -> str:
    """Return why a config could not be loaded, in one line."""
    if "custom code" in str(error):
        return f"{where}: the model comes with code, which is never run: use one that transformers knows"
    if local:
        return f"{Path(where) / 'config.json'} describes no model that transformers knows: {_one_line(error)}"
    problem = f"model.hf: {where!r} is not a folder here, and the Hugging Face hub did not provide it"
    advice = "check the name and the connection, or give the folder of a copy"
    return f"{problem}; {advice} ({_one_line(error)})"


def _make(transformers: Any, place: str, config: Any, *, weights: bool, local: bool) -> nn.Module:
    """Return the module of a config, with the weights beside it or with random ones."""
    module: nn.Module
    auto, options = transformers.AutoModelForCausalLM, {"dtype": torch.float32, "trust_remote_code": False}
    try:
        if not weights:
            module = auto.from_config(config, **options)
            return module
        module, report = auto.from_pretrained(
            place,
            config=config,
            use_safetensors=True,
            local_files_only=local,
            ignore_mismatched_sizes=True,  # its error names none of them; they are refused below
            output_loading_info=True,
            **options,
        )
    except (SafetensorError, OSError) as error:
        raise DataError(f"{place}: its safetensors weights cannot be read: {_one_line(error)}") from error
    except Exception as error:
        problem = f"transformers cannot make the model: {_one_line(error)}"
        if "Unrecognized configuration class" in str(error):
            problem = f"a {config.model_type} model is not a causal language model, which predicts the next token"
        raise ConfigError(f"{place}: {problem}") from error
    if missing := sorted(report["missing_keys"]):
        lost = f"{missing[0]} ({len(missing)} in all)"
        raise DataError(f"{place}: its weights lack {lost}: the file is of another model, or damaged")
    if unfit := sorted(report["mismatched_keys"]):
        name, found, expected = unfit[0][:3]
        shapes = f"{name} with shape {tuple(found)} where config.json asks for {tuple(expected)}"
        raise DataError(f"{place}: its weights hold {shapes}: the two are not of the same model")
    return module


def _check_causal(model: HubModel, where: str) -> None:
    """Refuse a model whose first logits depend on later tokens: BERT loads as a causal model, and copies."""
    model.eval()
    length = min(8, model.context or 8)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    tokens[1, 1:] = model.vocabulary - 1
    try:
        with torch.no_grad():
            one, other = model(tokens)[:, 0]
    except Exception as error:
        raise ConfigError(f"{where}: it cannot be run on tokens alone: {_one_line(error)}") from error
    if (one - other).abs().max() > 1e-4 * one.abs().max():  # experts sort tokens, which changes rounding
        kind = type(model.module).__name__
        raise ConfigError(f"{where}: {kind} is not a causal language model: it sees the tokens it is to predict")


def _one_line(error: BaseException) -> str:
    """Return a library's error message in one line of at most 240 characters."""
    words = " ".join(str(error).split())
    text = words if isinstance(error, OSError | ValueError | SafetensorError) else f"{type(error).__name__}: {words}"
    return text if len(text) <= 240 else f"{text[:240]}..."
