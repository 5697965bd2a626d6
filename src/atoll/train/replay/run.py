"""Trains an elastic run again in one process, with the recorded members, and compares every anchor."""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from atoll import checkpoint
from atoll.errors import ConfigError, DataError
from atoll.link.base import RoundId
from atoll.outer.presets import Sync
from atoll.runs.events import Event
from atoll.runs.evidence import AnchorMoved
from atoll.runs.layout import RUN, worker_folders
from atoll.settings import config as run_config
from atoll.settings.config import RunConfig
from atoll.train.data.batches import Batches
from atoll.train.folder import FREE_TO_CHANGE
from atoll.train.progress.members import MembershipLog
from atoll.train.replay.link import Board, DiffersError, LifeOverError, RecordedLink, StoppedError
from atoll.train.replay.record import Difference, Process, RunRecord, outcome, read_worker, round_of
from atoll.train.run import prepare, start
from atoll.train.trainer import Trainer


@dataclass(slots=True)
class Replayed:
    """Tells what a replay has found."""

    rounds: int
    """Recorded rounds."""
    workers: int
    difference: Difference | None = None
    """The first round whose anchors differ; None if all are equal."""
    made: set[RoundId] = field(default_factory=set)
    """Rounds that were made again."""
    missed: list[RoundId] = field(default_factory=list)
    """Rounds that the replay did not come to, in order."""


def replay(folders: Sequence[Path], *, check_only: bool = False) -> Replayed:
    """Compare the records of an elastic run with each other, and with the run trained again in one process.

    Args:
        folders: Folders of its workers, or the folder of the run.
        check_only: Compare the records with each other, and train nothing.

    Raises:
        ConfigError: The folders are of different runs, or of one that cannot be trained again with the same bits.
        DataError: Records are missing or damaged.
    """
    config, record = _read(folders)
    found = Replayed(len(record.rounds), len(record.processes), record.difference)
    if not check_only and found.difference is None:
        record.check_whole()
        _check_repeatable(config, record)
        _Replay(config, record, found).run()
    return found


def _read(folders: Sequence[Path]) -> tuple[RunConfig, RunRecord]:
    places = [place for folder in folders for place in worker_folders(folder) or [folder]]
    events: dict[int, list[Event]] = {}
    configs: dict[str, RunConfig] = {}
    for place in places:
        worker, said = read_worker(place)
        if worker in events:
            raise ConfigError(f"{place}: worker {worker} has been given already; give each worker's folder once")
        events[worker] = said
        configs[str(place)] = run_config.load(place / RUN)
    differ = [key for key, _ in run_config.differences(configs) if not key.startswith(FREE_TO_CHANGE)]
    if differ:
        raise ConfigError(f"the folders are of different runs: their {RUN} files differ in {', '.join(differ[:3])}")
    return next(iter(configs.values())), RunRecord(dict(sorted(events.items())))


def _check_repeatable(config: RunConfig, record: RunRecord) -> None:
    """Raise a ConfigError for a run that would not give the same bits in one process."""
    if record.ranks > 1:
        problem = f"a worker of this run had {record.ranks} ranks, whose sums one process takes in another order"
        raise ConfigError(f"{problem}; --check-only compares the records alone", setting="ranks", value=record.ranks)
    if config.device != "cpu":
        problem = f"device: the run trained on {config.device}, whose kernels do not give the same bits every time"
        raise ConfigError(f"{problem}; --check-only compares the records alone", setting="device", value=config.device)


