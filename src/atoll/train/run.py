"""One run from its settings to its model: resolve, connect, agree, build, restore, begin, train, end."""

import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from atoll._util.signals import Interrupts, interruptible
from atoll._util.units import count_text
from atoll.errors import AtollError, ConfigError
from atoll.link.base import Link
from atoll.link.net.departure import STOPPED
from atoll.link.seat import Seat
from atoll.runs.events import Event, Failed, Jsonl, Resumed, Saved, Sink, read
from atoll.runs.evidence import Began
from atoll.runs.layout import ANCHORS, BEST, METRICS, MODEL
from atoll.runs.sinks import Metrics
from atoll.settings.config import RunConfig
from atoll.train.data import token_files
from atoll.train.data.batches import Batches, held_out
from atoll.train.data.token_files import TokenData
from atoll.train.folder import RunFolder
from atoll.train.model.decoder import Decoder
from atoll.train.model.export import load_start
from atoll.train.progress.alarm import alarm
from atoll.train.progress.alert_target import target_of
from atoll.train.progress.line_log import LineLog
from atoll.train.progress.plan_check import plan_check
from atoll.train.progress.text_sample import write_sample
from atoll.train.progress.trackers import trackers
from atoll.train.progress.view import preparing, view
from atoll.train.ranks.connect import connect_links, find_seat
from atoll.train.ranks.control import ControlPlane, CoordinatedStop, Stopped
from atoll.train.ranks.cpu_threads import share_cores
from atoll.train.ranks.elastic import COME_BACK, ElasticControl, connect_elastic
from atoll.train.ranks.worker_ranks import Model, WorkerRanks, connect_ranks
from atoll.train.step.recipe import check_room, device_of, resolve
from atoll.train.trainer import Trainer


@dataclass(frozen=True, slots=True)
class _Process:
    """Holds the connections of one process of a run."""

    folder: RunFolder
    seat: Seat | None
    """Its place among the processes of the run; None if it is the only one."""
    control: ControlPlane
    links: Sequence[Link]
    """The links of its workers, in worker order."""
    interrupts: Interrupts
    cleanup: ExitStack
    """Closed when the run ends, also by an error."""

    @property
    def ranks(self) -> WorkerRanks:
        return self.control.ranks

    def with_lines(self, sink: Sink, past: Sequence[Event] = ()) -> Sink:
        """Let a process with connections to other workers report what they carry."""
        return sink if self.seat is None else LineLog(sink, self.seat, self.ranks, self.control.lines, past)

    def wait_for_all(self, place: str) -> None:
        """Wait for the other workers; Ctrl-C acts at once, since nothing is computed meanwhile."""
        with self.interrupts.raising_at_once():
            self.control.wait_for_all(place)


def train(config: RunConfig, *, worker: int | None = None, resume: bool = False) -> Path:
    """Train a run to its end and return its folder.

    Ctrl-C and SIGTERM save a checkpoint, print how to continue, and exit with status 130. Under torchrun, this process
    is one rank of a worker.

    Args:
        config: The run's settings.
        worker: The only worker to train here, whose folder is returned; None trains all workers in this process.
        resume: Continue from the newest checkpoint.

    Raises:
        ConfigError: if the settings do not fit this machine, the text or a run that is in the folder already.
        LinkError: if another worker is lost or has other settings.
        NonFiniteError: if no finite parameters are left to continue with.
    """
    seat = find_seat(config, worker)
    with connect_ranks(config, seat) as ranks:
        given = ranks.local_config(config)
        folder = RunFolder(given, seat)
        config = folder.resolve(given, resume)
        finished = ranks.from_leader(lambda: folder.finished)
        if finished and not folder.of_many:
            return _already_finished(folder, ranks)
        with folder.locked(), ExitStack() as cleanup:
            process = _connect(config, seat, folder, ranks, cleanup)
            if not _agree(process, given, config, finished):
                return _already_finished(folder, ranks)
            data, trainer = _build(process, config)
            restored = _restore(process, trainer, data)
            log = _begin(process, trainer, data, restored)
            _train(process, trainer, data, log)
            trainer.end("finished")
        if ranks.is_leader and (line := plan_check(trainer.config, trainer.reporter)):
            _print(config, line)
    return folder.path


