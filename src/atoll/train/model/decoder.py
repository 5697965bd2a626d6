"""The papers' decoder-only language model, from a toy for one core to four billion parameters.

Chinchilla's shape with QK-norm and z-loss, as in all the papers after the first. They leave positions and norms open;
this one uses rotary positions (RoPE) and RMSNorm. It has no biases, no dropout and no buffers.
"""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from atoll._util.checks import check_number, check_whole
from atoll.errors import ConfigError
from atoll.settings.model_presets import ModelConfig
from atoll.train.model.head import head_loss


class RotaryTables:
    """Holds RoPE's cosine and sine tables [context, head_width], signed for `rotate`.

    At token t, pair i rotates by t * base^(-2i / head_width) radians. An object, not tensors: FSDP's mixed precision
    would round tensors passed to a block. Not made in blocks: a compiled block would make them for every head.
    """

    def __init__(self, context: int, head_width: int, base: float, device: torch.device, dtype: torch.dtype) -> None:
        pairs = torch.arange(0, head_width, 2, device=device, dtype=dtype)
        angles = torch.arange(context, device=device, dtype=dtype)[:, None] * base ** (-pairs / head_width)
        cos, sin = angles.cos(), angles.sin()
        self.cos, self.sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotate the pairs (i, i + head_width / 2) of [..., time, heads, head_width], in the tables' dtype."""
        # roll instead of cat: one look-up in the compiled graph instead of two
        cos, sin = self.cos[: x.shape[-3], None], self.sin[: x.shape[-3], None]
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


@cache  # kept for good: CUDA graphs know their addresses
def rotary_tables(context: int, head_width: int, base: float, device: torch.device, dtype: torch.dtype) -> RotaryTables:
    """Return the tables of a model of this dtype, in at least fp32: bf16 cannot tell token 256 from 257."""
    with torch.inference_mode(False), torch.no_grad():
        return RotaryTables(context, head_width, base, device, torch.promote_types(dtype, torch.float32))


NORM_EPS = 1e-6
"""Added to the mean square under the root of a norm. (Torch's own depends on the dtype and is 0.008 in bf16.)"""


class Norm(nn.RMSNorm):
    """Computes RMSNorm in the dtype of its weight: fp32 under autocast, also for bf16 inputs."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [..., width]; return the same shape."""
        return super().forward(x.to(self.weight.dtype))


FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Attention backends on a GPU, fastest first: on Hopper cuDNN takes three quarters of the next one's time."""


