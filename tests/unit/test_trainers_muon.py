"""Muon beside AdamW in a Hugging Face Trainer and in Lightning, with the optimizer of docs/trainers.md."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers", reason="needs transformers: pip install -e '.[hf]'")
pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[lightning]'")

import torch
from torch import Tensor, nn

import atoll
import hf_worker
import lightning_worker
from fleet import Me
from pair import METHODS, RATE, STEPS, Pair, digest

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("trainers_muon")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair"), "hf_worker lightning_worker") as made:
        yield made


def muon_and_adamw(model: nn.Module, blocks: nn.Module) -> Any:
    """The optimizer that the page shows."""
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(code, "trainers.md", "exec"), names)
    return names["muon_and_adamw"](model, blocks, RATE)


def plain_loop(
    me: Me, model: Any, blocks: Any, batches: Sequence[Any], loss: Callable[[Any], Tensor], *, decay: bool
) -> str:
    """Train on these batches with two optimizers in a loop of one's own."""
    link = me.link()
    matrices = [p for p in blocks.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    muon = torch.optim.Muon(matrices, lr=RATE, adjust_lr_fn="match_rms_adamw")
    inner: list[Any] = [muon, torch.optim.AdamW(others, lr=RATE)]
    outer = atoll.OuterLoop(model, METHODS["streaming"](), link)
    for step, batch in enumerate(batches[:STEPS]):
        loss(batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in inner:
            optimizer.param_groups[0]["lr"] = RATE * (STEPS - step) / STEPS if decay else RATE
            optimizer.step()
            optimizer.zero_grad()
        outer.step()
    outer.finish()
    link.close()
    return digest(model)


# ---------------------------------------------------------------------- Hugging Face


def trainer(me: Me, folder: Path, at: int, *, resume: bool = False) -> Any:
    """Train up to a step at which an exception ends it; 0 trains to the end, -1 with dropout as the others."""
    seen = hf_worker.Recorder(break_at=at)
    run = hf_worker.Run(me, folder, "streaming", callbacks=[seen], dropout=0.1 if at or resume else 0.0)
    run.trainer.optimizer = muon_and_adamw(run.trainer.model, run.trainer.model.transformer.h)
    if at > 0:
        with pytest.raises(RuntimeError, match="the lights went out"):
            run.trainer.train()
        return None
    run.trainer.train(resume_from_checkpoint=resume)
    return run.digest, run.batches, sorted(seen.live)


def trainer_loop(me: Me, batches: Any) -> str:
    model = hf_worker.tiny()
    model.train()

    def loss(batch: Any) -> Tensor:
        items = (batch["labels"][..., 1:] != -100).sum()
        return torch.as_tensor(model(**batch, num_items_in_batch=items).loss)

    return plain_loop(me, model, model.transformer.h, batches[me.worker], loss, decay=True)


def resumed_trainer(me: Me, folder: Path) -> Any:
    return trainer(me, folder, 0, resume=True)


def test_a_trainer_has_the_bits_of_a_plain_loop(pair: Pair, tmp_path: Path) -> None:
    (first, mine, _), (second, others, _) = pair.results(trainer, tmp_path, 0)
    assert [first, second] == pair.results(trainer_loop, [mine, others]) and first == second


def test_a_resumed_trainer_has_the_bits_of_one_that_never_stopped(pair: Pair, tmp_path: Path) -> None:
    whole = pair.results(trainer, tmp_path / "whole", -1)
    pair.results(trainer, tmp_path / "broken", 12)
    ended = pair.results(resumed_trainer, tmp_path / "broken")
    assert [final for final, *_ in ended] == [final for final, *_ in whole]
    assert ended[0][2] == list(range(11, STEPS + 1))


# ---------------------------------------------------------------------- Lightning


class WithMuon(lightning_worker.Small):
    """Has the optimizer of the page."""

    def configure_optimizers(self) -> Any:
        return muon_and_adamw(self, self.layers)


def lightning_run(me: Me, folder: Path, at: int, resume: int = 0) -> Any:
    """Train as `trainer` does; `resume` is the step of the checkpoint."""
    seen = lightning_worker.Recorder(break_at=at)
    run = lightning_worker.Run(me, folder, "streaming", callbacks=[seen])
    random = torch.get_rng_state()
    run.model = WithMuon(0.2 if at or resume else 0.0)
    torch.set_rng_state(random)  # the order of the data
    if at > 0:
        with pytest.raises(RuntimeError, match="the lights went out"):
            run.fit()
        return None
    run.fit(folder / f"worker-{me.worker}" / f"step={resume}.ckpt" if resume else None)
    return run.digest, run.model.batches, sorted(seen.live)


def lightning_loop(me: Me, batches: Any) -> str:
    model = WithMuon()
    return plain_loop(me, model, model.layers, batches[me.worker], model.loss, decay=False)


def test_lightning_has_the_bits_of_a_plain_loop(pair: Pair, tmp_path: Path) -> None:
    (first, mine, _), (second, others, _) = pair.results(lightning_run, tmp_path, 0)
    assert [first, second] == pair.results(lightning_loop, [mine, others]) and first == second


def test_a_resumed_lightning_run_has_the_bits_of_one_that_never_stopped(pair: Pair, tmp_path: Path) -> None:
    whole = pair.results(lightning_run, tmp_path / "whole", -1)
    pair.results(lightning_run, tmp_path / "broken", 12)
    ended = pair.results(lightning_run, tmp_path / "broken", 0, 10)
    assert [final for final, *_ in ended] == [final for final, *_ in whole]
    assert ended[0][2] == list(range(11, STEPS + 1))
