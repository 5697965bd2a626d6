"""One run from its settings to its model: set up, train, save, stop, resume, export."""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from atoll.config import RunConfig
from atoll.errors import ConfigError
from atoll.events import Jsonl, Resumed, Saved, Sink, read
from atoll.layout import BEST, CHECKPOINTS, METRICS, MODEL, RUN
from atoll.metrics import Metrics, TensorBoard, Trackio, WandB
from atoll.train import hub, tokens
from atoll.train.batches import Batches, HeldOut, held_out
from atoll.train.folder import RunFolder
from atoll.train.model import Decoder
from atoll.train.recipe import device_of, resolve
from atoll.train.tokens import TokenData
from atoll.train.trainer import Model, Trainer
from atoll.train.view import preparing, view
from atoll.units import count_text


def train(config: RunConfig, *, resume: bool = False) -> Path:
    """Train a run to its end and return its folder; with `resume`, continue where its last checkpoint is.

    Ctrl-C (and SIGTERM) saves, says how to go on, and exits with status 130.
    """
    folder = RunFolder(config)
    if folder.begun:
        if not resume:
            raise ConfigError(
                f"{folder.path} holds a run already: continue it with --resume, choose another name, or delete it"
            )
        config = folder.as_begun(config)
        if folder.finished:
            print(f"{folder.path} is finished already: its model is in {folder.path / MODEL}")
            return folder.path
    elif (folder.path / CHECKPOINTS).exists():
        raise ConfigError(
            f"{folder.path} holds checkpoints but no {RUN}, so it cannot be told what run they are of: "
            "put that file back, or choose another name"
        )
    with folder.locked(), ExitStack() as stack:
        device_of(config)  # before the work of reading text
        if config.threads:
            torch.set_num_threads(config.threads)
        interrupted = stack.enter_context(_interruptible())
        data = prepare(config)
        interrupted.wait_for_steps()
        model, config = start(config, data)
        trainer = Trainer(config, model, _batches(config, data), _held_out(config, data))
        saved = folder.last_checkpoint(config, data)
        if saved:
            folder.load(trainer, saved)
        others = stack.enter_context(closing(Metrics(list(_sinks(config, folder.path, trainer.steps)))))
        # Nothing of the folder has been touched so far: what is refused above leaves it as it was.
        _tell_what_may_surprise(config, data, trainer)
        folder.begin(config, trainer.parameters, data)
        log = stack.enter_context(closing(Jsonl(folder.path / METRICS, saved.metrics if saved else None)))
        seen = stack.enter_context(closing(view(config.log.view, past=read(folder.path / METRICS) if saved else ())))
        trainer.sink = Metrics([log, others, seen])
        if log.missing:
            print(f"warning: {folder.path / METRICS} has lost {log.missing} bytes of what happened", file=sys.stderr)
        if log.position() == 0:
            trainer.introduce()
        if saved:
            trainer.sink.write(Resumed(step=trainer.steps, seconds=trainer.seconds))
        _run(trainer, data, folder, log, interrupted)
    return folder.path


def _tell_what_may_surprise(config: RunConfig, data: TokenData, trainer: Trainer) -> None:
    """Say what a person would want to know before waiting for it."""
    if config.log.view == "none":
        return
    size = count_text(sum(len(file) for file in data.train))
    print(f"{size} training tokens in {data.documents} documents; this run reads them {trainer.epochs:.2g} times")
    steps, period = config.train.steps or 0, config.sync.period
    if config.sync.method not in ("none", "data-parallel") and period > steps:
        print(f"note: sync.period ({period}) is longer than the run ({steps} steps): workers meet only at its end")


