"""AtollCallback in TRL's SFTTrainer with LoRA: adapters alone are exchanged; best and resumed as in a Trainer."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="needs PEFT: pip install -e '.[hf]' peft trl")
pytest.importorskip("trl", reason="needs TRL: pip install -e '.[hf]' peft trl")

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM, TrainerCallback, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

import atoll
from atoll.integrations.transformers import AtollCallback
from fleet import Me
from pair import Pair

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("trl")]
SIZES: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}


def texts(seed: int, count: int) -> Any:
    words = torch.randint(40, (count, 12), generator=torch.Generator().manual_seed(seed)).tolist()
    return Dataset.from_dict({"text": [" ".join(f"w{word}" for word in row) for row in words]})


def tokenizer() -> Any:
    words = {word: number for number, word in enumerate(["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(40))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


class Break(TrainerCallback):
    """Ends training with an exception, once all have come as far."""

    def __init__(self, link: Any, at: int) -> None:
        self.link, self.at = link, at

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            self.link.gather("broken", True)
            raise RuntimeError("the lights went out")


def tuned(me: Me, folder: Path, *, at: int = 0, resume: bool = False) -> Any:
    set_seed(0)
    model, link = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS)), me.link()
    settings: dict[str, Any] = {"max_steps": 12, "eval_steps": 4, "save_steps": 4, "learning_rate": 1e-2}
    settings |= {"eval_strategy": "steps", "save_strategy": "steps", "report_to": [], "use_cpu": True, "bf16": False}
    settings |= {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "disable_tqdm": True}
    trainer: Any = SFTTrainer(
        model,
        SFTConfig(str(folder / f"worker-{me.worker}"), per_device_train_batch_size=2, data_seed=me.worker, **settings),
        train_dataset=texts(me.worker, 64),
        eval_dataset=texts(99, 8),
        processing_class=tokenizer(),
        peft_config=LoraConfig(r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]),
        callbacks=[callback := AtollCallback(atoll.DiLoCo(period=3, codec="e3m0"), link), Break(link, at)],
    )
    try:
        trainer.train(resume_from_checkpoint=resume)
    except RuntimeError as fault:
        return str(fault)
    scores = {log["step"]: log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log}
    adapters = {name: p.tolist() for name, p in trainer.model.named_parameters() if p.requires_grad}
    assert callback.outer is not None
    sent = callback.outer.counters.bytes_sent
    return adapters, scores, trainer.state.best_global_step, trainer.evaluate()["eval_loss"], sent


def broken(me: Me, folder: Path) -> Any:
    return tuned(me, folder, at=10)


def resumed(me: Me, folder: Path) -> Any:
    return tuned(me, folder, resume=True)


def test_lora_with_trl_over_two_workers(tmp_path: Path) -> None:
    with Pair(tmp_path / "pair", "trl peft transformers") as pair:
        one, other = pair.results(tuned, tmp_path / "whole")
        assert all("the lights went out" in told for told in pair.results(broken, tmp_path / "broken"))
        again = pair.results(resumed, tmp_path / "broken")
    adapters, scores, best, after, sent = one
    assert one == other and len(adapters) == 8 and all("lora" in name for name in adapters)
    assert after == scores[best] and len(set(scores.values())) == 3
    assert [told[:4] for told in again] == [one[:4]] * 2, "as if it had never stopped"
    values = sum(torch.tensor(value).numel() for value in adapters.values())
    assert sent < 4 * values, "four rounds of 4 bits: fewer bytes than one of fp32, and none of the frozen model"
