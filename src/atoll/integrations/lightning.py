"""Makes a worker of a script with a Lightning `Trainer`: `AtollCallback`.

A checkpoint's `state_dict` holds the outer parameters, which were validated and are the same on every worker; the
callback's state in it holds the worker's own parameters, the outer state and the place in the training data.

Lightning resumes in the middle of an epoch only with a loader that saves its own state. For any other, the callback
draws the epoch's order again, from the random numbers that it was drawn from, and passes over what has been trained on.
Validation leaves the random numbers of training as they were: a resumed run may leave out one that came after a save.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from math import ceil
from typing import Any, Unpack

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, WeightAveraging

from atoll.checkpoint import rng_state, set_rng_state
from atoll.errors import ConfigError
from atoll.integrations.driver import Driver, LoopOptions, check_alike
from atoll.link.base import Link
from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Sync


class AtollCallback(Callback):
    """Keeps a LightningModule in step with the other workers' copies of it.

    Every worker runs the same script with its own `link`, its own data and its own folder of checkpoints, and passes
    `callbacks=[AtollCallback(sync, link)]`. It makes an inner step when `trainer.global_step` has grown. Validation,
    checkpoints' `state_dict` and the final model are the outer parameters; `fit(ckpt_path=...)` with the checkpoint
    of the same step on all workers continues to the bit. Counters go to the trainer's loggers as `atoll_...`. The link
    is closed when training ends.

    Args:
        sync: An algorithm: `DiLoCo(...)`, `Streaming(...)`, `Eager(...)` or another preset.
        link: This worker's end of a link, made by `atoll.connect(...)`.
        **options: `weight`, `guard`, `offload` and `observer` of `OuterLoop`.

    Raises:
        ConfigError: A setting of the trainer, or the workers' settings together, cannot work; the message says why.
    """

    def __init__(self, sync: Sync, link: Link, **options: Unpack[LoopOptions]) -> None:
        self._driver = Driver(sync, link, options)
        self._place = DataPlace()
        self._lent = ExitStack()
        self._saved: Mapping[str, Any] | None = None
        self._judged = False
        self._stop_agreed = False

    @property
    def outer(self) -> OuterLoop | None:
        """The outer loop, from the beginning of training on."""
        return self._driver.outer

    # ------------------------------------------------------------------ training

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse what cannot work, and compare it with the other workers."""
        self._driver.meet_ranks()
        _refuse_settings(trainer)
        _warn_of_few_checkpoints(trainer, self._driver)
        steps = 0 if self._saved is None else self._saved["outer"]["steps"]
        told = self._driver.gather("trainer", {"max_steps": trainer.max_steps, "ckpt_path": f"step {steps}"})
        check_alike(told, "max_steps", "all workers must make the same number of steps: set the same on all")
        check_alike(told, "ckpt_path", "resume all workers from checkpoints of the same step, or none")
        self._place.begin_epoch()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the outer loop around the model as it was made or restored, and meet the other workers."""
        if len(trainer.optimizers) > 1:
            problem = f"one optimizer is allowed, got {len(trainer.optimizers)}: each of them counts as a step"
            advice = "give one optimizer groups of parameters, or step them as one: docs/trainers.md#muon"
            raise ConfigError(f"{problem}; {advice}", setting="optimizers")
        saved, self._saved = self._saved, None
        self._driver.start(pl_module, saved)
        if saved is not None:
            self._place.restore(trainer, saved["data"])
        if trainer.global_step >= trainer.max_steps:
            self._driver.finish(keep=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the random numbers that the order of an epoch is drawn from, right before it is."""
        if trainer.current_epoch > 0:  # the first was drawn before training
            self._place.begin_epoch()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Compare that no worker has stopped early."""
        self._place.begin_batch()
        self._agree_to_stop(trainer, stop=False)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Make an inner step if the optimizer has, which it does not with every batch."""
        self._place.end_batch(batch_idx, trainer)
        outer = self.outer
        assert outer is not None
        if trainer.global_step == outer.steps:
            return
        keep = bool(trainer.checkpoint_callbacks)
        self._driver.step(trainer.global_step, trainer.max_steps, keep=keep)
        if trainer.global_step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            for logger in trainer.loggers:
                logger.log_metrics(self._driver.counted(), step=trainer.global_step)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish, if training ends early and all agree, and leave the other workers."""
        if self._driver.running:
            self._agree_to_stop(trainer, stop=True)
            if not self._stop_agreed:
                self._driver.refuse_early_end(trainer.global_step, trainer.max_steps)
            self._driver.finish(keep=bool(trainer.checkpoint_callbacks))
        self._driver.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Give the worker's own parameters back, and tell the other workers why this one leaves."""
        self._lent.close()
        self._driver.close(exception)

    # ------------------------------------------------------------------ validation

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Lend the outer parameters; not in the sanity check, which comes before they exist."""
        self._lent.enter_context(self._driver.anchor())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Give the worker's own parameters back."""
        self._lent.close()
        if self._driver.outer is not None:
            self._judged = True
            self._place.end_validation()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that a callback may have decided to stop."""
        self._judged = True

    def _agree_to_stop(self, trainer: Trainer, *, stop: bool) -> None:
        """Stop early only where all workers do; they are asked if a callback watches a metric for that."""
        judged, self._judged = self._judged, False
        if judged and self._driver.running and trainer.early_stopping_callbacks:
            self._stop_agreed = self._driver.agree_to_stop(trainer.global_step, stop)

    # ------------------------------------------------------------------ checkpoints

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save the outer parameters as the model: they are what was validated."""
        if self._driver.running:
            with self._driver.anchor():
                held = trainer.strategy.lightning_module_state_dict()
                checkpoint["state_dict"] = {name: value.detach().clone() for name, value in held.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the worker's own parameters, the outer state and the place in the data."""
        if self.outer is None:
            return {}
        return {**self._driver.resumable(), "data": self._place.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; it is restored when training begins."""
        self._saved = state_dict or None


class DataPlace:
    """Knows the place in a shuffled epoch: the random numbers it was drawn from, and how many batches were taken."""

    def __init__(self) -> None:
        self.batches = 0
        self.drawn_from = rng_state()
        self.now = self.drawn_from
        self._next: dict[str, Any] | None = None  # of the first batch after `restore`

    def begin_epoch(self) -> None:
        """Note the random numbers before the loader draws from them, unless `restore` has let it."""
        if self._next is None:
            self.batches, self.drawn_from = 0, rng_state()
            self.now = self.drawn_from

    def begin_batch(self) -> None:
        """Go on with the random numbers of training: since `restore`, Lightning may have drawn some for validation."""
        if self._next is not None:
            set_rng_state(self._next)
            self._next = None

    def end_batch(self, batch_idx: int, trainer: Trainer) -> None:
        """Note a batch; the last of an epoch is the beginning of the next."""
        self.now = rng_state()
        self.batches = int((batch_idx + 1) % trainer.num_training_batches)

    def end_validation(self) -> None:
        """Take the random numbers back that validation has drawn."""
        set_rng_state(self.now)

    def state_dict(self) -> dict[str, Any]:
        """Return what `restore` needs."""
        return {"batches": self.batches, "drawn_from": self.drawn_from, "now": self.now}

    def restore(self, trainer: Trainer, saved: Mapping[str, Any]) -> None:
        """Draw the epoch's order again and pass over the batches that were taken, unless the loader has done so."""
        self.batches, self.now = saved["batches"], saved["now"]
        self.drawn_from = saved["drawn_from"] if self.batches else self.now
        self._next = self.now
        fetcher, loaders = trainer.fit_loop._data_fetcher, trainer.fit_loop._combined_loader
        assert fetcher is not None and loaders is not None
        if all(hasattr(loader, "load_state_dict") for loader in loaders.flattened):
            return
        set_rng_state(self.drawn_from)
        iter(fetcher)  # makes a new iterator inside it
        assert fetcher.iterator is not None
        for _ in range(self.batches):
            next(fetcher)
        fetcher.fetched -= self.batches  # the epoch's loop adds them
        if not self.batches:  # the order is drawn with the first batch
            fetcher.iterator = _put_back(next(fetcher.iterator), fetcher.iterator)
            self._next = rng_state()


def _put_back(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """Yield a batch that was taken, then the rest; without iter(), which starts Lightning's loaders anew."""
    yield first
    with suppress(StopIteration):
        while True:
            yield next(rest)


def _warn_of_few_checkpoints(trainer: Trainer, driver: Driver) -> None:
    """Warn if workers may have no checkpoint in common after one of them was killed."""
    savers = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint) and one.save_top_k]
    if driver.link.workers == 1 or not savers:
        return
    needed = [1 + ceil(driver.sync.ahead / (one._every_n_train_steps or driver.sync.ahead)) for one in savers]
    if not any(one.save_top_k == -1 or one.save_top_k >= least for one, least in zip(savers, needed, strict=True)):
        why = f"a worker can be {driver.sync.ahead} steps ahead of another, which resumes from an older checkpoint"
        warnings.warn(
            f"ModelCheckpoint keeps {savers[0].save_top_k} of {needed[0]} checkpoints that a resume may need: {why}; "
            "set save_top_k=-1",
            stacklevel=2,
        )


def _refuse_settings(trainer: Trainer) -> None:
    """Raise a ConfigError for settings of one worker that cannot work."""
    if trainer.max_steps < 0:
        problem = f"max_steps must be set, got {trainer.max_steps}"
        why = "workers' epochs differ in length, and all must make the same number of steps"
        raise ConfigError(
            f"{problem}: {why}; set Trainer(max_steps=...), the same on all workers",
            setting="max_steps",
            value=trainer.max_steps,
        )
    if averaging := next((one for one in trainer.callbacks if isinstance(one, WeightAveraging)), None):  # type: ignore[attr-defined]
        problem = f"{type(averaging).__name__} must be left out: it validates and saves its own average of each worker"
        raise ConfigError(f"{problem}; the outer parameters are an average already", setting="callbacks")
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint) and callback.save_weights_only:
            problem = "save_weights_only must be off: Lightning would save the worker's own parameters"
            advice = "whole checkpoints have the outer parameters as their state_dict"
            raise ConfigError(f"{problem}; {advice}", setting="save_weights_only", value=True)