def _run(trainer: Trainer, data: TokenData, folder: RunFolder, log: Jsonl, interrupted: "_Interrupts") -> None:
    settings = trainer.config.train
    assert settings.eval_every is not None and settings.save_every is not None  # resolved

    def save() -> None:
        trainer.check_finite()
        folder.save(trainer, log.position(), data)
        trainer.sink.write(Saved(step=trainer.steps, seconds=trainer.seconds))

    while not trainer.done and not interrupted:
        trainer.step()
        if trainer.steps % settings.eval_every == 0 and not trainer.done and trainer.evaluate():
            folder.export(trainer, data, BEST)
        if trainer.steps % settings.save_every == 0 or trainer.done:
            save()
    if not trainer.done:
        if trainer.steps % settings.save_every:
            save()
        trainer.end("interrupted")
        again = f"atoll train {shlex.quote(str(folder.path))} --resume"
        print(f"stopped at step {trainer.steps} and saved; continue with: {again}", flush=True)
        raise SystemExit(130)
    trainer.finish()
    if trainer.evaluate():
        folder.export(trainer, data, BEST)
    trainer.check_finite()
    folder.export(trainer, data, MODEL)
    trainer.end("finished")


# ---- set up


def prepare(config: RunConfig) -> TokenData:
    """The tokens of a run, built first if need be."""
    settings = config.data
    source = settings.source if isinstance(settings.source, str) else list(settings.source)
    with preparing(config.log.view) as tell:
        return tokens.prepare(
            source,
            field=settings.field,
            tokenizer=settings.tokenizer,
            vocabulary=settings.vocabulary,
            held_out=settings.held_out,
            split=settings.split,
            workers=config.sync.workers,
            cache=Path(settings.cache),
            limit=settings.limit,
            tell=tell,
        )


def start(config: RunConfig, data: TokenData) -> tuple[Model, RunConfig]:
    """The model that all workers start from, on its device, and the run with nothing left out."""
    model: Model
    vocabulary = data.tokenizer.vocabulary
    torch.manual_seed(config.seed)
    if config.model.hf is None:
        shape = config.shape(vocabulary)
        config = config.changed(**{f"model.{name}": value for name, value in asdict(shape).items()})
        model = Decoder(shape, generator=torch.Generator().manual_seed(config.seed))
        context: int | None = shape.context
    else:
        model = hub.load(config.model.hf, weights=config.model.hf_weights)
        context = model.context
        if model.vocabulary < vocabulary:
            raise ConfigError(
                f"data.tokenizer: has {vocabulary} tokens, but {config.model.hf} knows {model.vocabulary}: "
                "use the tokenizer.json that belongs to the model"
            )
    parameters = sum(p.numel() for p in model.parameters())
    return model.to(device_of(config)).train(), resolve(config, parameters=parameters, context=context)


def _batches(config: RunConfig, data: TokenData) -> Batches:
    assert config.train.sequence is not None
    return Batches(
        data.train,
        workers=config.sync.workers,
        batch=config.train.batch,
        sequence=config.train.sequence,
        seed=config.seed,
    )


def _held_out(config: RunConfig, data: TokenData) -> HeldOut:
    settings = config.train
    assert settings.sequence is not None
    batch = max(settings.batch // settings.accumulate, 1)
    return held_out(data.held_out, sequence=settings.sequence, tokens=settings.eval_tokens, batch=batch)


def _sinks(config: RunConfig, folder: Path, step: int) -> Iterator[Sink]:
    """Where events go besides the file and the screen; `step` is where a resumed run goes on, or 0."""
    settings, table = config.log, config.model_dump(mode="json")
    if settings.tensorboard:
        yield TensorBoard(folder / "tensorboard", step or None)
    if settings.wandb:
        yield WandB(settings.wandb, config.name, table, folder)
    if settings.trackio:
        yield Trackio(settings.trackio, config.name, table, resume=step > 0)


# ---- stopping


class _Interrupts(list[int]):
    """The signals to stop that have come: acted on at once until training begins, and then between two steps."""

    at_once = True

    def wait_for_steps(self) -> None:
        """From now on only fill the list. Python may lose an exception raised inside an import: then it comes here."""
        self.at_once = False
        if self:
            raise KeyboardInterrupt


@contextmanager
def _interruptible() -> Iterator[_Interrupts]:
    """Mind Ctrl-C and SIGTERM; once training has begun, the second one stops at once."""
    received = _Interrupts()

    def note(number: int, _frame: object) -> None:
        received.append(number)
        if received.at_once:
            raise KeyboardInterrupt
        for known, handler in before.items():
            signal.signal(known, handler)

    before: dict[int, Any] = {}
    with suppress(ValueError):  # not the main thread: whoever owns that one decides
        before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
