"""AtollCallback in a Lightning Trainer: two processes, compared bit by bit with a loop of one's own."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs Lightning: pip install -e '.[lightning]'")

import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision

from atoll.errors import ConfigError
from fleet import Fleet, Me
from lightning_worker import Recorder, Run, Small, plain_loop
from pair import EPOCH, STEPS, Pair, digest, every_method

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("lightning")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with Pair(tmp_path_factory.mktemp("pair"), "lightning_worker") as made:
        yield made


def trained(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    run = Run(me, folder, method, accumulate=accumulate)
    run.fit()
    assert run.trainer.global_step == STEPS == run.callback.outer.steps
    return run.digest, run.model.validated, run.model.batches


def looped(me: Me, method: str, batches: Any, accumulate: int) -> Any:
    return plain_loop(me, method, batches[me.worker], accumulate)


@every_method
def test_a_run_has_the_bits_of_a_plain_loop(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    (first, validated, _), (second, others, _) = ran = pair.results(trained, tmp_path, method, accumulate)
    plain = pair.results(looped, method, [batches for *_, batches in ran], accumulate)
    assert first == second == plain[0][0] == plain[1][0]
    assert validated == others and validated
    if accumulate == 1:
        assert validated == plain[0][1], "the anchor, not the worker's own parameters, was validated"


def broken_off(me: Me, folder: Path, method: str, accumulate: int, at: int) -> Any:
    run = Run(me, folder, method, accumulate=accumulate, dropout=0.2, callbacks=[Recorder(break_at=at)])
    if not at:
        run.fit()
        return run.digest, [batch.sum().item() for batch in run.model.batches]
    with pytest.raises(RuntimeError, match="the lights went out"):  # its own, or the other's
        run.fit()
    return None


def resumed(me: Me, folder: Path, method: str, accumulate: int, step: int, steps: int = STEPS) -> Any:
    torch.manual_seed(4321)  # of another process
    run = Run(me, folder, method, accumulate=accumulate, dropout=0.2, max_steps=steps)
    run.fit(folder / f"worker-{me.worker}" / f"step={step}.ckpt")
    return run.digest, [batch.sum().item() for batch in run.model.batches], sorted(run.seen.live)


@pytest.mark.parametrize("step", [5, 10])
@every_method
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(
    pair: Pair, tmp_path: Path, method: str, accumulate: int, step: int
) -> None:
    whole = pair.results(broken_off, tmp_path / "whole", method, accumulate, 0)
    pair.results(broken_off, tmp_path / "broken", method, accumulate, 12)
    ended = pair.results(resumed, tmp_path / "broken", method, accumulate, step)
    for (final, batches), (again, later, steps) in zip(whole, ended, strict=True):
        assert later == batches[len(batches) - len(later) :], "a shuffling loader goes on where it was"
        assert set(steps) >= set(range(step + 1, STEPS + 1))
        assert again == final
    assert ended[0][0] == ended[1][0]


@pytest.mark.parametrize("interval", [20, 3])
def test_a_run_is_resumed_at_the_end_of_an_epoch(pair: Pair, tmp_path: Path, interval: int) -> None:
    whole = pair.results(epochs, tmp_path, interval, None)
    again = pair.results(epochs, tmp_path, interval, EPOCH)
    for (final, batches), (same, later) in zip(whole, again, strict=True):
        assert later == batches[EPOCH:] and same == final


def epochs(me: Me, folder: Path, interval: int, resume: int | None) -> Any:
    torch.manual_seed(1234)
    saves = {"every_n_train_steps": EPOCH, "save_top_k": -1, "filename": "{step}"}
    run = Run(me, folder, "eager", dropout=0.2, max_steps=45, val_check_interval=interval, checkpoints=saves)
    run.fit(folder / f"worker-{me.worker}" / f"step={resume}.ckpt" if resume else None)
    return run.digest, [batch.sum().item() for batch in run.model.batches]


# ---------------------------------------------------------------------- what is validated and saved


def saved_best(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    best = {"monitor": "val_loss", "mode": "max", "save_top_k": 1}  # so that an early one is the best
    run = Run(me, folder, method, accumulate=accumulate, checkpoints=best)
    run.fit()
    saved = torch.load(run.saver.best_model_path, weights_only=True)
    step, model = saved["global_step"], Small()
    model.load_state_dict(saved["state_dict"])
    return step, digest(model), run.model.validated, run.seen.live, run.digest, run.model.batches


@every_method
def test_a_checkpoint_saves_what_was_validated(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    one, other = pair.results(saved_best, tmp_path, method, accumulate)
    step, saved, validated, live, final, batches = one
    plain = pair.results(looped, method, [batches, other[-1]], accumulate)
    assert saved == other[1] == validated[step] != live[step]
    assert final == other[4] == plain[0][0] and (accumulate > 1 or saved == plain[0][1][step])


def saved_last(me: Me, folder: Path) -> Any:
    run = Run(me, folder, "streaming", checkpoints={"save_last": True, "every_n_train_steps": STEPS})
    run.fit()
    model = Small()
    model.load_state_dict(torch.load(run.saver.last_model_path, weights_only=True)["state_dict"])
    return digest(model), run.digest


def test_the_last_checkpoint_is_the_finished_model(pair: Pair, tmp_path: Path) -> None:
    (saved, final), (other, _) = pair.results(saved_last, tmp_path)
    assert saved == other == final


def lengthened(me: Me, folder: Path, steps: int, resume: int | None) -> Any:
    run = Run(me, folder, "eager", max_steps=steps, dropout=0.2)
    run.fit(folder / f"worker-{me.worker}" / f"step={resume}.ckpt" if resume else None)
    return run.digest


def test_a_run_that_has_ended_can_be_made_longer(pair: Pair, tmp_path: Path) -> None:
    whole = pair.results(lengthened, tmp_path / "whole", 15, None)
    pair.results(lengthened, tmp_path / "short", 10, None)
    assert pair.results(lengthened, tmp_path / "short", 15, 10) == whole


def validation_fails(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    run = Run(me, folder, method, accumulate=accumulate, dropout=0.2, fail_at=10 * me.worker)
    try:
        run.fit()
    except Exception as error:
        return f"{type(error).__name__}: {error}", run.digest, run.seen.live, run.trainer.global_step
    raise AssertionError("it went well")


@every_method
def test_a_validation_that_raises_gives_the_parameters_back_and_tells_the_others_why(
    pair: Pair, tmp_path: Path, method: str, accumulate: int
) -> None:
    (told, *_), (why, model, live, step) = pair.results(validation_fails, tmp_path / "run", method, accumulate)
    assert why == "OSError: the disk is gone" and step == 10
    assert model == live[10], "the model holds the worker's own parameters again, not the anchor"
    assert "LinkError" in told and "worker 1" in told and "the disk is gone" in told
    whole = pair.results(broken_off, tmp_path / "whole", method, accumulate, 0)
    ended = pair.results(resumed, tmp_path / "run", method, accumulate, 5)
    assert [final for final, *_ in ended] == [final for final, _ in whole]


# ---------------------------------------------------------------------- steps that a loss scaler skips


def scaled(me: Me, folder: Path, method: str, accumulate: int) -> Any:
    """Real steps that are skipped: in fp16, the losses of some batches are infinite."""
    precision = MixedPrecision("16-mixed", "cpu", scaler())
    run = Run(me, folder, method, accumulate=accumulate, infinite=True, plugins=[precision])
    run.fit()
    return run.digest, run.model.batches, run.callback.outer.steps


def scaler() -> Any:
    return torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)


@every_method
def test_skipped_steps_count_as_in_a_plain_loop(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    (first, batches, steps), (second, others, _) = pair.results(scaled, tmp_path, method, accumulate)
    assert steps == STEPS and any(batch[0, 0] > 1.5 for batch in batches)
    plain = pair.results(scaled_loop, method, [batches, others], accumulate)
    assert first == second == plain[0][0] == plain[1][0]


def scaled_loop(me: Me, method: str, batches: Any, accumulate: int) -> Any:
    return plain_loop(me, method, batches[me.worker], accumulate, scaler())


# ---------------------------------------------------------------------- killed


@every_method
def test_a_worker_that_was_killed_is_started_again(pair: Pair, tmp_path: Path, method: str, accumulate: int) -> None:
    with Fleet(tmp_path / "fleet", 2, keys="none", join_s=120.0) as fleet:
        fleet.add(0, killed, tmp_path / "run", method, accumulate, [12, 0])
        fleet.add(1, killed, tmp_path / "run", method, accumulate, [0, 12])
        assert "Error" in fleet[0].error()
        fleet[1].process.join()
        assert fleet[1].process.exitcode == 9
    whole = pair.results(broken_off, tmp_path / "whole", method, accumulate, 0)
    ended = pair.results(resumed, tmp_path / "run", method, accumulate, 10)
    assert [final for final, *_ in ended] == [final for final, _ in whole]


def killed(me: Me, folder: Path, method: str, accumulate: int, at: list[int]) -> None:
    Run(me, folder, method, accumulate=accumulate, dropout=0.2, callbacks=[Recorder(at[0], at[1])]).fit()


# ---------------------------------------------------------------------- refused


def refused(me: Me, folder: Path, options: dict[str, Any], resume: Any = None) -> Any:
    """What a worker says that cannot train: the error's type and setting, and its text."""
    run = Run(me, folder, **{key: value[me.worker] for key, value in options.items()})
    return fault_of(lambda: run.fit(resume and resume[me.worker]))


