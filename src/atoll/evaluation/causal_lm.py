"""Lets lm-evaluation-harness ask atoll's models for log-likelihoods.

Requests are encoded, sorted, batched, padded and summed as by `HFLM`, the harness's own class for transformers: for the
same model and batch size both give the same bits.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NoReturn, Protocol

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import Collator
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from atoll.errors import ConfigError
from atoll.train.data.corpus import need
from atoll.train.data.tokenizer import Bytes, Tokenizer
from atoll.train.model.decoder import CausalModel
from atoll.train.model.hub import HubModel

DEFAULT_CONTEXT: Final = 2048
"""Tokens of context for a model that sets no limit, as in the harness."""

Request = tuple[Any, list[int], list[int]]
"""A request's texts, the ids of its context and the ids of its continuation."""


class Encoder(Protocol):
    """Turns a text into ids."""

    prefix: int
    """The id that stands for an empty context."""

    def __call__(self, text: str, *, special: bool) -> list[int]:
        """Returns the ids of a text; `special` adds what the tokenizer puts around texts, such as a first token."""


class PlainEncoder:
    """Encodes text as atoll's trainer does; an empty context is the separator of documents."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.prefix = tokenizer.separator
        self._tokenizer = tokenizer

    def __call__(self, text: str, *, special: bool) -> list[int]:
        """Returns the ids of a text; nothing is ever added."""
        ids: list[int] = self._tokenizer.encode(text).tolist()
        return ids


class HubEncoder:
    """Encodes text as the harness does for transformers' models: with the special tokens of their tokenizers."""

    def __init__(self, folder: Path) -> None:
        transformers = need("transformers", "a Hugging Face model", extra="hf")
        logging.getLogger("transformers.tokenization_utils_base").setLevel(logging.ERROR)  # long texts are cut here
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
        first, last = self._tokenizer.bos_token_id, self._tokenizer.eos_token_id
        if first is None and last is None:
            raise ConfigError(
                f"the tokenizer in {folder} must have a bos_token or an eos_token, to stand for an empty context: "
                "it has neither, so add one to tokenizer_config.json"
            )
        self.prefix: int = last if first is None else first

    def __call__(self, text: str, *, special: bool) -> list[int]:
        """Returns the ids of a text."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids


def encoder_of(folder: Path, model: CausalModel, tokenizer: Tokenizer) -> Encoder:
    """Returns the encoder of the export in a folder."""
    if isinstance(model, HubModel) and not isinstance(tokenizer, Bytes):
        return HubEncoder(folder)
    return PlainEncoder(tokenizer)


class CausalLM(TemplateLM):  # type: ignore[misc]
    """Answers requests of the harness with a model, which it moves to the device and puts into eval() mode.

    Args:
        model: The model.
        encoder: Its encoder.
        device: The device to run on.
        batch: Requests of one forward pass.
    """

    def __init__(self, model: CausalModel, encoder: Encoder, device: torch.device, batch: int) -> None:
        super().__init__()
        self.context = model.context or DEFAULT_CONTEXT
        self.requests = self.cut = 0
        """Requests answered, and those whose context was cut on the left."""
        self._model = model.to(device).eval()
        self._encoder = encoder
        self._device = device
        self._batch = batch

    @property
    def eot_token_id(self) -> int:
        """The id that stands for an empty context."""
        return self._encoder.prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Returns the ids of a text, with special tokens unless told otherwise."""
        return self._encoder(string, special=add_special_tokens is not False)

    def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Returns the log-likelihood of each continuation, in nats, and whether each token of it is the likeliest."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> list[float]:
        """Refuses: atoll evaluates continuations, not whole texts."""
        self._refuse(requests)

    def generate_until(self, requests: Any, disable_tqdm: bool = True) -> list[str]:
        """Refuses: atoll evaluates tasks by likelihood."""
        self._refuse(requests)

    def _refuse(self, requests: Any) -> NoReturn:
        task = requests[0].task_name if requests else "a task"
        problem = f"{task} must be scored by the log-likelihood of continuations"
        raise ConfigError(f"{problem}: atoll eval neither generates nor scores whole texts", setting="tasks")

    def _loglikelihood_tokens(self, requests: Sequence[Request], **_: Any) -> list[tuple[float, bool]]:
        # The longest requests come first, so a batch that does not fit into memory fails at once. Requests that differ
        # in their last token alone share a forward pass.
        ordered = Collator(
            requests,
            sort_fn=lambda request: (-len(request[1]) - len(request[2]), tuple(request[1] + request[2])),
            group_by="contexts",
            group_fn=lambda request: request[1] + request[2][:-1],
        )
        answers: list[tuple[float, bool]] = []
        with tqdm(total=len(requests), desc="requests", disable=None) as progress:
            for chunk in ordered.get_batched(n=self._batch):
                scored: list[tuple[torch.Tensor, Sequence[int]]] = []
                for request, logits in zip(chunk, self._logits(chunk), strict=True):
                    likelihoods = functional.log_softmax(logits, dim=-1)[None]
                    shared = ordered.get_cache(
                        req_str=request[0], cxt_toks=request[1], cont_toks=request[2], logits=likelihoods
                    )
                    scored += [(values, continuation) for _, continuation, values in shared]
                answers += self._answers(scored)
                progress.update(len(answers) - progress.n)
        self.requests += len(requests)
        self.cut += sum(len(context) + len(continuation) > self.context + 1 for _, context, continuation in requests)
        found: list[tuple[float, bool]] = ordered.get_original(answers)
        return found

    @torch.no_grad()
    def _logits(self, chunk: Sequence[Request]) -> list[torch.Tensor]:
        """Returns the logits [continuation, vocabulary] of each request's continuation."""
        rows = [self._row(request) for request in chunk]
        # The padding is on the right, where causal attention does not see it.
        tokens = pad_sequence(rows, batch_first=True).to(self._device)
        logits = self._model(tokens)
        return [
            each[len(row) - len(request[2]) : len(row)] for each, row, request in zip(logits, rows, chunk, strict=True)
        ]

    def _row(self, request: Request) -> torch.Tensor:
        """Returns the input ids of a request, without the last one; a long context loses its beginning."""
        texts, context, continuation = request
        if not 0 < len(continuation) <= self.context:
            what = f"{texts[1][:60]!r}"
            raise ConfigError(
                f"a continuation must have 1 to {self.context} tokens, which is the model's context; {what} has "
                f"{len(continuation)}: choose another task, or a model with a longer context",
                setting="tasks",
            )
        return torch.tensor((context + continuation)[-self.context - 1 : -1], dtype=torch.int64)

    def _answers(self, scored: Sequence[tuple[torch.Tensor, Sequence[int]]]) -> list[tuple[float, bool]]:
        """Returns each continuation's log-likelihood, and whether greedy decoding would produce it.

        The log-likelihoods [1, time, vocabulary] end with those of the continuation's tokens. All requests of a batch
        wait for the device once.
        """
        rows = pad_sequence([torch.tensor(ids, dtype=torch.int64) for _, ids in scored], batch_first=True)
        found = []
        for (likelihoods, continuation), row in zip(scored, rows.to(self._device), strict=True):
            ids = row[None, : len(continuation)]
            last = likelihoods[:, -ids.shape[1] :]
            total = last.gather(2, ids[..., None])[..., 0].sum()
            found.append(torch.stack([total, (last.argmax(-1) == ids).all().to(total.dtype)]))
        return [(total, bool(greedy)) for total, greedy in torch.stack(found).tolist()]
