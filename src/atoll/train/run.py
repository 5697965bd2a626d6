"""One run in its folder (atoll.layout): set up, train, save, stop, resume, export."""

import json
import platform
import shlex
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from atoll import checkpoint
from atoll import config as run_config
from atoll.config import RunConfig
from atoll.disk import locked, write_whole
from atoll.errors import AtollError, CheckpointError, ConfigError
from atoll.events import End, Event, Jsonl, Resumed, Saved, Sink, read
from atoll.layout import ABOUT, BEST, CHECKPOINTS, METRICS, MODEL, RUN
from atoll.metrics import Metrics, TensorBoard, Trackio, WandB
from atoll.train import hub, tokens
from atoll.train.batches import Batches, HeldOut, held_out
from atoll.train.export import exists, export
from atoll.train.model import Decoder
from atoll.train.recipe import device_of, resolve
from atoll.train.tokens import TokenData
from atoll.train.trainer import Model, Trainer
from atoll.train.view import preparing, view

FREE_TO_CHANGE = ("out", "name", "log.", "train.keep", "train.save_every")
"""Settings that a resumed run may have otherwise, for they change nothing that is computed."""


def train(config: RunConfig, *, resume: bool = False) -> Path:
    """Train a run to its end and return its folder; with `resume`, continue where its last checkpoint is.

    Ctrl-C (and SIGTERM) saves, says how to go on, and exits with status 130.
    """
    folder = Path(config.out) / config.name
    with _only_run(folder), ExitStack() as stack:
        if (folder / RUN).exists():
            if not resume:
                raise ConfigError(
                    f"{folder} holds a run already: continue it with --resume, choose another name, or delete it"
                )
            config = _as_begun(folder, config)
        if _finished(folder):
            print(f"{folder} is finished already: its model is in {folder / MODEL}")
            return folder
        if config.threads:
            torch.set_num_threads(config.threads)
        data = prepare(config)
        model, config = start(config, data)
        _check_same_text(folder, data)
        saved = _last_checkpoint(folder)
        _write_down(folder, config, model, data)
        log = stack.enter_context(closing(Jsonl(folder / METRICS, saved["metrics"] if saved else None)))
        sink = stack.enter_context(closing(Metrics([log, *_sinks(config, folder, saved)])))
        trainer = Trainer(config, model, _batches(config, data), _held_out(config, data), sink)
        if saved:
            _load(trainer, saved["trainer"], folder)
            sink.write(Resumed(step=trainer.steps, seconds=trainer.seconds))
        else:
            trainer.introduce()
        _run(trainer, data, folder, log, sink)
    return folder


def _run(trainer: Trainer, data: TokenData, folder: Path, log: Jsonl, sink: Sink) -> None:
    settings = trainer.config.train
    assert settings.eval_every is not None and settings.save_every is not None  # resolved
    with _interruptible() as interrupted:
        while not trainer.done and not interrupted:
            trainer.step()
            if trainer.steps % settings.eval_every == 0 and not trainer.done and trainer.evaluate():
                _save_best(trainer, folder)
            if trainer.steps % settings.save_every == 0 or trainer.done:
                _save(trainer, folder, log, sink)
        if not trainer.done:
            if trainer.steps % settings.save_every:
                _save(trainer, folder, log, sink)
            trainer.end("interrupted")
            again = f"atoll train {shlex.quote(str(folder))} --resume"
            print(f"stopped at step {trainer.steps} and saved; continue with: {again}", flush=True)
            raise SystemExit(130)
    trainer.finish()
    if trainer.evaluate():
        _save_best(trainer, folder)
    with trainer.outer_model() as model:
        export(model, data.tokenizer, folder / MODEL)
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


def _sinks(config: RunConfig, folder: Path, saved: dict[str, Any] | None) -> Iterator[Sink]:
    past: list[Event] = read(folder / METRICS) if saved else []
    settings, table = config.log, config.model_dump(mode="json")
    if settings.tensorboard:
        yield TensorBoard(folder / "tensorboard", saved["trainer"]["steps"] if saved else None)
    if settings.wandb:
        yield WandB(settings.wandb, config.name, table, folder)
    if settings.trackio:
        yield Trackio(settings.trackio, config.name, table, resume=bool(saved))
    yield view(settings.view, past=past)


# ---- the folder


