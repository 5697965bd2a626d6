"""Samples a text from the outer parameters at an evaluation."""

import time
from typing import Final

import torch

from atoll.train.data.token_files import TokenData
from atoll.train.step.backward import autocast
from atoll.train.trainer import Trainer

PROMPT: Final = 32
"""Tokens of held-out text that a sample begins with; fewer if the model's context is below 64."""


def write_sample(trainer: Trainer, data: TokenData) -> None:
    """Write how the outer parameters continue the beginning of the held-out text, as an event.

    Every evaluation draws with the same random numbers, so that texts differ by the model alone; torch's own are not
    used. Where ranks hold a shard each there is no sample: every token would gather the whole model.
    """
    config, tokens = trainer.config, trainer.config.log.sample
    if not tokens or not trainer.ranks.is_leader or not trainer.ranks.hold_whole_model:
        return
    trainer.reporter.began_s = time.perf_counter()
    with trainer.outer_model() as model, autocast(config):
        start = data.held_out[: min(PROMPT, max(1, (model.context or PROMPT) // 2))].tolist()
        prompt = torch.tensor([start], dtype=torch.int64, device=config.device)
        generator = torch.Generator().manual_seed(config.seed)
        drawn = model.generate(prompt, tokens, generator=generator)[0].tolist()
    prompt_text, whole = data.tokenizer.decode(start), data.tokenizer.decode(drawn)
    # Together, for a character may have begun in the prompt.
    text = (
        whole.removeprefix(prompt_text) if whole.startswith(prompt_text) else data.tokenizer.decode(drawn[len(start) :])
    )
    trainer.reporter.write_sample(trainer.steps, prompt_text, text)