def _already_finished(folder: RunFolder, ranks: WorkerRanks) -> Path:
    if ranks.is_leader:
        print(f"{folder.path} is finished already: its model is in {folder.path / MODEL}")
    return folder.path


# ---------------------------------------------------------------------- connect, agree


def _connect(
    config: RunConfig, seat: Seat | None, folder: RunFolder, ranks: WorkerRanks, cleanup: ExitStack
) -> _Process:
    """Make the links of this process's workers; they wait for no other worker yet."""
    device_of(config)  # refuses a device before the work of reading text, and a command that is not there
    if config.log.alert is not None:
        target_of(config.log.alert)
    if config.threads:
        torch.set_num_threads(config.threads)
    interrupts = cleanup.enter_context(interruptible())
    links: Sequence[Link]
    control: ControlPlane
    if config.link.elastic and seat is not None:
        link, control = connect_elastic(config, seat, ranks, interrupts)
        links = [link]
    else:
        links, to_others = connect_links(config, seat, ranks)
        if to_others is not None:
            to_others.waiting = replace(to_others.waiting, check_interrupts=interrupts.raise_pending)
        control = ControlPlane(ranks, to_others)
    cleanup.enter_context(_closing(links))
    cleanup.enter_context(ranks.guarded())
    return _Process(folder, seat, control, links, interrupts, cleanup)


def _agree(process: _Process, given: RunConfig, config: RunConfig, finished: bool) -> bool:
    """Compare settings with all other processes; return False if the run has ended on all of them."""
    if process.folder.of_many:
        token_files.check_there(config.data)  # before waiting for the others
    if process.control.all_finished(finished):
        return False
    process.control.agree_on_settings(given)  # not as begun: a worker without a checkpoint has left much out
    _print(config, share_cores(process.control, config))  # before `threads` is resolved
    return True


# ---------------------------------------------------------------------- build


