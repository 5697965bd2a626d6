"""Sends the events of a run to TensorBoard, W&B and trackio."""

import importlib
import math
import secrets
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from atoll._util.disk import read_limited, write_atomically, writing
from atoll.errors import ConfigError
from atoll.runs.events import Eval, Event, RoundApplied, Sink, Step, utilisation


class Metrics:
    """Passes events to several sinks."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = tuple(sinks)

    def write(self, event: Event) -> None:
        """Passes an event to every sink, in order."""
        for sink in self._sinks:
            sink.write(event)

    def close(self) -> None:
        """Closes every sink, even if one of them fails."""
        with ExitStack() as stack:
            for sink in reversed(self._sinks):
                stack.callback(sink.close)


def scalars(event: Event) -> tuple[int, dict[str, float]]:
    """Returns the inner step of an event and its values by name, as "group/curve".

    A round counts at the step where it was applied: in that order events are written, and checkpoints include them.
    """
    match event:
        case Step():
            where, curves = event.step, _curves_of_workers(event)
            curves |= {"lr": event.lr, "participants": event.participants}
            curves |= {"speed/step_s": event.step_s, "speed/tokens_per_s": event.tokens_per_s}
        case RoundApplied():
            measured: dict[str, float | None] = {
                "outer_norm": event.norm,
                "outer_cosine": event.cosine,
                "outer_members": len(event.members),
            }
            if event.wire_sent or event.wire_received:  # inside one process nothing travels
                measured |= {
                    "round_s": event.done_s - event.opened_s,
                    "round_wait_s": event.waited_s,
                    "round_hidden_s": event.hidden_s,
                    "round_wire_sent": event.wire_sent,
                    "round_wire_received": event.wire_received,
                }
            where, curves = event.applied, {f"{name}/fragment{event.fragment}": v for name, v in measured.items()}
        case Eval():
            where, curves = event.step, {"loss/held_out": event.loss, "anchor_step": event.anchor_step}
        case _:
            return 0, {}
    return where, {name: value for name, value in curves.items() if value is not None and math.isfinite(value)}


def _curves_of_workers(step: Step) -> dict[str, float | None]:
    """Returns one curve per worker and their mean, without the workers of other processes."""
    measured: dict[str, Sequence[float | None]] = {
        name: getattr(step, name) for name in ("loss", "grad_norm", "bytes_sent", "bytes_received", "wait_s")
    }
    measured["utilisation"] = [utilisation(waited_s, step.seconds) for waited_s in step.wait_s]
    if any(step.wire_sent) or any(step.wire_received):
        measured |= {name: getattr(step, name) for name in ("hidden_s", "wire_sent", "wire_received")}
    known = {w for name, values in measured.items() if name != "utilisation" for w, v in enumerate(values) if v}
    curves: dict[str, float | None] = {}
    for name, values in measured.items():
        mine = {f"{name}/worker{worker}": value for worker, value in enumerate(values) if worker in known}
        there = [value for value in mine.values() if value is not None and math.isfinite(value)]
        curves |= {**mine, f"{name}/mean": sum(there) / len(there) if there else None}
    return curves


class TensorBoard:
    """Writes curves to a folder for `tensorboard --logdir`; a resume removes those after `resume_step`."""

    def __init__(self, folder: str | Path, resume_step: int | None = None) -> None:
        self._folder = Path(folder)
        _package("tensorboard", "log.tensorboard = true")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_step is None else resume_step + 1
        with writing(self._folder):
            self._writer = SummaryWriter(str(folder), purge_step=purge, flush_secs=10)

    def write(self, event: Event) -> None:
        """Writes the curves of an event."""
        where, curves = scalars(event)
        with writing(self._folder):
            for name, value in curves.items():
                self._writer.add_scalar(name, value, where)

    def close(self) -> None:
        """Writes what is left."""
        with writing(self._folder):
            self._writer.close()


class WandB:
    """Sends curves and config to a W&B project; keeps the run's id under `folder`, so that a resume continues it."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], folder: str | Path) -> None:
        wandb = _package("wandb", f"log.wandb = {project!r}")
        kept_id = _kept_id(Path(folder) / "wandb" / "id")
        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=kept_id,
                resume="allow",
                config=dict(config),
                dir=str(folder),
                settings=wandb.Settings(console="off"),  # or every frame of a live view would be sent
            )
        except Exception as fault:  # its own errors, the network's, the disk's
            problem = f"log.wandb = {project!r}: W&B did not start ({_first_line(fault)})"
            raise ConfigError(f"{problem}: log in with `wandb login`, or set WANDB_MODE=offline") from fault
        self._first = self._at = self._run.starting_step or 0

    def write(self, event: Event) -> None:
        """Sends the curves of an event, except what a resumed run repeats."""
        where, curves = scalars(event)
        if curves and where >= self._first:
            self._at = max(self._at, where)  # W&B ignores steps that go back
            with self._survived():
                if self._run is not None:
                    self._run.log(curves, step=self._at)

    def close(self) -> None:
        """Sends what is left."""
        with self._survived():
            if self._run is not None:
                self._run.finish()
        self._run = None

    @contextmanager
    def _survived(self) -> Iterator[None]:
        """Warns of a W&B that has failed and sends nothing more: training continues without it."""
        try:
            yield
        except Exception as fault:
            self._run = None
            warnings.warn(f"W&B gets no more events of this run: {_first_line(fault)}", RuntimeWarning, stacklevel=4)


class Trackio:
    """Writes curves and config to a trackio project; `resume` continues the newest run of that name."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], *, resume: bool = False) -> None:
        trackio = _package("trackio", f"log.trackio = {project!r}")
        try:
            self._run = trackio.init(
                project=project, name=name, config=dict(config), resume="allow" if resume else "never", embed=False
            )
        except Exception as fault:
            problem = f"log.trackio = {project!r}: trackio did not start"
            raise ConfigError(f"{problem} ({_first_line(fault)})") from fault

    def write(self, event: Event) -> None:
        """Writes the curves of an event."""
        where, curves = scalars(event)
        if curves:
            self._run.log(curves, step=where)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


def _package(name: str, setting: str) -> ModuleType:
    """Imports an optional package; ConfigError says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as fault:
        problem = f"{setting} needs the package {name}, which cannot be imported ({_first_line(fault)})"
        raise ConfigError(f"{problem}: pip install 'atoll[{name}]'") from fault


def _kept_id(path: Path) -> str:
    """Returns the id in a file, which the first call writes."""
    with writing(path):
        if not path.exists():
            write_atomically(path, secrets.token_hex(8).encode())
        return read_limited(path, 256).decode(errors="replace")


def _first_line(fault: Exception) -> str:
    return next(iter(str(fault).splitlines()), "") or type(fault).__name__
