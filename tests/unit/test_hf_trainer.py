"""AtollCallback in a Hugging Face Trainer: two processes, compared bit by bit with a loop of one's own."""

import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate", reason="needs transformers' Trainer: pip install -e '.[hf]'")
pytest.importorskip("transformers", reason="needs transformers' Trainer: pip install -e '.[hf]'")

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import EarlyStoppingCallback, GPT2LMHeadModel, Trainer, TrainerCallback

import atoll
from atoll.errors import ConfigError
from atoll.integrations.transformers import AtollCallback
from fleet import Fleet, Me
from hf_worker import Recorder, Run, collate, overflowing, plain_loop, rows, tiny
from pair import METHODS, STEPS, Pair, digest, every_method

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("hf_trainer")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair"), "hf_worker") as made:
        yield made


def trained(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    seen = Recorder()
    run = Run(me, folder, method, callbacks=[seen], gradient_accumulation_steps=accumulate)
    run.trainer.train()
    assert run.trainer.state.global_step == STEPS
    return run.digest, seen.evaluated, run.batches


@every_method
def test_a_run_has_the_bits_of_a_plain_loop(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    (first, evaluated, _), (second, others, _) = ran = pair.results(trained, tmp_path, method, accumulate)
    plain = pair.results(looped, method, [batches for *_, batches in ran], accumulate)
    assert first == second == plain[0][0] == plain[1][0]
    assert evaluated == others == plain[0][1] and list(evaluated) == [5, 10, 14] and evaluated[14] == first
    assert len(set(evaluated.values())) == 3


def looped(me: Me, method: str, batches: Any, accumulate: int) -> Any:
    return plain_loop(me, method, batches[me.worker], accumulate)


# ---------------------------------------------------------------------- resumed


def broken_off(me: Me, folder: Path, method: str, accumulate: int, at: int) -> Any:
    """Train up to a step at which an exception ends it; at=0 trains to the end."""
    run = Run(
        me, folder, method, dropout=0.1, callbacks=[Recorder(break_at=at)], gradient_accumulation_steps=accumulate
    )
    if not at:
        run.trainer.train()
        return run.digest
    with pytest.raises(RuntimeError, match="the lights went out"):  # its own, or the other's
        run.trainer.train()
    return None


def resumed(me: Me, folder: Path, method: str, accumulate: int, to: int = STEPS) -> Any:
    seen = Recorder()
    run = Run(me, folder, method, dropout=0.1, callbacks=[seen], gradient_accumulation_steps=accumulate, max_steps=to)
    run.trainer.train(resume_from_checkpoint=True)
    return run.digest, sorted(seen.live), seen.found


@every_method
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    pair: Pair, tmp_path: Path, method: str, accumulate: int
) -> None:
    whole = pair.results(broken_off, tmp_path / "whole", method, accumulate, 0)
    pair.results(broken_off, tmp_path / "broken", method, accumulate, 12)
    torn = tmp_path / "broken" / "worker-1" / "checkpoint-10"  # as if that worker had died while it saved
    (torn / "trainer_state.json").unlink()
    (first, steps, found), (second, *_) = pair.results(resumed, tmp_path / "broken", method, accumulate)
    assert steps == list(range(6, STEPS + 1)), "the newest step that both have is 5"
    assert found == ["checkpoint-5"], "later ones are no longer of this run"
    assert [first, second] == whole and first == second


@every_method
def test_a_worker_that_was_killed_is_started_again(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    with Fleet(tmp_path / "fleet", 2, keys="none", join_s=120.0) as fleet:
        fleet.add(0, killed, tmp_path / "run", method, accumulate, [12, 0])
        fleet.add(1, killed, tmp_path / "run", method, accumulate, [0, 12])
        assert "RuntimeError" in fleet[0].error() or "LinkError" in fleet[0].error()
        fleet[1].process.join()
        assert fleet[1].process.exitcode == 9
    whole = pair.results(broken_off, tmp_path / "whole", method, accumulate, 0)
    ended = pair.results(resumed, tmp_path / "run", method, accumulate)
    assert [digest for digest, *_ in ended] == whole and ended[0][1][0] == 11


def killed(me: Me, folder: Path, method: str, accumulate: int, at: list[int]) -> None:
    ends = Recorder(break_at=at[0], kill_at=at[1])
    run = Run(me, folder, method, dropout=0.1, callbacks=[ends], gradient_accumulation_steps=accumulate)
    run.trainer.train()


def test_a_run_that_has_ended_can_be_made_longer(pair: Pair, tmp_path: Path) -> None:
    steady = {"lr_scheduler_type": "constant"}
    whole = pair.results(lengthened, tmp_path / "whole", 20, steady, False)
    pair.results(lengthened, tmp_path / "short", 10, steady, False)
    assert pair.results(lengthened, tmp_path / "short", 20, steady, True) == whole


def lengthened(me: Me, folder: Path, steps: int, options: dict[str, Any], resume: bool) -> Any:
    run = Run(me, folder, "eager", max_steps=steps, **options)
    run.trainer.train(resume_from_checkpoint=resume)
    return run.digest


def test_a_run_that_has_ended_and_is_started_again_ends_at_once_with_the_same_model(pair: Pair, tmp_path: Path) -> None:
    whole = pair.results(broken_off, tmp_path, "streaming", 1, 0)
    again = pair.results(resumed, tmp_path, "streaming", 1)
    assert [digest for digest, *_ in again] == whole and again[0][1] == [], "no step more"


def from_elsewhere(me: Me, folder: Path, name: str) -> Any:
    run = Run(me, folder / "new", "streaming", dropout=0.1)
    run.trainer.train(resume_from_checkpoint=str(folder / "old" / f"worker-{me.worker}" / name))
    return run.digest


def test_a_checkpoint_of_another_run_may_be_resumed_from_and_loses_nothing(pair: Pair, tmp_path: Path) -> None:
    whole = pair.results(broken_off, tmp_path / "old", "streaming", 1, 0)
    assert pair.results(from_elsewhere, tmp_path, "checkpoint-5") == whole
    left = {path.name for path in (tmp_path / "old" / "worker-0").glob("checkpoint-*")}
    assert left == {"checkpoint-5", "checkpoint-10", "checkpoint-14"}


def best_again(me: Me, folder: Path) -> Any:
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    digests = []
    for resume in (False, True):
        run = Run(me, folder, "streaming", greater_is_better=True, **best)
        run.trainer.train(resume_from_checkpoint=resume)
        digests.append(run.digest)
        me = replace(me, port=me.port + 1)
    return digests, run.trainer.state.best_global_step


def test_an_ended_run_whose_best_model_was_loaded_ends_with_it_again(pair: Pair, tmp_path: Path) -> None:
    (digests, best), others = pair.results(best_again, tmp_path)
    assert digests[0] == digests[1] == others[0][1] and best != STEPS


def mistaken(me: Me, folder: Path, name: str) -> Any:
    run = Run(me, folder, "diloco", dropout=0.1)
    home = folder / f"worker-{me.worker}"
    fault = fault_of(lambda: run.trainer.train(resume_from_checkpoint=str(home / name)))
    return fault, sorted(path.name for path in home.glob("checkpoint-*"))


def test_a_wrong_checkpoint_is_refused_and_nothing_is_deleted(pair: Pair, tmp_path: Path) -> None:
    pair.results(broken_off, tmp_path, "diloco", 1, 0)
    for (kind, setting, text), left in pair.results(mistaken, tmp_path, "checkpoint-3"):
        assert (kind, setting) == ("ConfigError", "resume_from_checkpoint"), text
        assert "has steps [5, 10, 14]" in text and left == ["checkpoint-10", "checkpoint-14", "checkpoint-5"]


def test_checkpoints_without_the_outer_state_are_not_resumed_from(pair: Pair, tmp_path: Path) -> None:
    pair.results(broken_off, tmp_path, "diloco", 1, 0)
    for folder in tmp_path.glob("worker-*/checkpoint-*/atoll"):
        shutil.rmtree(folder)
    for kind, setting, text in pair.results(resumed_in_vain, tmp_path):
        assert (kind, setting) == ("ConfigError", "resume_from_checkpoint"), text
        assert "save_only_model, or without this callback" in text


def resumed_in_vain(me: Me, folder: Path) -> Any:
    run = Run(me, folder, "diloco", dropout=0.1)
    return fault_of(lambda: run.trainer.train(resume_from_checkpoint=True))


def test_a_torn_trainer_state_is_no_checkpoint(pair: Pair, tmp_path: Path) -> None:
    whole = pair.results(broken_off, tmp_path / "whole", "diloco", 1, 0)
    pair.results(broken_off, tmp_path / "torn", "diloco", 1, 12)
    (tmp_path / "torn" / "worker-0" / "checkpoint-10" / "trainer_state.json").write_text("")
    ended = pair.results(resumed, tmp_path / "torn", "diloco", 1)
    assert [digest for digest, *_ in ended] == whole and ended[0][1][0] == 6


# ---------------------------------------------------------------------- what is evaluated and saved


def saved_best(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    seen = Recorder()
    run = Run(
        me,
        folder,
        method,
        callbacks=[seen],
        gradient_accumulation_steps=accumulate,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that the first is the best
    )
    run.trainer.train()
    files = {
        step: digest(GPT2LMHeadModel.from_pretrained(f"{folder}/worker-{me.worker}/checkpoint-{step}"))
        for step in (5, 10, 14)
    }
    evaluated = dict(seen.evaluated)
    scores = {log["step"]: log["eval_loss"] for log in run.trainer.state.log_history if "eval_loss" in log}
    return {
        "model": run.digest,
        "files": files,
        "evaluated": evaluated,
        "live": seen.live,
        "scores": scores,
        "best": run.trainer.state.best_global_step,
        "after": run.trainer.evaluate()["eval_loss"],
        "batches": run.batches,
    }


@every_method
def test_the_best_model_is_the_anchor_that_was_measured(
    pair: Pair, tmp_path: Path, method: str, accumulate: int
) -> None:
    one, other = pair.results(saved_best, tmp_path, method, accumulate)
    (_, plain), _ = pair.results(looped, method, [one["batches"], other["batches"]], accumulate)
    assert one["files"] == one["evaluated"] == other["files"] == plain
    best = one["best"]
    assert best == max((5, 10, 14), key=one["scores"].get) != 14, "the last would prove nothing"
    assert one["model"] == other["model"] == one["files"][best]
    assert one["after"] == one["scores"][best]
    assert one["live"][5] != other["live"][5] and one["live"][5] != one["files"][5]


def evaluation_fails(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    seen = Recorder()
    run = Run(me, folder, method, dropout=0.1, callbacks=[seen], gradient_accumulation_steps=accumulate)
    if me.worker == 1:
        run.trainer.eval_dataset = Broken(run.trainer)
    try:
        run.trainer.train()
    except Exception as error:
        return f"{type(error).__name__}: {error}", run.digest, seen.live, run.trainer.state.global_step
    raise AssertionError("it went well")


class Broken:
    """Data that can be read once."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.rows = trainer, rows(99, 8)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        if self.trainer.state.global_step >= 10:
            raise OSError("the disk is gone")
        return self.rows[index]


@every_method
def test_an_evaluation_that_raises_gives_the_parameters_back_and_tells_the_others_why(
    pair: Pair, tmp_path: Path, method: str, accumulate: int
) -> None:
    (told, *_), (why, model, live, step) = pair.results(evaluation_fails, tmp_path / "run", method, accumulate)
    assert why == "OSError: the disk is gone" and step == 10
    assert model == live[10], "the model holds the worker's own parameters again, not the anchor"
    assert "LinkError" in told and "worker 1" in told and "the disk is gone" in told
    whole = pair.results(broken_off, tmp_path / "whole", method, accumulate, 0)
    (first, steps, _), (second, *_) = pair.results(resumed, tmp_path / "run", method, accumulate)
    assert steps == list(range(6, STEPS + 1)) and [first, second] == whole


def several_sets(me: Me, folder: Path) -> Any:
    seen = Recorder()
    run = Run(me, folder, "diloco", callbacks=[seen], held={"a": rows(98, 4), "b": rows(99, 4)})
    run.trainer.train()
    return seen.evaluated, seen.live, run.digest


def test_several_sets_are_evaluated_on_one_anchor(pair: Pair, tmp_path: Path) -> None:
    (evaluated, live, final), (others, _, _) = pair.results(several_sets, tmp_path)
    assert evaluated == others and evaluated[5] != live[5] and evaluated[14] == final


# ---------------------------------------------------------------------- steps that a loss scaler skips


def scaled(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    """Steps that a real GradScaler skips, for the losses of some batches are infinite."""
    # A fused optimizer skips inside its kernel, which accelerate does not see; it unscales for clipping on a GPU alone.
    plain: dict[str, Any] = {"optim": "adamw_torch", "max_grad_norm": 0.0, "gradient_accumulation_steps": accumulate}
    run = Run(me, folder, method, callbacks=(seen := Skips(),), model=overflowing(tiny()), **plain)
    run.trainer.accelerator.scaler = scaler()
    run.trainer.train()
    return run.digest, seen.skipped, run.batches, run.callback.outer.steps


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


class Skips(TrainerCallback):
    """Notes the steps that accelerate says were skipped."""

    def __init__(self) -> None:
        self.skipped: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if optimizer.step_was_skipped:
            self.skipped.append(state.global_step)


@every_method
def test_skipped_steps_count_as_in_a_plain_loop(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    (first, skipped, _, steps), (second, others, _, _) = ran = pair.results(scaled, tmp_path, method, accumulate)
    assert 0 < len(skipped) < STEPS and skipped != others and steps == STEPS
    plain = pair.results(scaled_loop, method, [batches for *_, batches, _ in ran], accumulate)
    assert first == second == plain[0][0] == plain[1][0]


def scaled_loop(me: Me, method: str, batches: Any, accumulate: int) -> Any:
    return plain_loop(me, method, batches[me.worker], accumulate, scaler())


# ---------------------------------------------------------------------- refused


def refused(me: Me, folder: Path, options: dict[str, Any], resume: Any = None) -> Any:
    """What a worker says that cannot train: the error's type and setting, and its text."""
    run = Run(me, folder, **{key: value[me.worker] for key, value in options.items()})
    return fault_of(lambda: run.trainer.train(resume_from_checkpoint=resume and resume[me.worker]))


def fault_of(act: Any) -> Any:
    try:
        act()
    except Exception as fault:
        return type(fault).__name__, getattr(fault, "setting", None), str(fault)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("options", "setting", "advice"),
    [
        ({"data_seed": (7, 7)}, "data_seed", "data_seed=link.worker"),
        ({"data_seed": (None, None)}, "data_seed", "data_seed=link.worker"),
        ({"data_seed": (0, None)}, "data_seed", "data_seed=link.worker"),  # None is the seed, 0 here
        ({"max_steps": (14, 15)}, "max_steps", "set the same on all"),
        ({"max_steps": (-1, -1)}, "max_steps", "max_steps=..."),
        ({"auto_find_batch_size": (True, True)}, "auto_find_batch_size", "per_device_train_batch_size"),
        ({"save_total_limit": (1, 1)}, "save_total_limit", "at least 2"),
        ({"save_total_limit": (2, 2), "save_steps": (3, 3)}, "save_total_limit", "at least 3"),
        ({"save_total_limit": (2, 2), "metric_for_best_model": ("loss", "loss")}, "save_total_limit", "at least 3"),
    ],
)
def test_settings_that_cannot_work_are_refused_on_all_workers(
    pair: Pair, tmp_path: Path, options: dict[str, Any], setting: str, advice: str
) -> None:
    for kind, refused_setting, text in pair.results(refused, tmp_path, options):
        assert (kind, refused_setting) == ("ConfigError", setting) and advice in text
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_a_refusal_of_one_worker_reaches_the_others(pair: Pair, tmp_path: Path) -> None:
    (kind, _, told), (other, setting, _) = pair.results(refused, tmp_path, {"max_steps": (14, -1)})
    assert (other, setting) == ("ConfigError", "max_steps")
    assert kind == "LinkError" and "max_steps must be set" in told


def test_workers_resume_together_and_a_new_run_has_its_own_folder(pair: Pair, tmp_path: Path) -> None:
    pair.results(trained, tmp_path / "run", "diloco", 1)
    for kind, setting, text in pair.results(refused, tmp_path / "run", {}):
        assert (kind, setting) == ("ConfigError", "output_dir") and "resume_from_checkpoint=True" in text
    one = [str(tmp_path / "run" / "worker-0" / "checkpoint-10"), str(tmp_path / "run" / "worker-1" / "checkpoint-5")]
    for kind, setting, text in pair.results(refused, tmp_path / "run", {}, one):
        assert (kind, setting) == ("ConfigError", "resume") and "same step" in text
    for kind, setting, _ in pair.results(refused, tmp_path / "run", {}, ["last", "last"]):
        assert (kind, setting) == ("ConfigError", "resume_from_checkpoint")
    for kind, _, text in pair.results(refused, tmp_path / "none", {}, [True, True]):
        assert kind == "ValueError" and "No valid checkpoint" in text  # the Trainer's own words
    assert list((tmp_path / "run").rglob("checkpoint-14"))


def stopped(me: Me, folder: Path, patience: list[int], strategy: str = "steps") -> Any:
    stop = EarlyStoppingCallback(patience[me.worker], 100.0)  # nothing is enough of an improvement
    best: dict[str, Any] = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    length: dict[str, Any] = {
        "per_device_train_batch_size": 10,
        "max_steps": 12,
        "eval_strategy": strategy,
        "save_strategy": strategy,
    }
    run = Run(me, folder, "streaming", callbacks=[stop, seen := Recorder()], **best, **length)
    try:
        run.trainer.train()
    except ConfigError as fault:
        return fault.setting, str(fault)
    return run.digest, run.trainer.state.global_step, seen.evaluated, run.trainer.state.best_global_step


@pytest.mark.parametrize(("strategy", "end"), [("steps", 10), ("epoch", 8)])
def test_early_stopping_that_all_agree_on_ends_with_the_best_anchor(
    pair: Pair, tmp_path: Path, strategy: str, end: int
) -> None:
    one, other = pair.results(stopped, tmp_path, [1, 1], strategy)
    digest, step, evaluated, best = one
    assert one == other and step == end and digest == evaluated[best]


def test_early_stopping_that_not_all_agree_on_is_refused(pair: Pair, tmp_path: Path) -> None:
    for setting, text in pair.results(stopped, tmp_path, [1, 2]):
        assert setting == "early stopping" and "workers [0] would stop, workers [1] would not" in text


class Halt(TrainerCallback):
    """Ends training on its own."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == 6


def halted(me: Me, folder: Path) -> Any:
    return fault_of(Run(me, folder, callbacks=[Halt()] * (me.worker == 1)).trainer.train)


def test_a_worker_that_ends_alone_is_an_error_on_all(pair: Pair, tmp_path: Path) -> None:
    (kind, _, told), (other, setting, text) = pair.results(halted, tmp_path)
    assert (other, setting) == ("ConfigError", "max_steps") and "ended at step 6 of 14" in text
    assert kind == "LinkError" and "ended at step 6 of 14" in told


def test_what_no_trainer_can_drive_is_refused_when_the_callback_is_made() -> None:
    alone = atoll.local(workers=1)[0]
    with pytest.raises(ConfigError) as refusal:
        AtollCallback(atoll.DataParallel(), alone)  # type: ignore[arg-type]
    assert refusal.value.setting == "sync"
    alone.elastic = True
    with pytest.raises(ConfigError) as refusal:
        AtollCallback(atoll.DiLoCo(period=2), alone)
    assert refusal.value.setting == "link"


def alone(me: Me, folder: Path) -> Any:
    """One worker in one process: a callback that comes late, one that is used again, a link that cannot compare."""
    if me.worker:
        return None
    run = Run(replace(me, workers=1), folder / "a", "diloco")
    callback = AtollCallback(METHODS["diloco"](), atoll.local(workers=1)[0])
    run.trainer.pop_callback(AtollCallback)
    late: Any = Trainer(
        tiny(), run.trainer.args, data_collator=collate, train_dataset=rows(1, 8), eval_dataset=rows(2, 4)
    )
    late.add_callback(callback)
    faults = [fault_of(late.train)]
    callback.attach(late)
    late.train()
    late.args.output_dir = str(folder / "b")
    faults += [fault_of(late.train), fault_of(lambda: callback.attach(run.trainer))]
    two = AtollCallback(METHODS["diloco"](), atoll.local(workers=2)[0])
    data: dict[str, Any] = {"train_dataset": rows(1, 8), "eval_dataset": rows(2, 4)}
    other = Trainer(tiny(), late.args, data_collator=collate, callbacks=[two], **data)
    return [*faults, fault_of(other.train)], digest(late.model)


def test_a_callback_belongs_to_one_trainer_and_one_run(pair: Pair, tmp_path: Path) -> None:
    (faults, _), _ = pair.results(alone, tmp_path)
    assert [(kind, setting) for kind, setting, _ in faults] == [
        ("ConfigError", "callbacks"),
        ("ConfigError", "link"),
        ("ConfigError", "link"),
        ("ConfigError", "link"),
    ]
    assert "attach" in faults[0][2] and "atoll.connect" in faults[3][2]


# ---------------------------------------------------------------------- loggers


def logged(me: Me, folder: Path) -> Any:
    os.environ["TENSORBOARD_LOGGING_DIR"] = str(folder / f"board-{me.worker}")
    run = Run(me, folder, "diloco", report_to=["tensorboard"])
    run.trainer.train()
    return run.trainer.state.log_history, asdict(run.callback.outer.counters)


def test_counters_go_to_the_trainers_loggers(pair: Pair, tmp_path: Path) -> None:
    (history, counters), _ = pair.results(logged, tmp_path)
    rounds = [(log["step"], log["atoll_rounds"], log["atoll_anchor_step"]) for log in history if "loss" in log]
    assert rounds == [(5, 1, 4), (10, 2, 8)]
    assert counters["rounds_applied"] == 4, "three by schedule, and the last exchange"
    assert 0 < history[0]["atoll_sent_bytes"] < counters["wire_sent"]
    events = EventAccumulator(str(tmp_path / "board-0")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/atoll_rounds")] == [(5, 1.0), (10, 2.0)]
