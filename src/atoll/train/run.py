"""One run from its settings to its model: set up, train, save, stop, resume, export."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

import torch

from atoll._util.signals import Interrupts, interruptible
from atoll._util.units import count_text
from atoll.errors import AtollError, ConfigError
from atoll.link.base import Link
from atoll.link.net.link import DistLink
from atoll.link.net.seat import Seat
from atoll.runs.events import Jsonl, Resumed, Saved, Sink, read
from atoll.runs.layout import BEST, CHECKPOINTS, METRICS, MODEL, RUN, worker_folder
from atoll.runs.sinks import Metrics, TensorBoard, Trackio, WandB
from atoll.settings.config import RunConfig
from atoll.train.data import tokens
from atoll.train.data.batches import Batches, HeldOut, held_out
from atoll.train.data.tokens import TokenData
from atoll.train.folder import RunFolder
from atoll.train.model import hub
from atoll.train.model.decoder import Decoder
from atoll.train.progress.plan_check import plan_check
from atoll.train.progress.view import preparing, view
from atoll.train.ranks.cpu_threads import share_cores
from atoll.train.ranks.site import (
    agree_on_data,
    agree_on_settings,
    all_finished,
    links_of,
    meet,
    resumable,
    seat_of,
    step_to_resume,
)
from atoll.train.ranks.stopping import Stop, Stopped
from atoll.train.ranks.worker_ranks import Model, Team, team_of
from atoll.train.step.recipe import check_room, device_of, resolve
from atoll.train.trainer import Trainer


def train(config: RunConfig, *, worker: int | None = None, resume: bool = False) -> Path:
    """Train a run to its end and return its folder; with `resume`, continue where its last checkpoint is.

    All workers train in this process, or `worker` alone, whose folder is returned then. Ctrl-C (and SIGTERM) saves,
    says how to go on, and exits with status 130. Started by torchrun, this process is one rank of a worker.
    """
    seat = seat_of(config, worker)
    with team_of(config, seat) as team:
        return _train(team.settled(config), seat, team, resume)


def _train(config: RunConfig, seat: Seat | None, team: Team, resume: bool) -> Path:
    folder, given = RunFolder(config, seat), config
    folder.refuse_mixture()
    if folder.begun:
        if not resume:
            raise ConfigError(
                f"{folder.path} holds a run already: continue it with --resume, choose another name, or delete it"
            )
        config = folder.as_begun(config)
    elif (folder.path / CHECKPOINTS).exists():
        raise ConfigError(
            f"{folder.path} holds checkpoints but no {RUN}, so it cannot be told what run they are of: "
            "put that file back, or choose another name"
        )
    finished = team.first(lambda: folder.finished)
    if finished and not folder.of_many:
        return _done_before(folder, team)
    with folder.locked(), ExitStack() as stack:
        device_of(config)  # before the work of reading text
        if config.threads:
            torch.set_num_threads(config.threads)
        interrupted = stack.enter_context(interruptible())
        links, mate = links_of(config, seat, team)
        if mate is not None:
            mate.heed = interrupted.heed
        stack.enter_context(_leaving(links))
        stack.enter_context(team.guarded())
        if folder.of_many:
            _check_data(config)  # before the others are waited for
        if team.settle(lambda: all_finished(mate, finished)):
            return _done_before(folder, team)
        team.settle(lambda: agree_on_settings(mate, given))  # not as begun: where nothing has, much is left out
        _tell(config, team.settle(lambda: share_cores(mate, config, team)))  # before the number of threads is settled
        data = prepare(config)
        model, config = start(config, data)
        team.seed(config.seed)
        trainer = Trainer(config, model, _batches(config, data), _held_out(config, data, team.ranks), links, team)
        team.settle(lambda: agree_on_data(mate, data))
        saved = folder.last_checkpoint(config, data, step_to_resume(team, mate, folder.checkpoints()))
        if saved:
            folder.load(trainer, saved)
            folder.forget_after(trainer.steps)
        trainer.join()
        interrupted.wait_for_steps()  # not before: workers that never come may be waited for until here
        others = stack.enter_context(closing(Metrics(list(_sinks(config, folder.path, trainer.steps, seat)))))
        stack.enter_context(_leaving(links))  # before loggers close, which may take minutes
        # Nothing of the folder has been touched so far: what is refused above leaves it as it was.
        _tell_what_may_surprise(config, data, trainer)
        folder.begin(config, trainer.parameters, data)
        log = _open_log(trainer, folder, others, saved.metrics if saved else None, stack) if team.leads else None
        if saved is None and folder.of_many:  # nobody trains on before all have a state that they can come back to
            folder.save(trainer, log.position() if log else 0, data)
            _meet_all("begun", mate, team, interrupted)
        stop = Stop(interrupted, mate, lambda: trainer.steps, team)
        with resumable(mate):
            _run(trainer, data, folder, log, stop)
            _meet_all("finished", mate, team, interrupted)  # who has would not come back for one that has not
        trainer.end("finished")
    if team.leads and (said := plan_check(config, trainer.account)):
        _tell(config, said)
    return folder.path


def _write_down_the_last_rounds(trainer: Trainer) -> None:
    """Of a run that ends too soon; nothing that goes wrong here may hide why it does."""
    with suppress(AtollError, OSError, RuntimeError):
        trainer.account.settle()


def _meet_all(place: str, mate: DistLink | None, team: Team, interrupted: Interrupts) -> None:
    """Wait for the other workers; nothing is computed meanwhile, so Ctrl-C need not wait for the end of a step."""
    with interrupted.heeded_at_once():
        team.settle(lambda: meet(mate, place))


def _done_before(folder: RunFolder, team: Team) -> Path:
    if team.leads:
        print(f"{folder.path} is finished already: its model is in {folder.path / MODEL}")
    return folder.path


def _open_log(trainer: Trainer, folder: RunFolder, others: Sink, length: int | None, stack: ExitStack) -> Jsonl:
    """Let the trainer's events go to the file, to the screen and to others; resumed, the file had `length` bytes."""
    resumed = length is not None
    log = stack.enter_context(closing(Jsonl(folder.path / METRICS, length)))
    past = read(folder.path / METRICS) if resumed else ()
    seen = stack.enter_context(closing(view(trainer.config.log.view, past=past)))
    trainer.account.sink = Metrics([log, others, seen])
    if trainer.team.whole:  # else it is a question to all ranks, of which some may have failed
        stack.callback(_write_down_the_last_rounds, trainer)
    if log.missing:
        print(f"warning: {folder.path / METRICS} has lost {log.missing} bytes of what happened", file=sys.stderr)
    if log.position() == 0:
        trainer.introduce()
    if resumed:
        trainer.account.sink.write(Resumed(step=trainer.steps, seconds=trainer.seconds))
    return log


