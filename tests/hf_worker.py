"""One worker with a Hugging Face Trainer, and the same training as a plain loop: the oracle of `AtollCallback`."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

import atoll
from atoll.integrations.transformers import AtollCallback
from fleet import Me
from pair import EPOCH, METHODS, RATE, SAVED, STEPS, digest

Batch = dict[str, Tensor]


def tiny(dropout: float = 0.0) -> Any:
    set_seed(0)
    drops: dict[str, Any] = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    sizes: dict[str, Any] = {"vocab_size": 32, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model: Any = GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))
    model.loss_type = "ForCausalLM"
    return model


def overflowing(model: nn.Module) -> nn.Module:
    """Make the loss of some batches infinite, as an overflow in fp16 does."""

    def act(_: nn.Module, __: Any, given: Any, output: Any) -> None:
        if given["input_ids"][0, 0] < 6:
            output.loss = output.loss * torch.inf

    model.register_forward_hook(act, with_kwargs=True)
    return model


def rows(seed: int, count: int) -> list[Batch]:
    tokens = torch.randint(32, (count, 12), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in tokens]


def collate(rows: Sequence[Batch]) -> Batch:
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Recorder(TrainerCallback):
    """Notes the worker's own parameters after every step, and what is evaluated."""

    def __init__(self, break_at: int = 0, kill_at: int = 0) -> None:
        self.break_at, self.kill_at = break_at, kill_at
        self.link: Any = None
        self.live: dict[int, str] = {}
        self.evaluated: dict[int, str] = {}
        self.found: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.found = sorted(folder.name for folder in Path(args.output_dir).glob("checkpoint-*"))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.live[state.global_step] = digest(model)
        if state.global_step in (self.kill_at, self.break_at):
            self.link.gather("broken", True)  # one of them could be a period ahead
        if state.global_step == self.kill_at:
            os._exit(9)
        if state.global_step == self.break_at:
            raise RuntimeError("the lights went out")

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.evaluated[state.global_step] = digest(model)


class Run:
    """A Trainer with the callback, and what was seen of it."""

    def __init__(
        self,
        me: Me,
        folder: Path,
        method: str = "diloco",
        *,
        callbacks: Sequence[TrainerCallback] = (),
        dropout: float = 0.0,
        held: Any = None,
        model: nn.Module | None = None,
        ranks: dict[str, int] | None = None,
        **arguments: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "output_dir": str(folder / f"worker-{me.worker}"),
            "per_device_train_batch_size": 2,
            "max_steps": STEPS,
            "learning_rate": RATE,
            "eval_strategy": "steps",
            "eval_steps": SAVED,
            "save_strategy": "steps",
            "save_steps": SAVED,
            "logging_steps": 5,
            "report_to": [],
            "use_cpu": True,
            "seed": 0,
            "data_seed": me.worker,
            "disable_tqdm": True,
        }
        self.batches: list[Batch] = []
        self.train_rows = rows(10 + me.worker, 2 * EPOCH)
        self.link = me.link(**(ranks or {}))
        self.callback: Any = AtollCallback(METHODS[method](), self.link)
        self.trainer: Any = Trainer(
            tiny(dropout) if model is None else model,
            TrainingArguments(**{**settings, **arguments}),
            data_collator=self.note,
            train_dataset=self.train_rows,
            eval_dataset=rows(99, 8) if held is None else held,
            callbacks=[self.callback, *callbacks],
        )
        for callback in callbacks:
            if isinstance(callback, Recorder):
                callback.link = self.link

    def note(self, picked: Sequence[Batch]) -> Batch:
        batch = collate(picked)
        if any(picked[0]["labels"] is row["labels"] for row in self.train_rows):  # it is not evaluated
            self.batches.append(batch)
        return batch

    @property
    def digest(self) -> str:
        return digest(self.trainer.model)


def plain_loop(
    me: Me, method: str, batches: Sequence[Batch], accumulate: int, scaler: Any = None, steps: int = STEPS
) -> tuple[str, dict[int, str]]:
    """Train on the same batches with a loop of one's own; the final model, and the anchors that were evaluated."""
    model, link = tiny() if scaler is None else overflowing(tiny()), me.link()
    decayed = [p for name, p in model.named_parameters() if p.ndim > 1 and "ln_" not in name]
    others = [p for name, p in model.named_parameters() if not (p.ndim > 1 and "ln_" not in name)]
    groups = [{"params": decayed, "weight_decay": 0.0}, {"params": others, "weight_decay": 0.0}]
    inner = torch.optim.AdamW(groups, lr=RATE, fused=scaler is None)
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: max(0.0, (steps - step) / steps))
    outer, anchors = atoll.OuterLoop(model, METHODS[method](), link), {}
    model.train()
    used = 0
    for step in range(1, steps + 1):
        step_batches = batches[used : used + min(accumulate, EPOCH - used % EPOCH)]
        used += len(step_batches)
        items = sum((batch["labels"][..., 1:] != -100).sum() for batch in step_batches)
        for batch in step_batches:
            loss = model(**batch, num_items_in_batch=items).loss
            (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            inner.step()
            schedule.step()
        else:
            scale = scaler.get_scale()
            scaler.step(inner)
            scaler.update()
            if scaler.get_scale() >= scale:  # it was not skipped
                schedule.step()
        inner.zero_grad()
        outer.step()
        if step == steps:
            outer.finish()
        if step % SAVED == 0 or step == steps:
            with outer.anchor():
                anchors[step] = digest(model)
    link.close()
    return digest(model), anchors