def fault_of(act: Any) -> Any:
    try:
        act()
    except Exception as fault:
        return type(fault).__name__, getattr(fault, "setting", None), str(fault)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize(
    ("options", "setting", "advice"),
    [
        ({"max_steps": (-1, -1)}, "max_steps", "max_steps=..."),
        ({"max_steps": (14, 15)}, "max_steps", "set the same on all"),
        ({"checkpoints": ({"save_weights_only": True},) * 2}, "save_weights_only", "whole checkpoints"),
    ],
)
def test_settings_that_cannot_work_are_refused_on_all_workers(
    pair: Pair, tmp_path: Path, options: dict[str, Any], setting: str, advice: str
) -> None:
    for kind, refused_setting, text in pair.results(refused, tmp_path, options):
        assert (kind, refused_setting) == ("ConfigError", setting) and advice in text


def test_workers_resume_from_the_same_step(pair: Pair, tmp_path: Path) -> None:
    pair.results(trained, tmp_path, "diloco", 1)
    paths = [tmp_path / f"worker-{worker}" / f"step={5 + 5 * worker}.ckpt" for worker in range(2)]
    for kind, setting, text in pair.results(refused, tmp_path, {}, paths):
        assert (kind, setting) == ("ConfigError", "ckpt_path") and "same step" in text


