"""The folder of one run: its lock, run file, checkpoints and exports, and what a resumed run may change."""

import json
import platform
import shlex
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from textwrap import shorten
from typing import Any, NamedTuple

import torch

from atoll import checkpoint
from atoll._util.disk import locked, write_atomically
from atoll.errors import AtollError, CheckpointError, ConfigError, printable
from atoll.link.seat import Seat
from atoll.runs.events import End, read
from atoll.runs.layout import ABOUT, CHECKPOINTS, METRICS, MODEL, RUN, rank_folder, worker_folder, worker_folders
from atoll.settings import config as run_config
from atoll.settings.config import RunConfig
from atoll.train.data.token_files import TokenData
from atoll.train.model.export import exists, export
from atoll.train.ranks import fsdp
from atoll.train.trainer import Trainer

LOCK = ".lock"
FREE_TO_CHANGE = ("out", "name", "log.", "link.", "train.keep", "train.save_every", "sync.offload")
"""Settings that a resumed run may change: they do not affect what is computed."""


class _RunCheckpoint(NamedTuple):
    """Holds what a checkpoint of a run saves."""

    trainer: dict[str, Any]
    """The trainer's state dict."""
    metrics: int
    """Length of the metrics file when it was saved, bytes."""
    config: str
    """The resolved settings, TOML."""
    tokens: str
    """Name of the folder of its tokens, which says which text and tokenizer."""