class _Replay:
    """Trains all workers again, each in a thread; they take turns."""

    def __init__(self, config: RunConfig, record: RunRecord, found: Replayed) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        data = prepare(config)
        self._model, self._config = start(config, data)
        self._random = checkpoint.rng_state()
        settings = self._config.train
        assert settings.sequence is not None
        workers = config.sync.workers
        self._batches = Batches(
            data.train,
            workers=workers,
            batch=settings.batch,
            sequence=settings.sequence,
            seed=config.seed,
            device="cpu",
        )
        weights = self._batches.weights() if config.data.weighting == "examples" else [1.0] * workers
        sync = config.synchronisation()
        assert isinstance(sync, Sync)  # others are not elastic
        self._board = Board(record, dict(enumerate(weights)), sync.delay_of(0, workers))
        self._record = record
        self._found = found
        self._errors: list[Exception] = []

    def run(self) -> None:
        """Train until all recorded rounds are made again, or an anchor differs."""
        threads = [threading.Thread(target=self._work, args=(worker,)) for worker in self._record.processes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in self._errors:
            if not isinstance(error, DiffersError):
                raise error
            self._found.difference = error.difference
        self._found.missed = sorted(self._record.rounds.keys() - self._found.made)

    def _work(self, worker: int) -> None:
        """Train one worker: all its processes, one after the other."""
        with self._board.turn:
            processes = self._record.processes[worker]
            saved: dict[int, Any] = {}
            try:
                if self._config.threads:
                    torch.set_num_threads(self._config.threads)
                for number, process in enumerate(processes):
                    later = processes[number + 1 :]
                    self._train(worker, process, later, saved)
            except StoppedError:
                pass
            except Exception as error:
                self._errors.append(error)
                self._board.stopped = True
            finally:
                self._board.passed(worker, float("inf"))

    def _train(self, worker: int, process: Process, later: Sequence[Process], saved: dict[int, Any]) -> None:
        """Train one process of a worker as far as its work has counted; note the states that a later one loads."""
        limit = later[0].joined if later else float("inf")
        link = RecordedLink(self._board, worker, self._config.sync.workers, process, limit)
        checkpoint.set_rng_state(self._random)
        trainer = Trainer(self._config, copy.deepcopy(self._model), self._batches, (), [link])
        trainer.reporter.members = MembershipLog(worker, 1, lambda line: None)
        trainer.reporter.evidence = _Comparison(link, self._found)
        link.before_rejoin = trainer.reporter.write_rounds
        if process.checkpoint is not None:
            if process.checkpoint not in saved:
                problem = f"worker {worker} loaded a checkpoint of step {process.checkpoint}, which it is not known to"
                raise DataError(f"{problem} have saved: its record is not whole; --check-only compares what there is")
            trainer.load_state_dict(copy.deepcopy(saved[process.checkpoint]))
        wanted = _checkpoints(process, later)
        until = self._last_step(worker, process, limit, wanted)
        try:
            trainer.join()
            while trainer.steps < until:
                trainer.step()
                if trainer.steps in wanted:
                    saved[trainer.steps] = copy.deepcopy(trainer.state_dict())
            if process.stretches[-1].finished:
                trainer.finish()
        except LifeOverError:
            pass
        trainer.reporter.write_rounds()

    def _last_step(self, worker: int, process: Process, limit: float, wanted: set[int]) -> int:
        """Return the step to which a process trained, as far as anybody knows."""
        counted = [r.step for r, made in self._record.rounds.items() if worker in (*made.members, *made.between)]
        own = [made.applied for stretch in process.stretches for made in stretch.rounds.values()]
        given = [
            step for step in self._record.boundaries if step < limit and worker in self._record.members_at(step + 1)
        ]
        known = [step for step in (*counted, *given) if process.joined < step <= limit]
        return min(max([*known, *own, *wanted], default=0), self._config.train.steps or 0)


def _checkpoints(process: Process, later: Sequence[Process]) -> set[int]:
    """Return the steps of the checkpoints that a process has saved and a later one of the worker has loaded."""
    found = set()
    for number, loading in enumerate(later):
        between = [other.joined for other in later[:number]]
        step = loading.checkpoint
        if step is not None and process.joined < step and not any(joined < step for joined in between):
            found.add(step)
    return found


class _Comparison:
    """Compares the anchors of a replayed process with those that were recorded."""

    def __init__(self, link: RecordedLink, found: Replayed) -> None:
        self._link = link
        self._found = found

    def write(self, event: Event) -> None:
        """Compare an anchor; DiffersError if it is not the recorded one."""
        if not isinstance(event, AnchorMoved):
            return
        round_id = round_of(event)
        recorded = self._link.recorded(round_id)
        assert recorded is not None  # or the round had not been completed
        if outcome(event) != outcome(recorded):
            who = f"worker {self._link.worker}"
            raise DiffersError(round_id, f"recorded {outcome(recorded)}, replayed by {who} {outcome(event)}")
        self._found.made.add(round_id)

    def close(self) -> None:
        """Do nothing."""
