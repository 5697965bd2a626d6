"""What a run counts, and what it insists on when it is resumed."""

import copy
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import checkpoint
from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.link.local import local
from atoll.link.seat import Seat
from atoll.runs.events import End, Jsonl, Outcome, RoundApplied, Start, Step, read
from atoll.runs.layout import CHECKPOINTS, METRICS, MODEL, RUN
from atoll.settings import config
from atoll.settings.config import RunConfig
from atoll.train.data.batches import Batches, held_out
from atoll.train.folder import RunFolder
from atoll.train.run import prepare, start, train
from atoll.train.trainer import Trainer

SMALL: dict[str, Any] = {
    "device": "cpu",
    "threads": 1,
    "model": {"preset": "tiny", "layers": 2, "width": 16, "heads": 1, "feedforward": 32, "context": 16},
    "train": {"steps": 12, "batch": 2, "eval_tokens": 64, "save_every": 100, "log_every": 1, "lr": 0.003},
    "sync": {"workers": 3, "method": "streaming", "period": 4, "fragments": "blocks:1"},
    "log": {"view": "none", "sample": 4},
}


def run_of(folder: Path, **changes: Any) -> RunConfig:
    text = folder / "text"
    text.mkdir(exist_ok=True)
    for number in range(6):
        (text / f"{number}.txt").write_text(f"{number} the tide comes in and goes out again. " * 20)
    data = {"source": str(text), "cache": str(folder / "tokens"), "held_out": 0.2}
    made = config.parse({**SMALL, "data": data, "name": "run", "out": str(folder / "runs")})
    return made.changed(**changes) if changes else made


def test_rounds_expect_those_who_are_there_and_bytes_are_counted_per_worker(tmp_path: Path) -> None:
    absence = [{"worker": 2, "first": 5, "last": 9}]
    events = read(train(run_of(tmp_path, **{"faults.absences": absence})) / "metrics.jsonl")
    start, end = events[0], events[-1]
    assert isinstance(start, Start) and isinstance(end, End) and len(set(start.fragments)) > 1
    sizes = [Codec("e3m0").payload_bytes(numel) for numel in start.fragments]
    assert start.payload_bytes == sizes and start.tokens_per_step == 2 * 16
    rounds = [event for event in events if isinstance(event, RoundApplied)]
    sent = [0, 0, 0]
    for event in rounds:
        members = [0, 1] if 5 <= event.step <= 9 else [0, 1, 2]
        assert (event.expected, event.members, event.bytes) == (len(members), members, sizes[event.fragment])
        assert event.applied == min(event.step + 1, 12)
        for worker in members:
            sent[worker] += event.bytes
    assert {event.expected for event in rounds} == {2, 3} and end.bytes_sent == sent
    received = [sum(event.bytes * (len(event.members) - (w in event.members)) for event in rounds) for w in range(3)]
    assert end.bytes_received == received
    trained = [event.participants for event in events if isinstance(event, Step)]
    assert trained == [3] * 4 + [2] * 5 + [3] * 3 and end.tokens == sum(trained) * 2 * 16


CHANGED: dict[str, Any] = {
    "seed": 1, "train.lr": 0.004, "train.batch": 4, "train.clip": 0.5, "train.steps": 13, "train.optimizer": "muon",
    "sync.method": "eager", "sync.outer_lr": 0.5, "sync.feedback": True, "data.held_out": 0.3, "model.tied": False,
}  # fmt: skip


@pytest.mark.parametrize("key", CHANGED)
def test_what_is_computed_may_not_change_on_resume(key: str, tmp_path: Path) -> None:
    begun = run_of(tmp_path, **{"sync.fragments": None})
    folder = RunFolder(begun)
    folder.path.mkdir(parents=True)
    (folder.path / RUN).write_text(begun.to_toml())
    with pytest.raises(ConfigError, match=key.replace(".", r"\.")):
        folder.as_begun(begun.changed(**{key: CHANGED[key]}))
    free = {"train.keep": 5, "train.save_every": 7, "log.tensorboard": True, "link.join_s": 9.0}
    assert folder.as_begun(begun.changed(**free)) == begun.changed(**free)


def test_other_text_cannot_be_resumed_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Trainer.step

    def interrupted(self: Trainer) -> None:
        original(self)
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Trainer, "step", interrupted)
    run = run_of(tmp_path)
    with pytest.raises(SystemExit):
        train(run)
    monkeypatch.undo()
    (tmp_path / "text" / "0.txt").write_text("something else " * 40)
    with pytest.raises(ConfigError, match=r"the text or the tokenizer of data\.source has changed"):
        train(run, resume=True)


def test_a_run_that_was_interrupted_and_then_killed_is_not_finished(tmp_path: Path) -> None:
    """Between the export of its model and its end, after it was resumed."""
    folder = RunFolder(run_of(tmp_path))
    assert not folder.finished
    (folder.path / MODEL).mkdir(parents=True)
    (folder.path / MODEL / "config.json").write_text("{}")
    (folder.path / RUN).write_text("")
    totals: dict[str, Any] = {"bytes_sent": [0], "bytes_received": [0], "wait_s": [0.0]}
    outcomes: list[tuple[Outcome, bool]] = [("interrupted", False), ("finished", True), ("interrupted", False)]
    for outcome, is_finished in outcomes:
        log = Jsonl(folder.path / METRICS, 10**6)
        end = End(step=1, tokens=1, seconds=1.0, step_s=1.0, loss=1.0, best_loss=1.0, outcome=outcome, **totals)
        log.write(end)
        log.close()
        assert folder.finished == is_finished


def test_a_trainer_goes_on_from_its_state_to_the_bit(tmp_path: Path) -> None:
    given = run_of(tmp_path, **{"sync.method": "none", "sync.workers": 1, "sync.fragments": None})
    data = prepare(given)

    def trainer() -> Trainer:
        model, settings = start(given, data)
        batches = Batches(data.train, workers=1, batch=2, sequence=16, seed=0)
        return Trainer(settings, model, batches, held_out(data.held_out, sequence=16, tokens=64, batch=2))

    one, other = trainer(), trainer()
    for _ in range(3):
        one.step()
    one.evaluate()
    other.load_state_dict(copy.deepcopy(one.state_dict()))
    assert (other.steps, other.best, other.seconds) == (3, one.best, one.seconds) and one.best < 10
    one.step()
    other.step()
    for mine, theirs in zip(one.models[0].parameters(), other.models[0].parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert one.evaluate() == other.evaluate() and one.best == other.best


def test_a_worker_apart_keeps_the_checkpoints_that_others_may_still_need(tmp_path: Path) -> None:
    """One that is a period and a delay ahead still has the newest of the one that is behind."""
    run = run_of(tmp_path, **{"train.keep": 1})
    data = prepare(run)
    model, run = start(run, data)
    batches = Batches(data.train, workers=3, batch=2, sequence=16, seed=0)
    trainer = Trainer(run, model, batches, held_out(data.held_out, sequence=16, tokens=64, batch=2), local(3))
    for seat, kept in ((None, (10,)), (Seat(0, 3), (5, 6, 7, 8, 9, 10))):
        folder = RunFolder(run, seat)
        for trainer.steps in range(1, 11):
            folder.save(trainer, 0, data)
        assert checkpoint.steps(folder.path / CHECKPOINTS) == kept