class Block(nn.Module):
    """Applies causal attention, then a feed-forward layer, each to a norm of the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention_width = config.heads * config.head_width
        self.head_width = config.head_width
        self.attention_norm, self.feedforward_norm = Norm(config.width), Norm(config.width)
        self.qkv = nn.Linear(config.width, 3 * attention_width, bias=False)
        self.query_norm = Norm(config.head_width) if config.qk_norm else nn.Identity()
        self.key_norm = Norm(config.head_width) if config.qk_norm else nn.Identity()
        self.attention_out = nn.Linear(attention_width, config.width, bias=False)
        self.feedforward_in = nn.Linear(config.width, config.feedforward, bias=False)
        self.feedforward_out = nn.Linear(config.feedforward, config.width, bias=False)

    def forward(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        """Transform the residual stream [batch, time, width]; return the same shape."""
        x = x + self._attend(self.attention_norm(x), rotary)
        # GELU in its tanh form, as in NanoDO, which the papers' code is built on.
        inner = functional.gelu(self.feedforward_in(self.feedforward_norm(x)), approximate="tanh")
        stream: Tensor = x + self.feedforward_out(inner)
        return stream

    def _attend(self, x: Tensor, rotary: RotaryTables) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, -1, self.head_width)).unbind(2)  # [batch, time, heads, ...]
        query = rotary.rotate(self.query_norm(query)).to(value.dtype)
        key = rotary.rotate(self.key_norm(key)).to(value.dtype)
        with sdpa_kernel(FASTEST, set_priority=True) if x.is_cuda else nullcontext():
            mixed = functional.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
            )
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return attended


class Loss(NamedTuple):
    """The loss to train on and the loss to report: scalars, in nats per token."""

    total: Tensor
    """Cross-entropy plus z-loss."""
    cross_entropy: Tensor
    """Detached and without z-loss, so runs with different z-losses compare."""


class CausalModel(nn.Module):
    """Predicts the next token of a text: the base of atoll's `Decoder` and of `HubModel`."""

    vocabulary: int
    context: int | None
    """Longest sequence, in tokens; None if the model sets no limit."""

    def check_length(self, tokens: Tensor) -> None:
        """Refuse tokens [batch, time] that are none, or more than `context`."""
        time = tokens.shape[1]
        if time < 1 or (self.context is not None and time > self.context):
            most = "" if self.context is None else f" and at most {self.context}, the model's context"
            raise ConfigError(
                f"a sequence must have at least 1 token{most}, got {time} (loss takes one more, the last to predict): "
                "cut it"
            )

    def next_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, Any]:
        """Return the next token's logits [batch, vocabulary], fp32, and a cache for the next call, or None.

        They depend on the last `context` of the tokens [batch, time].
        """
        raise NotImplementedError

    def generate(
        self, prompt: Tensor, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return the prompt [batch, time] followed by `count` tokens sampled without dropout [batch, time + count].

        Each is drawn from softmax(logits / temperature) given the last `context` tokens; 0 takes the likeliest.
        """
        check_whole("count", count)
        why = "0 takes the likeliest token, more gives others a chance"
        check_number("temperature", temperature, least=0, why=why)
        tokens, cache, training = prompt, None, self.training
        self.eval()
        try:
            with torch.no_grad():
                for _ in range(count):
                    logits, cache = self.next_logits(tokens, cache)
                    tokens = torch.cat((tokens, _draw(logits, temperature, generator)), 1)
        finally:
            self.train(training)
        return tokens


def _draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Sample tokens [batch, 1] from logits [batch, vocabulary]; temperature 0 takes the likeliest."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # In fp64 and at most 0, or a temperature near 0 would overflow.
    scores = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    # Without NaN, where multinomial would end the process on a GPU: a token whose logit is infinite is the likeliest.
    chances = scores.nan_to_num(nan=0.0).softmax(-1)
    drawn_on = chances.device if generator is None else generator.device
    return torch.multinomial(chances.to(drawn_on), 1, generator=generator).to(logits.device)


class Decoder(CausalModel):
    """A decoder-only language model, initialised from `generator` or torch's global one.

    Call `model.compile()` to compile it. A model on the meta device gets values by `to_empty` and `initialise`.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.vocabulary, self.context = config.vocabulary, config.context
        self._compiled: Callable[..., Tensor] | None = None
        with torch.device("meta"):  # skips the initialisation of torch's layers
            self.embedding = nn.Embedding(config.vocabulary, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = Norm(config.width)
            # Tied weights are one parameter: to_empty would separate two, and safetensors would refuse them.
            self.head = None if config.tied else nn.Linear(config.width, config.vocabulary, bias=False)
        self.to_empty(device=torch.get_default_device())
        self.initialise(generator)

    def initialise(self, generator: torch.Generator | None = None) -> None:
        """Draw every matrix from N(0, 1 / inputs), counting an embedding's width as its inputs; norms become 1.

        The two matrices of a block that write to the stream are divided by sqrt(2 * layers), so that the stream's
        size does not depend on depth. The generator must be on the parameters' device.
        """
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                writers = 2 * self.config.layers if name.endswith("_out.weight") else 1
                nn.init.normal_(parameter, std=(parameter.shape[1] * writers) ** -0.5, generator=generator)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile all layers up to the head with torch.compile; the head has its own kernels."""
        self._compiled = torch.compile(self._body, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_compiled": None}  # a copy must not call what was compiled for the original

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits [batch, time, vocabulary] of tokens [batch, time], int64; time is at most config.context."""
        return functional.linear(self._hidden(tokens, self._compiled or self._body), self._matrix)

    def loss(self, tokens: Tensor) -> Loss:
        """Return the loss of predicting each token of [batch, time + 1], int64, from those before it."""
        hidden = self._hidden(tokens[:, :-1], self._compiled or self._body)
        return Loss(*head_loss(hidden, self._matrix, tokens[:, 1:], self.config.z_loss))

    @property
    def _matrix(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _hidden(self, tokens: Tensor, body: Callable[..., Tensor]) -> Tensor:
        """Return the input of the head [batch, time, width], by a body that may be compiled."""
        self.check_length(tokens)
        config, kind = self.config, tokens.device.type
        own = self.embedding.weight.dtype
        stream = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
        rotary = rotary_tables(config.context, config.head_width, config.rope_base, tokens.device, own)
        return body(tokens, rotary, stream)

    def _body(self, tokens: Tensor, rotary: RotaryTables, stream: torch.dtype) -> Tensor:
        # In bf16 if matmuls are: no tensor is read and written more often than the stream.
        x = self.embedding(tokens).to(stream)
        for block in self.blocks:
            if self.config.checkpoint_activations:
                x = checkpoint(block, x, rotary, use_reentrant=False, preserve_rng_state=False)  # nothing random inside
            else:
                x = block(x, rotary)
        hidden: Tensor = self.norm(x)
        return hidden

    def next_logits(self, tokens: Tensor, cache: Any) -> tuple[Tensor, None]:
        """Return the next token's logits [batch, vocabulary], without a cache."""
        hidden = self._hidden(tokens[:, -self.config.context :], self._body)  # compiling for every length takes longer
        return functional.linear(hidden[:, -1], self._matrix).float(), None
