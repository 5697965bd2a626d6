"""Workers of several processes: the trainer uses DDP inside each; one group over workers is refused."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="needs transformers' Trainer: pip install -e '.[hf]'")
pytest.importorskip("transformers", reason="needs transformers' Trainer: pip install -e '.[hf]'")

from atoll.errors import ConfigError
from fleet import Fleet, Me, as_rank, free_port
from hf_worker import Recorder, Run

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("trainer_ranks")]


def replicated(me: Me, folder: Path, rank: int, port: int) -> Any:
    as_rank(rank, 2, port)
    seen = Recorder()
    run = Run(me, folder, "streaming", callbacks=[seen])
    run.trainer.train()
    return run.digest, seen.evaluated, type(run.trainer.model_wrapped).__name__


def test_a_worker_may_use_ddp_inside(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", 2, keys="none", join_s=120.0) as fleet:
        for worker in range(2):
            port = free_port()
            for rank in range(2):
                fleet.add(worker, replicated, tmp_path, rank, port)
        ended = fleet.results()
    assert len({final for final, *_ in ended}) == 1
    assert all(evaluated == ended[0][1] for _, evaluated, _ in ended) and len(ended[0][1]) == 3
    assert {wrapped for *_, wrapped in ended} == {"DistributedDataParallel"}
    states = sorted(str(folder.relative_to(tmp_path)) for folder in tmp_path.glob("worker-*/checkpoint-5/atoll/*"))
    assert states == [f"worker-{worker}/checkpoint-5/atoll/rank-{rank}" for worker in range(2) for rank in range(2)]


def spanned(me: Me, folder: Path, port: int) -> Any:
    as_rank(me.worker, 2, port)
    run = Run(me, folder, "diloco")
    try:
        run.trainer.train()
    except ConfigError as fault:
        return fault.setting, str(fault)
    return None


def test_one_group_over_workers_is_refused(tmp_path: Path) -> None:
    with Fleet(tmp_path / "fleet", 2, keys="none", join_s=120.0) as fleet:
        for setting, text in fleet.start(spanned, tmp_path, free_port()).results():
            assert setting == "link" and "spans workers 0, 1" in text and "a torchrun of its own" in text
