"""Causal language models of Hugging Face transformers, as the trainer's model.

transformers is an optional extra and is imported by what needs it, so that this file can be imported without it.
Nothing but config.json and safetensors is read: no code that comes with a model is run, and nothing is unpickled.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.nn import functional

from atoll._util.units import bytes_text
from atoll.errors import ConfigError, DataError
from atoll.train.model.decoder import Loss, check_generation, draw

MOST_JSON: Final = 2**28
"""Bytes of a JSON file in the folder of a model."""
_NAME_ON_THE_HUB = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


class HubModel(nn.Module):
    """A causal language model of transformers with the methods of `Decoder`.

    What it wraps is called `module`, as DDP calls it: the outer loop knows that prefix and takes it off, so workers
    that train the bare model can join. In train() mode a model with dropout draws from torch's global generator.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        config: Any = module.config
        shape = config.get_text_config()
        self.vocabulary: int = shape.vocab_size
        positions = getattr(shape, "max_position_embeddings", None)
        self.context: int | None = positions if isinstance(positions, int) and positions > 0 else None
        """Longest sequence, in tokens; None if the model sets no limit."""
        self._has_cache = "past_key_values" in signature(module.forward).parameters
        names = ("router_aux_loss_coef", "aux_loss_coef")
        weights = [getattr(owner, name, None) for owner in (module, shape) for name in names]
        self._router_weight: float | None = next((weight for weight in weights if weight is not None), None)

    @property
    def has_routers(self) -> bool:
        """Whether it is a mixture of experts, of which some may have no part in a step."""
        return self._router_weight is not None

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time], int64 -> logits [batch, time, vocabulary]; time is at most `context`."""
        logits: Tensor = self._outputs(tokens).logits
        return logits

    def loss(self, tokens: Tensor) -> Loss:
        """Of predicting each token of [batch, time + 1], int64, from those before it.

        If the model's config asks for the routers' loss of a mixture of experts (output_router_logits), `total` has
        it too.
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

    def generate(
        self, prompt: Tensor, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """The prompt [batch, time] with `count` more tokens -> [batch, time + count]; dropout is off meanwhile.

        Each is drawn by softmax(logits / temperature) given the last `context` tokens; at 0 it is the likeliest one.
        """
        check_generation(count, temperature)
        tokens, cache, training = prompt, None, self.training
        self.eval()
        try:
            with torch.no_grad():
                for _ in range(count):
                    logits, cache = self._next_logits(tokens, cache)
                    tokens = torch.cat((tokens, draw(logits, temperature, generator)), 1)
        finally:
            self.train(training)
        return tokens

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the wrapped model, which `loss` calls too; `generate` does without, its shapes change each time."""
        self.module.compile(*args, **kwargs)

    def _outputs(self, tokens: Tensor) -> Any:
        self._check_length(tokens)
        return self.module(input_ids=tokens, use_cache=False)

    def _next_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Logits [batch, vocabulary] of the token after these, and what the next call can go on from, or None."""
        self._check_length(tokens[:, : self.context])
        if not self._has_cache or (self.context is not None and tokens.shape[1] > self.context):
            # Once the window slides, every token has another position than the one it was remembered with.
            window = tokens if self.context is None else tokens[:, -self.context :]
            return self.module.forward(input_ids=window, use_cache=False).logits[:, -1].float(), None
        new = tokens if cache is None else tokens[:, -1:]
        outputs = self.module.forward(input_ids=new, past_key_values=cache, use_cache=True)
        return outputs.logits[:, -1].float(), outputs.past_key_values

    def _check_length(self, tokens: Tensor) -> None:
        time = tokens.shape[1]
        if time < 1 or (self.context is not None and time > self.context):
            allowed = "at least 1 token" if self.context is None else f"between 1 and {self.context} tokens"
            raise ConfigError(
                f"a sequence must have {allowed}, the context of {type(self.module).__name__}, got {time} (loss "
                "takes one more, the last to predict): cut it"
            )


def load(where: str, *, weights: bool) -> HubModel:
    """The model in a local folder or of this name on the hub, in fp32 and in train() mode.

    Without `weights` only its config is read, and its parameters are drawn from torch's global generator.
    """
    local = Path(where).expanduser().exists()
    place = str(Path(where).expanduser()) if local else where
    if local:
        _check_folder(Path(place))
    elif not _NAME_ON_THE_HUB.fullmatch(where):
        raise ConfigError(f"model.hf: there is no folder {where!r}, and a name on the hub looks like owner/name")
    transformers = _transformers()
    with _quiet(transformers, bars=not local):
        try:
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, local_files_only=local)
        except Exception as fault:  # whatever a library makes of a bad file or a bad network
            raise ConfigError(_config_problem(where, local, fault)) from fault
        if getattr(config, "quantization_config", None):
            raise ConfigError(f"{where}: its weights are quantised and cannot be trained: take the original model")
        module = _with_weights(transformers, place, config, local) if weights else _drawn(transformers, where, config)
        model = HubModel(module)
        _check_causal(model, where)
    return model.train()


