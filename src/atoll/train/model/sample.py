"""Samples text from a trained model."""

from itertools import groupby
from pathlib import Path

import torch

from atoll._util.checks import check_whole
from atoll.errors import ConfigError, DataError
from atoll.train.data.tokenizer import Tokenizer
from atoll.train.model.export import find_export, load_export


def sample(
    folder: Path,
    prompt: str,
    *,
    tokens: int = 200,
    temperature: float = 0.8,
    seed: int = 0,
    count: int = 1,
    best: bool = False,
) -> list[str]:
    """Return texts that continue a prompt, sampled on the CPU; the same seed gives the same texts.

    Args:
        folder: A finished run, or an exported model.
        prompt: The beginning; empty for the beginning of a document.
        tokens: Tokens to add. Where a document ends, the text has an empty line.
        temperature: Sampling temperature; 0 takes the likeliest token.
        seed: Seed of the samples.
        count: Number of texts.
        best: Use the run's best parameters so far instead of its last.

    Raises:
        DataError: if there is no model yet, or it holds numbers that are not finite.
    """
    check_whole("tokens", tokens)
    check_whole("count", count)
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise ConfigError(f"seed must be a whole number from 0 to 2**63 - 1, got {seed!r}: it names a random sequence")
    model, tokenizer = load_export(find_export(Path(folder), best=best, command="sample"))
    if not all(parameter.isfinite().all() for parameter in model.parameters()):
        raise DataError(f"the model in {folder} holds NaNs or infinities: its training diverged, sample another one")
    readable = prompt.encode(errors="replace").decode()  # a terminal may pass on invalid Unicode
    ids = tokenizer.encode(readable).tolist() or [tokenizer.separator]
    start = torch.tensor(ids, dtype=torch.int64).expand(count, -1)
    generator = torch.Generator().manual_seed(seed)
    drawn = model.eval().generate(start, tokens, temperature=temperature, generator=generator)
    return [_text(tokenizer, row) for row in drawn.tolist()]


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Return the text of ids with an empty line between documents."""
    parts = groupby(ids, lambda token: token == tokenizer.separator)
    return "\n\n".join(tokenizer.decode(list(document)) for is_separator, document in parts if not is_separator)