@contextmanager
def _only_run(folder: Path) -> Iterator[None]:
    """Hold the folder for one process; the lock dies with its holder."""

    def refuse() -> None:
        raise AtollError(f"{folder} is being trained by another process: wait for it, or choose another name")

    with ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked(folder / ".lock", refuse))
        except OSError as fault:
            raise ConfigError(f"out: the run's folder {folder} cannot be made: {fault.strerror}") from fault
        yield


def _finished(folder: Path) -> bool:
    if not exists(folder / MODEL) or not (folder / METRICS).exists():
        return False
    ends = [event for event in read(folder / METRICS) if isinstance(event, End)]
    return bool(ends) and ends[-1].outcome == "finished"


def _as_begun(folder: Path, config: RunConfig) -> RunConfig:
    """The run as it was begun, with what is free to change; refused if it is given other settings.

    What a run file leaves out, or leaves to the machine, stays as it was: other threads would give other bits.
    """
    before = run_config.load(folder / RUN)
    given = run_config.differences({"before": before, "now": config})
    changes = {key: now for key, (_, now) in given if now is not None and now != "auto"}
    refused = [
        f"{key} was {old!r}, is {now!r}"
        for key, (old, now) in given
        if key in changes and not key.startswith(FREE_TO_CHANGE)
    ]
    if refused:
        raise ConfigError(
            f"{folder} cannot be resumed with other settings: {'; '.join(refused)}; "
            f"leave them as in {folder / RUN}, or start another run with another name"
        )
    return before.changed(name=config.name, **changes)


def _check_same_text(folder: Path, data: TokenData) -> None:
    """Refuse to go on with other tokens than those a run has begun with."""
    if not (folder / RUN).exists():
        return
    began = json.loads((folder / ABOUT).read_text()).get("tokens")
    if began != data.folder.name:
        raise ConfigError(
            f"{folder} cannot be resumed: the text or the tokenizer of data.source has changed since it began; "
            "bring the old text back, or start another run with another name"
        )


def _last_checkpoint(folder: Path) -> dict[str, Any] | None:
    root = folder / CHECKPOINTS
    if not root.exists() or not any(root.glob("step-*")):
        return None
    with warnings.catch_warnings(record=True) as passed_over:
        warnings.simplefilter("always")
        _, state = checkpoint.load(root)
    for warning in passed_over:
        print(f"warning: {warning.message}", file=sys.stderr)
    return state


def _write_down(folder: Path, config: RunConfig, model: Model, data: TokenData) -> None:
    """Keep what the run is made of; nothing is written over when it is resumed."""
    if (folder / RUN).exists():
        return
    about = {
        "versions": {"python": platform.python_version(), **checkpoint.versions()},
        "seed": config.seed,
        "device": torch.cuda.get_device_name(config.device) if config.device.startswith("cuda") else platform.machine(),
        "threads": config.threads,
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": data.tokenizer.vocabulary,
        "documents": data.documents,
        "tokens": data.folder.name,
        "training_tokens": sum(len(file) for file in data.train),
        "command": shlex.join(sys.argv),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    write_whole(folder / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
    write_whole(folder / RUN, config.to_toml().encode())  # last: its presence says that the run has begun


def _save(trainer: Trainer, folder: Path, log: Jsonl, sink: Sink) -> None:
    state = {"trainer": trainer.state_dict(), "metrics": log.position()}
    checkpoint.save(folder / CHECKPOINTS, trainer.steps, state, keep=trainer.config.train.keep)
    sink.write(Saved(step=trainer.steps, seconds=trainer.seconds))


def _save_best(trainer: Trainer, folder: Path) -> None:
    with trainer.outer_model() as model:
        checkpoint.save(folder / BEST, trainer.steps, {"model": model.state_dict(), "loss": trainer.best}, keep=1)


def _load(trainer: Trainer, state: dict[str, Any], folder: Path) -> None:
    try:
        trainer.load_state_dict(state)
    except (RuntimeError, KeyError, ValueError, TypeError) as fault:
        if isinstance(fault, AtollError):
            raise
        problem = " ".join(str(fault).split())[:300]
        raise CheckpointError(f"the checkpoint in {folder / CHECKPOINTS} is not of this model: {problem}") from fault


# ---- stopping


@contextmanager
def _interruptible() -> Iterator[list[int]]:
    """The first Ctrl-C or SIGTERM only fills the list, to be asked between two steps; the second one stops at once."""
    received: list[int] = []

    def note(number: int, _frame: object) -> None:
        received.append(number)
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