def save(model: HubModel, folder: Path, *, end: int | None = None, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Write config.json and safetensors, which `transformers.AutoModelForCausalLM.from_pretrained` reads.

    `end` is the token that ended documents in training, where transformers' own `generate` shall stop. `tensors` is
    the state dict, if the model holds but a part of it.
    """
    transformers = _transformers()
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


def _transformers() -> Any:
    try:
        return import_module("transformers")
    except ImportError as fault:
        command = "pip install 'atoll[hf]'"
        raise ConfigError(f"Hugging Face models need transformers ({fault}): {command}") from fault


@contextmanager
def _quiet(transformers: Any, *, bars: bool) -> Iterator[None]:
    """Without transformers' remarks, and without its progress bars unless something may have to be downloaded."""
    log = transformers.logging
    verbosity, had_bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    if not bars:
        log.disable_progress_bar()
    try:
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
    for path in folder.glob("*.json"):  # transformers reads them whole, whatever they are
        if not path.is_file() or path.stat().st_size > MOST_JSON:
            allowed = f"a plain file of at most {bytes_text(MOST_JSON)}"
            raise ConfigError(
                f"model.hf: {path} must be {allowed}, has {bytes_text(path.stat().st_size)}: download it again"
            )


def _config_problem(where: str, local: bool, fault: Exception) -> str:
    """Why no config could be had, in one line."""
    if "custom code" in str(fault):
        return f"{where}: the model brings code of its own, which is never run: use one that transformers knows"
    if local:
        return f"{Path(where) / 'config.json'} describes no model that transformers knows: {_one_line(fault)}"
    return f"model.hf: {where!r} is no folder here, and the Hugging Face hub did not give it: {_one_line(fault)}"


def _model_problem(where: str, config: Any, fault: Exception) -> str:
    """Why no model could be made of a config, in one line."""
    if "Unrecognized configuration class" in str(fault):
        return f"{where}: a {config.model_type} model is no causal language model, one that predicts the next token"
    return f"{where}: transformers cannot make the model: {_one_line(fault)}"


def _drawn(transformers: Any, where: str, config: Any) -> nn.Module:
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, trust_remote_code=False
        )
    except Exception as fault:
        raise ConfigError(_model_problem(where, config, fault)) from fault
    return module


def _with_weights(transformers: Any, place: str, config: Any, local: bool) -> nn.Module:
    try:
        module: nn.Module
        module, report = transformers.AutoModelForCausalLM.from_pretrained(
            place,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=local,
            ignore_mismatched_sizes=True,  # it would name none of them; they are refused below
            output_loading_info=True,
        )
    except (SafetensorError, OSError) as fault:
        raise DataError(f"{place}: its safetensors weights cannot be read: {_one_line(fault)}") from fault
    except Exception as fault:
        raise ConfigError(_model_problem(place, config, fault)) from fault
    if missing := sorted(report["missing_keys"]):
        lost = f"{missing[0]} ({len(missing)} in all)"
        raise DataError(f"{place}: its weights lack {lost}: the file is of another model, or damaged")
    if unfit := sorted(report["mismatched_keys"]):
        name, found, expected = unfit[0][:3]
        shapes = f"{name} with shape {tuple(found)} where config.json asks for {tuple(expected)}"
        raise DataError(f"{place}: its weights hold {shapes}: the two are not of the same model")
    return module


def _check_causal(model: HubModel, where: str) -> None:
    """Refuse a model whose first logits change with later tokens: BERT loads as a causal model, and just copies."""
    model.eval()
    length = min(8, model.context or 8)
    tokens = torch.zeros(2, length, dtype=torch.int64)
    tokens[1, 1:] = model.vocabulary - 1
    try:
        with torch.no_grad():
            one, other = model(tokens)[:, 0]
    except Exception as fault:
        raise ConfigError(f"{where}: it cannot be run on tokens alone: {_one_line(fault)}") from fault
    if (one - other).abs().max() > 1e-4 * one.abs().max():  # experts sort tokens, which changes rounding
        kind = type(model.module).__name__
        raise ConfigError(f"{where}: {kind} is no causal language model: it sees the tokens it is to predict")


def _one_line(fault: BaseException) -> str:
    """A library's words on a fault, without line breaks and not too many."""
    words = " ".join(str(fault).split())
    text = words if isinstance(fault, OSError | ValueError | SafetensorError) else f"{type(fault).__name__}: {words}"
    return text if len(text) <= 240 else f"{text[:240]}..."
