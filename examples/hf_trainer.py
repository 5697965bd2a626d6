"""Trains one GPT-2 on two machines with a Hugging Face Trainer; the callback is all that makes it a worker.

    pip install -e '.[hf]'
    python examples/hf_trainer.py 0 10.0.0.1:29500 --keys runs/x/keys/worker-0    # on 10.0.0.1
    python examples/hf_trainer.py 1 10.0.0.1:29500 --keys runs/x/keys/worker-1    # on another machine

`atoll keys new` makes the keys; on one machine or a private cable, --keys none does. To continue a run that was killed,
start both again with --resume.
"""

import argparse
import os
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import atoll
from atoll.integrations.transformers import AtollCallback


def rows(length: int = 64) -> list[dict[str, torch.Tensor]]:
    """Cut the source of Python's standard library into rows of bytes."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:40]
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)[:400_000]))
    return [{"input_ids": row, "labels": row} for row in text[: len(text) // length * length].view(-1, length)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("worker", type=int)
    parser.add_argument("address")
    parser.add_argument("--keys", default="none")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="runs/hf")
    parser.add_argument("--resume", action="store_true")
    given = parser.parse_args()

    set_seed(0)  # every worker starts from the same parameters ...
    sizes = {"vocab_size": 256, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    data = rows()
    train, held = data[:-64][given.worker :: 2], data[-64:]  # ... and has its own part of the data

    link = atoll.connect(given.address, worker=given.worker, workers=2, keys=given.keys)
    arguments = TrainingArguments(
        output_dir=f"{given.out}/worker-{given.worker}",
        max_steps=given.steps,  # the same on every worker
        data_seed=given.worker,  # another one on every worker
        learning_rate=1e-3,
        per_device_train_batch_size=8,
        eval_strategy="steps",
        eval_steps=given.steps // 3,
        save_strategy="steps",
        save_steps=given.steps // 3,
        logging_steps=given.steps // 3,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=train,
        eval_dataset=held,
        callbacks=[AtollCallback(atoll.Streaming(period=given.steps // 10, fragments=atoll.Blocks(each=2)), link)],
    )
    trainer.train(resume_from_checkpoint=given.resume)
    trainer.save_model(f"{given.out}/worker-{given.worker}/final")  # the same on every worker
    print(f"worker {given.worker}: held-out loss {trainer.evaluate()['eval_loss']:.4f}")


if __name__ == "__main__":
    main()
