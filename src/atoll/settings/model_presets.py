"""Describes shapes of decoders: presets by name, and how many parameters they have.

There are no tensors here, so that a run file can be checked and a run planned without making a model.
"""

from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from atoll._util.checks import check_number, check_whole
from atoll.errors import ConfigError

LARGEST = 10**7
"""Largest size of a decoder: layers, width, vocabulary ..."""
LARGEST_TABLE = 2 * 10**9
"""Largest table of RoPE, in values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The shape of a decoder, and what its loss adds to cross-entropy."""

    layers: int
    width: int
    """Values per token between blocks (d_model)."""
    heads: int
    head_width: int
    """Values per head; heads * head_width may differ from width."""
    feedforward: int
    """Values per token inside the feed-forward layer (the Streaming paper's "hidden dim")."""
    vocabulary: int
    context: int
    """Longest sequence, in tokens; no parameter depends on it."""
    tied: bool = True
    """One matrix for token embedding and head."""
    qk_norm: bool = True
    """RMSNorm over each head's query and key, which keeps attention scores from growing without bound."""
    z_loss: float = 1e-4
    """Weight of the mean squared logsumexp of the logits, which keeps them from drifting; 0 for none."""
    checkpoint_activations: bool = False
    """Recompute each block in the backward pass instead of remembering it: less memory, about a third more time."""
    rope_base: float = 10000.0
    """The slowest pair of values in a head turns by about 1 / rope_base radians a token."""

    def __post_init__(self) -> None:
        for setting in ("layers", "width", "heads", "head_width", "feedforward", "vocabulary", "context"):
            check_whole(setting, getattr(self, setting), most=LARGEST)
        if (turns := self.context * self.head_width) > LARGEST_TABLE:
            raise ConfigError(
                f"context * head_width must be at most {LARGEST_TABLE}, the values of RoPE's tables, got {turns}: "
                f"lower context ({self.context}) or head_width ({self.head_width})"
            )
        if self.head_width % 2:
            raise ConfigError(f"head_width must be even, got {self.head_width}: RoPE turns its values in pairs")
        check_number("z_loss", self.z_loss, least=0, why="below 0 it would reward drifting logits")
        faster = "below 1 the later pairs of a head would turn faster, not slower"
        check_number("rope_base", self.rope_base, least=1, why=faster)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model, a tied matrix once; the same as counting those of a Decoder."""
        norms = self.layers * (2 * self.width + 2 * self.head_width * self.qk_norm) + self.width
        return self.matmul_parameters + norms + self.vocabulary * self.width * (not self.tied)

    @property
    def matmul_parameters(self) -> int:
        """Parameters each token is multiplied with, N in the usual 6N FLOPs a trained token: blocks and head.

        Looking up an embedding multiplies nothing, and attention scores have no parameters: neither is counted.
        """
        block = 4 * self.width * self.heads * self.head_width + 2 * self.width * self.feedforward
        return self.layers * block + self.vocabulary * self.width


def _shape(layers: int, width: int, heads: int, **others: Any) -> ModelConfig:
    settings: dict[str, Any] = {"head_width": 64, "vocabulary": 32_000, "context": 1024} | others
    return ModelConfig(layers=layers, width=width, heads=heads, feedforward=4 * width, **settings)


PRESETS: dict[str, ModelConfig] = {
    # For CPUs, over bytes; the numbers of layers suit fragments of three blocks.
    "tiny": _shape(6, 48, 3, head_width=16, vocabulary=256, context=128),
    "small": _shape(6, 160, 5, head_width=32, vocabulary=256, context=256),
    "7M": _shape(9, 256, 4, vocabulary=256, context=256),
    # The Streaming DiLoCo and Eager Updates papers.
    "35M": _shape(6, 512, 8),
    "100M": _shape(9, 768, 12),
    "200M": _shape(12, 1024, 16),
    "300M": _shape(15, 1280, 20),
    "500M": _shape(18, 1536, 24),
    "1B": _shape(24, 2048, 32),
    "4B": _shape(36, 3072, 48),
    # The DiLoCo paper, which mentions neither QK-norm nor z-loss; both stay on, so that sizes can be compared.
    "60M": _shape(3, 896, 16),
    "150M": _shape(12, 896, 16),
    "400M": _shape(12, 1536, 12, head_width=128),
}
"""Shapes by name; the papers' names are round numbers, `parameters` is exact."""


def preset(name: str, **changes: Any) -> ModelConfig:
    """Returns the preset of this name with some settings changed: `preset("tiny", context=64)`."""
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else "for another shape, make a ModelConfig"
        raise ConfigError(f"preset must be one of {', '.join(PRESETS)}, got {name!r}: {hint}")
    return replace(PRESETS[name], **changes)
