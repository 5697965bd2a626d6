"""The folder of one run, and all that keeps a resumed run the same run: its settings, its text, its checkpoints."""

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
from atoll.link.net.seat import Seat
from atoll.runs.events import End, read
from atoll.runs.layout import ABOUT, CHECKPOINTS, METRICS, MODEL, RUN, rank_folder, worker_folder, worker_folders
from atoll.settings import config as run_config
from atoll.settings.config import RunConfig
from atoll.train.data.tokens import TokenData
from atoll.train.model.export import exists, export
from atoll.train.trainer import Trainer

LOCK = ".lock"
FREE_TO_CHANGE = ("out", "name", "log.", "link.", "train.keep", "train.save_every", "sync.offload")
"""Settings that a resumed run may have otherwise, for they change nothing that is computed."""


class Saved(NamedTuple):
    """What a checkpoint of a run holds."""

    trainer: dict[str, Any]
    """The state of the trainer."""
    metrics: int
    """Length of the metrics file at that moment, bytes."""
    config: str
    """All settings, TOML."""
    tokens: str
    """Which text and tokenizer: the name of the folder of its tokens."""


class RunFolder:
    """Where one run is kept; a worker with a process of its own has a folder in it, and so has each further rank."""

    def __init__(self, config: RunConfig, seat: Seat | None = None) -> None:
        self.path = Path(config.out).expanduser() / config.name
        self.of_many = seat is not None and seat.workers > 1
        """Whether other processes have other workers of the run."""
        self._run = self.path
        if seat is not None:
            self.path /= worker_folder(seat.worker)
            if seat.rank:
                self.path /= rank_folder(seat.rank)

    def refuse_mixture(self) -> None:
        """Refuse a run in one process and one with processes of its own in the same folder: reports would mix them."""
        if self.path != self._run and (self._run / RUN).exists():
            raise ConfigError(
                f"{self._run} holds a run whose workers are all in one process, and this is one of several: "
                "choose another name, or delete it"
            )
        if self.path == self._run and (workers := worker_folders(self.path)):
            raise ConfigError(
                f"{self.path} holds a run whose workers have processes of their own ({workers[0].name}): continue it "
                "with --worker K --resume or `atoll launch`, choose another name, or delete it"
            )

    @property
    def begun(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / RUN).exists()

    @property
    def finished(self) -> bool:
        """Whether it has come to its end."""
        if not self.begun or not exists(self.path / MODEL) or not (self.path / METRICS).exists():
            return False
        ends = [event for event in read(self.path / METRICS) if isinstance(event, End)]
        return bool(ends) and ends[-1].outcome == "finished"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the folder for one process; the lock dies with its holder."""

        def refuse() -> None:
            raise AtollError(f"{self.path} is being trained by another process: wait for it, or choose another name")

        with ExitStack() as held:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                held.enter_context(locked(self.path / LOCK, refuse))
            except OSError as fault:
                raise ConfigError(f"out: the run's folder {self.path} cannot be made: {fault.strerror}") from fault
            yield

    def clear(self) -> None:
        """Delete a run, unless it is being trained."""
        if not self.begun:
            return
        with self.locked():
            (self.path / RUN).unlink()  # first: what is left of it, should this be cut short, is no run
            for entry in self.path.iterdir():
                if entry.is_dir():
                    shutil.rmtree(entry)
                elif entry.name != LOCK:
                    entry.unlink()

    # ------------------------------------------------------------------ the same run

    def as_begun(self, config: RunConfig) -> RunConfig:
        """The run as it was begun, with what is free to change; refused if it is given other settings.

        What a run file leaves out, or leaves to the machine, stays as it was: other threads would give other bits.
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
            simply = "" if self.of_many else f", as `atoll train {self.path} --resume` does"
            raise ConfigError(
                f"{self.path} cannot be resumed with other settings: {'; '.join(refused)}; "
                f"leave them as in {self.path / RUN}{simply}, or start another run with another name"
            )
        return before.changed(name=config.name, **free)

    def checkpoints(self) -> tuple[int, ...]:
        """Steps of the states that are there, ascending."""
        return checkpoint.steps(self.path / CHECKPOINTS)

    def last_checkpoint(self, config: RunConfig, data: TokenData, step: int | None = None) -> Saved | None:
        """The newest whole state of this run, or that of a step; None before the first. Refused if of another run.

        Where workers have folders of their own and no step in common, none counts: all begin again.
        """
        root = self.path / CHECKPOINTS
        if not root.exists() or not any(root.iterdir()) or (step is None and self.of_many):
            return None
        with warnings.catch_warnings(record=True) as passed_over:
            warnings.simplefilter("always")
            _, state = checkpoint.load(root, step)
        for warning in passed_over:
            print(f"warning: {printable(str(warning.message))}", file=sys.stderr)
        if set(state) != set(Saved._fields):
            raise CheckpointError(f"the checkpoint in {root} is not that of a run: it holds {', '.join(state)}")
        saved = Saved(**state)
        before = run_config.parse(saved.config, where=str(root))
        changes = run_config.differences({"before": before, "now": config})
        bound = [(key, values) for key, values in changes if not key.startswith(FREE_TO_CHANGE)]
        if bound:
            told = "; ".join(f"{key} was {old!r}, is {now!r}" for key, (old, now) in bound)
            raise CheckpointError(f"the checkpoint in {root} is of a run with other settings: {told}")
        if saved.tokens != data.folder.name:
            raise ConfigError(
                f"{self.path} cannot be resumed: the text or the tokenizer of data.source has changed since it began; "
                "bring the old text back, or start another run with another name"
            )
        return saved

    # ------------------------------------------------------------------ what is written

    def begin(self, config: RunConfig, parameters: int, data: TokenData) -> None:
        """Keep what the run is made of; nothing is written over when it is resumed."""
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
        write_atomically(self.path / RUN, config.to_toml().encode())  # last: its presence says that the run has begun

    def save(self, trainer: Trainer, metrics: int, data: TokenData) -> None:
        """Write a checkpoint; `metrics` is the length of the metrics file, all on disk."""
        config = trainer.config
        state = Saved(trainer.state_dict(), metrics, config.to_toml(), data.folder.name)
        sync = config.synchronisation()
        ahead = sync.ahead if sync and self.of_many else 0
        checkpoint.save(self.path / CHECKPOINTS, trainer.steps, state._asdict(), keep=config.train.keep, ahead=ahead)

    def export(self, trainer: Trainer, data: TokenData, name: str) -> None:
        """Write the outer parameters as a model of its own, in place of one that is there; one rank does, all ask."""
        with trainer.outer_model() as model:
            tensors = trainer.team.tensors(model)
            if trainer.team.leads:
                export(model, data.tokenizer, self.path / name, tensors)

    def forget_after(self, step: int) -> None:
        """Delete checkpoints of later steps: resumed from an earlier one, the run makes those steps again."""
        checkpoint.drop_after(self.path / CHECKPOINTS, step)

    def load(self, trainer: Trainer, saved: Saved) -> None:
        """Bring a trainer to where a checkpoint was written."""
        try:
            trainer.load_state_dict(saved.trainer)
        except (RuntimeError, KeyError, ValueError, TypeError) as fault:
            if isinstance(fault, AtollError):
                raise
            problem = shorten(str(fault), 300, placeholder=" ...")
            where = self.path / CHECKPOINTS
            raise CheckpointError(f"the checkpoint in {where} is not of this model: {problem}") from fault
