"""Processes that a worker forks, as a DataLoader's workers are, live beside its link."""

import subprocess
import sys
from pathlib import Path

import pytest

from fleet import free_port

LOOP = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import atoll

torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
link = atoll.connect(sys.argv[2], worker=int(sys.argv[1]), workers=2, keys="none")
outer = atoll.OuterLoop(model, atoll.DiLoCo(period=4), link)
outer.join()  # the link is in use when the loader forks
inner = torch.optim.SGD(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(40, 8)), batch_size=2, num_workers=2, multiprocessing_context="fork")
for _ in range(4):
    for (rows,) in loader:
        model(rows).square().mean().backward()
        inner.step()
        inner.zero_grad()
        outer.step()
outer.finish()
link.close()
print(outer.steps, float(model.weight.sum()))
"""


@pytest.mark.processes
def test_the_workers_of_a_data_loader_live_beside_a_link(tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP, encoding="utf-8")
    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, str(tmp_path / "loop.py")]
    both = [
        subprocess.Popen([*command, str(n), address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    told = [process.communicate(timeout=200) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[0][0] == told[1][0] and told[0][0].startswith("80 ")
