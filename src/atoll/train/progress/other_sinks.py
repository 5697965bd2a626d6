"""Opens what receives a run's events besides the metrics file and the screen."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

from atoll.link.net.elastic_link import ElasticLink
from atoll.link.seat import Seat
from atoll.runs.events import Sink
from atoll.runs.layout import worker_folder
from atoll.runs.sinks import Metrics, TensorBoard, Trackio, WandB
from atoll.settings.config import RunConfig
from atoll.train.progress.alarm import Alarm


def trackers(config: RunConfig, folder: Path, step: int, seat: Seat | None, cleanup: ExitStack) -> Sink:
    """Return a sink for the trackers that the settings name; `step` is where a resumed run continues, or 0."""

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


def alarm(
    config: RunConfig, seat: Seat | None, steps: Callable[[], int], elastic: ElasticLink | None, cleanup: ExitStack
) -> list[Sink]:
    """Return the sink that raises alerts, if the settings name a target.

    Args:
        config: The run's settings.
        seat: This process's place in the run; None if it is the only one.
        steps: Returns the inner steps made so far.
        elastic: The link of an elastic run, which tells who takes part.
        cleanup: Ends it.
    """
    if config.log.alert is None:
        return []
    raised = cleanup.enter_context(Alarm(config, None if seat is None else seat.worker, steps))
    if elastic is not None:
        raised.follow(elastic, steps())
    return [raised]