def _tell_what_may_surprise(config: RunConfig, data: TokenData, trainer: Trainer) -> None:
    """Say what a person would want to know before waiting for it."""
    size = count_text(sum(len(file) for file in data.train))
    how_often = f"this run reads them {trainer.epochs:.2g} times"
    _tell(config, f"{size} training tokens in {data.documents} documents; {how_often}")
    steps, period = config.train.steps or 0, config.sync.period
    if config.sync.method not in ("none", "data-parallel") and period > steps:
        why = f"sync.period ({period}) is longer than the run ({steps} steps)"
        _tell(config, f"note: {why}: workers meet only at its end")


def _tell(config: RunConfig, line: str | None) -> None:
    if line is not None and config.log.view != "none":
        print(line, flush=True)


def _run(trainer: Trainer, data: TokenData, folder: RunFolder, log: Jsonl | None, stop: Stop) -> None:
    settings = trainer.config.train
    assert settings.eval_every is not None and settings.save_every is not None  # resolved

    def save() -> None:
        trainer.check_finite()
        trainer.account.settle()
        folder.save(trainer, log.position() if log else 0, data)
        trainer.account.sink.write(Saved(step=trainer.steps, seconds=trainer.seconds))

    while not trainer.done and not stop.due():
        trainer.step()
        evaluates = trainer.evaluates and trainer.steps % settings.eval_every == 0 and not trainer.done
        if evaluates and trainer.evaluate():
            folder.export(trainer, data, BEST)
        if trainer.steps % settings.save_every == 0 or trainer.done:
            save()
    if not trainer.done:
        if trainer.steps % settings.save_every:
            save()
        trainer.end("interrupted")
        if trainer.team.leads:
            print(f"stopped at step {trainer.steps} and saved; continue with: {stop.again(folder.path)}", flush=True)
        raise Stopped(together=stop.together)
    trainer.finish()
    if trainer.evaluates and trainer.evaluate():
        folder.export(trainer, data, BEST)
    trainer.check_finite()
    folder.export(trainer, data, MODEL)


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


def _check_data(config: RunConfig) -> None:
    settings = config.data
    tokens.check_there(
        settings.source if isinstance(settings.source, str) else list(settings.source),
        field=settings.field,
        limit=settings.limit,
        tokenizer=settings.tokenizer,
        vocabulary=settings.vocabulary,
    )


def start(config: RunConfig, data: TokenData) -> tuple[Model, RunConfig]:
    """The model that all workers start from, on its device, and the run with nothing left out."""
    model: Model
    vocabulary = data.tokenizer.vocabulary
    torch.manual_seed(config.seed)
    if config.model.hf is None:
        shape = config.shape(vocabulary)
        check_room(config, shape)
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
        device=config.device,
    )


def _held_out(config: RunConfig, data: TokenData, ranks: int) -> HeldOut:
    settings = config.train
    assert settings.sequence is not None
    batch = max(settings.batch // (settings.accumulate * ranks), 1)
    return held_out(data.held_out, sequence=settings.sequence, tokens=settings.eval_tokens, batch=batch)


def _sinks(config: RunConfig, folder: Path, step: int, seat: Seat | None) -> Iterator[Sink]:
    """Where events go besides the file and the screen; `step` is where a resumed run goes on, or 0."""
    settings, table = config.log, config.model_dump(mode="json")
    name = config.name if seat is None else f"{config.name}-{worker_folder(seat.worker)}"
    if settings.tensorboard:
        yield TensorBoard(folder / "tensorboard", step or None)
    if settings.wandb:
        yield WandB(settings.wandb, name, table, folder)
    if settings.trackio:
        yield Trackio(settings.trackio, name, table, resume=step > 0)


@contextmanager
def _leaving(links: Sequence[Link]) -> Iterator[None]:
    """Leave the links at the end, or tell the others why this worker has to leave before."""
    try:
        yield
    except BaseException as fault:
        together = isinstance(fault, Stopped) and fault.together
        for link in links:
            link.close(None if together else _reason(fault))
        raise
    for link in links:
        link.close()


def _reason(fault: BaseException) -> str:
    interrupted = isinstance(fault, KeyboardInterrupt | Stopped)
    return "it was interrupted" if interrupted else str(fault) or type(fault).__name__
