"""The examples in Python run, each in seconds and in under 80 lines."""

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import atoll
from fleet import free_port

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS: dict[str, tuple[str, ...]] = {
    "fsdp2.py": (),
    "hf_trainer.py": ("transformers", "accelerate"),
    "lightning_trainer.py": ("lightning",),
    "lora_home_line.py": ("datasets", "peft", "trl"),
    "plain_loop.py": (),
    "torchtitan_trainer.py": ("torchtitan",),
}
"""Modules that an example imports besides atoll's own; without them its test is skipped."""


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_an_example_is_short(example: Path) -> None:
    assert example.name in NEEDS, "say what it needs, and it is run"
    assert len(example.read_text(encoding="utf-8").splitlines()) < 80


LOOP = """
import os, sys
import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = torch.nn.Embedding(16, 8)
        self.h = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def forward(self, tokens, targets):
        x = self.wte(tokens)
        for block in self.h:
            x = x + block(x).relu()
        logits = x @ self.wte.weight.T
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

out_dir, eval_interval, max_iters, init_from, ddp = '.', 110, 220, 'scratch', False
min_lr = 6e-5 # minimum learning rate, should be ~= learning_rate/10 per Chinchilla
# DDP settings
backend = 'nccl'
for given in sys.argv[1:]:
    name, value = given.removeprefix('--').split('=')
    globals()[name] = type(globals()[name])(value)
config, model_args, master_process, iter_num = {'out_dir': out_dir}, {}, True, 0
os.makedirs(out_dir, exist_ok=True)

def get_batch(split):
    tokens = torch.randint(16, (4, 1)) + torch.arange(9)
    return tokens[:, :-1] % 16, tokens[:, 1:] % 16

torch.manual_seed(1337)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if init_from == 'resume':
    checkpoint = torch.load(os.path.join(out_dir, 'ckpt.pt'))
    model.load_state_dict(checkpoint['model'])
    iter_num = checkpoint['iter_num']
if init_from == 'resume':
    optimizer.load_state_dict(checkpoint['optimizer'])
checkpoint = None # free up memory

@torch.no_grad()
def estimate_loss():
    tokens = torch.arange(17)[None] % 16
    return dict.fromkeys(['train', 'val'], model(tokens[:, :-1], tokens[:, 1:])[1].item())

raw_model = model
while True:
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.4f}, val loss {losses['val']:.4f}")
        if iter_num > 0:
            if True:
                checkpoint = {
                    'model': raw_model.state_dict(),
                    'optimizer': optimizer.state_dict(),
                    'model_args': model_args,
                    'iter_num': iter_num,
                }
                torch.save(checkpoint, os.path.join(out_dir, 'ckpt.pt'))
    model(*get_batch('train'))[1].backward()
    optimizer.step()
    # flush the gradients as soon as we can, no need for this memory anymore
    optimizer.zero_grad(set_to_none=True)

    iter_num += 1
    # termination conditions
    if iter_num > max_iters:
        break

if ddp:
    destroy_process_group()
"""
"""A loop of nanoGPT's shape, around the few lines that the diff quotes."""