def stopped(me: Me, folder: Path, patience: list[int]) -> Any:
    stop = EarlyStopping("val_loss", patience=patience[me.worker], min_delta=100.0)
    run = Run(me, folder, "streaming", callbacks=[stop], max_steps=20)
    try:
        run.fit()
    except ConfigError as fault:
        return fault.setting, str(fault)
    return run.digest, run.trainer.global_step


def test_early_stopping_that_all_agree_on_ends_with_one_model(pair: Pair, tmp_path: Path) -> None:
    one, other = pair.results(stopped, tmp_path, [1, 1])
    assert one == other and one[1] == 10


def test_early_stopping_that_not_all_agree_on_is_refused(pair: Pair, tmp_path: Path) -> None:
    for setting, text in pair.results(stopped, tmp_path, [1, 2]):
        assert setting == "early stopping" and "workers [0] would stop, workers [1] would not" in text


def averaged(me: Me, folder: Path) -> Any:
    return fault_of(Run(me, folder, callbacks=[EMAWeightAveraging()]).fit)


def test_averages_of_each_worker_are_refused(pair: Pair, tmp_path: Path) -> None:
    for kind, setting, text in pair.results(averaged, tmp_path):
        assert (kind, setting) == ("ConfigError", "callbacks") and "EMAWeightAveraging must be left out" in text


def keeping(me: Me, folder: Path, top_k: int) -> list[str]:
    run = Run(me, folder / str(top_k), checkpoints={"every_n_train_steps": 2, "monitor": "step", "save_top_k": top_k})
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run.fit()
    return [str(one.message) for one in told if "that a resume may need" in str(one.message)]


def test_too_few_checkpoints_to_resume_from_are_warned_of(pair: Pair, tmp_path: Path) -> None:
    assert pair.results(keeping, tmp_path, 3) == pair.results(keeping, tmp_path, -1) == [[], []]
    (told,), _ = pair.results(keeping, tmp_path, 2)
    assert told.startswith("ModelCheckpoint keeps 2 of 3 checkpoints") and told.endswith("set save_top_k=-1")


class Halt(Callback):
    """Ends training on its own."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 6


def halted(me: Me, folder: Path) -> Any:
    return fault_of(Run(me, folder, callbacks=[Halt()] * (me.worker == 1)).fit)


def test_a_worker_that_ends_alone_is_an_error_on_all(pair: Pair, tmp_path: Path) -> None:
    (kind, _, told), (other, setting, text) = pair.results(halted, tmp_path)
    assert (other, setting) == ("ConfigError", "max_steps") and "ended at step 6 of 14" in text
    assert kind == "LinkError" and "ended at step 6 of 14" in told


class Two(Small):
    """Has an optimizer too many."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


def with_two(me: Me, folder: Path) -> Any:
    run = Run(me, folder, gradient_clip_val=None, accumulate=1)
    run.model = Two()
    return fault_of(run.fit)


def test_several_optimizers_are_refused(pair: Pair, tmp_path: Path) -> None:
    for kind, setting, _ in pair.results(with_two, tmp_path):
        assert (kind, setting) == ("ConfigError", "optimizers")


# ---------------------------------------------------------------------- loggers


def logged(me: Me, folder: Path) -> Any:
    board = CSVLogger(str(folder / f"board-{me.worker}"))
    run = Run(me, folder, "diloco", logger=board, log_every_n_steps=5)
    run.fit()
    return board.log_dir


def test_counters_go_to_the_trainers_loggers(pair: Pair, tmp_path: Path) -> None:
    folder, _ = pair.results(logged, tmp_path)
    names, *lines = (Path(folder) / "metrics.csv").read_text(encoding="utf-8").splitlines()
    told = [dict(zip(names.split(","), line.split(","), strict=True)) for line in lines]
    rounds = [(row["step"], row["atoll_rounds"]) for row in told if row["atoll_rounds"]]
    assert rounds == [("5", "1"), ("10", "2")]
