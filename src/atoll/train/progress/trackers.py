"""Opens the experiment trackers that a run's settings name."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from atoll.link.seat import Seat
from atoll.runs.events import Sink
from atoll.runs.layout import worker_folder
from atoll.runs.sinks import Metrics, TensorBoard, Trackio, WandB
from atoll.settings.config import RunConfig


def trackers(config: RunConfig, folder: Path, step: int, seat: Seat | None, cleanup: ExitStack) -> Sink:
    """Returns a sink for the trackers that the settings name; `step` is where a resumed run continues, or 0."""

    def opened() -> Iterator[Sink]:
        settings, table = config.log, config.model_dump(mode="json")
        name = config.name if seat is None else f"{config.name}-{worker_folder(seat.worker)}"
        if settings.tensorboard:
            yield TensorBoard(folder / "tensorboard", step or None)
        if settings.wandb:
            yield WandB(settings.wandb, name, table, folder)
        if settings.trackio:
            yield Trackio(settings.trackio, name, table, resume=step > 0)

    return cleanup.enter_context(closing(Metrics(list(opened()))))
