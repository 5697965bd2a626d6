"""The papers' decoder, from a toy for one core to four billion parameters.

Chinchilla's shape with QK-norm and z-loss, as all the papers after the first have it. They leave open how positions
and norms are made; here they are rotary (RoPE) and RMSNorm. There are no biases, no dropout and no buffers.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from atoll.checks import check_number, check_whole
from atoll.errors import ConfigError
from atoll.shapes import ModelConfig


def rope_tables(like: Tensor, base: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine [time, head_width / 2] for a tensor [..., time, head_width], in fp32 or the tensor's fp64.

    At token t, pair i of a head turns by t * base^(-2i / head_width) radians.
    """
    time, head_width = like.shape[-2:]
    dtype = torch.promote_types(like.dtype, torch.float32)  # bf16 cannot tell token 256 from 257
    pairs = torch.arange(0, head_width, 2, device=like.device, dtype=dtype)
    angles = torch.arange(time, device=like.device, dtype=dtype)[:, None] * base ** (-pairs / head_width)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + head_width / 2) of [..., time, head_width], in the dtype of the tables."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), -1)


class Norm(nn.RMSNorm):
    """RMSNorm in the dtype of its weight: under autocast fp32, also for what a matmul rounded to bf16."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=1e-6)  # torch's own eps depends on the dtype and is 0.008 in bf16

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        return super().forward(x.to(self.weight.dtype))


class Block(nn.Module):
    """Causal attention, then a feed-forward layer; each reads a norm of the stream and adds to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        attention_width = config.heads * config.head_width
        self.head_width, self.rope_base = config.head_width, config.rope_base
        self.attention_norm, self.feedforward_norm = Norm(config.width), Norm(config.width)
        self.qkv = nn.Linear(config.width, 3 * attention_width, bias=False)
        self.query_norm = Norm(config.head_width) if config.qk_norm else nn.Identity()
        self.key_norm = Norm(config.head_width) if config.qk_norm else nn.Identity()
        self.attention_out = nn.Linear(attention_width, config.width, bias=False)
        self.feedforward_in = nn.Linear(config.width, config.feedforward, bias=False)
        self.feedforward_out = nn.Linear(config.feedforward, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, time, width] -> the same."""
        x = x + self._attend(self.attention_norm(x))
        # GELU in its tanh form, as in NanoDO, which the papers' code is built on.
        inner = functional.gelu(self.feedforward_in(self.feedforward_norm(x)), approximate="tanh")
        stream: Tensor = x + self.feedforward_out(inner)
        return stream

    def _attend(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(2, (3, -1, self.head_width))  # [batch, time, 3, heads, head_width]
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # each [batch, heads, time, head_width]
        # Made anew by every block, which costs next to nothing: a buffer would be rounded by model.bfloat16() and
        # emptied by to_empty(), and an argument would be rounded by FSDP's mixed precision.
        cos, sin = rope_tables(value, self.rope_base)
        query = rotate(self.query_norm(query), cos, sin).to(value.dtype)
        key = rotate(self.key_norm(key), cos, sin).to(value.dtype)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
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

    To compile it call `model.compile()`, which `loss` and `generate` use too. On the meta device it has no values;
    `to_empty` and then `initialise` give it some.
    """

    def __init__(self, config: ModelConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
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

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [batch, time], int64 -> logits [batch, time, vocabulary]; time is at most config.context."""
        if not 1 <= tokens.shape[1] <= self.config.context:
            raise ConfigError(
                f"a sequence must have between 1 and {self.config.context} tokens, the model's context, got "
                f"{tokens.shape[1]} (loss takes one more, the last to predict): cut it, or make context larger"
            )
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.config.checkpoint_activations:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)  # nothing random inside
            else:
                x = block(x)
        matrix = self.embedding.weight if self.head is None else self.head.weight
        return functional.linear(self.norm(x), matrix)

    def loss(self, tokens: Tensor) -> Loss:
        """Of predicting each token of [batch, time + 1], int64, from those before it."""
        logits: Tensor = self(tokens[:, :-1])
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 is too coarse for the sums below
        log_total = logits.logsumexp(-1)
        cross_entropy = (log_total - logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)).mean()
        return Loss(cross_entropy + self.config.z_loss * log_total.square().mean(), cross_entropy.detach())

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
