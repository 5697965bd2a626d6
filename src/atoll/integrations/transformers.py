"""Makes a worker of a script with a Hugging Face `Trainer`, and so of TRL's trainers: `AtollCallback`.

    checkpoint-N/
      model.safetensors ...    the outer parameters, the same on every worker: evaluated, best, and for use
      optimizer.pt ...         the Trainer's own state
      atoll/rank-0/            the worker's own parameters and the outer state, to resume from

Three things have no event: the moment before an evaluation, the choice of a checkpoint to resume from, and an
exception. So the callback wraps `train`, `evaluate`, `save_model` and `log` of the Trainer that it belongs to.
"""

import re
import secrets
import shutil
import sys
from collections.abc import Callable
from functools import wraps
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any, Unpack

from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState
from transformers.trainer_utils import TrainOutput

from atoll import checkpoint
from atoll.errors import ConfigError
from atoll.integrations.driver import Driver, LoopOptions, check_alike
from atoll.link.base import Link
from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Sync

_CHECKPOINT = re.compile(r"checkpoint-([0-9]+)")


class AtollCallback(TrainerCallback):
    """Keeps a Trainer's model in step with the other workers' copies of it.

    Every worker runs the same script with its own `link`, its own data and its own `output_dir`, and passes
    `callbacks=[AtollCallback(sync, link)]`. An optimizer step is an inner step. Evaluations, checkpoints' model files
    and the final model are the outer parameters; `train(resume_from_checkpoint=True)` continues from the newest step
    that all workers have, to the bit. Counters go to the Trainer's loggers as `atoll_...`. The link is closed when
    training ends.

    Args:
        sync: An algorithm: `DiLoCo(...)`, `Streaming(...)`, `Eager(...)` or another preset.
        link: This worker's end of a link, made by `atoll.connect(...)`.
        **options: `weight`, `guard`, `offload` and `observer` of `OuterLoop`.

    Raises:
        ConfigError: A setting of the Trainer, or the workers' settings together, cannot work; the message says why.
    """

    def __init__(self, sync: Sync, link: Link, **options: Unpack[LoopOptions]) -> None:
        self._driver = Driver(sync, link, options)
        self._trainer: Any = None
        self._resumed_from: Path | None = None
        self._stop_agreed = False

    @property
    def outer(self) -> OuterLoop | None:
        """The outer loop, from the beginning of training on."""
        return self._driver.outer

    def attach(self, trainer: Trainer) -> None:
        """Belong to a Trainer; needed before `train()` only where the callback was not given to its constructor."""
        if self._trainer is not None:
            if self._trainer is not trainer:
                raise ConfigError("an AtollCallback belongs to one Trainer: make another for the other", setting="link")
            return
        self._trainer = trainer
        vars(trainer).update(
            train=self._telling_why(trainer.train),
            evaluate=self._on_the_anchor(trainer.evaluate),
            save_model=self._with_outer_state(trainer.save_model),
            log=self._with_counters(trainer.log),
        )

    # ------------------------------------------------------------------ the Trainer's events

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the Trainer that is being made, which events do not carry."""
        frame: FrameType | None = sys._getframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is not None:
            self.attach(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Make the outer loop around the model as it was made or restored, and meet the other workers."""
        if self._trainer is None:
            problem = "AtollCallback does not know its Trainer"
            advice = "give it to Trainer(callbacks=[...]), or call callback.attach(trainer) before trainer.train()"
            raise ConfigError(f"{problem}: {advice}", setting="callbacks")
        saved = None
        if self._resumed_from is not None:
            _, saved = checkpoint.load(self._state_folder(self._resumed_from), state.global_step)
        self._driver.start(model, saved)
        if self._is_own(self._resumed_from) and args.should_save:  # not before all workers have loaded it
            _drop_after(Path(args.output_dir), state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count an optimizer step, also one that a loss scaler skipped: the schedule is that of all workers."""
        self._driver.step(state.global_step, state.max_steps, keep=_resumable(args))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the other workers; the model is the finished one, or the best if the Trainer has loaded it."""
        if self._driver.running:
            if not self._stop_agreed:
                self._driver.refuse_early_end(state.global_step, state.max_steps)
            if not (args.load_best_model_at_end and state.best_model_checkpoint):  # that is an anchor, the same for all
                self._driver.finish()
        self._driver.close()

    # ------------------------------------------------------------------ around the Trainer's methods

    def _telling_why(self, train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def train_as_worker(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            try:
                resume = self._prepare(resume_from_checkpoint)
                if self._has_ended():
                    return self._end_again()
                return train(resume, *args, **kwargs)
            except BaseException as error:
                self._driver.close(error)
                raise

        return train_as_worker

    def _on_the_anchor(self, evaluate: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(evaluate)
        def evaluate_anchor(*args: Any, **kwargs: Any) -> Any:
            if self._driver.lent:  # one of several data sets
                return evaluate(*args, **kwargs)
            with self._driver.anchor():
                metrics = evaluate(*args, **kwargs)
            if self._driver.running:
                self._agree_to_stop()
            return metrics

        return evaluate_anchor

    def _with_outer_state(self, save_model: Callable[..., None]) -> Callable[..., None]:
        @wraps(save_model)
        def save_anchor(output_dir: str | None = None, _internal_call: bool = False) -> None:
            trainer = self._trainer
            if _internal_call and output_dir and self.outer is not None and not trainer.args.save_only_model:
                folder = self._state_folder(Path(output_dir))  # before the Trainer's last file: all of it or nothing
                checkpoint.save(folder, trainer.state.global_step, self._driver.resumable(), keep=1)
            with self._driver.anchor():
                save_model(output_dir, _internal_call=_internal_call)

        return save_anchor

    def _with_counters(self, log: Callable[..., None]) -> Callable[..., None]:
        @wraps(log)
        def log_counters(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if self.outer is not None and "loss" in logs:
                logs.update(self._driver.counted())
            log(logs, *args, **kwargs)

        return log_counters

    def _agree_to_stop(self) -> None:
        """Stop early only where all workers do; they are asked if a callback watches evaluations for that."""
        trainer = self._trainer
        if any(isinstance(callback, EarlyStoppingCallback) for callback in trainer.callback_handler.callbacks):
            stop = trainer.control.should_training_stop
            self._stop_agreed = self._driver.agree_to_stop(trainer.state.global_step, stop)

    # ------------------------------------------------------------------ before training

    def _prepare(self, resume: Any) -> Any:
        """Refuse what cannot work, compare it with the other workers, and return the checkpoint to resume from."""
        driver, args = self._driver, self._trainer.args
        driver.meet_ranks()
        _refuse_settings(args, driver)
        root, saved = Path(args.output_dir), driver.on_all_ranks(self._saved_steps())
        fresh = resume is None or resume is False
        if fresh and saved and args.save_strategy != "no":
            problem = f"output_dir {str(root)!r} has checkpoints of an earlier run, the newest of step {saved[-1]}"
            advice = "resume with train(resume_from_checkpoint=True), or give the new run a folder of its own"
            raise ConfigError(f"{problem}: {advice}", setting="output_dir", value=str(root))
        mine = {
            "max_steps": args.max_steps,
            "data_seed": args.seed if args.data_seed is None else args.data_seed,
            "resume": "no" if fresh else str(_step_of(resume)),
            "saved": saved,
        }
        told = driver.gather("trainer", mine)
        _compare(told)
        if fresh:
            return resume
        step = _step_of(resume)
        if step is None:
            step = checkpoint.common_step({f"worker {worker}": said["saved"] for worker, said in told.items()})
            if step is None:
                _refuse_foreign(root)
                return resume  # the Trainer says that there is none
            resume = str(root / f"checkpoint-{step}")
        self._resumed_from = Path(resume)
        if self._is_own(self._resumed_from) and step not in saved:
            problem = f"resume_from_checkpoint: {resume} is not a whole checkpoint"
            advice = f"{root} has steps {saved}; resume_from_checkpoint=True takes the newest that all workers have"
            raise ConfigError(f"{problem}: {advice}", setting="resume_from_checkpoint", value=resume)
        return resume

    def _is_own(self, folder: Path | None) -> bool:
        """Return whether a checkpoint is one of this run's."""
        return folder is not None and folder.parent.resolve() == Path(self._trainer.args.output_dir).resolve()

    def _has_ended(self) -> bool:
        """Whether the checkpoint to resume from is of the last step."""
        resumed = self._resumed_from
        return resumed is not None and (_step_of(str(resumed)) or 0) >= self._trainer.args.max_steps

    def _end_again(self) -> TrainOutput:
        """Load the model of a run that has ended; the Trainer would make one more step."""
        trainer, resumed = self._trainer, self._resumed_from
        assert resumed is not None
        trainer._load_from_checkpoint(str(resumed))
        trainer.state = TrainerState.load_from_json(str(resumed / "trainer_state.json"))
        if trainer.args.load_best_model_at_end and trainer.state.best_model_checkpoint:
            trainer._load_best_model()
        self._driver.close()
        return TrainOutput(trainer.state.global_step, 0.0, {})

    def _saved_steps(self) -> list[int]:
        """Return the steps of whole checkpoints of this worker, ascending."""
        found = []
        for folder, step in _checkpoints(Path(self._trainer.args.output_dir)):
            # The Trainer writes this file last.
            if _has_trainer_state(folder) and step in checkpoint.steps(self._state_folder(folder)):
                found.append(step)
        return sorted(found)

    def _state_folder(self, folder: Path) -> Path:
        return folder / "atoll" / f"rank-{self._trainer.args.process_index}"


def _resumable(args: Any) -> bool:
    return args.save_strategy != "no" and not args.save_only_model


def _refuse_settings(args: Any, driver: Driver) -> None:
    """Raise a ConfigError for settings of one worker that cannot work."""
    if args.max_steps <= 0:
        problem = f"max_steps must be set, got {args.max_steps}"
        why = "workers' epochs differ in length, and all must make the same number of steps"
        advice = "set TrainingArguments(max_steps=...), the same on all workers"
        raise ConfigError(f"{problem}: {why}; {advice}", setting="max_steps", value=args.max_steps)
    if args.auto_find_batch_size:
        problem = "auto_find_batch_size must be off: a worker that begins again is behind the others"
        raise ConfigError(f"{problem}; set per_device_train_batch_size", setting="auto_find_batch_size", value=True)
    limit = args.save_total_limit
    if limit is None or not _resumable(args) or driver.link.workers == 1:
        return
    interval = args.save_steps if args.save_steps >= 1 else ceil(args.max_steps * args.save_steps)
    between = ceil(driver.sync.ahead / interval) if args.save_strategy == "steps" else 1
    least = 1 + between + (args.metric_for_best_model is not None)  # the best one stays too
    if limit < least:
        problem = f"save_total_limit must be at least {least}, got {limit}"
        why = f"a worker can be {driver.sync.ahead} steps ahead of another, which resumes from an older checkpoint"
        raise ConfigError(f"{problem}: {why}", setting="save_total_limit", value=limit)


def _compare(told: dict[int, dict[str, Any]]) -> None:
    """Raise a ConfigError if the workers' settings do not fit together."""
    seeds: dict[int, int] = {}
    for worker, said in told.items():
        if (other := seeds.setdefault(said["data_seed"], worker)) != worker:
            problem = f"data_seed must differ between workers, got {said['data_seed']} on workers {other} and {worker}"
            advice = "with the same data they would see the same batches; set TrainingArguments(data_seed=link.worker)"
            raise ConfigError(f"{problem}: {advice}", setting="data_seed", value=said["data_seed"])
    check_alike(told, "max_steps", "all workers must make the same number of steps: set the same on all")
    check_alike(told, "resume", "resume all workers with resume_from_checkpoint=True, or from the same step, or none")


def _step_of(resume: Any) -> int | None:
    """Return the step of a checkpoint's path; None for True, the newest that all have."""
    if resume is True:
        return None
    if (match := _CHECKPOINT.fullmatch(Path(resume).name)) is None:
        problem = f"resume_from_checkpoint must be True or the path of a checkpoint-N, got {resume!r}"
        raise ConfigError(problem, setting="resume_from_checkpoint", value=resume)
    return int(match[1])


def _checkpoints(root: Path) -> list[tuple[Path, int]]:
    found = [(folder, _CHECKPOINT.fullmatch(folder.name)) for folder in root.glob("checkpoint-*") if folder.is_dir()]
    return [(folder, int(match[1])) for folder, match in found if match]


def _drop_after(root: Path, step: int) -> None:
    """Delete the checkpoints after a step: the run does not continue from them."""
    for folder, number in _checkpoints(root):
        if number > step:  # renamed first: killed half-way, it must not look like a checkpoint
            shutil.rmtree(folder.rename(root / f".dropped-{number}-{secrets.token_hex(4)}"))
    for leftover in root.glob(".dropped-*"):
        shutil.rmtree(leftover, ignore_errors=True)


def _has_trainer_state(folder: Path) -> bool:
    """Return whether a checkpoint has the file that the Trainer writes last, whole."""
    try:
        return bool(TrainerState.load_from_json(str(folder / "trainer_state.json")))
    except (OSError, ValueError, TypeError):
        return False


def _refuse_foreign(root: Path) -> None:
    """Raise a ConfigError if there are checkpoints, but none to resume from."""
    if found := _checkpoints(root):
        problem = f"{root} has checkpoints ({len(found)}), but none that a worker can resume from"
        why = "their folder atoll/ is missing: they were saved with save_only_model, or without this callback"
        raise ConfigError(f"{problem}: {why}; start a new run in another output_dir", setting="resume_from_checkpoint")
