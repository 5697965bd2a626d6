"""The papers' decoder, from a toy for one core to four billion parameters.

Chinchilla's shape with QK-norm and z-loss, as all the papers after the first have it. They leave open how positions
and norms are made; here they are rotary (RoPE) and RMSNorm. There are no biases, no dropout and no buffers.
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


class Turns:
    """By how much RoPE turns each pair of values in a head: cosine and sine [context, head_width], signed for `turned`.

    At token t, pair i turns by t * base^(-2i / head_width) radians. An object and no tensors, or FSDP's mixed precision
    would round them on their way into a block; not made by blocks, or a compiled one would make them for every head.
    """

    def __init__(self, context: int, head_width: int, base: float, device: torch.device, dtype: torch.dtype) -> None:
        pairs = torch.arange(0, head_width, 2, device=device, dtype=dtype)
        angles = torch.arange(context, device=device, dtype=dtype)[:, None] * base ** (-pairs / head_width)
        cos, sin = angles.cos(), angles.sin()
        self.cos, self.sin = torch.cat((cos, cos), 1), torch.cat((-sin, sin), 1)

    def turned(self, x: Tensor) -> Tensor:
        """[..., time, heads, head_width] with its pairs (i, i + head_width / 2) turned, in the tables' dtype."""
        # Both halves read each other's place: a graph of one look-up, where parts put together would be two.
        cos, sin = self.cos[: x.shape[-3], None], self.sin[: x.shape[-3], None]
        return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


@cache  # for good: recordings know where they are
def turns(context: int, head_width: int, base: float, device: torch.device, dtype: torch.dtype) -> Turns:
    """The tables for all tokens of a model of this dtype, in fp32 or its fp64: bf16 cannot tell token 256 from 257."""
    with torch.inference_mode(False), torch.no_grad():
        return Turns(context, head_width, base, device, torch.promote_types(dtype, torch.float32))


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight: under autocast fp32, also for what a matmul rounded to bf16."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)  # torch's own eps depends on the dtype and is 0.008 in bf16

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        return super().forward(x.to(self.weight.dtype))


FASTEST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""Ways to compute attention on a GPU, fastest first: on Hopper cuDNN's takes three quarters of the next one's time."""


class Block(nn.Module):
    """Causal attention, then a feed-forward layer; each reads a norm of the stream and adds to the stream."""

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

    def forward(self, x: Tensor, turns: Turns) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self._attend(self.attention_norm(x), turns)
        # GELU in its tanh form, as in NanoDO, which the papers' code is built on.
        inner = functional.gelu(self.feedforward_in(self.feedforward_norm(x)), approximate="tanh")
        stream: Tensor = x + self.feedforward_out(inner)
        return stream

    def _attend(self, x: Tensor, turns: Turns) -> Tensor:
        query, key, value = self.qkv(x).unflatten(2, (3, -1, self.head_width)).unbind(2)  # [batch, time, heads, ...]
        query = turns.turned(self.query_norm(query)).to(value.dtype)
        key = turns.turned(self.key_norm(key)).to(value.dtype)
        with sdpa_kernel(FASTEST, set_priority=True) if x.is_cuda else nullcontext():
            mixed = functional.scaled_dot_product_attention(
                query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True
            )
        attended: Tensor = self.attention_out(mixed.transpose(1, 2).flatten(2))
        return attended


class Loss(NamedTuple):
    """What to descend and what to report: scalars, in nats per token."""

    total: Tensor
    """Cross-entropy plus z-loss."""
    cross_entropy: Tensor
    """Without z-loss and detached, so that runs can be compared whatever their z-loss."""


def check_generation(count: int, temperature: float) -> None:
    """Refuse what no text can be drawn with."""
    check_whole("count", count)
    why = "0 takes the likeliest token, more gives others a chance"
    check_number("temperature", temperature, least=0, why=why)


def draw(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """Logits [batch, vocabulary] -> tokens [batch, 1], drawn by softmax(logits / temperature); at 0 the likeliest."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    # In fp64 and at most 0, or a temperature near 0 would overflow.
    scores = (logits - logits.amax(-1, keepdim=True)).double() / temperature
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)


class Decoder(nn.Module):
    """A decoder-only language model, drawn from `generator` or torch's global one: the same seed, the same model.

    To compile it call `model.compile()`. On the meta device it has no values;
    `to_empty` and then `initialise` give it some.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self._compiled: Callable[..., Tensor] | None = None
        with torch.device("meta"):  # torch's layers draw values of their own, which nobody needs
            self.embedding = nn.Embedding(config.vocabulary, config.width)
            self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
            self.norm = Norm(config.width)
            # Tied is one parameter with one name: to_empty would part two, and safetensors would refuse them.
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
        """Compile all up to the head, by torch.compile with these arguments; the head has kernels of its own."""
        self._compiled = torch.compile(self._body, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_compiled": None}  # a copy must not call what was compiled for another

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time], int64 -> logits [batch, time, vocabulary]; time is at most config.context."""
        return functional.linear(self._hidden(tokens), self._matrix)

    def loss(self, tokens: Tensor) -> Loss:
        """Of predicting each token of [batch, time + 1], int64, from those before it."""
        hidden = self._hidden(tokens[:, :-1])
        return Loss(*head_loss(hidden, self._matrix, tokens[:, 1:], self.config.z_loss))

    @property
    def _matrix(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _hidden(self, tokens: Tensor) -> Tensor:
        """What the head is multiplied with, [batch, time, width]."""
        config, time, kind = self.config, tokens.shape[1], tokens.device.type
        if not 1 <= time <= config.context:
            raise ConfigError(
                f"a sequence must have between 1 and {config.context} tokens, the model's context, got "
                f"{time} (loss takes one more, the last to predict): cut it, or make context larger"
            )
        own = self.embedding.weight.dtype
        stream = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else own
        angles = turns(config.context, config.head_width, config.rope_base, tokens.device, own)
        return (self._compiled or self._body)(tokens, angles, stream)

    def _body(self, tokens: Tensor, angles: Turns, stream: torch.dtype) -> Tensor:
        # In bf16, if matmuls are: between blocks the stream is read and written more often than anything else.
        x = self.embedding(tokens).to(stream)
        for block in self.blocks:
            if self.config.checkpoint_activations:
                x = checkpoint(block, x, angles, use_reentrant=False, preserve_rng_state=False)  # nothing random inside
            else:
                x = block(x, angles)
        hidden: Tensor = self.norm(x)
        return hidden

    def generate(
        self, prompt: Tensor, count: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
    ) -> Tensor:
        """The prompt [batch, time] with `count` more tokens -> [batch, time + count].

        Each is drawn by softmax(logits / temperature) given the last `context` tokens; at 0 it is the likeliest one.
        """
        check_generation(count, temperature)
        tokens = prompt
        with torch.no_grad():
            for _ in range(count):
                logits: Tensor = self(tokens[:, -self.config.context :])[:, -1].float()
                tokens = torch.cat((tokens, draw(logits, temperature, generator)), 1)
        return tokens