def _build(process: _Process, config: RunConfig) -> tuple[TokenData, Trainer]:
    """Prepare the tokens, make the model and resolve what the run file leaves out."""
    ranks = process.ranks
    data = prepare(config)
    model, config = start(config, data)
    ranks.seed(config.seed)
    settings, workers = config.train, config.sync.workers
    size, sequence = settings.batch, settings.sequence
    assert sequence is not None
    batches = Batches(
        data.train, workers=workers, batch=size, sequence=sequence, seed=config.seed, device=config.device
    )
    rows = max(size // (settings.accumulate * ranks.count), 1)
    evaluated = held_out(data.held_out, sequence=sequence, tokens=settings.eval_tokens, batch=rows)
    trainer = Trainer(config, model, batches, evaluated, process.links, ranks)
    if isinstance(process.control, ElasticControl):
        trainer.reporter.members = process.control.members
        if process.control.elastic is not None:
            process.control.elastic.hooks.on_excluded = trainer.reporter.write_excluded
            process.control.elastic.hooks.log = process.folder.path / METRICS
    return data, trainer


def prepare(config: RunConfig) -> TokenData:
    """Return the tokens of a run, building them first if they are not in the cache."""
    with preparing(config.log.view) as on_progress:
        return token_files.prepare(config.data, workers=config.sync.workers, on_progress=on_progress)


def start(config: RunConfig, data: TokenData) -> tuple[Model, RunConfig]:
    """Return the model that all workers start from, on its device, and the settings with nothing left out."""
    model: Model
    vocabulary = data.tokenizer.vocabulary
    torch.manual_seed(config.seed)
    if config.model.hf is None:
        shape = config.shape(vocabulary)
        check_room(config, shape)
        config = config.changed(**{f"model.{name}": value for name, value in asdict(shape).items()})
        model = Decoder(shape, generator=torch.Generator().manual_seed(config.seed))
    else:
        model = load_start(config.model.hf, weights=config.model.hf_weights)
        if model.vocabulary < vocabulary:
            raise ConfigError(
                f"data.tokenizer: has {vocabulary} tokens, but {config.model.hf} knows {model.vocabulary}: "
                "use the tokenizer.json that belongs to the model"
            )
    parameters = sum(p.numel() for p in model.parameters())
    return model.to(device_of(config)).train(), resolve(config, parameters=parameters, context=model.context)


# ---------------------------------------------------------------------- restore


class _Restored(NamedTuple):
    """Holds what is known of the checkpoint that a process has loaded."""

    step: int
    metrics: int
    """Bytes that the metrics file had when it was saved."""


def _restore(process: _Process, trainer: Trainer, data: TokenData) -> _Restored | None:
    """Load the newest checkpoint that all processes have, if any, and join the other workers."""
    folder, control = process.folder, process.control
    control.agree_on_data(data)
    metrics = folder.restore(trainer, data, control.step_to_resume(folder.checkpoints()))
    restored = None if metrics is None else _Restored(trainer.steps, metrics)
    trainer.join()
    process.interrupts.wait_for_steps()  # not before: until here this process may wait for workers that never come
    return restored


# ---------------------------------------------------------------------- begin


def _begin(process: _Process, trainer: Trainer, data: TokenData, restored: _Restored | None) -> Jsonl | None:
    """Open the sinks, and write the run file and, of several processes, a first checkpoint.

    All that may be refused has been: until here the folder is as it was. The metrics file of a resumed run is cut to
    its length when it was saved.

    Returns:
        The metrics file; None on a rank that is not its worker's leader.
    """
    config, folder = trainer.config, process.folder
    others = [trackers(config, folder.path, trainer.steps, process.seat, process.cleanup)]
    elastic = process.control.elastic if isinstance(process.control, ElasticControl) else None
    others += alarm(config, process.seat, lambda: trainer.steps, elastic, process.cleanup)
    process.cleanup.enter_context(_closing(process.links))  # before the sinks, which may take minutes to close
    _print_notes(config, data, trainer)
    folder.begin(config, trainer.parameters, data)
    log = None
    if process.ranks.is_leader:
        if trainer.reporter.members is not None:
            _open_evidence(trainer, folder, restored, process.cleanup)
        log = _open_log(process, trainer, others, restored.metrics if restored else None)
    elif not process.ranks.hold_whole_model:
        trainer.reporter.sink = process.with_lines(Metrics([]))
    if restored is None and folder.of_many:  # no worker trains on before all have a checkpoint to come back to
        folder.save(trainer, log.position() if log else 0, data)
        process.wait_for_all("begun")
    return log


def _open_log(process: _Process, trainer: Trainer, others: Sequence[Sink], length: int | None) -> Jsonl:
    """Send the trainer's events to the metrics file (of `length` bytes if resumed), the screen and other sinks."""
    folder, cleanup, resumed = process.folder, process.cleanup, length is not None
    log = cleanup.enter_context(closing(Jsonl(folder.path / METRICS, length)))
    past = read(folder.path / METRICS) if resumed else ()
    screen = cleanup.enter_context(closing(view(trainer.config.log.view, past=past)))
    trainer.reporter.sink = process.with_lines(Metrics([log, *others, screen]), past)
    cleanup.push(partial(_write_failure, trainer))
    if log.missing:
        print(f"warning: {folder.path / METRICS} has lost {log.missing} bytes of what happened", file=sys.stderr)
    if log.position() == 0:
        trainer.reporter.write_start(trainer.parameters, trainer.models[0].vocabulary)
    if resumed:
        trainer.reporter.sink.write(Resumed(step=trainer.steps, seconds=trainer.seconds, began=time.time()))
    return log


def _open_evidence(trainer: Trainer, folder: RunFolder, restored: _Restored | None, cleanup: ExitStack) -> None:
    """Let an elastic run write what a replay needs, after what earlier processes of this worker have written."""
    path, (loop,) = folder.path / ANCHORS, trainer.reporter.loops
    file = Jsonl(path, path.stat().st_size if path.exists() else None)
    trainer.reporter.evidence = cleanup.enter_context(closing(file))
    step = restored.step if restored else None
    trainer.reporter.evidence.write(
        Began(worker=loop.link.worker, checkpoint=step, joined=loop.joined_at, ranks=trainer.ranks.count)
    )


def _write_failure(trainer: Trainer, _: object, error: BaseException | None, __: object) -> None:
    """Write the last rounds of a run that fails, and why it does; a second error must not hide the first."""
    with suppress(AtollError, OSError, RuntimeError):
        if trainer.ranks.hold_whole_model:  # else it is collective, and other ranks may have failed
            trainer.reporter.write_rounds()
    if isinstance(error, Exception):  # not a signal, nor an end in order
        with suppress(AtollError, OSError, RuntimeError):
            why = str(error) or type(error).__name__
            trainer.reporter.sink.write(Failed(step=trainer.steps, seconds=trainer.seconds, why=why))


def _print_notes(config: RunConfig, data: TokenData, trainer: Trainer) -> None:
    size = count_text(sum(len(file) for file in data.train))
    epochs = f"this run reads them {trainer.epochs:.2g} times"
    documents = f"{data.documents} document{'' if data.documents == 1 else 's'}"
    _print(config, f"{size} training tokens in {documents}; {epochs}")
    steps, period = config.train.steps or 0, config.sync.used_period
    if config.sync.method not in ("none", "data-parallel") and period > steps:
        why = f"sync.period ({period}) is longer than the run ({steps} steps)"
        _print(config, f"note: {why}: workers synchronise only at its end")


def _print(config: RunConfig, line: str | None) -> None:
    if line is not None and config.log.view != "none":
        print(line, flush=True)


# ---------------------------------------------------------------------- train, end


def _train(process: _Process, trainer: Trainer, data: TokenData, log: Jsonl | None) -> None:
    """Make all steps, with evaluations and checkpoints, and export the model; raise Stopped after a signal."""
    folder, settings = process.folder, trainer.config.train
    assert settings.eval_every is not None and settings.save_every is not None  # resolved
    stop = CoordinatedStop(process.interrupts, process.control, lambda: trainer.steps)

    def save() -> None:
        trainer.check_finite()
        trainer.reporter.write_rounds()
        folder.save(trainer, log.position() if log else 0, data)
        trainer.reporter.sink.write(Saved(step=trainer.steps, seconds=trainer.seconds))

    with process.control.resumable():
        while not trainer.done and not stop.due():
            trainer.step()
            evaluates = trainer.evaluates and trainer.steps % settings.eval_every == 0 and not trainer.done
            if evaluates:
                _evaluate(folder, trainer, data)
            if trainer.steps % settings.save_every == 0 or trainer.done:
                save()
        if not trainer.done:
            if trainer.steps % settings.save_every:
                save()
            _end_stopped(process, trainer, stop)
        _finish(folder, trainer, data)
        process.wait_for_all("finished")  # a worker that has left would not come back for one that has not


def _end_stopped(process: _Process, trainer: Trainer, stop: CoordinatedStop) -> None:
    trainer.end("interrupted")
    command = f"atoll train {shlex.quote(str(process.folder.path))} --resume"
    if process.control.link is not None:
        command = "the same command and --resume, on every worker"
    how = f"continue with: {command}"
    if isinstance(process.control, ElasticControl):
        how = f"the others go on, and {COME_BACK}"
        process.control.leave(STOPPED)
    if process.ranks.is_leader:
        print(f"stopped at step {trainer.steps} and saved; {how}", flush=True)
    raise Stopped(together=stop.together)


def _finish(folder: RunFolder, trainer: Trainer, data: TokenData) -> None:
    """Bring all workers to one model, evaluate it and export it."""
    trainer.finish()
    if trainer.evaluates:
        _evaluate(folder, trainer, data)
    trainer.check_finite()
    folder.export(trainer, data, MODEL)


def _evaluate(folder: RunFolder, trainer: Trainer, data: TokenData) -> None:
    """Measure the outer parameters, keep them if they are the best so far, and sample a text."""
    if trainer.evaluate():
        folder.export(trainer, data, BEST)
    write_sample(trainer, data)


@contextmanager
def _closing(links: Sequence[Link]) -> Iterator[None]:
    """Close the links at the end; after an error, tell the other workers why this one leaves."""
    try:
        yield
    except BaseException as error:
        reason: str | None = str(error) or type(error).__name__
        if isinstance(error, KeyboardInterrupt | Stopped):
            together = isinstance(error, Stopped) and error.together
            reason = None if together else "it was interrupted"
        for link in links:
            link.close(reason)
        raise
    for link in links:
        link.close()