def outputs(folder: Path, *commands: list[str]) -> list[str]:
    """Run Python scripts side by side until all have ended well, and return what each has printed."""
    processes = [
        subprocess.Popen(
            [sys.executable, *command],
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for command in commands
    ]
    try:
        told = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert not any(process.returncode for process in processes), "\n".join(told)
    return told


def one_loss(told: list[str]) -> float:
    """Return the loss that both workers print; ln 256 is 5.55."""
    (one,), (other,) = (re.findall(r"held-out loss ([0-9.]+)", text) for text in told)
    assert one == other and float(one) < 5.4
    return float(one)


def trained(example: str, folder: Path, *more: str) -> tuple[float, str]:
    """Run an example in two processes, and return the loss that both print, and all that worker 0 prints."""
    for module in NEEDS[example]:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")
    address = f"127.0.0.1:{free_port()}"
    rest = ["--steps", "30", "--out", str(folder), *more]
    told = outputs(folder, *([str(EXAMPLES / example), str(worker), address, *rest] for worker in range(2)))
    return one_loss(told), told[0]


@pytest.mark.processes
@pytest.mark.parametrize("example", ["hf_trainer.py", "lightning_trainer.py"])
def test_an_example_trains_one_model_in_two_processes(example: str, tmp_path: Path) -> None:
    trained(example, tmp_path)


@pytest.mark.processes
def test_the_plain_loop_continues_from_what_both_have(tmp_path: Path) -> None:
    whole, _ = trained("plain_loop.py", tmp_path)
    folders = [tmp_path / f"worker-{worker}" / "checkpoints" for worker in range(2)]
    assert [atoll.checkpoint.steps(folder) for folder in folders] == [(18, 24)] * 2
    shutil.rmtree(folders[1] / "step-000000024")  # as if worker 1 had been killed earlier
    assert trained("plain_loop.py", tmp_path)[0] == whole


@pytest.mark.processes
def test_workers_of_two_ranks_shard_their_models(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command = [str(EXAMPLES / "fsdp2.py"), "--steps", "30"]
    told = outputs(tmp_path, *([*torchrun, str(free_port()), *command, str(k), address] for k in range(2)))
    one_loss(told)


@pytest.mark.processes
def test_lora_on_a_home_line_counts_bytes_and_hours(tmp_path: Path) -> None:
    _, told = trained("lora_home_line.py", tmp_path, "--emulate")
    counted = re.search(r"([0-9]+) rounds, ([0-9,]+) bytes sent, waited", told)
    tables = [line.strip("| ").replace(",", "").split(" | ") for line in told.splitlines() if line.startswith("| ")]
    adapters, every_step, whole, _ = (int(row[2]) for row in tables[1:5])
    assert counted and int(counted[1]) == 10, "30 steps"
    assert 10 * adapters <= int(counted[2].replace(",", "")) < 11 * adapters, "headers are small"
    assert adapters < every_step / 3 and adapters < whole / 2
    assert [int(row[2]) for row in tables[6:8]] == [20_312_500, 80_000_000], "40 million values of 4 bits, of 16 bits"


def test_the_trainer_of_torchtitan_calls_what_it_inherits() -> None:
    example = EXAMPLES / "torchtitan_trainer.py"
    tree = ast.parse(example.read_text(encoding="utf-8"))
    (trainer,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "AtollTrainer")
    methods = [node for node in trainer.body if isinstance(node, ast.FunctionDef)]
    assert [method.name for method in methods] == ["__init__", "train_step"]
    assert all(f"super().{method.name}(" in ast.unparse(method) for method in methods)
    if importlib.util.find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: the example was parsed only")
    spec = importlib.util.spec_from_file_location("torchtitan_trainer", example)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert isinstance(module.llama3_debugmodel(), module.AtollTrainer.Config)


@pytest.mark.processes
def test_the_notebook_compares_the_methods(tmp_path: Path) -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel, of atoll[dev]")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.read(EXAMPLES / "four_methods.ipynb", as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells), "it is stored without outputs"
    assert cells[0].source.count("STEPS, WORKERS = 200, 4") == 1
    cells[0].source = cells[0].source.replace("= 200, 4", "= 16, 4")
    nbclient.NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    told = "".join(output.get("text", "") for cell in cells for output in cell.outputs)
    ends = re.findall(r"^(\S+) +held-out loss ([0-9.]+), +([0-9.]+) MB", told, re.MULTILINE)
    assert [name for name, _, _ in ends] == ["data-parallel", "DiLoCo", "Streaming", "Eager"]
    assert all(float(loss) < 4.5 for _, loss, _ in ends), "ln 256 is 5.55"
    assert float(ends[0][2]) > 7 * float(ends[1][2]) > 40 * float(ends[2][2])
    assert [output.data for output in cells[-1].outputs if "image/png" in output.get("data", {})]


def hunks(diff: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of every hunk of a diff, before and after."""
    for hunk in re.split(r"^@@.*\n", diff, flags=re.MULTILINE)[1:]:
        before, after = ([line[1:] for line in hunk.splitlines() if line[0] != sign] for sign in "+-")
        yield "\n".join(before), "\n".join(after)


@pytest.mark.processes
def test_the_diff_makes_a_worker_of_nanogpts_loop(tmp_path: Path) -> None:
    diff = (EXAMPLES / "nanogpt.diff").read_text(encoding="utf-8")
    assert len(re.findall(r"^\+(?!\+)", diff, re.MULTILINE)) < 16
    code = LOOP
    for before, after in hunks(diff):
        assert code.count(before) == 1, before
        code = code.replace(before, after)
    (tmp_path / "train.py").write_text(code, encoding="utf-8")
    assert {"connect", "OuterLoop"} <= {*re.findall(r"\batoll\.(\w+)", code)} <= {*atoll.__all__}
    for more in (["--max_iters=220"], ["--max_iters=330", "--init_from=resume"]):
        more.append(f"--address=127.0.0.1:{free_port()}")
        told = outputs(tmp_path, *(["train.py", f"--worker={k}", f"--out_dir=out-{k}", *more] for k in range(2)))
        scores = [re.findall(r"step ([0-9]+): train loss ([0-9.]+)", text) for text in told]
        assert scores[0] == scores[1] and len(scores[0]) > 1
        one, other = (torch.load(tmp_path / f"out-{k}" / "final.pt")["model"] for k in range(2))
        assert all(torch.equal(value, other[name]) for name, value in one.items())
    assert float(scores[0][-1][1]) < 1.0, "ln 16 is 2.77"
