"""Fine-tunes one model with LoRA (PEFT, TRL) on two machines with home lines: 20 Mbit/s down, 5 Mbit/s up.

    pip install -e '.[hf]' peft trl
    python examples/lora_home_line.py 0 10.0.0.1:29500 --keys runs/x/keys/worker-0 --model Qwen/Qwen3-0.6B
    python examples/lora_home_line.py 1 10.0.0.1:29500 --keys runs/x/keys/worker-1 --model Qwen/Qwen3-0.6B

What one sends the other receives, so 5 Mbit/s decide. Try it without --model and with --emulate; --resume continues.
"""

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, set_seed
from trl import SFTConfig, SFTTrainer

import atoll
from atoll.integrations.transformers import AtollCallback
from atoll.plan.line import GOODPUT

UP = 5e6 * GOODPUT  # bits of payload per second
SMALL = LlamaConfig(vocab_size=259, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4)


def table(adapters: int, model: int, period: int, steps: int, compute_s: float) -> None:
    """Print what a run costs on the line: adapters or the whole model, by Streaming or by data-parallel training."""
    print(f"\n{adapters:,} adapter parameters for a model of {model:,}; {steps:,} steps of {compute_s / steps:.3g} s")
    print("| trained | sent | bytes a round | seconds a round | hours of the run |\n|---|---|---|---|---|")
    for trained, values in (("adapters", adapters), ("the model", model)):
        for codec, every, delay in (("e3m0", period, period // 2), ("bf16", 1, 0)):
            size = atoll.Codec(codec).payload_bytes(values)
            round_s, sent = 8 * size / UP, f"{codec}, every {every} steps" if delay else f"{codec}, data-parallel"
            run_s = compute_s + steps // every * max(0, round_s - delay * compute_s / steps)  # hidden while computing
            print(f"| {trained} | {sent} | {size:,} | {round_s:,.1f} | {run_s / 3600:,.3g} |")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", type=int)
    parser.add_argument("address")
    parser.add_argument("--keys", default="none")
    parser.add_argument("--model", help="of the hub, or a folder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/lora")
    parser.add_argument("--emulate", action="store_true")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()
    set_seed(0)  # the same adapters on every worker ...
    tokenizer, model = ByT5Tokenizer(extra_ids=0), LlamaForCausalLM(SMALL)
    if given.model:
        tokenizer, model = (auto.from_pretrained(given.model) for auto in (AutoTokenizer, AutoModelForCausalLM))
    rows = [line for line in Path(argparse.__file__).read_text(encoding="utf-8").splitlines() if line]  # or your own
    held, *train = (Dataset.from_dict({"text": part}) for part in (rows[-32:], rows[:-32:2], rows[1:-32:2]))

    link = atoll.connect(given.address, worker=given.worker, workers=2, keys=given.keys)
    link = atoll.shaped([link], atoll.Shape(bits_per_s=5e6))[0] if given.emulate else link
    period, gpu, folder = given.steps // 10, torch.cuda.is_available(), f"{given.out}/worker-{given.worker}"
    sync = atoll.Streaming(period=period, delay=period // 2, fragments=atoll.Whole())  # half a period on its way
    trainer = SFTTrainer(
        model,
        SFTConfig(folder, max_steps=given.steps, data_seed=given.worker, learning_rate=1e-3, use_cpu=not gpu, bf16=gpu),
        train_dataset=train[given.worker],  # ... and its own data
        eval_dataset=held,
        processing_class=tokenizer,
        peft_config=LoraConfig(r=32, target_modules="all-linear"),
        callbacks=[callback := AtollCallback(sync, link)],
    )
    took_s = trainer.train(resume_from_checkpoint=given.resume).metrics["train_runtime"]
    done, adapters = callback.outer.counters, sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    print(f"{done.rounds_applied} rounds, {done.wire_sent:,} bytes sent, waited {done.wait_s:.1f} of {took_s:.1f} s")
    print(f"worker {given.worker}: held-out loss {trainer.evaluate()['eval_loss']:.4f}")
    table(adapters, trainer.model.num_parameters() - adapters, period, given.steps, took_s - done.wait_s)
    table(40_000_000, 8_000_000_000, 100, 2_000, 10_000)  # for a larger one


if __name__ == "__main__":
    main()