class RunFolder:
    """Keeps one run; each worker in its own process has a folder inside, and so has each further rank."""

    def __init__(self, config: RunConfig, seat: Seat | None = None) -> None:
        self.path = Path(config.out).expanduser() / config.name
        self.elastic = config.link.elastic
        """Whether workers come and go: then each continues from its own checkpoint, if it has one."""
        self.of_many = seat is not None and seat.workers > 1 and not self.elastic
        """Whether this worker and those of other processes continue from the same step."""
        self._agrees = self.of_many or (seat is not None and seat.ranks > 1)  # on the step to continue from
        self._run = self.path
        if seat is not None:
            self.path /= worker_folder(seat.worker)
            if seat.rank:
                self.path /= rank_folder(seat.rank)

    @property
    def begun(self) -> bool:
        """Whether a run has begun in this folder."""
        return (self.path / RUN).exists()

    @property
    def finished(self) -> bool:
        """Whether its run is trained to the end."""
        if not self.begun or not exists(self.path / MODEL) or not (self.path / METRICS).exists():
            return False
        ends = [event for event in read(self.path / METRICS) if isinstance(event, End)]
        return bool(ends) and ends[-1].outcome == "finished"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for one process; the system releases the lock if the process dies."""

        def refuse() -> None:
            raise AtollError(f"{self.path} is being trained by another process: wait for it, or choose another name")

        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(self.path / LOCK, refuse))
            except OSError as error:
                raise ConfigError(f"out: the run's folder {self.path} cannot be made: {error.strerror}") from error
            yield

    def clear(self) -> None:
        """Delete a run; AtollError if another process is training it."""
        if not self.begun:
            return
        with self.locked():
            (self.path / RUN).unlink()  # first: if this is interrupted, what is left is not a run
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()

    # ------------------------------------------------------------------ resuming

    def resolve(self, config: RunConfig, resume: bool) -> RunConfig:
        """Return the settings as the run began, if it did; refuse a folder that it cannot have."""
        if self.path != self._run and (self._run / RUN).exists():
            raise ConfigError(
                f"{self._run} holds a run whose workers are all in one process, and this is one of several: "
                "choose another name, or delete it"
            )
        if self.path == self._run and (workers := worker_folders(self.path)):
            raise ConfigError(
                f"{self.path} holds a run whose workers have separate processes ({workers[0].name}): continue it "
                "with --worker K --resume or `atoll launch`, choose another name, or delete it"
            )
        if self.begun:
            if not (resume or self.elastic):
                raise ConfigError(
                    f"{self.path} holds a run already: continue it with --resume, choose another name, or delete it"
                )
            return self.as_begun(config)
        if (self.path / CHECKPOINTS).exists():
            raise ConfigError(
                f"{self.path} holds checkpoints but no {RUN}, so their settings are unknown: "
                "put that file back, or choose another name"
            )
        return config

    def as_begun(self, config: RunConfig) -> RunConfig:
        """Return the settings that the run began with, and those of `config` that are free to change.

        What the run file leaves out or leaves to the machine stays as it was: other threads would give other bits.

        Raises:
            ConfigError: if other settings differ from those that the run began with.
        """
        before = run_config.load(self.path / RUN)
        given = run_config.differences({"before": before, "now": config})
        free = {key: now for key, (_, now) in given if key.startswith(FREE_TO_CHANGE)}
        refused = [
            f"{key} was {old!r}, is {now!r}"
            for key, (old, now) in given
            if key not in free and now is not None and now != "auto"
        ]
        if refused:
            command = "" if self.of_many or self.elastic else f", as `atoll train {self.path} --resume` does"
            raise ConfigError(
                f"{self.path} cannot be resumed with other settings: {'; '.join(refused)}; "
                f"leave them as in {self.path / RUN}{command}, or start another run with another name"
            )
        return before.changed(name=config.name, **free)

    def checkpoints(self) -> tuple[int, ...]:
        """Return the steps of the checkpoints, ascending."""
        return checkpoint.steps(self.path / CHECKPOINTS)

    def restore(self, trainer: Trainer, data: TokenData, step: int | None) -> int | None:
        """Load the newest intact checkpoint, or that of a step, into a trainer; delete those of later steps.

        With several processes and no step in common, none is loaded: all start from the beginning.

        Returns:
            The length of the metrics file when it was saved, bytes; None if there was none to load.

        Raises:
            CheckpointError: if no checkpoint can be read, or it belongs to a run with other settings.
            ConfigError: if the text or the tokenizer has changed.
        """
        root = self.path / CHECKPOINTS
        if not root.exists() or not any(root.iterdir()) or (step is None and self._agrees):
            return None
        with warnings.catch_warnings(record=True) as skipped:
            warnings.simplefilter("always")
            _, state = checkpoint.load(root, step)
        for warning in skipped:
            print(f"warning: {printable(str(warning.message))}", file=sys.stderr)
        if set(state) != set(_RunCheckpoint._fields):
            raise CheckpointError(f"the checkpoint in {root} is not that of a run: it holds {', '.join(state)}")
        saved = _RunCheckpoint(**state)
        before = run_config.parse(saved.config, where=str(root))
        changes = run_config.differences({"before": before, "now": trainer.config})
        bound = [(key, values) for key, values in changes if not key.startswith(FREE_TO_CHANGE)]
        if bound:
            changed = "; ".join(f"{key} was {old!r}, is {now!r}" for key, (old, now) in bound)
            raise CheckpointError(f"the checkpoint in {root} is of a run with other settings: {changed}")
        if saved.tokens != data.folder.name:
            raise ConfigError(
                f"{self.path} cannot be resumed: the text or the tokenizer of data.source has changed since it began; "
                "bring the old text back, or start another run with another name"
            )
        try:
            trainer.load_state_dict(saved.trainer)
        except (RuntimeError, KeyError, ValueError, TypeError) as error:
            if isinstance(error, AtollError):
                raise
            problem = shorten(str(error), 300, placeholder=" ...")
            raise CheckpointError(f"the checkpoint in {root} is not of this model: {problem}") from error
        checkpoint.drop_after(root, trainer.steps)  # the resumed run makes them again
        return saved.metrics

    # ------------------------------------------------------------------ writing

    def begin(self, config: RunConfig, parameters: int, data: TokenData) -> None:
        """Write the run file and the facts about the run, unless it is resumed."""
        if self.begun:
            return
        on_gpu = config.device.startswith("cuda")
        about = {
            "versions": {"python": platform.python_version(), **checkpoint.versions()},
            "seed": config.seed,
            "device": torch.cuda.get_device_name(config.device) if on_gpu else platform.machine(),
            "threads": config.threads,
            "parameters": parameters,
            "vocabulary": data.tokenizer.vocabulary,
            "documents": data.documents,
            "training_tokens": sum(len(file) for file in data.train),
            "command": shlex.join(sys.argv),
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        write_atomically(self.path / ABOUT, (json.dumps(about, indent=2) + "\n").encode())
        write_atomically(self.path / RUN, config.to_toml().encode())  # last: its presence means that the run has begun

    def save(self, trainer: Trainer, metrics: int, data: TokenData) -> None:
        """Write a checkpoint; `metrics` is the length of the metrics file in bytes."""
        config = trainer.config
        state = _RunCheckpoint(trainer.state_dict(), metrics, config.to_toml(), data.folder.name)
        sync = config.synchronisation()
        ahead = sync.ahead if sync and self.of_many else 0
        checkpoint.save(self.path / CHECKPOINTS, trainer.steps, state._asdict(), keep=config.train.keep, ahead=ahead)

    def export(self, trainer: Trainer, data: TokenData, name: str) -> None:
        """Export the outer parameters, replacing an earlier export; all ranks call it and the leader writes."""
        with trainer.outer_model() as model:
            ranks = trainer.ranks
            tensors = None if ranks.hold_whole_model else fsdp.full_state_dict(model, keep=ranks.is_leader)
            if ranks.is_leader:
                export(model, data.tokenizer, self.path / name, tensors)
