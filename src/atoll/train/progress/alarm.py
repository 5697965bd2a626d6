"""Tells somebody when a run stalls, loses a worker, diverges or fails, from a thread: training never waits for it."""

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Final, Self

from atoll.errors import printable
from atoll.link.net.departure import FINISHED
from atoll.link.net.elastic_link import ElasticLink
from atoll.link.net.views import Decision
from atoll.link.seat import Seat
from atoll.runs.events import Event, Sink, Step
from atoll.settings.config import RunConfig
from atoll.train.progress.alert_target import target_of
from atoll.train.progress.incidents import Alert, Incidents

TICK_S: Final = 1.0
"""Seconds between two looks at the clock."""
CLOSE_S: Final = 6.0
"""Seconds for which the end of a run waits for its last alert."""
LONGEST: Final = 2000
"""Most characters of an alert's text."""
_Note = Callable[[Incidents], "list[Alert] | None"]


class Alarm:
    """Takes events as a sink, follows the steps, and sends alerts; a context that an error may end.

    Args:
        config: The run's settings, with `log.alert`.
        worker: The worker of this process; None if it trains all.
        steps: Returns the inner steps made so far; from any thread.

    Raises:
        ConfigError: `log.alert` names a variable or a command that is not there.
    """

    def __init__(self, config: RunConfig, worker: int | None, steps: Callable[[], int]) -> None:
        settings = config.log
        assert settings.alert is not None and config.train.steps is not None
        self._name, self._send = target_of(settings.alert)
        self._run, self._worker, self._last = config.name, worker, config.train.steps
        self._steps = steps
        elastic = worker if config.link.elastic else None
        self._incidents = Incidents(elastic, settings.stall_s, settings.lost_s, time.monotonic())
        self._notes: SimpleQueue[_Note | None] = SimpleQueue()
        self._has_failed_to_send = False
        self._thread = threading.Thread(target=self._watch, name="atoll alarm", daemon=True)

    def follow(self, link: ElasticLink, step: int) -> None:
        """Learns from an elastic link who takes part."""
        training, hooks = list(link.weights(step)), link.hooks
        on_decision, on_lost = hooks.on_decision, hooks.on_lost

        def decided(decision: Decision) -> None:
            on_decision(decision)
            self._note_decision(decision)

        def lost(worker: int, why: str) -> None:
            on_lost(worker, why)
            if not why.startswith(FINISHED):
                now_s = time.monotonic()
                self._notes.put(lambda incidents: incidents.disconnected(worker, why, now_s))

        self._notes.put(lambda incidents: incidents.members(training, training, time.monotonic()))
        hooks.on_decision, hooks.on_lost = decided, lost

    def _note_decision(self, decision: Decision) -> None:
        now_s, view = time.monotonic(), decision.view
        training = [process.seat for process in view.owing]
        everyone = [process.seat for process in view.members]
        if view.over:
            self._notes.put(Incidents.over)
        else:
            self._notes.put(lambda incidents: incidents.members(training, everyone, now_s))

    # ------------------------------------------------------------------ the training thread

    def write(self, event: Event) -> None:
        """Takes an event."""
        if isinstance(event, Step):
            self._notes.put(lambda incidents: incidents.measured(event.step, event.loss))

    def close(self) -> None:
        """Does nothing: the context ends it."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):  # not a signal, nor an end in order
            why, step = str(error) or type(error).__name__, self._steps()
            self._notes.put(lambda incidents: incidents.failed(step, why))
        self._notes.put(None)
        self._thread.join(CLOSE_S)

    # ------------------------------------------------------------------ its own thread

    def _watch(self) -> None:
        next_s = time.monotonic() + TICK_S
        while True:
            found: list[Alert] = []
            with suppress(Empty):
                note = self._notes.get(timeout=max(0.0, next_s - time.monotonic()))
                if note is None:
                    return
                found += note(self._incidents) or []
            if time.monotonic() >= next_s:
                next_s, step = time.monotonic() + TICK_S, self._steps()
                found += self._incidents.look(step, time.monotonic(), done=step >= self._last)
            for alert in found:
                self._tell(alert)

    def _tell(self, alert: Alert) -> None:
        told = {"run": self._run, "worker": self._worker, **asdict(alert), "time": math.floor(time.time())}
        told["text"] = printable(alert.text)[:LONGEST]
        variables = {f"ATOLL_ALERT_{key.upper()}": _shown(value) for key, value in told.items()}
        try:
            self._send(json.dumps(told).encode(), variables)
        except OSError as fault:
            if not self._has_failed_to_send:
                self._has_failed_to_send = True
                problem = f"no alert could be sent to {self._name}: {fault}"
                line = f"warning: {problem}; check log.alert (later failures are not printed)"
                print(printable(line), file=sys.stderr, flush=True)


def _shown(value: object) -> str:
    """Returns a value for a variable: empty for None, 1 and 0 for truth."""
    return "" if value is None else str(int(value)) if isinstance(value, bool) else str(value)


def alarm(
    config: RunConfig, seat: Seat | None, steps: Callable[[], int], elastic: ElasticLink | None, cleanup: ExitStack
) -> list[Sink]:
    """Returns the sink that raises alerts, if the settings name a target.

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
